#include "daemon/notify.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <time.h>

void
ns_notify_init(struct ns_notify *notify)
{
    uint64_t usec = 0;

    *notify = (struct ns_notify){ 0 };
    if (sd_watchdog_enabled(0, &usec) > 0)
        notify->interval_ms = usec / 2000;
}

/* Newlines separate assignments in the protocol, so none may stand in one. */
static void
status_line(const char *front, const char *format, va_list ap)
{
    char status[256];

    vsnprintf(status, sizeof(status), format, ap);
    for (char *at = status; *at; at++)
        if (*at == '\n')
            *at = ' ';
    sd_notifyf(0, "%sSTATUS=%s", front, status);
}

void
ns_notify_ready(const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    status_line("READY=1\n", format, ap);
    va_end(ap);
}

void
ns_notify_status(const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    status_line("", format, ap);
    va_end(ap);
}

void
ns_notify_reloading(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu",
               (unsigned long long)now.tv_sec * 1000000 +
                   (unsigned long long)now.tv_nsec / 1000);
}

void
ns_notify_stopping(void)
{
    sd_notify(0, "STOPPING=1");
}

void
ns_notify_extend(uint64_t ms)
{
    sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%llu", (unsigned long long)ms * 1000);
}

bool
ns_notify_watchdog(struct ns_notify *notify, uint64_t now_ms, bool healthy)
{
    if (notify->interval_ms == 0 || !healthy ||
        now_ms - notify->fed_ms < notify->interval_ms)
        return false;
    notify->fed_ms = now_ms;
    sd_notify(0, "WATCHDOG=1");
    return true;
}
