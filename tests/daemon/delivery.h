/* delivery.h - a broker, a database and nightshiftd between them, for the tests
 * of what becomes of each message; and the judge, who looks from outside and
 * asks by SQL alone.
 *
 * A header of static functions, since only tests/daemon needs them.
 */
#ifndef NS_TESTS_DAEMON_DELIVERY_H
#define NS_TESTS_DAEMON_DELIVERY_H

#include "base/log.h"
#include "connectors/postgres.h"
#include "tests/connectors/postgres_server.h"
#include "tests/daemon/program.h"
#include "tests/servers/kafka.h"

static struct broker broker;
static PGconn *admin; /* superuser */
static unsigned seed_of_run;

/* A broker that is not there is a failure; only the thread sanitizer, which
 * librdkafka can not run under, is let off (see broker_make). */
#ifdef __SANITIZE_THREAD__
#define NEEDS_BROKER() skip()
#else
#define NEEDS_BROKER() assert_false(broker.missing)
#endif

enum { SOON_MS = 60000, PARTITIONS = 3 };

/* --- the database, seen from outside ----------------------------------- */

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
    for (int tries = 0;; tries++) {
        if (PQstatus(admin) != CONNECTION_OK)
            PQreset(admin);
        result = PQexec(admin, text);
        if (PQresultStatus(result) == PGRES_COMMAND_OK ||
            PQresultStatus(result) == PGRES_TUPLES_OK)
            return result;
        if (tries == 20) /* it may have been restarted by the test */
            fail_msg("%s: %s", text, PQerrorMessage(admin));
        PQclear(result);
        usleep(200000);
    }
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

/* Every write to a final row, also one that a later write hid. */
static void
make_audit(void)
{
    DO("CREATE TABLE audit (job_id text, op text)");
    DO("CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SECURITY "
       "DEFINER AS $$ BEGIN INSERT INTO public.audit VALUES "
       "(coalesce(new.job_id, old.job_id), tg_op); RETURN NULL; END $$");
    DO("CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON "
       "nightshift.result FOR EACH ROW EXECUTE FUNCTION note()");
    DO("CREATE TABLE expected (topic text, id text, dead boolean)");
}

/* --- messages ---------------------------------------------------------- */

struct load {
    const char *topic;
    int n_jobs, longest; /* tokens */
    int n_messages, n_dead, n_conflicts;
    int n_sent; /* of the jobs */
};

static void
send_text(const char *topic, int partition, const char *key, const char *value)
{
    assert_true(produce(&broker, topic, partition, key, value,
                        value ? strlen(value) : 0, NULL));
}

static void
job_text(char *out, size_t size, const struct load *load, int i, int longest)
{
    static const char *const modes[] = { "diffusion", "ar", "hybrid", "auto" };

    snprintf(out, size,
             "{\"custom_id\":\"%s-%d\",\"body\":{\"messages\":[{\"role\":"
             "\"user\",\"content\":\"tell me %d things\"}],\"max_tokens\":%d},"
             "\"nightshift\":{\"mode\":\"%s\"}}",
             load->topic, i, i, 10 + i * 37 % longest, modes[i % 4]);
}

/* Jobs over all partitions; every 10th sent twice (the copy elsewhere), every
 * 20th again with another body, and every 15th line is poison. */
static void
send_up_to(struct load *load, int n_jobs)
{
    static const char *const poison[] = {
        "{\"custom_id\":\"x\"", "[]", "", "{\"body\":{}}", "\xff\xfe",
    };
    char text[512];

    for (int i = load->n_sent; i < n_jobs; i++) {
        job_text(text, sizeof(text), load, i, load->longest);
        send_text(load->topic, i % PARTITIONS, NULL, text);
        load->n_messages++;
        DO("INSERT INTO expected VALUES ('%s', '%s-%d', false)", load->topic,
           load->topic, i);
        if (i % 10 == 3) {
            send_text(load->topic, (i + 1) % PARTITIONS, NULL, text);
            load->n_messages++;
        }
        if (i % 20 == 7) {
            job_text(text, sizeof(text), load, i, load->longest + 1);
            snprintf(text + strlen(text) - 1, 16, ",\"x\":1}");
            send_text(load->topic, i % PARTITIONS, NULL, text);
            load->n_messages++;
            load->n_conflicts++;
        }
        if (i % 15 == 4) {
            send_text(load->topic, i % PARTITIONS, "key", poison[i / 15 % 5]);
            load->n_messages++;
            load->n_dead++;
        }
    }
    load->n_sent = n_jobs;
    assert_true(produce_flush(&broker));
}

/* --- the daemon -------------------------------------------------------- */

static void
write_config(const char *topic, const char *bootstrap, const char *more)
{
    FILE *file = fopen(in_folder("%s.conf", topic), "w");

    assert_non_null(file);
    fprintf(file,
            "[engine]\nmax_sequences = 4\n[cpu]\nthreads = 1\n"
            "[intake]\ntopics = %s\nwindow = 24\nspan = 64\n%s"
            "[daemon]\ncheckpoint = 0\nretry = 100ms\n"
            "[postgres]\nconninfo = host=127.0.0.1 port=%d user=nsd "
            "dbname=postgres\nlease = 1s\nanswer = 5s\n"
            "[kafka]\nbootstrap.servers = %s\ngroup.id = %s\n"
            "session.timeout.ms = 1500\nheartbeat.interval.ms = 200\n"
            "reconnect.backoff.ms = 50\nreconnect.backoff.max.ms = 200\n"
            "statistics.interval.ms = 500\nfetch.wait.max.ms = 50\n",
            topic, more, pg_server.port, bootstrap, topic);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(in_folder("%s.conf", topic), 0600), 0);
}

/* The daemon as it ships, or the one with fault points. */
static pid_t
start_program(const char *program, const char *topic, int n)
{
    const char *const argv[] = { program, "--config",
                                 in_folder("%s.conf", topic), "--model",
                                 program_model, NULL };

    return spawn(argv, in_folder("%s.%d.out", topic, n),
                 in_folder("%s.%d.err", topic, n));
}

static pid_t
start_daemon(const char *topic, int n)
{
    return start_program("nightshiftd", topic, n);
}

/* Messages whose offset is not stored yet. */
static int64_t
lag_of(const char *topic)
{
    int64_t lag = 0;

    for (int32_t i = 0; i < PARTITIONS; i++) {
        int64_t at = group_offset(&broker, topic, topic, i);

        lag += topic_end(&broker, topic, i) - (at > 0 ? at : 0);
    }
    return lag;
}

static void
wait_until_read(const char *topic)
{
    int64_t until = now_ms() + SOON_MS;

    while (lag_of(topic) > 0) {
        if (now_ms() > until)
            fail_msg("%d messages of %s are left; %s", (int)lag_of(topic),
                     topic, in_folder("%s.0.err", topic));
        usleep(300000);
    }
}

/* --- what must hold at the end ----------------------------------------- */

struct verdict {
    int64_t lost, doubled, rewritten, dead, conflicts, unfinished;
};

static struct verdict
judge(const char *topic)
{
    return (struct verdict){
        .lost = number("SELECT count(*) FROM expected e WHERE topic = '%s' AND "
                       "NOT EXISTS (SELECT FROM nightshift.result r WHERE "
                       "r.job_id = e.id)", topic),
        .doubled = number("SELECT count(*) FROM (SELECT FROM audit a JOIN "
                          "expected e ON e.id = a.job_id WHERE topic = '%s' "
                          "AND op = 'INSERT' GROUP BY job_id HAVING count(*) > "
                          "1) x", topic),
        .rewritten = number("SELECT count(*) FROM audit a JOIN expected e ON "
                            "e.id = a.job_id WHERE topic = '%s' AND op <> "
                            "'INSERT'", topic),
        .dead = number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                       "source_key LIKE '%s/%%' AND reason <> 'id_conflict'",
                       topic),
        .conflicts = number("SELECT count(*) FROM nightshift.dead_letter WHERE "
                            "source_key LIKE '%s/%%' AND reason = "
                            "'id_conflict'", topic),
        .unfinished = number("SELECT count(*) FROM nightshift.job j JOIN "
                             "expected e ON e.id = j.job_id WHERE topic = '%s' "
                             "AND finished_at IS NULL", topic),
    };
}

static inline void
assert_one_outcome_each(const struct load *load)
{
    struct verdict verdict = judge(load->topic);
    PGresult *result;

    assert_int_equal(verdict.lost, 0);
    assert_int_equal(verdict.doubled, 0);
    assert_int_equal(verdict.rewritten, 0);
    assert_int_equal(verdict.unfinished, 0);
    assert_int_equal(verdict.dead, load->n_dead);
    /* Of two bodies under one id the first that is claimed wins, whichever
     * that is; the other one is the dead letter. */
    assert_int_equal(verdict.conflicts, load->n_conflicts);
    /* A model of random weights does begin tool calls now and then. */
    result = sql("SELECT job_id, error_code, error_message FROM "
                 "nightshift.result r JOIN expected e ON e.id = r.job_id WHERE "
                 "topic = '%s' AND status <> 'ok' AND error_code <> "
                 "'bad_tool_call'", load->topic);
    if (PQntuples(result) > 0)
        fail_msg("%d jobs are not ok: %s is %s, %s", PQntuples(result),
                 PQgetvalue(result, 0, 0), PQgetvalue(result, 0, 1),
                 PQgetvalue(result, 0, 2));
    PQclear(result);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN "
                            "nightshift.job j USING (job_id) WHERE "
                            "r.fence <> j.fence"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block b JOIN "
                            "nightshift.job j USING (job_id) WHERE "
                            "j.finished_at IS NOT NULL"), 0);
}

static inline void
stop_daemon(pid_t pid)
{
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
}

/* One that may not even have its model yet. */
static inline void
end_daemon(pid_t pid)
{
    int status;

    kill(pid, SIGTERM);
    status = wait_for(pid, LIMIT_MS);
    if (status != -SIGTERM)
        assert_int_equal(status, 0);
}

static void
prepare_topic(const struct load *load, const char *more)
{
    assert_int_equal(topic_admin(&broker, load->topic, PARTITIONS), 0);
    write_config(load->topic, broker.address, more);
}

static inline void
prepare_load(struct load *load, const char *more)
{
    prepare_topic(load, more);
    send_up_to(load, load->n_jobs);
}

/* Rows and blocks of the topic: what changes when a daemon gets on. */
static inline int64_t
progress_of(const char *topic)
{
    return number("SELECT 1000 * (SELECT count(*) FROM nightshift.result WHERE "
                  "job_id LIKE '%s-%%') + (SELECT count(*) FROM "
                  "nightshift.block WHERE job_id LIKE '%s-%%')", topic, topic);
}

static inline int64_t
rows_of(const char *topic)
{
    return number("SELECT count(*) FROM nightshift.result WHERE job_id LIKE "
                  "'%s-%%'", topic);
}

static inline void
wait_for_rows(const char *topic, int64_t n)
{
    int64_t until = now_ms() + SOON_MS;

    while (rows_of(topic) < n) {
        if (now_ms() > until)
            fail_msg("%d rows of %s, not %d", (int)rows_of(topic), topic,
                     (int)n);
        usleep(50000);
    }
}

/* Another value for a setting that the configuration of the topic has. */
static inline void
put_setting(const char *topic, const char *name, const char *value)
{
    char command[PATH_MAX * 2];

    snprintf(command, sizeof(command), "sed -i 's/^%s = .*/%s = %s/' '%s'",
             name, name, value, in_folder("%s.conf", topic));
    assert_int_equal(system(command), 0);
}

static int
setup_servers(void **state)
{
    struct ns_postgres_options options = { 0 };
    char conninfo[128];
    struct ns_error err;

    ns_log_set_level(NS_LOG_ERROR);
    seed_of_run = getenv("NS_SEED")
                      ? (unsigned)strtoul(getenv("NS_SEED"), NULL, 10)
                      : (unsigned)now_ms();
    printf("# NS_SEED=%u\n", seed_of_run);
    if (make_folder(state) != 0)
        return -1;
    if (!broker_make(&broker))
        return broker.missing ? 0 : -1;
    if (!broker_start(&broker)) /* comes up while the database does */
        return -1;
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=postgres", pg_server.port);
    options.conninfo = conninfo;
    if (ns_postgres_init(&options, &err) != NS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return -1;
    }
    DO("SET client_min_messages = warning");
    DO("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
    DO("CREATE ROLE submitter LOGIN IN ROLE nightshift_submit");
    make_audit();
    return broker_answers(&broker, 120000) ? 0 : -1;
}

static int
teardown_servers(void **state)
{
    if (!broker.missing) {
        broker_remove(&broker);
        PQfinish(admin);
        pg_remove();
    }
    return getenv("NS_KEEP") ? 0 : remove_folder(state);
}

#endif
