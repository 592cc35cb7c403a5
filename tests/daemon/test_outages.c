/* nightshiftd while the world around it is full, frozen, replaced or wrong
 * about the time: real servers, real file systems. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/mount.h>
#include <sys/statvfs.h>

#include "tests/daemon/client.h"
#include "tests/daemon/delivery.h"

/* A file system of its own size; root alone can have one, and the tests that
 * need it fail without. */
static void
mount_small(const char *at, const char *size)
{
    char option[64];

    snprintf(option, sizeof(option), "size=%s,mode=0777", size);
    assert_int_equal(mkdir(at, 0777), 0);
    if (mount("none", at, "tmpfs", 0, option) != 0)
        fail_msg("a tmpfs at %s: %s; this test wants root", at,
                 strerror(errno));
}

static void
fill(const char *at)
{
    char path[PATH_MAX];
    FILE *file;

    snprintf(path, sizeof(path), "%s/filler", at);
    file = fopen(path, "w");
    assert_non_null(file);
    setvbuf(file, NULL, _IONBF, 0);
    while (fputc(0, file) != EOF)
        ;
    assert_int_equal(errno, ENOSPC);
    fclose(file);
}

static void
make_room(const char *at)
{
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/filler", at);
    assert_int_equal(unlink(path), 0);
}

enum { WINDOW = 24 }; /* write_config() */

static void
while_the_disk_of_the_database_is_full_results_wait(void **state)
{
    struct load load = { .topic = "nospace", .n_jobs = 60, .longest = 60 };
    char at[128];
    int64_t before, received;
    uint16_t port;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    snprintf(at, sizeof(at), "%s/small", pg_server.folder);
    mount_small(at, "4m");
    if (getpwnam("postgres"))
        assert_int_equal(chown(at, getpwnam("postgres")->pw_uid, (gid_t)-1), 0);
    DO("CREATE TABLESPACE small LOCATION '%s'", at);
    /* Only the bytes of answers and blocks: the rest is where it was. */
    DO("ALTER TABLE nightshift.result SET TABLESPACE small");
    fill(at);
    prepare_load(&load, "[http]\nlisten = 127.0.0.1:0\n");
    before = rows_of("nospace");
    pid = start_daemon("nospace", 0);
    wait_until_says(in_folder("nospace.0.err"), "53100");
    port = port_in(in_folder("nospace.0.err"));
    wait_for_status(port, "/readyz", 503);
    assert_int_equal(get_status(port, "/healthz"), 200);
    /* The window is full, and behind it nothing is taken in. */
    wait_for_metric(port, "nightshift_jobs_in_flight", WINDOW);
    received = metric_of(port, "nightshift_jobs_received_total");
    usleep(500000);
    assert_int_equal(metric_of(port, "nightshift_jobs_received_total"),
                     received);
    assert_true(received < load.n_messages);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* it lives, and waits */
    assert_true(lag_of("nospace") > 0);
    /* What fits into the last page may stand. */
    assert_true(rows_of("nospace") - before < load.n_jobs);
    make_room(at);
    wait_for_status(port, "/readyz", 200);
    wait_until_read("nospace");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'nospace-%%' AND retries > 0"), 0);
    DO("ALTER TABLE nightshift.result SET TABLESPACE pg_default");
    DO("DROP TABLESPACE small");
    assert_int_equal(umount(at), 0);
}

static void
while_the_disk_of_the_spool_is_full_results_wait(void **state)
{
    const char *spool = in_folder("fullspool");
    const char *const argv[] = { "nightshiftd", "--model", program_model,
                                 "--spool", spool, "--set", "cpu.threads=1",
                                 "--set", "http.listen=127.0.0.1:0",
                                 "--set", "daemon.retry=100ms", NULL };
    char path[PATH_MAX];
    struct answers answers;
    uint16_t port;
    pid_t pid;

    (void)state;
    mount_small(spool, "256k");
    for (int i = 0; i < 5; i++) {
        static const char *const folders[] = { "in", "work", "out", "done",
                                               "dead" };

        snprintf(path, sizeof(path), "%s/%s", spool, folders[i]);
        assert_int_equal(mkdir(path, 0755), 0);
    }
    snprintf(path, sizeof(path), "%s/in/night.jsonl", spool);
    write_jobs(path, 40, 60);
    fill(spool);
    pid = spawn(argv, in_folder("full.out"), in_folder("full.err"));
    wait_until_says(in_folder("full.err"), "spool.full");
    port = port_in(in_folder("full.err"));
    wait_for_status(port, "/readyz", 503);
    assert_int_equal(get_status(port, "/healthz"), 200);
    usleep(300000);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    make_room(spool);
    wait_for_status(port, "/readyz", 200);
    snprintf(path, sizeof(path), "%s/done/night.jsonl", spool);
    wait_until_exists(path);
    stop_daemon(pid);
    snprintf(path, sizeof(path), "%s/out/night.jsonl", spool);
    read_answers(path, &answers);
    assert_int_equal(answers.n, 40);
    for (int i = 1; i <= 40; i++)
        assert_int_equal(answers.count[i], 1);
    answers_fini(&answers);
    assert_int_equal(umount(spool), 0);
}

static void
while_the_broker_is_frozen_jobs_go_on_and_their_rows_land(void **state)
{
    struct load load = { .topic = "frozen", .n_jobs = 60, .longest = 200 };
    int64_t before;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "");
    pid = start_daemon("frozen", 0);
    wait_for_rows("frozen", 2);
    kill(broker.pid, SIGSTOP);
    before = rows_of("frozen");
    wait_for_rows("frozen", before + 5);
    /* Longer than the session: its partitions are lost to it. */
    wait_until_says(in_folder("frozen.0.err"), "lost=1");
    kill(broker.pid, SIGCONT);
    assert_true(broker_answers(&broker, SOON_MS));
    wait_until_read("frozen");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'frozen-%%' AND retries > 0"), 0);
}

static void
a_new_group_on_an_old_topic_runs_nothing_again(void **state)
{
    struct load load = { .topic = "forgotten", .n_jobs = 30, .longest = 20 };
    int64_t attempts;
    uint16_t port;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_load(&load, "[http]\nlisten = 127.0.0.1:0\n");
    pid = start_daemon("forgotten", 0);
    wait_until_read("forgotten");
    stop_daemon(pid);
    attempts = number("SELECT sum(attempt) FROM nightshift.job WHERE job_id "
                      "LIKE 'forgotten-%%'");
    put_setting("forgotten", "group.id", "amnesiac");
    pid = start_daemon("forgotten", 1);
    wait_until_says(in_folder("forgotten.1.err"), "daemon.ready");
    port = port_in(in_folder("forgotten.1.err"));
    for (int64_t until = now_ms() + SOON_MS, left = 1; left > 0;) {
        assert_true(now_ms() < until);
        usleep(200000);
        left = load.n_messages;
        for (int32_t i = 0; i < PARTITIONS; i++) {
            int64_t at = group_offset(&broker, "amnesiac", "forgotten", i);

            left -= at > 0 ? at : 0;
        }
    }
    /* All of them came again, none went into a pass, and each good one was
     * acknowledged for its row. */
    assert_true(metric_of(port, "nightshift_jobs_received_total") >=
                load.n_messages);
    assert_true(metric_of(port, "nightshift_jobs_duplicate_total") >=
                load.n_jobs);
    assert_int_equal(metric_of(port, "nightshift_passes_total"), 0);
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT sum(attempt) FROM nightshift.job WHERE "
                            "job_id LIKE 'forgotten-%%'"), attempts);
}

static void
a_flood_of_copies_is_one_row(void **state)
{
    struct load load = { .topic = "flood", .longest = 20 };
    enum { COPIES = 100000 };
    char text[512];
    int64_t began;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_topic(&load, "");
    put_setting("flood", "window", "512");
    put_setting("flood", "span", "4096");
    job_text(text, sizeof(text), &load, 1, 20);
    for (int i = 0; i < COPIES; i++) {
        send_text("flood", i % PARTITIONS, NULL, text);
        if (i % 1000 == 999)
            assert_true(produce_flush(&broker));
    }
    pid = start_daemon("flood", 0);
    wait_for_rows("flood", 1);
    began = now_ms();
    wait_until_read("flood");
    printf("# %d copies in %d ms\n", COPIES, (int)(now_ms() - began));
    stop_daemon(pid);
    assert_int_equal(rows_of("flood"), 1);
    assert_int_equal(number("SELECT max(attempt) FROM nightshift.job WHERE "
                            "job_id LIKE 'flood-%%'"), 1);
}

/* --- nothing that grows ------------------------------------------------- */

static long
count_in(pid_t pid, const char *what)
{
    char command[128];
    long n = -1;
    FILE *pipe;

    snprintf(command, sizeof(command), "ls /proc/%d/%s | wc -l", (int)pid,
             what);
    pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(fscanf(pipe, "%ld", &n), 1);
    pclose(pipe);
    return n;
}

static void
over_two_thousand_jobs_with_faults_nothing_grows(void **state)
{
    struct load load = { .topic = "flat", .longest = 10 };
    long fds = 0, threads = 0, kb = 0;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare_topic(&load, "");
    pid = start_daemon("flat", 0);
    for (int round = 0; round < 20; round++) {
        load.n_jobs += 100;
        send_up_to(&load, load.n_jobs);
        DO("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
           "usename = 'nsd'");
        wait_until_read("flat");
        if (round == 9) { /* warm */
            fds = count_in(pid, "fd");
            threads = count_in(pid, "task");
            kb = resident_kb(pid);
        }
    }
    /* A connection may be in the making. */
    assert_in_range(count_in(pid, "fd"), 0, fds + 4);
    assert_in_range(count_in(pid, "task"), 0, threads + 2);
    printf("# %ld descriptors, %ld threads, %ld KiB, then %ld KiB\n", fds,
           threads, kb, resident_kb(pid));
#ifndef __SANITIZE_ADDRESS__ /* which keeps what was freed for a while */
    assert_in_range(resident_kb(pid), 0, kb + 8192);
#endif
    stop_daemon(pid);
    assert_one_outcome_each(&load);
}

/* --- another server, another time --------------------------------------- */

/* A replica that has each row before it is acknowledged, and takes over. */
static void
when_the_database_fails_over_its_replica_has_every_row(void **state)
{
    struct load load = { .topic = "failover", .n_jobs = 60, .longest = 200 };
    char program[192], replica[128], log[128], port[16], from[128];
    int other = pg_free_port(), old_port = pg_server.port;
    char command[PATH_MAX * 2];
    const char *const copy[] = { program, "-D", replica, "-d", from, "-R",
                                 "-X", "stream", "-c", "fast", "-C", "-S",
                                 "copy", NULL };
    const char *const serve[] = { program, "-D", replica, "-p", port, NULL };
    int64_t before;
    pid_t pid, server;

    (void)state;
    NEEDS_BROKER();
    pg_add_file("data/pg_hba.conf",
                "host replication all 127.0.0.1/32 trust\n", "a");
    DO("SELECT pg_reload_conf()");
    snprintf(replica, sizeof(replica), "%s/replica", pg_server.folder);
    snprintf(log, sizeof(log), "%s/replica.log", pg_server.folder);
    snprintf(port, sizeof(port), "%d", other);
    snprintf(from, sizeof(from), "host=127.0.0.1 port=%d user=ns "
             "application_name=copy", old_port);
    snprintf(program, sizeof(program), "%s/pg_basebackup", pg_server.bin);
    assert_int_equal(pg_wait_exit(pg_spawn(log, copy)), 0);
    snprintf(program, sizeof(program), "%s/postgres", pg_server.bin);
    server = pg_spawn(log, serve);
    for (int64_t until = now_ms() + SOON_MS;
         number("SELECT count(*) FROM pg_stat_replication WHERE state = "
                "'streaming'") == 0;) {
        assert_true(now_ms() < until);
        usleep(50000);
    }
    DO("ALTER SYSTEM SET synchronous_standby_names = '*'");
    DO("SELECT pg_reload_conf()");

    prepare_load(&load, "");
    snprintf(command, sizeof(command), "sed -i 's/host=127.0.0.1 port=%d/"
             "host=127.0.0.1,127.0.0.1 port=%d,%d/' '%s'", old_port, old_port,
             other, in_folder("failover.conf"));
    assert_int_equal(system(command), 0);
    pid = start_daemon("failover", 0);
    wait_for_rows("failover", 5);
    before = rows_of("failover"); /* at least these were answered for */
    pg_stop(SIGKILL);             /* for good */
    snprintf(program, sizeof(program), "%s/pg_ctl", pg_server.bin);
    {
        const char *const promote[] = { program, "promote", "-D", replica,
                                        NULL };

        assert_int_equal(pg_wait_exit(pg_spawn(log, promote)), 0);
    }
    pg_server.port = other;
    PQfinish(admin);
    admin = pg_open_as("ns", "postgres");
    assert_true(rows_of("failover") >= before);
    DO("ALTER SYSTEM RESET synchronous_standby_names");
    DO("SELECT pg_reload_conf()");
    wait_until_read("failover");
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    /* It was the same daemon that went over, and it cost no job a thing. */
    assert_true(file_says(in_folder("failover.0.err"), "store.back"));
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'failover-%%' AND retries > 0"), 0);

    /* Back to the first one, for whoever comes next. */
    kill(server, SIGQUIT);
    pg_wait_exit(server);
    pg_server.port = old_port;
    pg_start();
    PQfinish(admin);
    admin = pg_open_as("ns", "postgres");
    DO("ALTER SYSTEM RESET synchronous_standby_names");
    DO("SELECT pg_reload_conf()");
}

static void
a_host_whose_clock_is_an_hour_off_keeps_leases_and_deadlines(void **state)
{
    struct load load = { .topic = "clocks", .n_jobs = 40, .longest = 80 };
    time_t late = time(NULL) + 1800;
    char text[512], until[32];
    struct tm broken;
    pid_t pid[2];

    (void)state;
    NEEDS_BROKER();
    prepare_topic(&load, "");
    /* In the database's time it is far off, on the first host's long over. */
    gmtime_r(&late, &broken);
    strftime(until, sizeof(until), "%Y-%m-%dT%H:%M:%SZ", &broken);
    snprintf(text, sizeof(text), "{\"custom_id\":\"clocks-late\",\"body\":{"
             "\"messages\":[{\"role\":\"user\",\"content\":\"now\"}],"
             "\"max_tokens\":10},\"nightshift\":{\"deadline\":\"%s\"}}",
             until);
    send_text("clocks", 0, NULL, text);
    send_up_to(&load, load.n_jobs);
    for (int i = 0; i < 2; i++) {
        setenv("NS_CLOCK_MS", i ? "-3600000" : "3600000", 1);
        pid[i] = start_program("tests/nightshiftd", "clocks", i);
        unsetenv("NS_CLOCK_MS");
        if (i == 0) /* the one who believes it to be too late is alone */
            wait_for_rows("clocks", 10);
    }
    wait_until_read("clocks");
    for (int i = 0; i < 2; i++)
        stop_daemon(pid[i]);
    assert_one_outcome_each(&load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'clocks-%%' AND stalls > 0"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "job_id = 'clocks-late' AND status = 'ok'"), 1);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(while_the_disk_of_the_database_is_full_results_wait),
        cmocka_unit_test(while_the_disk_of_the_spool_is_full_results_wait),
        cmocka_unit_test(
            while_the_broker_is_frozen_jobs_go_on_and_their_rows_land),
        cmocka_unit_test(a_new_group_on_an_old_topic_runs_nothing_again),
        cmocka_unit_test(a_flood_of_copies_is_one_row),
        cmocka_unit_test(over_two_thousand_jobs_with_faults_nothing_grows),
        cmocka_unit_test(
            a_host_whose_clock_is_an_hour_off_keeps_leases_and_deadlines),
        cmocka_unit_test(when_the_database_fails_over_its_replica_has_every_row),
    };

    if (getenv("NS_ONLY")) /* a pattern of test names */
        cmocka_set_test_filter(getenv("NS_ONLY"));
    return cmocka_run_group_tests(tests, setup_servers, teardown_servers);
}
