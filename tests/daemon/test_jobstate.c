#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/jobstate.h"

static enum ns_job_action
after(struct ns_jobstate *state, enum ns_job_event event)
{
    return ns_jobstate_step(state, event);
}

static void
a_good_job_is_claimed_prepared_run_stored_and_acknowledged(void **state)
{
    struct ns_jobstate job = { 0 };

    (void)state;
    assert_int_equal(after(&job, NS_ON_PARSED), NS_DO_CLAIM);
    assert_int_equal(after(&job, NS_ON_CLAIM_RUN), NS_DO_PREPARE);
    assert_int_equal(after(&job, NS_ON_PREPARED), NS_DO_RUN);
    assert_int_equal(after(&job, NS_ON_BLOCK), NS_DO_CHECKPOINT);
    assert_int_equal(after(&job, NS_ON_DONE), NS_DO_CHECK);
    assert_int_equal(after(&job, NS_ON_FIT), NS_DO_FINISH);
    assert_int_equal(after(&job, NS_ON_STORED), NS_DO_ACKNOWLEDGE);
    assert_int_equal(job.phase, NS_PHASE_ENDED);
}

static void
an_answer_that_is_turned_down_is_prepared_and_run_again(void **state)
{
    struct ns_jobstate job = { .phase = NS_PHASE_RUNNING };

    (void)state;
    assert_int_equal(after(&job, NS_ON_DONE), NS_DO_CHECK);
    assert_int_equal(after(&job, NS_ON_AGAIN), NS_DO_PREPARE);
    assert_int_equal(after(&job, NS_ON_PREPARED), NS_DO_RUN);
    assert_int_equal(after(&job, NS_ON_DONE), NS_DO_CHECK);
    assert_int_equal(after(&job, NS_ON_UNFIT), NS_DO_FINISH);
    assert_int_equal(after(&job, NS_ON_STORED), NS_DO_ACKNOWLEDGE);
}

static void
a_bad_job_is_refused_without_a_claim(void **state)
{
    struct ns_jobstate job = { 0 };

    (void)state;
    assert_int_equal(after(&job, NS_ON_REFUSED), NS_DO_REFUSE);
    assert_int_equal(after(&job, NS_ON_STORED), NS_DO_ACKNOWLEDGE);
}

static void
a_job_that_someone_else_runs_is_parked_and_asked_for_again(void **state)
{
    struct ns_jobstate job = { 0 };

    (void)state;
    after(&job, NS_ON_PARSED);
    assert_int_equal(after(&job, NS_ON_CLAIM_WAIT), NS_DO_PARK);
    assert_int_equal(after(&job, NS_ON_DUE), NS_DO_CLAIM);
    assert_int_equal(after(&job, NS_ON_CLAIM_FINAL), NS_DO_ACKNOWLEDGE);
}

static void
a_fenced_result_is_dropped_and_the_job_parked(void **state)
{
    struct ns_jobstate job = { .phase = NS_PHASE_FINISHING };

    (void)state;
    assert_int_equal(after(&job, NS_ON_FENCED), NS_DO_PARK);
    assert_int_equal(job.phase, NS_PHASE_PARKED);
}

static void
a_stop_gives_a_claimed_job_back_and_releases_it(void **state)
{
    struct ns_jobstate job = { .phase = NS_PHASE_RUNNING };

    (void)state;
    assert_int_equal(after(&job, NS_ON_STOP), NS_DO_GIVE_BACK);
    assert_int_equal(after(&job, NS_ON_STORED), NS_DO_RELEASE);
    assert_int_equal(job.phase, NS_PHASE_ENDED);
}

static void
an_event_that_cannot_happen_changes_nothing(void **state)
{
    struct ns_jobstate job = { .phase = NS_PHASE_PARKED };

    (void)state;
    assert_int_equal(after(&job, NS_ON_DONE), NS_DO_NOTHING);
    assert_int_equal(job.phase, NS_PHASE_PARKED);
    assert_int_equal(after(&job, NS_N_EVENTS), NS_DO_NOTHING);
    job.phase = NS_PHASE_ENDED;
    for (int event = 0; event < NS_N_EVENTS; event++)
        assert_int_equal(after(&job, (enum ns_job_event)event), NS_DO_NOTHING);
}

static uint32_t
draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 32);
}

/* A model of the store beside it: who holds the claim, whether a row stands.
 * Events are drawn among those that a store and an engine could answer with. */
static enum ns_job_event
answer(enum ns_job_action action, enum ns_job_phase phase, bool row,
       uint64_t *seed)
{
    static const enum ns_job_event prepared[] = {
        NS_ON_PREPARED, NS_ON_PREPARED, NS_ON_PREPARED, NS_ON_UNFIT,
        NS_ON_EXPIRED,  NS_ON_TROUBLE,  NS_ON_STOP,     NS_ON_FENCED,
    };
    static const enum ns_job_event run[] = {
        NS_ON_BLOCK, NS_ON_BLOCK,   NS_ON_DONE, NS_ON_DONE,      NS_ON_UNFIT,
        NS_ON_STOP,  NS_ON_TROUBLE, NS_ON_DONE, NS_ON_CANCELLED, NS_ON_FENCED,
    };
    static const enum ns_job_event checked[] = {
        NS_ON_FIT,  NS_ON_FIT,     NS_ON_FIT,    NS_ON_AGAIN,
        NS_ON_STOP, NS_ON_TROUBLE, NS_ON_FENCED, NS_ON_UNFIT,
    };
    static const enum ns_job_event claim[] = {
        NS_ON_CLAIM_RUN, NS_ON_CLAIM_RUN, NS_ON_CLAIM_RUN, NS_ON_CLAIM_WAIT,
        NS_ON_CLAIM_CONFLICT,
    };
    uint32_t n = draw(seed);

    (void)phase;
    switch (action) {
    case NS_DO_CLAIM:
        return row ? NS_ON_CLAIM_FINAL : claim[n % 5];
    case NS_DO_PARK:
        return n % 16 ? NS_ON_DUE : NS_ON_STOP;
    case NS_DO_PREPARE:
        return prepared[n % 8];
    case NS_DO_RUN:
    case NS_DO_CHECKPOINT:
        return run[n % 10];
    case NS_DO_CHECK:
        return checked[n % 8];
    case NS_DO_FINISH:
    case NS_DO_REFUSE:
    case NS_DO_GIVE_BACK:
        return n % 8 == 0 ? NS_ON_FENCED : n % 64 == 1 ? NS_ON_LOST
                                                       : NS_ON_STORED;
    default:
        return NS_N_EVENTS;
    }
}

static void
whatever_happens_a_job_ends_once_and_is_acknowledged_only_when_stored(
    void **state)
{
    unsigned n_acknowledged = 0, n_released = 0;

    (void)state;
    for (uint64_t run = 1; run <= 20000; run++) {
        struct ns_jobstate job = { 0 };
        uint64_t seed = run * 0x9e3779b97f4a7c15u;
        enum ns_job_action action;
        enum ns_job_event event;
        bool row = false, claimed = false;
        int steps = 0;

        event = draw(&seed) % 8 ? NS_ON_PARSED : NS_ON_REFUSED;
        for (;;) {
            enum ns_job_action before = steps ? action : NS_DO_NOTHING;

            if (event == NS_ON_CLAIM_RUN)
                claimed = true;
            if (event == NS_ON_STORED &&
                (before == NS_DO_FINISH || before == NS_DO_REFUSE))
                row = true;
            if (event == NS_ON_FENCED)
                row = draw(&seed) % 2 != 0; /* the newer owner may be done */
            action = ns_jobstate_step(&job, event);
            /* Every arrow drawn exists: the table has no hole. */
            assert_int_not_equal(action, NS_DO_NOTHING);
            if (action == NS_DO_RUN || action == NS_DO_FINISH)
                assert_true(claimed);
            if (action == NS_DO_ACKNOWLEDGE || action == NS_DO_RELEASE)
                break;
            event = answer(action, job.phase, row, &seed);
            assert_true(++steps < 10000);
        }
        assert_int_equal(job.phase, NS_PHASE_ENDED);
        if (action == NS_DO_ACKNOWLEDGE) {
            assert_true(row);
            n_acknowledged++;
        } else {
            n_released++;
        }
    }
    assert_true(n_acknowledged > 1000 && n_released > 1000);
}

static void
delays_double_up_to_the_cap_and_a_block_resets_them(void **state)
{
    struct ns_jobstate job = { .phase = NS_PHASE_RUNNING, .troubles = 1 };

    (void)state;
    assert_int_equal(ns_backoff_ms(1, 1000, 300000, 0), 0);
    assert_int_equal(ns_backoff_ms(1, 1000, 300000, UINT32_MAX), 999);
    assert_int_equal(ns_backoff_ms(4, 1000, 300000, UINT32_MAX), 7999);
    assert_int_equal(ns_backoff_ms(4, 1000, 300000, UINT32_MAX / 2), 3999);
    assert_int_equal(ns_backoff_ms(UINT32_MAX, 1000, 300000, UINT32_MAX),
                     299999);
    after(&job, NS_ON_BLOCK);
    assert_int_equal(job.troubles, 0);
    after(&job, NS_ON_TROUBLE);
    assert_int_equal(job.troubles, 1);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            a_good_job_is_claimed_prepared_run_stored_and_acknowledged),
        cmocka_unit_test(
            an_answer_that_is_turned_down_is_prepared_and_run_again),
        cmocka_unit_test(a_bad_job_is_refused_without_a_claim),
        cmocka_unit_test(
            a_job_that_someone_else_runs_is_parked_and_asked_for_again),
        cmocka_unit_test(a_fenced_result_is_dropped_and_the_job_parked),
        cmocka_unit_test(a_stop_gives_a_claimed_job_back_and_releases_it),
        cmocka_unit_test(an_event_that_cannot_happen_changes_nothing),
        cmocka_unit_test(
            whatever_happens_a_job_ends_once_and_is_acknowledged_only_when_stored),
        cmocka_unit_test(delays_double_up_to_the_cap_and_a_block_resets_them),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
