/* Answers under a grammar: paths through canvases, masks, and whole jobs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/constraint.h"
#include "engine/engine.h"
#include "engine/rng.h"
#include "tests/engine/machine.h"
#include "tests/tiny.h"

enum { N = 9, LONGEST = 700, PROMPT = 40, CANVAS = 64 };

static const char *const sources[] = {
    "red|green|blueish tint",
    "\\{\"name\":\"[a-z ]{1,12}\",\"n\":-?[0-9]{1,6}\\}",
    "([a-f0-9]{4}-){6}[A-Z]{3,30}\xc3\xa9{2}",
    "(yes|no)(, (yes|no)){20,30}\\.",
};

enum { N_SOURCES = 4 };

static struct ns_grammar *
grammar_of(const char *pattern)
{
    struct ns_grammar *grammar = NULL;
    struct ns_error err;

    if (ns_grammar_regex(pattern, strlen(pattern), &grammar, &err) != NS_OK)
        fail_msg("%s: %s", pattern, err.text);
    return grammar;
}

/* ---- guides alone ---------------------------------------------------------- */

struct bare {
    struct ns_tokenizer *tokenizer;
    struct ns_constraints *c;
};

static void
bare_open(struct bare *bare, size_t automaton_bytes)
{
    static const int32_t ends[] = { 1, 106, 50 };
    struct ns_constraint_options options = {
        .vocab = 512, .end_id = ends, .n_end = 3, .call_id = 50,
        .max_sequences = 3, .canvas_length = CANVAS,
        .automaton_bytes = automaton_bytes,
    };
    struct ns_error err;

    if (ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                          &bare->tokenizer, &err) != NS_OK)
        fail_msg("%s", err.text);
    options.tokenizer = bare->tokenizer;
    if (ns_constraints_create(&options, &bare->c, &err) != NS_OK)
        fail_msg("%s", err.text);
}

static void
bare_close(struct bare *bare)
{
    ns_constraints_destroy(bare->c);
    ns_tokenizer_close(bare->tokenizer);
}

static struct ns_guide *
guide_of(struct bare *bare, const struct ns_grammar *grammar, bool thinking,
         bool in_thought)
{
    struct ns_guide *guide = NULL;
    struct ns_error err;

    if (ns_guide_create(bare->c, grammar, thinking, in_thought, &guide,
                        &err) != NS_OK)
        fail_msg("%s", err.text);
    ns_guide_follow(guide, NULL, 0);
    return guide;
}

static bool
allowed(const uint32_t *mask, int32_t id)
{
    return mask[id / 32] >> id % 32 & 1;
}

/* Text of tokens; "<end>" where one ends it. */
static void
text_of(const struct bare *bare, const int32_t *ids, uint32_t n, char *out)
{
    size_t at = 0;

    for (uint32_t i = 0; i < n && ids[i] != 1 && ids[i] != 106; i++)
        at += ns_tokenizer_bytes(bare->tokenizer, ids[i], out + at, 64);
    out[at] = '\0';
}

static void
a_mask_has_the_tokens_whose_bytes_go_on(void **state)
{
    struct bare bare;
    struct ns_grammar *grammar = grammar_of("(red|green){1,2}");
    struct ns_automaton *a = machine_over(grammar_of("(red|green){1,2}"));
    const uint32_t *mask[CANVAS + 1];
    struct ns_guide *guide;
    int32_t answer[16];
    uint32_t n = 0;

    (void)state;
    bare_open(&bare, 0);
    guide = guide_of(&bare, grammar, false, false);
    for (uint64_t r = 1; n < 10; r++) { /* a way through, by chance */
        char text[512], bytes[64];
        uint32_t place, n_allowed = 0;

        ns_constraints_begin_pass(bare.c);
        ns_guide_follow(guide, answer, n);
        assert_int_equal(ns_guide_masks(guide, NULL, 0, mask), 1);
        text_of(&bare, answer, n, text);
        place = machine_run(a, text, strlen(text));
        for (int32_t id = 0; id < 512; id++) {
            size_t length = ns_tokenizer_bytes(bare.tokenizer, id, bytes, 64);
            uint32_t next = place;

            for (size_t i = 0; i < length; i++)
                next = ns_automaton_next(a, next, (uint8_t)bytes[i]);
            if (id == 1 || id == 106)
                assert_int_equal(allowed(mask[0], id),
                                 ns_automaton_accepts(a, place));
            else
                assert_int_equal(allowed(mask[0], id),
                                 length > 0 && next != NS_AUTOMATON_DEAD);
            n_allowed += allowed(mask[0], id) && id != 1 && id != 106;
        }
        assert_int_equal(ns_guide_ended(guide), n_allowed == 0);
        if (n_allowed == 0)
            break;
        do
            answer[n] = (int32_t)(ns_mix(r++) % 512);
        while (!allowed(mask[0], answer[n]) || answer[n] == 1 ||
               answer[n] == 106);
        n++;
    }
    assert_true(n > 1);
    ns_guide_destroy(guide);
    ns_grammar_destroy(grammar);
    ns_automaton_destroy(a);
    bare_close(&bare);
}

static void
a_thought_is_free_and_the_grammar_begins_behind_it(void **state)
{
    enum { OPEN = 100, CLOSE = 101, CALL = 50, RED_R = 335 };
    struct bare bare;
    struct ns_grammar *grammar = grammar_of("red");
    const uint32_t *mask[CANVAS + 1];
    struct ns_guide *guide;
    int32_t answer[] = { OPEN, 300, 77, CLOSE };

    (void)state;
    bare_open(&bare, 0);
    for (int in_thought = 0; in_thought < 2; in_thought++) {
        guide = guide_of(&bare, grammar, true, in_thought);
        ns_constraints_begin_pass(bare.c);
        ns_guide_masks(guide, answer + in_thought, 4 - (uint32_t)in_thought,
                       mask);
        if (!in_thought) {
            assert_true(allowed(mask[0], OPEN) && allowed(mask[0], RED_R));
            assert_false(allowed(mask[0], 300) || allowed(mask[0], 1));
        }
        for (int i = 1 - in_thought; i < 4 - in_thought; i++) {
            assert_true(allowed(mask[i], 300) && allowed(mask[i], CLOSE));
            assert_false(allowed(mask[i], 1) || allowed(mask[i], 106));
        }
        assert_true(allowed(mask[4 - in_thought], RED_R));
        assert_false(allowed(mask[4 - in_thought], OPEN) ||
                     allowed(mask[4 - in_thought], 300));
        ns_guide_destroy(guide);
    }
    guide = guide_of(&bare, grammar, false, false);
    ns_guide_masks(guide, NULL, 0, mask);
    assert_false(allowed(mask[0], OPEN) || allowed(mask[0], CALL));
    ns_guide_destroy(guide);
    ns_grammar_destroy(grammar);
    bare_close(&bare);
}

/* Candidates of a position: ids by chance, some of them forced in. */
static void
fill_top(struct ns_candidate *top, uint64_t *r, const int32_t *like,
         uint32_t n_like, uint32_t n)
{
    for (uint32_t i = 0; i < NS_HEAD_TOP; i++)
        top[i] = (struct ns_candidate){ -1, -INFINITY };
    for (uint32_t i = 0; i < n; i++) {
        uint64_t draw = ns_mix(++*r);

        top[i].id = draw % 3 ? like[draw / 3 % n_like]
                             : (int32_t)(draw / 3 % 512);
        top[i].z = 10.0f - 2.0f * (float)i - (float)(draw % 1000) / 900;
    }
}

struct best {
    struct ns_automaton *a;
    const struct bare *bare;
    const struct ns_candidate (*top)[NS_HEAD_TOP];
    uint32_t length, n;
    float score;
};

/* Every way through the candidates alone, by trying. */
static void
try_all(struct best *best, uint32_t p, uint32_t place, bool over, float score)
{
    if (p == best->length) {
        if (score > best->score)
            best->score = score;
        return;
    }
    for (uint32_t i = 0; i < best->n; i++) {
        const struct ns_candidate *c = &best->top[p][i];
        float worth = score + c->z - best->top[p][0].z;
        bool end = c->id == 1 || c->id == 106;
        char bytes[64];
        size_t n = ns_tokenizer_bytes(best->bare->tokenizer, c->id, bytes, 64);
        uint32_t next = place;

        if (over) {
            try_all(best, p + 1, place, true, score);
            return;
        }
        for (size_t j = 0; j < n; j++)
            next = ns_automaton_next(best->a, next, (uint8_t)bytes[j]);
        if (end && ns_automaton_accepts(best->a, place))
            try_all(best, p + 1, place, true, worth);
        else if (!end && n > 0 && next != NS_AUTOMATON_DEAD)
            try_all(best, p + 1, next, false, worth);
    }
}

static float
worth_of(const struct ns_candidate (*top)[NS_HEAD_TOP], uint32_t length,
         const int32_t *path, bool *named)
{
    float score = 0;

    for (uint32_t p = 0; p < length; p++) {
        uint32_t i = 0;

        while (i < NS_HEAD_TOP && top[p][i].id != path[p])
            i++;
        if (i == NS_HEAD_TOP) {
            *named = false;
            return 0;
        }
        score += top[p][i].z - top[p][0].z;
        if (path[p] == 1 || path[p] == 106)
            break;
    }
    return score;
}

static void
a_path_is_a_text_and_no_candidates_make_a_better_one(void **state)
{
    enum { POSITIONS = 6, NAMED = 5 };
    static const int32_t like[] = { 318, 319, 320, 1 }; /* a b c, end */
    struct ns_candidate top[POSITIONS][NS_HEAD_TOP];
    struct ns_grammar *grammar = grammar_of("(ab?c|ba*|c){1,4}");
    struct ns_automaton *a = machine_over(grammar_of("(ab?c|ba*|c){1,4}"));
    struct ns_guide *guide;
    struct bare bare;
    uint64_t r = 7;
    uint32_t n_named = 0;

    (void)state;
    bare_open(&bare, 0);
    guide = guide_of(&bare, grammar, false, false);
    for (int round = 0; round < 300; round++) {
        struct best best = { a, &bare,
                             (const struct ns_candidate(*)[NS_HEAD_TOP])top,
                             POSITIONS, NAMED, -INFINITY };
        int32_t path[POSITIONS];
        bool named = true;
        char text[512];
        uint32_t place;
        float score;

        for (uint32_t p = 0; p < POSITIONS; p++)
            fill_top(top[p], &r, like, 4, NAMED);
        assert_true(ns_guide_path(guide, best.top, POSITIONS, path));
        text_of(&bare, path, POSITIONS, text);
        place = machine_run(a, text, strlen(text));
        assert_int_not_equal(place, NS_AUTOMATON_DEAD);
        for (uint32_t p = 0; p < POSITIONS; p++)
            if (path[p] == 1 || path[p] == 106) {
                assert_true(ns_automaton_accepts(a, place));
                break;
            }
        try_all(&best, 0, ns_automaton_start(a), false, 0);
        score = worth_of(best.top, POSITIONS, path, &named);
        n_named += named;
        if (named && best.score > -INFINITY)
            assert_true(score >= best.score - 1e-3f);
    }
    assert_in_range(n_named, 100, 300);
    ns_guide_destroy(guide);
    ns_grammar_destroy(grammar);
    ns_automaton_destroy(a);
    bare_close(&bare);
}

/* What stands in a thought is the model's own; its end opens the grammar. */
static void
a_path_may_leave_a_thought(void **state)
{
    enum { CLOSE = 101 };
    struct ns_candidate top[6][NS_HEAD_TOP];
    static const int32_t likely[] = { 300, 301, CLOSE, 335, 322, 321 };
    struct ns_grammar *grammar = grammar_of("red");
    struct ns_guide *guide;
    struct bare bare;
    int32_t path[6];
    uint64_t r = 3;

    (void)state;
    bare_open(&bare, 0);
    guide = guide_of(&bare, grammar, true, true);
    for (uint32_t p = 0; p < 6; p++) {
        fill_top(top[p], &r, likely, 6, NS_HEAD_TOP);
        top[p][0] = (struct ns_candidate){ likely[p], 20 };
    }
    assert_true(ns_guide_path(
        guide, (const struct ns_candidate(*)[NS_HEAD_TOP])top, 6, path));
    assert_memory_equal(path, likely, sizeof(path));
    ns_guide_destroy(guide);
    ns_grammar_destroy(grammar);
    bare_close(&bare);
}

static void
a_full_automaton_forgets_and_the_guide_finds_its_place(void **state)
{
    static const char pattern[] = "[ab]*a[ab]{9}c";
    struct ns_grammar *grammar = grammar_of(pattern);
    struct ns_automaton *a = machine_over(grammar_of(pattern));
    const uint32_t *mask[CANVAS + 1], *again[CANVAS + 1];
    size_t small = 160 << 10;
    struct ns_guide *guide, *other;
    int32_t answer[400];
    struct bare bare;
    struct ns_error err;

    (void)state;
    bare_open(&bare, small);
    guide = guide_of(&bare, grammar, false, false);
    other = guide_of(&bare, grammar, false, false);
    for (uint32_t n = 0; n < 400; n++) {
        char text[512];
        uint32_t place;

        answer[n] = ns_mix(n + 5) & 1 ? 318 : 319;
        ns_constraints_begin_pass(bare.c);
        ns_guide_follow(guide, answer, n + 1);
        ns_guide_follow(other, answer, n / 2);
        assert_int_equal(ns_guide_check(guide, &err), NS_OK);
        assert_int_equal(ns_guide_masks(guide, NULL, 0, mask), 1);
        assert_int_equal(ns_guide_masks(other, NULL, 0, again), 1);
        text_of(&bare, answer, n + 1, text);
        place = machine_run(a, text, n + 1);
        assert_int_equal(allowed(mask[0], 320),
                         ns_automaton_next(a, place, 'c') !=
                             NS_AUTOMATON_DEAD);
        assert_true(allowed(mask[0], 318) && allowed(mask[0], 319));
        place = machine_run(a, text, n / 2);
        assert_int_equal(allowed(again[0], 320),
                         ns_automaton_next(a, place, 'c') !=
                             NS_AUTOMATON_DEAD);
    }
    ns_guide_destroy(guide);
    ns_guide_destroy(other);
    ns_grammar_destroy(grammar);
    ns_automaton_destroy(a);
    bare_close(&bare);
}

/* ---- whole jobs --------------------------------------------------------------- */

struct job {
    struct ns_request request;
    struct ns_grammar *grammar;
    int32_t prompt[PROMPT];
    int32_t answer[LONGEST + 1];
    uint32_t n_answer;
    int32_t blocks[LONGEST + 1];
    uint32_t n_blocks, block_end[64];
    char content[LONGEST * 8];
    enum ns_event_kind ended;
    enum ns_finish finish;
    struct ns_error error;
    struct ns_usage usage;
};

struct fixture {
    char *directory;
    struct ns_engine *engine;
};

static int
set_up(void **state)
{
    static struct fixture f;
    struct tiny_recipe recipe = tiny_recipe();
    struct ns_engine_options options = { .backend = { .n_threads = 1 },
                                         .kv_bytes = 64 << 20 };
    struct ns_error err;

    f.directory = tiny_make(&recipe);
    tiny_add_tokenizer(f.directory);
    options.model_directory = f.directory;
    *state = &f;
    return ns_engine_open(&options, &f.engine, &err) == NS_OK ? 0 : -1;
}

static int
tear_down(void **state)
{
    struct fixture *f = *state;

    ns_engine_close(f->engine);
    tiny_remove(f->directory);
    return 0;
}

static void
make_job(struct job *job, struct ns_engine *engine, uint32_t i,
         enum ns_mode mode, float temperature)
{
    const struct ns_generation *g = &ns_engine_model(engine)->generation;

    memset(job, 0, sizeof(*job));
    for (uint32_t j = 0; j < PROMPT; j++)
        job->prompt[j] = 130 + ns_draw_token(ns_mix(i * 1000 + j), 300);
    job->grammar = grammar_of(sources[i % N_SOURCES]);
    job->request = (struct ns_request){
        .id = i,
        .prompt = job->prompt,
        .n_prompt = PROMPT,
        .mode = mode,
        .seed = i + 5,
        .max_tokens = 512,
        .canvas_length = i % 3 ? 16 : 32,
        .top_p = 1,
        .has_temperature = temperature >= 0,
        .temperature = temperature,
        .grammar = job->grammar,
        .sampler = { g->t_min, g->t_max, g->entropy_bound,
                     g->max_denoising_steps, g->stability_threshold,
                     g->confidence_threshold },
    };
}

static void
take_event(struct job *job, const struct ns_event *event)
{
    job->ended = event->kind;
    if (event->kind == NS_EVENT_BLOCK) {
        memcpy(job->blocks + (job->n_blocks
                                  ? job->block_end[job->n_blocks - 1]
                                  : 0),
               event->tokens, event->n_tokens * sizeof(int32_t));
        job->block_end[job->n_blocks] =
            event->n_tokens +
            (job->n_blocks ? job->block_end[job->n_blocks - 1] : 0);
        job->n_blocks++;
        return;
    }
    job->usage = event->usage;
    if (event->kind == NS_EVENT_FAILED) {
        job->error = event->error;
        return;
    }
    job->finish = event->finish;
    job->n_answer = event->n_tokens;
    memcpy(job->answer, event->tokens, event->n_tokens * sizeof(int32_t));
    assert_true(event->reply.content_length < sizeof(job->content));
    memcpy(job->content, event->reply.content, event->reply.content_length);
}

static void
run(struct ns_engine *engine, struct job *jobs, uint32_t n)
{
    struct ns_pass_report report;
    struct ns_event event;
    struct ns_error err;
    uint32_t left = n;

    for (uint32_t i = 0; i < n; i++)
        if (ns_engine_submit(engine, &jobs[i].request, &err) != NS_OK)
            fail_msg("%s", err.text);
    while (left > 0) {
        if (ns_engine_pass(engine, &report, &err) != NS_OK)
            fail_msg("%s", err.text);
        assert_true(report.n_rows > 0);
        while (ns_engine_next_event(engine, &event))
            for (uint32_t i = 0; i < n; i++)
                if (jobs[i].request.id == event.id) {
                    take_event(&jobs[i], &event);
                    left -= event.kind != NS_EVENT_BLOCK;
                }
    }
}

static void
assert_whole(const struct job *job, uint32_t i)
{
    struct ns_automaton *a = machine_over(grammar_of(sources[i % N_SOURCES]));

    if (job->ended != NS_EVENT_DONE)
        fail_msg("job %u: %s", i, job->error.text);
    if (!machine_accepts(a, job->content))
        fail_msg("job %u: %s", i, job->content);
    assert_int_equal(job->finish, NS_FINISH_STOP);
    ns_automaton_destroy(a);
}

static void
free_jobs(struct job *jobs, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ns_grammar_destroy(jobs[i].grammar);
}

static const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                      NS_MODE_HYBRID };
static const float temperatures[] = { -1, 0, 1.3f };

static void
every_answer_is_a_text_of_its_grammar(void **state)
{
    struct fixture *f = *state;
    static struct job jobs[N];

    for (int m = 0; m < 3; m++)
        for (int t = 0; t < 3; t++) {
            for (uint32_t i = 0; i < N; i++)
                make_job(&jobs[i], f->engine, i, modes[m], temperatures[t]);
            run(f->engine, jobs, N);
            for (uint32_t i = 0; i < N; i++)
                assert_whole(&jobs[i], i);
            free_jobs(jobs, N);
        }
}

static void
hybrid_equals_ar_under_a_grammar(void **state)
{
    struct fixture *f = *state;
    static struct job ar[N], hybrid[N];

    for (int t = 0; t < 3; t++) {
        for (uint32_t i = 0; i < N; i++) {
            make_job(&ar[i], f->engine, i, NS_MODE_AR, temperatures[t]);
            make_job(&hybrid[i], f->engine, i, NS_MODE_HYBRID,
                     temperatures[t]);
        }
        run(f->engine, ar, N);
        run(f->engine, hybrid, N);
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(hybrid[i].n_answer, ar[i].n_answer);
            assert_memory_equal(hybrid[i].answer, ar[i].answer,
                                ar[i].n_answer * sizeof(int32_t));
        }
        free_jobs(ar, N);
        free_jobs(hybrid, N);
    }
}

static void
alone_or_among_others_the_answer_is_the_same(void **state)
{
    struct fixture *f = *state;
    static struct job together[N], alone;

    for (int m = 0; m < 3; m++) {
        for (uint32_t i = 0; i < N; i++) {
            make_job(&together[i], f->engine, i, modes[m], 1.3f);
            if (i == 4) /* one among them is free */
                together[i].request.grammar = NULL;
        }
        run(f->engine, together, N);
        for (uint32_t i = 0; i < N; i++) {
            make_job(&alone, f->engine, i, modes[m], 1.3f);
            alone.request.grammar = i == 4 ? NULL : alone.grammar;
            run(f->engine, &alone, 1);
            assert_int_equal(alone.n_answer, together[i].n_answer);
            assert_memory_equal(alone.answer, together[i].answer,
                                alone.n_answer * sizeof(int32_t));
            free_jobs(&alone, 1);
        }
        free_jobs(together, N);
    }
}

static void
resumed_behind_any_block_the_answer_is_the_same(void **state)
{
    struct fixture *f = *state;
    static struct job whole, rest;
    uint32_t n_resumed = 0;

    for (int m = 0; m < 3; m++)
        for (uint32_t i = 1; i < N; i++) {
            make_job(&whole, f->engine, i, modes[m], 1.3f);
            run(f->engine, &whole, 1);
            for (uint32_t b = 1; b <= whole.n_blocks; b++) {
                make_job(&rest, f->engine, i, modes[m], 1.3f);
                rest.request.resume = whole.blocks;
                rest.request.n_resume = whole.block_end[b - 1];
                rest.request.resume_blocks = b;
                run(f->engine, &rest, 1);
                assert_int_equal(rest.n_answer, whole.n_answer);
                assert_memory_equal(rest.answer, whole.answer,
                                    rest.n_answer * sizeof(int32_t));
                free_jobs(&rest, 1);
                n_resumed++;
            }
            free_jobs(&whole, 1);
        }
    assert_true(n_resumed > 20);
}

static void
without_room_for_the_whole_text_a_job_fails_and_says_what_is_missing(
    void **state)
{
    struct fixture *f = *state;
    static struct job jobs[N];

    for (int m = 0; m < 3; m++) {
        for (uint32_t i = 0; i < N; i++) {
            make_job(&jobs[i], f->engine, i, modes[m], 0);
            ns_grammar_destroy(jobs[i].grammar);
            jobs[i].grammar = grammar_of("[a-z]{300}!");
            jobs[i].request.grammar = jobs[i].grammar;
            jobs[i].request.max_tokens = 48;
        }
        run(f->engine, jobs, N);
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(jobs[i].ended, NS_EVENT_FAILED);
            assert_int_equal(jobs[i].error.status, NS_REJECT);
            assert_string_equal(jobs[i].error.code, "grammar_incomplete");
            assert_non_null(strstr(jobs[i].error.text, "max_tokens"));
        }
        free_jobs(jobs, N);
    }
}

static void
behind_a_thought_the_answer_keeps_to_the_grammar(void **state)
{
    struct fixture *f = *state;
    static struct job jobs[N];

    for (int m = 0; m < 3; m++) {
        for (uint32_t i = 0; i < N; i++) {
            make_job(&jobs[i], f->engine, i, modes[m], 1.3f);
            jobs[i].request.thinking = true;
            jobs[i].request.in_thought = true;
            jobs[i].request.thinking_budget = 20 + i;
        }
        run(f->engine, jobs, N);
        for (uint32_t i = 0; i < N; i++) {
            assert_whole(&jobs[i], i);
            assert_true(jobs[i].usage.reasoning_tokens > 0);
        }
        free_jobs(jobs, N);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mask_has_the_tokens_whose_bytes_go_on),
        cmocka_unit_test(a_thought_is_free_and_the_grammar_begins_behind_it),
        cmocka_unit_test(a_path_is_a_text_and_no_candidates_make_a_better_one),
        cmocka_unit_test(a_path_may_leave_a_thought),
        cmocka_unit_test(
            a_full_automaton_forgets_and_the_guide_finds_its_place),
        cmocka_unit_test(every_answer_is_a_text_of_its_grammar),
        cmocka_unit_test(hybrid_equals_ar_under_a_grammar),
        cmocka_unit_test(alone_or_among_others_the_answer_is_the_same),
        cmocka_unit_test(resumed_behind_any_block_the_answer_is_the_same),
        cmocka_unit_test(
            without_room_for_the_whole_text_a_job_fails_and_says_what_is_missing),
        cmocka_unit_test(behind_a_thought_the_answer_keeps_to_the_grammar),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
