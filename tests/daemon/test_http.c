/* The web server, over real sockets: alone, and in the real daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>

#include "daemon/http.h"
#include "daemon/http_private.h"
#include "tests/daemon/client.h"
#include "tests/daemon/program.h"
#include "tests/fault.h"

enum { CLIENT_MS = 600, CANARIES = 3 };

static struct ns_metrics metrics;

/* --- a server ---------------------------------------------------------- */

static void
answers(const struct ns_http *http, const char *path, int status,
        const char *body)
{
    char *answer = ask(ns_http_port(http), "GET", path);

    assert_int_equal(status_of(answer), status);
    assert_string_equal(body_of(answer), body);
    free(answer);
}

static struct ns_http *
open_server(uint32_t max_clients, int64_t silent_ms)
{
    struct ns_http_options options = { .listen = "127.0.0.1:0",
                                       .metrics = &metrics,
                                       .version = "9.8.7",
                                       .max_clients = max_clients,
                                       .client_ms = CLIENT_MS,
                                       .silent_ms = silent_ms };
    struct ns_http *http = NULL;
    struct ns_error err;

    ns_metrics_init(&metrics);
    assert_int_equal(ns_http_open(&options, &http, &err), NS_OK);
    assert_true(ns_http_is_local(http));
    assert_true(ns_http_port(http) > 0);
    return http;
}

static void
say(struct ns_http *http, enum ns_http_phase phase, bool healthy)
{
    struct ns_http_state state = { .phase = phase, .healthy = healthy,
                                   .model = "a \"model\"\\\n",
                                   .model_revision = "abc" };

    ns_http_publish(http, &state);
}

/* --- the text format ---------------------------------------------------- */

/* What a metric's name is without the endings of a histogram's rows. */
static void
family_of(const char *line, const char *histogram, char *out, size_t out_size)
{
    size_t n = strcspn(line, "{ "), length = strlen(histogram);

    snprintf(out, out_size, "%.*s", (int)n, line);
    if (length && strncmp(out, histogram, length) == 0 &&
        (strcmp(out + length, "_bucket") == 0 ||
         strcmp(out + length, "_sum") == 0 ||
         strcmp(out + length, "_count") == 0))
        out[length] = '\0';
}

/* HELP, TYPE, rows: in this order, each family once. Buckets must rise and
 * end in the count. Returns the number of families. */
static int
check_metrics(const char *text)
{
    char name[128] = "", type[32] = "", other[128], seen[200][128];
    char histogram[128] = "";
    uint64_t last_bucket = 0, n_rows = 1, n_buckets = 0;
    double bound = 0, last_bound = 0;
    int n_families = 0;

    for (const char *line = text; *line;) {
        const char *end = strchr(line, '\n');

        assert_non_null(end);
        if (strncmp(line, "# HELP ", 7) == 0) {
            assert_true(n_rows > 0); /* the family before had some */
            assert_int_equal(sscanf(line + 7, "%127s", name), 1);
            assert_int_equal(strncmp(name, "nightshift_", 11), 0);
            assert_int_equal(strspn(name, "abcdefghijklmnopqrstuvwxyz_"),
                             strlen(name));
            assert_true((size_t)(end - line) > 8 + strlen(name));
            for (int i = 0; i < n_families; i++)
                assert_string_not_equal(seen[i], name);
            assert_true(n_families < 200);
            strcpy(seen[n_families++], name);
            *type = '\0';
            n_rows = n_buckets = last_bucket = 0;
            last_bound = -1;
        } else if (strncmp(line, "# TYPE ", 7) == 0) {
            assert_int_equal(sscanf(line + 7, "%127s %31s", other, type), 2);
            assert_string_equal(other, name);
            assert_true(!strcmp(type, "counter") || !strcmp(type, "gauge") ||
                        !strcmp(type, "histogram"));
            /* What only rises says so by its name, and nothing else does. */
            assert_int_equal(strlen(name) > 6 &&
                                 !strcmp(name + strlen(name) - 6, "_total"),
                             !strcmp(type, "counter"));
            strcpy(histogram, strcmp(type, "histogram") ? "" : name);
        } else {
            const char *value = end;
            char *rest;

            assert_true(*type);
            family_of(line, histogram, other, sizeof(other));
            assert_string_equal(other, name);
            while (value[-1] != ' ')
                value--;
            assert_true(strtod(value, &rest) >= 0);
            assert_ptr_equal(rest, end);
            n_rows++;
            if (strstr(line, "_bucket{le=\"") && strstr(line, "_bucket{") <
                end) {
                uint64_t n = strtoull(value, NULL, 10);

                assert_true(n >= last_bucket);
                last_bucket = n;
                n_buckets++;
                bound = strtod(strchr(line, '"') + 1, NULL);
                assert_true(bound > last_bound);
                last_bound = bound;
            } else if (*histogram && strncmp(line + strlen(histogram),
                                             "_count", 6) == 0) {
                assert_int_equal(strtoull(value, NULL, 10), last_bucket);
                assert_true(bound > 1e300); /* the last one was +Inf */
                assert_int_equal(n_buckets, NS_HISTOGRAM_BUCKETS + 1);
            }
        }
        line = end + 1;
    }
    return n_families;
}

static bool
has_line(const char *text, const char *line)
{
    size_t length = strlen(line);

    for (const char *at = text; (at = strstr(at, line)) != NULL; at++)
        if ((at == text || at[-1] == '\n') && at[length] == '\n')
            return true;
    return false;
}

static void
count_something(void)
{
    struct ns_pass_report report = { .n_rows = 128, .n_canvases = 2,
                                     .canvas_rows = 100, .prefill_rows = 28,
                                     .new_tokens = 30, .ns = 20000000 };
    struct ns_engine_load load = { .pass_tokens = 512, .put_back = 4,
                                   .full_pages_free = 60,
                                   .sliding_pages_free = 9 };
    struct ns_memory_plan memory = { .full_pages = 100, .sliding_pages = 9 };
    struct ns_result result = { .passes = 10, .tokens_per_pass = 7,
                                .queued_ms = 200, .run_ms = 40000,
                                .cached_tokens = 5 };

    ns_metrics_pass(&metrics, &report, &load, &memory);
    ns_metrics_job(&metrics, &result, 70);
    result.run_ms = 1000000000; /* beyond the last bound */
    result.queued_ms = -5;
    ns_metrics_job(&metrics, &result, 70);
    ns_metrics_ended(&metrics, NS_RESULT_OK, NULL);
    ns_metrics_ended(&metrics, NS_RESULT_DEAD, "bad_json");
    ns_metrics_ended(&metrics, NS_RESULT_DEAD, "bad_json");
    ns_metrics_ended(&metrics, NS_RESULT_FAILED, "canary_code_of_an_input");
    ns_metrics_ended(&metrics, NS_RESULT_FAILED, NULL);
}

static void
every_metric_has_help_a_type_and_numbers_that_are_right(void **state)
{
    static const struct ns_kafka_state kafka = {
        .lag = 77,
        .head_ms = 61500,
        .shown = { { .topic = "jobs", .id = 3, .lag = 70 },
                   { .topic = "jobs", .id = 4, .lag = 7, .head_ms = 61500 } },
        .n_shown = 2,
    };
    struct ns_http *http = open_server(0, 0);
    char *answer;

    (void)state;
    count_something();
    atomic_store(&metrics.in_flight, 9);
    atomic_store(&metrics.running, 4);
    say(http, NS_HTTP_WORKING, true);
    answer = ask(ns_http_port(http), "GET", "/metrics");
    assert_int_equal(status_of(answer), 200);
    assert_non_null(strstr(answer, "Content-Type: text/plain; version=0.0.4"));
    assert_true(check_metrics(body_of(answer)) >= 30);
#define HAS(line) assert_true(has_line(answer, "nightshift_" line))
    HAS("jobs_total{status=\"ok\"} 1");
    HAS("jobs_total{status=\"dead\"} 2");
    HAS("jobs_total{status=\"failed\"} 2");
    HAS("jobs_total{status=\"expired\"} 0");
    HAS("job_errors_total{code=\"bad_json\"} 2");
    HAS("job_errors_total{code=\"other\"} 2");
    HAS("job_queue_seconds_bucket{le=\"0.01\"} 1");
    HAS("job_queue_seconds_bucket{le=\"0.1\"} 1");
    HAS("job_queue_seconds_bucket{le=\"0.5\"} 2");
    HAS("job_queue_seconds_sum 0.200000");
    HAS("job_run_seconds_bucket{le=\"14400\"} 1");
    HAS("job_run_seconds_bucket{le=\"+Inf\"} 2");
    HAS("job_tokens_per_pass_bucket{le=\"6\"} 0");
    HAS("job_tokens_per_pass_bucket{le=\"8\"} 2");
    HAS("pass_fill_ratio_bucket{le=\"0.2\"} 0");
    HAS("pass_fill_ratio_bucket{le=\"0.3\"} 1");
    HAS("pass_seconds_sum 0.020000");
    HAS("pass_rows_total{kind=\"canvas\"} 100");
    HAS("denoise_steps_total 2");
    HAS("prefix_cache_tokens_total 10");
    HAS("sequences_put_back_total 4");
    HAS("kv_pages{pool=\"full\"} 100");
    HAS("kv_pages_used{pool=\"full\"} 40");
    HAS("kv_pages_used{pool=\"sliding\"} 0");
    HAS("kv_fill_ratio_bucket{le=\"0.3\"} 0");
    HAS("kv_fill_ratio_bucket{le=\"0.4\"} 1");
    HAS("jobs_waiting 5");
    HAS("ready 1");
    HAS("healthy 1");
    /* Labels keep their one line whatever a folder is called. */
    HAS("build_info{version=\"9.8.7\",model=\"a \\\"model\\\"\\\\\\n\","
        "model_revision=\"abc\"} 1");
#undef HAS
    assert_null(strstr(answer, "canary"));
    assert_null(strstr(answer, "kafka"));
    free(answer);

    ns_http_publish(http, &(struct ns_http_state){ .has_kafka = true,
                                                   .kafka = kafka });
    answer = ask(ns_http_port(http), "GET", "/metrics");
    check_metrics(body_of(answer));
    assert_true(has_line(answer, "nightshift_kafka_lag_messages 77"));
    assert_true(has_line(answer, "nightshift_kafka_head_age_seconds 61.500"));
    assert_true(has_line(answer, "nightshift_kafka_partition_lag_messages"
                                 "{topic=\"jobs\",partition=\"3\"} 70"));
    assert_true(has_line(answer, "nightshift_kafka_partition_lag_messages"
                                 "{topic=\"jobs\",partition=\"4\"} 7"));
    assert_true(has_line(answer, "nightshift_kafka_partition_head_age_seconds"
                                 "{topic=\"jobs\",partition=\"4\"} 61.500"));
    free(answer);
    ns_http_close(http);
}

static void
every_code_is_a_word_that_a_label_can_hold_and_stands_once(void **state)
{
    (void)state;
    for (size_t i = 0; strcmp(ns_metrics_code(i), "other") != 0; i++) {
        const char *code = ns_metrics_code(i);

        assert_true(i < NS_METRICS_CODES - 1);
        assert_int_equal(strspn(code, "abcdefghijklmnopqrstuvwxyz_0123456789"),
                         strlen(code));
        if (i > 0)
            assert_true(strcmp(ns_metrics_code(i - 1), code) < 0);
    }
    assert_string_equal(ns_metrics_code(NS_METRICS_CODES + 5), "other");
}

/* The word behind `call` and its first comma: its code, if it names one. */
static bool
code_in_call(const char *call, char *out, size_t out_size)
{
    const char *comma = call + strcspn(call, ",;"), *word;
    size_t n;

    if (*comma != ',')
        return false;
    word = comma + 1 + strspn(comma + 1, " \n");
    if (*word != '"')
        return false;
    n = strspn(word + 1, "abcdefghijklmnopqrstuvwxyz_0123456789");
    if (n == 0 || n >= out_size || word[1 + n] != '"')
        return false;
    snprintf(out, out_size, "%.*s", (int)n, word + 1);
    return true;
}

static bool
is_counted(const char *code)
{
    for (size_t i = 0; strcmp(ns_metrics_code(i), "other") != 0; i++)
        if (strcmp(ns_metrics_code(i), code) == 0)
            return true;
    return false;
}

/* What the sources refuse a job with is counted by its name. Codes that end a
 * command or the process, and no job, are not among them. */
static void
every_code_that_a_job_is_refused_with_is_counted_by_name(void **state)
{
    static const char *const places[] = { "daemon/*.c", "engine/*.c",
                                          "connectors/*.c" };
    static const char not_of_jobs[] =
        " bad_spool edited input_changed locked not_ours postgres_setup"
        " unknown unreadable_input usage bad_model bad_output ";
    int n_seen = 0;
    glob_t found;

    (void)state;
    for (size_t p = 0; p < sizeof(places) / sizeof(places[0]); p++) {
        assert_int_equal(glob(places[p], 0, NULL, &found), 0);
        for (size_t i = 0; i < found.gl_pathc; i++) {
            char *text, *at, code[40], word[48];

            if (strstr(found.gl_pathv[i], "/command") ||
                strstr(found.gl_pathv[i], "/operator"))
                continue; /* ends a command, and no job */
            at = text = slurp(found.gl_pathv[i]);
            while ((at = strstr(at, "ns_refuse(")) != NULL) {
                at += 10;
                if (!code_in_call(at, code, sizeof(code)))
                    continue;
                snprintf(word, sizeof(word), " %s ", code);
                if (!is_counted(code) && !strstr(not_of_jobs, word))
                    fail_msg("%s: \"%s\" is counted as other",
                             found.gl_pathv[i], code);
                n_seen++;
            }
            free(text);
        }
        globfree(&found);
    }
    assert_true(n_seen > 50);
}

static void
the_status_is_json_and_the_page_needs_nothing_from_elsewhere(void **state)
{
    static const char *const outside[] = { "http:", "https:", "src=", "url(",
                                           "@import", "<link", "import(" };
    struct ns_http *http = open_server(0, 0);
    char *answer;
    json_t *root;

    (void)state;
    count_something();
    say(http, NS_HTTP_WORKING, true);
    answer = ask(ns_http_port(http), "GET", "/status.json");
    assert_int_equal(status_of(answer), 200);
    root = json_loads(body_of(answer), JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "model")),
                        "a \"model\"\\\n");
    assert_true(json_is_true(json_object_get(root, "ready")));
    assert_int_equal(json_integer_value(json_object_get(
                         json_object_get(root, "ended"), "dead")), 2);
    assert_int_equal(json_integer_value(json_object_get(
                         json_object_get(root, "errors"), "other")), 2);
    assert_true(json_array_size(json_object_get(root, "history")) >= 1);
    json_decref(root);
    assert_null(strstr(answer, "canary"));
    free(answer);

    answer = ask(ns_http_port(http), "GET", "/");
    assert_int_equal(status_of(answer), 200);
    assert_non_null(strstr(answer, "Content-Type: text/html"));
    assert_non_null(strstr(answer, "default-src 'none'"));
    assert_string_equal(body_of(answer), ns_http_page);
    assert_non_null(strstr(answer, "</html>"));
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++)
        assert_null(strstr(ns_http_page, outside[i]));
    free(answer);
    ns_http_close(http);
}

/* --- health ------------------------------------------------------------ */

static void
readiness_and_health_say_what_is_so_in_one_line(void **state)
{
    struct ns_http *http = open_server(0, 300);

    (void)state;
    usleep(400000); /* a model takes longer than any loop may be silent */
    answers(http, "/healthz", 200, "loading the model\n");
    answers(http, "/readyz", 503, "loading the model\n");
    say(http, NS_HTTP_OPENING, true);
    answers(http, "/readyz", 503, "opening source and store\n");
    say(http, NS_HTTP_WAITING, true);
    answers(http, "/healthz", 200, "ok\n");
    answers(http, "/readyz", 503, "source or store is out of reach\n");
    say(http, NS_HTTP_WORKING, true);
    answers(http, "/healthz", 200, "ok\n");
    answers(http, "/readyz", 200, "ok\n");
    say(http, NS_HTTP_WORKING, false);
    answers(http, "/healthz", 503, "a pass or a call into the store hangs\n");
    answers(http, "/readyz", 503, "a pass or a call into the store hangs\n");
    say(http, NS_HTTP_DRAINING, true);
    answers(http, "/healthz", 200, "ok\n");
    answers(http, "/readyz", 503, "draining\n");
    say(http, NS_HTTP_WORKING, true);
    usleep(400000);
    answers(http, "/healthz", 503, "the event loop hangs\n");
    answers(http, "/readyz", 503, "the event loop hangs\n");
    say(http, NS_HTTP_WORKING, true); /* and it is back */
    answers(http, "/readyz", 200, "ok\n");
    ns_http_close(http);
}

/* --- what clients do --------------------------------------------------- */

static void
other_paths_are_404_and_other_methods_405(void **state)
{
    static const char *const methods[] = { "POST", "PUT", "DELETE", "HEAD",
                                           "OPTIONS", "BREW" };
    static const char *const paths[] = { "/metrics/", "/../etc/passwd",
                                         "//", "/Metrics", "/healthz%00" };
    struct ns_http *http = open_server(0, 0);
    char *answer;

    (void)state;
    say(http, NS_HTTP_WORKING, true);
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        answer = ask(ns_http_port(http), "GET", paths[i]);
        if (strcmp(paths[i], "/healthz%00") != 0)
            assert_int_equal(status_of(answer), 404);
        free(answer);
    }
    for (size_t i = 0; i < sizeof(methods) / sizeof(methods[0]); i++) {
        answer = ask(ns_http_port(http), methods[i], "/metrics");
        assert_int_equal(status_of(answer), 405);
        assert_non_null(strstr(answer, "\r\nAllow: GET\r\n"));
        assert_null(strstr(answer, "nightshift_"));
        free(answer);
    }
    answer = ask(ns_http_port(http), "GET", "/healthz?verbose=1");
    assert_int_equal(status_of(answer), 200);
    free(answer);
    ns_http_close(http);
}

static void
nonsense_and_endless_requests_cost_only_their_sender(void **state)
{
    static const char form[] = "POST / HTTP/1.1\r\nHost: x\r\n"
                               "Content-Length: 999999999\r\n\r\nab";
    struct ns_http *http = open_server(0, 0);
    uint16_t port = ns_http_port(http);
    char *answer, *big = malloc(1 << 20);
    uint64_t random = 1;

    (void)state;
    assert_non_null(big);
    say(http, NS_HTTP_WORKING, true);
    memset(big, 'x', 1 << 20);
    memcpy(big, "GET / HTTP/1.1\r\nA: ", 19);
    answer = exchange(port, big, 1 << 20);
    assert_int_not_equal(status_of(answer), 200);
    free(answer);
    answer = exchange(port, form, sizeof(form) - 1);
    assert_int_not_equal(status_of(answer), 200);
    free(answer);
    for (int i = 0; i < 50; i++) {
        size_t n = 1 + (size_t)i * 7;

        for (size_t k = 0; k < n; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            big[k] = (char)(random >> 56);
        }
        memcpy(big + n, "\r\n\r\n", 4);
        answer = exchange(port, big, n + 4);
        assert_int_not_equal(status_of(answer), 200);
        free(answer);
    }
    free(big);
    answers(http, "/readyz", 200, "ok\n");
    ns_http_close(http);
}

struct publisher {
    struct ns_http *http;
    _Atomic bool done;
    int64_t longest_ms;
    uint64_t n;
};

static void *
publish_on(void *data)
{
    struct publisher *publisher = data;

    while (!atomic_load(&publisher->done)) {
        int64_t since = now_ms(), took;

        say(publisher->http, NS_HTTP_WORKING, true);
        count_something();
        took = now_ms() - since;
        if (took > publisher->longest_ms)
            publisher->longest_ms = took;
        publisher->n++;
        usleep(500);
    }
    return NULL;
}

/* Half of them never end their request, sending a byte now and then so that
 * no silence gives them away; the others never read their answer. Their time
 * ends all the same, and the next one is served. */
static void
many_slow_clients_hold_up_nobody_for_longer_than_their_time(void **state)
{
    enum { N_SLOW = 120 };
    static const char get[] = "GET /status.json HTTP/1.1\r\nHost: x\r\n\r\n";
    struct ns_http *http = open_server(16, 0);
    struct publisher publisher = { .http = http };
    struct pollfd one;
    int fds[N_SLOW], n_open = N_SLOW;
    pthread_t thread;
    int64_t since;
    char byte;

    (void)state;
    say(http, NS_HTTP_WORKING, true);
    assert_int_equal(pthread_create(&thread, NULL, publish_on, &publisher), 0);
    for (int i = 0; i < N_SLOW; i++) {
        fds[i] = connect_to(ns_http_port(http));
        if (i % 2)
            send(fds[i], get, sizeof(get) - 1, MSG_NOSIGNAL);
    }
    since = now_ms();
    while (n_open > 0) {
        /* 120 clients, 16 at a time: eight rounds, and some slack. */
        assert_true(now_ms() - since < 12 * CLIENT_MS + 10000);
        for (int i = 0; i < N_SLOW; i++) {
            if (fds[i] == -1)
                continue;
            if (i % 2 == 0)
                send(fds[i], "G", 1, MSG_NOSIGNAL);
            one = (struct pollfd){ .fd = fds[i], .events = POLLRDHUP };
            if (poll(&one, 1, 0) > 0) {
                while (read(fds[i], &byte, 1) > 0)
                    ;
                close(fds[i]);
                fds[i] = -1;
                n_open--;
            }
        }
        usleep(20000);
    }
    since = now_ms();
    answers(http, "/readyz", 200, "ok\n");
    assert_true(now_ms() - since < 5000);
    atomic_store(&publisher.done, true);
    pthread_join(thread, NULL);
    assert_true(publisher.n > 100);
    assert_true(publisher.longest_ms < 2000); /* a machine may be busy */
    ns_http_close(http);
}

/* With the tool for data races this is the test of the two threads. */
static void
numbers_read_while_they_are_counted_never_contradict_themselves(void **state)
{
    struct ns_http *http = open_server(0, 0);
    struct publisher publisher = { .http = http };
    pthread_t thread;
    uint64_t last = 0, n;
    char *answer;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, publish_on, &publisher), 0);
    for (int i = 0; i < 60; i++) {
        answer = ask(ns_http_port(http), "GET", "/metrics");
        check_metrics(body_of(answer));
        n = strtoull(strstr(answer, "\nnightshift_passes_total ") + 25, NULL,
                     10);
        assert_true(n >= last);
        last = n;
        free(answer);
    }
    atomic_store(&publisher.done, true);
    pthread_join(thread, NULL);
    assert_true(last > 0);
    ns_http_close(http);
}

/* --- open and close ---------------------------------------------------- */

static void
addresses_that_are_none_are_refused_and_one_in_use_is_tried_again(void **state)
{
    static const char *const bad[] = {
        "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x",
        "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:0x1f", "::1:9464", "[]:1",
        "192.0.2.1:0",
    };
    struct ns_http_options options = { .metrics = &metrics, .version = "1" };
    struct ns_http *http = open_server(0, 0), *second = NULL;
    struct ns_error err;
    char taken[32];

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        options.listen = bad[i];
        if (ns_http_open(&options, &second, &err) != NS_REJECT)
            fail_msg("%s was taken", bad[i]);
        assert_non_null(strstr(err.text, "http.listen"));
        assert_null(second);
    }
    snprintf(taken, sizeof(taken), "127.0.0.1:%u", ns_http_port(http));
    options.listen = taken;
    assert_int_equal(ns_http_open(&options, &second, &err), NS_RETRY);
    assert_null(second);
    ns_http_close(http);
    assert_int_equal(ns_http_open(&options, &second, &err), NS_OK);
    ns_http_close(second);
    options.listen = "0.0.0.0:0";
    assert_int_equal(ns_http_open(&options, &second, &err), NS_OK);
    assert_false(ns_http_is_local(second));
    ns_http_close(second);
    ns_http_close(NULL);
}

static void
running_out_of_memory_at_any_point_leaks_nothing(void **state)
{
    struct ns_http_options options = { .listen = "127.0.0.1:0",
                                       .metrics = &metrics, .version = "1" };
    int n_failed = 0;

    (void)state;
    for (int n = 0;; n++) {
        struct ns_http *http = NULL;
        struct ns_error err;
        enum ns_status status;

        fault_arm(n);
        status = ns_http_open(&options, &http, &err);
        if (!fault_fired()) {
            assert_int_equal(status, NS_OK);
            ns_http_close(http);
            break;
        }
        assert_int_equal(status, NS_FATAL);
        assert_null(http);
        n_failed++;
    }
    assert_true(n_failed > 0);
    /* A client for whom there is none gets an error, the next an answer. */
    for (int n = 0; n < 3; n++) {
        struct ns_http *http = open_server(0, 0);
        char *answer;

        fault_arm(n + 1); /* the client's own buffer is the first */
        answer = ask(ns_http_port(http), "GET", "/metrics");
        if (fault_fired())
            assert_true(status_of(answer) == 500 || status_of(answer) == 200);
        else
            assert_int_equal(status_of(answer), 200);
        free(answer);
        answers(http, "/healthz", 200, "loading the model\n");
        ns_http_close(http);
    }
}

/* --- in the daemon ------------------------------------------------------ */

static char spool[PATH_MAX];

static uint16_t
start_daemon(pid_t *pid)
{
    static const char *const folders[] = { "", "/in", "/work", "/out", "/done",
                                           "/dead" };
    const char *const argv[] = {
        "nightshiftd", "--spool", spool, "--model", program_model, "--set",
        "cpu.threads=1", "--set", "intake.poll=20ms", "--set",
        "http.listen=127.0.0.1:0", "--set", "daemon.drain=6s", NULL,
    };

    snprintf(spool, sizeof(spool), "%s", in_folder("spool"));
    for (size_t i = 0; i < 6; i++) {
        char path[PATH_MAX + 8];

        snprintf(path, sizeof(path), "%s%s", spool, folders[i]);
        mkdir(path, 0700);
    }
    *pid = spawn(argv, in_folder("d.out"), in_folder("d.err"));
    wait_until_says(in_folder("d.err"), "daemon.ready");
    return port_in(in_folder("d.err"));
}

static void
drop_jobs(const char *name, int n, int n_tokens)
{
    char part[PATH_MAX + 32], whole[PATH_MAX + 32];
    FILE *file;

    snprintf(part, sizeof(part), "%s/in/%s.part", spool, name);
    snprintf(whole, sizeof(whole), "%s/in/%s.jsonl", spool, name);
    file = fopen(part, "w");
    assert_non_null(file);
    for (int i = 0; i < n; i++)
        fprintf(file,
                "{\"custom_id\":\"idcanary-%s-%d\",\"method\":\"POST\",\"url\":"
                "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"textcanary %d\"}],\"max_tokens\":%d}}\n",
                name, i, i, n_tokens);
    fprintf(file, "{\"custom_id\":\"idcanary-%s-x\",\"body\":{\"messages\":"
            "\"textcanary\",\"paramcanary\":1}}\n{textcanary\n", name);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(part, whole), 0);
}

static void
assert_no_canary(uint16_t port)
{
    static const char *const paths[] = { "/", "/status.json", "/metrics",
                                         "/healthz", "/readyz" };

    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        char *answer = ask(port, "GET", paths[i]);

        assert_true(status_of(answer) > 0);
        assert_null(strstr(answer, "canary"));
        free(answer);
    }
}

static json_int_t
number_of(const json_t *job, const char *name)
{
    return json_integer_value(json_object_get(job, name));
}

static json_t *
jobs_in(uint16_t port)
{
    char *answer = ask(port, "GET", "/status.json");
    json_t *root = json_loads(body_of(answer), 0, NULL);
    json_t *jobs = json_incref(json_object_get(root, "jobs"));

    assert_true(json_is_array(jobs));
    json_decref(root);
    free(answer);
    return jobs;
}

/* Whether `job` is among those of an earlier look, and was less far then. */
static bool
has_moved_since(const json_t *before, const json_t *job)
{
    size_t i;
    json_t *then;

    json_array_foreach(before, i, then)
        if (number_of(then, "job") == number_of(job, "job"))
            return 1000 * number_of(job, "block") + number_of(job, "step") >
                   1000 * number_of(then, "block") + number_of(then, "step");
    return false;
}

/* Until a canvas was seen to move on from one look to the next. */
static void
watch_jobs(uint16_t port)
{
    int64_t until = now_ms() + 60000;
    json_t *before = json_array();

    for (bool moved = false; !moved; usleep(5000)) {
        json_t *jobs = jobs_in(port), *job;
        size_t i;

        json_array_foreach(jobs, i, job) {
            json_int_t canvas = number_of(job, "canvas");

            assert_true(number_of(job, "accepted") <= canvas);
            assert_true(number_of(job, "read") <= number_of(job, "prompt"));
            assert_true(number_of(job, "tokens") <=
                        number_of(job, "max_tokens"));
            assert_int_equal(json_string_length(json_object_get(job, "cells")),
                             (canvas + 7) / 8 * 2);
            moved = moved || (canvas > 0 && has_moved_since(before, job));
        }
        json_decref(before);
        before = jobs;
        assert_true(now_ms() < until);
    }
    json_decref(before);
}

static void
the_daemon_counts_what_it_does_and_is_not_ready_while_it_drains(void **state)
{
    pid_t pid;
    uint16_t port = start_daemon(&pid);
    bool was_draining = false;
    char *answer;

    (void)state;
    answer = ask(port, "GET", "/readyz");
    assert_int_equal(status_of(answer), 200);
    free(answer);
    drop_jobs("a", 6, 20);
    wait_until_exists(in_folder("spool/out/a.jsonl"));
    answer = ask(port, "GET", "/metrics");
    check_metrics(body_of(answer));
    assert_true(has_line(answer, "nightshift_jobs_received_total 8"));
    assert_true(has_line(answer, "nightshift_jobs_total{status=\"ok\"} 6"));
    assert_true(has_line(answer, "nightshift_jobs_total{status=\"dead\"} 2"));
    assert_true(has_line(answer,
                         "nightshift_job_errors_total{code=\"bad_json\"} 1"));
    assert_true(has_line(answer, "nightshift_job_run_seconds_count 6"));
    assert_true(has_line(answer, "nightshift_jobs_running 0"));
    assert_null(strstr(answer, "\nnightshift_passes_total 0\n"));
    assert_null(strstr(answer, "\nnightshift_kv_pages{pool=\"full\"} 0\n"));
    free(answer);
    assert_no_canary(port);

    /* More than a drain has time for: it lasts as long as it may, and is seen. */
    drop_jobs("b", 60, 3500);
    for (int64_t until = now_ms() + 30000;; usleep(2000)) {
        answer = ask(port, "GET", "/metrics");
        if (!has_line(answer, "nightshift_jobs_running 0"))
            break;
        assert_true(now_ms() < until);
        free(answer);
    }
    free(answer);
    assert_no_canary(port);
    watch_jobs(port);
    kill(pid, SIGTERM);
    while (!was_draining && kill(pid, 0) == 0) {
        answer = ask(port, "GET", "/readyz");
        was_draining = status_of(answer) == 503 &&
                       strcmp(body_of(answer), "draining\n") == 0;
        free(answer);
    }
    assert_true(was_draining);
    answer = ask(port, "GET", "/healthz");
    assert_int_equal(status_of(answer), 200);
    free(answer);
    assert_no_canary(port);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            every_metric_has_help_a_type_and_numbers_that_are_right),
        cmocka_unit_test(
            every_code_is_a_word_that_a_label_can_hold_and_stands_once),
        cmocka_unit_test(
            every_code_that_a_job_is_refused_with_is_counted_by_name),
        cmocka_unit_test(
            the_status_is_json_and_the_page_needs_nothing_from_elsewhere),
        cmocka_unit_test(readiness_and_health_say_what_is_so_in_one_line),
        cmocka_unit_test(other_paths_are_404_and_other_methods_405),
        cmocka_unit_test(nonsense_and_endless_requests_cost_only_their_sender),
        cmocka_unit_test(
            many_slow_clients_hold_up_nobody_for_longer_than_their_time),
        cmocka_unit_test(
            numbers_read_while_they_are_counted_never_contradict_themselves),
        cmocka_unit_test(
            addresses_that_are_none_are_refused_and_one_in_use_is_tried_again),
        cmocka_unit_test(running_out_of_memory_at_any_point_leaks_nothing),
        cmocka_unit_test(
            the_daemon_counts_what_it_does_and_is_not_ready_while_it_drains),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
