/* Jobs with pictures, from their bytes to the answer: base64, allowed files,
 * and nightshift(1) end to end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "daemon/pictures.h"
#include "tests/daemon/program.h"
#include "tests/servers/web.h"

#define PICTURES "tests/cases/vision_fp32/images/"

/* ---- base64 --------------------------------------------------------------- */

static void
base64_is_read_with_white_space_and_refused_when_broken(void **state)
{
    static const struct {
        const char *text, *bytes; /* bytes NULL: bad_base64 */
    } cases[] = {
        { "Zg==", "f" },        { "Zm8=", "fo" },       { "Zm9v", "foo" },
        { "Zm9vYg==", "foob" }, { "Z m9\r\nv\t", "foo" }, { "Zm9vYmE=\n", "fooba" },
        { "Zg=", NULL },        { "Zg", NULL },         { "Zg===", NULL },
        { "Z", NULL },          { "", NULL },           { "====", NULL },
        { "Zg==Zg==", NULL },   { "Zm9-", NULL },       { "Zm9v\"", NULL },
        { "Z=g=", NULL },
    };
    struct ns_error err;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        void *bytes = NULL;
        size_t n = 0;
        enum ns_status status =
            ns_base64_decode(cases[i].text, strlen(cases[i].text), 100, &bytes,
                             &n, &err);

        if (cases[i].bytes) {
            assert_int_equal(status, NS_OK);
            assert_int_equal(n, strlen(cases[i].bytes));
            assert_memory_equal(bytes, cases[i].bytes, n);
        } else {
            assert_int_equal(status, NS_REJECT);
            assert_string_equal(err.code, "bad_base64");
        }
        free(bytes);
    }
}

static char *
to_base64(const void *bytes, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnop"
                                 "qrstuvwxyz0123456789+/";
    const unsigned char *in = bytes;
    char *text = calloc(1, n / 3 * 4 + 5), *out = text;

    for (size_t i = 0; i < n; i += 3) {
        uint32_t word = (uint32_t)in[i] << 16;

        word |= i + 1 < n ? (uint32_t)in[i + 1] << 8 : 0;
        word |= i + 2 < n ? in[i + 2] : 0;
        *out++ = digits[word >> 18];
        *out++ = digits[word >> 12 & 63];
        *out++ = i + 1 < n ? digits[word >> 6 & 63] : '=';
        *out++ = i + 2 < n ? digits[word & 63] : '=';
    }
    return text;
}

static void
base64_gives_all_bytes_back_up_to_the_limit(void **state)
{
    unsigned char in[300];
    struct ns_error err;

    (void)state;
    for (size_t n = 1; n < sizeof(in); n++) {
        char *text;
        void *out = NULL;
        size_t n_out;

        for (size_t i = 0; i < n; i++)
            in[i] = (unsigned char)(i * 89 + n * 7);
        text = to_base64(in, n);
        assert_int_equal(ns_base64_decode(text, strlen(text), n, &out, &n_out,
                                          &err), NS_OK);
        assert_int_equal(n_out, n);
        assert_memory_equal(out, in, n);
        free(out);
        if (n > 4) {
            assert_int_equal(ns_base64_decode(text, strlen(text), n - 4, &out,
                                              &n_out, &err), NS_REJECT);
            assert_string_equal(err.code, "image_limit");
        }
        free(text);
    }
}

/* ---- files ---------------------------------------------------------------- */

static void
write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void
reads(const char *roots, const char *path, const char *text)
{
    void *bytes = NULL;
    struct ns_error err;
    size_t n;

    if (ns_attachment_read(roots, path, 100, &bytes, &n, &err) != NS_OK)
        fail_msg("%s: %s", path, err.text);
    assert_int_equal(n, strlen(text));
    assert_memory_equal(bytes, text, n);
    free(bytes);
}

static void
denies(const char *roots, const char *path, const char *code)
{
    void *bytes = NULL;
    struct ns_error err;
    size_t n;

    if (ns_attachment_read(roots, path, 100, &bytes, &n, &err) == NS_OK)
        fail_msg("%s was read", path);
    assert_string_equal(err.code, code);
    assert_null(bytes);
}

static void
files_are_read_below_allowed_folders_and_nowhere_else(void **state)
{
    char roots[3 * PATH_MAX], text[201];

    (void)state;
    memset(text, 'x', 200);
    text[200] = '\0';
    mkdir(in_folder("root"), 0700);
    mkdir(in_folder("root/deep"), 0700);
    mkdir(in_folder("root2"), 0700);
    write_file(in_folder("root/a"), "one");
    write_file(in_folder("root/deep/b c"), "two");
    write_file(in_folder("root2/other"), "three");
    write_file(in_folder("outside"), "secret");
    write_file(in_folder("root/large"), text);
    assert_int_equal(symlink("../outside", in_folder("root/out")), 0);
    assert_int_equal(symlink("a", in_folder("root/in")), 0);
    assert_int_equal(symlink("..", in_folder("root/up")), 0);
    assert_int_equal(symlink("/proc/self/root", in_folder("root/top")), 0);
    assert_int_equal(mkfifo(in_folder("root/fifo"), 0600), 0);
    snprintf(roots, sizeof(roots), " %s/ , %s", in_folder("root"),
             in_folder("none"));

    reads(roots, in_folder("root/a"), "one");
    reads(roots, "a", "one");
    reads(roots, "deep/b c", "two");
    reads(roots, "deep/../a", "one");
    snprintf(text, sizeof(text), "file://%.150s/root/deep/b%%20c",
             program_folder);
    reads(roots, text, "two");

    denies(roots, in_folder("outside"), "path_denied");
    denies(roots, in_folder("root/../outside"), "path_denied");
    denies(roots, in_folder("root2/other"), "path_denied");
    denies(roots, "../outside", "path_denied");
    denies(roots, "out", "path_denied");
    denies(roots, "in", "path_denied");
    denies(roots, "up/outside", "path_denied");
    denies(roots, "top/etc/passwd", "path_denied");
    denies(roots, "deep", "path_denied");
    denies(roots, "fifo", "path_denied"); /* and does not wait for it */
    denies(roots, "missing", "path_denied");
    denies(roots, "", "path_denied");
    denies(roots, "file://", "path_denied");
    denies(roots, "file:///a%0", "path_denied");
    denies(roots, "file:///a%00b", "path_denied");
    denies(roots, "file:///etc/passwd", "path_denied");
    denies(roots, "/etc/passwd", "path_denied");
    denies(roots, "large", "image_limit");
    denies(NULL, "a", "path_denied");
    denies("", "a", "path_denied");
    denies(" , ,", "a", "path_denied");
}

/* ---- nightshift run --------------------------------------------------------- */

static char seeing_model[] = "/tmp/test_images-XXXXXX";

static void
link_here(const char *from, const char *name)
{
    char cwd[PATH_MAX], source[2 * PATH_MAX], target[PATH_MAX];

    assert_non_null(getcwd(cwd, sizeof(cwd)));
    snprintf(source, sizeof(source), "%s/tests/cases/%s", cwd, from);
    snprintf(target, sizeof(target), "%s/%s", seeing_model, name);
    assert_int_equal(symlink(source, target), 0);
}

static int
make_folders(void **state)
{
    if (!mkdtemp(seeing_model))
        return -1;
    link_here("vision_fp32/model/config.json", "config.json");
    link_here("vision_fp32/model/generation_config.json",
              "generation_config.json");
    link_here("vision_fp32/model/model.safetensors", "model.safetensors");
    link_here("tokenizer/tiny/tokenizer.json", "tokenizer.json");
    return make_folder(state);
}

static int
remove_folders(void **state)
{
    return remove_folder(state) |
           nftw(seeing_model, remove_one, 4, FTW_DEPTH | FTW_PHYS);
}

static void
add_job(FILE *file, const char *id, const char *parts, const char *ours)
{
    fprintf(file, "{\"custom_id\":\"%s\",\"method\":\"POST\",\"url\":"
            "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
            "\"user\",\"content\":[%s,{\"type\":\"text\",\"text\":"
            "\"what is it?\"}]}],\"max_tokens\":32,\"seed\":5},"
            "\"nightshift\":{%s}}\n", id, parts, ours);
}

/* The part of a picture, inline; `mime` may lie. Free it. */
static char *
inline_part(const char *name, size_t most, const char *mime)
{
    char path[200], *text = malloc(200000), *base64, *bytes = malloc(100000);
    FILE *file;
    size_t n;

    snprintf(path, sizeof(path), PICTURES "%s", name);
    file = fopen(path, "rb");
    assert_non_null(file);
    n = fread(bytes, 1, most < 100000 ? most : 100000, file);
    fclose(file);
    base64 = to_base64(bytes, n);
    snprintf(text, 200000, "{\"type\":\"image_url\",\"image_url\":{\"url\":"
             "\"data:%s;base64,%s\"}}", mime, base64);
    free(base64);
    free(bytes);
    return text;
}

#define URL(url) "{\"type\":\"image_url\",\"image_url\":{\"url\":\"" url "\"}}"
#define SMALL "\"image_tokens\":70"

enum { N_JOBS = 12, N_GOOD = 6 };

static void
write_picture_jobs(const char *path)
{
    char *a = inline_part("a.png", SIZE_MAX, "image/png");
    char *photo = inline_part("photo.jpg", SIZE_MAX, "image/png");
    char *cut = inline_part("photo.jpg", 900, "image/jpeg");
    char *two = malloc(strlen(a) + strlen(photo) + 2);
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    sprintf(two, "%s,%s", photo, a);
    add_job(file, "inline", a, SMALL);
    add_job(file, "two", two, SMALL ",\"mode\":\"ar\"");
    add_job(file, "file", URL("a.png"), SMALL);
    add_job(file, "larger", a, "\"image_tokens\":140");
    add_job(file, "again", a, SMALL ",\"mode\":\"hybrid\"");
    add_job(file, "alpha", URL("alpha.png"), SMALL);
    add_job(file, "web", URL("https://example.org/a.png"), SMALL);
    add_job(file, "denied", URL("/etc/passwd"), SMALL);
    add_job(file, "cut", cut, SMALL);
    add_job(file, "gif", URL("data:image/png;base64,R0lGODlhAQABAAA="), SMALL);
    add_job(file, "broken", URL("data:image/png;base64,Zg="), SMALL);
    add_job(file, "plain", URL("data:image/png,hello"), SMALL);
    fclose(file);
    free(a);
    free(photo);
    free(cut);
    free(two);
}

static bool
same_content(const char *a, const char *b)
{
    const char *end;

    a = strstr(a, "\"content\"");
    b = strstr(b, "\"content\"");
    assert_true(a && b);
    end = strstr(a, "\"role\"");
    assert_non_null(end);
    return strncmp(a, b, (size_t)(end - a)) == 0;
}

#define SEE "-m", seeing_model, "--set", roots

static void
pictures_are_answered_and_bad_ones_cost_their_own_job(void **state)
{
    static const char *const codes[] = { "url_disabled", "path_denied",
                                         "bad_image", "image_type",
                                         "bad_base64", "bad_base64" };
    struct answers whole;
    char roots[PATH_MAX + 32], cwd[PATH_MAX];

    (void)state;
    assert_non_null(getcwd(cwd, sizeof(cwd)));
    snprintf(roots, sizeof(roots), "images.roots=%s/" PICTURES, cwd);
    write_picture_jobs(in_folder("jobs.jsonl"));
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("whole.jsonl"), SEE), 1);
    read_answers(in_folder("whole.jsonl"), &whole);
    assert_int_equal(whole.n, N_JOBS);
    for (int i = 1; i <= N_JOBS; i++) {
        const char *word = i <= N_GOOD ? "\"error\":null" : codes[i - 7];

        if (!strstr(whole.text[i], word))
            fail_msg("job %d: no %s in %.300s", i, word, whole.text[i]);
        if (i > N_GOOD)
            assert_non_null(strstr(whole.text[i], "body.messages[0].content"));
    }
    assert_true(file_says(in_folder("whole.jsonl"), "\"image_tokens\":65}"));
    assert_true(file_says(in_folder("whole.jsonl"),
                          "declared as image/png, read as JPEG"));
    /* One picture, one answer, however it came; more soft tokens, another. */
    assert_true(same_content(whole.text[1], whole.text[3]));
    assert_false(same_content(whole.text[1], whole.text[4]));

    /* Packing, chunks and threads change nothing. */
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("one.jsonl"), SEE, "--threads", "1",
                         "--set", "engine.pass_tokens=40", "--set",
                         "engine.max_sequences=2", "--set",
                         "daemon.prepare_threads=1"), 1);
    assert_same_answers(in_folder("one.jsonl"), &whole, N_JOBS);
    answers_fini(&whole);

    assert_int_equal(RUN("validate", "-m", seeing_model, "--set", roots,
                         in_folder("jobs.jsonl")), 1);
    assert_true(file_says(in_folder("stdout"), "12 jobs, 6 bad"));
}

static struct web web;

static char *
read_picture(const char *name, size_t *n)
{
    char path[200], *bytes = malloc(200000);
    FILE *file;

    snprintf(path, sizeof(path), PICTURES "%s", name);
    file = fopen(path, "rb");
    assert_true(file && bytes);
    *n = fread(bytes, 1, 200000, file);
    fclose(file);
    return bytes;
}

static void
add_web_job(FILE *file, const char *id, const char *path)
{
    char part[200];

    snprintf(part, sizeof(part), URL("http://127.0.0.1:%d%s"), web.port, path);
    add_job(file, id, part, SMALL);
}

/* The server answers the first job's picture only once all other jobs have
 * their results: one thread prepares, and nobody waits for the server. */
static void
pictures_come_from_the_web_and_a_slow_server_costs_no_other_job(void **state)
{
    static const char *const words[] = {
        "\"error\":null", "\"error\":null", "\"error\":null", "url_failed",
        "bad_image", "url_denied",
    };
    struct answers answers;
    char hosts[100];
    char *part, *bytes;
    FILE *file;
    pid_t pid;
    size_t n;

    (void)state;
    bytes = read_picture("a.png", &n);
    web_start(&web, "127.0.0.1", 0, bytes, n);
    part = inline_part("a.png", SIZE_MAX, "image/png");
    file = fopen(in_folder("web.jsonl"), "w");
    assert_non_null(file);
    add_web_job(file, "slow", "/hang");
    add_web_job(file, "here", "/hops/2");
    add_job(file, "inline", part, SMALL);
    add_web_job(file, "missing", "/404");
    add_web_job(file, "short", "/200"); /* zeros, and no picture */
    add_job(file, "elsewhere", URL("https://example.org/a.png"), SMALL);
    fclose(file);
    snprintf(hosts, sizeof(hosts), "images.url_hosts=127.0.0.1:%d", web.port);
    pid = spawn((const char *const[]){
                    "nightshift", "run", in_folder("web.jsonl"), "-o",
                    in_folder("web-out.jsonl"), "-m", seeing_model, "--set",
                    hosts, "--set", "images.url_networks=127.0.0.1", "--set",
                    "images.url_time=600s", "--set",
                    "daemon.prepare_threads=1", NULL },
                in_folder("stdout"), in_folder("stderr"));
    wait_until_says(in_folder("web-out.jsonl"), "\"here\"");
    wait_until_says(in_folder("web-out.jsonl"), "\"inline\"");
    wait_until_says(in_folder("web-out.jsonl"), "\"missing\"");
    wait_until_says(in_folder("web-out.jsonl"), "\"short\"");
    wait_until_says(in_folder("web-out.jsonl"), "\"elsewhere\"");
    assert_false(file_says(in_folder("web-out.jsonl"), "\"slow\""));
    web_release(&web);
    assert_int_equal(wait_for(pid, LIMIT_MS), 1);
    read_answers(in_folder("web-out.jsonl"), &answers);
    for (int i = 1; i <= 6; i++)
        if (!strstr(answers.text[i], words[i - 1]))
            fail_msg("job %d: no %s in %.300s", i, words[i - 1],
                     answers.text[i]);
    assert_true(same_content(answers.text[1], answers.text[3]));
    assert_true(same_content(answers.text[2], answers.text[3]));
    answers_fini(&answers);

    /* validate sees what run sees. */
    assert_int_equal(RUN("validate", "-m", seeing_model, "--set", hosts,
                         "--set", "images.url_networks=127.0.0.1",
                         in_folder("web.jsonl")), 1);
    assert_true(file_says(in_folder("stdout"), "6 jobs, 3 bad"));
    free(part);
    web_stop(&web);
    free(bytes);
}

/* What will pass is tried again, and not for ever. */
static void
a_server_in_trouble_is_asked_three_times(void **state)
{
    char hosts[100];
    FILE *file;

    (void)state;
    web_start(&web, "127.0.0.1", 0, "", 0);
    file = fopen(in_folder("down.jsonl"), "w");
    assert_non_null(file);
    add_web_job(file, "down", "/503");
    fclose(file);
    snprintf(hosts, sizeof(hosts), "images.url_hosts=127.0.0.1:%d", web.port);
    assert_int_equal(RUN("run", in_folder("down.jsonl"), "-o",
                         in_folder("down-out.jsonl"), "-m", seeing_model,
                         "--set", hosts, "--set",
                         "images.url_networks=127.0.0.1", "--set",
                         "daemon.retry=1ms"), 2);
    assert_true(file_says(in_folder("down-out.jsonl"), "url_failed"));
    assert_true(file_says(in_folder("down-out.jsonl"),
                          "given up after 3 tries"));
    assert_true(file_says(in_folder("down-out.jsonl"), "answered 503"));
    assert_int_equal(atomic_load(&web.n_asked), 3);
    web_stop(&web);
}

/* Ctrl-C does not wait for a server. */
static void
a_stop_does_not_wait_for_a_server(void **state)
{
    char hosts[100];
    FILE *file;
    pid_t pid;

    (void)state;
    web_start(&web, "127.0.0.1", 0, "", 0);
    file = fopen(in_folder("stop.jsonl"), "w");
    assert_non_null(file);
    add_web_job(file, "stop", "/hang");
    fclose(file);
    snprintf(hosts, sizeof(hosts), "images.url_hosts=127.0.0.1:%d", web.port);
    pid = spawn((const char *const[]){
                    "nightshift", "run", in_folder("stop.jsonl"), "-o",
                    in_folder("stop-out.jsonl"), "-m", seeing_model, "--set",
                    hosts, "--set", "images.url_networks=127.0.0.1", "--set",
                    "images.url_time=600s", NULL },
                in_folder("stdout"), in_folder("stderr"));
    for (int i = 0; i < 60000 && atomic_load(&web.n_hanging) == 0; i++)
        usleep(1000);
    assert_int_equal(atomic_load(&web.n_hanging), 1);
    kill(pid, SIGINT);
    assert_int_equal(wait_for(pid, LIMIT_MS), 130);
    web_stop(&web);
}

static void
a_model_without_a_tower_refuses_pictures(void **state)
{
    struct answers answers;

    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("blind.jsonl"), "-m", program_model), 2);
    read_answers(in_folder("blind.jsonl"), &answers);
    for (int i = 1; i <= N_JOBS; i++)
        assert_non_null(strstr(answers.text[i], "\"unsupported\""));
    answers_fini(&answers);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base64_is_read_with_white_space_and_refused_when_broken),
        cmocka_unit_test(base64_gives_all_bytes_back_up_to_the_limit),
        cmocka_unit_test(files_are_read_below_allowed_folders_and_nowhere_else),
        cmocka_unit_test(pictures_are_answered_and_bad_ones_cost_their_own_job),
        cmocka_unit_test(pictures_come_from_the_web_and_a_slow_server_costs_no_other_job),
        cmocka_unit_test(a_server_in_trouble_is_asked_three_times),
        cmocka_unit_test(a_stop_does_not_wait_for_a_server),
        cmocka_unit_test(a_model_without_a_tower_refuses_pictures),
    };

    return cmocka_run_group_tests(tests, make_folders, remove_folders);
}
