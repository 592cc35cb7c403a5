/* Three daemons, a broker and a database under one fault after the other,
 * drawn from a seed, while jobs keep coming; then the judge, by SQL.
 *
 *     NS_SOAK=JOBS:FAULTS:SECONDS    at least so many, in no more than that;
 *                                    `make soak` has 2000:200:1200
 *     NS_SEED=N                      the same faults in the same order
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/daemon/delivery.h"

enum { DAEMONS = 3, ROUND_MS = 20000 };

enum fault { KILL, TERM, SLEEP, CUT, LOCK, CRASH_DATABASE, CRASH_BROKER,
             N_FAULTS };

static const char *const fault_names[N_FAULTS] = {
    "daemons killed", "daemons stopped", "daemons put to sleep",
    "times all sessions cut", "times the results locked",
    "crashes of the database", "crashes of the broker",
};

struct soak {
    struct load load;
    pid_t pid[DAEMONS];
    int log[DAEMONS]; /* the number of its log */
    int n_started, n_points; /* of faults inside of daemons */
    int count[N_FAULTS], n_faults, n_own_deaths;
};

static void
start_one(struct soak *soak, int at)
{
    char list[64];

    /* Half of them have faults of their own inside. */
    if (rand_r(&seed_of_run) % 2) {
        snprintf(list, sizeof(list), "%d:0.02", rand_r(&seed_of_run));
        setenv("NS_FAULT", list, 1);
    }
    soak->log[at] = soak->n_started++;
    soak->pid[at] = start_program("tests/nightshiftd", "soak", soak->log[at]);
    unsetenv("NS_FAULT");
}

/* What it said of faults is counted when it is gone. */
static void
account(struct soak *soak, int at)
{
    char *text = slurp(in_folder("soak.%d.err", soak->log[at]));

    for (const char *p = text; (p = strstr(p, "fault point=")) != NULL; p++)
        soak->n_points++;
    free(text);
}

/* Those that died of a fault inside, or left as the manual says, start again,
 * as under systemd. */
static void
start_again(struct soak *soak)
{
    for (int i = 0; i < DAEMONS; i++) {
        int status;

        if (waitpid(soak->pid[i], &status, WNOHANG) != soak->pid[i])
            continue;
        if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) &&
            !(WIFEXITED(status) && WEXITSTATUS(status) == 75))
            fail_msg("a daemon ended by itself with %#x: %s", status,
                     in_folder("soak.%d.err", soak->log[i]));
        soak->n_own_deaths++;
        account(soak, i);
        start_one(soak, i);
    }
}

static void
replace(struct soak *soak, int at, int signal)
{
    int status;

    kill(soak->pid[at], signal);
    status = wait_for(soak->pid[at], LIMIT_MS);
    /* A point inside may have been faster; and before it has its model, a
     * daemon has no say in how it ends. */
    if (status != 0 && status != -SIGKILL && status != -SIGTERM)
        fail_msg("a daemon ended with %d: %s", status,
                 in_folder("soak.%d.err", soak->log[at]));
    account(soak, at);
    start_one(soak, at);
}

static void
apply(struct soak *soak, enum fault fault)
{
    int at = rand_r(&seed_of_run) % DAEMONS;

    switch (fault) {
    case KILL:
        replace(soak, at, SIGKILL);
        break;
    case TERM:
        replace(soak, at, SIGTERM);
        break;
    case SLEEP: /* longer than its session and its leases */
        kill(soak->pid[at], SIGSTOP);
        usleep(1600000 + (useconds_t)(rand_r(&seed_of_run) % 1000000));
        kill(soak->pid[at], SIGCONT);
        break;
    case CUT:
        DO("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
           "usename = 'nsd'");
        break;
    case LOCK:
        DO("BEGIN; LOCK TABLE nightshift.result; SELECT pg_sleep(0.7); "
           "COMMIT");
        break;
    case CRASH_DATABASE:
        pg_stop(rand_r(&seed_of_run) % 2 ? SIGQUIT : SIGKILL);
        usleep((useconds_t)(rand_r(&seed_of_run) % 1000000));
        pg_start();
        break;
    default:
        broker_kill(&broker);
        assert_true(broker_start(&broker));
        assert_true(broker_answers(&broker, SOON_MS));
        break;
    }
    soak->count[fault]++;
    soak->n_faults++;
}

static enum fault
draw_fault(int round)
{
    static const enum fault often[] = { KILL, TERM, SLEEP, CUT, LOCK, KILL,
                                        SLEEP, CUT };

    if (round % 10 == 4) /* these take seconds */
        return CRASH_DATABASE;
    if (round % 20 == 9)
        return CRASH_BROKER;
    return often[rand_r(&seed_of_run) % 8];
}

static void
judge_soak(const struct soak *soak)
{
    const struct load *load = &soak->load;
    struct verdict verdict = judge("soak");
    int64_t given_up;

    assert_int_equal(verdict.lost, 0);
    assert_int_equal(verdict.doubled, 0);
    assert_int_equal(verdict.rewritten, 0);
    assert_int_equal(verdict.unfinished, 0);
    assert_int_equal(verdict.dead, load->n_dead);
    assert_int_equal(verdict.conflicts, load->n_conflicts);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"),
                     load->n_jobs);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN "
                            "nightshift.job j USING (job_id) WHERE "
                            "r.fence <> j.fence"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block b JOIN "
                            "nightshift.job j USING (job_id) WHERE "
                            "j.finished_at IS NOT NULL"), 0);
    /* Three deaths in a row without a block give a job up, and under deaths
     * this frequent some have them. */
    given_up = number("SELECT count(*) FROM nightshift.result WHERE "
                      "error_code = 'stalled'");
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "status <> 'ok' AND error_code NOT IN ('stalled', "
                            "'bad_tool_call')"), 0);
    printf("# %d jobs, %d messages, %d faults and %d more inside of daemons; "
           "%d given up; %d executions\n", load->n_jobs, load->n_messages,
           soak->n_faults, soak->n_points, (int)given_up,
           (int)number("SELECT sum(attempt) FROM nightshift.job"));
    for (int i = 0; i < N_FAULTS; i++)
        printf("#   %d %s\n", soak->count[i], fault_names[i]);
    assert_true(given_up * 20 <= load->n_jobs);
}

static void
through_one_fault_after_the_other_each_job_has_one_outcome(void **state)
{
    struct soak soak = { .load = { .topic = "soak", .longest = 80 } };
    const char *given = getenv("NS_SOAK");
    int n_faults, seconds, per_round;
    int64_t until;

    (void)state;
    NEEDS_BROKER();
    assert_int_equal(sscanf(given ? given : "150:15:150", "%d:%d:%d",
                            &soak.load.n_jobs, &n_faults, &seconds), 3);
    assert_true(n_faults > 0 && soak.load.n_jobs >= n_faults);
    until = now_ms() + seconds * 1000LL;
    per_round = soak.load.n_jobs / n_faults + 1;
    prepare_topic(&soak.load, "");
    for (int i = 0; i < DAEMONS; i++)
        start_one(&soak, i);
    for (int round = 0; round < n_faults; round++) {
        int64_t before, most = now_ms() + ROUND_MS;
        int to = soak.load.n_sent + per_round;

        if (now_ms() > until)
            fail_msg("only %d of %d faults in %d s", round, n_faults, seconds);
        send_up_to(&soak.load, to < soak.load.n_jobs ? to : soak.load.n_jobs);
        before = progress_of("soak");
        apply(&soak, draw_fault(round));
        /* It is to hurt those who work, and not one that lies down. */
        while (progress_of("soak") == before && lag_of("soak") > 0 &&
               now_ms() < most) {
            start_again(&soak);
            usleep(20000);
        }
        start_again(&soak);
    }
    assert_int_equal(soak.load.n_sent, soak.load.n_jobs);
    for (int i = 0; i < DAEMONS; i++) /* the last ones have no faults inside */
        if (kill(soak.pid[i], SIGKILL) == 0) {
            wait_for(soak.pid[i], LIMIT_MS);
            account(&soak, i);
            soak.log[i] = soak.n_started++;
            soak.pid[i] = start_daemon("soak", soak.log[i]);
        }
    wait_until_read("soak");
    for (int i = 0; i < DAEMONS; i++)
        end_daemon(soak.pid[i]);
    judge_soak(&soak);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            through_one_fault_after_the_other_each_job_has_one_outcome),
    };

    return cmocka_run_group_tests(tests, setup_servers, teardown_servers);
}
