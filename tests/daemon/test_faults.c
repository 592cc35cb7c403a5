/* nightshiftd killed, stopped or deceived at each named point between a message
 * and its row (tests/faults/points.c), on a real broker and a real database. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/daemon/delivery.h"

static const char faulty[] = "tests/nightshiftd";

static pid_t
start_faulty(const char *topic, int n, const char *list)
{
    pid_t pid;

    setenv("NS_FAULT", list, 1);
    pid = start_program(faulty, topic, n);
    unsetenv("NS_FAULT");
    return pid;
}

/* The first daemon dies at the point; the second one ends the work. */
static void
die_at(const char *topic, const char *point, struct load *load)
{
    char list[64];
    pid_t pid;

    snprintf(list, sizeof(list), "%s:kill@1", point);
    prepare_load(load, "");
    pid = start_faulty(topic, 0, list);
    assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
    assert_true(file_says(in_folder("%s.0.err", topic), point));
    pid = start_daemon(topic, 1);
    wait_until_read(topic);
    stop_daemon(pid);
    assert_one_outcome_each(load);
}

static int64_t
most_attempts(const char *topic)
{
    return number("SELECT coalesce(max(attempt), 0) FROM nightshift.job WHERE "
                  "job_id LIKE '%s-%%'", topic);
}

static void
killed_between_receipt_and_claim_a_message_comes_again(void **state)
{
    struct load load = { .topic = "received", .n_jobs = 8, .longest = 40 };

    (void)state;
    NEEDS_BROKER();
    die_at("received", "after_receive", &load);
    assert_int_equal(most_attempts("received"), 1);
    load = (struct load){ .topic = "unclaimed", .n_jobs = 8, .longest = 40 };
    die_at("unclaimed", "before_claim", &load);
    assert_int_equal(most_attempts("unclaimed"), 1);
}

static void
killed_behind_a_claim_the_job_is_taken_over_when_its_lease_ends(void **state)
{
    struct load load = { .topic = "claimed", .n_jobs = 8, .longest = 40 };

    (void)state;
    NEEDS_BROKER();
    die_at("claimed", "after_claim", &load);
    assert_int_equal(most_attempts("claimed"), 2);
    assert_true(number("SELECT count(*) FROM nightshift.job WHERE job_id LIKE "
                       "'claimed-%%' AND stalls = 1") > 0);
    load = (struct load){ .topic = "asked", .n_jobs = 8, .longest = 40 };
    die_at("asked", "unread_claim", &load);
    assert_int_equal(most_attempts("asked"), 2);
}

static void
killed_at_a_checkpoint_a_block_is_there_or_not_and_never_half(void **state)
{
    static const char *const points[] = { "before_checkpoint",
                                          "sent_checkpoint",
                                          "unread_checkpoint",
                                          "after_checkpoint" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i], .n_jobs = 4, .longest = 200 };

        die_at(points[i], points[i], &load);
        assert_true(most_attempts(points[i]) >= 2);
    }
}

static void
killed_around_a_final_row_it_is_written_once(void **state)
{
    static const char *const points[] = { "before_finish", "sent_finish",
                                          "unread_finish", "after_finish" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i], .n_jobs = 8, .longest = 40 };

        die_at(points[i], points[i], &load);
        /* Whose row stood was not run again. */
        if (i >= 2)
            assert_true(number("SELECT count(*) FROM nightshift.job WHERE "
                               "job_id LIKE '%s-%%' AND attempt = 1",
                               points[i]) > 0);
    }
}

static void
killed_around_an_offset_nothing_runs_twice(void **state)
{
    static const char *const points[] = { "before_commit", "after_commit" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 2; i++) {
        struct load load = { .topic = points[i], .n_jobs = 8, .longest = 20 };
        int64_t rows;

        die_at(points[i], points[i], &load);
        rows = number("SELECT count(*) FROM nightshift.job WHERE job_id LIKE "
                      "'%s-%%' AND attempt = 1", points[i]);
        assert_true(rows > 0);
    }
}

static void
killed_around_a_dead_letter_it_is_written_once(void **state)
{
    static const char *const points[] = { "before_refuse", "sent_refuse",
                                          "unread_refuse", "after_refuse" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i], .n_jobs = 8, .longest = 20 };

        die_at(points[i], points[i], &load);
        assert_true(load.n_dead > 0);
    }
}

static void
killed_while_a_job_is_given_back_it_costs_the_job_nothing(void **state)
{
    static const char *const points[] = { "before_give_back",
                                          "unread_give_back",
                                          "after_give_back" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 3; i++) {
        struct load load = { .topic = points[i], .n_jobs = 12,
                             .longest = 200 };
        char list[96];
        pid_t pid;

        prepare_load(&load, "[daemon]\ndrain = 0\n");
        /* It is told to end while it hears of a claim: so there is one to be
         * given back, however fast the machine. */
        snprintf(list, sizeof(list), "%s:kill@1,after_claim:delay=1500@3",
                 points[i]);
        pid = start_faulty(points[i], 0, list);
        wait_until_says(in_folder("%s.0.err", points[i]), "after_claim");
        kill(pid, SIGTERM);
        assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
        pid = start_daemon(points[i], 1);
        wait_until_read(points[i]);
        stop_daemon(pid);
        assert_one_outcome_each(&load);
        assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE "
                                "job_id LIKE '%s-%%' AND retries > 0",
                                points[i]), 0);
    }
}

/* It wakes up when its lease is over and another one has done the work, in the
 * one moment in which nothing but the fence keeps its row away. */
static void
stopped_before_a_final_row_past_its_lease_it_is_fenced(void **state)
{
    struct load load = { .topic = "asleep", .n_jobs = 8, .longest = 40 };
    int64_t until = now_ms() + SOON_MS;
    pid_t late, other;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    late = start_faulty("asleep", 0, "before_finish:stop@1");
    wait_until_says(in_folder("asleep.0.err"), "before_finish");
    other = start_daemon("asleep", 1);
    while (judge("asleep").lost > 0) {
        assert_true(now_ms() < until);
        usleep(100000);
    }
    kill(late, SIGCONT);
    wait_until_read("asleep");
    stop_daemon(late);
    stop_daemon(other);
    assert_one_outcome_each(&load);
    assert_true(most_attempts("asleep") >= 2);
}

static void
lost_answers_are_asked_for_again_at_every_operation(void **state)
{
    struct load load = { .topic = "unheard", .n_jobs = 20, .longest = 80 };
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    pid = start_faulty("unheard", 0,
                       "unread_claim:lost@1,unread_checkpoint:lost@1,"
                       "unread_finish:lost@1,unread_refuse:lost@1,"
                       "sent_claim:lost@5,sent_finish:lost@3,"
                       "before_claim:lost@2,before_finish:lost@2");
    wait_until_read("unheard");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    assert_true(file_says(in_folder("unheard.0.err"), "unread_finish"));
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'unheard-%%' AND retries + stalls > 0"), 0);
}

static void
the_shipped_daemon_holds_no_fault_point(void **state)
{
    struct load load = { .topic = "harmless", .n_jobs = 4, .longest = 20 };
    char path[PATH_MAX];
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 2; i++) {
        FILE *file;
        char *bytes;
        long n;

        snprintf(path, sizeof(path), "%s/%s", build_folder(),
                 i ? faulty : "nightshiftd");
        file = fopen(path, "r");
        assert_non_null(file);
        fseek(file, 0, SEEK_END);
        n = ftell(file);
        rewind(file);
        bytes = malloc((size_t)n);
        assert_non_null(bytes);
        assert_int_equal(fread(bytes, 1, (size_t)n, file), (size_t)n);
        fclose(file);
        assert_int_equal(memmem(bytes, (size_t)n, "NS_FAULT", 8) != NULL, i);
        free(bytes);
    }
    setenv("NS_FAULT", "after_receive:kill", 1);
    prepare_load(&load, "");
    pid = start_daemon("harmless", 0);
    unsetenv("NS_FAULT");
    wait_until_read("harmless");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
}

static void
a_list_of_faults_with_a_slip_in_it_ends_the_process(void **state)
{
    static const char *const bad[] = { "after_clam:kill", "sent_receive:kill",
                                       "after_claim:kil", "after_claim",
                                       "after_claim:kill@0",
                                       "after_claim:lost", "3:1.5" };
    struct load load = { .topic = "slip" };

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(wait_for(start_faulty("slip", 0, bad[i]), LIMIT_MS),
                         64);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_between_receipt_and_claim_a_message_comes_again),
        cmocka_unit_test(
            killed_behind_a_claim_the_job_is_taken_over_when_its_lease_ends),
        cmocka_unit_test(
            killed_at_a_checkpoint_a_block_is_there_or_not_and_never_half),
        cmocka_unit_test(killed_around_a_final_row_it_is_written_once),
        cmocka_unit_test(killed_around_an_offset_nothing_runs_twice),
        cmocka_unit_test(killed_around_a_dead_letter_it_is_written_once),
        cmocka_unit_test(
            killed_while_a_job_is_given_back_it_costs_the_job_nothing),
        cmocka_unit_test(stopped_before_a_final_row_past_its_lease_it_is_fenced),
        cmocka_unit_test(lost_answers_are_asked_for_again_at_every_operation),
        cmocka_unit_test(the_shipped_daemon_holds_no_fault_point),
        cmocka_unit_test(a_list_of_faults_with_a_slip_in_it_ends_the_process),
    };

    if (getenv("NS_ONLY")) /* a pattern of test names */
        cmocka_set_test_filter(getenv("NS_ONLY"));
    return cmocka_run_group_tests(tests, setup_servers, teardown_servers);
}
