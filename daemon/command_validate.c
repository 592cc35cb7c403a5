#include "daemon/command.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "connectors/lines.h"
#include "daemon/arguments.h"
#include "daemon/form.h"
#include "daemon/judge.h"
#include "daemon/parts.h"
#include "daemon/prepare.h"
#include "engine/prompt.h"
#include "engine/request.h"
#include "daemon/setup.h"

static const char about[] =
    "Checks each job as `run` would, without running any: one line for each\n"
    "mistake, with its code and the field, then the counts.\n"
    "\n"
    "Tokens are counted, and checked against the context, with the model that\n"
    "`run` would take; where there is none, they are not.\n";

struct seen { /* an id of an earlier line, by its hash */
    uint64_t hash, line;
};

struct validate {
    struct ns_arguments arguments;
    struct ns_options *options;
    const char *input;
    bool warnings;

    struct ns_backend *be;
    struct ns_model *described;
    struct ns_tokenizer *tokenizer;
    bool empty_thought; /* the model's dialect */
    struct ns_decoder *decoder;
    struct ns_fetcher *fetcher;
    struct ns_pictures_options pictures;
    struct ns_documents *documents;
    struct ns_references_options references;
    struct ns_judge_options judge;

    struct seen *seen; /* open addressing, a power of two */
    size_t n_seen, capacity;

    uint64_t n_jobs, n_bad, n_warnings;
    uint64_t n_tokens, most_tokens, most_line;
};

/* Line of an earlier job with the same id, 0 if there is none. Ids are told
 * apart by 64 bits: at a million jobs a false alarm is one in 40 million. */
static uint64_t
remember(struct validate *v, const char *id, uint64_t line)
{
    uint64_t hash = XXH3_64bits(id, strlen(id)) | 1; /* 0: a free place */
    size_t at;

    if (v->n_seen * 2 >= v->capacity) {
        size_t capacity = v->capacity ? v->capacity * 2 : 1024;
        struct seen *bigger = calloc(capacity, sizeof(*bigger));

        if (!bigger)
            return 0;
        for (size_t i = 0; i < v->capacity; i++) {
            if (v->seen[i].hash == 0)
                continue;
            at = v->seen[i].hash & (capacity - 1);
            while (bigger[at].hash)
                at = (at + 1) & (capacity - 1);
            bigger[at] = v->seen[i];
        }
        free(v->seen);
        v->seen = bigger;
        v->capacity = capacity;
    }
    at = hash & (v->capacity - 1);
    while (v->seen[at].hash && v->seen[at].hash != hash)
        at = (at + 1) & (v->capacity - 1);
    if (v->seen[at].hash == hash)
        return v->seen[at].line;
    v->seen[at] = (struct seen){ hash, line };
    v->n_seen++;
    return 0;
}

static void
complain(struct validate *v, uint64_t line, const struct ns_job *job,
         const struct ns_error *err)
{
    /* Most sentences begin with the field already. */
    bool named = err->param[0] == '\0' ||
                 strncmp(err->text, err->param, strcspn(err->param, ".")) ==
                     0;

    v->n_bad++;
    printf("%s:%" PRIu64 ": %s: %s%s%s%s%s%s\n", v->input, line,
           err->code ? err->code : "invalid", named ? "" : err->param,
           named ? "" : ": ", err->text,
           job && job->custom_id ? " (" : "",
           job && job->custom_id ? job->custom_id : "",
           job && job->custom_id ? ")" : "");
}

/* What an accepted job still has to pass where the model is known. */
static enum ns_status
check_with_model(struct validate *v, struct ns_job *job, uint64_t line,
                 struct ns_error *err)
{
    const struct ns_pipeline_tuning tuning = ns_setup_tuning(v->options);
    const struct ns_model *model = v->described;
    struct ns_request_image images[NS_JOB_IMAGES];
    struct ns_references references;
    struct ns_pictures pictures = { 0 };
    struct ns_request request;
    struct ns_ids ids = { 0 }, draft = { 0 };
    struct ns_grammar *grammar = NULL;
    enum ns_status status;
    enum ns_mode mode;
    struct ns_parts *parts = NULL;
    struct ns_ids node = { 0 };
    bool in_thought;

    if (!model)
        return NS_OK;
    status = ns_prepare_mode(job, model, tuning.mode, &mode, err);
    if (status != NS_OK)
        return status;
    status = ns_references_load(&v->references, job, INT64_MAX, &references,
                                err);
    if (status == NS_OK)
        status = ns_pictures_load(&v->pictures, job, &references, NULL,
                                  &pictures, err);
    if (status == NS_OK)
        status = ns_prepare_tokens(job, v->tokenizer, v->empty_thought,
                                   &pictures, &ids, &in_thought, err);
    if (status == NS_OK) {
        v->n_tokens += ids.n;
        if (ids.n > v->most_tokens) {
            v->most_tokens = ids.n;
            v->most_line = line;
        }
        status = ns_parts_create(job, NULL, &model->config, v->tokenizer, mode,
                                 ids.n, tuning.summary_chunk, &parts, err);
    }
    if (status == NS_OK && parts) /* all are as the first */
        status = ns_prepare_node(job, model, v->tokenizer, v->empty_thought,
                                 mode, parts, 0, &node, &request, err);
    else if (status == NS_OK)
        status = ns_prepare_request(job, model, mode, &ids, in_thought,
                                    &pictures, images,
                                    tuning.default_max_tokens, &request, err);
    if (status == NS_OK)
        status = ns_prepare_draft(job, v->tokenizer, &draft, err);
    if (status == NS_OK)
        status = ns_form_grammar(job, &grammar, err);
    if (status == NS_OK)
        status = ns_judge_check(&v->judge, job, err);
    request.draft = draft.id;
    request.n_draft = (uint32_t)draft.n;
    if (status == NS_OK)
        status = ns_request_check(
            model, ns_tokenizer_id(v->tokenizer, "<channel|>") >= 0, &request,
            err);
    ns_grammar_destroy(grammar);
    ns_parts_destroy(parts);
    ns_ids_fini(&node);
    ns_ids_fini(&ids);
    ns_ids_fini(&draft);
    ns_pictures_fini(&pictures);
    ns_references_fini(&references);
    return status;
}

static enum ns_status
check_line(struct validate *v, const struct ns_line *line,
           struct ns_error *err)
{
    struct ns_job_options options = {
        .max_bytes = v->options->limits.message_bytes,
        .canvas_length =
            v->described ? v->described->config.canvas_length : 0,
        .id_from_position = true,
        .images = !v->described || v->decoder,
        .documents = !v->described || v->references.documents ||
                     v->references.roots,
        .now_ms = ns_unix_now_ms(),
    };
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .offset = line->number },
        .origin = v->input,
        .bytes = line->bytes,
        .length = line->length,
    };
    char id[NS_JOB_ID_BYTES + 1];
    struct ns_job *job = NULL;
    enum ns_status status;
    uint64_t earlier = 0;

    memcpy(message.sha256, line->sha256, sizeof(message.sha256));
    v->n_jobs++;
    /* As `run` does it: the first line of an id has it, refused or not. */
    if (line->bytes && ns_job_peek_id(line->bytes, (size_t)line->length, id))
        earlier = remember(v, id, line->number);
    status = ns_job_parse(&message, &options, &job, err);
    if (status == NS_OK && earlier)
        status = ns_refuse(err, "duplicate_id", "custom_id",
                           "line %" PRIu64 " has this id already", earlier);
    if (status == NS_OK && job->has_deadline &&
        job->deadline_ms <= options.now_ms)
        status = ns_refuse(err, "expired", "nightshift.deadline",
                           "the deadline has passed");
    if (status == NS_OK)
        status = check_with_model(v, job, line->number, err);
    if (status == NS_REJECT)
        complain(v, line->number, job, err);
    for (size_t i = 0; job && i < job->n_warnings; i++) {
        v->n_warnings++;
        if (v->warnings)
            printf("%s:%" PRIu64 ": warning: %s\n", v->input, line->number,
                   job->warnings[i]);
    }
    ns_job_destroy(job);
    return status == NS_REJECT ? NS_OK : status;
}

static enum ns_status
check_lines(struct validate *v, int fd, struct ns_error *err)
{
    const struct ns_lines_options options = {
        .max_line = v->options->limits.message_bytes,
    };
    struct ns_lines *lines;
    struct ns_line line;
    enum ns_status status;
    bool end = false;

    status = ns_lines_create(fd, &options, NULL, &lines, err);
    if (status != NS_OK)
        return status;
    do {
        status = ns_lines_next(lines, &line, &end, err);
        if (status == NS_OK && !end)
            status = check_line(v, &line, err);
    } while (status == NS_OK && !end);
    ns_lines_destroy(lines);
    return status;
}

static enum ns_status
open_model(struct validate *v, struct ns_error *err)
{
    const struct ns_backend_options cpu = { .name = "cpu", .n_threads = 1 };
    char directory[PATH_MAX], path[PATH_MAX + 16];
    enum ns_status status;

    status = ns_setup_model(v->options, directory, sizeof(directory), err);
    if (status == NS_REJECT && !v->options->engine.model &&
        !getenv("NIGHTSHIFT_MODEL"))
        return NS_OK; /* none was asked for, and none is at hand */
    if (status == NS_OK)
        status = ns_backend_open(&cpu, &v->be, err);
    if (status == NS_OK)
        status = ns_model_describe(directory, v->be, &v->described, err);
    if (status == NS_OK) {
        snprintf(path, sizeof(path), "%s/tokenizer.json", directory);
        v->empty_thought = ns_prompt_wants_empty_thought(directory);
        status = ns_tokenizer_open(path, &v->tokenizer, err);
    }
    if (status == NS_OK)
        status = ns_setup_pictures(v->options, v->described, &v->decoder,
                                   &v->fetcher,
                                   &v->pictures, err);
    if (status == NS_OK)
        status = ns_setup_references(v->options, &v->documents,
                                     &v->references, err);
    if (status == NS_OK)
        status = ns_setup_judge(v->options, &v->judge, err);
    return status;
}

static int
read_arguments(struct validate *v, int argc, char **argv)
{
    const struct ns_argument table[] = {
        { "model", 'm', "DIR", "this model", .key = "engine.model" },
        { "warnings", 'w', NULL, "show warnings as well",
          .flag = &v->warnings },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift validate", "FILE|- [options]", about, table, 1, 1, false,
    };
    int status = ns_arguments_parse(&v->arguments, &usage, argc, argv);

    if (status == -1)
        v->input = argv[optind];
    return status;
}

static int
validate(struct validate *v)
{
    struct ns_error err = { 0 };
    enum ns_status status;
    int fd;

    if (ns_arguments_load(&v->arguments, &v->options, &err) != NS_OK ||
        open_model(v, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    fd = strcmp(v->input, "-") ? open(v->input, O_RDONLY | O_CLOEXEC)
                               : STDIN_FILENO;
    if (fd == -1)
        return ns_command_fail(NS_EXIT_INPUT, "%s: %s", v->input,
                               strerror(errno));
    status = check_lines(v, fd, &err);
    if (fd != STDIN_FILENO)
        close(fd);
    if (status != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_INPUT), "%s: %s", v->input, err.text);
    printf("%" PRIu64 " jobs, %" PRIu64 " bad, %" PRIu64 " warnings",
           v->n_jobs, v->n_bad, v->n_warnings);
    if (v->tokenizer)
        printf(", %" PRIu64 " prompt tokens, the longest %" PRIu64
               " (line %" PRIu64 ")\n", v->n_tokens, v->most_tokens,
               v->most_line);
    else
        printf("; no model, so no tokens were counted\n");
    if (v->n_bad == 0)
        return NS_EXIT_OK;
    return v->n_bad < v->n_jobs ? NS_EXIT_SOME : NS_EXIT_NONE;
}

int
ns_command_validate(int argc, char **argv)
{
    struct validate v = { 0 };
    int status = read_arguments(&v, argc, argv);

    if (status == -1)
        status = validate(&v);
    free(v.seen);
    ns_tokenizer_close(v.tokenizer);
    ns_fetcher_destroy(v.fetcher);
    ns_decoder_destroy(v.decoder);
    ns_documents_destroy(v.documents);
    ns_model_close(v.described);
    ns_backend_close(v.be);
    ns_options_destroy(v.options);
    return status;
}
