/* nightshiftd whose engine thread is made to hang in the middle of a pass: it
 * says so, and systemd's watchdog starves; and it is well again afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "tests/daemon/client.h"
#include "tests/daemon/program.h"

enum { FED_MS = 300, N_JOBS = 40 };

static char spool[PATH_MAX];

static pid_t
start_daemon(uint16_t *port)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };
    const char *const argv[] = {
        "nightshiftd", "--spool", spool, "--model", program_model, "--set",
        "cpu.threads=1", "--set", "intake.poll=20ms", "--set",
        "http.listen=127.0.0.1:0", "--set", "daemon.pass_limit=1s", "--set",
        "daemon.drain=0", NULL,
    };
    pid_t pid;

    snprintf(spool, sizeof(spool), "%s", in_folder("spool"));
    for (size_t i = 0; i < 6; i++) {
        char path[PATH_MAX + 8];

        snprintf(path, sizeof(path), "%s%s", spool, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    pid = spawn(argv, in_folder("d.out"), in_folder("d.err"));
    wait_until_says(in_folder("d.err"), "daemon.ready");
    *port = port_in(in_folder("d.err"));
    return pid;
}

static void
drop_jobs(int n)
{
    char part[PATH_MAX + 32], whole[PATH_MAX + 32];
    FILE *file;

    snprintf(part, sizeof(part), "%s/in/a.part", spool);
    snprintf(whole, sizeof(whole), "%s/in/a.jsonl", spool);
    file = fopen(part, "w");
    assert_non_null(file);
    for (int i = 0; i < n; i++)
        fprintf(file, "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"tell me %d things\"}],\"max_tokens\":"
                "3000},\"nightshift\":{\"mode\":\"ar\"}}\n", i, i);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(part, whole), 0);
}

static pid_t
thread_called(pid_t pid, const char *name)
{
    struct dirent *entry;
    char path[300], said[32];
    pid_t found = 0;
    DIR *tasks;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    tasks = opendir(path);
    assert_non_null(tasks);
    while (!found && (entry = readdir(tasks)) != NULL) {
        FILE *file;

        snprintf(path, sizeof(path), "/proc/%d/task/%s/comm", (int)pid,
                 entry->d_name);
        file = fopen(path, "r");
        if (file && fgets(said, sizeof(said), file) &&
            strcspn(said, "\n") == strlen(name) &&
            strncmp(said, name, strlen(name)) == 0)
            found = (pid_t)atoi(entry->d_name);
        if (file)
            fclose(file);
    }
    closedir(tasks);
    assert_true(found > 0);
    return found;
}

/* That thread alone, until it is let go. */
static void
hold(pid_t thread)
{
    int status;

    assert_int_equal(ptrace(PTRACE_SEIZE, thread, NULL, NULL), 0);
    assert_int_equal(ptrace(PTRACE_INTERRUPT, thread, NULL, NULL), 0);
    assert_int_equal(waitpid(thread, &status, __WALL), thread);
    assert_true(WIFSTOPPED(status));
}

static void
let_go(pid_t thread)
{
    assert_int_equal(ptrace(PTRACE_DETACH, thread, NULL, NULL), 0);
}

static bool
says_within(uint16_t port, const char *path, int status, int limit_ms)
{
    int64_t until = now_ms() + limit_ms;

    while (get_status(port, path) != status) {
        if (now_ms() > until)
            return false;
        usleep(10000);
    }
    return true;
}

/* Hears for systemd; whoever does not listen makes the daemon wait. */
static _Atomic int n_fed;

static void *
listen_on(void *data)
{
    int fd = *(int *)data;
    char said[4096];
    ssize_t n;

    while ((n = recv(fd, said, sizeof(said) - 1, 0)) > 0) {
        said[n] = '\0';
        if (strstr(said, "WATCHDOG=1"))
            n_fed++;
        if (strcmp(said, "end") == 0)
            break;
    }
    return NULL;
}

/* Whether we are told again that it lives, within the time. */
static bool
is_fed(int limit_ms)
{
    int64_t until = now_ms() + limit_ms;
    int before = n_fed;

    while (n_fed == before && now_ms() < until)
        usleep(5000);
    return n_fed > before;
}

static void
wait_until_it_computes(uint16_t port)
{
    int64_t until = now_ms() + LIMIT_MS;

    for (bool runs = false; !runs; usleep(5000)) {
        char *answer = ask(port, "GET", "/metrics");

        runs = !strstr(answer, "\nnightshift_jobs_running 0\n");
        free(answer);
        assert_true(now_ms() < until);
    }
}

static void
a_pass_that_hangs_is_told_and_starves_the_watchdog(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    char number[32], *answer;
    pthread_t listener;
    bool hung = false;
    pid_t pid, thread;
    uint16_t port;

    (void)state;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s",
             in_folder("notify"));
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)),
                     0);
    assert_int_equal(pthread_create(&listener, NULL, listen_on, &fd), 0);
    setenv("NOTIFY_SOCKET", address.sun_path, 1);
    snprintf(number, sizeof(number), "%d", FED_MS * 1000);
    setenv("WATCHDOG_USEC", number, 1);
    pid = start_daemon(&port);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    drop_jobs(N_JOBS);
    assert_true(is_fed(LIMIT_MS));

    /* Between two passes it is no hanging pass; then once more. */
    thread = thread_called(pid, "engine");
    for (int i = 0; i < 20 && !hung; i++) {
        wait_until_it_computes(port);
        hold(thread);
        hung = says_within(port, "/healthz", 503, 4000);
        if (!hung)
            let_go(thread);
    }
    assert_true(hung);
    assert_int_equal(get_status(port, "/readyz"), 503);
    answer = ask(port, "GET", "/metrics"); /* the web server is well */
    assert_non_null(strstr(answer, "\nnightshift_healthy 0\n"));
    free(answer);
    assert_false(is_fed(4 * FED_MS));

    let_go(thread);
    assert_true(says_within(port, "/healthz", 200, LIMIT_MS));
    assert_true(is_fed(LIMIT_MS));
    kill(pid, SIGTERM);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    assert_int_equal(sendto(fd, "end", 3, 0, (struct sockaddr *)&address,
                            sizeof(address)), 3);
    pthread_join(listener, NULL);
    close(fd);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pass_that_hangs_is_told_and_starves_the_watchdog),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
