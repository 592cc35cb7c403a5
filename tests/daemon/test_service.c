/* nightshiftd as a service, with a real PostgreSQL: whether it says so when it
 * could take nothing in, and that its log tells nobody what is not his. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/connectors/postgres_server.h"
#include "tests/daemon/client.h"
#include "tests/daemon/program.h"

enum { N_JOBS = 12 };

static PGconn *admin;
static char conninfo[256], spool[PATH_MAX];

static void
sql(const char *text)
{
    PGresult *result = PQexec(admin, text);

    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        fail_msg("%s: %s", text, PQerrorMessage(admin));
    PQclear(result);
}

static void
write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, 0600), 0);
}

static int
setup(void **state)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };
    char owner[128];
    int failed = make_folder(state);

    if (failed)
        return failed;
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(owner, sizeof(owner), "host=127.0.0.1 port=%d user=ns "
             "dbname=postgres", pg_server.port);
    if (RUN("db", "init", "--conninfo", owner) != 0)
        return -1;
    sql("CREATE ROLE known LOGIN PASSWORD 'canary-of-the-database' "
        "IN ROLE nightshift_rw");
    write_file(in_folder("password"), "canary-of-the-database\n");
    snprintf(conninfo, sizeof(conninfo), "postgres.conninfo=host=127.0.0.1 "
             "port=%d user=known dbname=postgres", pg_server.port);
    snprintf(spool, sizeof(spool), "%s", in_folder("spool"));
    for (size_t i = 0; i < 6; i++) {
        char path[PATH_MAX + 8];

        snprintf(path, sizeof(path), "%s%s", spool, folders[i]);
        mkdir(path, 0700);
    }
    return 0;
}

static int
teardown(void **state)
{
    PQfinish(admin);
    pg_remove();
    return remove_folder(state);
}

static uint16_t
start_daemon(pid_t *pid)
{
    char password[PATH_MAX + 32];
    const char *const argv[] = {
        "nightshiftd", "--spool", spool, "--model", program_model, "--set",
        "cpu.threads=1", "--set", "intake.poll=20ms", "--set",
        "http.listen=127.0.0.1:0", "--set", "daemon.log_level=debug", "--set",
        "postgres.connect=2s", "--set", conninfo, "--set", password, NULL,
    };

    snprintf(password, sizeof(password), "postgres.password_file=%s",
             in_folder("password"));
    *pid = spawn(argv, in_folder("d.out"), in_folder("d.err"));
    wait_until_says(in_folder("d.err"), "daemon.ready");
    return port_in(in_folder("d.err"));
}

static void
an_idle_daemon_says_that_its_database_is_away_and_is_well(void **state)
{
    pid_t pid;
    uint16_t port = start_daemon(&pid);

    (void)state;
    assert_int_equal(get_status(port, "/readyz"), 200);
    pg_stop(SIGKILL);
    wait_for_status(port, "/readyz", 503);
    assert_int_equal(get_status(port, "/healthz"), 200);
    assert_true(file_says(in_folder("d.err"), "store.away"));
    pg_start();
    wait_for_status(port, "/readyz", 200);
    assert_true(file_says(in_folder("d.err"), "store.back"));
    /* And it ends at once while there is nobody to say goodbye to. */
    pg_stop(SIGKILL);
    wait_for_status(port, "/readyz", 503);
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    pg_start();
    PQreset(admin);
}

/* --- the log ----------------------------------------------------------- */

/* Canaries stand wherever a text of a job or a secret may stand. The ids of
 * jobs are for the log; that is what they are for. */
static void
drop_jobs(void)
{
    FILE *file = fopen(in_folder("spool/in/a.part"), "w");

    assert_non_null(file);
    for (int i = 0; i < N_JOBS; i++)
        fprintf(file, "{\"custom_id\":\"job-%d\",\"body\":{\"messages\":["
                "{\"role\":\"system\",\"content\":\"canary-system\"},"
                "{\"role\":\"user\",\"content\":\"canary-prompt %d\"}],"
                "\"stop\":[\"canary-stop\"],\"user\":\"canary-user\","
                "\"metadata\":{\"k\":\"canary-meta\"},\"max_tokens\":60}}\n",
                i, i);
    fputs("{\"custom_id\":\"bad-1\",\"body\":{\"messages\":\"canary-refused\"}"
          "}\n"
          "{\"custom_id\":\"bad-2\",\"body\":{\"messages\":[{\"role\":\"user\","
          "\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":"
          "\"data:image/png;base64,Y2FuYXJ5\"}}]}]}}\n"
          "{\"custom_id\":\"bad-3\",\"body\":{\"messages\":[{\"role\":\"user\","
          "\"content\":\"canary-mode\"}]},\"nightshift\":{\"mode\":"
          "\"canary-word\"}}\n"
          "{\"canary-of-no-json\n", file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(in_folder("spool/in/a.part"),
                            in_folder("spool/in/a.jsonl")), 0);
}

static void
assert_lacks(const char *path, const char *word)
{
    char *text = slurp(path), *at = strstr(text, word);

    if (at)
        fail_msg("%s says \"%s\": %.300s", path, word,
                 at - text > 100 ? at - 100 : text);
    free(text);
}

/* Every line is a level, an event and key=value. */
static void
assert_structured(const char *path)
{
    static const char *const levels[] = { "error: ", "warning: ", "debug: " };
    char *text = slurp(path), *line = text, *end;

    for (; *line; line = end + 1) {
        size_t n;

        end = strchr(line, '\n');
        assert_non_null(end);
        *end = '\0';
        for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
            if (strncmp(line, levels[i], strlen(levels[i])) == 0)
                line += strlen(levels[i]);
        n = strspn(line, "abcdefghijklmnopqrstuvwxyz_");
        if (n == 0 || line[n] != '.')
            fail_msg("no event in front of: %s", line);
        line += n + strcspn(line + n, " ");
        if (*line && line[1] && !strchr(line, '='))
            fail_msg("no key=value in: %s", line);
    }
    free(text);
}

/* The texts of all answers: none of them may be found. */
static void
assert_lacks_answers(const char *path)
{
    PGresult *rows = PQexec(admin, "SELECT content FROM nightshift.result "
                            "WHERE length(content) >= 8");

    assert_int_equal(PQresultStatus(rows), PGRES_TUPLES_OK);
    assert_true(PQntuples(rows) > N_JOBS / 2);
    for (int i = 0; i < PQntuples(rows); i++)
        assert_lacks(path, PQgetvalue(rows, i, 0));
    PQclear(rows);
}

static void
the_log_of_a_whole_run_holds_no_text_of_a_job_and_no_secret(void **state)
{
    char log[PATH_MAX];
    pid_t pid;

    (void)state;
    start_daemon(&pid);
    pg_stop(SIGKILL); /* so that the store has something to complain about */
    drop_jobs();
    wait_until_says(in_folder("d.err"), "store.");
    pg_start();
    PQreset(admin);
    wait_until_exists(in_folder("spool/done/a.jsonl"));
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    assert_lacks(in_folder("d.err"), "canary");
    assert_lacks(in_folder("d.err"), "Y2FuYXJ5");
    assert_lacks(in_folder("d.out"), "canary");
    assert_lacks_answers(in_folder("d.err"));
    assert_structured(in_folder("d.err"));
    /* Nor does what we ask of the server make it log a text. */
    snprintf(log, sizeof(log), "%s/log", pg_server.folder);
    assert_true(file_says(log, "database system"));
    assert_lacks(log, "canary");
    assert_lacks_answers(log);
}

/* A broker that is not there, asked with passwords, under the client's own
 * debug log; a reload that meets a bad file with one in it. */
static void
what_the_client_of_a_broker_logs_holds_no_password(void **state)
{
    char password[PATH_MAX + 32], text[2048];
    const char *const argv[] = {
        "nightshiftd", "--model", program_model, "--set", "cpu.threads=1",
        "--set", conninfo, "--set", password, "--config", in_folder("k.conf"),
        NULL,
    };
    const char *const print[] = { "nightshiftd", "--config",
                                  in_folder("k.conf"), "--print-config", NULL };
    int port = pg_free_port();
    pid_t pid;

    (void)state;
    snprintf(password, sizeof(password), "postgres.password_file=%s",
             in_folder("password"));
    snprintf(text, sizeof(text),
             "[daemon]\nlog_level = debug\n[intake]\ntopics = jobs\n[kafka]\n"
             "bootstrap.servers = 127.0.0.1:%d\ngroup.id = g\n"
             "security.protocol = SASL_PLAINTEXT\nsasl.mechanism = PLAIN\n"
             "sasl.username = night\nsasl.password = canary-of-the-broker\n"
             "debug = all\n", port);
    write_file(in_folder("k.conf"), text);
    assert_int_equal(wait_for(spawn(print, in_folder("p.out"),
                                    in_folder("p.err")), LIMIT_MS), 0);
    assert_lacks(in_folder("p.out"), "canary");
    assert_true(file_says(in_folder("p.out"), "sasl.password"));
    pid = spawn(argv, in_folder("k.out"), in_folder("k.err"));
    wait_until_says(in_folder("k.err"), "kafka.trouble");
    strncat(text, "sasl.password = canary-of-another\n",
            sizeof(text) - strlen(text) - 1);
    strncat(text, "no.such.key = canary-of-a-typo\n",
            sizeof(text) - strlen(text) - 1);
    write_file(in_folder("k.conf"), text);
    kill(pid, SIGHUP);
    wait_until_says(in_folder("k.err"), "config.reload");
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    assert_lacks(in_folder("k.err"), "canary");
    assert_lacks(in_folder("k.out"), "canary");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            an_idle_daemon_says_that_its_database_is_away_and_is_well),
        cmocka_unit_test(
            the_log_of_a_whole_run_holds_no_text_of_a_job_and_no_secret),
        cmocka_unit_test(what_the_client_of_a_broker_logs_holds_no_password),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
