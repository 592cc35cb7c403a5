/* The engine as a whole: modes, determinism, budgets, pages, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine.h"
#include "engine/kvcache.h"
#include "engine/rng.h"
#include "engine/trace.h"
#include "tests/tiny.h"

/* ---- a checkpoint of the vectors with the tiny tokenizer beside it -------- */

struct folder {
    char path[64];
};

static void
link_file(const struct folder *folder, const char *from, const char *name)
{
    char cwd[512], source[1100], target[360];

    assert_non_null(getcwd(cwd, sizeof(cwd)));
    snprintf(source, sizeof(source), "%s/%s", cwd, from);
    snprintf(target, sizeof(target), "%s/%s", folder->path, name);
    assert_int_equal(symlink(source, target), 0);
}

/* All files of a folder, and the tiny tokenizer where it has none. */
static struct folder
link_folder(const char *model)
{
    struct folder folder = { "/tmp/test_engine-XXXXXX" };
    DIR *directory = opendir(model);
    bool has_tokenizer = false;
    struct dirent *entry;
    char from[512];

    assert_non_null(mkdtemp(folder.path));
    assert_non_null(directory);
    while ((entry = readdir(directory)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(from, sizeof(from), "%s/%s", model, entry->d_name);
        link_file(&folder, from, entry->d_name);
        has_tokenizer = has_tokenizer ||
                        strcmp(entry->d_name, "tokenizer.json") == 0;
    }
    closedir(directory);
    if (!has_tokenizer)
        link_file(&folder, "tests/cases/tokenizer/tiny/tokenizer.json",
                  "tokenizer.json");
    return folder;
}

static struct folder
make_folder(const char *group)
{
    char model[256];

    snprintf(model, sizeof(model), "tests/cases/%s/model", group);
    return link_folder(model);
}

static void
remove_folder(const struct folder *folder)
{
    DIR *directory = opendir(folder->path);
    struct dirent *entry;
    char path[512];

    while (directory && (entry = readdir(directory)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", folder->path, entry->d_name);
        unlink(path); /* "." and ".." refuse */
    }
    if (directory)
        closedir(directory);
    rmdir(folder->path);
}

static struct ns_engine_options
plain_options(const struct folder *folder)
{
    struct ns_engine_options options = {
        .model_directory = folder->path,
        .backend = { .n_threads = 1 },
        .pass_tokens = 512,
        .max_sequences = 16,
        .kv_bytes = 64 << 20,
    };

    return options;
}

static struct ns_engine *
open_engine(const struct ns_engine_options *options)
{
    struct ns_engine *engine = NULL;
    struct ns_error err;

    if (ns_engine_open(options, &engine, &err) != NS_OK)
        fail_msg("%s", err.text);
    return engine;
}

/* ---- jobs and answers ------------------------------------------------------ */

enum { MAX_PROMPT = 512, MAX_ANSWER = 512, MAX_BLOCKS = 600 };

struct job {
    struct ns_request request;
    int32_t prompt[MAX_PROMPT];
    /* what came back */
    bool done, failed;
    int32_t answer[MAX_ANSWER];
    uint32_t n_answer, n_blocks, block_end[MAX_BLOCKS];
    enum ns_finish finish;
    struct ns_usage usage;
    struct ns_error error;
    char content[4096], thought[4096];
};

static void
make_job(struct job *job, const struct ns_engine *engine, uint64_t id,
         uint32_t n_prompt, uint32_t max_tokens, enum ns_mode mode)
{
    const struct ns_model *model = ns_engine_model(engine);
    const struct ns_generation *g = &model->generation;

    memset(job, 0, sizeof(*job));
    job->request = (struct ns_request){
        .id = id, .prompt = job->prompt, .n_prompt = n_prompt, .mode = mode,
        .seed = 1000 + id, .max_tokens = max_tokens, .top_p = 1.0f,
        .sampler = { g->t_min, g->t_max, g->entropy_bound,
                     g->max_denoising_steps, g->stability_threshold,
                     g->confidence_threshold },
    };
    job->prompt[0] = model->config.bos_id;
    for (uint32_t i = 1; i < n_prompt; i++)
        job->prompt[i] = 110 + ns_draw_token(ns_draw(77, (uint32_t)id, 0,
                                                     NS_DRAW_CANVAS, i), 380);
}

static void
take_event(struct job *job, const struct ns_event *event)
{
    job->usage = event->usage;
    if (event->kind == NS_EVENT_BLOCK) {
        assert_in_range(job->n_blocks, 0, MAX_BLOCKS - 1);
        assert_int_equal(event->block,
                         job->n_blocks + job->request.resume_blocks);
        memcpy(job->answer + job->n_answer, event->tokens,
               event->n_tokens * sizeof(int32_t));
        job->n_answer += event->n_tokens;
        job->block_end[job->n_blocks++] = job->n_answer;
        return;
    }
    assert_false(job->done);
    job->done = true;
    if (event->kind == NS_EVENT_FAILED) {
        job->failed = true;
        job->error = event->error;
        return;
    }
    assert_in_range(event->n_tokens, 0, MAX_ANSWER);
    /* The blocks reported before are a prefix of the answer. */
    if (job->request.n_resume == 0)
        assert_memory_equal(event->tokens, job->answer,
                            job->n_answer * sizeof(int32_t));
    memcpy(job->answer, event->tokens, event->n_tokens * sizeof(int32_t));
    job->n_answer = event->n_tokens;
    job->finish = event->finish;
    snprintf(job->content, sizeof(job->content), "%s", event->reply.content);
    snprintf(job->thought, sizeof(job->thought), "%s",
             event->reply.thought ? event->reply.thought : "");
}

static struct job *
find_job(struct job *jobs, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (jobs[i].request.id == id)
            return &jobs[i];
    fail_msg("an event for a job that is not there");
    return NULL;
}

/* Submits all, in the order given, and runs until all have ended. */
static uint32_t prefilled; /* rows, in the last run_jobs */

static void
run_jobs(struct ns_engine *engine, struct job *jobs, uint32_t n)
{
    uint32_t n_submitted = 0, n_over = 0;
    struct ns_error err;

    prefilled = 0;

    for (uint32_t pass = 0; n_over < n; pass++) {
        struct ns_pass_report report;
        struct ns_event event;

        assert_in_range(pass, 0, 100000);
        while (n_submitted < n) {
            enum ns_status status = ns_engine_submit(
                engine, &jobs[n_submitted].request, &err);

            if (status == NS_RETRY)
                break;
            if (status != NS_OK)
                fail_msg("%s", err.text);
            n_submitted++;
        }
        if (ns_engine_pass(engine, &report, &err) != NS_OK)
            fail_msg("%s", err.text);
        assert_true(report.n_rows > 0);
        prefilled += report.prefill_rows;
        while (ns_engine_next_event(engine, &event)) {
            struct job *job = find_job(jobs, n, event.id);

            take_event(job, &event);
            n_over += job->done;
        }
        assert_true(ns_kvcache_check(ns_engine_kvcache(engine)));
    }
}

static void
assert_same_answer(const struct job *a, const struct job *b)
{
    assert_false(a->failed);
    assert_false(b->failed);
    assert_int_equal(a->n_answer, b->n_answer);
    assert_memory_equal(a->answer, b->answer, a->n_answer * sizeof(int32_t));
    assert_int_equal(a->finish, b->finish);
    assert_string_equal(a->content, b->content);
    assert_string_equal(a->thought, b->thought);
}

static struct job *
new_jobs(uint32_t n)
{
    struct job *jobs = calloc(n, sizeof(*jobs));

    assert_non_null(jobs);
    return jobs;
}

/* ---- hybrid is ar ----------------------------------------------------------- */

/* Sanitized runs are ten times slower and look for other things. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_PROMPTS = 6 };
#else
enum { N_PROMPTS = 50 };
#endif

static const char *const checkpoints[] = {
    "tests/cases/text_fp32/model",         "tests/cases/gen_fp32/model",
    "tests/cases/window_gt_canvas/model",  "tests/cases/vision_fp32/model",
    "tests/cases/text_bf16_sharded/model", "models/demo",
};

/* Drafts of a random model never agree with it. Here a drafter that knows ar's
 * answer overwrites most of the argmax, so that verdicts of all lengths come
 * up. hybrid's canvases are keyed by the answer position they start at. */
struct oracle {
    const struct job *ar;
    uint32_t n_judged;
    bool off_by_one;
};

static void
draft_well(void *ctx, uint64_t id, const struct ns_canvas *canvas,
           const int32_t *argmax, int32_t *sampled, const float *entropy)
{
    const struct oracle *oracle = ctx;
    const struct job *ar = &oracle->ar[id];

    (void)sampled;
    (void)entropy;
    for (uint32_t i = 0; i < canvas->length; i++) {
        uint32_t at = canvas->block + i;

        if (at < ar->n_answer && ns_mix(at * 131 + id) % 16 != 0)
            ((int32_t *)(uintptr_t)argmax)[i] = ar->answer[at];
    }
}

/* With off_by_one each draft token is judged by the row behind the right one. */
static void
on_judged(void *ctx, uint64_t id, int32_t *row_choice, uint32_t n)
{
    struct oracle *oracle = ctx;

    (void)id;
    oracle->n_judged++;
    if (oracle->off_by_one)
        memmove(row_choice, row_choice + 1, (n - 1) * sizeof(int32_t));
}

/* Returns how many of n answers differ between ar and hybrid. */
static uint32_t
compare_hybrid(struct ns_engine *engine, uint32_t n, float temperature,
               float top_p, bool drafts_agree, bool off_by_one)
{
    struct job *ar = new_jobs(n), *hybrid = new_jobs(n);
    struct oracle oracle = { ar, 0, off_by_one };
    struct ns_trace trace = { .ctx = &oracle, .judged = on_judged };
    uint32_t n_differ = 0, n_kept = 0, n_drafted = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct job *both[] = { &ar[i], &hybrid[i] };

        for (int m = 0; m < 2; m++) {
            make_job(both[m], engine, i, 3 + i * 7 % 90, 20 + i % 50,
                     m ? NS_MODE_HYBRID : NS_MODE_AR);
            both[m]->request.has_temperature = temperature >= 0;
            both[m]->request.temperature = temperature;
            both[m]->request.top_p = top_p;
        }
    }
    run_jobs(engine, ar, n);
    if (drafts_agree)
        trace.sampled = draft_well;
    ns_engine_set_trace(engine, &trace);
    run_jobs(engine, hybrid, n);
    ns_engine_set_trace(engine, NULL);
    for (uint32_t i = 0; i < n; i++) {
        if (off_by_one)
            n_differ += ar[i].n_answer != hybrid[i].n_answer ||
                        memcmp(ar[i].answer, hybrid[i].answer,
                               ar[i].n_answer * sizeof(int32_t)) != 0;
        else
            assert_same_answer(&ar[i], &hybrid[i]);
        n_kept += hybrid[i].usage.kept;
        n_drafted += hybrid[i].usage.drafted;
    }
    if (drafts_agree && !off_by_one) {
        assert_in_range(oracle.n_judged, n, 100 * n);
        assert_true(n_kept > 2 * n && n_kept < n_drafted);
    }
    free(ar);
    free(hybrid);
    return n_differ;
}

static void
hybrid_equals_ar_on_every_checkpoint_at_any_temperature(void **state)
{
    const float temperature[] = { -1, 0, 0.3f, 1.0f, 1.0f };
    const float top_p[] = { 1, 1, 1, 1, 0.8f };

    (void)state;
    for (size_t c = 0; c < sizeof(checkpoints) / sizeof(checkpoints[0]);
         c++) {
        struct folder folder = link_folder(checkpoints[c]);
        struct ns_engine_options options = plain_options(&folder);
        struct ns_engine *engine = open_engine(&options);

        for (int t = 0; t < 5; t++)
            compare_hybrid(engine, N_PROMPTS, temperature[t], top_p[t], true,
                           false);
        compare_hybrid(engine, N_PROMPTS / 5 + 1, 1.0f, 1, false, false);
        ns_engine_close(engine);
        remove_folder(&folder);
    }
}

/* With rows as they are, and rounded in front of products. */
static void
hybrid_equals_ar_in_fp8(void **state)
{
    static const char *const arithmetic[] = { "fp32", "fp8" };
    struct tiny_recipe recipe = tiny_recipe();
    char *directory;

    (void)state;
    recipe.fp8 = true;
    directory = tiny_make(&recipe);
    tiny_add_tokenizer(directory);
    for (int i = 0; i < 2; i++) {
        struct folder none = { "" };
        struct ns_engine_options options = plain_options(&none);
        struct ns_engine *engine;

        options.model_directory = directory;
        options.backend.arithmetic = arithmetic[i];
        engine = open_engine(&options);
        compare_hybrid(engine, N_PROMPTS / 2, 0, 1, true, false);
        compare_hybrid(engine, N_PROMPTS / 2, 1, 0.8f, true, false);
        ns_engine_close(engine);
    }
    tiny_remove(directory);
}

static void
a_verifier_that_is_off_by_one_row_is_noticed(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);

    (void)state;
    assert_in_range(compare_hybrid(engine, N_PROMPTS, 0, 1, true, true),
                    N_PROMPTS / 2, N_PROMPTS);
    assert_in_range(compare_hybrid(engine, N_PROMPTS, 1, 1, true, true),
                    N_PROMPTS / 2, N_PROMPTS);
    ns_engine_close(engine);
    remove_folder(&folder);
}

/* ---- results do not depend on company ---------------------------------------- */

enum { N_PACKED = 32 };

static void
make_mixed(struct job *jobs, struct ns_engine *engine)
{
    const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                   NS_MODE_HYBRID, NS_MODE_DIFFUSION };

    for (uint32_t i = 0; i < N_PACKED; i++) {
        make_job(&jobs[i], engine, i, 2 + i * 13 % 150, 10 + i * 5 % 70,
                 modes[i % 4]);
        jobs[i].request.has_temperature = i % 3 == 1;
        jobs[i].request.temperature = 0.9f;
        jobs[i].request.canvas_length = i % 5 == 4 ? 16 : 0;
    }
}

static void
run_packed(const struct folder *folder, struct job *jobs,
           uint32_t pass_tokens, uint32_t n_threads, const char *isa,
           uint32_t max_sequences, bool plain)
{
    struct ns_engine_options options = plain_options(folder);
    struct ns_engine *engine;

    options.pass_tokens = pass_tokens;
    options.backend.n_threads = n_threads;
    options.backend.isa = isa;
    options.max_sequences = max_sequences;
    options.kv_plain = plain;
    engine = open_engine(&options);
    make_mixed(jobs, engine);
    run_jobs(engine, jobs, N_PACKED);
    ns_engine_close(engine);
}

static void
a_job_gives_the_same_bytes_alone_packed_reordered_and_chunked(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *alone = new_jobs(N_PACKED), *packed = new_jobs(N_PACKED);

    (void)state;
    make_mixed(alone, engine);
    for (uint32_t i = 0; i < N_PACKED; i++)
        run_jobs(engine, &alone[i], 1);

    make_mixed(packed, engine); /* the other way round */
    for (uint32_t i = 0; i < N_PACKED / 2; i++) {
        struct job held = packed[i];

        packed[i] = packed[N_PACKED - 1 - i];
        packed[N_PACKED - 1 - i] = held;
    }
    for (uint32_t i = 0; i < N_PACKED; i++)
        packed[i].request.prompt = packed[i].prompt;
    run_jobs(engine, packed, N_PACKED);
    for (uint32_t i = 0; i < N_PACKED; i++)
        assert_same_answer(&alone[i], find_job(packed, N_PACKED, i));
    ns_engine_close(engine);

    const struct {
        uint32_t pass_tokens, n_threads, max_sequences;
        bool plain;
    } ways[] = { { 512, 1, 32, false }, { 512, 2, 32, false },
                 { 33, 1, 3, false },   { 64, 2, 7, true },
                 { 2048, 2, 32, true } };

    for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
        run_packed(&folder, packed, ways[w].pass_tokens, ways[w].n_threads,
                   NULL, ways[w].max_sequences, ways[w].plain);
        for (uint32_t i = 0; i < N_PACKED; i++)
            assert_same_answer(&alone[i], &packed[i]);
    }
    free(alone);
    free(packed);
    remove_folder(&folder);
}

static void
avx2_and_avx512_give_the_same_bytes_in_fp32(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct job *a = new_jobs(N_PACKED), *b = new_jobs(N_PACKED);

    (void)state;
    if (__builtin_cpu_supports("avx512f")) {
        run_packed(&folder, a, 512, 2, "avx2", 16, false);
        run_packed(&folder, b, 512, 2, "avx512", 16, false);
        for (uint32_t i = 0; i < N_PACKED; i++)
            assert_same_answer(&a[i], &b[i]);
    }
    free(a);
    free(b);
    remove_folder(&folder);
}

static void
a_job_resumed_from_any_block_ends_with_the_same_bytes(void **state)
{
    const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                   NS_MODE_HYBRID };
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *whole = new_jobs(1), *resumed = new_jobs(1);
    uint32_t n_resumed = 0, steps, known;

    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        make_job(whole, engine, i, 5 + i * 11, 150, modes[i % 3]);
        whole->request.has_temperature = i % 2;
        whole->request.temperature = 0.8f;
        run_jobs(engine, whole, 1);
        steps = whole->usage.denoise_steps;
        for (uint32_t b = 0; b < whole->n_blocks; b++) {
            memcpy(resumed, whole, sizeof(*whole));
            resumed->done = false;
            resumed->n_blocks = resumed->n_answer = 0;
            resumed->request.prompt = resumed->prompt;
            resumed->request.resume = whole->answer;
            resumed->request.n_resume = whole->block_end[b];
            resumed->request.resume_blocks = b + 1;
            run_jobs(engine, resumed, 1);
            assert_same_answer(whole, resumed);
            assert_int_equal(whole->usage.completion_tokens,
                             resumed->usage.completion_tokens);
            /* One prefill of what is known, less what is not run again in any
             * case, and no step of a block that was committed. */
            known = resumed->request.n_prompt + resumed->request.n_resume;
            assert_in_range(prefilled + resumed->usage.cached_tokens,
                            known - resumed->request.canvas_length, known);
            if (modes[i % 3] == NS_MODE_DIFFUSION)
                assert_true(resumed->usage.denoise_steps < steps);
            steps = resumed->usage.denoise_steps;
            n_resumed++;
        }
    }
    assert_in_range(n_resumed, 12, 1000);
    free(whole);
    free(resumed);
    ns_engine_close(engine);
    remove_folder(&folder);
}

/* ---- pages ------------------------------------------------------------------- */

static void
when_pages_run_out_jobs_are_put_back_and_all_end_the_same(void **state)
{
    struct folder folder = make_folder("text_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct job *roomy = new_jobs(24), *tight = new_jobs(24);
    struct ns_engine *engine = open_engine(&options);
    uint64_t put_back;

    (void)state;
    for (int round = 0; round < 2; round++) {
        struct job *jobs = round ? tight : roomy;

        if (round) {
            /* Room for little more than one job at its longest, and admission
             * that believes in short answers. */
            const struct ns_memory_plan *plan = ns_engine_memory(engine);

            options.kv_bytes = 12 * plan->full_page_bytes +
                               30 * plan->sliding_page_bytes;
            options.reserve_tokens = 1;
            ns_engine_close(engine);
            engine = open_engine(&options);
        }
        for (uint32_t i = 0; i < 24; i++)
            make_job(&jobs[i], engine, i, 10 + i * 5, 220,
                     i % 2 ? NS_MODE_AR : NS_MODE_DIFFUSION);
        run_jobs(engine, jobs, 24);
    }
    put_back = ns_engine_load(engine).put_back;
    for (uint32_t i = 0; i < 24; i++)
        assert_same_answer(&roomy[i], &tight[i]);
    assert_true(put_back > 0);
    assert_int_equal(ns_engine_load(engine).full_pages_free,
                     ns_engine_memory(engine)->full_pages);
    free(roomy);
    free(tight);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
a_shared_prefix_is_computed_once_and_changes_no_byte(void **state)
{
    struct folder folder = make_folder("window_gt_canvas");
    struct ns_engine_options options = plain_options(&folder);
    struct job *shared = new_jobs(8), *apart = new_jobs(8);

    (void)state;
    for (int round = 0; round < 2; round++) {
        struct job *jobs = round ? apart : shared;
        struct ns_engine *engine;
        uint32_t n_cached = 0;

        options.no_prefix_sharing = round;
        options.pass_tokens = 50; /* forks while the first still prefills */
        engine = open_engine(&options);
        for (uint32_t i = 0; i < 8; i++) {
            make_job(&jobs[i], engine, i, 300 + 10 * i, 40,
                     i % 2 ? NS_MODE_HYBRID : NS_MODE_DIFFUSION);
            for (uint32_t j = 0; j < 270; j++)
                jobs[i].prompt[j] = 120 + (int32_t)(j * j % 300);
        }
        run_jobs(engine, jobs, 8);
        for (uint32_t i = 0; i < 8; i++)
            n_cached += jobs[i].usage.cached_tokens;
        /* Four whole pages of 64 lie in the common 270 tokens. */
        assert_int_equal(n_cached, round ? 0 : 7 * 256);
        ns_engine_close(engine);
    }
    for (uint32_t i = 0; i < 8; i++)
        assert_same_answer(&shared[i], &apart[i]);
    free(shared);
    free(apart);
    remove_folder(&folder);
}

/* ---- limits on the answer ------------------------------------------------------ */

static void
max_tokens_cuts_exactly_in_every_mode(void **state)
{
    const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                   NS_MODE_HYBRID };
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *longest = new_jobs(1), *job = new_jobs(1);

    (void)state;
    for (int m = 0; m < 3; m++) {
        make_job(longest, engine, 3, 20, 100, modes[m]);
        run_jobs(engine, longest, 1);
        for (uint32_t most = 1; most < 100; most += 6) {
            make_job(job, engine, 3, 20, most, modes[m]);
            run_jobs(engine, job, 1);
            if (most < longest->n_answer) {
                assert_int_equal(job->n_answer, most);
                assert_int_equal(job->finish, NS_FINISH_LENGTH);
                assert_int_equal(job->usage.completion_tokens, most);
            }
            assert_memory_equal(job->answer, longest->answer,
                                job->n_answer * sizeof(int32_t));
        }
    }
    free(longest);
    free(job);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
a_thinking_budget_closes_the_thought_and_goes_on(void **state)
{
    const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                   NS_MODE_HYBRID };
    struct folder folder = make_folder("text_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    int32_t close_id = ns_tokenizer_id(ns_engine_tokenizer(engine),
                                       "<channel|>");
    struct job *jobs = new_jobs(3);

    (void)state;
    assert_true(close_id > 0);
    for (uint32_t budget = 5; budget < 60; budget += 13) {
        for (int m = 0; m < 3; m++) {
            make_job(&jobs[m], engine, 40, 12, 120, modes[m]);
            jobs[m].request.thinking = jobs[m].request.in_thought = true;
            jobs[m].request.thinking_budget = budget;
            run_jobs(engine, &jobs[m], 1);
            /* Nothing in these random answers closes the thought earlier. */
            assert_int_equal(jobs[m].answer[budget + 1], close_id);
            assert_in_range(jobs[m].usage.reasoning_tokens, budget,
                            budget + 2);
            assert_true(jobs[m].n_answer > budget + 2);
        }
        assert_same_answer(&jobs[1], &jobs[2]);
    }
    free(jobs);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
a_stop_string_cuts_in_front_of_it_wherever_it_falls(void **state)
{
    const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                   NS_MODE_HYBRID };
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *whole = new_jobs(1), *cut = new_jobs(1);
    uint32_t n_cut = 0;

    (void)state;
    for (uint32_t i = 0; i < 30; i++) {
        size_t length;

        make_job(whole, engine, i, 9, 100, modes[i % 3]);
        run_jobs(engine, whole, 1);
        length = strlen(whole->content);
        for (size_t at = 1; at + 4 < length; at += length / 5 + 1) {
            char stop[8];
            const char *stops[] = { "never in there", stop };
            const char *first;

            snprintf(stop, sizeof(stop), "%.3s", whole->content + at);
            if ((unsigned char)stop[0] >= 0x80 ||
                (unsigned char)stop[2] >= 0x80)
                continue; /* not within a character */
            first = strstr(whole->content, stop);
            make_job(cut, engine, i, 9, 100, modes[i % 3]);
            cut->request.stop = stops;
            cut->request.n_stop = 2;
            run_jobs(engine, cut, 1);
            if (cut->finish != NS_FINISH_STOP)
                fail_msg("\"%s\" in \"%s\" did not stop \"%s\"", stop,
                         whole->content, cut->content);
            assert_int_equal(strlen(cut->content),
                             (size_t)(first - whole->content));
            assert_memory_equal(cut->content, whole->content,
                                strlen(cut->content));
            n_cut++;
        }
    }
    assert_in_range(n_cut, 10, 1000);
    free(whole);
    free(cut);
    ns_engine_close(engine);
    remove_folder(&folder);
}

/* ---- one job's trouble is its own ---------------------------------------------- */

static void
spoil_one(void *ctx, uint64_t id, const struct ns_canvas *canvas,
          const int32_t *argmax, int32_t *sampled, const float *entropy)
{
    (void)ctx;
    (void)argmax;
    (void)sampled;
    if (id == 3 && canvas->n_steps == 2)
        ((float *)(uintptr_t)entropy)[5] = NAN;
}

static void
logits_that_are_no_numbers_fail_one_job_and_no_other(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct ns_trace trace = { .sampled = spoil_one };
    struct job *clean = new_jobs(6), *spoiled = new_jobs(6);

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        make_job(&clean[i], engine, i, 30, 60, NS_MODE_DIFFUSION);
        make_job(&spoiled[i], engine, i, 30, 60, NS_MODE_DIFFUSION);
    }
    run_jobs(engine, clean, 6);
    ns_engine_set_trace(engine, &trace);
    run_jobs(engine, spoiled, 6);
    for (uint32_t i = 0; i < 6; i++)
        if (i == 3) {
            assert_true(spoiled[i].failed);
            assert_int_equal(spoiled[i].error.status, NS_RETRY);
            assert_string_equal(spoiled[i].error.code, "nan_logits");
        } else {
            assert_same_answer(&clean[i], &spoiled[i]);
        }
    free(clean);
    free(spoiled);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
a_cancelled_job_leaves_no_page_and_no_event(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *jobs = new_jobs(20);
    struct ns_error err;

    (void)state;
    for (uint32_t i = 0; i < 20; i++) {
        make_job(&jobs[i], engine, i, 100, 100, NS_MODE_DIFFUSION);
        assert_int_equal(ns_engine_submit(engine, &jobs[i].request, &err),
                         NS_OK);
    }
    for (int pass = 0; pass < 5; pass++) {
        struct ns_pass_report report;

        assert_int_equal(ns_engine_pass(engine, &report, &err), NS_OK);
    }
    for (uint32_t i = 0; i < 20; i++)
        ns_engine_cancel(engine, i);
    assert_int_equal(ns_engine_load(engine).running, 0);
    assert_int_equal(ns_engine_load(engine).waiting, 0);
    assert_int_equal(ns_engine_load(engine).full_pages_free,
                     ns_engine_memory(engine)->full_pages);
    assert_true(ns_kvcache_check(ns_engine_kvcache(engine)));
    free(jobs);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
cancelling_while_events_are_read_loses_none_of_the_others(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct job *jobs = new_jobs(8), *whole = new_jobs(8);
    uint32_t n_over = 0, n_cancelled = 0;
    struct ns_error err;

    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        make_job(&jobs[i], engine, i, 20, 90, NS_MODE_DIFFUSION);
        make_job(&whole[i], engine, i, 20, 90, NS_MODE_DIFFUSION);
    }
    run_jobs(engine, whole, 8);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(ns_engine_submit(engine, &jobs[i].request, &err),
                         NS_OK);
    for (int pass = 0; n_over + n_cancelled < 8 && pass < 1000; pass++) {
        struct ns_pass_report report;
        struct ns_event event;

        assert_int_equal(ns_engine_pass(engine, &report, &err), NS_OK);
        while (ns_engine_next_event(engine, &event)) {
            struct job *job = find_job(jobs, 8, event.id);

            take_event(job, &event);
            n_over += job->done;
            if (event.kind == NS_EVENT_BLOCK && event.id % 2) {
                ns_engine_cancel(engine, event.id); /* block still readable */
                assert_memory_equal(event.tokens, job->answer,
                                    event.n_tokens * sizeof(int32_t));
                n_cancelled++;
            }
        }
    }
    assert_true(n_cancelled > 0);
    assert_int_equal(n_over + n_cancelled, 8);
    for (uint32_t i = 0; i < 8; i += 2)
        assert_same_answer(&jobs[i], &whole[i]);
    free(jobs);
    free(whole);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
what_can_never_run_is_refused_with_the_numbers(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct ns_request base, request;
    struct job *job = new_jobs(1);
    struct ns_error err;

    (void)state;
    make_job(job, engine, 1, 50, 40, NS_MODE_DIFFUSION);
    base = job->request;
#define REFUSED(change, code_, text_)                                        \
    do {                                                                     \
        request = base;                                                      \
        change;                                                              \
        assert_int_equal(ns_engine_check(engine, &request, &err),            \
                         NS_REJECT);                                         \
        assert_string_equal(err.code, code_);                                \
        if (!strstr(err.text, text_))                                        \
            fail_msg("\"%s\" does not say \"%s\"", err.text, text_);         \
        /* A field by its full name; "messages" gets it in daemon/. */       \
        if (err.param[0] && !strchr(err.param, '.') &&                       \
            strcmp(err.param, "messages") != 0)                              \
            fail_msg("\"%s\" is no full name", err.param);                   \
    } while (0)
    REFUSED(request.n_prompt = 0, "empty_prompt", "no tokens");
    REFUSED(request.max_tokens = 5000, "over_context", "4096");
    REFUSED(request.max_tokens = 0, "bad_param", "at least 1");
    REFUSED(request.n_prompt = 4090, "over_context", "4090");
    REFUSED(request.canvas_length = 24, "bad_param", "24");
    REFUSED(request.canvas_length = 48, "bad_param", "32");
    REFUSED(request.top_p = 0.5f, "unsupported", "top_p");
    REFUSED(request.top_p = 0, "bad_param", "top_p");
    REFUSED((request.has_temperature = true, request.temperature = 3),
            "bad_param", "3");
    REFUSED((request.has_temperature = true, request.temperature = NAN),
            "bad_param", "nan");
    REFUSED(request.sampler.t_min = 0, "bad_param", "t_min");
    REFUSED(request.sampler.t_max = 0.1f, "bad_param", "t_max");
    REFUSED(request.sampler.entropy_bound = NAN, "bad_param", "entropy");
    REFUSED(request.sampler.max_denoising_steps = 0, "bad_param", "steps");
    REFUSED(job->prompt[7] = 512, "bad_param", "512");
    job->prompt[7] = 200;
    REFUSED(request.n_prompt = 5000, "over_context", "5000");
#undef REFUSED
    assert_int_equal(ns_engine_check(engine, &base, &err), NS_OK);
    ns_engine_close(engine);

    /* Too large for the pool alone, though not for the context. */
    options.kv_bytes = 2 << 20;
    engine = open_engine(&options);
    base.max_tokens = 3500;
    assert_int_equal(ns_engine_check(engine, &base, &err), NS_REJECT);
    assert_string_equal(err.code, "over_memory");
    free(job);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
priorities_come_first_and_nobody_starves(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine;
    struct job *jobs = new_jobs(20);
    struct ns_error err;
    uint32_t order[20], n_over = 0;

    (void)state;
    options.max_sequences = 5;
    engine = open_engine(&options);
    for (uint32_t i = 0; i < 20; i++) {
        make_job(&jobs[i], engine, i, 20, 64, NS_MODE_DIFFUSION);
        jobs[i].request.priority = i < 10 ? -5 : 5;
        assert_int_equal(ns_engine_submit(engine, &jobs[i].request, &err),
                         NS_OK);
    }
    for (int pass = 0; n_over < 20 && pass < 10000; pass++) {
        struct ns_pass_report report;
        struct ns_event event;

        assert_int_equal(ns_engine_pass(engine, &report, &err), NS_OK);
        while (ns_engine_next_event(engine, &event))
            if (event.kind == NS_EVENT_DONE)
                order[n_over++] = (uint32_t)event.id;
    }
    assert_int_equal(n_over, 20);
    for (uint32_t i = 0; i < 6; i++)
        assert_in_range(order[i], 10, 19);
    free(jobs);
    ns_engine_close(engine);
    remove_folder(&folder);
}

/* ---- pictures --------------------------------------------------------------- */

enum { N_PICTURES = 4, MOST_IMAGES = 3 };

static void
make_pictures(const struct ns_engine *engine,
              struct ns_image picture[N_PICTURES])
{
    const struct ns_vision_config *vision =
        &ns_engine_model(engine)->config.vision;
    static const uint32_t sizes[N_PICTURES][2] = {
        { 30, 40 }, { 9, 200 }, { 64, 64 }, { 30, 40 },
    };
    uint8_t *rgb = malloc(64 * 64 * 3);
    struct ns_error err;

    for (uint32_t p = 0; p < N_PICTURES; p++) {
        for (uint32_t i = 0; i < 64 * 64 * 3; i++)
            rgb[i] = (uint8_t)ns_draw(3, p, 0, NS_DRAW_CANVAS, i / 30);
        assert_int_equal(ns_image_prepare(vision, rgb, sizes[p][0],
                                          sizes[p][1], 70, &picture[p], &err),
                         NS_OK);
    }
    free(rgb);
}

static void
free_pictures(struct ns_image picture[N_PICTURES])
{
    for (uint32_t p = 0; p < N_PICTURES; p++)
        ns_image_fini(&picture[p]);
}

/* Puts the picture into the prompt behind its first `at` tokens. */
static void
show(struct job *job, const struct ns_engine *engine,
     const struct ns_image *picture, struct ns_request_image *image,
     uint32_t at)
{
    const struct ns_config *config = &ns_engine_model(engine)->config;
    uint32_t n = picture->size.n_tokens;

    assert_in_range(job->request.n_prompt + n + 2, 0, MAX_PROMPT);
    memmove(job->prompt + at + n + 2, job->prompt + at,
            (job->request.n_prompt - at) * sizeof(int32_t));
    job->prompt[at] = config->image_begin_id;
    for (uint32_t i = 0; i < n; i++)
        job->prompt[at + 1 + i] = config->image_id;
    job->prompt[at + 1 + n] = config->image_end_id;
    job->request.n_prompt += n + 2;
    image[job->request.n_images++] = (struct ns_request_image){ at + 1,
                                                                picture };
    job->request.images = image;
}

static void
pictures_packed_chunked_and_put_back_change_no_byte(void **state)
{
    static const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                          NS_MODE_HYBRID };
    static const struct {
        uint32_t pass_tokens, max_sequences;
        bool tight; /* room for little more than the longest job */
    } ways[] = { { 512, 1, false }, { 512, 12, false }, { 50, 12, false },
                 { 100, 12, true } };
    struct ns_memory_plan plan = { 0 };
    struct folder folder = make_folder("vision_fp32");
    struct job *want = new_jobs(12), *jobs = new_jobs(12);
    bool put_back = false;

    (void)state;
    for (int way = 0; way < 4; way++) {
        struct ns_request_image image[12][MOST_IMAGES];
        struct ns_engine_options options = plain_options(&folder);
        struct ns_image picture[N_PICTURES];
        struct ns_engine *engine;
        struct ns_engine_load load;

        options.pass_tokens = ways[way].pass_tokens;
        options.max_sequences = ways[way].max_sequences;
        options.reserve_tokens = 1;
        /* Plain pages are of one size in both pools: ten and ten. */
        options.kv_plain = ways[way].tight;
        if (ways[way].tight)
            options.kv_bytes = 20 * plan.sliding_page_bytes;
        engine = open_engine(&options);
        plan = *ns_engine_memory(engine);
        make_pictures(engine, picture);
        for (uint32_t i = 0; i < 12; i++) {
            struct job *job = &jobs[i];

            make_job(job, engine, i, 20 + i, 128, modes[i % 3]);
            for (uint32_t p = 0; p < i % (MOST_IMAGES + 1); p++)
                show(job, engine, &picture[(i + p) % N_PICTURES], image[i],
                     p ? image[i][p - 1].position +
                             image[i][p - 1].image->size.n_tokens + 1 +
                             (i % 2) * 3
                       : i % 20);
        }
        run_jobs(engine, jobs, 12);
        load = ns_engine_load(engine);
        assert_int_equal(load.images_encoded, N_PICTURES);
        assert_true(load.images_asked > N_PICTURES);
        put_back = put_back || load.put_back > 0;
        for (uint32_t i = 0; i < 12 && way > 0; i++)
            assert_same_answer(&want[i], &jobs[i]);
        if (way == 0)
            memcpy(want, jobs, 12 * sizeof(*want));
        free_pictures(picture);
        ns_engine_close(engine);
    }
    assert_true(put_back);
    free(want);
    free(jobs);
    remove_folder(&folder);
}

static void
a_prefix_is_shared_with_the_same_picture_and_never_in_part(void **state)
{
    struct folder folder = make_folder("vision_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine = open_engine(&options);
    struct ns_image picture[N_PICTURES];
    struct ns_request_image image[4];
    struct job *jobs = new_jobs(4);
    uint32_t n = 0;

    (void)state;
    make_pictures(engine, picture);
    /* The same tokens throughout: pictures 0 and 3 are of one size. Job 2 asks
     * something else behind the first picture, in its last page. */
    assert_int_equal(picture[0].size.n_tokens, picture[3].size.n_tokens);
    n = picture[0].size.n_tokens;
    for (uint32_t i = 0; i < 4; i++) {
        make_job(&jobs[i], engine, 7, 200, 32, NS_MODE_DIFFUSION);
        show(&jobs[i], engine, &picture[i == 1 ? 3 : 0], &image[i], 100);
    }
    jobs[2].prompt[101 + n + 1] ^= 1;
    run_jobs(engine, &jobs[0], 1);
    run_jobs(engine, &jobs[1], 1);
    run_jobs(engine, &jobs[2], 1);
    run_jobs(engine, &jobs[3], 1);
    assert_int_equal(jobs[0].usage.cached_tokens, 0);
    assert_int_equal(jobs[1].usage.cached_tokens, 64);
    assert_true((101 + n) % NS_PAGE != 0); /* it ends inside a page */
    assert_int_equal(jobs[2].usage.cached_tokens, 64);
    assert_true(jobs[3].usage.cached_tokens >= 101 + n);
    assert_int_equal(jobs[0].usage.image_tokens, n);
    assert_same_answer(&jobs[0], &jobs[3]);

    options.no_prefix_sharing = true;
    for (uint32_t i = 1; i < 3; i++) {
        struct job *alone = new_jobs(1);
        struct ns_engine *other = open_engine(&options);

        alone->request = jobs[i].request;
        run_jobs(other, alone, 1);
        assert_same_answer(alone, &jobs[i]);
        ns_engine_close(other);
        free(alone);
    }
    free_pictures(picture);
    free(jobs);
    ns_engine_close(engine);
    remove_folder(&folder);
}

static void
pictures_that_do_not_fit_their_prompt_are_refused(void **state)
{
    struct folder folder = make_folder("vision_fp32");
    struct tiny_recipe recipe = tiny_recipe();
    char *blind_directory = tiny_make(&recipe); /* without a tower */
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine_options blind_options = options;
    struct ns_engine *engine = open_engine(&options);
    struct ns_engine *blind;
    struct ns_image picture[N_PICTURES];
    struct ns_request_image image[2];
    struct job *job = new_jobs(1);
    struct ns_error err;

    (void)state;
    tiny_add_tokenizer(blind_directory);
    blind_options.model_directory = blind_directory;
    blind = open_engine(&blind_options);
    make_pictures(engine, picture);
    make_job(job, engine, 1, 40, 32, NS_MODE_DIFFUSION);
    show(job, engine, &picture[0], image, 10);
    assert_int_equal(ns_engine_check(engine, &job->request, &err), NS_OK);
    assert_int_equal(ns_engine_check(blind, &job->request, &err), NS_REJECT);
    assert_string_equal(err.code, "unsupported");
    image[0].position++; /* the last is the end marker */
    assert_int_equal(ns_engine_check(engine, &job->request, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "no placeholder"));
    image[0].position = job->request.n_prompt - 1;
    assert_int_equal(ns_engine_check(engine, &job->request, &err), NS_REJECT);
    image[0].position = 11;
    image[1] = image[0]; /* twice in one place */
    job->request.n_images = 2;
    assert_int_equal(ns_engine_check(engine, &job->request, &err), NS_REJECT);
    job->request.n_images = 1;
    picture[0].size.width = 4 * 300; /* the model knows 256 places */
    assert_int_equal(ns_engine_check(engine, &job->request, &err), NS_REJECT);
    assert_string_equal(err.code, "image_limit");
    free_pictures(picture);
    free(job);
    ns_engine_close(engine);
    ns_engine_close(blind);
    remove_folder(&folder);
    tiny_remove(blind_directory);
}

/* ---- who goes first -------------------------------------------------------- */

/* Five jobs of prompts that long fill every pass; an urgent one that comes
 * after some passes goes into the next, and is the first to end. */
static void
press_into(struct ns_engine *engine, uint32_t n_prompt)
{
    struct job *jobs = new_jobs(6);
    struct ns_error err;
    bool over = false;

    for (uint32_t i = 0; i < 6; i++) {
        bool urgent = i == 5;

        make_job(&jobs[i], engine, i, urgent ? 30 : n_prompt,
                 urgent ? 16 : 160, NS_MODE_DIFFUSION);
        jobs[i].request.priority = urgent ? 3 : 0;
        if (!urgent &&
            ns_engine_submit(engine, &jobs[i].request, &err) != NS_OK)
            fail_msg("%s", err.text);
    }
    for (uint32_t pass = 0; !over; pass++) {
        uint32_t running = ns_engine_load(engine).running;
        struct ns_pass_report report;
        struct ns_event event;

        assert_in_range(pass, 0, 500);
        if (pass == 5 &&
            ns_engine_submit(engine, &jobs[5].request, &err) != NS_OK)
            fail_msg("%s", err.text);
        if (ns_engine_pass(engine, &report, &err) != NS_OK)
            fail_msg("%s", err.text);
        if (pass == 5)
            assert_int_equal(ns_engine_load(engine).running, running + 1);
        while (ns_engine_next_event(engine, &event))
            if (event.kind == NS_EVENT_DONE) {
                assert_int_equal(event.id, 5);
                over = true;
            }
    }
    for (uint32_t i = 0; i < 5; i++)
        ns_engine_cancel(engine, i);
    free(jobs);
}

static void
an_urgent_job_goes_into_passes_that_prompts_or_canvases_fill(void **state)
{
    struct folder folder = make_folder("gen_fp32");
    struct ns_engine_options options = plain_options(&folder);
    struct ns_engine *engine;

    (void)state;
    options.pass_tokens = 64;
    engine = open_engine(&options);
    press_into(engine, 400);
    press_into(engine, 20);
    ns_engine_close(engine);
    remove_folder(&folder);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hybrid_equals_ar_on_every_checkpoint_at_any_temperature),
        cmocka_unit_test(hybrid_equals_ar_in_fp8),
        cmocka_unit_test(a_verifier_that_is_off_by_one_row_is_noticed),
        cmocka_unit_test(a_job_gives_the_same_bytes_alone_packed_reordered_and_chunked),
        cmocka_unit_test(avx2_and_avx512_give_the_same_bytes_in_fp32),
        cmocka_unit_test(a_job_resumed_from_any_block_ends_with_the_same_bytes),
        cmocka_unit_test(when_pages_run_out_jobs_are_put_back_and_all_end_the_same),
        cmocka_unit_test(a_shared_prefix_is_computed_once_and_changes_no_byte),
        cmocka_unit_test(max_tokens_cuts_exactly_in_every_mode),
        cmocka_unit_test(a_thinking_budget_closes_the_thought_and_goes_on),
        cmocka_unit_test(a_stop_string_cuts_in_front_of_it_wherever_it_falls),
        cmocka_unit_test(logits_that_are_no_numbers_fail_one_job_and_no_other),
        cmocka_unit_test(a_cancelled_job_leaves_no_page_and_no_event),
        cmocka_unit_test(cancelling_while_events_are_read_loses_none_of_the_others),
        cmocka_unit_test(what_can_never_run_is_refused_with_the_numbers),
        cmocka_unit_test(priorities_come_first_and_nobody_starves),
        cmocka_unit_test(pictures_packed_chunked_and_put_back_change_no_byte),
        cmocka_unit_test(a_prefix_is_shared_with_the_same_picture_and_never_in_part),
        cmocka_unit_test(pictures_that_do_not_fit_their_prompt_are_refused),
        cmocka_unit_test(an_urgent_job_goes_into_passes_that_prompts_or_canvases_fill),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
