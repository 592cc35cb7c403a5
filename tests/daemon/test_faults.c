/* nightshiftd killed, stopped or deceived at each named point between a message
 * and its row (tests/faults/points.c), on a real broker and a real database. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <xxhash.h>

#include "tests/daemon/client.h"
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

static int64_t
jobs_of(const char *topic, const char *which)
{
    return number("SELECT count(*) FROM nightshift.job WHERE job_id LIKE "
                  "'%s-%%' AND %s", topic, which);
}

static int64_t
blocks_of(const char *topic)
{
    return number("SELECT count(*) FROM nightshift.block WHERE job_id LIKE "
                  "'%s-%%'", topic);
}

static int64_t
letters_of(const char *topic)
{
    return number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                  "source_key LIKE '%s/%%'", topic);
}

/* What was asked of the server may still happen when the asker is dead. */
static void
wait_until_nobody_asks(void)
{
    int64_t until = now_ms() + SOON_MS;

    while (number("SELECT count(*) FROM pg_stat_activity WHERE usename = "
                  "'nsd'") > 0) {
        assert_true(now_ms() < until);
        usleep(20000);
    }
}

/* The first daemon dies at the point. What stands then is noted, so that it
 * can be held against what stands in the end. */
static void
die_at(const char *point, struct load *load)
{
    const char *topic = load->topic;
    char list[64];
    pid_t pid;

    snprintf(list, sizeof(list), "%s:kill@1", point);
    prepare_load(load, "[http]\nlisten = 127.0.0.1:0\n");
    pid = start_faulty(topic, 0, list);
    assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
    assert_true(file_says(in_folder("%s.0.err", topic), point));
    wait_until_nobody_asks();
    DO("CREATE TABLE noted AS SELECT job_id, attempt, state, lease_until FROM "
       "nightshift.job WHERE job_id LIKE '%s-%%'", topic);
    DO("CREATE TABLE noted_letter AS SELECT source_key, created_at FROM "
       "nightshift.dead_letter WHERE source_key LIKE '%s/%%'", topic);
}

/* Of what the second daemon took in, and did not run. */
struct second {
    int64_t received, duplicates, assigned;
};

/* The second one ends the work. A final row or a dead letter that stood is the
 * one that stands: it was neither run nor written again. What was running is
 * taken over, once and behind its lease; nothing else is touched twice. */
static struct second
go_on(const struct load *load)
{
    const char *topic = load->topic, *log = in_folder("%s.1.err", topic);
    pid_t pid = start_daemon(topic, 1);
    struct second second;
    uint16_t port;

    wait_until_read(topic);
    port = port_in(log);
    second.received = metric_of(port, "nightshift_jobs_received_total");
    second.duplicates = metric_of(port, "nightshift_jobs_duplicate_total");
    second.assigned = metric_of(port, "nightshift_kafka_rebalances_total");
    stop_daemon(pid);
    assert_one_outcome_each(load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job j JOIN noted n "
                            "USING (job_id) WHERE n.state <> 'running' AND "
                            "j.attempt <> n.attempt"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job j JOIN noted n "
                            "USING (job_id) WHERE n.state = 'running' AND "
                            "(j.attempt <> 2 OR j.stalls <> 1 OR "
                            "j.finished_at < n.lease_until)"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job j WHERE job_id "
                            "LIKE '%s-%%' AND (attempt > 1 OR stalls > 0) AND "
                            "job_id NOT IN (SELECT job_id FROM noted WHERE "
                            "state = 'running')", topic), 0);
    assert_int_equal(number("SELECT count(*) FROM noted_letter n WHERE NOT "
                            "EXISTS (SELECT FROM nightshift.dead_letter d WHERE "
                            "d.source_key = n.source_key AND d.created_at = "
                            "n.created_at)"), 0);
    DO("DROP TABLE noted");
    DO("DROP TABLE noted_letter");
    return second;
}

static void
killed_between_receipt_and_claim_a_message_comes_again(void **state)
{
    static const char *const points[] = { "after_receive", "before_claim" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 2; i++) {
        struct load load = { .topic = points[i], .n_jobs = 8, .longest = 40 };

        die_at(points[i], &load);
        assert_int_equal(jobs_of(points[i], "true"), 0);
        assert_true(go_on(&load).received >= load.n_messages);
        assert_int_equal(jobs_of(points[i], "attempt <> 1"), 0);
    }
}

static void
killed_behind_a_claim_the_job_is_taken_over_when_its_lease_ends(void **state)
{
    static const char *const points[] = { "after_claim", "unread_claim" };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 2; i++) {
        struct load load = { .topic = points[i], .n_jobs = 8, .longest = 40 };

        die_at(points[i], &load);
        assert_int_equal(jobs_of(points[i], "state = 'running' AND attempt = 1 "
                                 "AND stalls = 0"), 1);
        assert_int_equal(jobs_of(points[i], "true"), 1);
        go_on(&load);
        assert_int_equal(jobs_of(points[i], "attempt = 2 AND stalls = 1"), 1);
    }
}

/* Each block that stands is one: numbered without a hole, of whole tokens, and
 * what its hash says. */
static void
assert_whole_blocks(const char *topic)
{
    PGresult *rows = sql("SELECT block_no, row_number() OVER (PARTITION BY "
                         "job_id ORDER BY block_no) - 1, encode(tokens, 'hex'),"
                         " hash FROM nightshift.block WHERE job_id LIKE "
                         "'%s-%%'", topic);

    for (int row = 0; row < PQntuples(rows); row++) {
        const char *hex = PQgetvalue(rows, row, 2);
        size_t n = strlen(hex) / 2;
        unsigned char *bytes = malloc(n + 1);

        assert_non_null(bytes);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(sscanf(hex + 2 * i, "%2hhx", &bytes[i]), 1);
        assert_string_equal(PQgetvalue(rows, row, 0),
                            PQgetvalue(rows, row, 1));
        assert_true(n > 0 && n % sizeof(int32_t) == 0);
        assert_int_equal((int64_t)XXH3_64bits(bytes, n),
                         strtoll(PQgetvalue(rows, row, 3), NULL, 10));
        free(bytes);
    }
    PQclear(rows);
}

static void
killed_at_a_checkpoint_a_block_is_there_or_not_and_never_half(void **state)
{
    static const struct {
        const char *point;
        int least, most; /* blocks that stand */
    } points[] = {
        { "before_checkpoint", 0, 0 },
        { "sent_checkpoint", 0, 64 },
        { "unread_checkpoint", 1, 64 },
        { "after_checkpoint", 1, 64 },
    };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i].point, .n_jobs = 4,
                             .longest = 200 };
        int64_t n_seen;

        die_at(points[i].point, &load);
        assert_in_range(blocks_of(load.topic), points[i].least,
                        points[i].most);
        assert_whole_blocks(load.topic);
        n_seen = blocks_of(load.topic);
        assert_true(jobs_of(load.topic, "state = 'running'") > 0);
        go_on(&load);
        /* Who took over went on behind just these. */
        assert_int_equal(number("SELECT sum(blocks_seen) FROM nightshift.job "
                                "WHERE job_id LIKE '%s-%%'", load.topic),
                         n_seen);
    }
}

/* Jobs of some blocks, the same whatever their topic. */
static void
send_seeded(struct load *load)
{
    char text[512];

    prepare_topic(load, "[http]\nlisten = 127.0.0.1:0\n");
    for (int i = 0; i < load->n_jobs; i++) {
        snprintf(text, sizeof(text), "{\"custom_id\":\"%s-%d\",\"body\":{"
                 "\"messages\":[{\"role\":\"user\",\"content\":\"tell me all\""
                 "}],\"max_tokens\":400,\"seed\":%d},\"nightshift\":{\"mode\":"
                 "\"diffusion\"}}", load->topic, i, i);
        send_text(load->topic, i % PARTITIONS, NULL, text);
        DO("INSERT INTO expected VALUES ('%s', '%s-%d', false)", load->topic,
           load->topic, i);
    }
    assert_true(produce_flush(&broker));
}

static void
killed_between_checkpoints_a_job_goes_on_at_its_last_block(void **state)
{
    struct load whole = { .topic = "whole", .n_jobs = 8 };
    struct load cut = { .topic = "cut", .n_jobs = 8 };
    int64_t n_blocks, n_seen;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    send_seeded(&whole);
    pid = start_daemon("whole", 0);
    wait_until_read("whole");
    stop_daemon(pid);
    assert_one_outcome_each(&whole);

    send_seeded(&cut);
    pid = start_faulty("cut", 0, "after_checkpoint:kill@1");
    assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
    n_seen = blocks_of("cut");
    assert_true(n_seen > 0);
    /* Of the jobs that have no row yet. */
    n_blocks = number("SELECT sum(blocks) FROM nightshift.result WHERE job_id "
                      "LIKE 'whole-%%' AND replace(job_id, 'whole', 'cut') NOT "
                      "IN (SELECT job_id FROM nightshift.result)");
    pid = start_daemon("cut", 1);
    wait_until_read("cut");
    /* What stood is not made again, and the answers are those of a whole run. */
    assert_int_equal(metric_of(port_in(in_folder("cut.1.err")),
                               "nightshift_canvas_blocks_total"),
                     n_blocks - n_seen);
    stop_daemon(pid);
    assert_one_outcome_each(&cut);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result a JOIN "
                            "nightshift.result b ON b.job_id = "
                            "replace(a.job_id, 'whole', 'cut') WHERE a.job_id "
                            "LIKE 'whole-%%' AND (a.status, a.content, a.blocks, "
                            "a.completion_tokens, a.finish_reason) IS NOT "
                            "DISTINCT FROM (b.status, b.content, b.blocks, "
                            "b.completion_tokens, b.finish_reason)"), 8);
}

static void
killed_around_a_final_row_it_is_written_once(void **state)
{
    static const struct {
        const char *point;
        int least, most; /* final rows that stand */
    } points[] = {
        { "before_finish", 0, 0 },
        { "sent_finish", 0, 64 },
        { "unread_finish", 1, 64 },
        { "after_finish", 1, 64 },
    };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i].point, .n_jobs = 8,
                             .longest = 40 };
        int64_t n_final;

        die_at(points[i].point, &load);
        n_final = rows_of(load.topic);
        assert_in_range(n_final, points[i].least, points[i].most);
        assert_true(n_final + jobs_of(load.topic, "state = 'running'") > 0);
        /* No offset was stored: each comes again, and whose row stands is
         * acknowledged as a duplicate, as the copy (i % 10 == 3) is. */
        assert_true(go_on(&load).duplicates >= n_final);
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
        struct second second;
        int64_t lag;

        die_at(points[i], &load);
        lag = lag_of(points[i]);
        assert_true(rows_of(points[i]) + letters_of(points[i]) > 0);
        if (i == 0)
            assert_int_equal(lag, load.n_messages);
        else
            assert_true(lag < load.n_messages);
        second = go_on(&load);
        /* What was stored does not come again, all else does; more than once
         * only where a slow machine lost its place in the group. */
        assert_true(second.received >= lag);
        if (second.assigned == 1)
            assert_int_equal(second.received, lag);
        assert_true(i == 1 || second.duplicates > 0);
    }
}

static void
killed_around_a_dead_letter_it_is_written_once(void **state)
{
    static const struct {
        const char *point;
        int least, most; /* dead letters that stand */
    } points[] = {
        { "before_refuse", 0, 0 },
        { "sent_refuse", 0, 64 },
        { "unread_refuse", 1, 64 },
        { "after_refuse", 1, 64 },
    };

    (void)state;
    NEEDS_BROKER();
    for (int i = 0; i < 4; i++) {
        struct load load = { .topic = points[i].point, .n_jobs = 8,
                             .longest = 20 };

        die_at(points[i].point, &load);
        assert_true(load.n_dead > 0);
        assert_in_range(letters_of(load.topic), points[i].least,
                        points[i].most);
        go_on(&load);
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
    int64_t n_held;
    pid_t late, other;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "[http]\nlisten = 127.0.0.1:0\n");
    late = start_faulty("asleep", 0, "before_finish:stop@1");
    wait_until_says(in_folder("asleep.0.err"), "before_finish");
    n_held = jobs_of("asleep", "state = 'running'");
    assert_true(n_held > 0);
    other = start_daemon("asleep", 1);
    while (judge("asleep").lost > 0) {
        assert_true(now_ms() < until);
        usleep(100000);
    }
    kill(late, SIGCONT);
    /* Each that it held is lost to it, the row it was about to write and
     * those that it only heard of by the heartbeat. */
    wait_for_metric(port_in(in_folder("asleep.0.err")),
                    "nightshift_jobs_fenced_total", 1);
    /* So are its partitions, and it learns of it. */
    wait_until_says(in_folder("asleep.0.err"), "lost=1");
    wait_until_read("asleep");
    stop_daemon(late);
    stop_daemon(other);
    assert_one_outcome_each(&load);
    assert_true(jobs_of("asleep", "attempt > 1") > 0);
}

static void
lost_answers_are_asked_for_again_at_every_operation(void **state)
{
    static const char *const met[] = {
        "unread_claim", "unread_checkpoint", "unread_finish", "unread_refuse",
        "sent_claim", "sent_finish", "before_claim", "before_finish",
    };
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
    for (size_t i = 0; i < sizeof(met) / sizeof(met[0]); i++)
        if (!file_says(in_folder("unheard.0.err"), met[i]))
            fail_msg("%s was not met", met[i]);
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
        cmocka_unit_test(
            killed_between_checkpoints_a_job_goes_on_at_its_last_block),
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
