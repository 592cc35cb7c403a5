/* What operators do, with real servers and both programs: batches from submit
 * to results, cancels, pauses, shares of tenants, dead letters and messages
 * once more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/connectors/postgres_server.h"
#include "tests/daemon/program.h"
#include "tests/servers/kafka.h"

/* A broker that is not there is a failure; only the thread sanitizer, which
 * librdkafka can not run under, is let off (see broker_make). */
#ifdef __SANITIZE_THREAD__
#define NEEDS_BROKER() skip()
#else
#define NEEDS_BROKER() assert_false(broker.missing)
#endif

static struct broker broker;
static PGconn *admin;
static char conninfo[160]; /* of whoever submits and asks */

static PGresult *
sql(const char *format, ...) __attribute__((format(printf, 1, 2)));
static PGresult *
sql(const char *format, ...)
{
    char text[2048];
    PGresult *result;
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    result = PQexec(admin, text);
    if (PQresultStatus(result) != PGRES_COMMAND_OK &&
        PQresultStatus(result) != PGRES_TUPLES_OK)
        fail_msg("%s: %s", text, PQerrorMessage(admin));
    return result;
}

#define DO(...) PQclear(sql(__VA_ARGS__))

static int64_t
number(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int64_t
number(const char *format, ...)
{
    char text[2048];
    PGresult *result;
    int64_t out;
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    result = sql("%s", text);
    assert_int_equal(PQntuples(result), 1);
    out = strtoll(PQgetvalue(result, 0, 0), NULL, 10);
    PQclear(result);
    return out;
}

/* Waits until the query says `n`. */
static void
wait_until(int64_t n, const char *query)
{
    int64_t until = now_ms() + LIMIT_MS;

    while (number("%s", query) != n) {
        if (now_ms() > until)
            fail_msg("%s never said %d", query, (int)n);
        usleep(20000);
    }
}

static int
setup(void **state)
{
    char owner[128];

    if (make_folder(state) != 0)
        return -1;
    if (!broker_make(&broker))
        return broker.missing ? 0 : -1;
    if (!broker_start(&broker)) /* comes up while the database does */
        return -1;
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(owner, sizeof(owner), "host=127.0.0.1 port=%d user=ns "
             "dbname=postgres", pg_server.port);
    snprintf(conninfo, sizeof(conninfo), "host=127.0.0.1 port=%d "
             "user=submitter dbname=postgres", pg_server.port);
    if (RUN("db", "init", "--conninfo", owner) != 0)
        return -1;
    DO("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
    DO("CREATE ROLE submitter LOGIN IN ROLE nightshift_submit");
    return broker_answers(&broker, 120000) ? 0 : -1;
}

static int
teardown(void **state)
{
    if (!broker.missing) {
        broker_remove(&broker);
        PQfinish(admin);
        pg_remove();
    }
    return remove_folder(state);
}

/* --- daemon and commands ------------------------------------------------ */

/* "<topic>.conf" of the daemon, "<topic>.user" of whoever submits to it. */
static void
configure(const char *topic, const char *engine, const char *limits)
{
    static const char *const names[] = { "conf", "user" };

    for (int i = 0; i < 2; i++) {
        const char *path = in_folder("%s.%s", topic, names[i]);
        FILE *file = fopen(path, "w");

        assert_non_null(file);
        fprintf(file,
                "[engine]\nmax_sequences = 4\n%s[cpu]\nthreads = 1\n"
                "[intake]\ntopics = %s\nwindow = 32\n"
                "[limits]\n%s"
                "[daemon]\ncheckpoint = 0\nretry = 100ms\n"
                "[postgres]\nconninfo = host=127.0.0.1 port=%d user=%s "
                "dbname=postgres\nlease = 1s\n"
                "[kafka]\nbootstrap.servers = %s\ngroup.id = %s\n"
                "session.timeout.ms = 1500\nheartbeat.interval.ms = 200\n"
                "fetch.wait.max.ms = 50\nstatistics.interval.ms = 500\n",
                engine, topic, limits, pg_server.port,
                i == 0 ? "nsd" : "submitter", broker.address, topic);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(chmod(path, 0600), 0);
    }
}

static void
prepare(const char *topic, const char *engine, const char *limits)
{
    assert_int_equal(topic_admin(&broker, topic, 2), 0);
    configure(topic, engine, limits);
}

static pid_t
start_daemon(const char *topic)
{
    pid_t pid = spawn((const char *const[]){ "nightshiftd", "--config",
                                             in_folder("%s.conf", topic),
                                             "--model", program_model, NULL },
                      in_folder("%s.out", topic), in_folder("%s.err", topic));

    wait_until_says(in_folder("%s.err", topic), "daemon.ready");
    return pid;
}

static void
stop_daemon(pid_t pid)
{
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
}

/* `n` jobs of a tenant, all good. */
static const char *
write_good(const char *name, int n, const char *tenant)
{
    const char *path = in_folder("%s.jsonl", name);
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < n; i++)
        fprintf(file, "{\"custom_id\":\"%s-%d\",\"body\":{\"messages\":"
                "[{\"role\":\"user\",\"content\":\"tell me %d things\"}],"
                "\"max_tokens\":%d},\"nightshift\":{\"mode\":\"diffusion\","
                "\"tenant\":\"%s\"}}\n", name, i, i, 8 + i % 5 * 8, tenant);
    assert_int_equal(fclose(file), 0);
    return path;
}

/* The batch's name is the command's one line. */
static const char *
submit(const char *topic, const char *path, bool send_bad)
{
    static char batch[8][128];
    static int next;
    char *out = batch[next++ % 8], *said;

    assert_int_equal(RUN("submit", path, "--config",
                         in_folder("%s.user", topic),
                         send_bad ? "--send-bad" : NULL), 0);
    said = slurp(in_folder("stdout"));
    said[strcspn(said, "\n")] = '\0';
    snprintf(out, sizeof(batch[0]), "%s", said);
    free(said);
    return out;
}

static int
count_lines(const char *path, const char *word)
{
    char *text = slurp(path), *rest = NULL;
    int n = 0;

    for (char *line = strtok_r(text, "\n", &rest); line;
         line = strtok_r(NULL, "\n", &rest))
        n += strstr(line, word) != NULL;
    free(text);
    return n;
}

/* Waits for the end, which the exit status tells. A model of random weights
 * begins a tool call now and then that does not parse: not all need be ok. */
static void
watch(const char *batch)
{
    int status = RUN("watch", batch, "--conninfo", conninfo);

    assert_int_equal(status, number("SELECT CASE WHEN failed = 0 THEN 0 WHEN "
                                    "ok > 0 THEN 1 ELSE 2 END FROM "
                                    "nightshift.batch WHERE batch = '%s'",
                                    batch));
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "batch = '%s' AND status <> 'ok' AND error_code "
                            "NOT IN ('bad_tool_call', 'bad_json', "
                            "'bad_param', 'cancelled')", batch), 0);
}

static int
n_ok(const char *batch)
{
    return (int)number("SELECT ok FROM nightshift.batch WHERE batch = '%s'",
                       batch);
}

/* --- batches ---------------------------------------------------------- */

static void
a_batch_goes_from_submit_to_its_results(void **state)
{
    const char *good, *mixed, *bad;
    PGconn *listener;
    PGnotify *told;
    pid_t pid;
    FILE *file;
    int n_told = 0;

    (void)state;
    NEEDS_BROKER();
    prepare("ops", "", "");
    good = submit("ops", write_good("good", 12, "a"), false);
    assert_int_equal(RUN("status", good, "--conninfo", conninfo), 0);
    assert_int_equal(count_lines(in_folder("stdout"), "running"), 1);
    assert_int_equal(RUN("watch", good, "--timeout", "0", "--conninfo",
                         conninfo), 75);
    assert_int_equal(RUN("results", good, "--conninfo", conninfo), 75);
    write_jobs(in_folder("mixed.jsonl"), 10, 30); /* one of them is bad */
    mixed = submit("ops", in_folder("mixed.jsonl"), true);
    file = fopen(in_folder("bad.jsonl"), "w");
    fputs("{\"custom_id\":\"x\",\"body\":3}\n{\"custom_id\":\"y\"}\nnonsense\n",
          file);
    fclose(file);
    bad = submit("ops", in_folder("bad.jsonl"), true);
    pid = start_daemon("ops");
    watch(good);
    assert_int_equal(RUN("watch", mixed, "--conninfo", conninfo), 1);
    assert_int_equal(RUN("watch", bad, "--conninfo", conninfo), 2);
    assert_true(file_says(in_folder("stdout"), "all failed, 0 ok, 3 failed"));
    wait_until_says(in_folder("ops.err"), "outcome=all_failed");
    stop_daemon(pid);

    assert_int_equal(RUN("results", good, "-o", in_folder("good.out"), "-e",
                         in_folder("good.bad"), "--conninfo", conninfo),
                     n_ok(good) < 12);
    assert_int_equal(count_lines(in_folder("good.out"), "\"error\":null"),
                     n_ok(good));
    assert_int_equal(count_lines(in_folder("good.bad"), "\"response\":null"),
                     12 - n_ok(good));
    assert_int_equal(count_lines(in_folder("good.out"),
                                 "\"custom_id\":\"good-7\"") +
                         count_lines(in_folder("good.bad"),
                                     "\"custom_id\":\"good-7\""), 1);
    assert_int_equal(RUN("results", mixed, "-o", in_folder("mixed.out"), "-e",
                         in_folder("mixed.bad"), "--conninfo", conninfo), 1);
    assert_int_equal(count_lines(in_folder("mixed.out"), "\"error\":null"),
                     n_ok(mixed));
    assert_int_equal(count_lines(in_folder("mixed.bad"), "\"response\":null"),
                     10 - n_ok(mixed));
    assert_int_equal(RUN("results", mixed, "--conninfo", conninfo), 1);
    assert_int_equal(count_lines(in_folder("stdout"), ""), 10);
    assert_false(exists(in_folder("mixed.out.part")));
    /* Of three refused one had no id to be answered by. */
    assert_int_equal(RUN("results", bad, "--conninfo", conninfo), 2);
    assert_int_equal(count_lines(in_folder("stdout"), "\"response\":null"), 2);
    assert_true(file_says(in_folder("stderr"), "1 messages of it had no"));
    assert_int_equal(RUN("status", "--conninfo", conninfo), 0);
    assert_int_equal(count_lines(in_folder("stdout"), "all_failed"), 1);
    assert_true(count_lines(in_folder("stdout"), "some_failed") > 0);
    assert_int_equal(RUN("status", "nothing", "--conninfo", conninfo), 65);
    assert_int_equal(RUN("watch", "nothing", "--conninfo", conninfo), 65);
    assert_int_equal(RUN("results", "nothing", "--conninfo", conninfo), 65);
    assert_int_equal(RUN("status"), 78);

    /* A number that comes last makes the batch whole, and is told once. */
    listener = pg_open_as("ns", "postgres");
    PQclear(PQexec(listener, "LISTEN nightshift_batch"));
    DO("UPDATE nightshift.batch SET expected = NULL, ended_at = NULL WHERE "
       "batch = '%s'", bad);
    for (int i = 0; i < 2; i++)
        DO("SELECT nightshift.expect_batch('%s', 3)", bad);
    PQclear(PQexec(listener, "SELECT 1"));
    while ((told = PQnotifies(listener))) {
        n_told += strstr(told->extra, "all_failed") != NULL;
        PQfreemem(told);
    }
    PQfinish(listener);
    assert_int_equal(n_told, 1);
}

/* --- cancel, pause ---------------------------------------------------------- */

static void
what_is_cancelled_is_not_run(void **state)
{
    const char *batch, *path;
    char job[160];
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare("cancel", "", "");
    pid = start_daemon("cancel");
    assert_int_equal(RUN("pause", "--conninfo", conninfo), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.control WHERE "
                            "paused AND changed_by = 'submitter'"), 1);
    usleep(1500000); /* it asks once a second: sooner is only less of a test */
    path = write_good("doomed", 6, "a");
    batch = submit("cancel", path, false);
    assert_int_equal(RUN("cancel", batch, "--conninfo", conninfo), 0);
    assert_int_equal(RUN("cancel", "no-such", "--conninfo", conninfo), 65);
    assert_int_equal(RUN("cancel", "--batch", "--job", "x", "--conninfo",
                         conninfo), 64);
    assert_int_equal(RUN("resume", "--conninfo", conninfo), 0);
    assert_int_equal(RUN("watch", batch, "--conninfo", conninfo), 2);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "batch = '%s' AND status = 'cancelled' AND "
                            "coalesce(blocks, 0) = 0", batch), 6);
    assert_int_equal(RUN("results", batch, "--conninfo", conninfo), 2);
    assert_int_equal(count_lines(in_folder("stdout"), "\"cancelled\""), 6);

    /* One job of a batch that is still to come. */
    path = write_good("some", 4, "a");
    assert_int_equal(RUN("submit", path, "--config",
                         in_folder("cancel.user"), "--batch", "known"), 0);
    watch("known");
    path = write_good("later", 4, "a");
    snprintf(job, sizeof(job), "later/later-2");
    assert_int_equal(RUN("cancel", "--job", job, "--conninfo", conninfo), 0);
    assert_int_equal(RUN("submit", path, "--config",
                         in_folder("cancel.user"), "--batch", "later"), 0);
    assert_int_equal(RUN("watch", "later", "--conninfo", conninfo), 1);
    assert_int_equal(RUN("results", "later", "--conninfo", conninfo), 1);
    assert_int_equal(count_lines(in_folder("stdout"),
                                 "\"custom_id\":\"later-2\",\"response\":null"),
                     1);
    assert_int_equal(RUN("cancel", "later/later-1", "--conninfo", conninfo),
                     0); /* too late: it stays what it is */
    assert_false(file_says(in_folder("stdout"), ": cancel"));
    stop_daemon(pid);
}

static void
a_pause_stops_beginnings_of_all_of_one_tenant_or_of_one_daemon(void **state)
{
    const char *mine, *theirs, *more;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare("pause", "", "");
    assert_int_equal(RUN("pause", "--tenant", "mine", "--conninfo", conninfo),
                     0);
    pid = start_daemon("pause"); /* so it knows before the first claim */
    mine = submit("pause", write_good("mine", 5, "mine"), false);
    theirs = submit("pause", write_good("theirs", 5, "theirs"), false);
    watch(theirs);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE "
                            "tenant = 'mine'"), 0);
    assert_int_equal(RUN("resume", "--tenant", "mine", "--conninfo",
                         conninfo), 0);
    watch(mine);

    kill(pid, SIGUSR1);
    wait_until_says(in_folder("pause.err"), "daemon.paused");
    more = submit("pause", write_good("more", 5, "theirs"), false);
    usleep(500000);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE "
                            "batch = '%s'", more), 0);
    kill(pid, SIGUSR2);
    watch(more);
    stop_daemon(pid);
}

static void
over_its_share_a_tenant_waits_and_nobody_fails(void **state)
{
    const char *many, *few;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare("share", "", "tenant_jobs = 1\n");
    many = submit("share", write_good("many", 20, "greedy"), false);
    few = submit("share", write_good("few", 4, "modest"), false);
    pid = start_daemon("share");
    watch(many);
    watch(few);
    stop_daemon(pid);
    /* Begun one behind the other's end, each tenant's. */
    assert_int_equal(number("SELECT count(*) FROM nightshift.job a JOIN "
                            "nightshift.job b ON a.tenant = b.tenant AND "
                            "a.job_id < b.job_id AND a.batch IN ('%s', '%s') "
                            "AND b.batch = a.batch WHERE a.started_at < "
                            "b.finished_at AND b.started_at < a.finished_at",
                            many, few), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE batch "
                            "IN ('%s', '%s') AND attempt = 1", many, few), 24);
}

/* --- once more ---------------------------------------------------------- */

static char *
letter_key(const char *word)
{
    char *text = slurp(in_folder("stdout")), *rest = NULL, *key = NULL;

    for (char *line = strtok_r(text, "\n", &rest); line;
         line = strtok_r(NULL, "\n", &rest))
        if (strstr(line, word)) {
            line[strcspn(line, "\t")] = '\0';
            key = strdup(line);
        }
    free(text);
    if (!key)
        fail_msg("no dead letter of %s", word);
    return key;
}

static void
dead_letters_are_listed_and_sent_again(void **state)
{
    char *key, *broken;
    pid_t pid;
    FILE *file;

    (void)state;
    NEEDS_BROKER();
    prepare("dead", "model_names = other\n", "");
    file = fopen(in_folder("dead.jsonl"), "w");
    fputs("{\"custom_id\":\"named\",\"body\":{\"model\":\"this\",\"messages\":"
          "[{\"role\":\"user\",\"content\":\"hello\"}],\"max_tokens\":8}}\n"
          "{\"custom_id\":\"broken\"\n", file);
    fclose(file);
    assert_int_equal(RUN("submit", in_folder("dead.jsonl"), "--config",
                         in_folder("dead.user"), "--batch", "dead",
                         "--send-bad"), 0);
    pid = start_daemon("dead");
    assert_int_equal(RUN("watch", "dead", "--conninfo", conninfo), 2);
    stop_daemon(pid);
    assert_int_equal(RUN("dlq", "list", "--batch", "dead", "--conninfo",
                         conninfo), 0);
    key = letter_key("unknown_model");
    broken = letter_key("bad_json");
    assert_int_equal(RUN("dlq", "list", "--reason", "nothing", "--conninfo",
                         conninfo), 0);
    assert_int_equal(count_lines(in_folder("stdout"), ""), 0);
    assert_int_equal(RUN("dlq", "show", key, "--conninfo", conninfo), 0);
    assert_true(file_says(in_folder("stdout"), "\"model\":\"this\""));
    assert_int_equal(RUN("dlq", "show", "no/1:2@3", "--conninfo", conninfo),
                     65);
    assert_int_equal(RUN("dlq", "replay", "--conninfo", conninfo), 64);
    assert_int_equal(RUN("dlq", "sing", "--conninfo", conninfo), 64);

    configure("dead", "", ""); /* the mistake was ours */
    assert_int_equal(RUN("dlq", "replay", key, "--config",
                         in_folder("dead.user")), 0);
    assert_true(file_says(in_folder("stdout"), "dead/named~r1"));
    /* What has no id to be known by, and can not be read, goes as it is. */
    assert_int_equal(RUN("dlq", "replay", "--batch", "dead", "-o",
                         in_folder("again.jsonl"), "--config",
                         in_folder("dead.user")), 0);
    assert_int_equal(count_lines(in_folder("again.jsonl"),
                                 "\"replay_of\":\"dead/named\""), 1);
    pid = start_daemon("dead");
    wait_until(1, "SELECT count(*) FROM nightshift.result WHERE job_id = "
                  "'dead/named~r1' AND status = 'ok' AND replay_of = "
                  "'dead/named'");
    assert_int_equal(RUN("dlq", "replay", key, "--config",
                         in_folder("dead.user")), 0);
    assert_true(file_says(in_folder("stdout"), "dead/named~r2"));
    wait_until(1, "SELECT count(*) FROM nightshift.result WHERE job_id = "
                  "'dead/named~r2' AND status = 'ok'");
    stop_daemon(pid);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE "
                            "job_id = 'dead/named' AND status = 'dead'"), 1);
    free(key);
    free(broken);
}

/* Waits until the group has stored `n` messages of the topic as done. */
static void
wait_until_stored(const char *topic, int partitions, int64_t n)
{
    int64_t until = now_ms() + LIMIT_MS, stored = 0;

    while (stored < n) {
        stored = 0;
        for (int32_t i = 0; i < partitions; i++) {
            int64_t at = group_offset(&broker, topic, topic, i);

            stored += at > 0 ? at : 0;
        }
        if (now_ms() > until)
            fail_msg("%d of %d stored", (int)stored, (int)n);
        usleep(100000);
    }
}

static void
topics_are_read_again_since_a_time_and_only_what_is_missing_runs(void **state)
{
    const char *batch;
    pid_t pid;

    (void)state;
    NEEDS_BROKER();
    prepare("since", "", "");
    batch = submit("since", write_good("since", 10, "a"), false);
    pid = start_daemon("since");
    watch(batch);
    wait_until_stored("since", 2, 10);
    assert_int_equal(RUN("replay", "--since", "1h", "--config",
                         in_folder("since.user")), 75);
    assert_true(file_says(in_folder("stderr"), "stop them"));
    stop_daemon(pid);
    /* As after a failover that lost the last commits. */
    DO("DELETE FROM nightshift.result WHERE job_id LIKE '%%since-3'");
    DO("DELETE FROM nightshift.job WHERE job_id LIKE '%%since-3'");
    assert_int_equal(RUN("replay", "--since", "2000-01-01T00:00:00Z",
                         "--config", in_folder("since.user")), 0);
    assert_true(file_says(in_folder("stderr"), "10 messages"));
    assert_int_equal(RUN("replay", "--since", "soon", "--config",
                         in_folder("since.user")), 64);
    pid = start_daemon("since");
    wait_until(1, "SELECT count(*) FROM nightshift.result WHERE job_id LIKE "
                  "'%since-3'");
    stop_daemon(pid);
    assert_int_equal(number("SELECT max(attempt) FROM nightshift.job WHERE "
                            "batch = '%s'", batch), 1);
    /* Nothing lies behind it now that was not read: nothing to take back. */
    assert_int_equal(RUN("replay", "--since", "0m", "--config",
                         in_folder("since.user")), 0);
    assert_true(file_says(in_folder("stderr"), "0 messages"));
}

/* The brokers keep messages for 7 days, unless a topic says otherwise. */
static void
rows_are_not_purged_while_their_messages_can_come_again(void **state)
{
    (void)state;
    NEEDS_BROKER();
    prepare("kept", "", "");
    DO("CREATE ROLE janitor LOGIN IN ROLE nightshift_purge");
    assert_int_equal(RUN("db", "purge", "--older-than", "7d", "--config",
                         in_folder("kept.user")), 78);
    assert_true(file_says(in_folder("stderr"), "for 168 hours"));
    assert_int_equal(RUN("db", "purge", "--older-than", "169h", "--config",
                         in_folder("kept.user"), "--conninfo", conninfo), 78);
    snprintf(conninfo, sizeof(conninfo), "host=127.0.0.1 port=%d "
             "user=janitor dbname=postgres", pg_server.port);
    assert_int_equal(RUN("db", "purge", "--older-than", "169h", "--config",
                         in_folder("kept.user"), "--conninfo", conninfo), 0);
    snprintf(conninfo, sizeof(conninfo), "host=127.0.0.1 port=%d "
             "user=submitter dbname=postgres", pg_server.port);
}

/* --- spools ---------------------------------------------------------- */

static const char *
new_spool(const char *name)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };
    const char *spool = in_folder("%s", name);

    for (size_t i = 0; i < 6; i++) {
        char path[PATH_MAX + 8];

        snprintf(path, sizeof(path), "%s%s", spool, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    return spool;
}

static pid_t
start_spool(const char *spool, const char *set)
{
    pid_t pid = spawn((const char *const[]){ "nightshiftd", "--spool", spool,
                                             "--model", program_model, "--set",
                                             "intake.poll=20ms", "--set", set,
                                             NULL },
                      in_folder("spool.out"), in_folder("spool.err"));

    wait_until_says(in_folder("spool.err"), "daemon.ready");
    return pid;
}

static void
a_spool_can_be_asked_as_well(void **state)
{
    const char *spool = new_spool("files");
    const char *path = in_folder("mixed.jsonl");
    pid_t pid;

    (void)state;
    write_jobs(path, 10, 30);
    assert_int_equal(RUN("submit", path, "--spool", spool), 65);
    assert_int_equal(RUN("submit", path, "--spool", spool, "--send-bad"), 0);
    assert_int_equal(RUN("submit", path, "--spool", spool, "--send-bad"), 75);
    assert_int_equal(RUN("status", "--spool", spool), 0);
    assert_int_equal(count_lines(in_folder("stdout"), "waiting"), 1);
    assert_int_equal(RUN("watch", "mixed.jsonl", "--timeout", "0", "--spool",
                         spool), 75);
    pid = start_spool(spool, "cpu.threads=1");
    assert_int_equal(RUN("watch", "mixed.jsonl", "--spool", spool), 1);
    stop_daemon(pid);
    assert_int_equal(RUN("results", "mixed.jsonl", "--spool", spool, "-o",
                         in_folder("f.out"), "-e", in_folder("f.bad")), 1);
    assert_int_equal(count_lines(in_folder("f.out"), "\"error\":null") +
                         count_lines(in_folder("f.bad"),
                                     "\"response\":null"), 10);
    assert_int_equal(count_lines(in_folder("f.bad"),
                                 "\"custom_id\":\"job-7\""), 1);
    assert_int_equal(RUN("watch", "none.jsonl", "--spool", spool), 65);
    assert_int_equal(RUN("cancel", "mixed.jsonl", "--set", "intake.spool=x"),
                     78); /* that takes a database */
}

/* Files in, rows out: the batch has its number, and so its end. */
static void
a_file_handed_in_at_a_spool_is_a_batch_that_ends(void **state)
{
    const char *spool = new_spool("rows");
    char set[256];
    pid_t pid;
    char *batch;

    (void)state;
    NEEDS_BROKER();
    snprintf(set, sizeof(set), "postgres.conninfo=host=127.0.0.1 port=%d "
             "user=nsd dbname=postgres", pg_server.port);
    pid = start_spool(spool, set);
    assert_int_equal(RUN("submit", write_good("handed", 7, "a"), "--spool",
                         spool), 0);
    batch = slurp(in_folder("stdout"));
    assert_string_equal(batch, "handed.jsonl\n"); /* no database was named */
    free(batch);
    wait_until_exists(in_folder("rows/done/handed.jsonl"));
    snprintf(set, sizeof(set), "postgres.conninfo=%s", conninfo);
    assert_int_equal(RUN("submit", write_good("handed", 7, "a"), "--spool",
                         spool, "--set", set), 0);
    batch = slurp(in_folder("stdout"));
    batch[strcspn(batch, "\n")] = '\0';
    watch(batch);
    assert_int_equal(number("SELECT expected FROM nightshift.batch WHERE "
                            "batch = '%s'", batch), 7);
    stop_daemon(pid);
    free(batch);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_goes_from_submit_to_its_results),
        cmocka_unit_test(what_is_cancelled_is_not_run),
        cmocka_unit_test(
            a_pause_stops_beginnings_of_all_of_one_tenant_or_of_one_daemon),
        cmocka_unit_test(over_its_share_a_tenant_waits_and_nobody_fails),
        cmocka_unit_test(dead_letters_are_listed_and_sent_again),
        cmocka_unit_test(
            topics_are_read_again_since_a_time_and_only_what_is_missing_runs),
        cmocka_unit_test(
            rows_are_not_purged_while_their_messages_can_come_again),
        cmocka_unit_test(a_spool_can_be_asked_as_well),
        cmocka_unit_test(a_file_handed_in_at_a_spool_is_a_batch_that_ends),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
