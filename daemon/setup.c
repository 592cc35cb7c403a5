#include "daemon/setup.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/ends.h"
#include "daemon/tool.h"

enum { TOPICS_POLL_MS = 20 };

enum ns_exit
ns_exit_of(const struct ns_error *err, enum ns_exit otherwise)
{
    static const struct {
        const char *code;
        enum ns_exit status;
    } codes[] = {
        { "locked", NS_EXIT_AGAIN },
        { "unreadable_input", NS_EXIT_INPUT },
        { "edited", NS_EXIT_INPUT },
        { "not_ours", NS_EXIT_CONFIG },
        { "bad_spool", NS_EXIT_CONFIG },
        { "fenced", NS_EXIT_AGAIN },
        { "not_allowed", NS_EXIT_CONFIG },
        { "postgres_setup", NS_EXIT_CONFIG },
    };

    for (size_t i = 0; err->code && i < sizeof(codes) / sizeof(codes[0]); i++)
        if (strcmp(err->code, codes[i].code) == 0)
            return codes[i].status;
    switch (err->status) {
    case NS_OK:
        return NS_EXIT_OK;
    case NS_RETRY:
        return NS_EXIT_AGAIN;
    case NS_REJECT:
        return otherwise;
    case NS_STOP:
        return NS_EXIT_INTERRUPTED;
    case NS_FATAL:
        break;
    }
    return NS_EXIT_INTERNAL;
}

static bool
has_model(const char *directory)
{
    char path[PATH_MAX];

    if ((size_t)snprintf(path, sizeof(path), "%s/config.json", directory) >=
        sizeof(path))
        return false;
    return access(path, R_OK) == 0;
}

enum ns_status
ns_setup_model(const struct ns_options *options, char *out, size_t out_size,
               struct ns_error *err)
{
    static const char *const beside[] = {
        "models/demo", "../models/demo", "../share/nightshift/models/demo",
    };
    const char *given = options->engine.model;
    char program[PATH_MAX];
    ssize_t n;
    char *slash;

    if (!given)
        given = getenv("NIGHTSHIFT_MODEL");
    if (given && *given) {
        if (strlen(given) >= out_size)
            return ns_fail(err, NS_REJECT, "the model's path is too long");
        memcpy(out, given, strlen(given) + 1);
        if (!has_model(out))
            return ns_fail(err, NS_REJECT, "%.300s holds no config.json: it is "
                           "not a model folder", out);
        return NS_OK;
    }
    n = readlink("/proc/self/exe", program, sizeof(program) - 1);
    program[n < 0 ? 0 : n] = '\0';
    slash = strrchr(program, '/');
    if (slash)
        *slash = '\0';
    for (size_t i = 0; slash && i < sizeof(beside) / sizeof(beside[0]); i++)
        if ((size_t)snprintf(out, out_size, "%s/%s", program, beside[i]) <
                out_size && has_model(out))
            return NS_OK;
    return ns_fail(err, NS_REJECT,
                   "no model: give --model DIR, set NIGHTSHIFT_MODEL or "
                   "engine.model (no models/demo beside %.200s)", program);
}

void
ns_setup_model_name(const char *directory, char *out, size_t out_size)
{
    char *path = realpath(directory, NULL);
    const char *name = path ? path : directory, *slash = strrchr(name, '/');

    snprintf(out, out_size, "%s", slash && slash[1] ? slash + 1 : name);
    free(path);
}

struct ns_engine_options
ns_setup_engine(const struct ns_options *options, const char *model_directory)
{
    bool cuda = strcmp(options->engine.backend, "cuda") == 0;
    bool pinned = strcmp(options->cpu.isa, "auto") != 0;

    return (struct ns_engine_options){
        .model_directory = model_directory,
        .backend = { .name = options->engine.backend,
                     .n_threads = options->cpu.threads,
                     .isa = pinned ? options->cpu.isa : NULL,
                     .device = options->engine.device,
                     .arithmetic = cuda ? options->cuda.arithmetic
                                        : options->cpu.arithmetic },
        .pass_tokens = options->engine.pass_tokens,
        .max_sequences = options->engine.max_sequences,
        .kv_bytes = options->engine.kv_bytes,
        .memory_bytes = options->engine.memory_bytes,
        .reserve_tokens = options->engine.reserve_tokens,
        .age_step_s = (uint32_t)(options->engine.age_step_ms / 1000),
        .kv_plain = !options->engine.compact_kv,
        .no_prefix_sharing = !options->engine.prefix_sharing,
    };
}

struct ns_pipeline_tuning
ns_setup_tuning(const struct ns_options *options)
{
    static const enum ns_job_mode modes[] = { NS_JOB_AUTO, NS_JOB_DIFFUSION,
                                              NS_JOB_AR, NS_JOB_HYBRID };

    return (struct ns_pipeline_tuning){
        .mode = modes[options->engine.mode],
        .by_throughput = options->engine.auto_by == NS_AUTO_THROUGHPUT,
        .seed = options->engine.seed,
        .default_max_tokens = options->limits.default_max_tokens,
        .summary_chunk = options->limits.summary_chunk,
        /* Looking into a folder costs something, asking the client nothing. */
        .poll_ms = options->intake.topics ? TOPICS_POLL_MS
                                          : (int64_t)options->intake.poll_ms,
        .checkpoint_ms = (int64_t)options->daemon.checkpoint_ms,
        .retry_ms = (int64_t)options->daemon.retry_ms,
        .store_retry_ms = (int64_t)options->daemon.store_retry_ms,
        .tenant_jobs = options->limits.tenant_jobs,
        .pass_limit_ms = (int64_t)options->daemon.pass_limit_ms,
    };
}

/* The names of engine.model_names, cut apart: one block, NULL for any. */
static enum ns_status
model_names(const struct ns_options *options, char ***names, size_t *n,
            struct ns_error *err)
{
    const char *list = options->engine.model_names;
    size_t length, n_most = 1, count = 0;
    char **block, *text, *rest;

    *names = NULL;
    *n = 0;
    if (!list)
        return NS_OK;
    length = strlen(list);
    for (size_t i = 0; i < length; i++)
        n_most += list[i] == ',';
    block = malloc(n_most * sizeof(*block) + length + 1);
    if (!block)
        return ns_fail(err, NS_FATAL, "out of memory for engine.model_names");
    text = (char *)(block + n_most);
    memcpy(text, list, length + 1);
    for (char *name = strtok_r(text, ", \t", &rest); name;
         name = strtok_r(NULL, ", \t", &rest))
        block[count++] = name;
    *names = block;
    *n = count;
    return NS_OK;
}

enum ns_status
ns_setup_pictures(const struct ns_options *options,
                  const struct ns_model *model, struct ns_decoder **decoder,
                  struct ns_fetcher **fetcher,
                  struct ns_pictures_options *out, struct ns_error *err)
{
    const struct ns_fetch_options fetch = {
        .hosts = options->images.url_hosts,
        .networks = options->images.url_networks,
        .max_bytes = options->images.url_bytes,
        .time_ms = options->images.url_time_ms,
        .max_redirects = options->images.url_redirects,
        .n_lanes = options->images.url_jobs,
    };
    enum ns_status status = NS_OK;

    *out = (struct ns_pictures_options){ .config = &model->config,
                                         .roots = options->images.roots };
    if (ns_model_sees(model) && !*decoder)
        status = ns_decoder_create(options->daemon.prepare_threads, decoder,
                                   err);
    if (status == NS_OK && fetch.hosts && *decoder && !*fetcher)
        status = ns_fetcher_create(&fetch, fetcher, err);
    out->decoder = *decoder;
    out->fetcher = *fetcher;
    return status;
}

enum ns_status
ns_setup_references(const struct ns_options *options,
                    struct ns_documents **documents,
                    struct ns_references_options *out, struct ns_error *err)
{
    struct ns_documents_options table = {
        .limit_bytes = options->documents.limit_bytes,
        .cache_bytes = options->documents.cache_bytes,
    };
    enum ns_status status = NS_OK;

    *out = (struct ns_references_options){
        .roots = options->documents.roots,
        .limit_bytes = options->documents.limit_bytes,
        .wait_ms = (int64_t)options->documents.wait_ms,
    };
    if (options->postgres.conninfo && !*documents) {
        table.postgres = ns_ends_postgres(options);
        status = ns_documents_create(&table, documents, err);
    }
    out->documents = *documents;
    return status;
}

enum ns_status
ns_setup_judge(const struct ns_options *options, struct ns_judge_options *out,
               struct ns_error *err)
{
    const char *rest = options->validators.checks;
    enum ns_status status = NS_OK;

    *out = (struct ns_judge_options){
        .retries = options->validators.retries,
        .python = options->validators.python,
        .cc = options->validators.cc,
    };
    while (rest && *(rest += strspn(rest, ", \t"))) {
        size_t n = strcspn(rest, ", \t");
        enum ns_validator which;
        char name[16];

        snprintf(name, sizeof(name), "%.*s", (int)n, rest);
        if (!ns_validator_from(name, &which) || which == NS_VALIDATOR_SCHEMA)
            return ns_fail(err, NS_REJECT, "validators.checks: %.*s, not one "
                           "of control, repetition, fence, json, python, c",
                           (int)n, rest);
        out->validators |= 1u << which;
        rest += n;
    }
    if ((out->validators & 1u << NS_VALIDATOR_PYTHON) && !out->python)
        return ns_fail(err, NS_REJECT, "validators.checks: python needs "
                       "validators.python");
    if ((out->validators & 1u << NS_VALIDATOR_C) && !out->cc)
        return ns_fail(err, NS_REJECT, "validators.checks: c needs "
                       "validators.cc");
    if (out->python)
        status = ns_tool_try_python(out->python, err);
    if (status == NS_OK && out->cc)
        status = ns_tool_try_c(out->cc, err);
    if ((out->python || out->cc) && !ns_tool_fences_files())
        ns_log_warn("validators.files", "error=\"this kernel has no Landlock: "
                    "a tool may read what we may\"");
    return status;
}

enum ns_status
ns_setup_pipeline(const struct ns_options *options, struct ns_engine *engine,
                  const char *model_name, char ***names,
                  struct ns_decoder **decoder, struct ns_fetcher **fetcher,
                  struct ns_documents **documents,
                  struct ns_pipeline_options *out, struct ns_error *err)
{
    const struct ns_model *model = ns_engine_model(engine);
    enum ns_status status;
    size_t n_names;

    *out = (struct ns_pipeline_options){
        .engine = engine,
        .job = { .max_bytes = options->limits.message_bytes,
                 .canvas_length = model->config.canvas_length },
        .model_name = model_name,
        .window = options->intake.window,
        .max_claims = 2 * options->engine.max_sequences,
        .window_bytes = options->intake.window_bytes,
        .prepare_threads = options->daemon.prepare_threads,
        .tuning = ns_setup_tuning(options),
    };
    status = ns_setup_pictures(options, model, decoder, fetcher, &out->pictures,
                               err);
    if (status != NS_OK)
        return status;
    out->job.images = *decoder != NULL;
    status = ns_setup_references(options, documents, &out->references, err);
    if (status != NS_OK)
        return status;
    out->job.documents = out->references.documents || out->references.roots;
    status = ns_setup_judge(options, &out->judge, err);
    if (status != NS_OK)
        return status;
    status = model_names(options, names, &n_names, err);
    if (status != NS_OK)
        return status;
    out->job.model_names = (const char *const *)*names;
    out->job.n_model_names = n_names;
    out->report_asked_name = *names != NULL;
    return NS_OK;
}

void
ns_setup_log(const struct ns_options *options)
{
    static const enum ns_log_level levels[] = { NS_LOG_ERROR, NS_LOG_WARN,
                                                NS_LOG_INFO, NS_LOG_DEBUG };

    ns_log_set_level(levels[options->daemon.log_level]);
}
