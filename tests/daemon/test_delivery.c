/* nightshiftd from a real Kafka to a real PostgreSQL, killed, stopped and cut
 * off; then asked by SQL: every message has exactly one outcome. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "connectors/job.h"
#include "connectors/kafka.h"
#include "tests/daemon/client.h"
#include "tests/daemon/delivery.h"

/* --- tests ------------------------------------------------------------- */

static void
each_job_becomes_one_row_and_each_bad_message_one_dead_letter(void **state)
{
    struct load load = { .topic = "plain", .n_jobs = 40, .longest = 60 };
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    pid = start_daemon("plain", 0);
    wait_until_read("plain");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    /* A dead letter keeps what it refused. */
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                            "source_key LIKE 'plain/%%' AND payload_bytes > 0 "
                            "AND payload_lz4 IS NULL"), 0);
}

/* The row is the result, and the dead letter; the copy is one more. */
static void
a_topic_that_refuses_copies_costs_no_job_anything(void **state)
{
    struct load load = { .topic = "uncopied", .longest = 20 };
    char text[512];
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "results_topic = small\ndead_letter_topic = small\n");
    assert_int_equal(topic_that_refuses(&broker, "small"), 0);
    job_text(text, sizeof(text), &load, 1, 20);
    send_text("uncopied", 0, NULL, text);
    send_text("uncopied", 1, NULL, "{");
    assert_true(produce_flush(&broker));
    pid = start_daemon("uncopied", 0);
    wait_until_read("uncopied");
    stop_daemon(pid);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "job_id = 'uncopied-1' AND status = 'ok'"), 1);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                            "source_key LIKE 'uncopied/%%'"), 1);
    assert_int_equal(topic_end(&broker, "small", 0), 0);
    assert_true(file_says(in_folder("uncopied.0.err"),
                          "kafka.copy_refused refused=2"));
}

static void
the_trace_goes_through_and_copies_go_to_topics(void **state)
{
    static const char trace[] =
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    struct load load = { .topic = "traced", .longest = 20 };
    rd_kafka_headers_t *list = rd_kafka_headers_new(1);
    char text[512];
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "results_topic = answers\n"
                        "dead_letter_topic = letters\n"
                        "tombstone_cancels = yes\n");
    assert_int_equal(topic_admin(&broker, "answers", 1), 0);
    assert_int_equal(topic_admin(&broker, "letters", 1), 0);
    rd_kafka_header_add(list, "traceparent", -1, trace, -1);
    job_text(text, sizeof(text), &load, 1, 20);
    assert_true(produce(&broker, "traced", 0, NULL, text, strlen(text), list));
    send_text("traced", 0, NULL, "{");
    send_text("traced", 1, "traced-9", NULL); /* cancelled before it comes */
    assert_true(produce_flush(&broker));
    pid = start_daemon("traced", 0);
    wait_until_read("traced");
    job_text(text, sizeof(text), &load, 9, 20);
    send_text("traced", 2, NULL, text);
    assert_true(produce_flush(&broker));
    wait_until_read("traced");
    stop_daemon(pid);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "job_id = 'traced-1' AND status = 'ok' AND "
                            "trace_parent = '%s'", trace), 1);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "job_id = 'traced-9' AND status = 'cancelled'"), 1);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                            "source_key LIKE 'traced/%%'"), 1);
    assert_int_equal(topic_end(&broker, "answers", 0), 1);
    assert_int_equal(topic_end(&broker, "letters", 0), 1);
}

static void
a_file_that_is_submitted_twice_is_one_batch(void **state)
{
    struct load load = { .topic = "batch", .longest = 20 };
    const char *path = in_folder("night.jsonl");
    char text[512], conninfo[160], name[128];
    FILE *file = fopen(path, "w");
    char *printed;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    assert_non_null(file);
    for (int i = 0; i < 12; i++) {
        job_text(text, sizeof(text), &load, i, 20);
        fprintf(file, "%s\n", text);
    }
    assert_int_equal(fclose(file), 0);
    snprintf(conninfo, sizeof(conninfo), "postgres.conninfo=host=127.0.0.1 "
             "port=%d user=submitter dbname=postgres", pg_server.port);
    for (int i = 0; i < 2; i++) {
        if (RUN("submit", path, "--config", in_folder("batch.conf"), "--set",
                conninfo) != 0)
            fail_msg("%s", slurp(in_folder("stderr")));
        printed = slurp(in_folder("stdout"));
        printed[strcspn(printed, "\n")] = '\0';
        snprintf(name, sizeof(name), "%s", printed);
        free(printed);
        assert_int_equal(strlen(name), strlen("night.jsonl-") + 12);
        assert_int_equal(strncmp(name, "night.jsonl-", 12), 0);
    }
    pid = start_daemon("batch", 0);
    wait_until_read("batch");
    stop_daemon(pid);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "batch = '%s' AND job_id LIKE '%s/batch-%%'", name,
                            name), 12);
    assert_int_equal(number("SELECT expected FROM nightshift.batch_status "
                            "WHERE batch = '%s' AND total = 12", name), 12);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                            "source_key LIKE 'batch/%%'"), 0);

    /* One bad line, and nothing is sent. */
    file = fopen(path, "a");
    assert_non_null(file);
    fputs("{\"custom_id\":\"b\",\"body\":{}}\n", file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(RUN("submit", path, "--config", in_folder("batch.conf")),
                     65);
    assert_true(file_says(in_folder("stderr"), ":13: bad_param"));
    assert_int_equal(topic_end(&broker, "batch", 0) +
                         topic_end(&broker, "batch", 1) +
                         topic_end(&broker, "batch", 2), 24);
}

static void
killed_at_random_moments_no_message_is_lost_or_answered_twice(void **state)
{
    struct load load = { .topic = "killed", .n_jobs = 150, .longest = 200 };
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    for (int i = 0; i < 8; i++) {
        int64_t before = progress_of("killed"), until = now_ms() + SOON_MS;

        pid = start_daemon("killed", i);
        /* Before it is in the group, or once it has got on: a job that takes
         * three daemons down without a block is given up, and rightly. */
        while (i % 4 > 0 && progress_of("killed") == before &&
               now_ms() < until)
            usleep(10000);
        usleep(1000 * (useconds_t)(rand_r(&seed_of_run) % 800));
        kill(pid, SIGKILL);
        wait_for(pid, LIMIT_MS);
    }
    pid = start_daemon("killed", 8);
    wait_until_read("killed");
    end_daemon(pid);
    assert_one_outcome_each(&load);
    /* The kills did meet jobs that ran. */
    assert_true(number("SELECT count(*) FROM nightshift.job WHERE job_id LIKE "
                       "'killed-%%' AND attempt > 1") > 0);
}

static void
three_daemons_that_come_go_and_sleep_share_the_work(void **state)
{
    struct load load = { .topic = "shared", .n_jobs = 200, .longest = 200 };
    pid_t pid[3];

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    for (int i = 0; i < 3; i++)
        pid[i] = start_daemon("shared", i);
    for (int round = 0; round < 4; round++) {
        int victim = rand_r(&seed_of_run) % 3;

        usleep(500000);
        if (round % 2 == 0) { /* longer than its session and its leases */
            kill(pid[victim], SIGSTOP);
            usleep(2500000);
            kill(pid[victim], SIGCONT);
        } else {
            kill(pid[victim], round == 1 ? SIGKILL : SIGTERM);
            wait_for(pid[victim], LIMIT_MS);
            pid[victim] = start_daemon("shared", 3 + round);
        }
    }
    wait_until_read("shared");
    for (int i = 0; i < 3; i++)
        end_daemon(pid[i]);
    assert_one_outcome_each(&load);
}

/* What runs goes on where it is; the new owner of its partition hears that it
 * is held, waits, and acknowledges it once its row stands. The results' table
 * is locked, so that the jobs of the first daemon end only when they may. */
static void
a_job_goes_on_when_its_partition_moves_and_its_result_counts(void **state)
{
    struct load load = { .topic = "moves", .longest = 20 };
    PGconn *lock = pg_open_as("ns", "postgres");
    int64_t until = now_ms() + SOON_MS, n_waiting;
    uint16_t port;
    pid_t pid[2];

    (void)state;
    NEEDS_BROKER();
    prepare_topic(&load, "[http]\nlisten = 127.0.0.1:0\n");
    put_setting("moves", "lease", "5m");
    put_setting("moves", "answer", "5m");
    PQclear(PQexec(lock, "BEGIN; LOCK TABLE nightshift.result IN EXCLUSIVE "
                         "MODE"));
    /* One job a partition, and no other message: whichever moves, moves. */
    send_up_to(&load, 3);
    pid[0] = start_daemon("moves", 0);
    while (number("SELECT count(*) FROM nightshift.job WHERE state = 'running' "
                  "AND job_id LIKE 'moves-%%'") < 3) {
        assert_true(now_ms() < until);
        usleep(20000);
    }
    pid[1] = start_daemon("moves", 1);
    wait_until_says(in_folder("moves.1.err"), "kafka.assigned");
    wait_until_says(in_folder("moves.0.err"), "kafka.revoked");
    port = port_in(in_folder("moves.1.err"));
    wait_for_metric(port, "nightshift_jobs_in_flight", 1);
    n_waiting = metric_of(port, "nightshift_jobs_in_flight");
    assert_int_equal(rows_of("moves"), 0);
    PQclear(PQexec(lock, "ROLLBACK"));
    PQfinish(lock);
    wait_for_rows("moves", 3);
    wait_until_read("moves");
    assert_true(metric_of(port, "nightshift_jobs_duplicate_total") >=
                n_waiting);
    assert_int_equal(metric_of(port, "nightshift_passes_total"), 0);
    for (int i = 0; i < 2; i++)
        stop_daemon(pid[i]);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'moves-%%' AND attempt <> 1"), 0);
}

static void
the_broker_and_the_database_crash_and_come_back(void **state)
{
    struct load load = { .topic = "crashes", .n_jobs = 120, .longest = 200 };
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    pid = start_daemon("crashes", 0);
    wait_until_says(in_folder("crashes.0.err"), "kafka.assigned");
    usleep(300000);
    pg_stop(SIGQUIT); /* all sessions cut, and away for a while */
    usleep(700000);
    pg_start();
    usleep(500000);
    broker_kill(&broker);
    usleep(500000);
    assert_true(broker_start(&broker));
    assert_true(broker_answers(&broker, SOON_MS));
    pg_stop(SIGKILL);
    pg_start();
    wait_until_read("crashes");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job j JOIN "
                            "expected e ON e.id = j.job_id WHERE topic = "
                            "'crashes' AND retries > 0"), 0);
}

static void
without_a_broker_or_a_database_it_waits_and_ends_at_once(void **state)
{
    int64_t began;
    uint16_t port;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    write_config("nobroker", "127.0.0.1:1",
                 "[http]\nlisten = 127.0.0.1:0\n");
    pid = start_daemon("nobroker", 0);
    wait_until_says(in_folder("nobroker.0.err"), "kafka.trouble");
    port = port_in(in_folder("nobroker.0.err"));
    wait_for_status(port, "/healthz", 200);
    assert_int_equal(get_status(port, "/readyz"), 503);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    assert_false(file_says(in_folder("nobroker.0.err"), "daemon.ready"));
    began = now_ms();
    stop_daemon(pid);
    assert_in_range(now_ms() - began, 0, 2000);

    assert_int_equal(topic_admin(&broker, "nodb", PARTITIONS), 0);
    write_config("nodb", broker.address, "");
    pg_stop(SIGINT);
    pid = start_daemon("nodb", 0);
    wait_until_says(in_folder("nodb.0.err"), "daemon.waiting");
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    pg_start();
    wait_until_says(in_folder("nodb.0.err"), "daemon.ready");
    stop_daemon(pid);
}

static void
what_a_database_refuses_ends_the_daemon_unless_it_passes(void **state)
{
    static const struct {
        const char *user, *database, *says;
    } bad[] = {
        { "nobody_here", "postgres", "nobody_here" },
        { "submitter", "postgres", "nightshift_rw" }, /* without the rights */
        { "nsd", "template1", "nightshift db init" }, /* without the schema */
    };
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    assert_int_equal(topic_admin(&broker, "refused", PARTITIONS), 0);
    write_config("refused", broker.address, "");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char set[256];
        const char *const argv[] = { "nightshiftd", "--config",
                                     in_folder("refused.conf"), "--model",
                                     program_model, "--set", set, NULL };

        snprintf(set, sizeof(set), "postgres.conninfo=host=127.0.0.1 port=%d "
                 "user=%s dbname=%s", pg_server.port, bad[i].user,
                 bad[i].database);
        pid = spawn(argv, in_folder("refused.out"), in_folder("refused.err"));
        assert_int_equal(wait_for(pid, LIMIT_MS), 78);
        if (!file_says(in_folder("refused.err"), bad[i].says))
            fail_msg("%s: %s", set, slurp(in_folder("refused.err")));
    }

    /* Too many sessions are some of others, and end. */
    DO("ALTER ROLE nsd CONNECTION LIMIT 0");
    pid = start_daemon("refused", 0);
    wait_until_says(in_folder("refused.0.err"), "daemon.waiting");
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    DO("ALTER ROLE nsd CONNECTION LIMIT -1");
    wait_until_says(in_folder("refused.0.err"), "daemon.ready");
    stop_daemon(pid);
}

static void
the_older_of_two_with_one_name_ends_to_be_started_again(void **state)
{
    pid_t older, newer;
    FILE *file;

    (void)state;
    NEEDS_BROKER();
    assert_int_equal(topic_admin(&broker, "twins", PARTITIONS), 0);
    write_config("twins", broker.address, "");
    file = fopen(in_folder("twins.conf"), "a"); /* ends in [kafka] */
    assert_non_null(file);
    fputs("group.instance.id = one\n", file);
    assert_int_equal(fclose(file), 0);
    older = start_daemon("twins", 0);
    wait_until_says(in_folder("twins.0.err"), "daemon.ready");
    newer = start_daemon("twins", 1);
    assert_int_equal(wait_for(older, 30000), 75);
    wait_until_says(in_folder("twins.1.err"), "daemon.ready");
    stop_daemon(newer);
}

/* --- negative controls: a checker that can not fail is no test ---------- */

enum { IN_HAND = 64, A_JOB_MS = 100 };

/* A daemon that makes a mistake, as this program under another name:
 * "careless" acknowledges what it has only received; "unfenced" writes results
 * whoever may own the job by now. Works until it is killed. */
static int
wrong_daemon(const char *mistake, const char *address, const char *topic,
             const char *port)
{
    struct ns_kafka_setting settings[] = {
        { "bootstrap.servers", address }, { "group.id", topic },
        { "session.timeout.ms", "1500" }, { "heartbeat.interval.ms", "200" },
        { "fetch.wait.max.ms", "50" },
    };
    struct ns_kafka_options options = { .settings = settings, .n_settings = 5,
                                        .topics = topic };
    struct ns_job_options plain = { 0 };
    struct ns_position at[IN_HAND];
    struct ns_kafka_source *kafka;
    struct ns_job *job[IN_HAND];
    struct ns_message message;
    struct ns_error err;
    bool careless = strcmp(mistake, "careless") == 0;
    char text[1024];
    int n = 0;

    snprintf(text, sizeof(text), "host=127.0.0.1 port=%s user=ns "
             "dbname=postgres", port);
    admin = PQconnectdb(text);
    if (ns_kafka_source_open(&options, &kafka, &err) != NS_OK)
        return 1;
    for (;;) {
        for (n = 0; n < IN_HAND; n++) {
            if (ns_source_poll(ns_kafka_source(kafka), 300, &message, &err) !=
                    NS_OK || message.kind != NS_MESSAGE_JOB)
                break;
            if (ns_job_parse(&message, &plain, &job[n], &err) != NS_OK)
                return 2;
            at[n] = message.position;
            if (careless)
                ns_source_acknowledge(ns_kafka_source(kafka), at[n]);
        }
        for (int i = 0; i < n; i++) {
            usleep(A_JOB_MS * 1000);
            ns_source_tend(ns_kafka_source(kafka), &err);
            DO("INSERT INTO nightshift.job (job_id, body_sha256, state, fence, "
               "finished_at) VALUES ('%s', decode(repeat('01', 32), 'hex'), "
               "'failed', 0, now()) ON CONFLICT DO NOTHING", job[i]->id);
            DO("INSERT INTO nightshift.result (job_id, tenant, fence, status) "
               "VALUES ('%s', 'default', 0, 'failed') ON CONFLICT (job_id) DO "
               "UPDATE SET status = excluded.status", job[i]->id);
            ns_source_acknowledge(ns_kafka_source(kafka), at[i]);
            ns_job_destroy(job[i]);
        }
    }
}

static pid_t
start_wrong(const char *mistake, const char *topic)
{
    char port[16];
    pid_t pid;

    snprintf(port, sizeof(port), "%d", pg_server.port);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", mistake, broker.address, topic, port, NULL);
        _exit(127);
    }
    return pid;
}

static void
send_plain(const char *topic, int n)
{
    struct load load = { .topic = topic, .longest = 20 };
    char text[512];

    assert_int_equal(topic_admin(&broker, topic, PARTITIONS), 0);
    for (int i = 0; i < n; i++) {
        job_text(text, sizeof(text), &load, i, 20);
        send_text(topic, i % PARTITIONS, NULL, text);
        DO("INSERT INTO expected VALUES ('%s', '%s-%d', false)", topic, topic,
           i);
    }
    assert_true(produce_flush(&broker));
}

static void
control_what_is_acknowledged_at_receipt_is_seen_to_be_lost(void **state)
{
    int64_t until = now_ms() + SOON_MS;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    send_plain("careless", 60);
    pid = start_wrong("careless", "careless");
    while (lag_of("careless") > 0 && now_ms() < until)
        usleep(100000);
    kill(pid, SIGKILL);
    wait_for(pid, LIMIT_MS);
    assert_int_equal(lag_of("careless"), 0); /* all seems well */
    write_config("careless", broker.address, "");
    pid = start_daemon("careless", 0);
    wait_until_says(in_folder("careless.0.err"), "daemon.ready");
    stop_daemon(pid);
    assert_true(judge("careless").lost > 0);
}

static void
control_a_late_write_without_a_fence_is_seen(void **state)
{
    int64_t until = now_ms() + SOON_MS;
    pid_t late, other;

    (void)state;
    NEEDS_BROKER();
    send_plain("unfenced", 40);
    late = start_wrong("unfenced", "unfenced");
    while (number("SELECT count(*) FROM audit WHERE job_id LIKE "
                  "'unfenced-%%'") < 3 && now_ms() < until)
        usleep(50000);
    kill(late, SIGSTOP);
    other = start_wrong("unfenced", "unfenced");
    while (judge("unfenced").lost > 0 && now_ms() < until)
        usleep(200000);
    kill(late, SIGCONT);
    while (judge("unfenced").rewritten == 0 && now_ms() < until)
        usleep(100000);
    kill(late, SIGKILL);
    kill(other, SIGKILL);
    wait_for(late, LIMIT_MS);
    wait_for(other, LIMIT_MS);
    assert_int_equal(judge("unfenced").lost, 0);
    assert_true(judge("unfenced").rewritten > 0);
}

static void
pairs_that_can_not_keep_the_promise_are_refused(void **state)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "[intake]\ntopics = a\n[kafka]\nbootstrap.servers = localhost\n",
          "without postgres.conninfo" },
        { "[intake]\ntopics = a\nspool = /tmp\n", "both given" },
        { "[intake]\nspool = /tmp\n[kafka]\ngroup.id = g\n", "[kafka]" },
        { "[intake]\ntopics = a\n[postgres]\nconninfo = host=localhost\n",
          "bootstrap.servers is not set" },
        { "[intake]\ntopics = a\n[postgres]\nconninfo = host=localhost\n"
          "[kafka]\nbootstrap.servers = kafka.example.com\n", "plain text" },
        { "[intake]\ntopics = a\n[postgres]\nconninfo = host=localhost\n"
          "[kafka]\nbootstrap.servers = localhost\nsesion.timeout.ms = 1\n",
          "sesion.timeout.ms" },
    };

    (void)state;
    NEEDS_BROKER();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const char *const argv[] = { "nightshiftd", "--config",
                                     in_folder("bad.conf"), "--check-config",
                                     NULL };
        FILE *file = fopen(in_folder("bad.conf"), "w");

        assert_non_null(file);
        fputs(bad[i].text, file);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(chmod(in_folder("bad.conf"), 0600), 0);
        assert_int_equal(wait_for(spawn(argv, in_folder("o"), in_folder("e")),
                                  LIMIT_MS), 78);
        if (!file_says(in_folder("e"), bad[i].says))
            fail_msg("%s: %s", bad[i].text, slurp(in_folder("e")));
    }
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_that_can_not_keep_the_promise_are_refused),
        cmocka_unit_test(
            each_job_becomes_one_row_and_each_bad_message_one_dead_letter),
        cmocka_unit_test(a_topic_that_refuses_copies_costs_no_job_anything),
        cmocka_unit_test(the_trace_goes_through_and_copies_go_to_topics),
        cmocka_unit_test(a_file_that_is_submitted_twice_is_one_batch),
        cmocka_unit_test(
            killed_at_random_moments_no_message_is_lost_or_answered_twice),
        cmocka_unit_test(three_daemons_that_come_go_and_sleep_share_the_work),
        cmocka_unit_test(
            a_job_goes_on_when_its_partition_moves_and_its_result_counts),
        cmocka_unit_test(the_broker_and_the_database_crash_and_come_back),
        cmocka_unit_test(the_older_of_two_with_one_name_ends_to_be_started_again),
        cmocka_unit_test(
            control_what_is_acknowledged_at_receipt_is_seen_to_be_lost),
        cmocka_unit_test(control_a_late_write_without_a_fence_is_seen),
        cmocka_unit_test(
            without_a_broker_or_a_database_it_waits_and_ends_at_once),
        cmocka_unit_test(
            what_a_database_refuses_ends_the_daemon_unless_it_passes),
    };

    if (argc == 4 && strstr("careless unfenced", argv[0]))
        return wrong_daemon(argv[0], argv[1], argv[2], argv[3]);
    if (getenv("NS_ONLY")) /* a pattern of test names */
        cmocka_set_test_filter(getenv("NS_ONLY"));
    return cmocka_run_group_tests(tests, setup_servers, teardown_servers);
}
