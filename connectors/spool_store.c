/* The writing end of a spool: claims, blocks and result lines.
 *
 * There is one writer, which the lock on OUT or on the spool sees to. So a
 * fence is overtaken only when a job is given back and claimed again, or when
 * its file is given up.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/spool_private.h"

static const size_t max_batch = (size_t)512 << 20;
static const size_t max_line = (size_t)256 << 20;

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory storing results");
}

static struct ns_spool_claim *
find_claim(struct ns_spool_file *file, uint64_t line)
{
    struct ns_spool_claim *claim = file->claims;

    while (claim && claim->line != line)
        claim = claim->next;
    return claim;
}

/* The claim that the job's holder speaks for, or NULL: fenced. */
static struct ns_spool_claim *
held_claim(struct ns_spool_file *file, const struct ns_job *job, uint64_t fence)
{
    struct ns_spool_claim *claim = find_claim(file, job->position.offset);

    return claim && claim->running && claim->fence == fence ? claim : NULL;
}

static bool
is_done(const struct ns_spool_file *file, const struct ns_job *job)
{
    return ns_index_has(file->index, job->position.offset,
                        ns_index_sha(job->sha256)) &&
           ns_index_is_done(file->index, job->position.offset);
}

/* ---- writing results ------------------------------------------------- */

/* Adds one line to the batch; a result that can not be said as a line becomes
 * one that says so, and its neighbours do not notice. */
static enum ns_status
add_line(const struct ns_job *job, const struct ns_result *result,
         struct ns_buf *batch, struct ns_error *err)
{
    struct ns_result error;
    enum ns_status status;
    struct ns_buf line;

    ns_buf_init(&line, max_line);
    status = ns_result_line(job, result, &line, err);
    if (status == NS_REJECT) {
        err->code = "result_too_large";
        error = ns_result_of_error(NS_RESULT_FAILED, err);
        ns_buf_reset(&line);
        status = ns_result_line(job, &error, &line, err);
    }
    if (status == NS_OK) {
        ns_buf_add(batch, line.data, line.length);
        if (batch->failed)
            status = no_memory(err);
    }
    ns_buf_fini(&line);
    return status;
}

/* Takes note of what a write to one of the file's two journals came to. */
static enum ns_status
note_room(struct ns_spool *spool, const struct ns_spool_file *file,
          enum ns_status status, const struct ns_error *err)
{
    if (status == NS_RETRY && err->code &&
        strcmp(err->code, "storage_full") == 0 &&
        !spool->progress.storage_full) {
        spool->progress.storage_full = true;
        ns_log_error("storage.full", "file=%s intake=stopped", file->name);
    } else if (status == NS_OK && spool->progress.storage_full) {
        spool->progress.storage_full = false;
        ns_log_info("storage.recovered", "file=%s", file->name);
    }
    return status;
}

static enum ns_status
append(struct ns_spool *spool, struct ns_spool_file *file,
       const struct ns_buf *batch, struct ns_error *err)
{
    enum ns_status status;

    if (batch->over)
        return ns_fail(err, NS_FATAL, "a batch of results over %zu bytes",
                       max_batch);
    status = ns_journal_append(file->journal, batch->data, batch->length, err);
    return note_room(spool, file, status, err);
}

static enum ns_status
append_blocks(struct ns_spool *spool, struct ns_spool_file *file,
              const struct ns_buf *lines, struct ns_error *err)
{
    enum ns_status status;

    status = ns_blocks_append(file->blocks, lines->data, lines->length, err);
    return note_room(spool, file, status, err);
}

/* The line stands in the journal. */
static void
settle(struct ns_spool *spool, struct ns_spool_file *file,
       const struct ns_job *job, bool ok)
{
    uint64_t line = job->position.offset;

    ns_index_set_done(file->index, line);
    if (file->blocks)
        ns_blocks_forget(file->blocks, line);
    ns_spool_drop_claim(file, line);
    spool->progress.ok += ok;
    spool->progress.failed += !ok;
}

/* ---- claim ----------------------------------------------------------- */

/* A job that failed too often gets its last line. */
static enum ns_status
give_up(struct ns_spool *spool, struct ns_spool_file *file,
        struct ns_claim *claim, const char *code, uint32_t times,
        const char *what, struct ns_error *err)
{
    struct ns_result result;
    enum ns_status status;
    struct ns_error why;
    struct ns_buf batch;

    ns_refuse(&why, code, NULL, "given up after %" PRIu32 " %s", times, what);
    result = ns_result_of_error(NS_RESULT_DEAD, &why);
    ns_buf_init(&batch, max_batch);
    status = add_line(claim->job, &result, &batch, err);
    if (status == NS_OK)
        status = append(spool, file, &batch, err);
    ns_buf_fini(&batch);
    if (status == NS_OK) {
        settle(spool, file, claim->job, false);
        claim->outcome = NS_CLAIM_FINAL;
    }
    return status;
}

/* Writes down that the job was begun, or given back, for the process that
 * comes after this one. Only the daemon does: who kills his own `run` four
 * times does not mean that the job is to blame. */
static enum ns_status
note_begun(struct ns_spool *spool, struct ns_spool_file *file,
           const struct ns_blocks_key *key, struct ns_blocks_begun begun,
           struct ns_error *err)
{
    enum ns_status status;
    struct ns_buf line;

    if (!spool->is_directory || !file->blocks)
        return NS_OK;
    ns_buf_init(&line, max_line);
    ns_blocks_format_begun(file->blocks, key, begun, &line);
    status = ns_buf_check(&line, "a claim", err);
    if (status == NS_OK)
        status = append_blocks(spool, file, &line, err);
    ns_buf_fini(&line);
    return status;
}

/* How often in a row the job was taken over from a process that died, without
 * a block having been added. */
static uint32_t
count_stalls(const struct ns_spool_file *file, const struct ns_blocks_key *key,
             const struct ns_spool_claim *slot, uint32_t n_blocks)
{
    struct ns_blocks_begun begun;

    if (slot) /* of this process: asked again, or given back */
        return slot->running ? slot->stalls : 0;
    if (!file->blocks || !ns_blocks_begun(file->blocks, key, &begun) ||
        begun.stalls < 0)
        return 0;
    return n_blocks > (uint32_t)begun.n_blocks ? 1 : (uint32_t)begun.stalls + 1;
}

static enum ns_status
begin(struct ns_spool *spool, struct ns_spool_file *file,
      struct ns_claim *claim, struct ns_error *err)
{
    struct ns_spool_claim *slot = find_claim(file, claim->job->position.offset);
    struct ns_blocks_key key = {
        .line = claim->job->position.offset,
        .sha = ns_index_sha(claim->job->sha256),
        .mode = claim->mode,
        .seed = claim->seed,
    };
    struct ns_blocks_found found = { 0 };
    struct ns_blocks_begun begun;
    enum ns_status status;
    uint32_t stalls;

    if (file->blocks) {
        status =
            ns_blocks_find(file->blocks, &key, claim->job->arena, &found, err);
        if (status != NS_OK)
            return status;
    }
    stalls = count_stalls(file, &key, slot, found.n_blocks);
    if (stalls > NS_SPOOL_STALLS)
        return give_up(spool, file, claim, "stalled", NS_SPOOL_STALLS,
                       "takeovers without a new block", err);
    begun =
        (struct ns_blocks_begun){ (int32_t)stalls, (int32_t)found.n_blocks };
    status = note_begun(spool, file, &key, begun, err);
    if (status != NS_OK)
        return status;
    if (!slot) {
        slot = calloc(1, sizeof(*slot));
        if (!slot)
            return no_memory(err);
        slot->line = key.line;
        slot->next = file->claims;
        file->claims = slot;
    }
    slot->sha = key.sha;
    slot->key = key;
    slot->fence = ++spool->next_fence;
    slot->attempt++;
    slot->stalls = stalls;
    slot->running = true;
    claim->outcome = NS_CLAIM_RUN;
    claim->fence = slot->fence;
    claim->attempt = slot->attempt;
    claim->stalls = stalls;
    claim->stored_mode = claim->mode;
    claim->stored_seed = claim->seed;
    claim->tokens = found.tokens;
    claim->block_tokens = found.block_tokens;
    claim->n_tokens = found.n_tokens;
    claim->n_blocks = found.n_blocks;
    claim->n_dropped = found.n_dropped;
    claim->resumed_across = found.across;
    return NS_OK;
}

static enum ns_status
claim_one(struct ns_spool *spool, struct ns_claim *claim, struct ns_error *err)
{
    const struct ns_job *job = claim->job;
    struct ns_spool_file *file = ns_spool_find(spool, job->position.partition);
    struct ns_spool_claim *slot;
    uint64_t other;
    char shown[120];
    int64_t now;

    claim->outcome = NS_CLAIM_FINAL;
    if (!file || file->dead || is_done(file, job))
        return NS_OK;
    slot = find_claim(file, job->position.offset);
    now = ns_spool_now_ms();
    if (slot && slot->retries >= NS_SPOOL_RETRIES)
        return give_up(spool, file, claim,
                       slot->code ? slot->code : "retries_exhausted",
                       slot->retries, "failures", err);
    if (slot && !slot->running && slot->due_ms > now) {
        claim->outcome = NS_CLAIM_WAIT;
        claim->wait_ms = slot->due_ms - now;
        return NS_OK;
    }
    other = job->custom_id ? ns_index_line_of(file->index, job->custom_id) : 0;
    if (other == 0 || other == job->position.offset)
        return begin(spool, file, claim, err);
    claim->outcome = NS_CLAIM_CONFLICT;
    ns_refuse(&claim->error, "duplicate_id", "custom_id",
              "custom_id: %s stands in line %" PRIu64 " already",
              ns_log_escape(job->custom_id, strlen(job->custom_id), shown,
                            sizeof(shown)),
              other);
    return NS_OK;
}

static enum ns_status
spool_claim(struct ns_store *store, struct ns_claim *claims, size_t n,
            struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);
    enum ns_status status = NS_OK;

    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n && status == NS_OK; i++)
        status = claim_one(spool, &claims[i], err);
    pthread_mutex_unlock(&spool->mutex);
    return status;
}

/* ---- while it runs --------------------------------------------------- */

static enum ns_status
spool_heartbeat(struct ns_store *store, struct ns_heartbeat *beats, size_t n,
                struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);

    (void)err;
    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n; i++) {
        const struct ns_job *job = beats[i].job;
        struct ns_spool_file *file =
            ns_spool_find(spool, job->position.partition);

        beats[i].cancel = false;
        beats[i].outcome = file && held_claim(file, job, beats[i].fence)
                               ? NS_STORE_DONE
                               : NS_STORE_FENCED;
    }
    pthread_mutex_unlock(&spool->mutex);
    return NS_OK;
}

static enum ns_status
checkpoint_file(struct ns_spool *spool, struct ns_spool_file *file,
                struct ns_checkpoint *points, size_t n, struct ns_error *err)
{
    enum ns_status status;
    struct ns_buf batch;

    ns_buf_init(&batch, max_batch);
    for (size_t i = 0; i < n; i++) {
        struct ns_checkpoint *point = &points[i];
        struct ns_spool_claim *claim;

        if (point->job->position.partition != file->number)
            continue;
        claim = held_claim(file, point->job, point->fence);
        point->outcome = claim ? NS_STORE_DONE : NS_STORE_FENCED;
        if (claim && file->blocks &&
            !ns_blocks_has(file->blocks, &claim->key, point->block))
            ns_blocks_format(file->blocks, &claim->key, point->block,
                             point->tokens, point->n_tokens, &batch);
    }
    status = ns_buf_check(&batch, "a batch of blocks", err);
    if (status == NS_OK && batch.length)
        status = append_blocks(spool, file, &batch, err);
    ns_buf_fini(&batch);
    return status;
}

static enum ns_status
spool_checkpoint(struct ns_store *store, struct ns_checkpoint *points, size_t n,
                 struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);
    enum ns_status status = NS_OK;

    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n; i++)
        points[i].outcome = NS_STORE_FENCED; /* unless its file says else */
    for (struct ns_spool_file *file = spool->files; file && status == NS_OK;
         file = file->next)
        status = checkpoint_file(spool, file, points, n, err);
    pthread_mutex_unlock(&spool->mutex);
    return status;
}

/* ---- the end --------------------------------------------------------- */

static enum ns_status
finish_file(struct ns_spool *spool, struct ns_spool_file *file,
            struct ns_finished *ends, size_t n, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct ns_buf batch;

    ns_buf_init(&batch, max_batch);
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        if (ends[i].job->position.partition != file->number)
            continue;
        if (is_done(file, ends[i].job)) {
            ends[i].outcome = NS_STORE_DONE;
        } else if (held_claim(file, ends[i].job, ends[i].fence)) {
            ends[i].outcome = 0; /* to be settled below */
            status = add_line(ends[i].job, ends[i].result, &batch, err);
        }
    }
    if (status == NS_OK && batch.length)
        status = append(spool, file, &batch, err);
    ns_buf_fini(&batch);
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        if (ends[i].job->position.partition != file->number ||
            ends[i].outcome != 0)
            continue;
        ends[i].outcome = NS_STORE_DONE;
        settle(spool, file, ends[i].job,
               ends[i].result->status == NS_RESULT_OK);
    }
    return status;
}

static enum ns_status
spool_finish(struct ns_store *store, struct ns_finished *ends, size_t n,
             struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);
    enum ns_status status = NS_OK;

    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n; i++)
        ends[i].outcome = NS_STORE_FENCED;
    for (struct ns_spool_file *file = spool->files; file && status == NS_OK;
         file = file->next)
        status = finish_file(spool, file, ends, n, err);
    pthread_mutex_unlock(&spool->mutex);
    return status;
}

static enum ns_status
refuse_file(struct ns_spool *spool, struct ns_spool_file *file,
            struct ns_refusal *refusals, size_t n, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct ns_result result;
    struct ns_buf batch;

    ns_buf_init(&batch, max_batch);
    for (size_t i = 0; i < n && status == NS_OK && !file->dead; i++) {
        struct ns_refusal *refusal = &refusals[i];

        if (refusal->job->position.partition != file->number)
            continue;
        refusal->outcome = NS_STORE_DONE;
        if (is_done(file, refusal->job))
            continue;
        refusal->outcome = 0; /* to be settled below */
        result = ns_result_of_error(NS_RESULT_DEAD, &refusal->error);
        status = add_line(refusal->job, &result, &batch, err);
    }
    if (status == NS_OK && batch.length)
        status = append(spool, file, &batch, err);
    ns_buf_fini(&batch);
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        if (refusals[i].job->position.partition != file->number ||
            refusals[i].outcome != 0)
            continue;
        refusals[i].outcome = NS_STORE_DONE;
        settle(spool, file, refusals[i].job, false);
    }
    return status;
}

static enum ns_status
spool_refuse(struct ns_store *store, struct ns_refusal *refusals, size_t n,
             struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);
    enum ns_status status = NS_OK;

    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n; i++)
        refusals[i].outcome = NS_STORE_FENCED;
    for (struct ns_spool_file *file = spool->files; file && status == NS_OK;
         file = file->next)
        status = refuse_file(spool, file, refusals, n, err);
    pthread_mutex_unlock(&spool->mutex);
    return status;
}

static enum ns_status
spool_retry(struct ns_store *store, struct ns_give_back *backs, size_t n,
            struct ns_error *err)
{
    struct ns_spool *spool = ns_spool_of_store(store);
    enum ns_status status = NS_OK;

    pthread_mutex_lock(&spool->mutex);
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        const struct ns_job *job = backs[i].job;
        struct ns_spool_file *file =
            ns_spool_find(spool, job->position.partition);
        struct ns_spool_claim *claim =
            file ? held_claim(file, job, backs[i].fence) : NULL;

        backs[i].outcome = claim ? NS_STORE_DONE : NS_STORE_FENCED;
        if (!claim)
            continue;
        status = note_begun(spool, file, &claim->key,
                            (struct ns_blocks_begun){ -1, 0 }, err);
        if (status != NS_OK)
            break;
        claim->running = false;
        claim->due_ms = ns_spool_now_ms() + backs[i].delay_ms;
        claim->code = backs[i].code;
        claim->retries += backs[i].own_fault;
    }
    pthread_mutex_unlock(&spool->mutex);
    return status;
}

static void
spool_close(struct ns_store *store)
{
    (void)store; /* ns_spool_close ends both */
}

static int64_t
spool_heartbeat_ms(const struct ns_store *store)
{
    (void)store;
    return 0;
}

const struct ns_store_ops ns_spool_store_ops = {
    .name = "spool",
    .claim = spool_claim,
    .heartbeat = spool_heartbeat,
    .checkpoint = spool_checkpoint,
    .finish = spool_finish,
    .refuse = spool_refuse,
    .retry = spool_retry,
    .close = spool_close,
    .heartbeat_ms = spool_heartbeat_ms,
};
