/* http.h - the web server: metrics, health, a status page.
 *
 *     GET /             one page, self-contained
 *     GET /status.json  what it shows, with half an hour of history
 *     GET /metrics      Prometheus, text format 0.0.4
 *     GET /healthz      200 or 503: every thread moves in its time
 *     GET /readyz       200 or 503: jobs are taken in
 *
 * Serves from one thread of its own and never asks the pipeline: it reads
 * atomics, the board, and what the event loop published last. So a client can wait for
 * the daemon's numbers, and never the daemon for a client. If the event loop
 * publishes nothing for half a minute, it hangs, and /healthz says so.
 *
 * A client gets one answer a connection and a few seconds for it; so many at a
 * time, the others wait in the kernel's queue. No login: it is for loopback,
 * and serves no id and no text of any job.
 *
 * Owns:    socket, thread, history. Borrows: metrics, options, until close.
 * Thread:  open and close as any; publish from one thread.
 */
#ifndef NS_DAEMON_HTTP_H
#define NS_DAEMON_HTTP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "daemon/board.h"
#include "daemon/metrics.h"

struct ns_http_options {
    const char *listen; /* "127.0.0.1:9464", "[::1]:9464", "host:0" */
    const struct ns_metrics *metrics;
    struct ns_board *board; /* NULL: no jobs are shown */
    const char *version;
    uint32_t max_clients; /* 0: 64 */
    int64_t client_ms;    /* a connection's whole life; 0: 5 s */
    int64_t silent_ms;    /* without a publish; 0: 30 s */
};

/* Reasons are one line of fixed words: no name of a host, a user or a job. */
enum ns_http_phase {
    NS_HTTP_LOADING,  /* the model; nothing else is looked at */
    NS_HTTP_OPENING,  /* source and store */
    NS_HTTP_WAITING,  /* one of them is out of reach */
    NS_HTTP_WORKING,
    NS_HTTP_DRAINING,
};

struct ns_http_state { /* what the event loop knows */
    enum ns_http_phase phase;
    bool healthy;
    const char *model, *model_revision; /* borrowed until close; or NULL */
    bool has_kafka;
    struct ns_kafka_state kafka; /* without the trouble */
};

struct ns_http;

/* Listens, and says "loading" until the first publish. NS_RETRY: the address
 * is in use. NS_REJECT: it is none, or not ours. */
enum ns_status ns_http_open(const struct ns_http_options *options,
                            struct ns_http **out, struct ns_error *err);
uint16_t ns_http_port(const struct ns_http *http);
bool ns_http_is_local(const struct ns_http *http); /* loopback alone */

/* Copies. To be called at least once a second while not LOADING. */
void ns_http_publish(struct ns_http *http, const struct ns_http_state *state);

void ns_http_close(struct ns_http *http); /* takes NULL; waits for no client */

#endif
