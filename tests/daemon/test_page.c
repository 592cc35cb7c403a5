/* The status page in a real browser, without a window: what it shows of the
 * numbers it is given, in the daylight, in the dark and on a telephone. The
 * pictures stay in BUILD/page, to be looked at. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "daemon/http.h"
#include "daemon/work.h"
#include "tests/daemon/program.h"

enum { BROWSER_MS = 120000 };

static struct ns_metrics metrics;
static struct ns_board board;
static struct ns_http *http;

/* Runs the browser over the page; its output goes to `out`. */
static void
browse(const char *out, const char *a, const char *b, const char *c)
{
    char profile[PATH_MAX], page[64];
    pid_t pid;

    snprintf(profile, sizeof(profile), "--user-data-dir=%s",
             in_folder("profile"));
    snprintf(page, sizeof(page), "http://127.0.0.1:%u/", ns_http_port(http));
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const char *const argv[] = {
            "chromium", "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio",
            "--no-first-run", profile, "--virtual-time-budget=2500", page, a,
            b, c, NULL,
        };
        int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        int log = open(in_folder("browser.log"), O_WRONLY | O_CREAT | O_TRUNC,
                       0600);

        if (dup2(fd, 1) == -1 || dup2(log, 2) == -1)
            _exit(126);
        setenv("HOME", program_folder, 1); /* what it wants to keep goes too */
        execvp(argv[0], (char *const *)argv);
        _exit(127);
    }
    if (wait_for(pid, BROWSER_MS) != 0)
        fail_msg("chromium: %s", slurp(in_folder("browser.log")));
}

static const char *
in_build(const char *name)
{
    static char path[PATH_MAX + 32];

    snprintf(path, sizeof(path), "%s/%s", build_folder(), name);
    return path;
}

/* Four jobs, one in each stage. */
static void
put_jobs(void)
{
    struct ns_board_view *view = &board.view;
    struct ns_engine_progress job = {
        .id = 41, .mode = NS_MODE_DIFFUSION, .stage = NS_STAGE_DENOISE,
        .submitted_ms = ns_now_ms() - 75000, .n_prompt = 812, .n_read = 812,
        .n_tokens = 512, .max_tokens = 2048, .block = 2, .step = 7,
        .max_steps = 48, .canvas_length = 256, .n_accepted = 180,
    };

    for (uint32_t i = 0; i < 180; i++)
        job.accepted[i / 8] |= (uint8_t)(1u << i % 8);
    view->job[2] = job; /* not in order of their numbers */
    job = (struct ns_engine_progress){
        .id = 40, .mode = NS_MODE_HYBRID, .stage = NS_STAGE_PREFILL,
        .submitted_ms = ns_now_ms() - 3000, .n_prompt = 120000,
        .n_read = 30000, .max_tokens = 8192,
    };
    view->job[0] = job;
    job.id = 42;
    job.stage = NS_STAGE_COMMIT;
    job.n_read = job.n_prompt;
    view->job[1] = job;
    job.id = 7;
    job.mode = NS_MODE_AR;
    job.stage = NS_STAGE_AR;
    job.n_tokens = 4096;
    view->job[3] = job;
    view->n = 4;
    view->n_running = 70;
}

static int
setup(void **state)
{
    struct ns_http_options options = { .listen = "127.0.0.1:0",
                                       .metrics = &metrics, .board = &board,
                                       .version = "9.8.7",
                                       .silent_ms = 10 * BROWSER_MS };
    struct ns_http_state so = { .phase = NS_HTTP_WORKING, .healthy = true,
                                .model = "a <b>model</b>", .has_kafka = true,
                                .kafka = { .lag = 12345,
                                           .head_ms = 240000 } };
    struct ns_error err;
    int failed = make_folder(state);

    if (failed)
        return failed;
    ns_metrics_init(&metrics);
    ns_board_init(&board);
    put_jobs();
    atomic_store(&metrics.in_flight, 90);
    atomic_store(&metrics.running, 70);
    atomic_store(&metrics.window, 256);
    atomic_store(&metrics.ended[NS_RESULT_OK], 1234567);
    ns_metrics_ended(&metrics, NS_RESULT_DEAD, "bad_json");
    if (ns_http_open(&options, &http, &err) != NS_OK)
        return -1;
    ns_http_publish(http, &so);
    mkdir(in_build("page"), 0755);
    return 0;
}

static int
teardown(void **state)
{
    ns_http_close(http);
    ns_board_fini(&board);
    return remove_folder(state);
}

static void
the_browser_shows_each_number_where_it_belongs(void **state)
{
    static const char *const shown[] = {
        ">a &lt;b&gt;model&lt;/b&gt; · up ", /* a name is text, not markup */
        "id=\"state\" role=\"status\" class=\"good\">working<",
        "<b id=\"in_flight\">90</b>", ">in flight, of 256<",
        "<b id=\"running\">70</b>", "<b id=\"waiting\">20</b>",
        "<b id=\"lag\">12,345</b>", ">behind, oldest 4 min<",
        ">Jobs in the engine, 4 of 70<",
        "<span>#41 diffusion</span><span>1 min</span>",
        "<span>block 3, step 7</span><span>180 of 256</span>",
        "<span>512 tokens</span><span>of 2,048</span>",
        "aria-label=\"block 3, step 7, 180 of 256 positions accepted\"",
        "<span>#40 hybrid</span>",
        "<span>reading</span><span>30,000 of 120,000</span>",
        "<span>#42 hybrid</span>",
        "<span>block 1</span><span>draft judged</span>",
        "<span>#7 ar</span>", "<span>token by token</span>",
        "<td>ok</td><td>1,234,567</td>", "<td>bad_json</td><td>1</td>",
    };
    char *page;

    (void)state;
    browse(in_folder("page.html"), "--dump-dom", NULL, NULL);
    page = slurp(in_folder("page.html"));
    for (size_t i = 0; i < sizeof(shown) / sizeof(shown[0]); i++)
        if (!strstr(page, shown[i]))
            fail_msg("the page lacks %s:\n%s", shown[i],
                     strstr(page, "<body") ? strstr(page, "<body") : page);
    /* In the order of their numbers, not of the engine. */
    assert_true(strstr(page, "#7 ar") < strstr(page, "#40 hybrid"));
    assert_true(strstr(page, "#40 hybrid") < strstr(page, "#41 diffusion"));
    free(page);
}

/* A picture of this size that is not of one colour: those shrink to nothing. */
static void
photograph(const char *name, int width, int height, const char *how)
{
    char window[64], shot[PATH_MAX];
    unsigned char head[24];
    struct stat st;
    FILE *file;

    unlink(in_build(name));
    snprintf(window, sizeof(window), "--window-size=%d,%d", width, height);
    snprintf(shot, sizeof(shot), "--screenshot=%s", in_build(name));
    browse(in_folder("shot.out"), window, shot, how);
    file = fopen(in_build(name), "r");
    if (!file)
        fail_msg("no picture: %s", slurp(in_folder("browser.log")));
    assert_int_equal(fread(head, 1, sizeof(head), file), sizeof(head));
    fclose(file);
    assert_memory_equal(head, "\x89PNG\r\n\x1a\n", 8);
    assert_int_equal(head[18] << 8 | head[19], width);
    assert_int_equal(head[22] << 8 | head[23], height);
    assert_int_equal(stat(in_build(name), &st), 0);
    assert_true(st.st_size > 20000);
}

static void
it_is_photographed_by_day_by_night_and_on_a_telephone(void **state)
{
    (void)state;
    photograph("page/day.png", 1280, 1100, NULL);
    photograph("page/night.png", 1280, 1100,
               "--blink-settings=preferredColorScheme=0");
    photograph("page/narrow.png", 400, 2200, NULL);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_browser_shows_each_number_where_it_belongs),
        cmocka_unit_test(
            it_is_photographed_by_day_by_night_and_on_a_telephone),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
