#include "daemon/tool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/landlock.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
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

/* Which of its own files the tool may read: where systems keep programs, and
 * what lies beside its own folder. */
enum {
    READ = LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE |
           LANDLOCK_ACCESS_FS_READ_DIR,
    READ_FILE = LANDLOCK_ACCESS_FS_READ_FILE,
    WRITE_FILE = LANDLOCK_ACCESS_FS_WRITE_FILE,
    /* All that the first version knows; what came later needs an open file or
     * a call that the filter refuses. */
    ALL = (LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1,
};

/* What is not there needs no leave. */
static bool
let(int rules, const char *path, uint64_t access)
{
    struct landlock_path_beneath_attr rule = { .allowed_access = access };
    bool good;

    rule.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent_fd == -1)
        return true;
    good = syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH,
                   &rule, 0) == 0;
    close(rule.parent_fd);
    return good;
}

static bool
let_prefix(int rules, const char *tool)
{
    static const char *const folders[] = { "bin", "lib", "lib64", "libexec",
                                           "include" };
    char real[PATH_MAX], path[PATH_MAX + 16];
    bool good;

    if (!realpath(tool, real)) /* execve says why */
        return true;
    good = let(rules, real, LANDLOCK_ACCESS_FS_EXECUTE | READ_FILE);
    for (int up = 0; up < 2 && real[0]; up++)
        *strrchr(real, '/') = '\0';
    for (size_t i = 0; good && i < sizeof(folders) / sizeof(folders[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", real, folders[i]);
        good = let(rules, path, READ);
    }
    return good;
}

/* True as well where the kernel has no Landlock: ns_tool_fences_files says. */
static bool
fence_files(const char *tool)
{
    static const char *const folders[] = { "/usr", "/lib", "/lib32", "/lib64",
                                           "/bin" };
    const struct landlock_ruleset_attr all = { .handled_access_fs = ALL };
    int rules;
    bool good;

    if (!ns_tool_fences_files())
        return true;
    rules = (int)syscall(SYS_landlock_create_ruleset, &all, sizeof(all), 0);
    good = rules != -1 && let_prefix(rules, tool) &&
           let(rules, "/etc/ld.so.cache", READ_FILE) &&
           let(rules, "/dev/urandom", READ_FILE) &&
           let(rules, "/dev/null", READ_FILE | WRITE_FILE);
    for (size_t i = 0; good && i < sizeof(folders) / sizeof(folders[0]); i++)
        good = let(rules, folders[i], READ);
    good = good && syscall(SYS_landlock_restrict_self, rules, 0) == 0;
    if (rules != -1)
        close(rules);
    return good;
}

bool
ns_tool_fences_files(void)
{
    return syscall(SYS_landlock_create_ruleset, NULL, 0,
                   LANDLOCK_CREATE_RULESET_VERSION) > 0;
}

/* A compiler starts helpers of its own, so that calls are named which may not
 * be made, not those which may. It waits for each of them (vfork), and no
 * process may be started in another way: the tool is one chain, not a tree. */
static scmp_filter_ctx
make_filter(void)
{
    static const int refused[] = {
        SCMP_SYS(socket), SCMP_SYS(socketpair), SCMP_SYS(connect),
        SCMP_SYS(bind), SCMP_SYS(listen), SCMP_SYS(ptrace),
        SCMP_SYS(process_vm_readv), SCMP_SYS(process_vm_writev),
        SCMP_SYS(process_madvise), SCMP_SYS(pidfd_open),
        SCMP_SYS(pidfd_getfd), SCMP_SYS(kcmp), SCMP_SYS(kill),
        SCMP_SYS(tkill), SCMP_SYS(tgkill), SCMP_SYS(pidfd_send_signal),
        SCMP_SYS(rt_sigqueueinfo), SCMP_SYS(rt_tgsigqueueinfo),
        SCMP_SYS(setpriority), SCMP_SYS(sched_setscheduler),
        SCMP_SYS(sched_setaffinity), SCMP_SYS(mount), SCMP_SYS(umount2),
        SCMP_SYS(pivot_root), SCMP_SYS(chroot), SCMP_SYS(unshare),
        SCMP_SYS(setns), SCMP_SYS(bpf), SCMP_SYS(perf_event_open),
        SCMP_SYS(io_uring_setup), SCMP_SYS(keyctl), SCMP_SYS(add_key),
        SCMP_SYS(request_key), SCMP_SYS(userfaultfd), SCMP_SYS(shmget),
        SCMP_SYS(msgget), SCMP_SYS(semget), SCMP_SYS(mq_open),
        SCMP_SYS(setsid), SCMP_SYS(setpgid), SCMP_SYS(fork),
        SCMP_SYS(unlink), SCMP_SYS(unlinkat), SCMP_SYS(rename),
        SCMP_SYS(renameat), SCMP_SYS(renameat2), SCMP_SYS(mkdir),
        SCMP_SYS(mkdirat), SCMP_SYS(rmdir), SCMP_SYS(link),
        SCMP_SYS(linkat), SCMP_SYS(symlink), SCMP_SYS(symlinkat),
        SCMP_SYS(mknod), SCMP_SYS(mknodat), SCMP_SYS(chmod),
        SCMP_SYS(fchmod), SCMP_SYS(fchmodat), SCMP_SYS(chown),
        SCMP_SYS(fchown), SCMP_SYS(fchownat), SCMP_SYS(truncate),
    };
    const uint32_t no = SCMP_ACT_ERRNO(EPERM);
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
    bool good = filter != NULL;

    for (size_t i = 0; good && i < sizeof(refused) / sizeof(refused[0]); i++)
        good = seccomp_rule_add(filter, no, refused[i], 0) == 0;
    /* Its arguments lie in memory, where a filter can't look: as on a kernel
     * that has none, libc takes clone. */
    good = good && seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS),
                                    SCMP_SYS(clone3), 0) == 0;
    good = good && seccomp_rule_add(filter, no, SCMP_SYS(clone), 1,
                                    SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_VFORK,
                                            0)) == 0;
    good = good && seccomp_rule_add(filter, no, SCMP_SYS(prlimit64), 1,
                                    SCMP_A0(SCMP_CMP_NE, 0)) == 0;
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

    /* The limits last: what comes before them may need memory of ours. */
    if (filter && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && chdir("/") == 0 &&
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && fence_files(argv[2]) &&
        seccomp_load(filter) == 0 && limit(RLIMIT_CORE, 0) &&
        limit(RLIMIT_FSIZE, 0) && limit(RLIMIT_NOFILE, 64) &&
        limit(RLIMIT_CPU, NS_TOOL_CPU_S) && limit(RLIMIT_AS, NS_TOOL_MEMORY))
        execve(argv[2], argv + 2, empty);
    _exit(FAILED_TO_START); /* what runs at an end may need what it gave up */
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

/* It has closed its output: it ends at once, or it is made to. Its group is
 * gone before its number is given back. */
static int
end_of(pid_t pid)
{
    int64_t until = now_ms() + 200;
    siginfo_t ended = { 0 };
    int status;

    while (now_ms() < until &&
           waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ended.si_pid == 0) {
        struct timespec pause = { .tv_nsec = 1000000 };

        nanosleep(&pause, NULL);
    }
    kill(-pid, SIGKILL);
    while (waitpid(pid, &status, 0) == -1)
        if (errno != EINTR)
            return -1;
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
