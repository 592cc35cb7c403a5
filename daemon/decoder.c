#include "daemon/decoder.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <seccomp.h>

enum {
    HELPER_SOCKET = 3,
    ANSWER_MS = 60000,      /* of one picture, by the clock */
    AGAIN_WITHIN_MS = 5000, /* a death this soon is tried once more */
    MEMORY_BYTES = 1 << 30, /* a progressive picture of 20 megapixels: 240 MB */
};

struct question {
    uint32_t length;
};

struct answer {
    int32_t status;
    char code[16], text[400]; /* of a refusal */
    uint32_t width, height;   /* the pixels follow */
    uint32_t retires;         /* the helper ends after this answer */
};

/* ---- the wire --------------------------------------------------------- */

static bool
write_all(int fd, const void *bytes, size_t n)
{
    const char *at = bytes;

    while (n > 0) {
        ssize_t part = send(fd, at, n, MSG_NOSIGNAL);

        if (part == -1 && errno == EINTR)
            continue;
        if (part <= 0)
            return false;
        at += part;
        n -= (size_t)part;
    }
    return true;
}

static bool
read_all(int fd, void *bytes, size_t n)
{
    char *at = bytes;

    while (n > 0) {
        ssize_t part = recv(fd, at, n, 0);

        if (part == -1 && errno == EINTR)
            continue;
        if (part <= 0)
            return false;
        at += part;
        n -= (size_t)part;
    }
    return true;
}

/* ---- the helper ------------------------------------------------------- */

bool
ns_decoder_is_helper(int argc, char **argv)
{
    return argc == 2 && strcmp(argv[1], NS_DECODER_ARGUMENT) == 0;
}

/* Under a sanitizer the process needs far more memory and calls than a helper
 * may have; what is left then is that it is another process. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static bool
lock_in(uint32_t cpu_seconds)
{
    (void)cpu_seconds;
    return true;
}
#else
static bool
limit(int what, rlim_t most)
{
    const struct rlimit value = { most, most };

    return setrlimit((__rlimit_resource_t)what, &value) == 0;
}

static bool
allow_only_computing(void)
{
    static const int calls[] = {
        SCMP_SYS(recvfrom), SCMP_SYS(sendto), SCMP_SYS(brk), SCMP_SYS(munmap),
        SCMP_SYS(mremap), SCMP_SYS(madvise), SCMP_SYS(exit_group),
        SCMP_SYS(exit), SCMP_SYS(rt_sigreturn), SCMP_SYS(rt_sigprocmask),
        SCMP_SYS(clock_gettime), SCMP_SYS(getrandom), SCMP_SYS(futex),
    };
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_KILL_PROCESS);
    bool good = filter != NULL;

    for (size_t i = 0; good && i < sizeof(calls) / sizeof(calls[0]); i++)
        good = seccomp_rule_add(filter, SCMP_ACT_ALLOW, calls[i], 0) == 0;
    /* Memory, but none to run code from. */
    good = good &&
           seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(mmap), 1,
                            SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0)) == 0 &&
           seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(mprotect), 1,
                            SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0)) == 0 &&
           seccomp_load(filter) == 0;
    seccomp_release(filter);
    return good;
}

static bool
lock_in(uint32_t cpu_seconds)
{
    return limit(RLIMIT_AS, MEMORY_BYTES) && limit(RLIMIT_CPU, cpu_seconds) &&
           limit(RLIMIT_CORE, 0) && limit(RLIMIT_FSIZE, 0) &&
           limit(RLIMIT_NOFILE, HELPER_SOCKET + 1) &&
           prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0 && allow_only_computing();
}
#endif

static void
decode_one(ns_decode_function *decode, const void *bytes, size_t length,
           struct answer *answer, struct ns_picture *picture)
{
    struct ns_error err = { .status = NS_OK };
    enum ns_status status = decode(bytes, length, picture, &err);

    answer->status = (int32_t)status;
    if (status != NS_OK) {
        /* Memory is the helper's own limit: the picture's fault. */
        const char *code = err.code ? err.code : "image_limit";

        snprintf(answer->code, sizeof(answer->code), "%s", code);
        snprintf(answer->text, sizeof(answer->text), "%s", err.text);
        answer->status = NS_REJECT;
        return;
    }
    answer->width = picture->width;
    answer->height = picture->height;
}

static uint32_t
used_up(uint32_t cpu_seconds)
{
    struct timespec used = { 0, 0 };

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec * 1000 + used.tv_nsec / 1000000 >= cpu_seconds * 500;
}

int
ns_decoder_main(ns_decode_function *decode, uint32_t cpu_seconds)
{
    uint32_t retires = 0;

    if (!lock_in(cpu_seconds))
        return 1;
    while (!retires) {
        struct ns_picture picture = { 0 };
        struct question question;
        struct answer answer;
        void *bytes;
        bool sent;

        if (!read_all(HELPER_SOCKET, &question, sizeof(question)))
            return 0; /* nobody asks any more */
        bytes = malloc(question.length + 1u);
        if (!bytes || !read_all(HELPER_SOCKET, bytes, question.length))
            return 1;
        memset(&answer, 0, sizeof(answer));
        decode_one(decode, bytes, question.length, &answer, &picture);
        retires = answer.retires = used_up(cpu_seconds);
        sent = write_all(HELPER_SOCKET, &answer, sizeof(answer)) &&
               (!picture.rgb ||
                write_all(HELPER_SOCKET, picture.rgb,
                          (size_t)picture.width * picture.height * 3));
        free(bytes);
        ns_picture_fini(&picture);
        if (!sent)
            return 1;
    }
    return 0;
}

/* ---- the caller ------------------------------------------------------- */

struct helper {
    pid_t pid;  /* 0: not running */
    int socket; /* owned */
    bool busy;
};

struct ns_decoder {
    /* Guards `busy` of the helpers and the count; a helper itself belongs to
     * whoever made it busy. Innermost. */
    pthread_mutex_t lock;
    pthread_cond_t freed;
    uint64_t n_deaths;
    uint32_t n_helpers;
    struct helper helper[];
};

static enum ns_status
start_helper(struct helper *helper, struct ns_error *err)
{
    static char program[] = "/proc/self/exe", name[] = "nightshift-image",
                argument[] = NS_DECODER_ARGUMENT;
    char *argv[] = { name, argument, NULL }, *environment[] = { NULL };
    const struct timeval patience = { .tv_sec = ANSWER_MS / 1000 };
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    int pair[2], error;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == -1)
        return ns_fail_errno(err, NS_RETRY, "a socket for nightshift-image");
    (void)setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &patience,
                     sizeof(patience));
    (void)setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &patience,
                     sizeof(patience));
    sigemptyset(&none);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    /* Its own group: Ctrl-C is for us, who then have no more questions. */
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK |
                                              POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setsigmask(&attributes, &none);
    error = posix_spawn_file_actions_adddup2(&actions, pair[1],
                                             HELPER_SOCKET);
    for (int fd = 0; fd < HELPER_SOCKET && error == 0; fd++)
        error = posix_spawn_file_actions_addopen(&actions, fd, "/dev/null",
                                                 O_RDWR, 0);
    if (error == 0)
        error = posix_spawn_file_actions_addclosefrom_np(&actions,
                                                         HELPER_SOCKET + 1);
    if (error == 0)
        error = posix_spawn(&helper->pid, program, &actions, &attributes,
                            argv, environment);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(pair[1]);
    if (error != 0) {
        close(pair[0]);
        helper->pid = 0;
        return ns_fail(err, NS_RETRY, "nightshift-image cannot be started: "
                       "%s", strerror(error));
    }
    helper->socket = pair[0];
    return NS_OK;
}

/* Ends it; gives its wait status. */
static int
stop_helper(struct helper *helper, bool now)
{
    int how = 0;

    if (helper->pid == 0)
        return 0;
    close(helper->socket);
    if (now)
        kill(helper->pid, SIGKILL);
    while (waitpid(helper->pid, &how, 0) == -1 && errno == EINTR)
        ;
    helper->pid = 0;
    return how;
}

enum ns_status
ns_decoder_create(uint32_t n_helpers, struct ns_decoder **out,
                  struct ns_error *err)
{
    struct ns_decoder *decoder =
        calloc(1, sizeof(*decoder) + n_helpers * sizeof(struct helper));
    enum ns_status status = NS_OK;

    if (!decoder)
        return ns_fail(err, NS_FATAL, "out of memory for the decoder");
    pthread_mutex_init(&decoder->lock, NULL);
    pthread_cond_init(&decoder->freed, NULL);
    decoder->n_helpers = n_helpers;
    for (uint32_t i = 0; i < n_helpers && status == NS_OK; i++)
        status = start_helper(&decoder->helper[i], err);
    if (status == NS_OK)
        *out = decoder;
    else
        ns_decoder_destroy(decoder);
    return status;
}

void
ns_decoder_destroy(struct ns_decoder *decoder)
{
    if (!decoder)
        return;
    for (uint32_t i = 0; i < decoder->n_helpers; i++)
        stop_helper(&decoder->helper[i], true);
    pthread_cond_destroy(&decoder->freed);
    pthread_mutex_destroy(&decoder->lock);
    free(decoder);
}

static struct helper *
take_helper(struct ns_decoder *decoder)
{
    struct helper *helper = NULL;

    pthread_mutex_lock(&decoder->lock);
    while (!helper) {
        for (uint32_t i = 0; i < decoder->n_helpers && !helper; i++)
            if (!decoder->helper[i].busy)
                helper = &decoder->helper[i];
        if (!helper)
            pthread_cond_wait(&decoder->freed, &decoder->lock);
    }
    helper->busy = true;
    pthread_mutex_unlock(&decoder->lock);
    return helper;
}

static void
return_helper(struct ns_decoder *decoder, struct helper *helper,
              uint32_t n_deaths)
{
    pthread_mutex_lock(&decoder->lock);
    helper->busy = false;
    decoder->n_deaths += n_deaths;
    pthread_cond_signal(&decoder->freed);
    pthread_mutex_unlock(&decoder->lock);
}

uint64_t
ns_decoder_deaths(struct ns_decoder *decoder)
{
    uint64_t n;

    pthread_mutex_lock(&decoder->lock);
    n = decoder->n_deaths;
    pthread_mutex_unlock(&decoder->lock);
    return n;
}

/* The codes are ours, whatever the helper wrote: static, and one of three. */
static enum ns_status
refuse(const struct answer *answer, struct ns_error *err)
{
    static const char *const codes[] = { "image_limit", "image_type",
                                         "bad_image" };
    const char *code = "bad_image";

    for (int i = 0; i < 3; i++)
        if (strncmp(answer->code, codes[i], sizeof(answer->code)) == 0)
            code = codes[i];
    return ns_refuse(err, code, NULL, "%.*s", (int)sizeof(answer->text) - 1,
                     answer->text);
}

/* One question and its answer. False: the helper is of no more use. The
 * answer is input too. */
static bool
ask(const struct helper *helper, const void *bytes, size_t length,
    struct answer *answer, struct ns_picture *out)
{
    const struct question question = { (uint32_t)length };
    struct ns_picture picture;
    uint64_t pixels;

    if (!write_all(helper->socket, &question, sizeof(question)) ||
        !write_all(helper->socket, bytes, length) ||
        !read_all(helper->socket, answer, sizeof(*answer)))
        return false;
    if (answer->status != NS_OK)
        return true;
    pixels = (uint64_t)answer->width * answer->height;
    if (pixels == 0 || pixels > NS_PICTURE_PIXELS)
        return false;
    picture = (struct ns_picture){ answer->width, answer->height,
                                   malloc(pixels * 3) };
    if (!picture.rgb ||
        !read_all(helper->socket, picture.rgb, pixels * 3)) {
        ns_picture_fini(&picture);
        return false;
    }
    *out = picture;
    return true;
}

static enum ns_status
say_how(int how, struct ns_error *err)
{
    int signal = WIFSIGNALED(how) ? WTERMSIG(how) : 0;

    if (signal == SIGXCPU || signal == SIGKILL)
        return ns_refuse(err, "bad_image", NULL,
                         "decoding took more time than a picture may");
    if (signal == SIGSYS)
        return ns_refuse(err, "bad_image", NULL,
                         "its decoder did what no decoder should");
    return ns_refuse(err, "bad_image", NULL,
                     "its decoder died (%s %d)", signal ? "signal" : "status",
                     signal ? signal : WEXITSTATUS(how));
}

static int64_t
elapsed_ms(const struct timespec *since)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)(now.tv_sec - since->tv_sec) * 1000 +
           (now.tv_nsec - since->tv_nsec) / 1000000;
}

enum ns_status
ns_decoder_decode(struct ns_decoder *decoder, const void *bytes, size_t length,
                  struct ns_picture *out, struct ns_error *err)
{
    struct answer answer = { 0 };
    struct ns_picture picture = { 0 };
    enum ns_status status = NS_OK;
    struct helper *helper;
    struct timespec began;
    uint32_t n_deaths = 0;
    bool died;

    if (length > NS_PICTURE_BYTES)
        return ns_refuse(err, "image_limit", NULL,
                         "the picture has %zu bytes, at most %d are read",
                         length, NS_PICTURE_BYTES);
    helper = take_helper(decoder);
    clock_gettime(CLOCK_MONOTONIC, &began);
    do {
        died = false;
        status = helper->pid ? NS_OK : start_helper(helper, err);
        if (status != NS_OK)
            break;
        died = !ask(helper, bytes, length, &answer, &picture);
        n_deaths += died;
        if (died)
            status = say_how(stop_helper(helper, true), err);
        else if (answer.status != NS_OK)
            status = refuse(&answer, err);
        if (!died && answer.retires)
            stop_helper(helper, false);
    } while (died && n_deaths < 2 && elapsed_ms(&began) < AGAIN_WITHIN_MS);
    return_helper(decoder, helper, n_deaths);
    if (status == NS_OK)
        *out = picture;
    return status;
}
