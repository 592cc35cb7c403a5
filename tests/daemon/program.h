/* program.h - runs the built programs on files, for the end-to-end tests.
 *
 * A header of static functions, since only tests/daemon needs them. Programs
 * are taken from $NS_BUILD, or from the build folder that the test lies in.
 */
#ifndef NS_TESTS_DAEMON_PROGRAM_H
#define NS_TESTS_DAEMON_PROGRAM_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/tiny.h"

static char program_folder[128]; /* of this test program; by make_folder */
static char program_model[160];

static const char *
build_folder(void)
{
    static char path[PATH_MAX];
    const char *given = getenv("NS_BUILD");
    ssize_t n;

    if (given)
        return given;
    n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    assert_true(n > 0);
    path[n] = '\0';
    for (int i = 0; i < 3; i++) /* BUILD/tests/daemon/test_x */
        *strrchr(path, '/') = '\0';
    return path;
}

/* Path of a file in the test's own folder; 64 may be in use at a time. */
static const char *
in_folder(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *
in_folder(const char *format, ...)
{
    static char path[64][PATH_MAX];
    static int next;
    char *out = path[next++ % 64];
    va_list ap;
    int n = snprintf(out, PATH_MAX, "%s/", program_folder);

    va_start(ap, format);
    vsnprintf(out + n, PATH_MAX - (size_t)n, format, ap);
    va_end(ap);
    return out;
}

static int
make_folder(void **state)
{
    struct tiny_recipe recipe = tiny_recipe();
    char *model = tiny_make(&recipe);

    (void)state;
    tiny_add_tokenizer(model);
    snprintf(program_model, sizeof(program_model), "%s", model);
    free(model);
    snprintf(program_folder, sizeof(program_folder),
             "%s/nightshift-test-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(program_folder) ? 0 : -1;
}

static int
remove_one(const char *path, const struct stat *st, int kind,
           struct FTW *place)
{
    (void)st;
    (void)kind;
    (void)place;
    /* Where a test failed, its small disk; EINVAL elsewhere. */
    umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW);
    return remove(path);
}

static int
remove_folder(void **state)
{
    (void)state;
    return nftw(program_folder, remove_one, 16, FTW_DEPTH | FTW_PHYS) |
           nftw(program_model, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int64_t
now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Starts BUILD/argv[0]; output goes to the files, which begin empty. */
static inline pid_t
spawn(const char *const *argv, const char *stdout_path,
      const char *stderr_path)
{
    char path[PATH_MAX];
    pid_t pid;

    snprintf(path, sizeof(path), "%s/%s", build_folder(), argv[0]);
    fflush(NULL);
    unlink(stdout_path); /* what an earlier one said is not ours */
    unlink(stderr_path);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int out = open(stdout_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        int err = open(stderr_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

        if (dup2(out, 1) < 0 || dup2(err, 2) < 0)
            _exit(126);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* no daemon outlives its test */
        execv(path, (char *const *)argv);
        _exit(127);
    }
    return pid;
}

/* Exit status; -N for a death by signal N; -1000 when it hangs (killed). */
static int
wait_for(pid_t pid, int limit_ms)
{
    int64_t until = now_ms() + limit_ms;
    int status;

    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now_ms() > until) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1000;
        }
        usleep(2000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

enum { MAX_ARGUMENTS = 40, LIMIT_MS = 120000 };

/* argv from a list that ends with NULL, behind the program's own name. */
#define RUN(...) \
    wait_for(spawn((const char *const[]){ "nightshift", __VA_ARGS__, NULL }, \
                   in_folder("stdout"), in_folder("stderr")), \
             LIMIT_MS)

static inline char *
slurp(const char *path)
{
    char *text = calloc(1, 1), chunk[65536];
    size_t size = 0, n;
    FILE *in = fopen(path, "r");

    while (in && (n = fread(chunk, 1, sizeof(chunk), in)) > 0) {
        text = realloc(text, size + n + 1);
        assert_non_null(text);
        memcpy(text + size, chunk, n);
        size += n;
        text[size] = '\0';
    }
    if (in)
        fclose(in);
    return text;
}

static bool
file_says(const char *path, const char *word)
{
    char *text = slurp(path);
    bool says = strstr(text, word) != NULL;

    free(text);
    return says;
}

static bool
exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* Waits until the file says the word. */
static inline void
wait_until_says(const char *path, const char *word)
{
    int64_t until = now_ms() + 30000;

    while (!file_says(path, word)) {
        if (now_ms() > until)
            fail_msg("%s never said \"%s\"", path, word);
        usleep(5000);
    }
}

static inline void
wait_until_exists(const char *path)
{
    int64_t until = now_ms() + LIMIT_MS;

    while (!exists(path)) {
        if (now_ms() > until)
            fail_msg("%s never came", path);
        usleep(5000);
    }
}

static inline long
resident_kb(pid_t pid)
{
    char path[64];
    long n = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*d %ld", &n), 1);
    fclose(file);
    return n * (sysconf(_SC_PAGESIZE) / 1024);
}

/* `n` jobs of mixed modes and lengths, of which every tenth is bad. */
static inline void
write_jobs(const char *path, int n, int longest)
{
    static const char *const modes[] = { "diffusion", "ar", "hybrid", "auto" };
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < n; i++) {
        if (i % 10 == 7) {
            fprintf(file, i % 20 == 7 ? "{\"custom_id\":\"job-%d\",\"body\":3}\n"
                                      : "{\"custom_id\":\"job-%d\"\n",
                    i);
            continue;
        }
        fprintf(file,
                "{\"custom_id\":\"job-%d\",\"method\":\"POST\",\"url\":"
                "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"%.*s number %d, and then?\"}],"
                "\"max_tokens\":%d},\"nightshift\":{\"mode\":\"%s\"}}\n",
                i, 5 + i % 40, "tell me all that there is to be told about",
                i, 10 + i * 37 % longest, modes[i % 4]);
    }
    assert_int_equal(fclose(file), 0);
}

/* What stands for job i in a results file: how often, and what it says that
 * does not depend on how the run went. */
struct answers {
    int n;
    int count[512];
    char *text[512];
};

static inline void
answers_fini(struct answers *answers)
{
    for (int i = 0; i < 512; i++)
        free(answers->text[i]);
}

/* Every line must be whole. Lines are told by the line of their job. */
static inline void
read_answers(const char *path, struct answers *out)
{
    char *text = slurp(path), *line = text, *end;

    memset(out, 0, sizeof(*out));
    while (*line) {
        json_t *root, *kept;
        json_int_t number;

        end = strchr(line, '\n');
        assert_non_null(end); /* a torn line */
        *end = '\0';
        root = json_loads(line, 0, NULL);
        if (!root)
            fail_msg("not JSON: %.200s", line);
        number = json_integer_value(
            json_object_get(json_object_get(root, "nightshift"), "line"));
        assert_in_range(number, 1, 511);
        kept = json_pack(
            "{s:O?, s:O?, s:O?, s:O?, s:O?}", "choices",
            json_object_get(json_object_get(json_object_get(root, "response"),
                                            "body"), "choices"),
            "id", json_object_get(root, "custom_id"), "error",
            json_object_get(root, "error"), "seed",
            json_object_get(json_object_get(root, "nightshift"), "seed"),
            "sha", json_object_get(json_object_get(root, "nightshift"),
                                   "input_sha256"));
        assert_non_null(kept);
        out->n++;
        out->count[number]++;
        free(out->text[number]);
        out->text[number] = json_dumps(kept, JSON_SORT_KEYS | JSON_COMPACT);
        json_decref(kept);
        json_decref(root);
        line = end + 1;
    }
    free(text);
}

/* Exactly one line for each of `n` jobs, and each as the reference has it. */
static inline void
assert_same_answers(const char *path, const struct answers *reference, int n)
{
    struct answers answers;

    read_answers(path, &answers);
    assert_int_equal(answers.n, n);
    for (int i = 1; i <= n; i++) {
        assert_int_equal(answers.count[i], 1);
        assert_string_equal(answers.text[i], reference->text[i]);
    }
    answers_fini(&answers);
}

#endif
