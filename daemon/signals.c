#include "daemon/signals.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

static volatile sig_atomic_t descriptor = -1, second_status_, n_stops;
static _Atomic unsigned noted;

static void
note(int number)
{
    int saved = errno;
    uint64_t one = 1;

    unsigned what = number == SIGHUP    ? NS_SIGNAL_RELOAD
                    : number == SIGUSR1 ? NS_SIGNAL_PAUSE
                    : number == SIGUSR2 ? NS_SIGNAL_RESUME
                                        : NS_SIGNAL_STOP;

    if (what == NS_SIGNAL_STOP && n_stops++ > 0)
        _exit(second_status_);
    /* Of two that were not taken yet the later one holds. */
    if (what == NS_SIGNAL_PAUSE || what == NS_SIGNAL_RESUME)
        atomic_fetch_and(&noted,
                         ~(unsigned)(NS_SIGNAL_PAUSE | NS_SIGNAL_RESUME));
    atomic_fetch_or(&noted, what);
    if (write(descriptor, &one, sizeof(one)) < 0) {
        /* the counter is full: whoever sleeps is awake already */
    }
    errno = saved;
}

void
ns_signals_ignore_pauses(void)
{
    signal(SIGUSR1, SIG_IGN);
    signal(SIGUSR2, SIG_IGN);
}

enum ns_status
ns_signals_ready(int second_status, struct ns_error *err)
{
    struct sigaction action = { .sa_handler = note, .sa_flags = SA_RESTART };

    second_status_ = second_status;
    descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (descriptor == -1)
        return ns_fail_errno(err, NS_FATAL, "eventfd");
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGINT, &action, NULL) == -1 ||
        sigaction(SIGTERM, &action, NULL) == -1 ||
        sigaction(SIGHUP, &action, NULL) == -1 ||
        sigaction(SIGUSR1, &action, NULL) == -1 ||
        sigaction(SIGUSR2, &action, NULL) == -1)
        return ns_fail_errno(err, NS_FATAL, "sigaction");
    return NS_OK;
}

int
ns_signals_descriptor(void)
{
    return descriptor;
}

unsigned
ns_signals_take(void)
{
    uint64_t count;

    if (read(descriptor, &count, sizeof(count)) < 0) {
        /* nothing came */
    }
    return atomic_exchange(&noted, 0);
}

void
ns_signals_wait(int other, int wait_ms)
{
    struct pollfd fds[2] = { { descriptor, POLLIN, 0 }, { other, POLLIN, 0 } };

    poll(fds, 2, wait_ms); /* why it returns does not matter */
}
