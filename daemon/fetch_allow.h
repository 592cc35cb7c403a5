/* fetch_allow.h - which web addresses a job may make us talk to.
 *
 * Who may name a URL may make this machine open connections. So a host must be
 * listed, and where its name leads to must be a public address: this network,
 * this machine and their like are refused, unless the range is listed too.
 * The two are asked for at different times, the host before anything is done
 * and the address when the socket is opened, so that a name that leads
 * somewhere else the second time it is looked up gains nothing.
 *
 * Hosts, a comma list: `name`, `name:port`, `*.name` (what lies below it),
 * `*`. Without a port the scheme's own is meant. Networks, a comma list:
 * `address` or `address/bits`.
 *
 * Const once made. Thread: any.
 */
#ifndef NS_DAEMON_FETCH_ALLOW_H
#define NS_DAEMON_FETCH_ALLOW_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/error.h"

struct ns_fetch_allow;

/* NS_REJECT names the option and the entry. `networks` may be NULL. */
enum ns_status ns_fetch_allow_create(const char *hosts, const char *networks,
                                     struct ns_fetch_allow **out,
                                     struct ns_error *err);
void ns_fetch_allow_destroy(struct ns_fetch_allow *allow); /* takes NULL */

/* `host` as in a URL, IPv6 in brackets. */
bool ns_fetch_allow_host(const struct ns_fetch_allow *allow, const char *host,
                         uint32_t port, uint32_t port_of_scheme);
bool ns_fetch_allow_address(const struct ns_fetch_allow *allow,
                            const struct sockaddr *address);

#endif
