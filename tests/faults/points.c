/* points.c - fault points, linked around the daemon as it ships.
 *
 * BUILD/tests/nightshiftd is made of the same objects as BUILD/nightshiftd; the
 * linker's --wrap leads the calls named in the Makefile through here. So the
 * shipped daemon holds no fault point, and no variable of its environment can
 * hurt it; a test reads the binary for that.
 *
 *     NS_FAULT=POINT:ACTION[@N][,POINT:ACTION[@N]...]
 *     NS_FAULT=SEED:PROBABILITY
 *
 * POINT    after_receive, before_commit, after_commit (of an offset), and of
 *          each operation OP of the store
 *              before_OP   nothing is asked yet
 *              sent_OP     asked; whether it happens is the server's affair
 *              unread_OP   the answer lies in the socket, unread
 *              after_OP    answered
 *          OP: claim, heartbeat, checkpoint, finish, refuse, give_back.
 * ACTION   kill        as kill -9 would
 *          stop        as SIGSTOP would: someone else must wake it
 *          delay=MS
 *          lost        before_OP: the store is said to be away; sent_OP and
 *                      unread_OP: the session is cut, the answer lost
 * N        at the n-th time only (counted from 1); without it, each time.
 * SEED     each point is on in one run of four, as the seed has it, and then
 *          acts with PROBABILITY by a kill, a delay or a cut.
 *
 * NS_CLOCK_MS=N moves the clock of the host, as the daemon reads it, by N.
 *
 * What happens is said on standard error first. A list that can not be read
 * ends the process with 64: a test must not pass because of a slip.
 */
#include <inttypes.h>
#include <libpq-fe.h>
#include <librdkafka/rdkafka.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/ends.h"

enum when { BEFORE, SENT, UNREAD, AFTER, N_WHENS };
enum operation {
    CLAIM, HEARTBEAT, CHECKPOINT, FINISH, REFUSE, GIVE_BACK,
    RECEIVE, /* after only */
    COMMIT,  /* before and after */
    N_OPERATIONS,
};
enum action { NOTHING, KILL, STOP, DELAY, LOST };

static const char *const when_names[] = { "before", "sent", "unread", "after" };
static const char *const operation_names[] = {
    "claim",  "heartbeat", "checkpoint", "finish",
    "refuse", "give_back", "receive",    "commit",
};
static const char *const action_names[] = { "nothing", "kill", "stop", "delay",
                                            "lost" };

static struct {
    struct fault {
        enum action action;
        unsigned delay_ms;
        unsigned nth; /* 0: each time */
        _Atomic unsigned seen;
    } point[N_WHENS][N_OPERATIONS];
    double probability; /* 0: by name */
    _Atomic uint64_t random;

    /* What is wrapped: one source and one store a process. */
    struct ns_source_ops source;
    struct ns_store_ops store;
    const struct ns_source_ops *real_source;
    const struct ns_store_ops *real_store;
} faults;

/* Of the sink thread, while it is in an operation. */
static _Thread_local enum operation under_way = N_OPERATIONS;

static void __attribute__((noreturn))
misread(const char *text)
{
    fprintf(stderr, "NS_FAULT: cannot read \"%s\"\n", text);
    _exit(64);
}

static struct fault *
find_point(const char *name, size_t n)
{
    char made[32];

    for (int when = 0; when < N_WHENS; when++)
        for (int operation = 0; operation < N_OPERATIONS; operation++) {
            if ((operation == RECEIVE && when != AFTER) ||
                (operation == COMMIT && when != BEFORE && when != AFTER))
                continue;
            snprintf(made, sizeof(made), "%s_%s", when_names[when],
                     operation_names[operation]);
            if (strlen(made) == n && strncmp(made, name, n) == 0)
                return &faults.point[when][operation];
        }
    return NULL;
}

static bool
can_be_lost(const struct fault *fault)
{
    for (int when = BEFORE; when <= UNREAD; when++)
        if (fault >= faults.point[when] && fault < faults.point[when] + RECEIVE)
            return true;
    return false;
}

static void
read_one(char *text)
{
    char *action = strchr(text, ':'), *nth = strchr(text, '@'), *end;
    struct fault *fault;

    if (!action || !(fault = find_point(text, (size_t)(action - text))))
        misread(text);
    action++;
    if (nth) {
        *nth++ = '\0';
        fault->nth = (unsigned)strtoul(nth, &end, 10);
        if (*end || fault->nth == 0)
            misread(nth);
    }
    if (strncmp(action, "delay=", 6) == 0) {
        fault->delay_ms = (unsigned)strtoul(action + 6, &end, 10);
        if (*end)
            misread(action);
        fault->action = DELAY;
        return;
    }
    for (enum action i = KILL; i <= LOST; i++)
        if (i != DELAY && strcmp(action, action_names[i]) == 0)
            fault->action = i;
    if (fault->action == NOTHING ||
        (fault->action == LOST && !can_be_lost(fault)))
        misread(action);
}

static uint64_t
draw(void)
{
    uint64_t z = atomic_fetch_add(&faults.random, 0x9e3779b97f4a7c15u);

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u; /* splitmix64 */
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void
read_faults(void)
{
    const char *given = getenv("NS_FAULT");
    char *text, *end, *save = NULL;

    if (!given || !*given)
        return;
    atomic_store(&faults.random, strtoull(given, &end, 10));
    if (end != given && *end == ':') {
        faults.probability = strtod(end + 1, &end);
        if (*end || faults.probability <= 0 || faults.probability > 1)
            misread(given);
        for (int when = 0; when < N_WHENS; when++)
            for (int i = 0; i < N_OPERATIONS; i++) {
                struct fault *fault = &faults.point[when][i];
                uint64_t drawn = draw();

                if (drawn % 4 == 0)
                    fault->action =
                        (enum action[]){ KILL, DELAY, LOST }[drawn / 4 % 3];
                if (fault->action == LOST && !can_be_lost(fault))
                    fault->action = DELAY;
            }
        return;
    }
    text = strdup(given);
    if (!text)
        abort();
    for (char *at = strtok_r(text, ",", &save); at;
         at = strtok_r(NULL, ",", &save))
        read_one(at);
    free(text);
}

/* True where the answer is to be taken for lost. */
static bool
pass_point(enum when when, enum operation operation)
{
    struct fault *fault = &faults.point[when][operation];
    unsigned delay_ms = fault->delay_ms;
    char line[96];
    int n;

    if (fault->action == NOTHING)
        return false;
    if (faults.probability > 0) {
        if ((double)(draw() >> 11) >= faults.probability * 0x1p53)
            return false;
        delay_ms = (unsigned)(draw() % 1500);
    } else if (atomic_fetch_add(&fault->seen, 1) + 1 != fault->nth &&
               fault->nth != 0) {
        return false;
    }
    n = snprintf(line, sizeof(line), "fault point=%s_%s action=%s\n",
                 when_names[when], operation_names[operation],
                 action_names[fault->action]);
    if (write(STDERR_FILENO, line, (size_t)n) != n)
        _exit(64);
    if (fault->action == KILL)
        kill(getpid(), SIGKILL);
    if (fault->action == STOP)
        kill(getpid(), SIGSTOP);
    if (fault->action == DELAY)
        usleep(delay_ms * 1000);
    return fault->action == LOST;
}

/* --- around the store and the source ----------------------------------- */

#define WRAP(name, upper, item)                                             \
    static enum ns_status wrap_##name(struct ns_store *store,               \
                                      struct item *items, size_t n,         \
                                      struct ns_error *err)                 \
    {                                                                       \
        enum ns_status status;                                              \
                                                                            \
        if (pass_point(BEFORE, upper))                                      \
            return ns_fail(err, NS_RETRY, "a fault before " #name);         \
        under_way = (upper);                                                \
        status = faults.real_store->name(store, items, n, err);             \
        under_way = N_OPERATIONS;                                           \
        if (status == NS_OK)                                                \
            (void)pass_point(AFTER, upper);                                 \
        return status;                                                      \
    }

WRAP(claim, CLAIM, ns_claim)
WRAP(heartbeat, HEARTBEAT, ns_heartbeat)
WRAP(checkpoint, CHECKPOINT, ns_checkpoint)
WRAP(finish, FINISH, ns_finished)
WRAP(refuse, REFUSE, ns_refusal)
WRAP(retry, GIVE_BACK, ns_give_back)

static enum ns_status
wrap_poll(struct ns_source *source, int timeout_ms, struct ns_message *out,
          struct ns_error *err)
{
    enum ns_status status =
        faults.real_source->poll(source, timeout_ms, out, err);

    if (status == NS_OK && out->kind == NS_MESSAGE_JOB)
        (void)pass_point(AFTER, RECEIVE);
    return status;
}

enum ns_status
__real_ns_ends_open(const struct ns_options *options, const char *model_rev,
                    const char *engine_rev, struct ns_ends *ends,
                    struct ns_error *err);
enum ns_status
__wrap_ns_ends_open(const struct ns_options *options, const char *model_rev,
                    const char *engine_rev, struct ns_ends *ends,
                    struct ns_error *err);
enum ns_status
__wrap_ns_ends_open(const struct ns_options *options, const char *model_rev,
                    const char *engine_rev, struct ns_ends *ends,
                    struct ns_error *err)
{
    enum ns_status status =
        __real_ns_ends_open(options, model_rev, engine_rev, ends, err);

    if (status != NS_OK)
        return status;
    read_faults();
    faults.real_source = ends->source->ops;
    faults.source = *ends->source->ops;
    faults.source.poll = wrap_poll;
    ends->source->ops = &faults.source;
    faults.real_store = ends->store->ops;
    faults.store = *ends->store->ops;
    faults.store.claim = wrap_claim;
    faults.store.heartbeat = wrap_heartbeat;
    faults.store.checkpoint = wrap_checkpoint;
    faults.store.finish = wrap_finish;
    faults.store.refuse = wrap_refuse;
    faults.store.retry = wrap_retry;
    ends->store->ops = &faults.store;
    return NS_OK;
}

/* --- in the middle of a statement -------------------------------------- */

int
__real_PQpipelineSync(PGconn *conn);
int
__wrap_PQpipelineSync(PGconn *conn);
int
__wrap_PQpipelineSync(PGconn *conn)
{
    int done = __real_PQpipelineSync(conn);
    struct pollfd answer = { .fd = PQsocket(conn), .events = POLLIN };
    char thrown_away[4096];

    if (done != 1 || under_way == N_OPERATIONS ||
        (faults.point[SENT][under_way].action == NOTHING &&
         faults.point[UNREAD][under_way].action == NOTHING))
        return done;
    while (PQflush(conn) == 1)
        usleep(1000);
    if (pass_point(SENT, under_way))
        shutdown(answer.fd, SHUT_RDWR);
    if (faults.point[UNREAD][under_way].action != NOTHING)
        (void)poll(&answer, 1, 5000);
    if (pass_point(UNREAD, under_way)) {
        while (recv(answer.fd, thrown_away, sizeof(thrown_away),
                    MSG_DONTWAIT) > 0)
            ;
        shutdown(answer.fd, SHUT_RDWR);
    }
    return done;
}

/* --- around an offset -------------------------------------------------- */

rd_kafka_resp_err_t
__real_rd_kafka_commit(rd_kafka_t *client,
                       const rd_kafka_topic_partition_list_t *list, int async);
rd_kafka_resp_err_t
__wrap_rd_kafka_commit(rd_kafka_t *client,
                       const rd_kafka_topic_partition_list_t *list, int async);
rd_kafka_resp_err_t
__wrap_rd_kafka_commit(rd_kafka_t *client,
                       const rd_kafka_topic_partition_list_t *list, int async)
{
    rd_kafka_resp_err_t failed;

    (void)pass_point(BEFORE, COMMIT);
    /* Waited for where the point behind it is of interest. */
    failed = __real_rd_kafka_commit(
        client, list, async && faults.point[AFTER][COMMIT].action == NOTHING);
    if (!failed)
        (void)pass_point(AFTER, COMMIT);
    return failed;
}

/* --- a clock that is wrong --------------------------------------------- */

int
__real_clock_gettime(clockid_t clock, struct timespec *out);
int
__wrap_clock_gettime(clockid_t clock, struct timespec *out);
int
__wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    const char *shift = clock == CLOCK_REALTIME ? getenv("NS_CLOCK_MS") : NULL;
    int status = __real_clock_gettime(clock, out);

    if (shift)
        out->tv_sec += strtol(shift, NULL, 10) / 1000;
    return status;
}
