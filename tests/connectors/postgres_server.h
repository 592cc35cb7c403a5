/* postgres_server.h - a real PostgreSQL of the test's own, and what may go
 * wrong between it and us: a pooler, and a proxy that loses answers.
 *
 * The server listens on loopback, on a free port, over a folder below /tmp
 * that every user may enter: it refuses to run as root, so there it runs as
 * `postgres`. It flushes, as a real one, and goes when the test goes: if the
 * test is killed, a guardian sees to that. Anyone may connect as anyone, but
 * for the roles `locked_out`, never, and `known`, with a password.
 *
 * A header of static functions, for tests of more than one layer.
 */
#ifndef NS_TESTS_POSTGRES_SERVER_H
#define NS_TESTS_POSTGRES_SERVER_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <grp.h>
#include <libpq-fe.h>
#include <poll.h>
#include <pthread.h>
#include <pwd.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct {
    char folder[64], bin[128];
    int port, pooler_port;
    pid_t pid, pooler;
} pg_server;

#define PG_UNUSED __attribute__((unused))

static int
pg_free_port(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd == -1 || bind(fd, (struct sockaddr *)&at, length) == -1 ||
        getsockname(fd, (struct sockaddr *)&at, &length) == -1)
        abort();
    close(fd);
    return ntohs(at.sin_port);
}

/* Starts a program as a user who is not root, its output into a log. */
static pid_t
pg_spawn(const char *log, const char *const *argv)
{
    struct passwd *user = getpwnam("postgres");
    pid_t pid;

    if (!user)
        user = getpwnam("nobody");
    pid = fork();
    if (pid != 0)
        return pid;
    if (getuid() == 0 &&
        (!user || setgroups(0, NULL) == -1 || setgid(user->pw_gid) == -1 ||
         setuid(user->pw_uid) == -1))
        _exit(126);
    setsid();
    for (int fd = 3; fd < 256; fd++)
        close(fd);
    close(0);
    close(1);
    close(2);
    if (open("/dev/null", O_RDONLY) != 0 ||
        open(log, O_WRONLY | O_CREAT | O_APPEND, 0600) != 1 || dup(1) != 2 ||
        chdir("/") == -1)
        _exit(126);
    setenv("LC_ALL", "C", 1);
    unsetenv("LD_PRELOAD");
    execv(argv[0], (char *const *)argv);
    _exit(127);
}

static int
pg_wait_exit(pid_t pid)
{
    int status;

    while (waitpid(pid, &status, 0) == -1)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* As superuser `ns`, over the server's own port. */
static PGconn *
pg_open_as(const char *user, const char *database)
{
    char info[256];

    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=%s dbname=%s "
             "connect_timeout=5", pg_server.port, user, database);
    return PQconnectdb(info);
}

static void
pg_start(void)
{
    char data[128], port[16], log[128];
    const char *const argv[] = { NULL, "-D", data, "-p", port, NULL };
    char program[160];
    const char *words[6];

    snprintf(data, sizeof(data), "%s/data", pg_server.folder);
    snprintf(port, sizeof(port), "%d", pg_server.port);
    snprintf(log, sizeof(log), "%s/log", pg_server.folder);
    snprintf(program, sizeof(program), "%s/postgres", pg_server.bin);
    memcpy(words, argv, sizeof(argv));
    words[0] = program;
    for (int i = 0; i < 600; i++) {
        PGconn *conn;
        bool ready;

        /* After a kill -9 the backends need a moment to notice, and until
         * then a new server refuses to start. */
        if (pg_server.pid == 0 ||
            waitpid(pg_server.pid, NULL, WNOHANG) == pg_server.pid)
            pg_server.pid = pg_spawn(log, words);
        usleep(50000);
        conn = pg_open_as("ns", "postgres");
        ready = PQstatus(conn) == CONNECTION_OK;
        PQfinish(conn);
        if (ready)
            return;
    }
    fprintf(stderr, "postgres does not start: see %s\n", log);
    abort();
}

/* SIGINT: orderly. SIGQUIT: at once. SIGKILL: it crashes. */
static void
pg_stop(int signal)
{
    if (pg_server.pid > 0) {
        kill(pg_server.pid, signal);
        kill(pg_server.pid, SIGCONT); /* a test may have left it stopped */
        pg_wait_exit(pg_server.pid);
    }
    pg_server.pid = 0;
}

static void
pg_remove(void)
{
    char command[128];

    if (pg_server.pooler > 0) {
        kill(pg_server.pooler, SIGKILL);
        pg_wait_exit(pg_server.pooler);
        pg_server.pooler = 0;
    }
    pg_stop(SIGQUIT);
    if (pg_server.folder[0]) {
        snprintf(command, sizeof(command), "rm -rf '%s'", pg_server.folder);
        if (system(command) != 0)
            fprintf(stderr, "cannot remove %s\n", pg_server.folder);
    }
    pg_server.folder[0] = '\0';
}

/* A process that waits for this one to be gone, however it goes, and then
 * ends the servers and removes their folder. */
static void
pg_guard(void)
{
    static const char *const pids[] = { "data/postmaster.pid", "pooler.pid" };
    int alive[2];
    char byte;

    if (pipe(alive) == -1)
        abort();
    fcntl(alive[1], F_SETFD, FD_CLOEXEC);
    if (fork() != 0) {
        close(alive[0]); /* alive[1] stays open as long as we live */
        return;
    }
    setsid();
    close(alive[1]);
    for (int fd = 0; fd < 256; fd++)
        if (fd != alive[0])
            close(fd);
    while (read(alive[0], &byte, 1) == -1 && errno == EINTR)
        ;
    for (int i = 0; i < 2; i++) {
        char path[160];
        FILE *file;
        long pid = 0;

        snprintf(path, sizeof(path), "%s/%s", pg_server.folder, pids[i]);
        file = fopen(path, "r");
        if (!file)
            continue;
        if (fscanf(file, "%ld", &pid) == 1 && pid > 1)
            kill((pid_t)pid, SIGQUIT);
        fclose(file);
        for (int n = 0; n < 100 && pid > 1 && kill((pid_t)pid, 0) == 0; n++)
            usleep(50000);
    }
    if (access(pg_server.folder, F_OK) == 0)
        execl("/bin/rm", "rm", "-rf", pg_server.folder, (char *)NULL);
    _exit(0);
}

static void
pg_add_file(const char *name, const char *text, const char *mode)
{
    char path[160];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", pg_server.folder, name);
    file = fopen(path, mode);
    if (!file || fputs(text, file) == EOF || fclose(file) != 0)
        abort();
    chmod(path, 0644);
}

static PG_UNUSED void
pg_create(void)
{
    char program[160], data[128], log[128];
    struct passwd *user = getpwnam("postgres");
    glob_t found;
    const char *const argv[] = {
        program, "-D", data, "-U", "ns", "-A", "trust", "-E", "UTF8",
        "--locale=C.UTF-8", "--no-sync", NULL,
    };

    if (glob("/usr/lib/postgresql/*/bin/initdb", 0, NULL, &found) != 0) {
        fprintf(stderr, "no PostgreSQL here: scripts/setup.sh check\n");
        abort();
    }
    snprintf(pg_server.bin, sizeof(pg_server.bin), "%s",
             found.gl_pathv[found.gl_pathc - 1]);
    *strrchr(pg_server.bin, '/') = '\0';
    globfree(&found);
    snprintf(pg_server.folder, sizeof(pg_server.folder),
             "/tmp/nightshift-pg-XXXXXX");
    if (!mkdtemp(pg_server.folder))
        abort();
    atexit(pg_remove);
    pg_guard();
    if (getuid() == 0 && (!user || chown(pg_server.folder, user->pw_uid,
                                         user->pw_gid) == -1))
        abort();
    snprintf(program, sizeof(program), "%s/initdb", pg_server.bin);
    snprintf(data, sizeof(data), "%s/data", pg_server.folder);
    snprintf(log, sizeof(log), "%s/initdb.log", pg_server.folder);
    if (pg_wait_exit(pg_spawn(log, argv)) != 0) {
        fprintf(stderr, "initdb failed: see %s\n", log);
        abort();
    }
    pg_add_file("data/postgresql.conf",
                "listen_addresses = '127.0.0.1'\n"
                "unix_socket_directories = ''\n"
                "max_connections = 40\nshared_buffers = 32MB\n"
                "max_wal_size = 128MB\nlogging_collector = off\n"
                "deadlock_timeout = 200ms\n", "a");
    pg_add_file("data/pg_hba.conf",
                "host all locked_out 127.0.0.1/32 reject\n"
                "host all known 127.0.0.1/32 scram-sha-256\n"
                "host all all 127.0.0.1/32 trust\n", "w");
    pg_server.port = pg_free_port();
    pg_start();
}

/* pgbouncer in transaction mode in front of the server. */
static PG_UNUSED void
pg_start_pooler(void)
{
    char text[1024], path[128], log[128];
    const char *const argv[] = { "/usr/sbin/pgbouncer", path, NULL };

    pg_server.pooler_port = pg_free_port();
    /* Any name may enter, but all reach the server as one: so a database for
     * each role that is needed, here only one. */
    snprintf(text, sizeof(text),
             "[databases]\npostgres = host=127.0.0.1 port=%d user=nsd\n"
             "[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = %d\n"
             "unix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
             "max_client_conn = 20\ndefault_pool_size = 3\n"
             "pidfile = %s/pooler.pid\n",
             pg_server.port, pg_server.pooler_port, pg_server.folder);
    pg_add_file("pgbouncer.ini", text, "w");
    snprintf(path, sizeof(path), "%s/pgbouncer.ini", pg_server.folder);
    snprintf(log, sizeof(log), "%s/pgbouncer.log", pg_server.folder);
    pg_server.pooler = pg_spawn(log, argv);
    for (int i = 0; i < 100; i++) {
        char info[128];
        PGconn *conn;
        bool ready;

        usleep(50000);
        snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd "
                 "dbname=postgres connect_timeout=2", pg_server.pooler_port);
        conn = PQconnectdb(info);
        ready = PQstatus(conn) == CONNECTION_OK;
        PQfinish(conn);
        if (ready)
            return;
    }
    fprintf(stderr, "pgbouncer does not start: see %s\n", log);
    abort();
}

/* ---- a proxy that loses answers --------------------------------------- */

/* Forwards to the server. Of every `every`-th message of a client that holds
 * the word, the server's answer is awaited and thrown away, and the client cut
 * off: it cannot know whether it happened. */
static struct {
    int listener, port;
    pthread_t thread;
    const char *_Atomic word;
    _Atomic int every, seen, dropped;
    _Atomic bool stopping;
} pg_proxy;

static int
pg_dial(void)
{
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                              .sin_port = htons((uint16_t)pg_server.port) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == -1) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool
pg_forward(int from, int to, const char *word, bool *met)
{
    static _Thread_local char bytes[1 << 20];
    ssize_t n = read(from, bytes, sizeof(bytes)), at = 0, m;

    if (n <= 0)
        return false;
    if (word && memmem(bytes, (size_t)n, word, strlen(word)))
        *met = true;
    for (; at < n; at += m)
        if ((m = write(to, bytes + at, (size_t)(n - at))) <= 0)
            return false;
    return true;
}

static void *
pg_proxy_session(void *data)
{
    int client = (int)(intptr_t)data, server = pg_dial();
    bool drop = false;

    while (server != -1 && !pg_proxy.stopping) {
        struct pollfd fds[2] = { { client, POLLIN, 0 },
                                 { server, POLLIN, 0 } };
        bool met = false;

        if (poll(fds, 2, 100) <= 0)
            continue;
        if (fds[1].revents) {
            if (drop) { /* the answer is there, so it has happened */
                pg_proxy.dropped++;
                break;
            }
            if (!pg_forward(server, client, NULL, NULL))
                break;
        }
        if (fds[0].revents &&
            !pg_forward(client, server, pg_proxy.word, &met))
            break;
        if (met && pg_proxy.every > 0 && ++pg_proxy.seen % pg_proxy.every == 0)
            drop = true;
    }
    close(client);
    if (server != -1)
        close(server);
    return NULL;
}

static void *
pg_proxy_thread(void *data)
{
    (void)data;
    while (!pg_proxy.stopping) {
        struct pollfd pollfd = { pg_proxy.listener, POLLIN, 0 };
        pthread_t thread;
        int client;

        if (poll(&pollfd, 1, 100) <= 0)
            continue;
        client = accept4(pg_proxy.listener, NULL, NULL, SOCK_CLOEXEC);
        if (client == -1)
            continue;
        if (pthread_create(&thread, NULL, pg_proxy_session,
                           (void *)(intptr_t)client) != 0)
            abort();
        pthread_detach(thread);
    }
    return NULL;
}

static PG_UNUSED void
pg_proxy_start(const char *word, int every)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int one = 1;

    pg_proxy.port = pg_free_port();
    at.sin_port = htons((uint16_t)pg_proxy.port);
    pg_proxy.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(pg_proxy.listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(pg_proxy.listener, (struct sockaddr *)&at, sizeof(at)) == -1 ||
        listen(pg_proxy.listener, 16) == -1)
        abort();
    pg_proxy.word = word;
    pg_proxy.every = every;
    pg_proxy.seen = pg_proxy.dropped = 0;
    pg_proxy.stopping = false;
    if (pthread_create(&pg_proxy.thread, NULL, pg_proxy_thread, NULL) != 0)
        abort();
}

static PG_UNUSED void
pg_proxy_stop(void)
{
    pg_proxy.stopping = true;
    pthread_join(pg_proxy.thread, NULL);
    close(pg_proxy.listener);
    usleep(250000); /* its sessions look every 100 ms */
}

#endif
