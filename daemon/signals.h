/* signals.h - SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, for an event loop.
 *
 * Until ns_signals_ready a signal ends the process as if nothing were set up:
 * opening a model takes its time and has nothing to save. From then on signals
 * are noted, wake whoever sleeps on the descriptor, and are taken by the event
 * loop. A second request to stop ends the process there and then, with the
 * status of an interrupted run: what is durable stays so whatever the instant.
 *
 * The state is the process's own, since signals are. Thread: the event loop.
 */
#ifndef NS_DAEMON_SIGNALS_H
#define NS_DAEMON_SIGNALS_H

#include "base/error.h"

enum {
    NS_SIGNAL_STOP = 1,   /* SIGINT or SIGTERM */
    NS_SIGNAL_RELOAD = 2, /* SIGHUP */
    NS_SIGNAL_PAUSE = 4,  /* SIGUSR1 */
    NS_SIGNAL_RESUME = 8, /* SIGUSR2 */
};

/* Until ns_signals_ready SIGUSR1 and SIGUSR2 would end the process, too, and
 * nobody who sends them means that. */
void ns_signals_ignore_pauses(void);

/* `second_status`: what a second request to stop exits with. */
enum ns_status ns_signals_ready(int second_status, struct ns_error *err);

int ns_signals_descriptor(void);

/* What has come since the last call, as a set of the above. */
unsigned ns_signals_take(void);

/* Sleeps until a signal, until `descriptor` is readable, or `wait_ms`. */
void ns_signals_wait(int descriptor, int wait_ms);

#endif
