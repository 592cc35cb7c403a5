/* checkpoints.c - what it costs to store committed blocks while jobs run.
 *
 *     build/bench/checkpoints BUILD_DIR [ROUNDS]
 *
 * The same jobs of many blocks, from files to a real database of its own, with
 * the demo model: every block stored as soon as it is committed, against none
 * stored at all, in turn. The default stores at most one batch of blocks in 10
 * seconds a job, so what it costs is below this. A form of a fixed length makes
 * all answers long, and equal on both sides.
 */
#include <limits.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "tests/connectors/postgres_server.h"

enum { JOBS = 24, LETTERS = 900, ROUNDS = 4, LIMIT_S = 300 };

static PGconn *admin;

static void
give_up(const char *what)
{
    fprintf(stderr, "checkpoints: %s\n", what);
    exit(1);
}

static double
seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void
sql(const char *text)
{
    PGresult *result = PQexec(admin, text);

    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        give_up(PQerrorMessage(admin));
    PQclear(result);
}

static void
write_jobs(const char *spool)
{
    char from[PATH_MAX], to[PATH_MAX];
    FILE *file;

    snprintf(from, sizeof(from), "%s/jobs", spool);
    snprintf(to, sizeof(to), "%s/in/jobs.jsonl", spool);
    file = fopen(from, "w");
    if (!file)
        give_up("no room for jobs");
    for (int i = 0; i < JOBS; i++)
        fprintf(file,
                "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"Write, number %d.\"}],\"max_tokens\":"
                "2048,\"guided_regex\":\"[a-z ]{%d}\"},\"nightshift\":{"
                "\"mode\":\"diffusion\"}}\n", i, i, LETTERS);
    fclose(file);
    if (rename(from, to) != 0)
        give_up("no spool");
}

static pid_t
start_daemon(const char *build, const char *spool, const char *checkpoint)
{
    char path[PATH_MAX], conninfo[160], every[64];
    const char *const argv[] = { path, "--model", "models/demo", "--spool",
                                 spool, "--set", conninfo, "--set", every,
                                 "--set", "daemon.log_level=warning", NULL };
    pid_t pid;

    snprintf(path, sizeof(path), "%s/nightshiftd", build);
    snprintf(conninfo, sizeof(conninfo), "postgres.conninfo=host=127.0.0.1 "
             "port=%d user=nsd dbname=postgres", pg_server.port);
    snprintf(every, sizeof(every), "daemon.checkpoint=%s", checkpoint);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execv(path, (char *const *)argv);
        _exit(127);
    }
    return pid;
}

/* From the jobs' arrival at a daemon that waits for them to the end of the
 * last. */
static double
run(const char *build, const char *checkpoint, int round, int64_t *n_blocks)
{
    static const char *const folders[] = { "", "in", "work", "out", "done",
                                           "dead" };
    char spool[PATH_MAX / 2], path[PATH_MAX];
    double since, took;
    PGresult *result;
    pid_t pid;

    snprintf(spool, sizeof(spool), "%s/spool%d-%s", pg_server.folder, round,
             checkpoint);
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof(path), "%s/%s", spool, folders[i]);
        mkdir(path, 0700);
    }
    sql("TRUNCATE nightshift.job, nightshift.result, nightshift.block");
    pid = start_daemon(build, spool, checkpoint);
    sleep(2);
    write_jobs(spool);
    since = seconds();
    snprintf(path, sizeof(path), "%s/done/jobs.jsonl", spool);
    *n_blocks = 0;
    while (access(path, F_OK) != 0) {
        if (waitpid(pid, NULL, WNOHANG) == pid || seconds() > since + LIMIT_S)
            give_up("the daemon does not get through");
        usleep(20000);
    }
    took = seconds() - since;
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
    result = PQexec(admin, "SELECT count(*), sum(blocks) FROM "
                           "nightshift.result WHERE status = 'ok'");
    if (PQntuples(result) != 1 || atoi(PQgetvalue(result, 0, 0)) != JOBS)
        give_up("a job was lost");
    *n_blocks = atoll(PQgetvalue(result, 0, 1));
    PQclear(result);
    return took;
}

int
main(int argc, char **argv)
{
    const char *build = argc > 1 ? argv[1] : "build";
    int rounds = argc > 2 ? atoi(argv[2]) : ROUNDS;
    double with = 1e9, without = 1e9;
    char command[PATH_MAX + 256];
    int64_t n_blocks = 0;

    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(command, sizeof(command), "%s/nightshift db init --conninfo "
             "'host=127.0.0.1 port=%d user=ns dbname=postgres' >/dev/null",
             build, pg_server.port);
    if (system(command) != 0)
        give_up("no schema");
    sql("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
    for (int i = 0; i < 2 * rounds + 1; i++) {
        bool stores = i % 2 != 0;
        double took = run(build, stores ? "0ms" : "1h", i, &n_blocks);

        if (stores && took < with)
            with = took;
        if (!stores && took < without)
            without = took;
    }
    PQfinish(admin);
    printf("checkpoints: %d jobs of %lld blocks, each stored at once: %.2f s, "
           "none: %.2f s, %.2f ms a block\n"
           "ratio: checkpoints-none-of-all %.3f\n",
           JOBS, (long long)n_blocks, with, without,
           (with - without) * 1e3 / (double)n_blocks, without / with);
    return 0;
}
