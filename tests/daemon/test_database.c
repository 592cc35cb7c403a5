/* Files in, PostgreSQL out: both programs against a real server. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/connectors/postgres_server.h"
#include "tests/daemon/program.h"

enum { N_JOBS = 30, LONGEST = 120 };

static PGconn *admin;
static char owner[128], daemon_set[256], spool[PATH_MAX], said[64];

static int64_t
number(const char *query)
{
    PGresult *result = PQexec(admin, query);
    int64_t n;

    if (PQresultStatus(result) != PGRES_TUPLES_OK || PQntuples(result) != 1)
        fail_msg("%s: %s", query, PQerrorMessage(admin));
    n = strtoll(PQgetvalue(result, 0, 0), NULL, 10);
    PQclear(result);
    return n;
}

static void
sql(const char *text)
{
    PGresult *result = PQexec(admin, text);

    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        fail_msg("%s: %s", text, PQerrorMessage(admin));
    PQclear(result);
}

static int
setup(void **state)
{
    int failed = make_folder(state);

    if (failed)
        return failed;
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(owner, sizeof(owner), "host=127.0.0.1 port=%d user=ns "
             "dbname=postgres", pg_server.port);
    snprintf(daemon_set, sizeof(daemon_set), "postgres.conninfo="
             "host=127.0.0.1 port=%d user=nsd dbname=postgres",
             pg_server.port);
    return 0;
}

static int
teardown(void **state)
{
    PQfinish(admin);
    pg_remove();
    return remove_folder(state);
}

static void
the_schema_is_installed_migrated_and_purged(void **state)
{
    (void)state;
    assert_int_equal(RUN("db", "migrate", "--conninfo", owner), 78);
    assert_true(file_says(in_folder("stderr"), "nightshift db init"));
    assert_int_equal(RUN("db", "init", "--conninfo", owner), 0);
    assert_true(file_says(in_folder("stdout"), "ALTER ROLE nightshiftd SET"));
    assert_int_equal(RUN("db", "init", "--conninfo", owner), 78);
    assert_int_equal(RUN("db", "migrate", "--conninfo", owner), 0);
    assert_true(file_says(in_folder("stdout"), "nothing to do"));
    assert_int_equal(RUN("db", "purge", "--older-than", "6d", "--conninfo",
                         owner), 78);
    assert_int_equal(RUN("db", "purge", "--older-than", "8d", "--conninfo",
                         owner), 0);
    assert_int_equal(RUN("db", "purge", "--conninfo", owner), 64);
    assert_int_equal(RUN("db", "init"), 64);
    assert_int_equal(RUN("db"), 64);
    sql("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
}

/* Tables, columns, indexes, functions, rights and views, in one line each. */
static const char catalogue[] =
    "SELECT string_agg(line, E'\\n' ORDER BY line) FROM ("
    "SELECT table_name || '.' || column_name || ' ' || data_type || ' ' ||"
    " is_nullable || ' ' || coalesce(column_default, '') AS line"
    " FROM information_schema.columns WHERE table_schema = 'nightshift' "
    "UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'nightshift' "
    "UNION ALL SELECT p.oid::regprocedure || ' ' || md5(prosrc) || ' ' ||"
    " coalesce(proacl::text, '') FROM pg_proc p WHERE pronamespace ="
    " 'nightshift'::regnamespace "
    "UNION ALL SELECT relname || ' ' || coalesce(relacl::text, '') FROM"
    " pg_class WHERE relnamespace = 'nightshift'::regnamespace) x";

static char *
catalogue_of(const char *database)
{
    PGconn *conn = pg_open_as("ns", database);
    PGresult *result = PQexec(conn, catalogue);
    char *text;

    if (PQresultStatus(result) != PGRES_TUPLES_OK)
        fail_msg("%s: %s", database, PQerrorMessage(conn));
    text = strdup(PQgetvalue(result, 0, 0));
    PQclear(result);
    PQfinish(conn);
    return text;
}

/* A database of version 1, with rows in it, becomes what `init` makes today. */
static void
an_older_schema_is_brought_to_this_one_with_what_it_holds(void **state)
{
    char older[128], *first = slurp("connectors/schema.sql"), *a, *b;
    PGconn *conn;
    PGresult *result;

    (void)state;
    sql("CREATE DATABASE older");
    conn = pg_open_as("ns", "older");
    result = PQexec(conn, first);
    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        fail_msg("schema.sql: %s", PQerrorMessage(conn));
    PQclear(result);
    PQclear(PQexec(conn, "INSERT INTO nightshift.document (id, sha256,"
                         " content_lz4, content_bytes) VALUES ('old',"
                         " decode(repeat('00', 32), 'hex'), '', 0)"));
    PQfinish(conn);
    free(first);
    snprintf(older, sizeof(older), "host=127.0.0.1 port=%d user=ns "
             "dbname=older", pg_server.port);
    assert_int_equal(RUN("db", "migrate", "--conninfo", older), 0);
    assert_true(file_says(in_folder("stdout"), "from version 1 to 2"));
    assert_int_equal(RUN("db", "migrate", "--conninfo", older), 0);
    assert_true(file_says(in_folder("stdout"), "nothing to do"));
    a = catalogue_of("postgres");
    b = catalogue_of("older");
    assert_string_equal(a, b);
    free(a);
    free(b);
    conn = pg_open_as("ns", "older");
    result = PQexec(conn, "SELECT media_type FROM nightshift.document");
    assert_string_equal(PQgetvalue(result, 0, 0), "text/plain");
    PQclear(result);
    PQfinish(conn);
    sql("DROP DATABASE older");
}

static void
new_spool(const char *name)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };

    snprintf(spool, sizeof(spool), "%s", in_folder("%s", name));
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

static void
drop_file(const char *name)
{
    char part[64], whole[64];

    snprintf(part, sizeof(part), "in/%s.part", name);
    snprintf(whole, sizeof(whole), "in/%s", name);
    write_jobs(in_spool(part), N_JOBS, LONGEST);
    assert_int_equal(rename(in_spool(part), in_spool(whole)), 0);
}

static pid_t
start_daemon(void)
{
    const char *const argv[] = {
        "nightshiftd", "--spool", spool, "--model", program_model, "--set",
        "cpu.threads=2", "--set", "intake.poll=20ms", "--set",
        "daemon.checkpoint=0", "--set", "engine.max_sequences=4", "--set",
        "intake.window=6", "--set", "postgres.lease=1s", "--set", daemon_set,
        NULL,
    };
    pid_t pid = spawn(argv, in_folder("d.out"), in_folder("d.err"));

    wait_until_says(in_folder("d.err"), "daemon.ready");
    return pid;
}

static void
stop_daemon(pid_t pid)
{
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
}

/* Of 30 lines 3 are bad, and one of them has no id to be answered by. What
 * the others say does not depend on how often they were broken off. */
static void
assert_answered(void)
{
    char text[64];
    PGresult *answers;

    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE"
                            " status IN ('ok', 'failed')"), 27);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE"
                            " status = 'dead'"), 2);
    answers = PQexec(admin, "SELECT md5(string_agg(job_id || status ||"
                     " coalesce(content, '') || coalesce(reasoning, ''), '|'"
                     " ORDER BY job_id)) FROM nightshift.result");
    snprintf(text, sizeof(text), "%s", PQgetvalue(answers, 0, 0));
    PQclear(answers);
    if (!said[0]) /* by the run that nothing disturbed */
        snprintf(said, sizeof(said), "%s", text);
    assert_string_equal(text, said);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter"
                            " WHERE payload_lz4 IS NOT NULL"), 3);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE"
                            " finished_at IS NULL"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    assert_int_equal(number("SELECT ok + failed FROM nightshift.batch"),
                     N_JOBS);
    assert_int_equal(number("SELECT count(DISTINCT batch) FROM"
                            " nightshift.job WHERE batch ~"
                            " '^a-[0-9a-f]{12}$'"), 1);
}

static void
a_file_is_answered_in_rows_once_however_often_it_comes(void **state)
{
    pid_t pid;

    (void)state;
    new_spool("once");
    pid = start_daemon();
    drop_file("a.jsonl");
    wait_until_exists(in_spool("done/a.jsonl"));
    assert_answered();
    drop_file("a.jsonl");
    wait_until_exists(in_spool("done/a~2.jsonl"));
    stop_daemon(pid);
    assert_answered();
    assert_false(exists(in_spool("out/a.jsonl")));
    assert_int_equal(number("SELECT count(*) FROM nightshift.job WHERE"
                            " attempt > 1"), 0);
}

/* A server that is away is waited for; one that says no is a person's. */
static void
a_role_that_is_refused_ends_the_daemon_and_says_why(void **state)
{
    char conninfo[160];
    const char *const argv[] = { "nightshiftd", "--spool", spool, "--model",
                                 program_model, "--set", conninfo, NULL };

    (void)state;
    new_spool("refused");
    drop_file("a.jsonl");
    snprintf(conninfo, sizeof(conninfo), "postgres.conninfo=host=127.0.0.1 "
             "port=%d user=nobody_of_ours dbname=postgres", pg_server.port);
    assert_int_equal(wait_for(spawn(argv, in_folder("r.out"),
                                    in_folder("r.err")), LIMIT_MS), 78);
    assert_true(file_says(in_folder("r.err"), "nobody_of_ours"));
    assert_false(exists(in_spool("done/a.jsonl")));
}

static void
a_daemon_killed_again_and_again_answers_each_job_once(void **state)
{
    pid_t pid;

    (void)state;
    sql("TRUNCATE nightshift.job, nightshift.result, nightshift.block,"
        " nightshift.dead_letter, nightshift.batch");
    new_spool("killed");
    drop_file("a.jsonl");
    /* Once more, and a job that never came to a block would be given up. */
    for (int i = 0; i < 3; i++) {
        pid = start_daemon();
        usleep((useconds_t)(40000 + i * 30000));
        kill(pid, SIGKILL);
        assert_int_equal(wait_for(pid, LIMIT_MS), -SIGKILL);
    }
    pid = start_daemon();
    wait_until_exists(in_spool("done/a.jsonl"));
    stop_daemon(pid);
    assert_answered();
    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN"
                            " nightshift.job j USING (job_id) WHERE r.fence <>"
                            " j.fence"), 0);
}

static void
a_server_that_is_away_for_a_while_costs_nothing(void **state)
{
    pid_t pid;

    (void)state;
    sql("TRUNCATE nightshift.job, nightshift.result, nightshift.block,"
        " nightshift.dead_letter, nightshift.batch");
    new_spool("away");
    pid = start_daemon();
    drop_file("a.jsonl");
    usleep(60000);
    pg_stop(SIGKILL);
    usleep(1500000);
    pg_start();
    PQreset(admin);
    wait_until_exists(in_spool("done/a.jsonl"));
    stop_daemon(pid);
    assert_answered();
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_schema_is_installed_migrated_and_purged),
        cmocka_unit_test(
            an_older_schema_is_brought_to_this_one_with_what_it_holds),
        cmocka_unit_test(a_file_is_answered_in_rows_once_however_often_it_comes),
        cmocka_unit_test(a_role_that_is_refused_ends_the_daemon_and_says_why),
        cmocka_unit_test(a_daemon_killed_again_and_again_answers_each_job_once),
        cmocka_unit_test(a_server_that_is_away_for_a_while_costs_nothing),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
