#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <jansson.h>
#include <lz4frame.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "base/log.h"
#include "connectors/spool.h"
#include "tests/connectors/faulty_io.h"
#include "tests/connectors/folder.h"
#include "tests/fault.h"

/* ---- a pipeline of one thread ---------------------------------------- */

static struct ns_spool_options
run_options(void)
{
    return (struct ns_spool_options){
        .model_rev = "model-1",
        .engine_rev = "engine-1",
        .input = folder_path("in.jsonl"),
        .output = folder_path("out.jsonl"),
        .io = &faulty_io,
    };
}

static struct ns_spool_options
directory_options(void)
{
    return (struct ns_spool_options){
        .model_rev = "model-1",
        .engine_rev = "engine-1",
        .directory = folder,
        .io = &faulty_io,
    };
}

static struct ns_spool *
open_ok(const struct ns_spool_options *options)
{
    struct ns_spool *spool = NULL;
    struct ns_error err;

    if (ns_spool_open(options, &spool, &err) != NS_OK)
        fail_msg("%s", err.text);
    return spool;
}

static struct ns_job *
parse(const struct ns_message *message)
{
    static const struct ns_job_options options = { .id_from_position = true };
    struct ns_job *job = NULL;
    struct ns_error err;
    enum ns_status status = ns_job_parse(message, &options, &job, &err);

    assert_true(status == NS_OK || status == NS_REJECT);
    return job;
}

/* The next job, or NULL at the end or when there is none just now. */
static struct ns_job *
next_job(struct ns_spool *spool)
{
    struct ns_source *source = ns_spool_source(spool);
    struct ns_message message;
    struct ns_error err;
    enum ns_status status;

    status = ns_source_poll(source, 0, &message, &err);
    if (status != NS_OK)
        fail_msg("poll: %s", err.text);
    return message.kind == NS_MESSAGE_JOB ? parse(&message) : NULL;
}

/* Whether the world must do what it is asked; else a claim may come back
 * without an outcome, and a job be left alone. */
static bool patient = true;

static struct ns_claim
claim(struct ns_spool *spool, struct ns_job *job)
{
    struct ns_store *store = ns_spool_store(spool);
    struct ns_claim claims[1] = {
        { .job = job, .mode = NS_JOB_DIFFUSION, .seed = 7 }
    };
    struct ns_error err;

    if (store->ops->claim(store, claims, 1, &err) != NS_OK) {
        if (patient)
            fail_msg("claim: %s", err.text);
        claims[0].outcome = 0;
    }
    return claims[0];
}

static struct ns_result
answer(const char *content)
{
    return (struct ns_result){
        .status = NS_RESULT_OK,
        .content = content,
        .content_length = strlen(content),
        .finish_reason = "stop",
        .mode = NS_JOB_DIFFUSION,
        .model_rev = "model-1",
        .engine_rev = "engine-1",
    };
}

static enum ns_status
try_finish(struct ns_spool *spool, const struct ns_job *job, uint64_t fence,
           const struct ns_result *result, enum ns_store_outcome *outcome,
           struct ns_error *err)
{
    struct ns_store *store = ns_spool_store(spool);
    struct ns_finished ends[1] = {
        { .job = job, .fence = fence, .result = result }
    };
    enum ns_status status = store->ops->finish(store, ends, 1, err);

    *outcome = ends[0].outcome;
    return status;
}

static void
finish(struct ns_spool *spool, struct ns_job *job, uint64_t fence,
       const char *content)
{
    struct ns_result result = answer(content);
    enum ns_store_outcome outcome;
    struct ns_error err;

    if (try_finish(spool, job, fence, &result, &outcome, &err) != NS_OK)
        fail_msg("finish: %s", err.text);
    assert_int_equal(outcome, NS_STORE_DONE);
    ns_source_acknowledge(ns_spool_source(spool), job->position);
}

static enum ns_status
try_refuse(struct ns_spool *spool, const struct ns_job *job,
           const struct ns_error *why, struct ns_error *err)
{
    struct ns_store *store = ns_spool_store(spool);
    struct ns_refusal refusals[1] = { { .job = job, .error = *why } };

    return store->ops->refuse(store, refusals, 1, err);
}

/* Takes a job from its message to its line. False: the world failed. */
static bool
work(struct ns_spool *spool, struct ns_job *job)
{
    struct ns_result result = answer("done");
    enum ns_store_outcome outcome;
    struct ns_claim claimed;
    enum ns_status status;
    struct ns_error err;

    if (job->refusal.status == NS_REJECT) {
        status = try_refuse(spool, job, &job->refusal, &err);
    } else {
        claimed = claim(spool, job);
        status = NS_OK;
        if (claimed.outcome == NS_CLAIM_CONFLICT)
            status = try_refuse(spool, job, &claimed.error, &err);
        else if (claimed.outcome == NS_CLAIM_RUN)
            status =
                try_finish(spool, job, claimed.fence, &result, &outcome, &err);
        else if (claimed.outcome == 0)
            return false;
    }
    if (status == NS_OK)
        ns_source_acknowledge(ns_spool_source(spool), job->position);
    else if (patient)
        fail_msg("work: %s", err.text);
    return status == NS_OK;
}

/* Works through all that comes, at most `most` jobs; returns how many. */
static int
work_all(struct ns_spool *spool, int most)
{
    struct ns_job *job;
    int n = 0;

    while (n < most && (job = next_job(spool)) != NULL) {
        work(spool, job);
        ns_job_destroy(job);
        n++;
    }
    return n;
}

static int
run_all(const struct ns_spool_options *options)
{
    struct ns_spool *spool = open_ok(options);
    int n = work_all(spool, 1 << 30);

    ns_spool_close(spool);
    return n;
}

/* ---- looking at what came out ---------------------------------------- */

struct row {
    char id[64], code[32], content[64];
    int64_t line;
};

static int
read_rows(const char *name, struct row *rows, int most)
{
    char *text = folder_read(name, NULL), *at = text;
    int n = 0;

    if (!text)
        return -1;
    while (*at) {
        char *newline = strchr(at, '\n');
        const char *id, *code, *content;
        json_t *root;

        assert_non_null(newline);
        root = json_loadb(at, (size_t)(newline - at), 0, NULL);
        assert_non_null(root);
        assert_true(n < most);
        id = json_string_value(json_object_get(root, "custom_id"));
        code = json_string_value(
            json_object_get(json_object_get(root, "error"), "code"));
        content = json_string_value(json_object_get(
            json_object_get(
                json_array_get(
                    json_object_get(
                        json_object_get(json_object_get(root, "response"),
                                        "body"),
                        "choices"),
                    0),
                "message"),
            "content"));
        snprintf(rows[n].id, sizeof(rows[n].id), "%s", id ? id : "");
        snprintf(rows[n].code, sizeof(rows[n].code), "%s", code ? code : "");
        snprintf(rows[n].content, sizeof(rows[n].content), "%s",
                 content ? content : "");
        rows[n].line = json_integer_value(
            json_object_get(json_object_get(root, "nightshift"), "line"));
        n++;
        json_decref(root);
        at = newline + 1;
    }
    free(text);
    return n;
}

/* Each line of 1..n exactly once, and nothing else. */
static void
assert_complete(const char *name, int n)
{
    struct row *rows = calloc((size_t)n + 8, sizeof(*rows));
    int got = read_rows(name, rows, n + 8);
    bool *seen = calloc((size_t)n + 1, sizeof(*seen));

    if (got != n)
        fail_msg("%s has %d lines, not %d", name, got, n);
    for (int i = 0; i < n; i++) {
        assert_in_range(rows[i].line, 1, n);
        assert_false(seen[rows[i].line]);
        seen[rows[i].line] = true;
    }
    free(rows);
    free(seen);
}

static size_t
job_lines(char *out, size_t size, int from, int to)
{
    size_t used = 0;

    for (int i = from; i <= to; i++)
        used += (size_t)snprintf(
            out + used, size - used,
            "{\"custom_id\":\"job-%d\",\"body\":{\"messages\":[{\"role\":"
            "\"user\",\"content\":\"text %d\"}]}}\n",
            i, i);
    return used;
}

static void
write_jobs(const char *name, int n)
{
    char *text = malloc((size_t)n * 128 + 1);
    size_t length = job_lines(text, (size_t)n * 128 + 1, 1, n);

    folder_write(name, text, length);
    free(text);
}

/* ---- one file -------------------------------------------------------- */

static void
a_file_is_answered_line_by_line_and_then_done(void **state)
{
    struct ns_spool_options options = run_options();
    struct row rows[8];
    char *before, *after;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 5);
    assert_int_equal(run_all(&options), 5);
    assert_complete("out.jsonl", 5);
    assert_int_equal(read_rows("out.jsonl", rows, 8), 5);
    assert_string_equal(rows[2].id, "job-3");
    assert_string_equal(rows[2].content, "done");
    assert_false(folder_has("out.jsonl.blocks"));

    /* Again: nothing is handed out, not a byte changes. */
    before = folder_read("out.jsonl", NULL);
    assert_int_equal(run_all(&options), 0);
    after = folder_read("out.jsonl", NULL);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

static void
a_run_that_stopped_goes_on(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 20);
    spool = open_ok(&options);
    assert_int_equal(work_all(spool, 7), 7);
    ns_spool_close(spool);
    spool = open_ok(&options);
    assert_int_equal(ns_spool_progress(spool).lines_done_before, 7);
    assert_int_equal(work_all(spool, 100), 13);
    assert_int_equal(ns_spool_progress(spool).ok, 13);
    ns_spool_close(spool);
    assert_complete("out.jsonl", 20);
}

static void
an_output_cut_at_any_byte_is_completed(void **state)
{
    struct ns_spool_options options = run_options();
    size_t length;
    char *whole;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 3);
    run_all(&options);
    whole = folder_read("out.jsonl", &length);
    ns_log_set_level(NS_LOG_ERROR);
    for (size_t cut = 0; cut < length; cut++) {
        folder_write("out.jsonl", whole, cut);
        assert_in_range(run_all(&options), 1, 3);
        assert_complete("out.jsonl", 3);
    }
    ns_log_set_level(NS_LOG_INFO);
    free(whole);
}

static enum ns_status
poll_until_failure(struct ns_spool *spool, struct ns_error *err)
{
    for (int i = 0; i < 1000; i++) {
        struct ns_message message;
        enum ns_status status =
            ns_source_poll(ns_spool_source(spool), 0, &message, err);

        if (status != NS_OK || message.kind != NS_MESSAGE_JOB)
            return status;
    }
    return NS_OK;
}

static void
an_edited_line_with_a_result_stops_the_run_unless_it_begins_anew(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_error err;
    char *before, *text;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 4);
    run_all(&options);
    before = folder_read("out.jsonl", NULL);
    text = folder_read("in.jsonl", NULL);
    *strstr(text, "text 3") = 'T';
    folder_write("in.jsonl", text, strlen(text));

    spool = open_ok(&options);
    assert_int_equal(poll_until_failure(spool, &err), NS_REJECT);
    assert_string_equal(err.code, "edited");
    assert_non_null(strstr(err.text, "line 3"));
    assert_non_null(strstr(err.text, "job-3"));
    ns_spool_close(spool);
    free(text);
    text = folder_read("out.jsonl", NULL);
    assert_string_equal(text, before);
    free(text);

    options.restart = true;
    assert_int_equal(run_all(&options), 4);
    assert_complete("out.jsonl", 4);
    text = folder_read("out.jsonl.~1~", NULL);
    assert_string_equal(text, before);
    free(text);
    free(before);
}

static void
a_line_inserted_above_stops_the_run_too(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_error err;
    char text[2000];
    size_t n;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 2);
    run_all(&options);
    n = job_lines(text, sizeof(text), 9, 9);
    n += job_lines(text + n, sizeof(text) - n, 1, 2);
    folder_write("in.jsonl", text, n);
    spool = open_ok(&options);
    assert_int_equal(poll_until_failure(spool, &err), NS_REJECT);
    assert_string_equal(err.code, "edited");
    ns_spool_close(spool);
}

static void
lines_added_behind_are_simply_run(void **state)
{
    struct ns_spool_options options = run_options();

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 3);
    run_all(&options);
    write_jobs("in.jsonl", 5);
    assert_int_equal(run_all(&options), 2);
    assert_complete("out.jsonl", 5);
}

static void
a_bad_line_costs_one_line_and_may_run_again(void **state)
{
    struct ns_spool_options options = run_options();
    struct row rows[8];
    char text[2000];
    size_t n;
    int got;

    (void)state;
    folder_empty(folder_fd);
    n = job_lines(text, sizeof(text), 1, 1);
    n += (size_t)snprintf(text + n, sizeof(text) - n,
                          "nonsense\n{\"custom_id\":\"x\",\"body\":{}}\n");
    n += job_lines(text + n, sizeof(text) - n, 2, 2);
    folder_write("in.jsonl", text, n);
    run_all(&options);
    assert_complete("out.jsonl", 4);
    got = read_rows("out.jsonl", rows, 8);
    assert_int_equal(got, 4);
    assert_string_equal(rows[1].code, "bad_json");
    assert_string_equal(rows[2].code, "bad_param");
    assert_string_equal(rows[2].id, "x");
    assert_string_equal(rows[3].content, "done");

    assert_int_equal(run_all(&options), 0);
    options.retry_failed = true;
    assert_int_equal(run_all(&options), 2);
    assert_complete("out.jsonl", 4);
}

static void
the_first_line_of_an_id_has_it_whatever_the_order_of_claims(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_job *first, *other, *second;
    struct ns_claim claimed;
    struct row rows[8];
    struct ns_error err;
    char text[2000];
    size_t n;

    (void)state;
    folder_empty(folder_fd);
    n = job_lines(text, sizeof(text), 1, 2);
    n += job_lines(text + n, sizeof(text) - n, 1, 1);
    folder_write("in.jsonl", text, n);
    spool = open_ok(&options);
    first = next_job(spool);
    other = next_job(spool);
    second = next_job(spool);
    claimed = claim(spool, second);
    assert_int_equal(claimed.outcome, NS_CLAIM_CONFLICT);
    assert_string_equal(claimed.error.code, "duplicate_id");
    assert_non_null(strstr(claimed.error.text, "line 1"));
    assert_int_equal(try_refuse(spool, second, &claimed.error, &err), NS_OK);
    claimed = claim(spool, other);
    finish(spool, other, claimed.fence, "two");
    ns_job_destroy(first);
    ns_job_destroy(other);
    ns_job_destroy(second);
    ns_spool_close(spool); /* killed before line 1 was done */

    assert_int_equal(run_all(&options), 1);
    assert_complete("out.jsonl", 3);
    read_rows("out.jsonl", rows, 8);
    assert_string_equal(rows[0].code, "duplicate_id");
    assert_int_equal(rows[0].line, 3);
    assert_string_equal(rows[2].content, "done");
    assert_int_equal(rows[2].line, 1);
    assert_int_equal(run_all(&options), 0);
    options.retry_failed = true;
    assert_int_equal(run_all(&options), 1); /* and is refused again */
    assert_complete("out.jsonl", 3);
}

static void
checkpoint(struct ns_spool *spool, const struct ns_job *job, uint64_t fence,
           uint32_t block, const int32_t *tokens, uint32_t n)
{
    struct ns_store *store = ns_spool_store(spool);
    struct ns_checkpoint points[1] = { { .job = job,
                                         .fence = fence,
                                         .block = block,
                                         .tokens = tokens,
                                         .n_tokens = n } };
    struct ns_error err;

    if (store->ops->checkpoint(store, points, 1, &err) != NS_OK)
        fail_msg("checkpoint: %s", err.text);
    assert_int_equal(points[0].outcome, NS_STORE_DONE);
}

static void
committed_blocks_come_back_to_whom_they_fit(void **state)
{
    static const int32_t one[] = { 5, 262143, 0 }, two[] = { 9 };
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_store *store;
    struct ns_claim claimed;
    struct ns_job *job;
    struct ns_error err;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 2);
    spool = open_ok(&options);
    job = next_job(spool);
    claimed = claim(spool, job);
    assert_int_equal(claimed.n_blocks, 0);
    checkpoint(spool, job, claimed.fence, 0, one, 3);
    checkpoint(spool, job, claimed.fence, 0, one, 3); /* asked again */
    checkpoint(spool, job, claimed.fence, 1, two, 1);
    checkpoint(spool, job, claimed.fence, 3, two, 1); /* behind a hole */
    ns_job_destroy(job);
    ns_spool_close(spool);
    assert_true(folder_has("out.jsonl.blocks"));

    spool = open_ok(&options);
    job = next_job(spool);
    claimed = claim(spool, job);
    assert_int_equal(claimed.outcome, NS_CLAIM_RUN);
    assert_int_equal(claimed.n_blocks, 2);
    assert_int_equal(claimed.n_tokens, 4);
    assert_memory_equal(claimed.tokens, one, sizeof(one));
    assert_int_equal(claimed.tokens[3], 9);
    assert_int_equal(claimed.block_tokens[0], 3);
    assert_int_equal(claimed.block_tokens[1], 1);
    assert_false(claimed.resumed_across);
    ns_job_destroy(job);
    ns_spool_close(spool);

    options.engine_rev = "engine-2";
    spool = open_ok(&options);
    job = next_job(spool);
    claimed = claim(spool, job);
    assert_int_equal(claimed.n_blocks, 2);
    assert_true(claimed.resumed_across);
    ns_job_destroy(job);
    ns_spool_close(spool);

    options.model_rev = "model-2"; /* starts anew */
    spool = open_ok(&options);
    job = next_job(spool);
    assert_int_equal(claim(spool, job).n_blocks, 0);
    ns_job_destroy(job);
    ns_spool_close(spool);
    options.model_rev = "model-1";

    spool = open_ok(&options); /* another seed */
    store = ns_spool_store(spool);
    job = next_job(spool);
    claimed =
        (struct ns_claim){ .job = job, .mode = NS_JOB_DIFFUSION, .seed = 8 };
    assert_int_equal(store->ops->claim(store, &claimed, 1, &err), NS_OK);
    assert_int_equal(claimed.n_blocks, 0);
    finish(spool, job, claimed.fence, "x");
    ns_job_destroy(job);
    assert_int_equal(work_all(spool, 9), 1);
    ns_spool_close(spool);
    assert_false(folder_has("out.jsonl.blocks"));
}

/* Row 42, row 35: a blocks file cut at any byte, or with any byte damaged,
 * yields a prefix of the blocks, and never a wrong token. */
static void
damaged_blocks_yield_a_prefix(void **state)
{
    enum { BLOCKS = 4 };
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_claim claimed;
    struct ns_job *job;
    size_t length;
    char *whole;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 1);
    spool = open_ok(&options);
    job = next_job(spool);
    claimed = claim(spool, job);
    for (int32_t i = 0; i < BLOCKS; i++)
        checkpoint(spool, job, claimed.fence, (uint32_t)i, &i, 1);
    ns_job_destroy(job);
    ns_spool_close(spool);
    whole = folder_read("out.jsonl.blocks", &length);
    for (size_t i = 0; i < 2 * length; i++) {
        size_t at = i % length;
        uint32_t most = 0;

        if (i < length) { /* cut here */
            folder_write("out.jsonl.blocks", whole, at);
        } else { /* or damaged here */
            whole[at] ^= 1;
            folder_write("out.jsonl.blocks", whole, length);
            whole[at] ^= 1;
        }
        for (size_t k = 0; k < at; k++)
            most += whole[k] == '\n';
        spool = open_ok(&options);
        job = next_job(spool);
        claimed = claim(spool, job);
        if (i < length)
            assert_int_equal(claimed.n_blocks, most);
        else /* the line is lost, or the one behind a lost newline too */
            assert_in_range(claimed.n_blocks, 0, most);
        for (uint32_t k = 0; k < claimed.n_blocks; k++)
            assert_int_equal(claimed.tokens[k], k);
        ns_job_destroy(job);
        ns_spool_close(spool);
    }
    free(whole);
}

static void
a_second_run_on_the_same_output_is_refused(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool, *second = NULL;
    struct ns_error err;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 2);
    spool = open_ok(&options);
    assert_int_equal(ns_spool_open(&options, &second, &err), NS_RETRY);
    assert_string_equal(err.code, "locked");
    options.restart = true;
    assert_int_equal(ns_spool_open(&options, &second, &err), NS_RETRY);
    assert_string_equal(err.code, "locked");
    work_all(spool, 9);
    ns_spool_close(spool);
    assert_complete("out.jsonl", 2);
}

static void
bad_inputs_and_outputs_are_refused_with_a_sentence(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool = NULL;
    struct ns_error err;
    char *text;

    (void)state;
    folder_empty(folder_fd);
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "unreadable_input");
    options.input = folder;
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "unreadable_input");
    options = run_options();
    write_jobs("in.jsonl", 1);
    options.output = folder_path("in.jsonl");
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_output");
    options.output = folder_path("none/out");
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_output");
    options.output = folder;
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_output");
    assert_int_equal(symlinkat("loop", folder_fd, "loop"), 0);
    options.output = folder_path("loop"); /* cannot be opened, now or later */
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_output");
    options.output = folder_path("note.txt");
    folder_write("note.txt", "remember the milk\n", 18);
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "not_ours");
    text = folder_read("note.txt", NULL);
    assert_string_equal(text, "remember the milk\n");
    free(text);
    assert_null(spool);
}

static enum ns_store_outcome
give_back(struct ns_spool *spool, const struct ns_job *job, uint64_t fence,
          int64_t delay_ms, bool own_fault)
{
    struct ns_store *store = ns_spool_store(spool);
    struct ns_give_back backs[1] = { { .job = job,
                                       .fence = fence,
                                       .delay_ms = delay_ms,
                                       .own_fault = own_fault,
                                       .code = "nan" } };
    struct ns_error err;

    assert_int_equal(store->ops->retry(store, backs, 1, &err), NS_OK);
    return backs[0].outcome;
}

static void
a_job_given_back_waits_is_fenced_and_ends_after_three_failures(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_result late = answer("late");
    struct ns_heartbeat beat;
    enum ns_store_outcome outcome;
    struct ns_claim claimed, again;
    struct ns_spool *spool;
    struct ns_store *store;
    struct ns_error err;
    struct ns_job *job;
    struct row rows[2];

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 1);
    spool = open_ok(&options);
    store = ns_spool_store(spool);
    job = next_job(spool);
    claimed = claim(spool, job);
    assert_int_equal(claimed.attempt, 1);
    assert_int_equal(give_back(spool, job, claimed.fence, 60000, false),
                     NS_STORE_DONE);
    again = claim(spool, job);
    assert_int_equal(again.outcome, NS_CLAIM_WAIT);
    assert_in_range(again.wait_ms, 50000, 60000);
    ns_spool_close(spool);
    ns_job_destroy(job);

    spool = open_ok(&options);
    store = ns_spool_store(spool);
    job = next_job(spool);
    claimed = claim(spool, job);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(give_back(spool, job, claimed.fence, 0, true),
                         NS_STORE_DONE);
        if (i == 2)
            break;
        again = claim(spool, job);
        assert_int_equal(again.outcome, NS_CLAIM_RUN);
        assert_true(again.fence > claimed.fence);
        /* The former holder may write nothing any more. */
        assert_int_equal(
            try_finish(spool, job, claimed.fence, &late, &outcome, &err),
            NS_OK);
        assert_int_equal(outcome, NS_STORE_FENCED);
        assert_int_equal(give_back(spool, job, claimed.fence, 0, true),
                         NS_STORE_FENCED);
        beat = (struct ns_heartbeat){ .job = job, .fence = claimed.fence };
        assert_int_equal(store->ops->heartbeat(store, &beat, 1, &err), NS_OK);
        assert_int_equal(beat.outcome, NS_STORE_FENCED);
        beat.fence = again.fence;
        assert_int_equal(store->ops->heartbeat(store, &beat, 1, &err), NS_OK);
        assert_int_equal(beat.outcome, NS_STORE_DONE);
        claimed = again;
    }
    again = claim(spool, job);
    assert_int_equal(again.outcome, NS_CLAIM_FINAL);
    ns_source_acknowledge(ns_spool_source(spool), job->position);
    ns_job_destroy(job);
    ns_spool_close(spool);
    assert_int_equal(read_rows("out.jsonl", rows, 2), 1);
    assert_string_equal(rows[0].code, "nan");
}

static void
a_finish_asked_again_says_done_and_writes_nothing(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_result result = answer("once");
    enum ns_store_outcome outcome;
    struct ns_claim claimed;
    struct ns_spool *spool;
    struct ns_error err;
    struct ns_job *job;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 1);
    spool = open_ok(&options);
    job = next_job(spool);
    claimed = claim(spool, job);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(
            try_finish(spool, job, claimed.fence, &result, &outcome, &err),
            NS_OK);
        assert_int_equal(outcome, NS_STORE_DONE);
    }
    assert_int_equal(claim(spool, job).outcome, NS_CLAIM_FINAL);
    ns_job_destroy(job);
    ns_spool_close(spool);
    assert_complete("out.jsonl", 1);
}

static void
a_result_that_can_not_be_written_does_not_harm_its_neighbours(void **state)
{
    enum { HUGE = 257 << 20 };
    struct ns_spool_options options = run_options();
    struct ns_result results[3] = { answer("a"), answer(""), answer("c") };
    struct ns_finished ends[3];
    struct ns_spool *spool;
    struct ns_store *store;
    struct ns_job *jobs[3];
    struct ns_error err;
    struct row rows[4];
    char *huge = malloc(HUGE);

    (void)state;
    memset(huge, 'x', HUGE);
    results[1].content = huge;
    results[1].content_length = HUGE;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 3);
    spool = open_ok(&options);
    store = ns_spool_store(spool);
    for (int i = 0; i < 3; i++) {
        jobs[i] = next_job(spool);
        ends[i] = (struct ns_finished){ .job = jobs[i], .result = &results[i] };
        ends[i].fence = claim(spool, jobs[i]).fence;
    }
    assert_int_equal(store->ops->finish(store, ends, 3, &err), NS_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(ends[i].outcome, NS_STORE_DONE);
        ns_job_destroy(jobs[i]);
    }
    ns_spool_close(spool);
    free(huge);
    assert_int_equal(read_rows("out.jsonl", rows, 4), 3);
    assert_string_equal(rows[1].code, "result_too_large");
    assert_string_equal(rows[2].content, "c");
}

static void
an_input_that_changes_under_the_run_stops_it(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_error err;

    (void)state;
    for (int how = 0; how < 2; how++) {
        folder_empty(folder_fd);
        write_jobs("in.jsonl", 2000); /* more than one read */
        options.window = 5000;
        spool = open_ok(&options);
        work_all(spool, 3);
        if (how == 0) {
            assert_int_equal(truncate(folder_path("in.jsonl"), 100000), 0);
        } else {
            FILE *file = fopen(folder_path("in.jsonl"), "a");

            fputs("{}\n", file);
            fclose(file);
        }
        while (work_all(spool, 1) == 1)
            if (ns_spool_progress(spool).lines_handed_out > 400)
                break;
        assert_int_equal(poll_until_failure(spool, &err), NS_REJECT);
        assert_string_equal(err.code, "input_changed");
        ns_spool_close(spool);
    }
}

static void
the_window_bounds_what_is_handed_out(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_job *jobs[3];

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 10);
    options.window = 3;
    spool = open_ok(&options);
    for (int i = 0; i < 3; i++)
        jobs[i] = next_job(spool);
    assert_null(next_job(spool));
    assert_true(work(spool, jobs[1]));
    ns_job_destroy(jobs[1]);
    jobs[1] = next_job(spool);
    assert_non_null(jobs[1]);
    assert_null(next_job(spool));
    for (int i = 0; i < 3; i++)
        ns_job_destroy(jobs[i]);
    ns_spool_close(spool);
}

static void
a_hundred_thousand_jobs_take_a_few_bytes_each(void **state)
{
    enum { JOBS = 100000, BATCH = 250 };
    struct ns_spool_options options = run_options();
    struct ns_result result = answer("done");
    struct ns_spool *spool;
    struct ns_store *store;
    struct ns_job *jobs[BATCH];
    struct ns_claim claims[BATCH];
    struct ns_finished ends[BATCH];
    struct ns_error err;
    size_t before, most = 0;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", JOBS);
    before = mallinfo2().uordblks + mallinfo2().hblkhd;
    spool = open_ok(&options);
    store = ns_spool_store(spool);
    for (int done = 0; done < JOBS; done += BATCH) {
        size_t now;

        for (int i = 0; i < BATCH; i++) {
            jobs[i] = next_job(spool);
            assert_non_null(jobs[i]);
            claims[i] = (struct ns_claim){ .job = jobs[i], .seed = 1 };
        }
        assert_int_equal(store->ops->claim(store, claims, BATCH, &err), NS_OK);
        for (int i = 0; i < BATCH; i++)
            ends[i] = (struct ns_finished){ .job = jobs[i],
                                            .fence = claims[i].fence,
                                            .result = &result };
        assert_int_equal(store->ops->finish(store, ends, BATCH, &err), NS_OK);
        for (int i = 0; i < BATCH; i++) {
            ns_source_acknowledge(ns_spool_source(spool), jobs[i]->position);
            ns_job_destroy(jobs[i]);
        }
        now = mallinfo2().uordblks + mallinfo2().hblkhd;
        most = now > most ? now : most;
    }
    assert_null(next_job(spool));
    ns_spool_close(spool);
    if (most > before + 8u * 1000 * 1000)
        fail_msg("%zu bytes more", most - before);
    assert_complete("out.jsonl", JOBS);
    assert_int_equal(run_all(&options), 0); /* and all are known again */
}

/* A reader that said "nothing now" among lines that are done would be asked
 * again a second later: 100,000 of them took half a minute to pass. */
static void
lines_that_are_done_are_passed_without_a_pause(void **state)
{
    enum { JOBS = 10000 };
    struct ns_spool_options options = run_options();
    struct ns_message message;
    struct ns_spool *spool;
    struct ns_error err;
    int polls = 0;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", JOBS);
    assert_int_equal(run_all(&options), JOBS);
    spool = open_ok(&options);
    do {
        assert_int_equal(
            ns_source_poll(ns_spool_source(spool), 0, &message, &err), NS_OK);
        assert_true(message.kind == NS_MESSAGE_SKIPPED ||
                    message.kind == NS_MESSAGE_END);
        polls++;
    } while (message.kind != NS_MESSAGE_END);
    assert_true(polls > 1); /* and not all of them in one turn of the loop */
    ns_spool_close(spool);
}

/* Expands an LZ4 file of results into the file "plain". */
static void
unpack(const char *name)
{
    size_t length;
    char *packed = folder_read(name, &length);
    int fd = openat(folder_fd, "plain", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    LZ4F_dctx *lz4;

    assert_non_null(packed);
    assert_false(
        LZ4F_isError(LZ4F_createDecompressionContext(&lz4, LZ4F_VERSION)));
    for (size_t at = 0; at < length;) {
        char out[65536];
        size_t left = length - at, made = sizeof(out);

        assert_false(LZ4F_isError(
            LZ4F_decompress(lz4, out, &made, packed + at, &left, NULL)));
        at += left;
        assert_int_equal(write(fd, out, made), made);
    }
    LZ4F_freeDecompressionContext(lz4);
    close(fd);
    free(packed);
}

static void
compressed_input_and_output_resume_too(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    char text[4000], packed[4000];
    size_t n;

    (void)state;
    folder_empty(folder_fd);
    n = job_lines(text, sizeof(text), 1, 6);
    n = LZ4F_compressFrame(packed, sizeof(packed), text, n, NULL);
    assert_false(LZ4F_isError(n));
    folder_write("in.jsonl", packed, n); /* the name does not say it */
    options.output = folder_path("out.jsonl.lz4");
    spool = open_ok(&options);
    assert_int_equal(work_all(spool, 2), 2);
    ns_spool_close(spool);
    assert_int_equal(run_all(&options), 4);
    unpack("out.jsonl.lz4");
    assert_complete("plain", 6);
}

static void
standard_input_is_read_as_it_comes(void **state)
{
    struct ns_spool_options options = run_options();
    int fds[2], saved = dup(STDIN_FILENO);
    struct ns_spool *spool;
    char text[1000];
    size_t n;

    (void)state;
    folder_empty(folder_fd);
    n = job_lines(text, sizeof(text), 1, 3);
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(dup2(fds[0], STDIN_FILENO), STDIN_FILENO);
    close(fds[0]);
    options.input = "-";
    spool = open_ok(&options);
    assert_int_equal(write(fds[1], text, n / 2), n / 2);
    while (work_all(spool, 1) == 1) {
    }
    assert_int_equal(write(fds[1], text + n / 2, n - n / 2), n - n / 2);
    close(fds[1]);
    while (ns_spool_progress(spool).ok < 3)
        work_all(spool, 9);
    ns_spool_close(spool);
    assert_int_equal(dup2(saved, STDIN_FILENO), STDIN_FILENO);
    close(saved);
    assert_complete("out.jsonl", 3);
}

/* Row 33: whatever call fails, once, the run ends complete on the second try;
 * and the retry of the same items is enough. */
static void
any_failing_call_of_a_run_costs_at_most_a_retry(void **state)
{
    struct ns_spool_options options = run_options();
    bool fired = true;

    (void)state;
    patient = false;
    ns_log_set_level(0);
    for (int n = 0; fired; n++) {
        struct ns_spool *spool = NULL;
        struct ns_error err;
        enum ns_status status;

        folder_empty(folder_fd);
        write_jobs("in.jsonl", 3);
        faulty_arm(n, n % 2 ? ENOSPC : EIO, false);
        status = ns_spool_open(&options, &spool, &err);
        for (int i = 0; status == NS_OK && i < 20; i++) {
            struct ns_message message;

            if (ns_source_poll(ns_spool_source(spool), 0, &message, &err) !=
                NS_OK)
                continue;
            if (message.kind == NS_MESSAGE_END)
                break;
            if (message.kind == NS_MESSAGE_JOB) {
                struct ns_job *job = parse(&message);

                while (!work(spool, job)) {
                }
                ns_job_destroy(job);
            }
        }
        fired = faulty_fired();
        if (status == NS_OK)
            assert_complete("out.jsonl", 3);
        ns_spool_close(spool);
        run_all(&options);
        assert_complete("out.jsonl", 3);
    }
    ns_log_set_level(NS_LOG_INFO);
    patient = true;
}

static void
memory_running_out_at_open_is_an_error_and_no_leak(void **state)
{
    struct ns_spool_options options = run_options();
    enum ns_status status = NS_FATAL;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 2);
    run_all(&options);
    for (int n = 0; status != NS_OK; n++) {
        struct ns_spool *spool = NULL;
        struct ns_error err;
        bool fired;

        fault_arm(n);
        status = ns_spool_open(&options, &spool, &err);
        fired = fault_fired();
        if (status != (fired ? NS_FATAL : NS_OK))
            fail_msg("allocation %d: %s", n, err.text);
        ns_spool_close(spool);
    }
    assert_int_equal(run_all(&options), 0);
    assert_complete("out.jsonl", 2);
}

/* ---- a directory ----------------------------------------------------- */

static void
make_directory(void)
{
    static const char *const names[] = { "in", "work", "out", "done", "dead" };

    folder_empty(folder_fd);
    for (int i = 0; i < 5; i++)
        mkdirat(folder_fd, names[i], 0700);
}

/* Works until two looks at the folder bring nothing more. */
static int
serve(struct ns_spool *spool)
{
    int n = 0, idle = 0;

    while (idle < 3) {
        int did = work_all(spool, 1000);

        n += did;
        idle = did ? 0 : idle + 1;
    }
    return n;
}

static int
serve_once(void)
{
    struct ns_spool_options options = directory_options();
    struct ns_spool *spool = open_ok(&options);
    int n = serve(spool);

    ns_spool_close(spool);
    return n;
}

static void
files_pass_from_in_to_out_and_done(void **state)
{
    char text[1000], packed[2000];
    size_t n;

    (void)state;
    make_directory();
    write_jobs("in/a.jsonl", 3);
    n = job_lines(text, sizeof(text), 1, 2);
    n = LZ4F_compressFrame(packed, sizeof(packed), text, n, NULL);
    folder_write("in/b.jsonl.lz4", packed, n);
    folder_write("in/.hidden.jsonl", "", 0);
    folder_write("in/c.jsonl.tmp", "", 0);
    folder_write("in/d.jsonl.part", "", 0);
    folder_write("in/e.txt", "", 0);
    folder_write("in/f.jsonl", "", 0);
    assert_int_equal(symlinkat("a.jsonl", folder_fd, "in/g.jsonl"), 0);
    assert_int_equal(serve_once(), 5);
    assert_complete("out/a.jsonl", 3);
    assert_true(folder_has("done/a.jsonl"));
    assert_true(folder_has("done/b.jsonl.lz4"));
    assert_true(folder_has("out/b.jsonl.lz4"));
    assert_complete("out/f.jsonl", 0);
    assert_true(folder_has("in/.hidden.jsonl"));
    assert_true(folder_has("in/c.jsonl.tmp"));
    assert_true(folder_has("in/d.jsonl.part"));
    assert_true(folder_has("in/e.txt"));
    assert_true(folder_has("in/g.jsonl"));
    assert_false(folder_has("out/a.jsonl.part"));
    assert_false(folder_has("work/a.jsonl"));
}

static void
a_second_file_of_a_name_gets_one_of_its_own(void **state)
{
    (void)state;
    make_directory();
    write_jobs("in/a.jsonl", 1);
    serve_once();
    write_jobs("in/a.jsonl", 2);
    serve_once();
    assert_complete("out/a.jsonl", 1);
    assert_complete("out/a~2.jsonl", 2);
    assert_true(folder_has("done/a~2.jsonl"));
}

static void
a_second_daemon_is_refused_and_the_first_unharmed(void **state)
{
    struct ns_spool_options options = directory_options();
    struct ns_spool *spool, *second = NULL;
    struct ns_error err;
    char pid[32];

    (void)state;
    make_directory();
    write_jobs("in/a.jsonl", 2);
    spool = open_ok(&options);
    assert_int_equal(ns_spool_open(&options, &second, &err), NS_RETRY);
    assert_string_equal(err.code, "locked");
    snprintf(pid, sizeof(pid), "process %ld", (long)getpid());
    assert_non_null(strstr(err.text, pid));
    assert_int_equal(serve(spool), 2);
    ns_spool_close(spool);
    assert_complete("out/a.jsonl", 2);
    ns_spool_close(open_ok(&options)); /* a lock left behind is free */
}

static void
a_missing_directory_is_refused(void **state)
{
    struct ns_spool_options options = directory_options();
    struct ns_spool *spool = NULL;
    struct ns_error err;

    (void)state;
    options.directory = folder_path("nowhere");
    assert_int_equal(ns_spool_open(&options, &spool, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_spool");
}

static void
append_a_line(const char *path)
{
    FILE *file = fopen(path, "a");

    assert_non_null(file);
    fputs("{}\n", file);
    fclose(file);
}

/* By another file of its size and time. */
static void
replace_it(const char *path)
{
    struct timespec times[2];
    char other[PATH_MAX];
    struct stat st;

    snprintf(other, sizeof(other), "%s.new", path);
    assert_int_equal(stat(path, &st), 0);
    append_a_line(other);
    assert_int_equal(truncate(other, st.st_size), 0);
    times[0] = st.st_atim;
    times[1] = st.st_mtim;
    assert_int_equal(utimensat(AT_FDCWD, other, times, 0), 0);
    assert_int_equal(rename(other, path), 0);
}

static void
check_change(void (*change)(const char *path))
{
    struct ns_spool_options options = directory_options();
    struct ns_spool *spool;
    struct ns_job *job;
    char *reason;
    struct row rows[4];

    make_directory();
    write_jobs("in/a.jsonl", 3);
    write_jobs("in/b.jsonl", 2);
    spool = open_ok(&options);
    work_all(spool, 1);
    job = next_job(spool);
    change(folder_path("work/a.jsonl"));
    serve(spool); /* notices it at the latest at the end */
    assert_true(folder_has("work/a.jsonl")); /* one is in flight */
    assert_int_equal(claim(spool, job).outcome, NS_CLAIM_FINAL);
    ns_source_acknowledge(ns_spool_source(spool), job->position);
    ns_job_destroy(job);
    serve(spool);
    ns_spool_close(spool);
    reason = folder_read("dead/a.jsonl.reason", NULL);
    assert_non_null(reason);
    assert_non_null(strstr(reason, "input_changed"));
    free(reason);
    assert_true(folder_has("dead/a.jsonl"));
    assert_false(folder_has("done/a.jsonl"));
    assert_complete("out/b.jsonl", 2); /* others are untouched */
    /* What was done by then is published; line 2, in flight, is not. */
    assert_int_equal(read_rows("out/a.jsonl", rows, 4), 2);
    assert_int_equal(rows[0].line, 1);
    assert_int_equal(rows[1].line, 3);
}

static void
a_file_that_changes_goes_to_dead_with_its_reason(void **state)
{
    (void)state;
    check_change(append_a_line);
    check_change(replace_it);
}

static void
a_corrupt_lz4_file_is_answered_as_far_as_it_can_be_read(void **state)
{
    static char text[400000], packed[400000];
    LZ4F_preferences_t preferences = {
        .frameInfo = { .blockChecksumFlag = LZ4F_blockChecksumEnabled }
    };
    size_t n;
    char *reason;
    struct row *rows = calloc(3001, sizeof(*rows));
    int got;

    (void)state;
    make_directory();
    n = job_lines(text, sizeof(text), 1, 3000);
    n = LZ4F_compressFrame(packed, sizeof(packed), text, n, &preferences);
    assert_false(LZ4F_isError(n));
    packed[n - 20] ^= 1;
    folder_write("in/a.jsonl.lz4", packed, n);
    serve_once();
    reason = folder_read("dead/a.jsonl.lz4.reason", NULL);
    assert_non_null(reason);
    assert_non_null(strstr(reason, "bad_lz4"));
    free(reason);
    assert_true(folder_has("dead/a.jsonl.lz4"));
    unpack("out/a.jsonl.lz4");
    got = read_rows("plain", rows, 3001);
    assert_in_range(got, 1000, 2999); /* the last block was damaged */
    assert_complete("plain", got);
    free(rows);
}

/* The four writes that a job causes, each of which may meet a full disk. */
enum write { ON_CLAIM, ON_BLOCK, ON_GIVING_BACK, ON_RESULT, N_WRITES };

static enum ns_status
try_write(enum write write, struct ns_spool *spool, struct ns_job *job,
          uint64_t fence, struct ns_error *err)
{
    static const int32_t token[] = { 7 };
    struct ns_store *store = ns_spool_store(spool);
    struct ns_claim claims[1] = {
        { .job = job, .mode = NS_JOB_DIFFUSION, .seed = 7 }
    };
    struct ns_checkpoint points[1] = {
        { .job = job, .fence = fence, .tokens = token, .n_tokens = 1 }
    };
    struct ns_give_back backs[1] = { { .job = job, .fence = fence } };
    struct ns_result result = answer("done");
    enum ns_store_outcome outcome;

    switch (write) {
    case ON_CLAIM:
        return store->ops->claim(store, claims, 1, err);
    case ON_BLOCK:
        return store->ops->checkpoint(store, points, 1, err);
    case ON_GIVING_BACK:
        return store->ops->retry(store, backs, 1, err);
    default:
        return try_finish(spool, job, fence, &result, &outcome, err);
    }
}

static void
a_full_disk_stops_intake_and_passes(void **state)
{
    (void)state;
    ns_log_set_level(0);
    for (enum write write = 0; write < N_WRITES; write++) {
        struct ns_spool_options options = directory_options();
        struct ns_spool *spool;
        struct ns_error err;
        struct ns_job *job;
        uint64_t fence = 0;

        make_directory();
        write_jobs("in/a.jsonl", 3);
        spool = open_ok(&options);
        job = next_job(spool);
        if (write != ON_CLAIM)
            fence = claim(spool, job).fence;
        faulty.only = "write";
        faulty_arm(0, ENOSPC, true);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(try_write(write, spool, job, fence, &err),
                             NS_RETRY);
            assert_string_equal(err.code, "storage_full");
            assert_true(ns_spool_progress(spool).storage_full);
            assert_null(next_job(spool));
        }
        faulty_fired();
        faulty.only = NULL;
        assert_int_equal(try_write(write, spool, job, fence, &err), NS_OK);
        assert_false(ns_spool_progress(spool).storage_full);
        if (write != ON_RESULT)
            finish(spool, job, claim(spool, job).fence, "done");
        ns_source_acknowledge(ns_spool_source(spool), job->position);
        ns_job_destroy(job);
        serve(spool);
        ns_spool_close(spool);
        assert_complete("out/a.jsonl", 3);
    }
    ns_log_set_level(NS_LOG_INFO);
}

/* Row 34, with the kernel's own refusal: files may not grow beyond a limit,
 * and then they may. */
static void
a_real_limit_on_the_file_is_met_and_passes(void **state)
{
    struct ns_spool_options options = run_options();
    struct ns_result result = answer("done");
    struct rlimit limit, tight;
    enum ns_store_outcome outcome;
    struct ns_spool *spool;
    struct ns_error err;
    struct ns_job *job;
    int failures = 0;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 10);
    signal(SIGXFSZ, SIG_IGN);
    ns_log_set_level(0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    tight = limit;
    tight.rlim_cur = 3000; /* in the middle of a line */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    spool = open_ok(&options);
    while ((job = next_job(spool)) != NULL) {
        struct ns_claim claimed = claim(spool, job);

        while (try_finish(spool, job, claimed.fence, &result, &outcome,
                          &err) == NS_RETRY) {
            assert_string_equal(err.code, "storage_full");
            if (++failures == 3)
                assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        }
        ns_source_acknowledge(ns_spool_source(spool), job->position);
        ns_job_destroy(job);
    }
    ns_spool_close(spool);
    ns_log_set_level(NS_LOG_INFO);
    assert_int_equal(failures, 3);
    assert_complete("out.jsonl", 10);
}

/* Rows 33 and 38 in one: the daemon is gone at its n-th call, for every n; the
 * next one ends with each line exactly once, and with the file in its place. */
static void
dying_at_any_call_leaves_each_line_once(void **state)
{
    bool fired = true, published;
    int served;

    (void)state;
    patient = false;
    ns_log_set_level(0);
    for (int n = 0; fired; n++) {
        struct ns_spool_options options = directory_options();
        struct ns_spool *spool = NULL;
        struct ns_error err;

        make_directory();
        write_jobs("in/a.jsonl", 3);
        faulty_arm(n, EIO, true);
        if (ns_spool_open(&options, &spool, &err) == NS_OK)
            for (int i = 0; i < 20; i++) {
                struct ns_message message;

                if (ns_source_poll(ns_spool_source(spool), 0, &message, &err) !=
                    NS_OK)
                    break;
                if (message.kind == NS_MESSAGE_JOB) {
                    struct ns_job *job = parse(&message);
                    bool stored = work(spool, job);

                    ns_job_destroy(job);
                    if (!stored)
                        break;
                }
            }
        fired = faulty.fired;
        ns_spool_close(spool); /* still failing: it does no more than a kill */
        faulty_fired();
        published = folder_has("out/a.jsonl");
        served = serve_once();
        if (published) /* what stands is neither redone nor overwritten */
            assert_int_equal(served, 0);
        assert_complete("out/a.jsonl", 3);
        assert_true(folder_has("done/a.jsonl"));
        assert_false(folder_has("out/a.jsonl.part"));
        assert_false(folder_has("out/a~2.jsonl"));
    }
    ns_log_set_level(NS_LOG_INFO);
    patient = true;
}

static void
a_loop_of_kills_leaves_each_line_once(void **state)
{
    enum { JOBS = 200, KILLS = 25 };
    int kills = 0, status = 0;

    (void)state;
    make_directory();
    write_jobs("in/a.jsonl", JOBS);
    srand(1);
    for (;;) {
        struct timespec nap = { 0, (rand() % 12 + 1) * 1000000 };
        pid_t pid = fork();

        assert_true(pid >= 0);
        if (pid == 0) {
            struct ns_spool_options options = directory_options();
            struct ns_spool *spool = NULL;
            struct ns_error err;

            ns_log_set_level(0);
            if (ns_spool_open(&options, &spool, &err) != NS_OK)
                _exit(9);
            while (faccessat(folder_fd, "done/a.jsonl", F_OK, 0) == -1)
                if (work_all(spool, 1) == 1)
                    usleep(200);
            _exit(0); /* not even a close */
        }
        if (kills < KILLS) {
            nanosleep(&nap, NULL);
            kill(pid, SIGKILL);
            kills++;
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status))
            break;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_complete("out/a.jsonl", JOBS);
}

/* Row 44, the store's part: a job that takes its process down with it is run
 * alone from the second takeover on, and given up after the third; a block in
 * between, or a drain, begins the count anew. */
static void
a_job_that_kills_its_process_is_given_up(void **state)
{
    static const int32_t token[] = { 1 };
    struct ns_spool_options options = directory_options();
    struct row rows[2];

    (void)state;
    make_directory();
    write_jobs("in/a.jsonl", 1);
    for (int life = 0;; life++) {
        struct ns_spool *spool = open_ok(&options);
        struct ns_job *job = next_job(spool);
        struct ns_claim claimed = claim(spool, job);

        /* Lives 0 1 2, then a drain in life 3, then a block in life 5. */
        static const uint32_t stalls[] = { 0, 1, 2, 3, 0, 1, 1, 2, 3 };

        if (life == sizeof(stalls) / sizeof(stalls[0])) {
            assert_int_equal(claimed.outcome, NS_CLAIM_FINAL);
            ns_source_acknowledge(ns_spool_source(spool), job->position);
            ns_job_destroy(job);
            serve(spool);
            ns_spool_close(spool);
            break;
        }
        assert_int_equal(claimed.outcome, NS_CLAIM_RUN);
        assert_int_equal(claimed.stalls, stalls[life]);
        if (life == 3)
            assert_int_equal(give_back(spool, job, claimed.fence, 0, false),
                             NS_STORE_DONE);
        if (life == 5)
            checkpoint(spool, job, claimed.fence, 0, token, 1);
        ns_job_destroy(job);
        ns_spool_close(spool); /* killed: no result */
    }
    assert_int_equal(read_rows("out/a.jsonl", rows, 2), 1);
    assert_string_equal(rows[0].code, "stalled");
    assert_false(folder_has("work/a.jsonl.blocks"));
}

/* Finished jobs' blocks do not pile up, and those of a job that still runs
 * survive the file's being written anew. */
static void
the_file_of_blocks_shrinks_and_keeps_what_matters(void **state)
{
    enum { JOBS = 300, TOKENS = 1000 };
    struct ns_spool_options options = run_options();
    struct ns_spool *spool;
    struct ns_job *slow, *job;
    struct ns_claim claimed, slow_claim;
    int32_t tokens[TOKENS];
    struct stat st;
    off_t most = 0;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", JOBS);
    for (int i = 0; i < TOKENS; i++)
        tokens[i] = i;
    spool = open_ok(&options);
    slow = next_job(spool);
    slow_claim = claim(spool, slow);
    checkpoint(spool, slow, slow_claim.fence, 0, tokens, TOKENS);
    for (int i = 1; i < JOBS; i++) {
        job = next_job(spool);
        claimed = claim(spool, job);
        checkpoint(spool, job, claimed.fence, 0, tokens, TOKENS);
        finish(spool, job, claimed.fence, "done");
        ns_job_destroy(job);
        assert_int_equal(fstatat(folder_fd, "out.jsonl.blocks", &st, 0), 0);
        most = st.st_size > most ? st.st_size : most;
        if (i == JOBS / 2)
            checkpoint(spool, slow, slow_claim.fence, 1, tokens + 5, 3);
    }
    assert_true(most < 1200 * 1000); /* of 2.4 MB written */
    ns_job_destroy(slow);
    ns_spool_close(spool);
    spool = open_ok(&options);
    slow = next_job(spool);
    claimed = claim(spool, slow);
    assert_int_equal(claimed.n_blocks, 2);
    assert_int_equal(claimed.n_tokens, TOKENS + 3);
    assert_memory_equal(claimed.tokens, tokens, sizeof(tokens));
    assert_int_equal(claimed.tokens[TOKENS + 2], 7);
    ns_job_destroy(slow);
    ns_spool_close(spool);
}

/* The two ends are used from two threads: nothing to assert but what the
 * thread sanitizer sees, and that all is there. */
struct relay {
    struct ns_spool *spool;
    struct ns_job *jobs[16];
    int n;
    bool over;
    pthread_mutex_t mutex;
};

static void *
sink(void *data)
{
    struct relay *relay = data;

    for (;;) {
        struct ns_job *job = NULL;
        bool over;

        pthread_mutex_lock(&relay->mutex);
        if (relay->n)
            job = relay->jobs[--relay->n];
        over = relay->over;
        pthread_mutex_unlock(&relay->mutex);
        if (job) {
            struct ns_claim claimed = claim(relay->spool, job);

            finish(relay->spool, job, claimed.fence, "done");
            ns_job_destroy(job);
        } else if (over) {
            return NULL;
        }
    }
}

static void
two_threads_share_a_spool(void **state)
{
    struct ns_spool_options options = run_options();
    struct relay relay = { .n = 0 };
    pthread_t thread;

    (void)state;
    folder_empty(folder_fd);
    write_jobs("in.jsonl", 500);
    relay.spool = open_ok(&options);
    pthread_mutex_init(&relay.mutex, NULL);
    assert_int_equal(pthread_create(&thread, NULL, sink, &relay), 0);
    for (int i = 0; i < 500;) {
        bool room;

        pthread_mutex_lock(&relay.mutex);
        room = relay.n < 16;
        pthread_mutex_unlock(&relay.mutex);
        if (room) {
            struct ns_job *job = next_job(relay.spool);

            (void)ns_spool_progress(relay.spool);
            pthread_mutex_lock(&relay.mutex);
            if (job)
                relay.jobs[relay.n++] = job;
            pthread_mutex_unlock(&relay.mutex);
            i += job != NULL;
        }
    }
    pthread_mutex_lock(&relay.mutex);
    relay.over = true;
    pthread_mutex_unlock(&relay.mutex);
    pthread_join(thread, NULL);
    pthread_mutex_destroy(&relay.mutex);
    ns_spool_close(relay.spool);
    assert_complete("out.jsonl", 500);
}

static int
setup(void **state)
{
    (void)state;
    folder_open();
    return 0;
}

static int
teardown(void **state)
{
    (void)state;
    folder_close();
    return 0;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_is_answered_line_by_line_and_then_done),
        cmocka_unit_test(a_run_that_stopped_goes_on),
        cmocka_unit_test(an_output_cut_at_any_byte_is_completed),
        cmocka_unit_test(
            an_edited_line_with_a_result_stops_the_run_unless_it_begins_anew),
        cmocka_unit_test(a_line_inserted_above_stops_the_run_too),
        cmocka_unit_test(lines_added_behind_are_simply_run),
        cmocka_unit_test(a_bad_line_costs_one_line_and_may_run_again),
        cmocka_unit_test(
            the_first_line_of_an_id_has_it_whatever_the_order_of_claims),
        cmocka_unit_test(committed_blocks_come_back_to_whom_they_fit),
        cmocka_unit_test(damaged_blocks_yield_a_prefix),
        cmocka_unit_test(a_second_run_on_the_same_output_is_refused),
        cmocka_unit_test(bad_inputs_and_outputs_are_refused_with_a_sentence),
        cmocka_unit_test(
            a_job_given_back_waits_is_fenced_and_ends_after_three_failures),
        cmocka_unit_test(a_finish_asked_again_says_done_and_writes_nothing),
        cmocka_unit_test(
            a_result_that_can_not_be_written_does_not_harm_its_neighbours),
        cmocka_unit_test(an_input_that_changes_under_the_run_stops_it),
        cmocka_unit_test(the_window_bounds_what_is_handed_out),
        cmocka_unit_test(a_hundred_thousand_jobs_take_a_few_bytes_each),
        cmocka_unit_test(lines_that_are_done_are_passed_without_a_pause),
        cmocka_unit_test(compressed_input_and_output_resume_too),
        cmocka_unit_test(standard_input_is_read_as_it_comes),
        cmocka_unit_test(any_failing_call_of_a_run_costs_at_most_a_retry),
        cmocka_unit_test(memory_running_out_at_open_is_an_error_and_no_leak),
        cmocka_unit_test(files_pass_from_in_to_out_and_done),
        cmocka_unit_test(a_second_file_of_a_name_gets_one_of_its_own),
        cmocka_unit_test(a_second_daemon_is_refused_and_the_first_unharmed),
        cmocka_unit_test(a_missing_directory_is_refused),
        cmocka_unit_test(a_file_that_changes_goes_to_dead_with_its_reason),
        cmocka_unit_test(
            a_corrupt_lz4_file_is_answered_as_far_as_it_can_be_read),
        cmocka_unit_test(a_full_disk_stops_intake_and_passes),
        cmocka_unit_test(a_real_limit_on_the_file_is_met_and_passes),
        cmocka_unit_test(dying_at_any_call_leaves_each_line_once),
        cmocka_unit_test(a_loop_of_kills_leaves_each_line_once),
        cmocka_unit_test(a_job_that_kills_its_process_is_given_up),
        cmocka_unit_test(the_file_of_blocks_shrinks_and_keeps_what_matters),
        cmocka_unit_test(two_threads_share_a_spool),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
