#include "daemon/tool.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <seccomp.h>

enum { FAILED_TO_START = 126, MOST_ARGUMENTS = 24 };

enum ns_status
ns_tool_check(const char *path, const char *key, struct ns_error *err)
{
    if (path[0] != '/')
        return ns_fail(err, NS_REJECT, "%s: %s: a path from / on is needed",
                       key, path);
    if (access(path, X_OK) != 0)
        return ns_fail_errno(err, NS_REJECT, "%s: %s", key, path);
    return NS_OK;
}

/* ---- the helper --------------------------------------------------------- */

static bool
limit(int what, rlim_t most)
{
    const struct rlimit value = { most, most };

    return setrlimit((__rlimit_resource_t)what, &value) == 0;
}

/* A compiler starts helpers of its own, so that calls are named which may not
 * be made, not those which may. */
static scmp_filter_ctx
make_filter(void)
{
    static const int refused[] = {
        SCMP_SYS(socket), SCMP_SYS(socketpair), SCMP_SYS(connect),
        SCMP_SYS(bind), SCMP_SYS(listen), SCMP_SYS(ptrace),
        SCMP_SYS(process_vm_readv), SCMP_SYS(process_vm_writev),
        SCMP_SYS(kill), SCMP_SYS(tkill), SCMP_SYS(pidfd_send_signal),
        SCMP_SYS(rt_sigqueueinfo), SCMP_SYS(mount), SCMP_SYS(umount2),
        SCMP_SYS(pivot_root), SCMP_SYS(chroot), SCMP_SYS(unshare),
        SCMP_SYS(setns), SCMP_SYS(bpf), SCMP_SYS(perf_event_open),
        SCMP_SYS(io_uring_setup), SCMP_SYS(keyctl), SCMP_SYS(add_key),
        SCMP_SYS(request_key), SCMP_SYS(userfaultfd), SCMP_SYS(shmget),
        SCMP_SYS(msgget), SCMP_SYS(semget), SCMP_SYS(mq_open),
        SCMP_SYS(setsid), SCMP_SYS(setpgid), SCMP_SYS(unlink),
        SCMP_SYS(rename), SCMP_SYS(mkdir), SCMP_SYS(rmdir), SCMP_SYS(link),
        SCMP_SYS(symlink), SCMP_SYS(chmod), SCMP_SYS(fchmodat),
        SCMP_SYS(chown), SCMP_SYS(fchownat), SCMP_SYS(truncate),
        SCMP_SYS(unlinkat), SCMP_SYS(renameat),
        SCMP_SYS(renameat2), SCMP_SYS(mkdirat), SCMP_SYS(linkat),
        SCMP_SYS(symlinkat), SCMP_SYS(mknod), SCMP_SYS(mknodat),
    };
    const uint32_t no = SCMP_ACT_ERRNO(EPERM);
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
    bool good = filter != NULL;

    for (size_t i = 0; good && i < sizeof(refused) / sizeof(refused[0]); i++)
        good = seccomp_rule_add(filter, no, refused[i], 0) == 0;
    if (good)
        return filter;
    seccomp_release(filter);
    return NULL;
}

bool
ns_tool_is_helper(int argc, char **argv)
{
    return argc > 2 && strcmp(argv[1], NS_TOOL_ARGUMENT) == 0;
}

int
ns_tool_main(char **argv)
{
    static char *const empty[] = { NULL };
    scmp_filter_ctx filter = make_filter();

    if (filter && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && chdir("/") == 0 &&
        limit(RLIMIT_AS, NS_TOOL_MEMORY) && limit(RLIMIT_CPU, NS_TOOL_CPU_S) &&
        limit(RLIMIT_CORE, 0) && limit(RLIMIT_FSIZE, 0) &&
        limit(RLIMIT_NOFILE, 64) &&
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
        seccomp_load(filter) == 0)
        execve(argv[2], argv + 2, empty);
    return FAILED_TO_START;
}

/* ---- the parent ---------------------------------------------------------- */

static int64_t
now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* A file without a name that holds the input, at its start. */
static int
hold(const char *input, size_t length)
{
    int fd = memfd_create("code", MFD_CLOEXEC);

    for (size_t at = 0; fd != -1 && at < length;) {
        ssize_t n = write(fd, input + at, length - at);

        if (n == -1 && errno == EINTR)
            continue;
        if (n <= 0) {
            close(fd);
            return -1;
        }
        at += (size_t)n;
    }
    if (fd != -1)
        lseek(fd, 0, SEEK_SET);
    return fd;
}

/* Until it says no more, or the time is up. */
static void
listen_to(int fd, char *says)
{
    int64_t until = now_ms() + NS_TOOL_MS;
    size_t n_said = 0;

    for (;;) {
        struct pollfd ready = { .fd = fd, .events = POLLIN };
        int64_t left = until - now_ms();
        char chunk[1024];
        ssize_t n;

        if (left <= 0 || poll(&ready, 1, (int)left) == 0)
            break;
        n = read(fd, chunk, sizeof(chunk));
        if (n == -1 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        if ((size_t)n > NS_TOOL_SAYS - n_said)
            n = (ssize_t)(NS_TOOL_SAYS - n_said);
        memcpy(says + n_said, chunk, (size_t)n);
        n_said += (size_t)n;
    }
    says[n_said] = '\0';
}

/* It has closed its output: it ends at once, or it is made to. */
static int
end_of(pid_t pid)
{
    int64_t until = now_ms() + 200;
    int status;

    while (waitpid(pid, &status, WNOHANG) == 0) {
        struct timespec pause = { .tv_nsec = 1000000 };

        if (now_ms() > until) {
            kill(-pid, SIGKILL);
            waitpid(pid, &status, 0);
            break;
        }
        nanosleep(&pause, NULL);
    }
    kill(-pid, SIGKILL); /* what it may have left behind */
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Not forked: nothing of ours, and no device, is mapped in it. */
static int
start(const char *const *argv, int in, int out, pid_t *pid)
{
    const char *all[MOST_ARGUMENTS] = { "nightshift-tool", NS_TOOL_ARGUMENT };
    static char *const empty[] = { NULL };
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t none;
    int rc = 0;

    for (int i = 0; argv[i] && i + 3 < MOST_ARGUMENTS; i++)
        all[i + 2] = argv[i];
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    rc |= posix_spawn_file_actions_adddup2(&files, in, 0);
    rc |= posix_spawn_file_actions_adddup2(&files, out, 1);
    rc |= posix_spawn_file_actions_adddup2(&files, out, 2);
    rc |= posix_spawn_file_actions_addclosefrom_np(&files, 3);
    sigemptyset(&none);
    rc |= posix_spawnattr_setsigmask(&how, &none);
    rc |= posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP |
                                             POSIX_SPAWN_SETSIGMASK);
    if (rc == 0)
        rc = posix_spawn(pid, "/proc/self/exe", &files, &how,
                         (char *const *)all, empty);
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
    return rc;
}

enum ns_status
ns_tool_run(const char *const *argv, const char *input, size_t length,
            struct ns_tool_answer *out, struct ns_error *err)
{
    int pipe_of[2] = { -1, -1 }, in = hold(input, length);
    enum ns_status status = NS_OK;
    pid_t pid;

    if (in == -1 || pipe2(pipe_of, O_CLOEXEC) == -1)
        status = ns_fail_errno(err, NS_RETRY, "start %s", argv[0]);
    else if ((errno = start(argv, in, pipe_of[1], &pid)) != 0)
        status = ns_fail_errno(err, NS_RETRY, "start %s", argv[0]);
    if (status == NS_OK) {
        close(pipe_of[1]);
        pipe_of[1] = -1;
        listen_to(pipe_of[0], out->says);
        out->exit_status = end_of(pid);
        if (out->exit_status == FAILED_TO_START)
            status = ns_fail(err, NS_RETRY, "%s does not start", argv[0]);
    }
    if (in != -1)
        close(in);
    if (pipe_of[0] != -1)
        close(pipe_of[0]);
    if (pipe_of[1] != -1)
        close(pipe_of[1]);
    return status;
}

/* ---- Python and C --------------------------------------------------------- */

/* The first line with `word` in it becomes all; the first, where none has. */
static void
keep_line(char *says, const char *word)
{
    char *at = strstr(says, word);
    size_t n;

    while (at && at > says && at[-1] != '\n')
        at--;
    at = at ? at : says;
    n = strcspn(at, "\n");
    memmove(says, at, n);
    says[n] = '\0';
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)says[i] < ' ')
            says[i] = ' ';
}

bool
ns_tool_python(const char *python, const char *code, size_t length,
               struct ns_tool_answer *answer, enum ns_status *status,
               struct ns_error *err)
{
    /* Isolated, without site packages; exit status 1 is a syntax error. */
    static const char script[] =
        "import sys\n"
        "try:\n"
        "    compile(sys.stdin.buffer.read(), '<answer>', 'exec', 0, True)\n"
        "except (SyntaxError, ValueError) as e:\n"
        "    print(str(getattr(e, 'msg', e))[:120], 'in line',\n"
        "          getattr(e, 'lineno', 0) or 0)\n"
        "    sys.exit(1)\n";
    const char *const argv[] = { python, "-I", "-S", "-B",
                                 "-W", "ignore", "-c", script, NULL };

    *status = ns_tool_run(argv, code, length, answer, err);
    if (*status != NS_OK || answer->exit_status == 0)
        return *status == NS_OK;
    if (answer->exit_status == 1)
        keep_line(answer->says, "in line");
    else
        snprintf(answer->says, sizeof(answer->says),
                 "Python could not parse it within its limits");
    return false;
}

/* A directive that names a file, in a line from `at` on. Splices, digraphs and
 * comments may stand where blanks may. */
static size_t
skip_blank(const char *code, size_t length, size_t at)
{
    while (at < length) {
        if (code[at] == ' ' || code[at] == '\t' || code[at] == '\f' ||
            code[at] == '\v' || code[at] == '\r')
            at++;
        else if (at + 1 < length && code[at] == '\\' && code[at + 1] == '\n')
            at += 2;
        else if (at + 2 < length && code[at] == '\\' &&
                 code[at + 1] == '\r' && code[at + 2] == '\n')
            at += 3;
        else if (at + 1 < length && code[at] == '/' && code[at + 1] == '*') {
            at += 2;
            while (at + 1 < length && (code[at] != '*' || code[at + 1] != '/'))
                at++;
            at = at + 1 < length ? at + 2 : length;
        } else {
            break;
        }
    }
    return at;
}

/* A word, its splices taken out. Returns what follows. */
static size_t
read_word(const char *code, size_t length, size_t at, char *out, size_t room)
{
    size_t n = 0;

    for (;;) {
        while (at + 1 < length && code[at] == '\\' && code[at + 1] == '\n')
            at += 2;
        if (at == length ||
            !(isalnum((unsigned char)code[at]) || code[at] == '_'))
            break;
        if (n + 1 < room)
            out[n++] = code[at];
        at++;
    }
    out[n] = '\0';
    return at;
}

/* What a directive may name: a header by a plain path, of the compiler's own
 * folders. A macro, an absolute path and one with dots may be anything. */
static bool
harmless_operand(const char *code, size_t length, size_t at)
{
    char close;
    size_t start;

    at = skip_blank(code, length, at);
    if (at == length || (code[at] != '<' && code[at] != '"'))
        return false;
    close = code[at] == '<' ? '>' : '"';
    start = ++at;
    while (at < length && code[at] != close) {
        unsigned char c = (unsigned char)code[at];

        if (!isalnum(c) && !strchr("_+-./", c))
            return false;
        if (c == '.' && at + 1 < length && code[at + 1] == '.')
            return false;
        at++;
    }
    return at < length && at > start && code[start] != '/';
}

static bool
includes_harmless(const char *code, size_t length, size_t *line)
{
    bool fresh = true; /* only blanks since the line began */

    *line = 1;
    for (size_t at = 0; at < length;) {
        size_t next = fresh ? skip_blank(code, length, at) : at;
        bool hash;
        char word[16];

        if (next > at) {
            for (size_t i = at; i < next; i++)
                *line += code[i] == '\n';
            at = next;
            continue;
        }
        hash = fresh && code[at] == '#';
        if (fresh && at + 1 < length &&
            (memcmp(code + at, "%:", 2) == 0 ||
             memcmp(code + at, "?\?", 2) == 0)) {
            hash = true;
            at += code[at] == '%' ? 1 : 2;
        }
        fresh = false;
        if (hash) {
            at = read_word(code, length, skip_blank(code, length, at + 1),
                           word, sizeof(word));
            if ((strncmp(word, "include", 7) == 0 ||
                 strcmp(word, "import") == 0 || strcmp(word, "embed") == 0) &&
                !harmless_operand(code, length, at))
                return false;
            if (strcmp(word, "pragma") == 0 || strcmp(word, "line") == 0) {
                at = skip_blank(code, length, at);
                read_word(code, length, at, word, sizeof(word));
                if (strcmp(word, "GCC") == 0) /* dependency "file" */
                    return false;
            }
            continue;
        }
        if (code[at] == '\n') {
            fresh = true;
            (*line)++;
        }
        at++;
    }
    return true;
}

bool
ns_tool_c(const char *cc, const char *code, size_t length,
          struct ns_tool_answer *answer, enum ns_status *status,
          struct ns_error *err)
{
    const char *const argv[] = { cc, "-fsyntax-only", "-pipe", "-x", "c", "-std=gnu17",
                                 "-w", "-fmax-errors=1",
                                 "-fno-diagnostics-show-caret",
                                 "-fdiagnostics-color=never", "-", NULL };
    size_t line;

    *status = NS_OK;
    if (!includes_harmless(code, length, &line)) {
        snprintf(answer->says, sizeof(answer->says),
                 "line %zu names a file that is no header of the compiler's "
                 "own, or may be", line);
        return false;
    }
    *status = ns_tool_run(argv, code, length, answer, err);
    if (*status != NS_OK || answer->exit_status == 0)
        return *status == NS_OK;
    if (answer->exit_status == 1)
        keep_line(answer->says, "error: ");
    else
        snprintf(answer->says, sizeof(answer->says),
                 "the compiler could not parse it within its limits");
    return false;
}
