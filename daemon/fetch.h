/* fetch.h - pictures by URL, for the jobs of a daemon that allows it.
 *
 *     pool --start--> waiting --lane--> transfers --done--> pool
 *
 * One thread of its own talks to all servers at once, so a slow one holds
 * neither an engine nor a thread of the pool. A job's URLs are fetched side by
 * side in one lane; lanes bound what lies in memory, and no host has more than
 * half of them, so that a server that hangs leaves the rest to others.
 *
 * http and https only, hosts and addresses as in fetch_allow.h, each redirect
 * judged like the first URL (and never from https to http), no proxy, no
 * credentials, no cookies; an end to bytes and to time. What comes is told by
 * its bytes, later: no header is believed.
 *
 * Codes of NS_REJECT: url_denied (not allowed), url_failed (the server says
 * no), image_limit. NS_RETRY with url_failed: may pass. NS_STOP: stopped.
 *
 * Owns:   its thread and connections; a fetch's bytes are the fetch's.
 * Thread: start, wait and stop from any; `done` comes on the fetcher's own and
 *         must not block.
 */
#ifndef NS_DAEMON_FETCH_H
#define NS_DAEMON_FETCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { NS_FETCH_URLS = 16 }; /* of one job */

struct ns_fetch_options {
    const char *hosts, *networks; /* fetch_allow.h; borrowed for create */
    uint64_t max_bytes;           /* of all pictures of a job */
    uint64_t time_ms;             /* for all pictures of a job */
    uint32_t max_redirects;       /* of one URL */
    uint32_t n_lanes;             /* jobs whose pictures are under way */
};

/* The URLs of one job, in the caller's storage, zeroed at first. */
struct ns_fetch {
    uint32_t n;
    struct {
        const char *url; /* borrowed until done */
        void *bytes;     /* owned; NULL until done, and on failure */
        size_t length;
    } item[NS_FETCH_URLS];
    enum ns_status status; /* once done */
    struct ns_error error;
    uint32_t failed; /* which item the error is about */
    void (*done)(struct ns_fetch *fetch);
    void *data; /* the caller's */

    /* The fetcher's, between start and done. */
    struct ns_fetch *next;
    uint64_t host;   /* a hash of the first URL's */
    uint64_t n_bytes;
    int64_t until_ms;
};

struct ns_fetcher;

enum ns_status ns_fetcher_create(const struct ns_fetch_options *options,
                                 struct ns_fetcher **out,
                                 struct ns_error *err);
/* Stops, and waits for the thread. Takes NULL. */
void ns_fetcher_destroy(struct ns_fetcher *fetcher);

/* `fetch` is the fetcher's until `done`, which may come before this returns. */
void ns_fetcher_start(struct ns_fetcher *fetcher, struct ns_fetch *fetch);
/* The same, and waits for the end. */
void ns_fetcher_wait(struct ns_fetcher *fetcher, struct ns_fetch *fetch);
/* All that is under way, and all that comes, ends with NS_STOP. Takes NULL. */
void ns_fetcher_stop(struct ns_fetcher *fetcher);

void ns_fetch_fini(struct ns_fetch *fetch); /* zeroes it; takes zeroes */

#endif
