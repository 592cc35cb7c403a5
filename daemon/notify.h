/* notify.h - what systemd is told: ready, reloading, stopping, alive.
 *
 * All do nothing when systemd did not start us (no NOTIFY_SOCKET). The
 * watchdog is fed from the event loop, and only while every thread that must
 * move has moved within its own limit: the caller decides, this only counts
 * the time between two feedings.
 *
 * Thread: the event loop.
 */
#ifndef NS_DAEMON_NOTIFY_H
#define NS_DAEMON_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

struct ns_notify {
    uint64_t interval_ms; /* half of WatchdogSec; 0: no watchdog asked for */
    uint64_t fed_ms;      /* monotonic */
};

void ns_notify_init(struct ns_notify *notify);

void ns_notify_ready(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
void ns_notify_status(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
/* Type=notify on systemd 252: RELOADING=1, then ready again. */
void ns_notify_reloading(void);
void ns_notify_stopping(void);
/* Asks for `ms` more before systemd gives up on start or stop. */
void ns_notify_extend(uint64_t ms);

/* Feeds the watchdog when it is time and `healthy`. True when it was fed. */
bool ns_notify_watchdog(struct ns_notify *notify, uint64_t now_ms,
                        bool healthy);

#endif
