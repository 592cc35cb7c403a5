/* nightshiftd(8) end to end on a spool directory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 30, LONGEST = 120 };

static struct answers reference;
static int n_spools;
static char spool[PATH_MAX];

static void
new_spool(void)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };

    snprintf(spool, sizeof(spool), "%s", in_folder("spool-%d", n_spools++));
    for (size_t i = 0; i < 6; i++) {
        char path[PATH_MAX + 8];

        snprintf(path, sizeof(path), "%s%s", spool, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
}

static const char *
in_spool(const char *name)
{
    static char path[4][PATH_MAX + 64];
    static int next;
    char *out = path[next++ % 4];

    snprintf(out, sizeof(path[0]), "%s/%s", spool, name);
    return out;
}

/* As producers do it: under another name first. */
static void
drop_file(const char *name)
{
    char part[64], whole[64];

    snprintf(part, sizeof(part), "in/%s.part", name);
    snprintf(whole, sizeof(whole), "in/%s", name);
    write_jobs(in_spool(part), N_JOBS, LONGEST);
    assert_int_equal(rename(in_spool(part), in_spool(whole)), 0);
}

/* Up to six more words for the command line, NULL where there are none. */
static pid_t
start_daemon(const char *a, const char *b)
{
    const char *const argv[] = {
        "nightshiftd", "--spool", spool, "--model", program_model, "--set",
        "cpu.threads=2", "--set", "intake.poll=20ms", "--set",
        "daemon.checkpoint=0", "--set", "engine.max_sequences=4", "--set",
        "intake.window=6", a, b, NULL,
    };

    return spawn(argv, in_folder("d.out"), in_folder("d.err"));
}

static pid_t
start_ready(const char *a, const char *b)
{
    pid_t pid = start_daemon(a, b);

    wait_until_says(in_folder("d.err"), "daemon.ready");
    return pid;
}

static void
stop_daemon(pid_t pid)
{
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
}

static int
setup(void **state)
{
    int failed = make_folder(state);

    if (failed)
        return failed;
    write_jobs(in_folder("jobs.jsonl"), N_JOBS, LONGEST);
    if (RUN("run", in_folder("jobs.jsonl"), "-o", in_folder("whole.jsonl"),
            "-m", program_model) != 1)
        return -1;
    read_answers(in_folder("whole.jsonl"), &reference);
    return 0;
}

static void
a_file_that_is_dropped_in_comes_out_answered(void **state)
{
    pid_t pid;

    (void)state;
    new_spool();
    drop_file("a.jsonl");
    pid = start_ready(NULL, NULL);
    wait_until_exists(in_spool("out/a.jsonl"));
    drop_file("b.jsonl");
    wait_until_exists(in_spool("out/b.jsonl"));
    wait_until_exists(in_spool("done/b.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
    assert_same_answers(in_spool("out/b.jsonl"), &reference, N_JOBS);
    assert_true(exists(in_spool("done/a.jsonl")));
    assert_false(exists(in_spool("in/a.jsonl")));
    assert_false(exists(in_spool("out/a.jsonl.part")));
}

static void
sigterm_drains_what_runs_and_the_next_start_finishes_the_file(void **state)
{
    pid_t pid;

    (void)state;
    new_spool();
    drop_file("a.jsonl");
    pid = start_ready("--set", "daemon.drain=30s");
    wait_until_exists(in_spool("out/a.jsonl.part"));
    usleep(100000);
    stop_daemon(pid);
    assert_true(file_says(in_folder("d.err"), "daemon.draining"));
    assert_true(file_says(in_folder("d.err"), "daemon.stopped"));
    pid = start_ready(NULL, NULL);
    wait_until_exists(in_spool("out/a.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
}

static void
a_drain_without_time_keeps_blocks_and_loses_nothing(void **state)
{
    pid_t pid;

    (void)state;
    new_spool();
    drop_file("a.jsonl");
    for (int i = 0; i < 3; i++) {
        int64_t asked;

        pid = start_ready("--set", "daemon.drain=0");
        usleep(120000);
        asked = now_ms();
        stop_daemon(pid);
        assert_true(now_ms() - asked < 5000);
    }
    pid = start_ready(NULL, NULL);
    wait_until_exists(in_spool("out/a.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
}

/* Both wait for a process that stands still, so that no drain can end between. */
static void
a_second_sigterm_ends_at_once_and_loses_nothing(void **state)
{
    pid_t pid;

    (void)state;
    new_spool();
    drop_file("a.jsonl");
    pid = start_ready("--set", "daemon.drain=10m");
    wait_until_exists(in_spool("out/a.jsonl.part"));
    kill(pid, SIGSTOP);
    kill(pid, SIGTERM);
    kill(pid, SIGINT);
    kill(pid, SIGCONT);
    assert_int_equal(wait_for(pid, LIMIT_MS), 75);
    assert_false(exists(in_spool("out/a.jsonl")));
    pid = start_ready(NULL, NULL);
    wait_until_exists(in_spool("out/a.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
}

/* Bytes of results that stand in out/. */
static int64_t
bytes_out(void)
{
    static const char *const names[] = { "out/a.jsonl", "out/a.jsonl.part",
                                         "out/b.jsonl", "out/b.jsonl.part" };
    int64_t sum = 0;
    struct stat st;

    for (int i = 0; i < 4; i++)
        if (stat(in_spool(names[i]), &st) == 0)
            sum += st.st_size;
    return sum;
}

static void
killed_again_and_again_each_job_is_answered_once(void **state)
{
    unsigned seed = 11;
    int n_midway = 0;
    int64_t before;
    pid_t pid;

    (void)state;
    new_spool();
    drop_file("a.jsonl");
    drop_file("b.jsonl");
    for (int i = 0; i < 14 && !(exists(in_spool("out/a.jsonl")) &&
                                exists(in_spool("out/b.jsonl")));
         i++) {
        /* Each life gets something done, and every fourth ends in order: a
         * job that sees four deaths and comes to no block is given up. */
        before = bytes_out();
        pid = start_daemon(NULL, NULL);
        while (bytes_out() <= before && !exists(in_spool("done/b.jsonl")))
            usleep(1000);
        usleep((useconds_t)(rand_r(&seed) % 150000));
        if (i % 4 == 3) {
            stop_daemon(pid);
            continue;
        }
        kill(pid, SIGKILL);
        assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
        n_midway += exists(in_spool("out/a.jsonl.part")) ||
                    exists(in_spool("out/b.jsonl.part"));
    }
    assert_true(n_midway >= 3);
    pid = start_ready(NULL, NULL);
    wait_until_exists(in_spool("out/a.jsonl"));
    wait_until_exists(in_spool("out/b.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
    assert_same_answers(in_spool("out/b.jsonl"), &reference, N_JOBS);
}

static void
a_second_daemon_on_the_spool_is_refused_and_the_first_unharmed(void **state)
{
    const char *const argv[] = { "nightshiftd", "--spool", spool, "--model",
                                 program_model, NULL };
    pid_t pid, second;
    char holder[24];

    (void)state;
    new_spool();
    pid = start_ready(NULL, NULL);
    second = spawn(argv, in_folder("2.out"), in_folder("2.err"));
    assert_int_equal(wait_for(second, LIMIT_MS), 75);
    snprintf(holder, sizeof(holder), "%ld", (long)pid);
    assert_true(file_says(in_folder("2.err"), holder)); /* who has it */
    drop_file("a.jsonl");
    wait_until_exists(in_spool("out/a.jsonl"));
    stop_daemon(pid);
    assert_same_answers(in_spool("out/a.jsonl"), &reference, N_JOBS);
}

static void
write_config(const char *text)
{
    FILE *file = fopen(in_folder("d.conf"), "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(in_folder("d.conf"), 0600), 0);
}

static void
sighup_takes_good_settings_and_keeps_the_old_over_bad_ones(void **state)
{
    pid_t pid;

    (void)state;
    new_spool();
    write_config("[daemon]\ndrain = 7s\n");
    pid = start_ready("--config", in_folder("d.conf"));
    write_config("[daemon]\ndrain = 9s\n[engine]\nreserve_tokens = 77\n");
    kill(pid, SIGHUP);
    wait_until_says(in_folder("d.err"), "config.reloaded");
    assert_true(file_says(in_folder("d.err"),
                          "config.changed key=daemon.drain"));
    assert_true(file_says(in_folder("d.err"),
                          "config.needs_restart key=engine.reserve_tokens"));
    write_config("[daemon]\ndrain = 11s\nlog_level = loud\n");
    kill(pid, SIGHUP);
    wait_until_says(in_folder("d.err"), "config.reload_failed");
    assert_true(file_says(in_folder("d.err"), "d.conf:3"));
    assert_int_equal(unlink(in_folder("d.conf")), 0);
    kill(pid, SIGHUP);
    wait_until_says(in_folder("d.err"), "No such file");
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    assert_true(file_says(in_folder("d.err"), "grace_ms=9000"));
}

static void
mistakes_of_configuration_are_told_from_those_that_pass(void **state)
{
    const char *const bare[] = { "nightshiftd", "--model", program_model,
                                 NULL };
    const char *const bad[] = { "nightshiftd", "--config",
                                in_folder("d.conf"), "--check-config", NULL };
    const char *const print[] = { "nightshiftd", "--set", "daemon.drain=3s",
                                  "--print-config", NULL };
    const char *const nowhere[] = { "nightshiftd", "--model", program_model,
                                    "--spool", in_folder("nowhere"), NULL };

    (void)state;
    assert_int_equal(wait_for(spawn(bare, in_folder("o"), in_folder("e")),
                              LIMIT_MS), 78);
    assert_true(file_says(in_folder("e"), "no spool"));
    assert_int_equal(wait_for(spawn(nowhere, in_folder("o"), in_folder("e")),
                              LIMIT_MS), 78);
    write_config("[daemon]\ndrain = x\n");
    assert_int_equal(wait_for(spawn(bad, in_folder("o"), in_folder("e")),
                              LIMIT_MS), 78);
    write_config("[daemon]\ndrain = 1s\n");
    assert_int_equal(wait_for(spawn(bad, in_folder("o"), in_folder("e")),
                              LIMIT_MS), 0);
    assert_int_equal(wait_for(spawn(print, in_folder("o"), in_folder("e")),
                              LIMIT_MS), 0);
    assert_true(file_says(in_folder("o"), "drain = 3s"));
}

/* What systemd would hear, until `word`; what it heard stands in `heard`. */
static void
hear(int socket_fd, const char *word, char *heard, size_t size)
{
    struct timeval limit = { 20, 0 };
    size_t used = strlen(heard);

    setsockopt(socket_fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    while (!strstr(heard, word)) {
        ssize_t n = recv(socket_fd, heard + used, size - used - 2, 0);

        if (n <= 0)
            fail_msg("systemd never heard %s, but: %s", word, heard);
        used += (size_t)n;
        heard[used++] = '\n';
        heard[used] = '\0';
    }
}

static void
systemd_hears_of_readiness_reload_life_and_stop(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    static char heard[65536];
    char number[32];
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    pid_t pid;

    (void)state;
    new_spool();
    snprintf(address.sun_path, sizeof(address.sun_path), "%s",
             in_folder("notify"));
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)),
                     0);
    setenv("NOTIFY_SOCKET", address.sun_path, 1);
    snprintf(number, sizeof(number), "%d", 300000);
    setenv("WATCHDOG_USEC", number, 1);
    pid = start_daemon(NULL, NULL);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    hear(fd, "READY=1", heard, sizeof(heard));
    hear(fd, "WATCHDOG=1", heard, sizeof(heard));
    kill(pid, SIGHUP);
    hear(fd, "RELOADING=1", heard, sizeof(heard));
    heard[0] = '\0';
    hear(fd, "READY=1", heard, sizeof(heard));
    kill(pid, SIGTERM);
    hear(fd, "STOPPING=1", heard, sizeof(heard));
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    close(fd);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_that_is_dropped_in_comes_out_answered),
        cmocka_unit_test(
            sigterm_drains_what_runs_and_the_next_start_finishes_the_file),
        cmocka_unit_test(a_drain_without_time_keeps_blocks_and_loses_nothing),
        cmocka_unit_test(a_second_sigterm_ends_at_once_and_loses_nothing),
        cmocka_unit_test(killed_again_and_again_each_job_is_answered_once),
        cmocka_unit_test(
            a_second_daemon_on_the_spool_is_refused_and_the_first_unharmed),
        cmocka_unit_test(
            sighup_takes_good_settings_and_keeps_the_old_over_bad_ones),
        cmocka_unit_test(
            mistakes_of_configuration_are_told_from_those_that_pass),
        cmocka_unit_test(systemd_hears_of_readiness_reload_life_and_stop),
    };
    int failed = cmocka_run_group_tests(tests, setup, remove_folder);

    answers_fini(&reference);
    return failed;
}
