/* The PostgreSQL store against a real server. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <lz4frame.h>
#include <time.h>

#include "connectors/postgres.h"
#include "connectors/postgres_link.h"
#include "tests/connectors/postgres_server.h"
#include "tests/fault.h"

static PGconn *admin; /* superuser */
static char conninfo[256];

/* ---- the test's own eyes ---------------------------------------------- */

static PGresult *
sql(const char *format, ...) __attribute__((format(printf, 1, 2)));
static PGresult *
sql(const char *format, ...)
{
    char text[4096];
    PGresult *result;
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    result = PQexec(admin, text);
    if (PQresultStatus(result) != PGRES_COMMAND_OK &&
        PQresultStatus(result) != PGRES_TUPLES_OK)
        fail_msg("%s: %s", text, PQerrorMessage(admin));
    return result;
}

#define DO(...) PQclear(sql(__VA_ARGS__))

/* The one value of a query; static, four at a time. */
static const char *
value(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *
value(const char *format, ...)
{
    static char out[4][4096];
    static int next;
    char text[2048], *to = out[next++ % 4];
    PGresult *result;
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    result = sql("%s", text);
    if (PQntuples(result) != 1)
        fail_msg("%s: %d rows", text, PQntuples(result));
    snprintf(to, sizeof(out[0]), "%s",
             PQgetisnull(result, 0, 0) ? "NULL" : PQgetvalue(result, 0, 0));
    PQclear(result);
    return to;
}

static int64_t
number(const char *query)
{
    return strtoll(value("%s", query), NULL, 10);
}

static void
set_conninfo(int port)
{
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=nsd dbname=postgres", port);
}

static int
setup(void **state)
{
    struct ns_postgres_options options = { .conninfo = conninfo };
    struct ns_error err;

    (void)state;
    signal(SIGPIPE, SIG_IGN);
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=postgres", pg_server.port);
    if (ns_postgres_init(&options, &err) != NS_OK) {
        fprintf(stderr, "init: %s\n", err.text);
        return -1;
    }
    DO("CREATE ROLE nsd LOGIN IN ROLE nightshift_rw");
    DO("CREATE ROLE submitter LOGIN IN ROLE nightshift_submit");
    DO("CREATE ROLE locked_out LOGIN IN ROLE nightshift_rw");
    DO("SET client_min_messages = warning");
    return 0;
}

static int
teardown(void **state)
{
    (void)state;
    PQfinish(admin);
    pg_remove();
    return 0;
}

static int
clean(void **state)
{
    (void)state;
    DO("TRUNCATE nightshift.job, nightshift.result, nightshift.block,"
       " nightshift.dead_letter, nightshift.batch, nightshift.document");
    set_conninfo(pg_server.port);
    return 0;
}

/* ---- jobs and stores -------------------------------------------------- */

static struct ns_job *
make_job_of(const char *line, uint64_t offset)
{
    static const struct ns_job_options options;
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .partition = 1, .offset = offset },
        .origin = "jobs/3",
        .bytes = line,
        .length = strlen(line),
    };
    struct ns_job *job = NULL;
    struct ns_error err;
    uint64_t hash = 1469598103934665603u;

    for (const char *at = line; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    memcpy(message.sha256, &hash, sizeof(hash));
    ns_job_parse(&message, &options, &job, &err);
    assert_non_null(job);
    return job;
}

static struct ns_job *
make_job(const char *id, const char *extra)
{
    char line[1024];

    snprintf(line, sizeof(line),
             "{\"custom_id\":\"%s\",\"body\":{\"messages\":[{\"role\":"
             "\"user\",\"content\":\"hi\"}]}%s}", id, extra);
    return make_job_of(line, 7);
}

static struct ns_store *
open_store_with(const struct ns_postgres_options *given)
{
    struct ns_postgres_options options = *given;
    struct ns_store *store = NULL;
    struct ns_error err = { 0 };

    options.conninfo = conninfo;
    if (!options.model_rev)
        options.model_rev = "m1";
    if (!options.engine_rev)
        options.engine_rev = "e1";
    if (ns_postgres_store_open(&options, &store, &err) != NS_OK)
        fail_msg("open: %s", err.text);
    return store;
}

static struct ns_store *
open_store(int64_t lease_ms)
{
    struct ns_postgres_options options = { .lease_ms = lease_ms };

    return open_store_with(&options);
}

static struct ns_claim
claim(struct ns_store *store, struct ns_job *job)
{
    struct ns_claim claim = { .job = job, .mode = NS_JOB_DIFFUSION,
                              .seed = 42 };
    struct ns_error err = { 0 };

    if (store->ops->claim(store, &claim, 1, &err) != NS_OK)
        fail_msg("claim: %s", err.text);
    return claim;
}

static struct ns_claim
claim_run(struct ns_store *store, struct ns_job *job)
{
    struct ns_claim got = claim(store, job);

    assert_int_equal(got.outcome, NS_CLAIM_RUN);
    return got;
}

static struct ns_result
ok_result(const char *content, size_t length)
{
    return (struct ns_result){
        .status = NS_RESULT_OK,
        .content = content,
        .content_length = length,
        .finish_reason = "stop",
        .model = "demo",
        .mode = NS_JOB_DIFFUSION,
        .seed = 42,
        .prompt_tokens = 10,
        .cached_tokens = 4,
        .completion_tokens = 7,
        .blocks = 1,
        .passes = 9,
        .denoise_steps = 8,
        .queued_ms = 5,
        .run_ms = 900,
        .model_rev = "m1",
        .engine_rev = "e1",
    };
}

static enum ns_store_outcome
finish_with(struct ns_store *store, const struct ns_job *job, uint64_t fence,
            const struct ns_result *result)
{
    struct ns_finished end = { .job = job, .fence = fence, .result = result };
    struct ns_error err = { 0 };

    if (store->ops->finish(store, &end, 1, &err) != NS_OK)
        fail_msg("finish: %s", err.text);
    return end.outcome;
}

static enum ns_store_outcome
finish(struct ns_store *store, const struct ns_job *job, uint64_t fence)
{
    struct ns_result result = ok_result("done", 4);

    return finish_with(store, job, fence, &result);
}

static enum ns_store_outcome
checkpoint(struct ns_store *store, const struct ns_job *job, uint64_t fence,
           uint32_t block, int32_t first)
{
    int32_t tokens[3] = { first, first + 1, first + 2 };
    struct ns_checkpoint point = { .job = job, .fence = fence, .block = block,
                                   .tokens = tokens, .n_tokens = 3 };
    struct ns_error err = { 0 };

    if (store->ops->checkpoint(store, &point, 1, &err) != NS_OK)
        fail_msg("checkpoint: %s", err.text);
    return point.outcome;
}

static struct ns_heartbeat
beat(struct ns_store *store, const struct ns_job *job, uint64_t fence)
{
    struct ns_heartbeat beat = { .job = job, .fence = fence };
    struct ns_error err = { 0 };

    if (store->ops->heartbeat(store, &beat, 1, &err) != NS_OK)
        fail_msg("heartbeat: %s", err.text);
    return beat;
}

static enum ns_store_outcome
give_back(struct ns_store *store, const struct ns_job *job, uint64_t fence,
          int64_t delay_ms, bool own)
{
    struct ns_give_back back = { .job = job, .fence = fence,
                                 .delay_ms = delay_ms, .own_fault = own,
                                 .code = "out_of_memory" };
    struct ns_error err = { 0 };

    if (store->ops->retry(store, &back, 1, &err) != NS_OK)
        fail_msg("retry: %s", err.text);
    return back.outcome;
}

static void
refuse(struct ns_store *store, const struct ns_job *job,
       const struct ns_error *error, const char *payload)
{
    struct ns_refusal refusal = {
        .job = job, .error = *error, .payload = payload,
        .payload_length = payload ? strlen(payload) : 0,
    };
    struct ns_error err = { 0 };

    if (store->ops->refuse(store, &refusal, 1, &err) != NS_OK)
        fail_msg("refuse: %s", err.text);
    assert_int_equal(refusal.outcome, NS_STORE_DONE);
}

static void
lapse(const char *id) /* its lease has run out */
{
    DO("UPDATE nightshift.job SET lease_until = clock_timestamp()"
       " - interval '1 s' WHERE job_id = '%s'", id);
}

/* What an LZ4 frame of a query's bytea holds. */
static char *
unpacked(const char *query, size_t *length)
{
    PGresult *result = PQexecParams(admin, query, 0, NULL, NULL, NULL, NULL,
                                    1);
    size_t n_in = (size_t)PQgetlength(result, 0, 0), n_out = 16 << 20, n;
    LZ4F_dctx *context;
    char *out = malloc(n_out + 1);

    assert_int_equal(PQntuples(result), 1);
    LZ4F_createDecompressionContext(&context, LZ4F_VERSION);
    n = LZ4F_decompress(context, out, &n_out, PQgetvalue(result, 0, 0), &n_in,
                        NULL);
    assert_int_equal(n, 0); /* whole */
    LZ4F_freeDecompressionContext(context);
    PQclear(result);
    out[n_out] = '\0';
    *length = n_out;
    return out;
}

/* ---- schema ----------------------------------------------------------- */

static void
the_schema_is_installed_once_and_its_version_judged(void **state)
{
    struct ns_postgres_options options = { .conninfo = conninfo };
    struct ns_store *store;
    struct ns_error err;
    int from = 0;

    (void)state;
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=template1",
             pg_server.port);
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "postgres_setup");
    assert_non_null(strstr(err.text, "nightshift db init"));
    assert_int_equal(ns_postgres_migrate(&options, &from, &err), NS_REJECT);

    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=postgres", pg_server.port);
    assert_int_equal(ns_postgres_init(&options, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "there already"));
    assert_int_equal(ns_postgres_migrate(&options, &from, &err), NS_OK);
    assert_int_equal(from, NS_POSTGRES_SCHEMA);

    DO("INSERT INTO nightshift.schema_version (version) VALUES (99)");
    assert_int_equal(ns_postgres_migrate(&options, &from, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "newer"));
    set_conninfo(pg_server.port);
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "newer nightshift"));
    DO("DELETE FROM nightshift.schema_version WHERE version = 99");
}

/* ---- one job ---------------------------------------------------------- */

static void
a_job_is_claimed_kept_checkpointed_and_stored(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", ",\"nightshift\":{\"batch\":\"b\","
                                  "\"tenant\":\"t\",\"priority\":3}");
    struct ns_claim got = claim_run(store, job);
    char *line;
    size_t n;

    (void)state;
    assert_int_equal(got.attempt, 1);
    assert_int_equal(got.stalls, 0);
    assert_int_equal(got.n_blocks, 0);
    assert_int_equal(got.stored_mode, NS_JOB_DIFFUSION);
    assert_int_equal(got.stored_seed, 42);
    assert_string_equal(value("SELECT concat_ws(' ', state, job_id, batch,"
                              " custom_id, tenant, priority, mode, seed,"
                              " source->>'origin', source->>'offset')"
                              " FROM nightshift.job"),
                        "running b/a b a t 3 diffusion 42 jobs/3 7");
    assert_int_equal(beat(store, job, got.fence).outcome, NS_STORE_DONE);
    assert_int_equal(checkpoint(store, job, got.fence, 0, 5), NS_STORE_DONE);
    assert_int_equal(checkpoint(store, job, got.fence, 0, 5), NS_STORE_DONE);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 1);

    assert_int_equal(finish(store, job, got.fence), NS_STORE_DONE);
    assert_string_equal(value("SELECT concat_ws(' ', status, job_id, batch,"
                              " custom_id, tenant, content, finish_reason,"
                              " mode, seed, blocks, passes, denoise_steps,"
                              " prompt_tokens, cached_tokens,"
                              " completion_tokens, queued_ms, run_ms,"
                              " model_rev, engine_rev, warnings, sanitised)"
                              " FROM nightshift.result"),
                        "ok b/a b a t done stop diffusion 42 1 9 8 10 4 7 5 "
                        "900 m1 e1 [] 0");
    assert_string_equal(value("SELECT state FROM nightshift.job"), "done");
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN"
                            " nightshift.job j USING (job_id) WHERE"
                            " r.fence = j.fence AND"
                            " r.input_sha256 = j.body_sha256"), 1);
    line = unpacked("SELECT response_lz4 FROM nightshift.result", &n);
    assert_non_null(strstr(line, "\"custom_id\":\"a\""));
    assert_non_null(strstr(line, "\"content\":\"done\""));
    assert_int_equal(line[n - 1], '\n');
    free(line);

    /* Asked again, as after an answer that was lost. */
    assert_int_equal(finish(store, job, got.fence), NS_STORE_DONE);
    assert_int_equal(ns_postgres_counts(store).resolved, 1);
    assert_int_equal(finish(store, job, got.fence + 1), NS_STORE_FENCED);
    assert_int_equal(claim(store, job).outcome, NS_CLAIM_FINAL);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
another_body_under_an_id_is_a_conflict_and_changes_nothing(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", ""), *other = make_job("a", " ");
    struct ns_claim got = claim_run(store, job), second;
    char *payload;
    size_t n;

    (void)state;
    second = claim(store, other);
    assert_int_equal(second.outcome, NS_CLAIM_CONFLICT);
    assert_string_equal(second.error.code, "id_conflict");
    refuse(store, other, &second.error, "the bytes\n as they came");
    refuse(store, other, &second.error, "the bytes\n as they came");
    assert_int_equal(finish(store, job, got.fence), NS_STORE_DONE);
    assert_int_equal(claim(store, other).outcome, NS_CLAIM_CONFLICT);
    assert_string_equal(value("SELECT status FROM nightshift.result"), "ok");
    assert_string_equal(value("SELECT reason || ' ' || job_id FROM"
                              " nightshift.dead_letter"), "id_conflict a");
    payload = unpacked("SELECT payload_lz4 FROM nightshift.dead_letter", &n);
    assert_string_equal(payload, "the bytes\n as they came");
    free(payload);
    ns_job_destroy(other);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
many_are_claimed_at_once_and_a_double_waits(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_claim claims[64] = { 0 };
    struct ns_finished ends[64] = { 0 };
    struct ns_result result = ok_result("x", 1);
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 64; i++) {
        char id[16];

        snprintf(id, sizeof(id), "j%d", i % 63); /* the last is a double */
        claims[i].job = make_job(id, "");
        claims[i].mode = NS_JOB_AR;
        claims[i].seed = (uint64_t)i;
    }
    assert_int_equal(store->ops->claim(store, claims, 64, &err), NS_OK);
    for (int i = 0; i < 63; i++) {
        assert_int_equal(claims[i].outcome, NS_CLAIM_RUN);
        assert_int_equal(claims[i].stored_seed, i);
        ends[i] = (struct ns_finished){ .job = claims[i].job,
                                        .fence = claims[i].fence,
                                        .result = &result };
    }
    assert_int_equal(claims[63].outcome, NS_CLAIM_WAIT);
    assert_true(claims[63].wait_ms > 0);
    assert_int_equal(store->ops->finish(store, ends, 63, &err), NS_OK);
    for (int i = 0; i < 63; i++)
        assert_int_equal(ends[i].outcome, NS_STORE_DONE);
    assert_int_equal(store->ops->claim(store, claims, 64, &err), NS_OK);
    for (int i = 0; i < 63; i++)
        assert_int_equal(claims[i].outcome, NS_CLAIM_FINAL);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 63);
    for (int i = 0; i < 64; i++)
        ns_job_destroy(claims[i].job);
    store->ops->close(store);
}

/* ---- two holders ------------------------------------------------------ */

static void
a_lease_keeps_others_away_until_it_ends(void **state)
{
    struct ns_store *a = open_store(700), *b = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim mine = claim_run(a, job), theirs = claim(b, job);

    (void)state;
    assert_int_equal(a->ops->heartbeat_ms(a), 233);
    assert_int_equal(theirs.outcome, NS_CLAIM_WAIT);
    assert_in_range(theirs.wait_ms, 1, 700);
    usleep(400000);
    assert_int_equal(beat(a, job, mine.fence).outcome, NS_STORE_DONE);
    usleep(400000);
    assert_int_equal(claim(b, job).outcome, NS_CLAIM_WAIT); /* kept alive */
    /* Itself, by a second message: it must not steal from itself. */
    assert_int_equal(claim(a, job).outcome, NS_CLAIM_WAIT);
    usleep(500000);
    theirs = claim_run(b, job);
    assert_int_equal(theirs.attempt, 2);
    assert_int_equal(theirs.stalls, 1);
    ns_job_destroy(job);
    a->ops->close(a);
    b->ops->close(b);
}

static void
a_holder_that_was_overtaken_writes_nothing(void **state)
{
    struct ns_store *a = open_store(0), *b = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim mine = claim_run(a, job), theirs;

    (void)state;
    assert_int_equal(checkpoint(a, job, mine.fence, 0, 10), NS_STORE_DONE);
    assert_int_equal(checkpoint(a, job, mine.fence, 1, 20), NS_STORE_DONE);
    lapse("a");
    theirs = claim_run(b, job);
    assert_int_equal(theirs.n_blocks, 2);
    assert_int_equal(theirs.n_tokens, 6);
    assert_int_equal(theirs.block_tokens[1], 3);
    assert_int_equal(theirs.tokens[0], 10);
    assert_int_equal(theirs.tokens[5], 22);
    assert_false(theirs.resumed_across);
    assert_int_equal(theirs.stalls, 1); /* it had moved the job on */

    assert_int_equal(beat(a, job, mine.fence).outcome, NS_STORE_FENCED);
    assert_int_equal(checkpoint(a, job, mine.fence, 2, 30), NS_STORE_FENCED);
    assert_int_equal(give_back(a, job, mine.fence, 0, true), NS_STORE_FENCED);
    assert_int_equal(finish(a, job, mine.fence), NS_STORE_FENCED);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 2);
    assert_string_equal(value("SELECT state || retries FROM nightshift.job"),
                        "running0");

    assert_int_equal(finish(b, job, theirs.fence), NS_STORE_DONE);
    assert_int_equal(finish(a, job, mine.fence), NS_STORE_FENCED);
    assert_int_equal(number("SELECT fence FROM nightshift.result"),
                     (int64_t)theirs.fence);
    ns_job_destroy(job);
    a->ops->close(a);
    b->ops->close(b);
}

static void
a_checkpoint_that_waits_for_a_takeover_is_fenced(void **state)
{
    struct ns_store *a = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim mine = claim_run(a, job);
    PGconn *other = pg_open_as("ns", "postgres");
    int32_t token = 5;
    struct ns_checkpoint point = { .job = job, .fence = mine.fence,
                                   .tokens = &token, .n_tokens = 1 };
    struct ns_error err;

    (void)state;
    /* The takeover stands, but is not yet confirmed. */
    PQclear(PQexec(other, "BEGIN"));
    PQclear(PQexec(other, "UPDATE nightshift.job SET fence ="
                   " nextval('nightshift.fence_seq')"));
    assert_int_equal(PQsendQuery(other, "SELECT pg_sleep(0.3); COMMIT"), 1);
    assert_int_equal(a->ops->checkpoint(a, &point, 1, &err), NS_OK);
    assert_int_equal(point.outcome, NS_STORE_FENCED);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    PQfinish(other);
    ns_job_destroy(job);
    a->ops->close(a);
}

static void
blocks_count_as_far_as_they_are_sound(void **state)
{
    struct ns_postgres_options across = { .engine_rev = "e2" };
    struct ns_postgres_options model = { .model_rev = "m2" };
    struct ns_store *a = open_store(0), *b = open_store_with(&across);
    struct ns_store *c = open_store_with(&model);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = claim_run(a, job);

    (void)state;
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(checkpoint(a, job, got.fence, i, (int32_t)i * 10),
                         NS_STORE_DONE);
    DO("UPDATE nightshift.block SET tokens = '\\x0000' WHERE block_no = 4");
    lapse("a");
    got = claim_run(b, job); /* another engine: kept, and said */
    assert_int_equal(got.n_blocks, 4);
    assert_int_equal(got.n_dropped, 1);
    assert_true(got.resumed_across);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 4);
    assert_int_equal(checkpoint(b, job, got.fence, 4, 99), NS_STORE_DONE);

    DO("DELETE FROM nightshift.block WHERE block_no = 2");
    lapse("a");
    got = claim_run(a, job);
    assert_int_equal(got.n_blocks, 2);
    assert_int_equal(got.n_dropped, 2); /* what is behind the hole */
    assert_int_equal(number("SELECT blocks_seen FROM nightshift.job"), 2);
    /* The place of a block that was dropped can be taken. */
    assert_int_equal(checkpoint(a, job, got.fence, 2, 7), NS_STORE_DONE);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 3);

    lapse("a");
    got = claim_run(c, job); /* another model: anew */
    assert_int_equal(got.n_blocks, 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    ns_job_destroy(job);
    a->ops->close(a);
    b->ops->close(b);
    c->ops->close(c);
}

static void
many_jobs_are_taken_over_with_their_blocks(void **state)
{
    struct ns_store *a = open_store(0), *b = open_store(0);
    struct ns_claim claims[20] = { 0 };
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 20; i++) {
        char id[16];

        snprintf(id, sizeof(id), "j%d", i);
        claims[i] = claim_run(a, make_job(id, ""));
        for (uint32_t n = 0; n < (uint32_t)i; n++)
            assert_int_equal(checkpoint(a, claims[i].job, claims[i].fence, n,
                                        i * 100 + (int32_t)n), NS_STORE_DONE);
    }
    DO("UPDATE nightshift.job SET lease_until = now() - interval '1 s'");
    DO("DELETE FROM nightshift.block WHERE job_id = 'j9' AND block_no = 4");
    assert_int_equal(b->ops->claim(b, claims, 20, &err), NS_OK);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(claims[i].outcome, NS_CLAIM_RUN);
        assert_int_equal(claims[i].n_blocks, i == 9 ? 4 : i);
        assert_int_equal(claims[i].n_tokens, claims[i].n_blocks * 3);
        for (uint32_t n = 0; n < claims[i].n_blocks; n++)
            assert_int_equal(claims[i].tokens[3 * n], i * 100 + (int)n);
        ns_job_destroy(claims[i].job);
    }
    a->ops->close(a);
    b->ops->close(b);
}

static void
later_claims_run_in_the_mode_and_seed_of_the_first(void **state)
{
    struct ns_store *a = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim first = claim_run(a, job);
    struct ns_claim second = { .job = job, .mode = NS_JOB_AR, .seed = 1 };
    struct ns_error err;

    (void)state;
    assert_int_equal(give_back(a, job, first.fence, 0, false), NS_STORE_DONE);
    assert_int_equal(a->ops->claim(a, &second, 1, &err), NS_OK);
    assert_int_equal(second.outcome, NS_CLAIM_RUN);
    assert_int_equal(second.stored_mode, NS_JOB_DIFFUSION);
    assert_int_equal(second.stored_seed, 42);
    ns_job_destroy(job);
    a->ops->close(a);
}

/* ---- giving back and giving up ---------------------------------------- */

static void
a_job_given_back_waits_until_it_is_due(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = claim_run(store, job);

    (void)state;
    assert_int_equal(give_back(store, job, got.fence, 300, false),
                     NS_STORE_DONE);
    assert_int_equal(give_back(store, job, got.fence, 300, false),
                     NS_STORE_DONE); /* asked again */
    got = claim(store, job);
    assert_int_equal(got.outcome, NS_CLAIM_WAIT);
    assert_in_range(got.wait_ms, 1, 300);
    usleep(350000);
    got = claim_run(store, job);
    assert_int_equal(got.attempt, 2);
    assert_int_equal(got.stalls, 0);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
a_job_that_fails_too_often_ends_dead_with_its_last_code(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got;

    (void)state;
    for (int i = 0; i < 10; i++) { /* a drain costs a job nothing */
        got = claim_run(store, job);
        assert_int_equal(give_back(store, job, got.fence, 0, false),
                         NS_STORE_DONE);
    }
    for (int i = 0; i < 3; i++) {
        got = claim_run(store, job);
        assert_int_equal(checkpoint(store, job, got.fence, 0, 1),
                         NS_STORE_DONE);
        assert_int_equal(give_back(store, job, got.fence, 0, true),
                         NS_STORE_DONE);
        assert_int_equal(give_back(store, job, got.fence, 0, true),
                         NS_STORE_DONE); /* counts once */
    }
    got = claim(store, job); /* writes the row, and says what it says */
    assert_int_equal(got.outcome, NS_CLAIM_FINAL);
    assert_true(got.given_up);
    assert_int_equal(got.ended, NS_RESULT_DEAD);
    assert_string_equal(got.ended_code, "out_of_memory");
    assert_string_equal(value("SELECT concat_ws(' ', r.status, r.error_code,"
                              " j.state, r.fence = j.fence) FROM"
                              " nightshift.result r JOIN nightshift.job j"
                              " USING (job_id)"), "dead out_of_memory dead t");
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    got = claim(store, job);
    assert_int_equal(got.outcome, NS_CLAIM_FINAL);
    assert_false(got.given_up);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
a_look_says_what_is_done_and_claims_nothing(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *done = make_job("done", ""), *runs = make_job("runs", "");
    struct ns_job *unseen = make_job("unseen", "");
    struct ns_job *other = make_job("done", " "); /* another body */
    struct ns_claim items[] = { { .job = unseen }, { .job = done },
                                { .job = other }, { .job = runs },
                                { .job = done } };
    struct ns_error err;

    (void)state;
    finish(store, done, claim_run(store, done).fence);
    claim_run(store, runs);
    assert_int_equal(store->ops->look(store, items, 5, &err), NS_OK);
    assert_int_equal(items[0].outcome, 0);
    assert_int_equal(items[1].outcome, NS_CLAIM_FINAL);
    assert_int_equal(items[2].outcome, 0);
    assert_int_equal(items[3].outcome, 0);
    assert_int_equal(items[4].outcome, NS_CLAIM_FINAL);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job"), 2);
    assert_int_equal(number("SELECT sum(attempt) FROM nightshift.job"), 2);
    ns_job_destroy(done);
    ns_job_destroy(runs);
    ns_job_destroy(unseen);
    ns_job_destroy(other);
    store->ops->close(store);
}

static void
takeovers_without_a_block_end_a_job_and_those_with_one_do_not(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *poison = make_job("p", ""), *slow = make_job("s", "");
    struct ns_claim got;

    (void)state;
    got = claim_run(store, poison);
    for (uint32_t i = 1; i <= 3; i++) {
        lapse("p");
        got = claim_run(store, poison);
        assert_int_equal(got.stalls, i);
    }
    lapse("p");
    assert_int_equal(claim(store, poison).outcome, NS_CLAIM_FINAL);
    assert_string_equal(value("SELECT status || error_code FROM"
                              " nightshift.result"), "deadstalled");

    got = claim_run(store, slow);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(checkpoint(store, slow, got.fence, i, 1),
                         NS_STORE_DONE);
        lapse("s");
        got = claim_run(store, slow);
        assert_int_equal(got.stalls, 1);
        assert_int_equal(got.n_blocks, i + 1);
    }
    lapse("s");
    got = claim_run(store, slow);
    lapse("s");
    got = claim_run(store, slow);
    assert_int_equal(got.stalls, 3);
    /* The last chance was used, so there is another one. */
    assert_int_equal(checkpoint(store, slow, got.fence, 8, 1), NS_STORE_DONE);
    lapse("s");
    got = claim_run(store, slow);
    assert_int_equal(got.stalls, 1);
    ns_job_destroy(slow);
    ns_job_destroy(poison);
    store->ops->close(store);
}

static void
a_cancel_is_heard_wherever_the_job_is(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *unseen = make_job("u", ""), *queued = make_job("q", "");
    struct ns_job *running = make_job("r", ""), *done = make_job("d", "");
    struct ns_error why;
    struct ns_result result;
    struct ns_claim got;

    (void)state;
    assert_string_equal(value("SELECT nightshift.cancel('u')"), "cancelled");
    assert_int_equal(claim(store, unseen).outcome, NS_CLAIM_FINAL);

    got = claim_run(store, queued);
    give_back(store, queued, got.fence, 60000, false);
    assert_string_equal(value("SELECT nightshift.cancel('q')"), "cancelling");
    assert_int_equal(claim(store, queued).outcome, NS_CLAIM_FINAL);

    got = claim_run(store, running);
    assert_false(beat(store, running, got.fence).cancel);
    assert_string_equal(value("SELECT nightshift.cancel('r')"), "cancelling");
    assert_true(beat(store, running, got.fence).cancel);
    assert_int_equal(claim(store, running).outcome, NS_CLAIM_WAIT);
    lapse("r"); /* its holder died meanwhile: nobody may run it again */
    assert_int_equal(claim(store, running).outcome, NS_CLAIM_FINAL);
    ns_refuse(&why, "cancelled", NULL, "cancelled");
    result = ns_result_of_error(NS_RESULT_CANCELLED, &why);
    assert_int_equal(finish_with(store, running, got.fence, &result),
                     NS_STORE_FENCED);

    got = claim_run(store, done);
    finish(store, done, got.fence);
    assert_string_equal(value("SELECT nightshift.cancel('d')"), "done");
    assert_string_equal(value("SELECT string_agg(job_id || status, ' ' ORDER"
                              " BY job_id) FROM nightshift.result"),
                        "dok qcancelled rcancelled ucancelled");
    ns_job_destroy(unseen);
    ns_job_destroy(queued);
    ns_job_destroy(running);
    ns_job_destroy(done);
    store->ops->close(store);
}

static void
a_job_whose_deadline_passed_is_not_run_again(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", ",\"nightshift\":{\"deadline\":"
                                  "\"2100-01-01T00:00:00Z\"}");
    struct ns_claim got = claim_run(store, job);

    (void)state;
    assert_string_equal(value("SELECT deadline > now() FROM nightshift.job"),
                        "t");
    DO("UPDATE nightshift.job SET deadline = now() - interval '1 s'");
    assert_int_equal(claim(store, job).outcome, NS_CLAIM_WAIT); /* it runs */
    give_back(store, job, got.fence, 0, false);
    assert_int_equal(claim(store, job).outcome, NS_CLAIM_FINAL);
    assert_string_equal(value("SELECT status FROM nightshift.result"),
                        "expired");
    ns_job_destroy(job);
    store->ops->close(store);
}

/* ---- refused ---------------------------------------------------------- */

static void
a_refused_message_is_kept_and_answered_if_it_has_an_id(void **state)
{
    static const char nameless[] = "{\"body\":", named[] =
        "{\"custom_id\":\"x\",\"body\":{\"messages\":3}}";
    struct ns_store *store = open_store(0);
    struct ns_job *a = make_job_of(nameless, 1), *b = make_job_of(named, 2);
    struct ns_job *again = make_job_of(named, 9);

    (void)state;
    assert_int_equal(a->refusal.status, NS_REJECT);
    assert_int_equal(b->refusal.status, NS_REJECT);
    for (int i = 0; i < 2; i++) {
        refuse(store, a, &a->refusal, nameless);
        refuse(store, b, &b->refusal, named);
    }
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter"), 2);
    assert_string_equal(value("SELECT concat_ws(' ', reason, coalesce(job_id,"
                              " '-'), payload_bytes) FROM"
                              " nightshift.dead_letter WHERE source_key LIKE"
                              " 'jobs/3:1@%%'"), "bad_json - 8");
    assert_string_equal(value("SELECT concat_ws(' ', r.job_id, r.status,"
                              " r.error_code, r.error_param, j.state) FROM"
                              " nightshift.result r JOIN nightshift.job j"
                              " USING (job_id)"),
                        "x dead bad_param body.messages dead");
    /* The same message once more, at another place. */
    assert_int_equal(claim(store, b).outcome, NS_CLAIM_FINAL);
    refuse(store, again, &again->refusal, named);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter"), 3);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
    ns_job_destroy(a);
    ns_job_destroy(b);
    ns_job_destroy(again);
    store->ops->close(store);
}

static void
a_tombstone_cancels_and_headers_are_kept(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", ""), *bad = make_job("b", "");
    struct ns_claim got = claim_run(store, job);
    struct ns_error cancel;

    (void)state;
    ns_refuse(&cancel, "cancel", NULL, "a tombstone");
    refuse(store, job, &cancel, NULL);
    assert_true(beat(store, job, got.fence).cancel);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter"), 0);
    bad->headers = "{\"h\":\"1\"}";
    refuse(store, bad, &(struct ns_error){ NS_REJECT, "x", "", "" }, "p");
    assert_string_equal(value("SELECT headers->>'h' FROM"
                              " nightshift.dead_letter"), "1");
    job->trace_parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
                        "-01";
    finish(store, job, got.fence);
    assert_string_equal(value("SELECT trace_parent FROM nightshift.result"
                              " WHERE job_id = 'a'"), job->trace_parent);
    ns_job_destroy(bad);
    ns_job_destroy(job);
    store->ops->close(store);
}

/* ---- text ------------------------------------------------------------- */

static void
text_that_can_not_stand_is_kept_exactly_and_shown_readably(void **state)
{
    static const char text[] = "a\0b\xff\xc3\xa9\xe2\x82";
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = claim_run(store, job);
    struct ns_result result = ok_result(text, sizeof(text) - 1);
    char *line;
    size_t n;

    (void)state;
    result.reasoning = "\xed\xa0\x80";
    result.reasoning_length = 3;
    assert_int_equal(finish_with(store, job, got.fence, &result),
                     NS_STORE_DONE);
    assert_string_equal(value("SELECT content FROM nightshift.result"),
                        "a\xef\xbf\xbd" "b\xef\xbf\xbd\xc3\xa9\xef\xbf\xbd");
    assert_string_equal(value("SELECT sanitised FROM nightshift.result"), "6");
    assert_int_equal(ns_postgres_counts(store).sanitised, 1);
    assert_int_equal(ns_postgres_counts(store).unstorable, 0);
    line = unpacked("SELECT response_lz4 FROM nightshift.result", &n);
    assert_non_null(strstr(line, "\"content_base64\":\"YQBi/8Op4oI=\""));
    assert_non_null(strstr(line, "\"reasoning_base64\":\"7aCA\""));
    free(line);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
a_long_answer_stands_as_lz4_alone(void **state)
{
    enum { BYTES = 3 << 20 };
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = claim_run(store, job);
    char *text = malloc(BYTES), *line;
    struct ns_result result = ok_result(text, BYTES);
    size_t n;

    (void)state;
    for (int i = 0; i < BYTES; i++)
        text[i] = (char)('a' + i * 7 % 23);
    assert_int_equal(finish_with(store, job, got.fence, &result),
                     NS_STORE_DONE);
    assert_string_equal(value("SELECT content IS NULL FROM nightshift.result"),
                        "t");
    line = unpacked("SELECT response_lz4 FROM nightshift.result", &n);
    assert_true(n > BYTES);
    assert_non_null(memmem(line, n, text, BYTES));
    assert_true(number("SELECT octet_length(response_lz4) FROM"
                       " nightshift.result") < BYTES / 10);
    free(line);
    free(text);
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
one_bad_item_does_not_undo_its_neighbours(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_claim claims[3] = { 0 };
    struct ns_finished ends[3] = { 0 };
    struct ns_result good = ok_result("good", 4), bad = ok_result("poison", 6);
    char id[400] = "", *keep;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 3; i++) {
        char name[16];

        snprintf(name, sizeof(name), "j%d", i);
        claims[i].job = make_job(name, "");
        claims[i].mode = NS_JOB_AR;
    }
    /* Longer than the column takes. */
    memset(id, 'x', 390);
    keep = (char *)(uintptr_t)claims[1].job->id;
    claims[1].job->id = id;
    assert_int_equal(store->ops->claim(store, claims, 3, &err), NS_OK);
    assert_int_equal(claims[0].outcome, NS_CLAIM_RUN);
    assert_int_equal(claims[1].outcome, NS_CLAIM_CONFLICT);
    assert_string_equal(claims[1].error.code, "unstorable");
    assert_int_equal(claims[2].outcome, NS_CLAIM_RUN);
    assert_int_equal(ns_postgres_counts(store).unrolled, 1);
    refuse(store, claims[1].job, &claims[1].error, "p");
    assert_string_equal(value("SELECT reason FROM nightshift.dead_letter"),
                        "unstorable");
    claims[1].job->id = keep;

    DO("ALTER TABLE nightshift.result ADD CONSTRAINT c CHECK"
       " (content <> 'poison')");
    claims[1] = claim_run(store, claims[1].job);
    for (int i = 0; i < 3; i++)
        ends[i] = (struct ns_finished){ .job = claims[i].job,
                                        .fence = claims[i].fence,
                                        .result = i == 1 ? &bad : &good };
    assert_int_equal(store->ops->finish(store, ends, 3, &err), NS_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ends[i].outcome, NS_STORE_DONE);
    /* The exact line stands, without what the server would not have. */
    assert_string_equal(value("SELECT string_agg(status || coalesce(content,"
                              " '-'), ' ' ORDER BY job_id) FROM"
                              " nightshift.result WHERE response_lz4 IS NOT"
                              " NULL"), "okgood ok- okgood");
    DO("ALTER TABLE nightshift.result DROP CONSTRAINT c");

    DO("ALTER TABLE nightshift.result ADD CONSTRAINT c CHECK"
       " (status <> 'ok') NOT VALID");
    claims[0].job->id = "fresh";
    claims[0] = claim_run(store, claims[0].job);
    assert_int_equal(finish(store, claims[0].job, claims[0].fence),
                     NS_STORE_DONE);
    assert_string_equal(value("SELECT status || error_code FROM"
                              " nightshift.result WHERE job_id = 'fresh'"),
                        "failedunstorable");
    DO("ALTER TABLE nightshift.result DROP CONSTRAINT c");
    for (int i = 0; i < 3; i++)
        ns_job_destroy(claims[i].job);
    store->ops->close(store);
}

/* ---- batches ---------------------------------------------------------- */

static char *
next_notice(PGconn *listener, const char *channel, int wait_ms)
{
    for (int i = 0; i < wait_ms / 10 + 1; i++) {
        PGnotify *notice;
        char *text = NULL;

        PQconsumeInput(listener);
        while ((notice = PQnotifies(listener)) != NULL) {
            if (!text && strcmp(notice->relname, channel) == 0)
                text = strdup(notice->extra);
            PQfreemem(notice);
            if (text)
                return text;
        }
        usleep(10000);
    }
    return NULL;
}

static void
the_end_of_a_batch_is_told_once(void **state)
{
    struct ns_postgres_options options = { .notify = true };
    struct ns_store *store = open_store_with(&options);
    PGconn *listener = pg_open_as("submitter", "postgres");
    static const char bad[] = "{\"custom_id\":\"bad\",\"nightshift\":{"
                              "\"batch\":\"n\"},\"body\":{}}";
    struct ns_job *refused = make_job_of(bad, 3), *jobs[3];
    char *text;

    (void)state;
    PQclear(PQexec(listener, "LISTEN nightshift_batch"));
    PQclear(PQexec(listener, "LISTEN nightshift_result"));
    PQclear(PQexec(listener, "SELECT nightshift.expect_batch('n', 4)"));
    for (int i = 0; i < 3; i++) {
        char name[16];

        snprintf(name, sizeof(name), "j%d", i);
        jobs[i] = make_job(name, ",\"nightshift\":{\"batch\":\"n\"}");
    }
    refuse(store, refused, &refused->refusal, bad);
    refuse(store, refused, &refused->refusal, bad); /* counts once */
    for (int i = 0; i < 3; i++) {
        struct ns_claim got = claim_run(store, jobs[i]);

        if (i == 2)
            assert_string_equal(
                value("SELECT concat_ws(' ', expected, total, ok, failed,"
                      " running, tokens, done, outcome) FROM"
                      " nightshift.batch_status"),
                "4 3 2 1 1 14 f running");
        finish(store, jobs[i], got.fence);
        finish(store, jobs[i], got.fence); /* counts once */
    }
    assert_string_equal(value("SELECT concat_ws(' ', total, ok, failed,"
                              " running, tokens, done, outcome,"
                              " first_at <= last_at) FROM"
                              " nightshift.batch_status"),
                        "4 3 1 0 21 t some_failed t");
    text = next_notice(listener, "nightshift_batch", 2000);
    assert_non_null(text);
    assert_non_null(strstr(text, "some_failed"));
    free(text);
    assert_null(next_notice(listener, "nightshift_batch", 100));
    assert_int_equal(ns_postgres_counts(store).batches_ended, 1);

    /* One in which all fail, and whose size is told late. */
    DO("SELECT nightshift.cancel('m/a', 'm')");
    refused->batch = "m";
    refused->id = "m/bad";
    refused->position.offset = 77;
    DO("SELECT nightshift.expect_batch('m', 2)");
    refuse(store, refused, &refused->refusal, bad);
    assert_string_equal(value("SELECT outcome FROM nightshift.batch_status"
                              " WHERE batch = 'm'"), "all_failed");
    text = next_notice(listener, "nightshift_batch", 2000);
    assert_non_null(text);
    assert_non_null(strstr(text, "all_failed"));
    free(text);
    assert_int_equal(ns_postgres_counts(store).batches_ended, 2);
    assert_string_equal(value("SELECT nightshift.expect_batch('m', 2)"), "t");
    for (int i = 0; i < 3; i++)
        ns_job_destroy(jobs[i]);
    ns_job_destroy(refused);
    PQfinish(listener);
    store->ops->close(store);
}

static void
results_are_told_of_only_when_asked_for(void **state)
{
    struct ns_postgres_options options = { .notify = true };
    struct ns_store *quiet = open_store(0), *loud = open_store_with(&options);
    PGconn *listener = pg_open_as("submitter", "postgres");
    struct ns_job *a = make_job("a", ""), *b = make_job("b", "");
    char *text;

    (void)state;
    PQclear(PQexec(listener, "LISTEN nightshift_result"));
    finish(quiet, a, claim_run(quiet, a).fence);
    assert_null(next_notice(listener, "nightshift_result", 100));
    finish(loud, b, claim_run(loud, b).fence);
    text = next_notice(listener, "nightshift_result", 2000);
    assert_string_equal(text, "b");
    free(text);
    ns_job_destroy(a);
    ns_job_destroy(b);
    PQfinish(listener);
    quiet->ops->close(quiet);
    loud->ops->close(loud);
}

/* ---- rights ----------------------------------------------------------- */

static void
expect_state(const char *user, const char *statement, const char *state)
{
    PGconn *conn = pg_open_as(user, "postgres");
    PGresult *result = PQexec(conn, statement);
    const char *got = PQresultErrorField(result, PG_DIAG_SQLSTATE);

    if (strcmp(got ? got : "00000", state) != 0)
        fail_msg("%s: %s gives %s", user, statement, got ? got : "00000");
    PQclear(result);
    PQfinish(conn);
}

static void
no_role_of_ours_can_change_a_final_row(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");

    (void)state;
    finish(store, job, claim_run(store, job).fence);
    expect_state("nsd", "UPDATE nightshift.result SET status = 'ok'", "42501");
    expect_state("nsd", "DELETE FROM nightshift.result", "42501");
    expect_state("nsd", "TRUNCATE nightshift.result", "42501");
    expect_state("nsd", "DELETE FROM nightshift.job", "42501");
    expect_state("nsd", "DELETE FROM nightshift.dead_letter", "42501");
    expect_state("nsd", "INSERT INTO nightshift.result (job_id, tenant, fence,"
                 " status) VALUES ('a', 't', 1, 'failed')", "23505");
    expect_state("submitter", "INSERT INTO nightshift.result (job_id, tenant,"
                 " fence, status) VALUES ('b', 't', 1, 'failed')", "42501");
    expect_state("submitter", "UPDATE nightshift.job SET state = 'done'",
                 "42501");
    expect_state("submitter", "SELECT nightshift.cancel('zz')", "00000");
    expect_state("nsd", "SELECT nightshift.expect_batch('zz', 1)", "42501");
    expect_state("submitter", "INSERT INTO nightshift.document VALUES ('d',"
                 " sha256('x'), 'x', 1)", "00000");
    expect_state("submitter", "DELETE FROM nightshift.document", "42501");
    ns_job_destroy(job);
    store->ops->close(store);
}

static void
purge_takes_what_is_old_and_nothing_else(void **state)
{
    struct ns_postgres_options options = { .conninfo = conninfo };
    static const int64_t day_ms = 86400000;
    struct ns_store *store = open_store(0);
    struct ns_job *jobs[3];
    struct ns_postgres_purged purged;
    struct ns_error err;
    struct ns_claim got;

    (void)state;
    for (int i = 0; i < 3; i++) {
        char name[16];

        snprintf(name, sizeof(name), "j%d", i);
        jobs[i] = make_job(name, ",\"nightshift\":{\"batch\":\"b\"}");
        got = claim_run(store, jobs[i]);
        if (i < 2)
            finish(store, jobs[i], got.fence);
    }
    refuse(store, jobs[0], &(struct ns_error){ NS_REJECT, "x", "", "" }, "p");
    DO("UPDATE nightshift.job SET finished_at = now() - interval '9 d'"
       " WHERE job_id = 'b/j0'");
    DO("UPDATE nightshift.job SET created_at = now() - interval '90 d'");
    DO("UPDATE nightshift.dead_letter SET created_at = now() - interval"
       " '9 d'");
    assert_int_equal(ns_postgres_purge(&options, 7 * day_ms - 1, &purged,
                                       &err), NS_REJECT);
    /* The daemon's role may not: it is not a member. */
    assert_int_equal(ns_postgres_purge(&options, 8 * day_ms, &purged, &err),
                     NS_REJECT);
    snprintf(conninfo, sizeof(conninfo),
             "host=127.0.0.1 port=%d user=ns dbname=postgres", pg_server.port);
    assert_int_equal(ns_postgres_purge(&options, 8 * day_ms, &purged, &err),
                     NS_OK);
    assert_int_equal(purged.jobs, 1);
    assert_int_equal(purged.dead_letters, 1);
    assert_int_equal(purged.batches, 0);
    assert_string_equal(value("SELECT string_agg(job_id || state, ' ' ORDER BY"
                              " job_id) FROM nightshift.job"),
                        "b/j1done b/j2running");
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
    for (int i = 0; i < 3; i++)
        ns_job_destroy(jobs[i]);
    store->ops->close(store);
}

/* ---- trouble ---------------------------------------------------------- */

enum { N_LOOP = 96, PER_BATCH = 8, PACE_US = 5000 };

/* Each job of `N_LOOP` claimed and finished, eight at a time, each call made
 * again while it says so. Returns how many calls had to be. */
static int
run_all(struct ns_store *store)
{
    int again = 0;

    for (int at = 0; at < N_LOOP; at += PER_BATCH) {
        struct ns_claim claims[PER_BATCH] = { 0 };
        struct ns_finished ends[PER_BATCH] = { 0 };
        struct ns_result result = ok_result("x", 1);
        struct ns_error err = { 0 };
        enum ns_status status;

        usleep(PACE_US); /* so that others may get in between */
        for (int i = 0; i < PER_BATCH; i++) {
            char id[16];

            snprintf(id, sizeof(id), "j%d", at + i);
            claims[i].job = make_job(id, ",\"nightshift\":{\"batch\":\"b\"}");
            claims[i].mode = NS_JOB_AR;
        }
        while ((status = store->ops->claim(store, claims, PER_BATCH, &err)) ==
               NS_RETRY) {
            again++;
            usleep(20000);
        }
        if (status != NS_OK)
            fail_msg("claim: %s", err.text);
        for (int i = 0; i < PER_BATCH; i++) {
            assert_int_equal(claims[i].outcome, NS_CLAIM_RUN);
            ends[i] = (struct ns_finished){ .job = claims[i].job,
                                            .fence = claims[i].fence,
                                            .result = &result };
        }
        while ((status = store->ops->finish(store, ends, PER_BATCH, &err)) ==
               NS_RETRY) {
            again++;
            usleep(20000);
        }
        if (status != NS_OK)
            fail_msg("finish: %s", err.text);
        for (int i = 0; i < PER_BATCH; i++) {
            assert_int_equal(ends[i].outcome, NS_STORE_DONE);
            ns_job_destroy(claims[i].job);
        }
    }
    return again;
}

/* One row a job, of the number that the job has, and none left behind. */
static void
assert_all_once(void)
{
    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN"
                            " nightshift.job j USING (job_id) WHERE r.fence ="
                            " j.fence AND j.state = 'done'"), N_LOOP);
    assert_int_equal(number("SELECT count(*) FROM nightshift.job"), N_LOOP);
    assert_int_equal(number("SELECT max(stalls) FROM nightshift.job"), 0);
    assert_int_equal(number("SELECT ok FROM nightshift.batch"), N_LOOP);
}

static void
rows_are_no_answer_until_they_are_committed(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = claim_run(store, job);
    struct ns_result result = ok_result("x", 1);
    struct ns_finished end = { .job = job, .fence = got.fence,
                               .result = &result };
    struct ns_error err;

    (void)state;
    /* The disk is full when the row is written, and then at the commit. */
    DO("CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
       " $$BEGIN RAISE 'no room' USING ERRCODE = '53100'; END$$");
    for (int i = 0; i < 2; i++) {
        DO("CREATE CONSTRAINT TRIGGER no_room AFTER INSERT ON nightshift.result"
           " %s FOR EACH ROW EXECUTE FUNCTION full_disk()",
           i ? "DEFERRABLE INITIALLY DEFERRED" : "");
        assert_int_equal(store->ops->finish(store, &end, 1, &err), NS_RETRY);
        assert_non_null(strstr(err.text, "53100"));
        assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 0);
        DO("DROP TRIGGER no_room ON nightshift.result");
    }
    DO("DROP FUNCTION full_disk");
    assert_int_equal(store->ops->finish(store, &end, 1, &err), NS_OK);
    assert_int_equal(end.outcome, NS_STORE_DONE);
    assert_int_equal(ns_postgres_counts(store).connects, 1);
    ns_job_destroy(job);
    store->ops->close(store);
}

static _Atomic bool terminating;
static _Atomic useconds_t terminate_us;

/* Each session ended leaves the next a little longer: a pace that always falls
 * into a statement would let nothing through for ever. */
static void *
terminate_backends(void *data)
{
    PGconn *conn = pg_open_as("ns", "postgres");
    useconds_t pause_us = terminate_us;

    (void)data;
    PQclear(PQexec(conn, "SET client_min_messages = error"));
    while (terminating) {
        PGresult *ended =
            PQexec(conn, "SELECT pg_terminate_backend(pid) FROM"
                   " pg_stat_activity WHERE usename = 'nsd' AND"
                   " state = 'active'");

        if (PQntuples(ended) > 0)
            pause_us += 5000;
        PQclear(ended);
        usleep(pause_us);
    }
    PQfinish(conn);
    return NULL;
}

static void
sessions_ended_in_the_middle_cost_no_row_and_double_none(void **state)
{
    struct ns_store *store = open_store(0);
    pthread_t thread;

    (void)state;
    terminating = true;
    terminate_us = 2000;
    assert_int_equal(pthread_create(&thread, NULL, terminate_backends, NULL),
                     0);
    run_all(store);
    for (int i = 0; i < 200 && ns_postgres_counts(store).connects < 3; i++) {
        struct ns_heartbeat beat = { 0 };
        struct ns_job *job = make_job("j0", "");
        struct ns_error err;

        beat.job = job;
        (void)store->ops->heartbeat(store, &beat, 1, &err);
        ns_job_destroy(job);
    }
    terminating = false;
    pthread_join(thread, NULL);
    assert_true(ns_postgres_counts(store).connects > 1);
    assert_all_once();
    store->ops->close(store);
}

static void
answers_that_get_lost_are_asked_for_again(void **state)
{
    static const char *const words[] = { "INSERT INTO nightshift.result",
                                         "INSERT INTO nightshift.job AS j" };

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct ns_store *store;

        clean(NULL);
        pg_proxy_start(words[i], 3);
        set_conninfo(pg_proxy.port);
        store = open_store(60000);
        assert_true(run_all(store) > 0);
        assert_true(pg_proxy.dropped >= 4);
        if (i == 0)
            assert_int_equal(ns_postgres_counts(store).resolved,
                             pg_proxy.dropped * PER_BATCH);
        assert_all_once();
        store->ops->close(store);
        pg_proxy_stop();
    }
}

static void
a_lost_answer_to_a_refusal_or_a_retry_changes_nothing(void **state)
{
    static const char bad[] = "{\"custom_id\":\"x\",\"body\":3}";
    struct ns_job *refused = make_job_of(bad, 1), *job = make_job("a", "");
    struct ns_refusal refusal = { .job = refused, .error = refused->refusal,
                                  .payload = bad,
                                  .payload_length = sizeof(bad) - 1 };
    struct ns_give_back back = { .job = job, .own_fault = true, .code = "x" };
    struct ns_store *store;
    struct ns_error err;

    (void)state;
    pg_proxy_start("INSERT INTO nightshift.dead_letter", 1);
    set_conninfo(pg_proxy.port);
    store = open_store(60000);
    assert_int_equal(store->ops->refuse(store, &refusal, 1, &err), NS_RETRY);
    pg_proxy.word = "SET state = 'retry'";
    assert_int_equal(store->ops->refuse(store, &refusal, 1, &err), NS_OK);
    back.fence = claim_run(store, job).fence;
    assert_int_equal(store->ops->retry(store, &back, 1, &err), NS_RETRY);
    pg_proxy.every = 0;
    assert_int_equal(store->ops->retry(store, &back, 1, &err), NS_OK);
    assert_int_equal(back.outcome, NS_STORE_DONE);
    assert_int_equal(number("SELECT retries FROM nightshift.job WHERE"
                            " job_id = 'a'"), 1);
    assert_int_equal(number("SELECT count(*) FROM nightshift.dead_letter"), 1);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
    ns_job_destroy(job);
    ns_job_destroy(refused);
    store->ops->close(store);
    pg_proxy_stop();
}

/* ---- all at once ------------------------------------------------------ */

enum { N_CHAOS = 32, N_HOLDERS = 4, CHAOS_LEASE_MS = 250 };

struct holder {
    pthread_t thread;
    char conninfo[256];
    uint32_t random;
    int finished, fenced, resumed, again;
    const char *wrong;
};

static uint32_t
draw(struct holder *holder, uint32_t n)
{
    holder->random = holder->random * 1664525 + 1013904223;
    return (holder->random >> 8) % n;
}

/* One call, made again until it is answered. */
#define UNTIL_ANSWERED(holder, call)                            \
    do {                                                        \
        enum ns_status status_;                                 \
                                                                \
        while ((status_ = (call)) == NS_RETRY) {                \
            (holder)->again++;                                  \
            usleep(5000);                                       \
        }                                                       \
        if (status_ != NS_OK)                                   \
            (holder)->wrong = "a call that is not to be asked"; \
    } while (0)

/* Holds a job for a while, now and then for longer than its lease. */
static void
hold_one(struct holder *holder, struct ns_store *store, struct ns_job *job,
         const struct ns_claim *got)
{
    int32_t tokens[2] = { (int32_t)got->fence, (int32_t)got->n_blocks };
    struct ns_checkpoint point = { .job = job, .fence = got->fence,
                                   .block = got->n_blocks, .tokens = tokens,
                                   .n_tokens = 2 };
    struct ns_give_back back = { .job = job, .fence = got->fence,
                                 .code = "drain" };
    struct ns_result result = ok_result("x", 1);
    struct ns_finished end = { .job = job, .fence = got->fence,
                               .result = &result };
    struct ns_error err;

    /* What was resumed is whole, in order, and of one holder each. */
    for (uint32_t b = 0; b < got->n_blocks; b++)
        if (got->block_tokens[b] != 2 ||
            got->tokens[2 * b + 1] != (int32_t)b ||
            (uint64_t)got->tokens[2 * b] >= got->fence)
            holder->wrong = "a block of another place or of a later holder";
    holder->resumed += got->n_blocks > 0;
    UNTIL_ANSWERED(holder, store->ops->checkpoint(store, &point, 1, &err));
    if (draw(holder, 3) == 0)
        usleep(CHAOS_LEASE_MS * 1000 + draw(holder, 300000));
    else
        usleep(draw(holder, 20000));
    if (draw(holder, 3) == 0) {
        UNTIL_ANSWERED(holder, store->ops->retry(store, &back, 1, &err));
        holder->fenced += back.outcome == NS_STORE_FENCED;
        return;
    }
    UNTIL_ANSWERED(holder, store->ops->finish(store, &end, 1, &err));
    holder->finished += end.outcome == NS_STORE_DONE;
    holder->fenced += end.outcome == NS_STORE_FENCED;
}

static void *
hold_jobs(void *data)
{
    struct holder *holder = data;
    struct ns_postgres_options options = { .conninfo = holder->conninfo,
                                           .model_rev = "m",
                                           .engine_rev = "e",
                                           .lease_ms = CHAOS_LEASE_MS };
    struct ns_store *store = NULL;
    bool final[N_CHAOS] = { false };
    struct ns_error err;
    int n_final = 0;

    UNTIL_ANSWERED(holder, ns_postgres_store_open(&options, &store, &err));
    while (n_final < N_CHAOS && !holder->wrong) {
        uint32_t i = draw(holder, N_CHAOS);
        struct ns_claim got = { .mode = NS_JOB_AR };
        char id[16];

        if (final[i])
            continue;
        snprintf(id, sizeof(id), "j%u", i);
        got.job = make_job(id, ",\"nightshift\":{\"batch\":\"b\"}");
        UNTIL_ANSWERED(holder, store->ops->claim(store, &got, 1, &err));
        if (got.outcome == NS_CLAIM_RUN)
            hold_one(holder, store, got.job, &got);
        if (got.outcome == NS_CLAIM_WAIT)
            usleep(5000);
        if (got.outcome == NS_CLAIM_CONFLICT)
            holder->wrong = "a conflict";
        if (got.outcome == NS_CLAIM_FINAL) {
            final[i] = true;
            n_final++;
        }
        ns_job_destroy(got.job);
    }
    if (store)
        store->ops->close(store);
    return NULL;
}

static void
four_holders_under_every_trouble_leave_one_row_a_job(void **state)
{
    struct holder holders[N_HOLDERS] = { 0 };
    int finished = 0, fenced = 0, resumed = 0, again = 0;
    pthread_t killer;

    (void)state;
    DO("CREATE TABLE audit (job_id text, what text)");
    DO("CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SECURITY"
       " DEFINER AS $$BEGIN INSERT INTO public.audit VALUES"
       " (coalesce(new.job_id, old.job_id), tg_op); RETURN new; END$$");
    DO("CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON"
       " nightshift.result FOR EACH ROW EXECUTE FUNCTION note()");
    DO("SELECT nightshift.expect_batch('b', %d)", N_CHAOS);
    pg_proxy_start("nightshift.", 5); /* any statement's answer may be lost */
    terminating = true;
    terminate_us = 25000;
    assert_int_equal(pthread_create(&killer, NULL, terminate_backends, NULL),
                     0);
    for (int i = 0; i < N_HOLDERS; i++) {
        snprintf(holders[i].conninfo, sizeof(holders[i].conninfo),
                 "host=127.0.0.1 port=%d user=nsd dbname=postgres",
                 i % 2 ? pg_proxy.port : pg_server.port);
        holders[i].random = (uint32_t)i * 7919;
        assert_int_equal(pthread_create(&holders[i].thread, NULL, hold_jobs,
                                        &holders[i]), 0);
    }
    for (int i = 0; i < N_HOLDERS; i++) {
        pthread_join(holders[i].thread, NULL);
        if (holders[i].wrong)
            fail_msg("holder %d: %s", i, holders[i].wrong);
        finished += holders[i].finished;
        fenced += holders[i].fenced;
        resumed += holders[i].resumed;
        again += holders[i].again;
    }
    terminating = false;
    pthread_join(killer, NULL);
    pg_proxy_stop();

    assert_int_equal(number("SELECT count(*) FROM nightshift.result r JOIN"
                            " nightshift.job j USING (job_id) WHERE r.fence ="
                            " j.fence AND j.finished_at IS NOT NULL"),
                     N_CHAOS);
    assert_int_equal(number("SELECT count(*) FROM audit"), N_CHAOS);
    assert_int_equal(number("SELECT count(*) FROM audit WHERE what <>"
                            " 'INSERT'"), 0);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result WHERE"
                            " status = 'ok'"), finished);
    assert_int_equal(number("SELECT count(*) FROM nightshift.block"), 0);
    assert_string_equal(value("SELECT total || ' ' || done FROM"
                              " nightshift.batch_status"), "32 true");
    /* That there was trouble at all. */
    assert_true(fenced > 0);
    assert_true(resumed > 0);
    assert_true(again > 0);
    DO("DROP TABLE audit");
    DO("DROP FUNCTION note CASCADE");
}

struct crash {
    int signal;
    const struct ns_store *store;
};

static void *
crash_server(void *data)
{
    const struct crash *crash = data;

    while (ns_postgres_counts(crash->store).statements < 8)
        usleep(200);
    pg_stop(crash->signal);
    usleep(200000);
    pg_start();
    return NULL;
}

static void
a_server_that_crashes_and_comes_back_costs_no_row(void **state)
{
    struct crash crashes[] = { { SIGKILL, NULL }, { SIGQUIT, NULL } };

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct ns_store *store = open_store(60000);
        pthread_t thread;
        int again;

        crashes[i].store = store;
        assert_int_equal(pthread_create(&thread, NULL, crash_server,
                                        &crashes[i]), 0);
        again = run_all(store);
        pthread_join(thread, NULL);
        PQreset(admin);
        DO("SET client_min_messages = warning");
        assert_true(again > 0);
        assert_all_once();
        store->ops->close(store);
        clean(NULL);
    }
}

/* One heartbeat over two jobs, in an operation that `blocker` makes fail. */
static enum ns_status
beat_two(struct ns_store *store, struct ns_heartbeat beats[2],
         struct ns_error *err)
{
    return store->ops->heartbeat(store, beats, 2, err);
}

struct ender {
    const char *waits_for; /* pg_stat_activity.wait_event of its session */
    bool ended;
};

/* Ends the session of the store, once it waits for just this. */
static void *
end_session(void *data)
{
    struct ender *ender = data;
    PGconn *conn = pg_open_as("ns", "postgres");

    for (int i = 0; i < 3000 && !ender->ended; i++) {
        PGresult *result;
        char text[256];

        snprintf(text, sizeof(text), "SELECT pg_terminate_backend(pid) FROM"
                 " pg_stat_activity WHERE usename = 'nsd' AND wait_event ="
                 " '%s'", ender->waits_for);
        result = PQexec(conn, text);
        ender->ended = PQntuples(result) == 1;
        PQclear(result);
        usleep(10000);
    }
    PQfinish(conn);
    return NULL;
}

/* In the middle of COMMIT: the row is durable here, and waits for a replica
 * that does not exist. And just before: it waits for a lock, and nothing is
 * written. Asking again tells one from the other. */
static void
a_session_ended_at_its_commit_is_asked_after(void **state)
{
    static const char *const waits[] = { "SyncRep", "transactionid" };

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct ender ender = { .waits_for = waits[i] };
        struct ns_store *store = open_store(60000);
        struct ns_job *job = make_job(waits[i], "");
        struct ns_result result = ok_result("x", 1);
        struct ns_finished end = { .job = job, .result = &result,
                                   .fence = claim_run(store, job).fence };
        PGconn *other = pg_open_as("ns", "postgres");
        pthread_t thread;
        struct ns_error err;

        if (i == 0) {
            DO("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
            DO("SELECT pg_reload_conf()");
            usleep(200000);
        } else {
            PQclear(PQexec(other, "BEGIN"));
            PQclear(PQexec(other, "UPDATE nightshift.job SET attempt = 1"));
        }
        assert_int_equal(pthread_create(&thread, NULL, end_session, &ender), 0);
        assert_int_equal(store->ops->finish(store, &end, 1, &err), NS_RETRY);
        pthread_join(thread, NULL);
        assert_true(ender.ended);
        assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
        if (i == 0) {
            DO("SET synchronous_commit = off"); /* or this would wait, too */
            DO("ALTER SYSTEM RESET synchronous_standby_names");
            DO("SELECT pg_reload_conf()");
            DO("RESET synchronous_commit");
            usleep(200000);
        } else {
            PQclear(PQexec(other, "ROLLBACK"));
        }
        assert_int_equal(store->ops->finish(store, &end, 1, &err), NS_OK);
        assert_int_equal(end.outcome, NS_STORE_DONE);
        assert_int_equal(ns_postgres_counts(store).resolved, i == 0);
        assert_int_equal(number("SELECT count(*) FROM nightshift.result"),
                         i + 1);
        PQfinish(other);
        ns_job_destroy(job);
        store->ops->close(store);
    }
}

static void
locks_deadlocks_and_time_outs_are_the_worlds_fault(void **state)
{
    PGconn *other = pg_open_as("ns", "postgres");
    struct ns_job *a = make_job("a", ""), *b = make_job("b", "");
    struct ns_heartbeat beats[2] = { { .job = a }, { .job = b } };
    struct ns_store *store;
    struct ns_error err;

    (void)state;
    DO("ALTER ROLE nsd SET statement_timeout = '250ms'");
    store = open_store(60000);
    beats[0].fence = claim_run(store, a).fence;
    beats[1].fence = claim_run(store, b).fence;
    PQclear(PQexec(other, "BEGIN"));
    PQclear(PQexec(other, "LOCK TABLE nightshift.job"));
    assert_int_equal(beat_two(store, beats, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "57014"));
    PQclear(PQexec(other, "ROLLBACK"));
    assert_int_equal(beat_two(store, beats, &err), NS_OK);
    assert_int_equal(beats[1].outcome, NS_STORE_DONE);
    assert_int_equal(ns_postgres_counts(store).connects, 1);
    store->ops->close(store);

    /* Deadlock: the heartbeat has a and waits for b, the other way round the
     * other session. The one that waited longer looks first, and is chosen. */
    DO("ALTER ROLE nsd SET statement_timeout = 0");
    DO("ALTER ROLE nsd SET lock_timeout = 0");
    DO("DELETE FROM nightshift.job");
    store = open_store(60000);
    beats[0].fence = claim_run(store, a).fence;
    beats[1].fence = claim_run(store, b).fence;
    PQclear(PQexec(other, "SET deadlock_timeout = '10s'"));
    PQclear(PQexec(other, "BEGIN"));
    PQclear(PQexec(other, "UPDATE nightshift.job SET attempt = 9"
                   " WHERE job_id = 'b'"));
    assert_int_equal(PQsendQuery(other, "SELECT pg_sleep(0.1); UPDATE"
                                 " nightshift.job SET attempt = 9"
                                 " WHERE job_id = 'a'; ROLLBACK"), 1);
    assert_int_equal(beat_two(store, beats, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "40P01"));
    /* It may meet the other session once more before that one is through. */
    for (int i = 0; i < 20 && beat_two(store, beats, &err) != NS_OK; i++)
        usleep(20000);
    assert_int_equal(beat_two(store, beats, &err), NS_OK);
    assert_int_equal(beats[0].outcome, NS_STORE_DONE);
    store->ops->close(store);

    /* Serialization: a row that the statement saw is changed before it gets
     * its lock. */
    DO("ALTER ROLE nsd SET default_transaction_isolation = 'serializable'");
    store = open_store(60000);
    for (int i = 0; i < 20; i++) {
        enum ns_status status;

        PQclear(PQexec(other, "BEGIN"));
        PQclear(PQexec(other, "UPDATE nightshift.job SET attempt = attempt + 1"
                       " WHERE job_id = 'b'"));
        assert_int_equal(PQsendQuery(other, "SELECT pg_sleep(0.3); COMMIT"), 1);
        status = beat_two(store, beats, &err);
        for (PGresult *left; (left = PQgetResult(other)); )
            PQclear(left);
        if (status == NS_OK) /* it was slower than the other session */
            continue;
        assert_int_equal(status, NS_RETRY);
        assert_non_null(strstr(err.text, "40001"));
        break;
    }
    assert_non_null(strstr(err.text, "40001"));
    assert_int_equal(beat_two(store, beats, &err), NS_OK);
    assert_int_equal(beats[1].outcome, NS_STORE_DONE);
    store->ops->close(store);
    DO("ALTER ROLE nsd RESET default_transaction_isolation");

    DO("ALTER ROLE nsd SET lock_timeout = '100ms'");
    store = open_store(60000);
    PQfinish(other);
    other = pg_open_as("ns", "postgres");
    PQclear(PQexec(other, "BEGIN"));
    PQclear(PQexec(other, "LOCK TABLE nightshift.job"));
    assert_int_equal(beat_two(store, beats, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "55P03"));
    DO("ALTER ROLE nsd RESET ALL");
    PQfinish(other);
    ns_job_destroy(a);
    ns_job_destroy(b);
    store->ops->close(store);
}

static void
a_server_that_hangs_is_left_after_a_while(void **state)
{
    struct ns_postgres_options options = { .answer_ms = 300 };
    PGconn *other = pg_open_as("ns", "postgres");
    struct ns_store *store = open_store_with(&options);
    struct ns_job *a = make_job("a", "");
    struct ns_heartbeat beats[2] = { { .job = a }, { .job = a } };
    struct ns_error err;

    (void)state;
    beats[0].fence = beats[1].fence = claim_run(store, a).fence;
    PQclear(PQexec(other, "BEGIN"));
    PQclear(PQexec(other, "LOCK TABLE nightshift.job"));
    assert_int_equal(beat_two(store, beats, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "no answer in time"));
    PQclear(PQexec(other, "ROLLBACK"));
    assert_int_equal(beat_two(store, beats, &err), NS_OK);
    assert_int_equal(ns_postgres_counts(store).connects, 2);
    PQfinish(other);
    ns_job_destroy(a);
    store->ops->close(store);
}

static enum ns_status
open_status(const char *info, struct ns_error *err)
{
    struct ns_postgres_options options = { .conninfo = info,
                                           .connect_ms = 2000 };
    struct ns_store *store = NULL;
    enum ns_status status = ns_postgres_store_open(&options, &store, err);

    if (status == NS_OK)
        store->ops->close(store);
    return status;
}

static void
what_a_person_must_mend_is_told_from_what_passes(void **state)
{
    char info[512];
    struct ns_error err;

    (void)state;
    /* Passes: nobody there, no place left, read-only after a failover. */
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd "
             "dbname=postgres", pg_free_port());
    assert_int_equal(open_status(info, &err), NS_RETRY);
    set_conninfo(pg_server.port);
    DO("ALTER ROLE nsd CONNECTION LIMIT 0");
    assert_int_equal(open_status(conninfo, &err), NS_RETRY);
    DO("ALTER ROLE nsd CONNECTION LIMIT -1");
    DO("ALTER ROLE nsd SET default_transaction_read_only = on");
    assert_int_equal(open_status(conninfo, &err), NS_RETRY);
    DO("ALTER ROLE nsd RESET ALL");
    assert_int_equal(open_status(conninfo, &err), NS_OK);

    /* A person: who, where, what. */
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=locked_out "
             "dbname=postgres", pg_server.port);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    assert_string_equal(err.code, "postgres_setup");
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd "
             "dbname=nowhere", pg_server.port);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=submitter "
             "dbname=postgres", pg_server.port);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "nightshift_rw"));
    assert_int_equal(open_status("no such word=1", &err), NS_REJECT);
}

static void
a_password_comes_from_a_file_that_nobody_else_can_read(void **state)
{
    struct ns_postgres_options options = { .conninfo = conninfo };
    struct ns_store *store = NULL;
    char path[128], info[512];
    struct ns_error err;

    (void)state;
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd "
             "dbname=postgres password=canary", pg_server.port);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    assert_null(strstr(err.text, "canary"));
    assert_non_null(strstr(err.text, "password_file"));

    DO("CREATE ROLE known LOGIN PASSWORD 'right' IN ROLE nightshift_rw");
    snprintf(conninfo, sizeof(conninfo), "host=127.0.0.1 port=%d user=known "
             "dbname=postgres", pg_server.port);
    snprintf(path, sizeof(path), "%s/password", pg_server.folder);
    options.password_file = path;
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT); /* there is none */
    pg_add_file("password", "right\n", "w");
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "read by others"));
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(ns_postgres_store_open(&options, &store, &err), NS_OK);
    store->ops->close(store);
    pg_add_file("password", "canary\n", "w");
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "28P01"));
    assert_null(strstr(err.text, "canary"));
}

/* A socket that takes connections and never says a word. */
static int
mute_server(int *port)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&at, length), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &length), 0);
    *port = ntohs(at.sin_port);
    return fd;
}

static void
a_host_that_takes_the_call_and_says_nothing_is_passed_by(void **state)
{
    time_t start = time(NULL);
    struct ns_error err;
    char info[512];
    int port, fd = mute_server(&port);

    (void)state;
    snprintf(info, sizeof(info), "host=127.0.0.1,127.0.0.1 port=%d,%d user=nsd"
             " dbname=postgres", port, pg_server.port);
    assert_int_equal(open_status(info, &err), NS_OK);
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd"
             " dbname=postgres", port);
    assert_int_equal(open_status(info, &err), NS_RETRY);
    assert_in_range(time(NULL) - start, 1, 15);
    close(fd);
}

static void
another_host_is_talked_to_under_tls_or_not_at_all(void **state)
{
    struct ns_postgres_options options = { 0 };
    struct ns_store *store = NULL;
    struct ns_error err;
    char info[512];

    (void)state;
    snprintf(info, sizeof(info), "host=elsewhere hostaddr=127.0.0.1 port=%d"
             " user=nsd dbname=postgres", pg_server.port);
    options.conninfo = info;
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "SSL"));
    options.allow_plaintext = true;
    assert_int_equal(ns_postgres_store_open(&options, &store, &err), NS_OK);
    store->ops->close(store);
}

static void
the_servers_name_is_checked_when_that_is_asked_for(void **state)
{
    char info[512], command[1024];
    struct ns_error err;

    (void)state;
    snprintf(command, sizeof(command),
             "cd %s/data && openssl req -x509 -newkey rsa:2048 -nodes -days 2"
             " -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
             " -keyout server.key -out server.crt 2>/dev/null"
             " && chmod 600 server.key && chown --reference=. server.*"
             " && cp server.crt ../root.crt && chmod 644 ../root.crt",
             pg_server.folder);
    assert_int_equal(system(command), 0);
    DO("ALTER SYSTEM SET ssl = on");
    DO("SELECT pg_reload_conf()");
    usleep(300000);
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd"
             " dbname=postgres sslmode=verify-full sslrootcert=%s/root.crt",
             pg_server.port, pg_server.folder);
    assert_int_equal(open_status(info, &err), NS_OK);
    /* The same server under a name that its certificate does not have. */
    snprintf(info, sizeof(info), "host=elsewhere hostaddr=127.0.0.1 port=%d"
             " user=nsd dbname=postgres sslmode=verify-full"
             " sslrootcert=%s/root.crt", pg_server.port, pg_server.folder);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    assert_string_equal(err.code, "postgres_setup"); /* no wait helps */
    assert_non_null(strstr(err.text, "certificate"));
    snprintf(info, sizeof(info), "host=127.0.0.1 port=%d user=nsd"
             " dbname=postgres sslmode=verify-full sslrootcert=%s/none.crt",
             pg_server.port, pg_server.folder);
    assert_int_equal(open_status(info, &err), NS_REJECT);
    /* One of two that is only away may be the right one. (libpq asks no host
     * behind one of a wrong name.) */
    snprintf(info, sizeof(info), "host=127.0.0.1,elsewhere"
             " hostaddr=127.0.0.1,127.0.0.1 port=%d,%d user=nsd"
             " dbname=postgres sslmode=verify-full sslrootcert=%s/root.crt",
             pg_free_port(), pg_server.port, pg_server.folder);
    if (open_status(info, &err) != NS_RETRY)
        fail_msg("%s", err.text);
    DO("ALTER SYSTEM RESET ssl");
    DO("SELECT pg_reload_conf()");
    usleep(200000);
}

static void
several_hosts_are_tried_until_one_can_be_written_to(void **state)
{
    struct ns_error err;
    char info[512];

    (void)state;
    snprintf(info, sizeof(info), "host=127.0.0.1,127.0.0.1 port=%d,%d user=nsd"
             " dbname=postgres", pg_free_port(), pg_server.port);
    assert_int_equal(open_status(info, &err), NS_OK);
}

static void
a_session_that_turns_read_only_is_left(void **state)
{
    struct ns_store *store = open_store(0);
    struct ns_job *a = make_job("a", "");
    struct ns_claim got = { .job = a, .mode = NS_JOB_AR };
    struct ns_error err;

    (void)state;
    DO("ALTER SYSTEM SET default_transaction_read_only = on");
    DO("SELECT pg_reload_conf()");
    usleep(200000);
    assert_int_equal(store->ops->claim(store, &got, 1, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "25006"));
    assert_int_equal(store->ops->claim(store, &got, 1, &err), NS_RETRY);
    DO("SET default_transaction_read_only = off");
    DO("ALTER SYSTEM RESET default_transaction_read_only");
    DO("SELECT pg_reload_conf()");
    usleep(200000);
    assert_int_equal(store->ops->claim(store, &got, 1, &err), NS_OK);
    assert_int_equal(got.outcome, NS_CLAIM_RUN);
    DO("RESET default_transaction_read_only");
    ns_job_destroy(a);
    store->ops->close(store);
}

static void
a_server_that_may_forget_is_refused(void **state)
{
    struct ns_postgres_options options = { .conninfo = conninfo };
    struct ns_store *store = NULL;
    struct ns_error err;

    (void)state;
    DO("ALTER ROLE nsd SET synchronous_commit = off");
    assert_int_equal(ns_postgres_store_open(&options, &store, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "synchronous_commit is off"));
    options.allow_async_commit = true;
    assert_int_equal(ns_postgres_store_open(&options, &store, &err), NS_OK);
    store->ops->close(store);
    DO("ALTER ROLE nsd RESET ALL");
}

static void
errors_have_their_class(void **state)
{
    static const struct {
        const char *state;
        enum ns_pg_class class;
    } cases[] = {
        { NULL, NS_PG_AWAY },    { "", NS_PG_AWAY },
        { "08006", NS_PG_AWAY }, { "57P01", NS_PG_AWAY },
        { "57P03", NS_PG_AWAY }, { "25006", NS_PG_AWAY },
        { "57014", NS_PG_WORLD }, { "53100", NS_PG_WORLD },
        { "53200", NS_PG_WORLD }, { "53300", NS_PG_WORLD },
        { "58030", NS_PG_WORLD }, { "40001", NS_PG_WORLD },
        { "40P01", NS_PG_WORLD }, { "55P03", NS_PG_WORLD },
        { "28P01", NS_PG_SETUP }, { "28000", NS_PG_SETUP },
        { "3D000", NS_PG_SETUP }, { "42P01", NS_PG_SETUP },
        { "42703", NS_PG_SETUP }, { "42501", NS_PG_SETUP },
        { "22021", NS_PG_DATA },  { "22P05", NS_PG_DATA },
        { "23514", NS_PG_DATA },  { "42601", NS_PG_BROKEN },
        { "XX000", NS_PG_BROKEN },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (ns_pg_classify(cases[i].state) != cases[i].class)
            fail_msg("%s", cases[i].state);
}

static void
it_works_behind_a_pooler_that_deals_out_transactions(void **state)
{
    struct ns_store *a, *b;
    struct ns_job *job = make_job("a", "");
    struct ns_claim got;

    (void)state;
    pg_start_pooler();
    set_conninfo(pg_server.pooler_port);
    a = open_store(60000);
    b = open_store(60000);
    run_all(a);
    assert_all_once();
    got = claim_run(a, job);
    assert_int_equal(claim(b, job).outcome, NS_CLAIM_WAIT);
    assert_int_equal(checkpoint(a, job, got.fence, 0, 1), NS_STORE_DONE);
    assert_int_equal(give_back(a, job, got.fence, 0, false), NS_STORE_DONE);
    got = claim_run(b, job);
    assert_int_equal(got.n_blocks, 1);
    assert_int_equal(finish(b, job, got.fence), NS_STORE_DONE);
    ns_job_destroy(job);
    a->ops->close(a);
    b->ops->close(b);
}

static void
memory_that_runs_out_leaves_a_store_that_works(void **state)
{
    struct ns_store *store = open_store(60000);
    struct ns_job *job = make_job("a", "");
    struct ns_claim got = { .job = job, .mode = NS_JOB_AR };
    struct ns_result result = ok_result("x\xffy", 3);
    struct ns_finished end = { .job = job, .result = &result };
    enum ns_status status;
    struct ns_error err;
    int n;

    (void)state;
    result.tool_calls = json_array();
    for (n = 0;; n++) {
        fault_arm(n);
        status = store->ops->claim(store, &got, 1, &err);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
    }
    assert_true(n > 10);
    assert_int_equal(status, NS_OK);
    assert_int_equal(got.outcome, NS_CLAIM_RUN);
    end.fence = got.fence;
    for (n = 0;; n++) {
        fault_arm(n);
        status = store->ops->finish(store, &end, 1, &err);
        if (!fault_fired())
            break;
        if (status == NS_OK) /* it was the library's, which did without */
            break;
        assert_int_equal(status, NS_FATAL);
        assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 0);
    }
    assert_true(n > 20);
    assert_int_equal(end.outcome, NS_STORE_DONE);
    assert_int_equal(number("SELECT count(*) FROM nightshift.result"), 1);
    json_decref((json_t *)(uintptr_t)result.tool_calls);
    ns_job_destroy(job);
    store->ops->close(store);
}

int
main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, clean)
    const struct CMUnitTest tests[] = {
        TEST(the_schema_is_installed_once_and_its_version_judged),
        TEST(a_job_is_claimed_kept_checkpointed_and_stored),
        TEST(another_body_under_an_id_is_a_conflict_and_changes_nothing),
        TEST(many_are_claimed_at_once_and_a_double_waits),
        TEST(a_lease_keeps_others_away_until_it_ends),
        TEST(a_holder_that_was_overtaken_writes_nothing),
        TEST(a_checkpoint_that_waits_for_a_takeover_is_fenced),
        TEST(blocks_count_as_far_as_they_are_sound),
        TEST(many_jobs_are_taken_over_with_their_blocks),
        TEST(later_claims_run_in_the_mode_and_seed_of_the_first),
        TEST(a_job_given_back_waits_until_it_is_due),
        TEST(a_job_that_fails_too_often_ends_dead_with_its_last_code),
        TEST(a_look_says_what_is_done_and_claims_nothing),
        TEST(takeovers_without_a_block_end_a_job_and_those_with_one_do_not),
        TEST(a_cancel_is_heard_wherever_the_job_is),
        TEST(a_job_whose_deadline_passed_is_not_run_again),
        TEST(a_refused_message_is_kept_and_answered_if_it_has_an_id),
        TEST(a_tombstone_cancels_and_headers_are_kept),
        TEST(text_that_can_not_stand_is_kept_exactly_and_shown_readably),
        TEST(a_long_answer_stands_as_lz4_alone),
        TEST(one_bad_item_does_not_undo_its_neighbours),
        TEST(the_end_of_a_batch_is_told_once),
        TEST(results_are_told_of_only_when_asked_for),
        TEST(no_role_of_ours_can_change_a_final_row),
        TEST(purge_takes_what_is_old_and_nothing_else),
        TEST(rows_are_no_answer_until_they_are_committed),
        TEST(sessions_ended_in_the_middle_cost_no_row_and_double_none),
        TEST(answers_that_get_lost_are_asked_for_again),
        TEST(a_lost_answer_to_a_refusal_or_a_retry_changes_nothing),
        TEST(four_holders_under_every_trouble_leave_one_row_a_job),
        TEST(a_server_that_crashes_and_comes_back_costs_no_row),
        TEST(a_session_ended_at_its_commit_is_asked_after),
        TEST(locks_deadlocks_and_time_outs_are_the_worlds_fault),
        TEST(a_server_that_hangs_is_left_after_a_while),
        TEST(what_a_person_must_mend_is_told_from_what_passes),
        TEST(a_password_comes_from_a_file_that_nobody_else_can_read),
        TEST(a_host_that_takes_the_call_and_says_nothing_is_passed_by),
        TEST(another_host_is_talked_to_under_tls_or_not_at_all),
        TEST(the_servers_name_is_checked_when_that_is_asked_for),
        TEST(several_hosts_are_tried_until_one_can_be_written_to),
        TEST(a_session_that_turns_read_only_is_left),
        TEST(a_server_that_may_forget_is_refused),
        cmocka_unit_test(errors_have_their_class),
        TEST(it_works_behind_a_pooler_that_deals_out_transactions),
        TEST(memory_that_runs_out_leaves_a_store_that_works),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
