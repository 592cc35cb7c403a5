/* connectors.c - small jobs a second from Kafka to PostgreSQL.
 *
 *     build/bench/connectors BUILD_DIR [JOBS]
 *
 * A real broker and a real database of its own, and nightshiftd whose engine
 * answers at once (instant_engine.c). What stands beside the rate is what the
 * same servers do in the same run with nobody in between: a consumer that only
 * counts, and the rows alone, made inside the database by statements of as
 * many. On a busy machine the absolute figure says little and the shares say
 * the same. Memory of the daemon: after a tenth of the jobs, and at the end.
 *
 * Ends with status 1 when a job is lost or doubled, or when memory grows.
 */
#include <arpa/inet.h>
#include <limits.h>
#include <sys/resource.h>

#include "tests/connectors/postgres_server.h"
#include "tests/servers/kafka.h"

enum {
    PARTITIONS = 6,
    JOBS = 200000,
    BARE_ROWS = 20000,
    BARE_BATCH = 64, /* rows of a statement, as the daemon's */
    LIMIT_MS = 600000,
    GROWTH_KB = 16 << 10, /* more than allocators keep back */
};

static struct broker broker;
static PGconn *admin;

static void
give_up(const char *what)
{
    fprintf(stderr, "connectors: %s\n", what);
    exit(1);
}

static double
seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int64_t
number(const char *sql)
{
    PGresult *result = PQexec(admin, sql);
    int64_t n;

    if (PQresultStatus(result) != PGRES_TUPLES_OK)
        give_up(PQerrorMessage(admin));
    n = strtoll(PQgetvalue(result, 0, 0), NULL, 10);
    PQclear(result);
    return n;
}

static void
sql(const char *text)
{
    PGresult *result = PQexec(admin, text);

    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        give_up(PQerrorMessage(admin));
    PQclear(result);
}

/* --- without us -------------------------------------------------------- */

static double
bare_consumer(int64_t n)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    rd_kafka_topic_partition_list_t *topics =
        rd_kafka_topic_partition_list_new(1);
    double since = 0;
    char why[256];
    rd_kafka_t *client;

    rd_kafka_conf_set(conf, "bootstrap.servers", broker.address, why,
                      sizeof(why));
    rd_kafka_conf_set(conf, "group.id", "bare", why, sizeof(why));
    rd_kafka_conf_set(conf, "auto.offset.reset", "earliest", why, sizeof(why));
    client = rd_kafka_new(RD_KAFKA_CONSUMER, conf, why, sizeof(why));
    rd_kafka_poll_set_consumer(client);
    rd_kafka_topic_partition_list_add(topics, "jobs", RD_KAFKA_PARTITION_UA);
    rd_kafka_subscribe(client, topics);
    for (int64_t i = 0; i < n;) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(client, 1000);

        if (!message)
            continue;
        if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR && i++ == 0)
            since = seconds(); /* joining the group is not a rate */
        rd_kafka_message_destroy(message);
    }
    since = seconds() - since;
    rd_kafka_consumer_close(client);
    rd_kafka_topic_partition_list_destroy(topics);
    rd_kafka_destroy(client);
    return (double)n / since;
}

/* A claim and a result are three rows written; the values cost nothing here. */
static double
bare_rows(void)
{
    double since = seconds();
    char text[1024];

    for (int at = 0; at < BARE_ROWS; at += BARE_BATCH) {
        snprintf(text, sizeof(text),
                 "INSERT INTO nightshift.job (job_id, custom_id, body_sha256, "
                 "state, mode, seed, fence, owner, lease_until, attempt, "
                 "source) SELECT 'bare-' || g, 'bare-' || g, sha256('x'), "
                 "'running', 'diffusion', g, nextval('nightshift.fence_seq'), "
                 "'host:1:0', clock_timestamp(), 1, '{\"offset\":1}' "
                 "FROM generate_series(%d, %d) g", at, at + BARE_BATCH - 1);
        sql(text);
        snprintf(text, sizeof(text),
                 "WITH j AS (UPDATE nightshift.job SET state = 'done', owner ="
                 " NULL, lease_until = NULL, finished_at = clock_timestamp() "
                 "WHERE job_id = ANY (SELECT 'bare-' || g FROM "
                 "generate_series(%d, %d) g) RETURNING *) "
                 "INSERT INTO nightshift.result (job_id, custom_id, tenant, "
                 "fence, status, content, response_lz4, mode, seed, "
                 "input_sha256) SELECT job_id, custom_id, tenant, fence, 'ok',"
                 " 'Blue, as the night was.', decode(repeat('5a', 500), "
                 "'hex'), mode, seed, body_sha256 FROM j", at,
                 at + BARE_BATCH - 1);
        sql(text);
    }
    since = seconds() - since;
    sql("TRUNCATE nightshift.job, nightshift.result, nightshift.block");
    return BARE_ROWS / since;
}

/* --- with us ----------------------------------------------------------- */

static void
make_servers(const char *build)
{
    char command[PATH_MAX + 256];

    if (!broker_make(&broker) || !broker_start(&broker) ||
        topic_admin(&broker, "jobs", PARTITIONS) != RD_KAFKA_RESP_ERR_NO_ERROR)
        give_up("no broker");
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(command, sizeof(command), "%s/nightshift db init --conninfo "
             "'host=127.0.0.1 port=%d user=ns dbname=postgres' >/dev/null",
             build, pg_server.port);
    if (system(command) != 0)
        give_up("no schema");
    sql("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
}

static void
send_jobs(int64_t n)
{
    char text[512];

    for (int64_t i = 0; i < n; i++) {
        int length = snprintf(
            text, sizeof(text), "{\"custom_id\":\"job-%lld\",\"method\":"
            "\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"messages\":"
            "[{\"role\":\"user\",\"content\":\"Name a colour, and say why. "
            "This is question %lld.\"}],\"max_tokens\":64}}", (long long)i,
            (long long)i);

        if (!produce(&broker, "jobs", (int32_t)(i % PARTITIONS), NULL, text,
                     (size_t)length, NULL))
            give_up("a message was not taken");
        if (i % 10000 == 0)
            produce_flush(&broker);
    }
    if (!produce_flush(&broker))
        give_up("messages were not delivered");
}

static pid_t
start_daemon(const char *build, int port)
{
    char path[PATH_MAX + 32], config[PATH_MAX + 32];
    const char *const argv[] = { path, "--config", config, NULL };
    FILE *file;
    pid_t pid;

    snprintf(path, sizeof(path), "%s/bench/nightshiftd", build);
    snprintf(config, sizeof(config), "%s/nightshift.conf", broker.folder);
    umask(0077);
    file = fopen(config, "w");
    if (!file)
        give_up("no configuration");
    fprintf(file,
            "[engine]\nmodel = models/demo\nmax_sequences = 512\n"
            "[cpu]\nthreads = 1\n[intake]\ntopics = jobs\nwindow = 4096\n"
            "[kafka]\nbootstrap.servers = %s\ngroup.id = night\n"
            "[postgres]\nconninfo = host=127.0.0.1 port=%d user=nsd "
            "dbname=postgres\n[http]\nlisten = 127.0.0.1:%d\n"
            "[daemon]\nlog_level = warning\n",
            broker.address, pg_server.port, port);
    fclose(file);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execv(path, (char *const *)argv);
        _exit(127);
    }
    return pid;
}

/* Jobs whose final row is stored, as the daemon counts; -1: no answer yet. */
static int64_t
stored(int port)
{
    static const char get[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    static char text[1 << 19];
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_port = htons((uint16_t)port),
                              .sin_addr = { htonl(INADDR_LOOPBACK) } };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t at = 0;
    ssize_t n;
    char *line;

    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 &&
        write(fd, get, sizeof(get) - 1) > 0)
        while (at < sizeof(text) - 1 &&
               (n = read(fd, text + at, sizeof(text) - 1 - at)) > 0)
            at += (size_t)n;
    close(fd);
    text[at] = '\0';
    line = strstr(text, "jobs_total{status=\"ok\"} ");
    return line ? strtoll(strchr(line, ' '), NULL, 10) : -1;
}

static long
resident_kb(pid_t pid)
{
    char path[64], line[256];
    long kb = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "VmRSS: %ld", &kb) == 1)
            break;
    if (file)
        fclose(file);
    return kb;
}

int
main(int argc, char **argv)
{
    const char *build = argc > 1 ? argv[1] : "build";
    int64_t n = argc > 2 ? atoll(argv[2]) : JOBS, done, first = 0;
    double consumed, rows, rate, since = 0, limit;
    int port = pg_free_port(), status;
    long early = 0, late;
    struct rusage usage;
    pid_t pid;

    make_servers(build);
    send_jobs(n);
    consumed = bare_consumer(n);
    rows = bare_rows();
    pid = start_daemon(build, port);
    limit = seconds() + LIMIT_MS / 1e3;
    while ((done = stored(port)) < n) {
        if (waitpid(pid, NULL, WNOHANG) == pid || seconds() > limit)
            give_up("the daemon does not get through");
        if (early == 0 && done >= n / 10) { /* it is warm */
            early = resident_kb(pid);
            since = seconds();
            first = done;
        }
        usleep(100000);
    }
    rate = (double)(done - first) / (seconds() - since);
    late = resident_kb(pid);
    kill(pid, SIGTERM);
    wait4(pid, &status, 0, &usage);
    if (status != 0 || number("SELECT count(*) FROM nightshift.result") != n)
        give_up("a job was lost or doubled");
    printf("connectors: %lld jobs, %.0f jobs/s end to end\n"
           "connectors: the database alone writes the rows of %.0f jobs/s, a "
           "consumer alone counts %.0f\n"
           "connectors: the daemon's own time %.0f us a job\n"
           "connectors: resident %ld kB at %lld jobs, %ld kB at %lld\n"
           "ratio: connectors-of-database %.2f connectors-memory %.2f\n",
           (long long)n, rate, rows, consumed,
           (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 /
               (double)n +
               (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) /
                   (double)n,
           early, (long long)first, late, (long long)done, rate / rows,
           (double)late / (double)early);
    broker_remove(&broker);
    return late > early + GROWTH_KB;
}
