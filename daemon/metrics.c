#include "daemon/metrics.h"

#include <inttypes.h>
#include <string.h>

/* --- histograms -------------------------------------------------------- */

/* Nights are long: a job may wait for hours and run for one. */
static const double queue_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 28800,
    86400,
};
static const double run_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600,
    14400,
};
static const double tokens_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256,
};
static const double pass_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
    60, 300,
};
/* Over 1: a first segment that alone is larger than the budget. */
static const double fill_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99,
    1, 2,
};

static const double miss_bounds[NS_HISTOGRAM_BUCKETS] = {
    0.25, 0.5, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2, 1.33,
    1.5, 2, 4,
};

static void
observe(struct ns_histogram *histogram, const double *bounds, double value)
{
    size_t i = 0;

    if (!(value >= 0)) /* a clock that went back */
        value = 0;
    while (i < NS_HISTOGRAM_BUCKETS && value > bounds[i])
        i++;
    atomic_fetch_add_explicit(&histogram->sum_micro, (uint64_t)(value * 1e6),
                              memory_order_relaxed);
    atomic_fetch_add_explicit(&histogram->bucket[i], 1, memory_order_relaxed);
}

static uint64_t
get(const _Atomic uint64_t *number)
{
    return atomic_load_explicit(number, memory_order_relaxed);
}

static void
add(_Atomic uint64_t *number, uint64_t n)
{
    atomic_fetch_add_explicit(number, n, memory_order_relaxed);
}

static void
set(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

/* --- what is counted --------------------------------------------------- */

/* Codes of result rows and dead letters, as the other layers spell them. */
static const char *const codes[] = {
    "bad_base64", "bad_encoding", "bad_id", "bad_image", "bad_json",
    "bad_lz4", "bad_param", "bad_text", "bad_tool_call", "cancel",
    "cancelled", "document_broken", "document_hash", "document_limit",
    "document_missing", "document_type", "duplicate_id", "empty_prompt",
    "engine", "expired", "grammar_incomplete", "grammar_limit",
    "id_conflict", "image_limit", "image_type", "internal",
    "invalid_output", "io",
    "missing_id", "nan_logits", "out_of_memory", "over_context",
    "over_memory", "path_denied", "result_too_large", "retries_exhausted",
    "schema", "stalled", "tombstone", "too_large", "unknown_field",
    "unknown_model", "unstorable", "unsupported", "url_denied",
    "url_disabled", "url_failed",
};
enum { N_CODES = sizeof(codes) / sizeof(codes[0]) }; /* then: other */
_Static_assert((int)N_CODES < (int)NS_METRICS_CODES,
               "room for every code and other");

const char *
ns_metrics_code(size_t index)
{
    return index < N_CODES ? codes[index] : "other";
}

static size_t
code_index(const char *code)
{
    size_t i = 0;

    while (i < N_CODES && (!code || strcmp(codes[i], code) != 0))
        i++;
    return i;
}

void
ns_metrics_init(struct ns_metrics *metrics)
{
    memset(metrics, 0, sizeof(*metrics)); /* before any thread reads it */
}

static double
share_used(uint32_t n_pages, uint32_t n_free)
{
    return n_pages > 0 ? 1.0 - (double)n_free / n_pages : 0;
}

static double
fuller_pool(const struct ns_engine_load *load,
            const struct ns_memory_plan *memory)
{
    double full = share_used(memory->full_pages, load->full_pages_free);
    double sliding =
        share_used(memory->sliding_pages, load->sliding_pages_free);

    return full > sliding ? full : sliding;
}

void
ns_metrics_pass(struct ns_metrics *metrics,
                const struct ns_pass_report *report,
                const struct ns_engine_load *load,
                const struct ns_memory_plan *memory)
{
    if (report->n_rows > 0) {
        add(&metrics->passes, 1);
        observe(&metrics->pass_s, pass_bounds, (double)report->ns / 1e9);
        if (report->predicted_ns > 0)
            observe(&metrics->pass_miss, miss_bounds,
                    (double)report->ns / (double)report->predicted_ns);
        if (load->pass_tokens > 0)
            observe(&metrics->pass_fill, fill_bounds,
                    (double)report->n_rows / load->pass_tokens);
        observe(&metrics->kv_fill, fill_bounds, fuller_pool(load, memory));
    }
    add(&metrics->prefill_rows, report->prefill_rows);
    add(&metrics->canvas_rows, report->canvas_rows);
    add(&metrics->commit_rows, report->commit_rows);
    add(&metrics->ar_rows, report->ar_rows);
    add(&metrics->canvas_steps, report->n_canvases);
    add(&metrics->new_tokens, report->new_tokens);
    set(&metrics->put_back, load->put_back);
    set(&metrics->images_asked, load->images_asked);
    set(&metrics->images_encoded, load->images_encoded);
    set(&metrics->full_pages, memory->full_pages);
    set(&metrics->full_pages_free, load->full_pages_free);
    set(&metrics->sliding_pages, memory->sliding_pages);
    set(&metrics->sliding_pages_free, load->sliding_pages_free);
}

void
ns_metrics_job(struct ns_metrics *metrics, const struct ns_result *result,
               uint32_t new_tokens)
{
    observe(&metrics->queue_s, queue_bounds, (double)result->queued_ms / 1e3);
    observe(&metrics->run_s, run_bounds, (double)result->run_ms / 1e3);
    if (result->passes > 0)
        observe(&metrics->tokens_per_pass, tokens_bounds,
                result->tokens_per_pass);
    add(&metrics->job_tokens, new_tokens);
    add(&metrics->job_passes, result->passes);
    add(&metrics->cached_tokens, result->cached_tokens);
}

void
ns_metrics_ended(struct ns_metrics *metrics, enum ns_result_status status,
                 const char *code)
{
    if ((size_t)status < NS_METRICS_STATUSES)
        add(&metrics->ended[status], 1);
    if (status != NS_RESULT_OK)
        add(&metrics->errors[code_index(code)], 1);
}

void
ns_metrics_turned_down(struct ns_metrics *metrics, enum ns_validator validator)
{
    add(&metrics->turned_down[validator], 1);
}

uint64_t
ns_metrics_waiting(const struct ns_metrics *metrics)
{
    uint64_t in_flight = get(&metrics->in_flight);
    uint64_t running = get(&metrics->running);

    return in_flight > running ? in_flight - running : 0;
}

/* --- the text ---------------------------------------------------------- */

static void
head(struct ns_buf *out, const char *name, const char *type, const char *help)
{
    ns_buf_printf(out, "# HELP nightshift_%s %s\n# TYPE nightshift_%s %s\n",
                  name, help, name, type);
}

static void
line(struct ns_buf *out, const char *name, const char *type, const char *help,
     uint64_t value)
{
    head(out, name, type, help);
    ns_buf_printf(out, "nightshift_%s %" PRIu64 "\n", name, value);
}

static void
labelled(struct ns_buf *out, const char *name, const char *label,
         const char *word, uint64_t value)
{
    ns_buf_printf(out, "nightshift_%s{%s=\"%s\"} %" PRIu64 "\n", name, label,
                  word, value);
}

static void
histogram(struct ns_buf *out, const char *name, const char *help,
          const struct ns_histogram *histogram, const double *bounds)
{
    double sum = (double)get(&histogram->sum_micro) / 1e6;
    uint64_t n = 0;

    head(out, name, "histogram", help);
    for (size_t i = 0; i < NS_HISTOGRAM_BUCKETS; i++) {
        n += get(&histogram->bucket[i]);
        ns_buf_printf(out, "nightshift_%s_bucket{le=\"%g\"} %" PRIu64 "\n",
                      name, bounds[i], n);
    }
    n += get(&histogram->bucket[NS_HISTOGRAM_BUCKETS]);
    ns_buf_printf(out,
                  "nightshift_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n"
                  "nightshift_%s_sum %.6f\nnightshift_%s_count %" PRIu64 "\n",
                  name, n, name, sum, name, n);
}

/* A label's value may hold anything but these three as they stand. */
static void
escaped(struct ns_buf *out, const char *text)
{
    for (; text && *text; text++) {
        if (*text == '\n')
            ns_buf_text(out, "\\n");
        else if (*text == '\\' || *text == '"')
            ns_buf_printf(out, "\\%c", *text);
        else
            ns_buf_byte(out, *text);
    }
}

static void
write_about(const struct ns_metrics_about *about, struct ns_buf *out)
{
    head(out, "build_info", "gauge", "What runs; always 1.");
    ns_buf_text(out, "nightshift_build_info{version=\"");
    escaped(out, about->version);
    ns_buf_text(out, "\",model=\"");
    escaped(out, about->model);
    ns_buf_text(out, "\",model_revision=\"");
    escaped(out, about->model_revision);
    ns_buf_text(out, "\"} 1\n");
    head(out, "start_time_seconds", "gauge",
         "Unix time at which the process started.");
    ns_buf_printf(out, "nightshift_start_time_seconds %" PRId64 "\n",
                  about->start_unix_s);
    line(out, "ready", "gauge", "Whether jobs are taken in, as /readyz says.",
         about->ready);
    line(out, "healthy", "gauge",
         "Whether every thread moves in its time, as /healthz says.",
         about->healthy);
}

/* A series is of a partition, so that an alert can say which. */
static void
of_partition(struct ns_buf *out, const char *name,
             const struct ns_kafka_partition *partition)
{
    ns_buf_printf(out, "nightshift_%s{topic=\"", name);
    escaped(out, partition->topic);
    ns_buf_printf(out, "\",partition=\"%" PRId32 "\"} ", partition->id);
}

static void
write_kafka(const struct ns_kafka_state *kafka, struct ns_buf *out)
{
    line(out, "kafka_lag_messages", "gauge",
         "Messages of our partitions that are not acknowledged.", kafka->lag);
    head(out, "kafka_head_age_seconds", "gauge",
         "Longest time that one unfinished message has held up its partition.");
    ns_buf_printf(out, "nightshift_kafka_head_age_seconds %.3f\n",
                  (double)kafka->head_ms / 1e3);
    line(out, "kafka_partitions", "gauge", "Partitions assigned to us.",
         kafka->n_partitions);
    line(out, "kafka_lost_messages_total", "counter",
         "Messages that retention removed before they were read.",
         kafka->gap);
    line(out, "kafka_rebalances_total", "counter",
         "Assignments of partitions received.", kafka->rebalances);
    head(out, "kafka_partition_lag_messages", "gauge",
         "kafka_lag_messages by partition, of the first 64.");
    for (uint32_t i = 0; i < kafka->n_shown; i++) {
        of_partition(out, "kafka_partition_lag_messages", &kafka->shown[i]);
        ns_buf_printf(out, "%" PRIu64 "\n", kafka->shown[i].lag);
    }
    head(out, "kafka_partition_head_age_seconds", "gauge",
         "kafka_head_age_seconds by partition, of the first 64.");
    for (uint32_t i = 0; i < kafka->n_shown; i++) {
        of_partition(out, "kafka_partition_head_age_seconds", &kafka->shown[i]);
        ns_buf_printf(out, "%.3f\n", (double)kafka->shown[i].head_ms / 1e3);
    }
}

static void
write_jobs(const struct ns_metrics *m, struct ns_buf *out)
{
    line(out, "source_away", "gauge",
         "Whether the source was out of reach when it was last asked.",
         get(&m->source_away));
    line(out, "store_away", "gauge",
         "Whether the store was out of reach when it was last asked.",
         get(&m->store_away));
    line(out, "jobs_received_total", "counter",
         "Messages taken in from the source.", get(&m->received));
    line(out, "jobs_in_flight", "gauge", "Jobs taken in and not yet stored.",
         get(&m->in_flight));
    line(out, "jobs_waiting", "gauge",
         "Of them not in passes: in preparation, waiting, being stored.",
         ns_metrics_waiting(m));
    line(out, "jobs_put_off", "gauge",
         "Of those, jobs whose tenant has begun its share, or is paused.",
         get(&m->put_off));
    line(out, "jobs_running", "gauge", "Of them in passes.",
         get(&m->running));
    line(out, "window_jobs", "gauge", "Most jobs that may be in flight.",
         get(&m->window));
    head(out, "jobs_total", "counter", "Final rows stored, by status.");
    for (size_t i = 0; i < NS_METRICS_STATUSES; i++)
        labelled(out, "jobs_total", "status",
                 ns_result_status_name((enum ns_result_status)i),
                 get(&m->ended[i]));
    head(out, "job_errors_total", "counter",
         "Final rows that are not ok, by error code.");
    for (size_t i = 0; i <= N_CODES; i++)
        labelled(out, "job_errors_total", "code", ns_metrics_code(i),
                 get(&m->errors[i]));
    head(out, "answers_turned_down_total", "counter",
         "Answers that a validator turned down.");
    for (int i = 0; i < NS_N_VALIDATORS; i++)
        labelled(out, "answers_turned_down_total", "validator",
                 ns_validator_name((enum ns_validator)i),
                 get(&m->turned_down[i]));
    line(out, "job_retries_total", "counter",
         "Jobs given back after a trouble of their own.", get(&m->retries));
    line(out, "jobs_duplicate_total", "counter",
         "Messages whose job had its final row already.", get(&m->duplicates));
    line(out, "jobs_fenced_total", "counter",
         "Writes refused because another holder has the job.",
         get(&m->fenced));
    line(out, "checkpoints_total", "counter", "Blocks stored as checkpoints.",
         get(&m->checkpoints));
    line(out, "blocks_dropped_total", "counter",
         "Stored blocks that a job taken up again could not use.",
         get(&m->blocks_dropped));
    histogram(out, "job_queue_seconds",
              "From being taken in to being run, of jobs run to their end.",
              &m->queue_s, queue_bounds);
    histogram(out, "job_run_seconds",
              "From being run to the answer, of jobs run to their end.",
              &m->run_s, run_bounds);
    histogram(out, "job_tokens_per_pass",
              "Tokens that a forward pass added to a job, per job.",
              &m->tokens_per_pass, tokens_bounds);
}

static void
write_engine(const struct ns_metrics *m, struct ns_buf *out)
{
    uint64_t full = get(&m->full_pages), sliding = get(&m->sliding_pages);
    uint64_t full_free = get(&m->full_pages_free);
    uint64_t sliding_free = get(&m->sliding_pages_free);

    line(out, "passes_total", "counter", "Forward passes.", get(&m->passes));
    histogram(out, "pass_seconds", "Wall time of a forward pass.", &m->pass_s,
              pass_bounds);
    histogram(out, "pass_fill_ratio",
              "Rows of a pass as a share of engine.pass_tokens.",
              &m->pass_fill, fill_bounds);
    histogram(out, "pass_prediction_ratio",
              "Wall time of a pass over what was predicted for it.",
              &m->pass_miss, miss_bounds);
    head(out, "pass_rows_total", "counter",
         "Rows computed in passes, by kind of segment.");
    labelled(out, "pass_rows_total", "kind", "prefill", get(&m->prefill_rows));
    labelled(out, "pass_rows_total", "kind", "canvas", get(&m->canvas_rows));
    labelled(out, "pass_rows_total", "kind", "commit", get(&m->commit_rows));
    labelled(out, "pass_rows_total", "kind", "ar", get(&m->ar_rows));
    line(out, "denoise_steps_total", "counter",
         "Denoise steps, one a canvas and pass.", get(&m->canvas_steps));
    line(out, "canvas_blocks_total", "counter",
         "Canvases that became a block.", get(&m->canvas_blocks));
    line(out, "generated_tokens_total", "counter",
         "Tokens that became part of an answer.", get(&m->new_tokens));
    line(out, "prompt_tokens_total", "counter", "Tokens of prepared prompts.",
         get(&m->prompt_tokens));
    line(out, "prefix_cache_tokens_total", "counter",
         "Prompt tokens not computed since another job's prefix held them.",
         get(&m->cached_tokens));
    line(out, "sequences_put_back_total", "counter",
         "Times a job was sent back to its last block for want of pages.",
         get(&m->put_back));
    line(out, "images_total", "counter", "Pictures asked for by jobs.",
         get(&m->images_asked));
    line(out, "images_encoded_total", "counter",
         "Of them encoded; the others were still there.",
         get(&m->images_encoded));
    histogram(out, "kv_fill_ratio",
              "Share of the fuller key-value pool in use behind a pass.",
              &m->kv_fill, fill_bounds);
    head(out, "kv_pages", "gauge", "Pages of the key-value pools.");
    labelled(out, "kv_pages", "pool", "full", full);
    labelled(out, "kv_pages", "pool", "sliding", sliding);
    head(out, "kv_pages_used", "gauge", "Of them not free.");
    labelled(out, "kv_pages_used", "pool", "full",
             full > full_free ? full - full_free : 0);
    labelled(out, "kv_pages_used", "pool", "sliding",
             sliding > sliding_free ? sliding - sliding_free : 0);
}

void
ns_metrics_write(const struct ns_metrics *metrics,
                 const struct ns_metrics_about *about, struct ns_buf *out)
{
    write_about(about, out);
    if (about->kafka)
        write_kafka(about->kafka, out);
    write_jobs(metrics, out);
    write_engine(metrics, out);
}
