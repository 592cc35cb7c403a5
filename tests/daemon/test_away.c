/* nightshiftd while its database is away: for an hour, and while it hangs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/daemon/client.h"
#include "tests/daemon/delivery.h"

static const char web[] = "[http]\nlisten = 127.0.0.1:0\n";

/* --- an hour without a database, at 1:120 ------------------------------- *
 *
 *                         a service   here     what an hour holds of it
 *     away                1 h         30 s
 *     postgres.lease      2 min       1 s      30 leases, all long over
 *     heartbeats          40 s        333 ms   a third of the lease
 *     daemon.store_retry  1 min       500 ms   120 tries: a wait is drawn
 *                                              from 0 up to this, 30 s on the
 *                                              mean
 *     daemon.retry        12 s        100 ms
 *     kept messages       7 days      84 min   168 hours: nothing is deleted
 *
 * The window (24 jobs) and the ceilings are what they are at any length: an
 * hour may add tries, and nothing else. */
enum {
    AWAY_MS = 3600 * 1000 / 120,
    CEILING_MS = 60 * 1000 / 120,
    WINDOW = 24, /* write_config() */
};

/* Stands where the server was, and counts who comes: a try is two connections,
 * the second one to hear why the first was refused. */
static struct {
    int listener;
    pthread_t thread;
    _Atomic bool ends;
    int n_tries, n_short; /* waits well below the ceiling, and above zero */
    int64_t last_ms;
} gate;

static void *
count_tries(void *data)
{
    (void)data;
    while (!atomic_load(&gate.ends)) {
        struct pollfd wait = { .fd = gate.listener, .events = POLLIN };
        int64_t gap_ms;
        int fd;

        if (poll(&wait, 1, 50) != 1)
            continue;
        fd = accept(gate.listener, NULL, NULL);
        if (fd >= 0)
            close(fd);
        gap_ms = now_ms() - gate.last_ms;
        gate.last_ms += gap_ms;
        if (gap_ms < 40) /* of the same try, or as good as */
            continue;
        gate.n_tries++;
        gate.n_short += gap_ms > 60 && gap_ms < CEILING_MS * 3 / 4;
    }
    return NULL;
}

static void
close_gate(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                              .sin_port = htons((uint16_t)pg_server.port) };
    int one = 1;

    gate.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(gate.listener >= 0);
    setsockopt(gate.listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    for (int64_t until = now_ms() + SOON_MS;
         bind(gate.listener, (struct sockaddr *)&at, sizeof(at)) != 0;) {
        assert_true(now_ms() < until);
        usleep(20000);
    }
    assert_int_equal(listen(gate.listener, 64), 0);
    gate.n_tries = gate.n_short = 0;
    gate.last_ms = now_ms();
    atomic_store(&gate.ends, false);
    assert_int_equal(pthread_create(&gate.thread, NULL, count_tries, NULL), 0);
}

static void
open_gate(void)
{
    atomic_store(&gate.ends, true);
    pthread_join(gate.thread, NULL);
    close(gate.listener);
}

/* A job that another daemon began: it died behind the claim, and its lease
 * ends while nobody can be asked. */
static void
leave_one_behind(const char *topic)
{
    pid_t pid;

    put_setting(topic, "lease", "15s");
    setenv("NS_FAULT", "after_claim:kill@1", 1);
    pid = start_program("tests/nightshiftd", topic, 9);
    unsetenv("NS_FAULT");
    assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
    put_setting(topic, "lease", "1s");
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE state ="
                            " 'running' AND job_id LIKE '%s-%%'", topic), 1);
}

static void
wait_for_jobs(const char *topic, const char *state, int64_t least)
{
    int64_t until = now_ms() + SOON_MS;

    while (number("SELECT count(*) FROM nightshift.job WHERE job_id LIKE "
                  "'%s-%%' AND state = '%s'", topic, state) < least) {
        if (now_ms() > until)
            fail_msg("never %d jobs of %s are %s", (int)least, topic, state);
        usleep(20000);
    }
}

/* The job names a document that is put only when all is over. */
static void
send_with_document(struct load *load)
{
    char text[512];

    snprintf(text, sizeof(text), "{\"custom_id\":\"%s-document\",\"body\":{"
             "\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":"
             "\"document\",\"document\":{\"id\":\"late\",\"sha256\":\"%s\"}}]}]"
             ",\"max_tokens\":10},\"nightshift\":{\"mode\":\"ar\"}}",
             load->topic, /* of "later\n" */
             "0bd7226ea868984d97d517ccc35c0bc9a04d93e81c5a25b6c8eaded088626944");
    send_text(load->topic, 1, NULL, text);
    load->n_messages++;
}

static void
put_late_document(void)
{
    char conninfo[128];
    FILE *file = fopen(in_folder("late.txt"), "w");

    assert_non_null(file);
    fputs("later\n", file);
    assert_int_equal(fclose(file), 0);
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=postgres", pg_server.port);
    assert_int_equal(RUN("db", "document", "put", in_folder("late.txt"), "--id",
                         "late", "--conninfo", conninfo), 0);
}

static void
after_an_hour_without_a_database_each_job_ends_once(void **state)
{
    struct load load = { .topic = "hour", .n_jobs = 90, .longest = 400 };
    const char *log = in_folder("hour.0.err");
    int64_t until, received;
    long kb = 0;
    pid_t pid;
    uint16_t port;

    (void)state;
    NEEDS_BROKER();
    prepare_topic(&load, web);
    put_setting("hour", "checkpoint", "0\\nstore_retry = 500ms");
    send_with_document(&load);
    send_up_to(&load, load.n_jobs);
    leave_one_behind("hour");
    pid = start_daemon("hour", 0);
    wait_until_says(log, "daemon.ready");
    port = port_in(log);
    /* In every state: done, with blocks, running, parked behind another's
     * lease, waiting to be tried again; the window is full of others that
     * wait to be claimed, and refused. */
    wait_for_rows("hour", 3);
    wait_for_jobs("hour", "running", 2);
    wait_for_jobs("hour", "retry", 1);
    wait_for_metric(port, "nightshift_jobs_in_flight", WINDOW);

    pg_stop(SIGKILL);
    close_gate();
    wait_for_status(port, "/readyz", 503);
    received = metric_of(port, "nightshift_jobs_received_total");
    until = now_ms() + AWAY_MS;
    for (int n = 0; now_ms() < until; n++) {
        assert_int_equal(get_status(port, "/readyz"), 503);
        assert_int_equal(get_status(port, "/healthz"), 200);
        assert_true(metric_of(port, "nightshift_jobs_in_flight") <= WINDOW);
        if (n == 10)
            kb = resident_kb(pid);
        usleep(200000);
    }
    /* What ran has come to its end and waits; nothing more was taken in. */
    assert_int_equal(metric_of(port, "nightshift_jobs_running"), 0);
    assert_int_equal(metric_of(port, "nightshift_store_away"), 1);
    assert_true(metric_of(port, "nightshift_jobs_received_total") <=
                received + WINDOW);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
#ifndef __SANITIZE_ADDRESS__
    assert_in_range(resident_kb(pid), 0, kb + 4096);
#endif
    open_gate();
    printf("# %d tries, %d of them soon\n", gate.n_tries, gate.n_short);
    /* 120 are expected, give or take 7; a loaded machine makes fewer. Without
     * jitter each waits for the whole ceiling, without a ceiling most of the
     * hour would pass before the third. */
    assert_in_range(gate.n_tries, 30, 200);
    assert_in_range(gate.n_short, gate.n_tries / 5, gate.n_tries);

    pg_start();
    wait_for_status(port, "/readyz", 200);
    put_late_document();
    wait_until_read("hour");
    assert_int_equal(metric_of(port, "nightshift_jobs_fenced_total"), 0);
    stop_daemon(pid);
    assert_one_outcome_each(&load);
    /* The hour cost no job anything: none has failed for it, and only the one
     * of the daemon that died was taken over, once its lease was over. */
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'hour-%%' AND retries > 0"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE 'hour-%%' AND stalls > 0"), 1);
}

/* --- a database that hangs ---------------------------------------------- */

/* The server and each process of it, as they are: nothing is closed, nothing
 * answers, and what was asked happens when they are woken. */
static void
signal_server(int signal)
{
    char path[64];
    FILE *file;
    int pid;

    kill(pg_server.pid, signal);
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children",
             (int)pg_server.pid, (int)pg_server.pid);
    file = fopen(path, "r");
    assert_non_null(file);
    while (fscanf(file, "%d", &pid) == 1)
        kill(pid, signal);
    fclose(file);
}

/* Each job comes twice, so that there is always someone to take it from its
 * holder, the first moment that its lease is over. */
static void
send_twice(struct load *load)
{
    char text[512];

    for (int i = 0; i < load->n_jobs; i++) {
        job_text(text, sizeof(text), load, i, load->longest);
        for (int copy = 0; copy < 2; copy++)
            send_text(load->topic, (i + copy) % PARTITIONS, NULL, text);
        load->n_messages += 2;
        DO("INSERT INTO expected VALUES ('%s', '%s-%d', false)", load->topic,
           load->topic, i);
    }
    assert_true(produce_flush(&broker));
}

static void
hang_for(struct load *load, const char *lease, unsigned hang_ms)
{
    const char *log = in_folder("%s.0.err", load->topic);
    uint16_t port;
    pid_t pid;

    prepare_topic(load, web);
    put_setting(load->topic, "lease", lease);
    put_setting(load->topic, "answer", "1s\\nconnect = 1s");
    send_twice(load);
    pid = start_daemon(load->topic, 0);
    wait_until_says(log, "daemon.ready");
    port = port_in(log);
    wait_for_rows(load->topic, 2);
    wait_for_jobs(load->topic, "running", 2);
    signal_server(SIGSTOP);
    wait_until_says(log, "no answer in time");
    wait_for_status(port, "/readyz", 503);
    for (int64_t until = now_ms() + hang_ms; now_ms() < until;) {
        assert_int_equal(get_status(port, "/healthz"), 200);
        usleep(100000);
    }
    assert_int_equal(get_status(port, "/readyz"), 503);
    signal_server(SIGCONT);
    wait_for_status(port, "/readyz", 200);
    wait_until_read(load->topic);
    assert_int_equal(metric_of(port, "nightshift_jobs_fenced_total"), 0);
    stop_daemon(pid);
    assert_one_outcome_each(load);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE job_id "
                            "LIKE '%s-%%' AND retries + stalls > 0",
                            load->topic), 0);
}

/* The second message of a job of ours does not take it from us when our lease
 * ran out while nobody could be asked: the work in hand would be lost. */
static void
while_the_database_hangs_jobs_stay_with_their_holder(void **state)
{
    struct load brief = { .topic = "hangs", .n_jobs = 40, .longest = 400 };
    struct load lasting = { .topic = "frozen", .n_jobs = 40, .longest = 400 };

    (void)state;
    NEEDS_BROKER();
    hang_for(&brief, "1m", 2000);
    hang_for(&lasting, "1s", 4000);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(after_an_hour_without_a_database_each_job_ends_once),
        cmocka_unit_test(while_the_database_hangs_jobs_stay_with_their_holder),
    };

    if (getenv("NS_ONLY")) /* a pattern of test names */
        cmocka_set_test_filter(getenv("NS_ONLY"));
    return cmocka_run_group_tests(tests, setup_servers, teardown_servers);
}
