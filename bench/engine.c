/* engine.c - the engine's side of `make bench`: whole passes on a checkpoint.
 *
 *     build/bench/engine MODEL [THREADS] [PASS_TOKENS] [ISA] [CANVASES]
 *
 * CANVASES is how many may be in flight; 8 if not given.
 *
 * Reads commands from standard input and answers each with one JSON line, so
 * that bench/compare.py can let it and its peer take turns:
 *
 *     prefill N        N prompts of 1,024 tokens
 *     denoise B N [P]  N denoise steps of B canvases behind P tokens each, or
 *                      1,024; self-conditioning and sampler included
 *     jobs B           2 B whole jobs, B in flight
 *     memory           peak RSS and the plan
 *
 * `ms` in an answer lists every repetition. Steps are fixed by a confidence
 * threshold that no canvas reaches: on random weights nothing settles.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"

enum { PROMPT = 1024, MAX_PROMPT = 7936, IN_FLIGHT = 8, N_STEPS = 16,
       FIRST_ID = 256,
       MAX_STEPS = 1000 /* never reached: these are cancelled */ };

/* Denoise steps of the jobs' canvases, in turn: 6 to 30, mean 13 (compare.py has
 * the same list). Fixed, since random weights would run every canvas to the limit. */
static const uint32_t steps[N_STEPS] = {
    6, 13, 9, 30, 8, 12, 10, 16, 7, 14, 27, 9, 11, 7, 17, 12,
};

struct bench {
    struct ns_engine *engine;
    uint64_t next_id;
    uint32_t rng, vocab, most; /* canvases in flight */
    int32_t prompt[MAX_PROMPT];
};

static double
now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void
need(enum ns_status status, const struct ns_error *err)
{
    if (status == NS_OK)
        return;
    fprintf(stderr, "bench: %s\n", err->text);
    exit(1);
}

/* No two prompts are alike: a shared prefix would be prefilled once. */
static uint64_t
submit(struct bench *b, uint32_t n_prompt, uint32_t n_steps)
{
    struct ns_request request = {
        .id = b->next_id++,
        .prompt = b->prompt,
        .n_prompt = n_prompt,
        .mode = NS_MODE_DIFFUSION,
        .seed = b->next_id,
        .max_tokens = ns_engine_model(b->engine)->config.canvas_length,
        .top_p = 1.0f,
        .sampler = { .t_min = 0.4f, .t_max = 0.8f, .entropy_bound = 0.1f,
                     .max_denoising_steps = n_steps,
                     .stability_threshold = 1,
                     .confidence_threshold = 0.0f },
    };
    struct ns_error err;

    for (uint32_t i = 0; i < n_prompt; i++) {
        b->rng = b->rng * 1664525u + 1013904223u;
        b->prompt[i] = (int32_t)(FIRST_ID +
                                 (b->rng >> 8) % (b->vocab - FIRST_ID));
    }
    need(ns_engine_submit(b->engine, &request, &err), &err);
    return request.id;
}

/* One pass; counts the completions that it brought. */
static struct ns_pass_report
pass(struct bench *b, uint32_t *n_done)
{
    struct ns_pass_report report;
    struct ns_event event;
    struct ns_error err;

    need(ns_engine_pass(b->engine, &report, &err), &err);
    while (ns_engine_next_event(b->engine, &event)) {
        if (event.kind == NS_EVENT_FAILED)
            need(event.error.status, &event.error);
        *n_done += event.kind == NS_EVENT_DONE;
    }
    return report;
}

static void
print_ms(double ms, bool first)
{
    printf("%s%.2f", first ? "" : ",", ms);
}

static void
run_prefill(struct bench *b, uint32_t n)
{
    printf("{\"kind\":\"prefill\",\"tokens\":%d,\"ms\":[", PROMPT);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t id = submit(b, PROMPT, MAX_STEPS);
        uint32_t rows = 0, n_done = 0;
        double start = now_ms();

        while (rows < PROMPT) {
            struct ns_pass_report report = pass(b, &n_done);

            if (report.canvas_rows > 0) {
                fprintf(stderr, "bench: a canvas shares the last pass of the "
                                "prefill; PASS_TOKENS must divide %d\n",
                        PROMPT);
                exit(1);
            }
            rows += report.prefill_rows;
        }
        print_ms(now_ms() - start, i == 0);
        ns_engine_cancel(b->engine, id);
    }
    printf("]}\n");
}

static void
run_denoise(struct bench *b, uint32_t n_canvases, uint32_t n,
            uint32_t n_prompt)
{
    uint64_t first = b->next_id;
    uint32_t n_done = 0;

    for (uint32_t i = 0; i < n_canvases; i++)
        submit(b, n_prompt, MAX_STEPS);
    /* Past the prompts and past each first step, which has no soft rows. More
     * canvases than fill a pass are not let in, and none of these ends: then
     * those that run take as many steps as all would have. */
    for (uint32_t warm = 0; warm < 2 * n_canvases;) {
        struct ns_pass_report report = pass(b, &n_done);

        warm = report.prefill_rows ? 0 : warm + report.n_canvases;
    }
    printf("{\"kind\":\"denoise\",\"batch\":%u,\"ms\":[", n_canvases);
    for (uint32_t i = 0; i < n; i++) {
        double start = now_ms();

        for (uint32_t stepped = 0; stepped < n_canvases;)
            stepped += pass(b, &n_done).n_canvases;
        print_ms(now_ms() - start, i == 0);
    }
    printf("]}\n");
    for (uint32_t i = 0; i < n_canvases; i++)
        ns_engine_cancel(b->engine, first + i);
}

static void
run_jobs(struct bench *b, uint32_t in_flight)
{
    uint32_t n_jobs = 2 * in_flight, n_done = 0, n_submitted = 0;
    uint32_t n_passes = 0, n_steps = 0;
    double start = now_ms();

    while (n_done < n_jobs) {
        while (n_submitted < n_jobs && n_submitted - n_done < in_flight)
            submit(b, PROMPT, steps[n_submitted++ % N_STEPS]);
        n_steps += pass(b, &n_done).n_canvases;
        n_passes++;
    }
    printf("{\"kind\":\"jobs\",\"jobs\":%u,\"steps\":%u,\"passes\":%u,"
           "\"ms\":[%.1f]}\n", n_jobs, n_steps, n_passes, now_ms() - start);
}

/* Of this program alone: getrusage starts from what its parent had when it
 * forked, and the peer's process has gigabytes. */
static double
peak_rss_mb(void)
{
    FILE *file = fopen("/proc/self/status", "re");
    unsigned long long kb = 0;
    char line[256];

    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "VmHWM: %llu kB", &kb) == 1)
            break;
    if (file)
        fclose(file);
    return (double)kb * 1024 / 1e6;
}

static void
print_memory(const struct bench *b)
{
    const struct ns_memory_plan *plan = ns_engine_memory(b->engine);

    printf("{\"kind\":\"memory\",\"peak_rss_mb\":%.0f,\"plan_mb\":%.0f,"
           "\"weights_mb\":%.0f,\"kv_mb\":%.0f,\"work_mb\":%.0f}\n",
           peak_rss_mb(), (double)plan->total_bytes / 1e6, (double)plan->weight_bytes / 1e6,
           (double)(plan->full_bytes + plan->sliding_bytes) / 1e6,
           (double)(plan->workspace_bytes + plan->canvas_bytes) / 1e6);
}

int
main(int argc, char **argv)
{
    /* Pages for all that are in flight, with room. */
    struct ns_engine_options options = { .max_sequences = IN_FLIGHT,
                                         .kv_bytes = 512u << 20 };
    struct bench b = { .rng = 1, .next_id = 1 };
    struct ns_error err;
    char line[128];
    uint32_t x, y;

    if (argc < 2) {
        fprintf(stderr, "usage: engine MODEL [THREADS] [PASS_TOKENS] [ISA] "
                        "[CANVASES]\n");
        return 64;
    }
    options.model_directory = argv[1];
    options.backend.n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    options.pass_tokens = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    options.backend.isa = argc > 4 && argv[4][0] ? argv[4] : NULL;
    b.most = argc > 5 ? (uint32_t)atoi(argv[5]) : IN_FLIGHT;
    if (b.most > IN_FLIGHT) {
        options.max_sequences = b.most;
        options.kv_bytes *= b.most / IN_FLIGHT;
    }
    need(ns_engine_open(&options, &b.engine, &err), &err);
    b.vocab = ns_engine_model(b.engine)->config.vocab;
    printf("{\"kind\":\"open\",\"engine_rev\":\"%s\"}\n",
           ns_engine_revision(b.engine));
    for (fflush(stdout); fgets(line, sizeof(line), stdin); fflush(stdout)) {
        uint32_t n_prompt = PROMPT;

        if (sscanf(line, "prefill %" SCNu32, &x) == 1)
            run_prefill(&b, x);
        else if (sscanf(line, "denoise %" SCNu32 " %" SCNu32 " %" SCNu32, &x,
                        &y, &n_prompt) >= 2 &&
                 x >= 1 && x <= b.most && n_prompt >= 1 &&
                 n_prompt <= MAX_PROMPT)
            run_denoise(&b, x, y, n_prompt);
        else if (sscanf(line, "jobs %" SCNu32, &x) == 1 && x >= 1 &&
                 x <= b.most)
            run_jobs(&b, x);
        else if (strcmp(line, "memory\n") == 0)
            print_memory(&b);
        else
            fprintf(stderr, "bench: no such command: %s", line);
    }
    ns_engine_close(b.engine);
    return 0;
}
