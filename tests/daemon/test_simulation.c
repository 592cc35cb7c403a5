/* The states of a job (daemon/jobstate.h) and the ledger of a partition, run
 * under models of a broker, a store and up to three daemons, through histories
 * drawn from a seed: crashes, sleeps, rebalances, lost answers, stops, lost
 * stores, a store that is away for an hour, duplicates and conflicting messages.
 * A step is a second: so leases and outages last as long as they do.
 *
 *     NS_HISTORIES=N                       how many (2,000)
 *     NS_HISTORY=SEED:MESSAGES:DAEMONS:STEPS:FAULTS   this one, told in full
 *
 * A history that fails is made smaller as long as it fails, and printed in the
 * form above. That the judge sees what he must is tested with machines that
 * are wrong in one place each.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/ledger.h"
#include "daemon/jobstate.h"

enum {
    MOST_MESSAGES = 24,
    MOST_DAEMONS = 3,
    PARTITIONS = 2,
    WINDOW = 6,
    LEASE = 60, /* steps, of a second */
    HOUR = 3600,
    LIMIT = 3,  /* of stalls and of retries */
    REST = 60000, /* steps without faults in which all must come to an end */
};

enum fault { CRASH = 1, SLEEP = 2, REBALANCE = 4, LOSE_ANSWER = 8, STOP = 16,
             LOSE_STORE = 32, OUTAGE = 64, ALL_FAULTS = 127 };

/* Wrong in one place each. */
enum mistake {
    NONE,
    NO_FENCE,             /* the store writes for whoever comes */
    ACK_BEFORE_FINISH,    /* done is taken for durable */
    FENCED_IS_STORED,     /* a fenced result is acknowledged */
    LOST_IS_STORED,       /* so is one whose store was lost */
    GIVEN_BACK_IS_FINAL,  /* so is a job given back */
    PARKED_IS_FORGOTTEN,  /* what waits is let go for good */
    HIGHEST_OFFSET,       /* what is committed is the highest that is done */
    LEASE_IS_PATIENCE,    /* a store that is away for longer than a lease is
                           * no longer waited for, but taken for done */
    N_MISTAKES,
};

struct history {
    uint64_t seed;
    unsigned n_messages, n_daemons, n_steps, faults;
    enum mistake mistake;
    bool tell;
};

struct message {
    unsigned job, body;
    bool bad; /* not to be parsed */
    bool dead_letter;
};

struct row {
    enum { ABSENT, RUNNING, RETRY, FINAL } state;
    unsigned body, owner, fence, stalls, retries, blocks, blocks_seen;
    unsigned lease_until, not_before;
    unsigned n_writes; /* of the final row */
};

struct work {
    bool used, fenced;
    unsigned message, partition, epoch, fence, due;
    struct ns_jobstate state;
    enum ns_job_action action; /* to be done next */
    enum ns_job_event lost;    /* what was answered, but not heard */
};

struct daemon {
    bool alive, stopping, store_lost;
    unsigned sleeps_until, owner /* new at each start */, known_fence;
    struct work work[WINDOW];
};

struct partition {
    unsigned first, n;  /* its messages */
    int holder;         /* daemon, or -1 */
    unsigned epoch, next, committed;
    struct ns_ledger *ledger; /* the holder's */
    unsigned highest_done;
};

struct world {
    const struct history *history;
    uint64_t random;
    unsigned now, fences, owners;
    struct message message[MOST_MESSAGES];
    struct row row[MOST_MESSAGES];
    struct daemon daemon[MOST_DAEMONS];
    struct partition partition[PARTITIONS];
    bool calm; /* no more faults */
    unsigned calm_at;
    unsigned away_until, away_since; /* the store, for all */
    const char *broken; /* what must not happen, and did */
    unsigned n_faults, n_hours; /* without a store */
};

static uint32_t
draw(struct world *world, uint32_t below)
{
    world->random = world->random * 6364136223846793005u +
                    1442695040888963407u;
    return (uint32_t)(((world->random >> 32) * below) >> 32);
}

static bool
happens(struct world *world, enum fault fault, uint32_t one_in)
{
    if (world->calm || !(world->history->faults & fault) ||
        draw(world, one_in) != 0)
        return false;
    world->n_faults++;
    return true;
}

static void
broke(struct world *world, const char *what)
{
    if (!world->broken)
        world->broken = what;
}

#define TELL(world, ...)                                      \
    do {                                                      \
        if ((world)->history->tell) {                         \
            printf("# %5u ", (world)->now);                   \
            printf(__VA_ARGS__);                              \
            printf("\n");                                     \
        }                                                     \
    } while (0)

/* --- the store --------------------------------------------------------- */

static bool
is_away(const struct world *world)
{
    return world->now < world->away_until;
}

static void
write_final(struct world *world, struct row *row)
{
    row->state = FINAL;
    if (++row->n_writes > 1)
        broke(world, "a final row was written twice");
}

static enum ns_job_event
store_claim(struct world *world, struct daemon *daemon, struct work *work)
{
    const struct message *message = &world->message[work->message];
    struct row *row = &world->row[message->job];
    bool taken_back = row->state == RUNNING && row->owner == daemon->owner &&
                      row->fence > daemon->known_fence;

    if (row->state != ABSENT && row->body != message->body)
        return NS_ON_CLAIM_CONFLICT;
    if (row->state == FINAL)
        return NS_ON_CLAIM_FINAL;
    if (!taken_back &&
        ((row->state == RUNNING && row->lease_until >= world->now) ||
         (row->state == RETRY && row->not_before > world->now)))
        return NS_ON_CLAIM_WAIT;
    if (!taken_back && row->state != ABSENT &&
        (row->retries >= LIMIT ||
         (row->stalls >= LIMIT && row->blocks <= row->blocks_seen))) {
        row->fence = ++world->fences;
        write_final(world, row);
        return NS_ON_CLAIM_FINAL;
    }
    if (row->state == RETRY)
        row->stalls = 0;
    else if (row->state == RUNNING && !taken_back)
        row->stalls = row->blocks > row->blocks_seen ? 1 : row->stalls + 1;
    row->blocks_seen = row->blocks;
    row->state = RUNNING;
    row->body = message->body;
    row->owner = daemon->owner;
    row->fence = work->fence = ++world->fences;
    row->lease_until = world->now + LEASE;
    return NS_ON_CLAIM_RUN;
}

static bool
holds(const struct row *row, const struct work *work)
{
    return row->state == RUNNING && row->fence == work->fence;
}

static enum ns_job_event
store_finish(struct world *world, struct work *work)
{
    struct row *row = &world->row[world->message[work->message].job];

    if (holds(row, work) || world->history->mistake == NO_FENCE) {
        write_final(world, row);
        return NS_ON_STORED;
    }
    return row->state == FINAL && row->fence == work->fence ? NS_ON_STORED
                                                            : NS_ON_FENCED;
}

static enum ns_job_event
store_give_back(struct world *world, struct work *work)
{
    struct row *row = &world->row[world->message[work->message].job];

    if (row->state == RETRY && row->fence == work->fence)
        return NS_ON_STORED; /* asked again */
    if (!holds(row, work))
        return NS_ON_FENCED;
    row->state = RETRY;
    row->not_before = world->now + draw(world, 40);
    if (!work->state.stopping && !work->fenced)
        row->retries++;
    return NS_ON_STORED;
}

/* What the store does, and what it answers. */
static enum ns_job_event
ask(struct world *world, struct daemon *daemon, struct work *work)
{
    switch (work->action) {
    case NS_DO_CLAIM:
        return store_claim(world, daemon, work);
    case NS_DO_FINISH:
        return store_finish(world, work);
    case NS_DO_GIVE_BACK:
        return store_give_back(world, work);
    default: /* a dead letter has the message's position for its key */
        world->message[work->message].dead_letter = true;
        return NS_ON_STORED;
    }
}

static enum ns_job_event
ask_until_heard(struct world *world, struct daemon *daemon, struct work *work)
{
    enum ns_job_event event;

    if (daemon->store_lost)
        return NS_ON_LOST;
    if (is_away(world))
        return world->history->mistake == LEASE_IS_PATIENCE &&
                       world->now - world->away_since > LEASE &&
                       work->action == NS_DO_FINISH
                   ? NS_ON_STORED
                   : NS_N_EVENTS;
    event = ask(world, daemon, work);
    if (happens(world, LOSE_ANSWER, 12))
        return NS_N_EVENTS; /* the same is asked again */
    if (event == NS_ON_CLAIM_RUN) {
        daemon->known_fence = work->fence;
        work->fenced = false;
    }
    return event;
}

/* --- the broker -------------------------------------------------------- */

static void
assign(struct world *world, struct partition *partition, int holder)
{
    struct ns_error err;

    ns_ledger_destroy(partition->ledger);
    partition->ledger = NULL;
    partition->holder = holder;
    partition->epoch++;
    partition->next = partition->highest_done = partition->committed;
    if (ns_ledger_create(64, partition->committed, &partition->ledger, &err) !=
        NS_OK)
        abort();
    TELL(world, "partition %d to daemon %d from %u",
         (int)(partition - world->partition), holder, partition->committed);
}

static bool
has_outcome(const struct world *world, unsigned message)
{
    const struct message *m = &world->message[message];

    return m->dead_letter || (!m->bad && world->row[m->job].state == FINAL &&
                              world->row[m->job].body == m->body);
}

static void
commit(struct world *world, struct partition *partition)
{
    unsigned to = (unsigned)ns_ledger_watermark(partition->ledger);

    if (world->history->mistake == HIGHEST_OFFSET)
        to = partition->highest_done;
    for (unsigned i = partition->committed; i < to; i++)
        if (!has_outcome(world, partition->first + i))
            broke(world, "an offset was committed before its outcome stood");
    if (to > partition->committed)
        partition->committed = to;
}

static void
acknowledge(struct world *world, struct work *work)
{
    struct partition *partition = &world->partition[work->partition];
    unsigned offset = work->message - partition->first;

    if (!has_outcome(world, work->message))
        broke(world, "a message was acknowledged without an outcome");
    if (work->epoch != partition->epoch)
        return; /* someone else answers for it now */
    (void)ns_ledger_done(partition->ledger, offset);
    if (offset + 1 > partition->highest_done)
        partition->highest_done = offset + 1;
}

static void
receive(struct world *world, int at)
{
    struct daemon *daemon = &world->daemon[at];
    unsigned which = draw(world, PARTITIONS);
    struct partition *partition = &world->partition[which];
    struct work *work = daemon->work;

    while (work < daemon->work + WINDOW && work->used)
        work++;
    if (work == daemon->work + WINDOW || partition->holder != at ||
        partition->next == partition->n || daemon->stopping)
        return;
    *work = (struct work){ .used = true,
                           .message = partition->first + partition->next,
                           .partition = which,
                           .epoch = partition->epoch };
    if (!ns_ledger_receive(partition->ledger, partition->next++))
        broke(world, "the ledger did not take an offset");
}

/* --- a daemon ---------------------------------------------------------- */

/* The machine, or one with a mistake in it. */
static enum ns_job_action
step(struct world *world, struct work *work, enum ns_job_event event)
{
    enum ns_job_phase phase = work->state.phase;
    enum mistake mistake = world->history->mistake;

    if ((mistake == ACK_BEFORE_FINISH && event == NS_ON_DONE) ||
        (mistake == FENCED_IS_STORED && event == NS_ON_FENCED &&
         phase == NS_PHASE_FINISHING) ||
        (mistake == LOST_IS_STORED && event == NS_ON_LOST) ||
        (mistake == GIVEN_BACK_IS_FINAL && event == NS_ON_STORED &&
         phase == NS_PHASE_GIVING_BACK)) {
        work->state.phase = NS_PHASE_ENDED;
        return NS_DO_ACKNOWLEDGE;
    }
    if (mistake == PARKED_IS_FORGOTTEN && event == NS_ON_CLAIM_WAIT) {
        work->state.phase = NS_PHASE_ENDED;
        return NS_DO_RELEASE;
    }
    return ns_jobstate_step(&work->state, event);
}

static enum ns_job_event
run(struct world *world, const struct daemon *daemon, struct work *work)
{
    if (work->fenced)
        return NS_ON_FENCED;
    if (daemon->stopping)
        return NS_ON_STOP;
    switch (draw(world, world->calm ? 20 : 40)) {
    case 0:
        return NS_ON_UNFIT;
    case 1:
        return NS_ON_EXPIRED;
    case 2:
        return NS_ON_CANCELLED;
    case 3:
        return NS_ON_TROUBLE;
    default:
        if (work->state.phase == NS_PHASE_PREPARING)
            return NS_ON_PREPARED;
        return draw(world, 3) ? NS_ON_DONE : NS_ON_BLOCK;
    }
}

/* Is the answer fit to be final? A stop lets no attempt begin. */
static enum ns_job_event
check(struct world *world, const struct daemon *daemon,
      const struct work *work)
{
    if (work->fenced)
        return NS_ON_FENCED;
    switch (draw(world, 8)) {
    case 0:
        return daemon->stopping ? NS_ON_STOP : NS_ON_AGAIN;
    case 1:
        return NS_ON_UNFIT;
    case 2:
        return draw(world, 4) ? NS_ON_FIT : NS_ON_TROUBLE;
    default:
        return NS_ON_FIT;
    }
}

/* What the work's action leads to; NS_N_EVENTS: nothing yet. */
static enum ns_job_event
act(struct world *world, struct daemon *daemon, struct work *work)
{
    struct row *row = &world->row[world->message[work->message].job];

    switch (work->action) {
    case NS_DO_NOTHING: /* received just now */
        if (daemon->stopping)
            return NS_ON_STOP;
        return world->message[work->message].bad ? NS_ON_REFUSED
                                                 : NS_ON_PARSED;
    case NS_DO_PARK:
        if (daemon->stopping)
            return NS_ON_STOP;
        return draw(world, 8) ? NS_N_EVENTS : NS_ON_DUE;
    case NS_DO_CLAIM:
        if (daemon->stopping) /* not begun: it would be given back at once */
            return NS_ON_STOP;
        return ask_until_heard(world, daemon, work);
    case NS_DO_CHECKPOINT:
        if (holds(row, work) && !daemon->store_lost && !is_away(world))
            row->blocks++;
        return run(world, daemon, work);
    case NS_DO_PREPARE:
    case NS_DO_RUN:
        return run(world, daemon, work);
    case NS_DO_CHECK:
        return check(world, daemon, work);
    default:
        return ask_until_heard(world, daemon, work);
    }
}

static void
move_on(struct world *world, int at)
{
    struct daemon *daemon = &world->daemon[at];
    struct work *work = &daemon->work[draw(world, WINDOW)];
    enum ns_job_event event;

    if (!work->used)
        return;
    event = act(world, daemon, work);
    if (event == NS_N_EVENTS)
        return;
    TELL(world, "daemon %d message %u job %u fence %u: %s, event %d", at,
         work->message, world->message[work->message].job, work->fence,
         ns_job_phase_name(work->state.phase), (int)event);
    work->action = step(world, work, event);
    switch (work->action) {
    case NS_DO_NOTHING:
        broke(world, "an event came that the machine does not know");
        break;
    case NS_DO_ACKNOWLEDGE:
        acknowledge(world, work);
        work->used = false;
        break;
    case NS_DO_RELEASE:
        work->used = false;
        break;
    default:
        break;
    }
}

static void
heartbeat(struct world *world, struct daemon *daemon)
{
    for (int i = 0; i < WINDOW; i++) {
        struct work *work = &daemon->work[i];
        struct row *row = &world->row[world->message[work->message].job];

        if (!work->used || (work->state.phase != NS_PHASE_PREPARING &&
                            work->state.phase != NS_PHASE_RUNNING &&
                            work->state.phase != NS_PHASE_CHECKING &&
                            work->state.phase != NS_PHASE_FINISHING))
            continue;
        if (holds(row, work))
            row->lease_until = world->now + LEASE;
        else if (row->state != FINAL || row->fence != work->fence)
            work->fenced = true;
    }
}

static void
end(struct world *world, int at)
{
    memset(&world->daemon[at], 0, sizeof(world->daemon[at]));
    for (int i = 0; i < PARTITIONS; i++)
        if (world->partition[i].holder == at)
            world->partition[i].holder = -1;
}

static bool
idle(const struct daemon *daemon)
{
    for (int i = 0; i < WINDOW; i++)
        if (daemon->work[i].used)
            return false;
    return true;
}

static void
turn(struct world *world, int at)
{
    struct daemon *daemon = &world->daemon[at];

    if (!daemon->alive) {
        if (draw(world, 20) == 0)
            *daemon = (struct daemon){ .alive = true,
                                       .owner = ++world->owners,
                                       .known_fence = world->fences };
        return;
    }
    if (happens(world, CRASH, 400)) {
        TELL(world, "daemon %d crashes", at);
        end(world, at);
        return;
    }
    if (daemon->sleeps_until > world->now && !world->calm)
        return;
    if (happens(world, SLEEP, 400)) {
        daemon->sleeps_until = world->now + draw(world, 4 * LEASE);
        return;
    }
    if (happens(world, LOSE_STORE, 1000))
        daemon->stopping = daemon->store_lost = true;
    if (happens(world, STOP, 600))
        daemon->stopping = true;
    if (daemon->stopping && idle(daemon)) {
        TELL(world, "daemon %d stops", at);
        for (int i = 0; i < PARTITIONS; i++)
            if (world->partition[i].holder == at)
                commit(world, &world->partition[i]);
        end(world, at);
        return;
    }
    if (draw(world, 8) == 0 && !is_away(world))
        heartbeat(world, daemon);
    if (draw(world, 4) == 0)
        receive(world, at);
    move_on(world, at);
}

/* For a minute, or for an hour: each lease is long over then. All else may
 * happen meanwhile. */
static void
store_turn(struct world *world)
{
    if (is_away(world) || !happens(world, OUTAGE, 1000))
        return;
    world->away_since = world->now;
    world->away_until = world->now + LEASE;
    if (draw(world, 2)) {
        world->away_until = world->now + HOUR;
        world->n_hours++;
    }
    world->calm_at += world->away_until - world->now;
    TELL(world, "the store is away until %u", world->away_until);
}

static void
broker_turn(struct world *world)
{
    for (int i = 0; i < PARTITIONS; i++) {
        struct partition *partition = &world->partition[i];
        int other = (int)draw(world, world->history->n_daemons);

        if (partition->holder >= 0 &&
            world->daemon[partition->holder].sleeps_until <= world->now &&
            draw(world, 10) == 0)
            commit(world, partition);
        if ((partition->holder < 0 || happens(world, REBALANCE, 300)) &&
            world->daemon[other].alive && !world->daemon[other].stopping)
            assign(world, partition, other);
    }
}

/* --- a history --------------------------------------------------------- */

static void
begin(struct world *world, const struct history *history)
{
    unsigned half = history->n_messages / 2;

    memset(world, 0, sizeof(*world));
    world->history = history;
    world->calm_at = history->n_steps;
    world->random = history->seed * 0x9e3779b97f4a7c15u + 1;
    for (unsigned i = 0; i < history->n_messages; i++) {
        struct message *message = &world->message[i];
        unsigned kind = draw(world, 12), of = i ? draw(world, i) : 0;

        message->job = i;
        message->body = i + 1;
        message->bad = kind == 0;
        if (i > 0 && (kind == 1 || kind == 2)) /* another copy */
            message->job = world->message[of].job;
        if (i > 0 && kind == 1)
            message->body = world->message[of].body;
    }
    world->partition[0] = (struct partition){ .n = half, .holder = -1 };
    world->partition[1] = (struct partition){ .first = half,
                                              .n = history->n_messages - half,
                                              .holder = -1 };
}

static bool
all_read(const struct world *world)
{
    for (int i = 0; i < PARTITIONS; i++)
        if (world->partition[i].committed < world->partition[i].n)
            return false;
    return true;
}

static void
judge(struct world *world)
{
    for (unsigned i = 0; i < world->history->n_messages; i++) {
        const struct message *message = &world->message[i];
        const struct row *row = &world->row[message->job];

        if (message->bad ? !message->dead_letter
                         : row->state == FINAL && row->body == message->body
                               ? message->dead_letter || row->n_writes != 1
                               : !message->dead_letter)
            broke(world, "a message has not exactly one outcome");
    }
}

struct tally { /* of what went wrong in histories */
    unsigned faults, hours;
};

/* NULL, or what broke. */
static const char *
live_through(const struct history *history, struct tally *tally)
{
    static struct world world;

    begin(&world, history);
    while (!world.broken && world.now < world.calm_at + REST) {
        world.now++;
        store_turn(&world);
        broker_turn(&world);
        turn(&world, (int)draw(&world, history->n_daemons));
        if (world.now >= world.calm_at)
            world.calm = true;
        if (world.calm && all_read(&world))
            break;
    }
    if (!world.broken && !all_read(&world))
        broke(&world, "messages are left without an end");
    if (!world.broken)
        judge(&world);
    for (int i = 0; i < PARTITIONS; i++)
        ns_ledger_destroy(world.partition[i].ledger);
    if (tally) {
        tally->faults += world.n_faults;
        tally->hours += world.n_hours;
    }
    return world.broken;
}

static struct history
history_of(uint64_t seed)
{
    return (struct history){ .seed = seed,
                             .n_messages = 4 + (unsigned)(seed % 21),
                             .n_daemons = 1 + (unsigned)(seed % 3),
                             /* some end while much is left to do */
                             .n_steps = 50 + (unsigned)(seed * 7919 % 1450),
                             .faults = ALL_FAULTS };
}

/* A smaller one that breaks too: fewer steps, messages, daemons, faults. */
static struct history
shrink(struct history history)
{
    bool smaller = true;

    while (smaller) {
        struct history tries[16];
        int n = 0;

        smaller = false;
        for (int part = 2; part <= 8; part *= 2) {
            tries[n] = history;
            tries[n++].n_steps -= history.n_steps / (unsigned)part;
        }
        tries[n] = history;
        tries[n++].n_messages = history.n_messages / 2 + 1;
        tries[n] = history;
        tries[n++].n_messages--;
        tries[n] = history;
        tries[n++].n_daemons--;
        for (unsigned bit = 1; bit < ALL_FAULTS; bit *= 2) {
            tries[n] = history;
            tries[n++].faults &= ~bit;
        }
        for (int i = 0; i < n && !smaller; i++) {
            if (memcmp(&tries[i], &history, sizeof(history)) == 0 ||
                tries[i].n_messages < 2 || tries[i].n_daemons < 1 ||
                tries[i].n_steps < 1 || !live_through(&tries[i], NULL))
                continue;
            history = tries[i];
            smaller = true;
        }
    }
    return history;
}

static void
print_history(const struct history *history, const char *what)
{
    printf("# NS_HISTORY=%llu:%u:%u:%u:%u %s\n",
           (unsigned long long)history->seed, history->n_messages,
           history->n_daemons, history->n_steps, history->faults, what);
}

/* --- tests ------------------------------------------------------------- */

static void
whatever_happens_each_message_has_one_outcome(void **state)
{
    const char *given = getenv("NS_HISTORIES"), *one = getenv("NS_HISTORY");
    unsigned long n = given ? strtoul(given, NULL, 10) : 2000;
    struct tally tally = { 0 };

    (void)state;
    assert_true(n > 0);
    if (one) {
        struct history history = { .tell = true };
        unsigned long long seed;
        const char *broken;

        assert_int_equal(sscanf(one, "%llu:%u:%u:%u:%u", &seed,
                                &history.n_messages, &history.n_daemons,
                                &history.n_steps, &history.faults), 5);
        assert_in_range(history.n_messages, 2, MOST_MESSAGES);
        assert_in_range(history.n_daemons, 1, MOST_DAEMONS);
        history.seed = seed;
        broken = live_through(&history, NULL);
        if (broken)
            fail_msg("%s", broken);
        return;
    }
    for (unsigned long seed = 1; seed <= n; seed++) {
        struct history history = history_of(seed);
        const char *broken = live_through(&history, &tally);

        if (broken) {
            print_history(&history, broken);
            history = shrink(history);
            print_history(&history, live_through(&history, NULL));
            fail_msg("seed %lu: %s", seed, broken);
        }
    }
    printf("# %lu histories, %u faults, %u hours without a store\n", n,
           tally.faults, tally.hours);
    assert_true(tally.faults > n); /* they did happen */
    assert_true(tally.hours > n / 10);
}

static void
the_same_seed_is_the_same_history(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        struct history history = history_of(seed);
        struct tally a = { 0 }, b = { 0 };

        history.mistake = NO_FENCE;
        assert_ptr_equal(live_through(&history, &a),
                         live_through(&history, &b));
        assert_int_equal(a.faults, b.faults);
        assert_int_equal(a.hours, b.hours);
    }
}

/* Each mistake is found within a few hundred histories, and its history is
 * made smaller and breaks all the same. */
static void
a_machine_that_is_wrong_anywhere_is_found_out(void **state)
{
    (void)state;
    for (int mistake = NONE + 1; mistake < N_MISTAKES; mistake++) {
        const char *broken = NULL;
        struct history history, small;
        uint64_t seed = 0;

        while (!broken && ++seed <= 500) {
            history = history_of(seed);
            history.mistake = (enum mistake)mistake;
            broken = live_through(&history, NULL);
        }
        if (!broken)
            fail_msg("mistake %d was not found in 500 histories", mistake);
        small = shrink(history);
        assert_non_null(live_through(&small, NULL));
        assert_true(small.n_steps <= history.n_steps &&
                    small.n_messages <= history.n_messages);
        printf("# mistake %d, seed %llu: ", mistake, (unsigned long long)seed);
        print_history(&small, broken);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_happens_each_message_has_one_outcome),
        cmocka_unit_test(the_same_seed_is_the_same_history),
        cmocka_unit_test(a_machine_that_is_wrong_anywhere_is_found_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
