#include "daemon/command.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/lines.h"
#include "daemon/arguments.h"
#include "daemon/history.h"
#include "daemon/parts.h"
#include "daemon/prepare.h"
#include "daemon/setup.h"
#include "engine/backlog.h"
#include "engine/measure.h"
#include "engine/outlook.h"
#include "engine/prompt.h"
#include "engine/request.h"
#include "engine/simulate.h"

static const char about[] =
    "Says how the jobs of a file would be run, how long it would take and what\n"
    "it would cost, without running any: on this machine, whose speed is\n"
    "measured for a moment first, or on a card of which the data sheet is known.\n";

enum {
    CARD_PASS_TOKENS = 8192,
    MEASURE_MS = 10000,
};

struct planned { /* what stands beside a job of the simulation */
    char *id;
    uint64_t line;
    enum ns_job_class job_class;
    enum ns_mode faster; /* the mode that would be, or the job's own */
    double gain;
    int32_t *prompt; /* of the first of a group; else NULL */
    uint32_t n_prompt, max_tokens;
};

struct plan {
    struct ns_arguments arguments;
    struct ns_options *options;
    const char *input, *history_path;
    const struct ns_cost_card *card;
    double price;
    bool fp8, list;

    char model_path[PATH_MAX];
    struct ns_engine *engine; /* NULL: a card is planned for */
    struct ns_backend *be;
    struct ns_model *described;
    struct ns_tokenizer *own_tokenizer;
    const struct ns_model *model;
    const struct ns_tokenizer *tokenizer;
    bool empty_thought;
    struct ns_decoder *decoder;
    struct ns_fetcher *fetcher;
    struct ns_pictures_options pictures;
    struct ns_documents *documents;
    struct ns_references_options references;
    struct ns_outlook *own_outlook, *outlook;
    struct ns_history history;
    double owed[NS_N_JOB_CLASSES]; /* of a canvas, see whole_canvases */

    struct ns_sim_job *jobs;
    struct planned *planned;
    size_t n, capacity;
    size_t n_lines; /* fewer than jobs where a text is summarised in parts */
    uint64_t n_bad;
};

/* ---- what runs where --------------------------------------------------- */

static enum ns_status
open_card(struct plan *plan, struct ns_error *err)
{
    const struct ns_backend_options cpu = { .name = "cpu", .n_threads = 1 };
    struct ns_outlook_options outlook = {
        .rates = plan->fp8 ? plan->card->fp8 : plan->card->bf16,
        .pass_tokens = CARD_PASS_TOKENS,
        .max_sequences = plan->options->engine.max_sequences,
        .max_steps = 48,
        .ar_capable = true,
    };
    char path[PATH_MAX + 16];
    enum ns_status status;

    ns_cost_shape_released(plan->fp8 ? 1 : 2, &outlook.shape);
    outlook.memory_bytes = ns_cost_card_pool(plan->card, &outlook.shape);
    status = ns_outlook_create(&outlook, &plan->own_outlook, err);
    if (status == NS_OK)
        status = ns_backend_open(&cpu, &plan->be, err);
    if (status == NS_OK)
        status = ns_model_describe(plan->model_path, plan->be,
                                   &plan->described, err);
    if (status != NS_OK)
        return status;
    snprintf(path, sizeof(path), "%s/tokenizer.json", plan->model_path);
    plan->outlook = plan->own_outlook;
    plan->model = plan->described;
    plan->empty_thought = ns_prompt_wants_empty_thought(plan->model_path);
    status = ns_tokenizer_open(path, &plan->own_tokenizer, err);
    plan->tokenizer = plan->own_tokenizer;
    return status;
}

static enum ns_status
open_here(struct plan *plan, struct ns_error *err)
{
    const struct ns_engine_options options =
        ns_setup_engine(plan->options, plan->model_path);
    enum ns_status status = ns_engine_open(&options, &plan->engine, err);

    if (status != NS_OK)
        return status;
    plan->model = ns_engine_model(plan->engine);
    plan->tokenizer = ns_engine_tokenizer(plan->engine);
    plan->empty_thought = ns_engine_empty_thought(plan->engine);
    plan->outlook = ns_engine_outlook(plan->engine);
    return ns_measure(plan->engine, MEASURE_MS, err);
}

static enum ns_status
set_up(struct plan *plan, struct ns_error *err)
{
    enum ns_status status =
        ns_setup_model(plan->options, plan->model_path,
                       sizeof(plan->model_path), err);

    if (status == NS_OK)
        status = plan->card ? open_card(plan, err) : open_here(plan, err);
    if (status == NS_OK)
        status = ns_setup_pictures(plan->options, plan->model, &plan->decoder,
                                   &plan->fetcher,
                                   &plan->pictures, err);
    if (status == NS_OK)
        status = ns_setup_references(plan->options, &plan->documents,
                                     &plan->references, err);
    if (status == NS_OK && plan->history_path)
        status = ns_history_read(plan->history_path,
                                 plan->model->config.canvas_length,
                                 plan->outlook, &plan->history, err);
    return status;
}

/* ---- the jobs ---------------------------------------------------------- */

static enum ns_status
make_room(struct plan *plan, struct ns_error *err)
{
    size_t capacity = plan->capacity ? 2 * plan->capacity : 256;
    struct ns_sim_job *jobs;
    struct planned *planned;

    if (plan->n < plan->capacity)
        return NS_OK;
    jobs = realloc(plan->jobs, capacity * sizeof(*jobs));
    if (jobs)
        plan->jobs = jobs;
    planned = realloc(plan->planned, capacity * sizeof(*planned));
    if (planned)
        plan->planned = planned;
    if (!jobs || !planned)
        return ns_fail(err, NS_FATAL, "out of memory for %zu jobs", capacity);
    plan->capacity = capacity;
    return NS_OK;
}

/* What a job shares with the first of its group, in whole pages. */
static void
find_shared(struct plan *plan, struct ns_sim_job *job,
            const struct ns_request *request)
{
    for (size_t i = plan->n; i-- > 0;) {
        const struct planned *first = &plan->planned[i];
        uint32_t same = 0;

        if (plan->jobs[i].group != job->group || !first->prompt)
            continue;
        while (same < request->n_prompt && same < first->n_prompt &&
               request->prompt[same] == first->prompt[same])
            same++;
        job->shared = same / NS_PAGE * NS_PAGE;
        if (plan->jobs[i].shared == 0 || job->shared < plan->jobs[i].shared)
            plan->jobs[i].shared = job->shared;
        return;
    }
}

/* A job has whole canvases, of which there are as many in all as are expected:
 * what is rounded off one job goes to the next of its class. */
static void
whole_canvases(struct plan *plan, enum ns_job_class job_class,
               const struct ns_expectation *expect, struct ns_sim_job *job)
{
    double *owed = &plan->owed[job_class];
    uint32_t n, least, most;

    *owed += expect->canvases;
    n = *owed < 1 ? 1 : (uint32_t)*owed;
    *owed -= n;
    job->kept = ceilf((float)job->answer / (float)n);
    if (job->mode != NS_MODE_DIFFUSION)
        return;
    least = (n - 1) * job->canvas_length + 1;
    most = n * job->canvas_length;
    if (job->answer < least)
        job->answer = least;
    if (job->answer > most)
        job->answer = most;
}

static enum ns_status
add_job(struct plan *plan, const struct ns_job *job, uint64_t line,
        const struct ns_request *request, struct ns_error *err)
{
    enum ns_status status = make_room(plan, err);
    uint32_t length =
        ns_outlook_options(plan->outlook)->shape.canvas_length;
    struct ns_expectation expect;
    struct ns_sim_job *out;
    struct planned *planned;

    if (status != NS_OK)
        return status;
    if (request->canvas_length)
        length = request->canvas_length;
    expect = ns_outlook_expect(plan->outlook, request->job_class,
                               request->mode, request->max_tokens, length);
    out = &plan->jobs[plan->n];
    planned = &plan->planned[plan->n];
    *out = (struct ns_sim_job){
        .deadline_s = request->deadline_ms
                          ? 1e-3 * (double)(request->deadline_ms -
                                            ns_unix_now_ms())
                          : 0,
        .priority = request->priority,
        .mode = request->mode,
        .prompt = request->n_prompt,
        .answer = (uint32_t)(expect.answer + .5),
        .canvas_length = length,
        .steps = (float)expect.steps,
        .group = plan->options->engine.prefix_sharing
                     ? ns_backlog_group(request->prompt, request->n_prompt)
                     : 0,
    };
    if (out->mode != NS_MODE_AR)
        whole_canvases(plan, request->job_class, &expect, out);
    *planned = (struct planned){
        .id = strdup(job->custom_id ? job->custom_id : ""),
        .line = line,
        .job_class = request->job_class,
        .n_prompt = request->n_prompt,
        .max_tokens = request->max_tokens,
    };
    planned->faster = ns_outlook_mode(plan->outlook, request->job_class,
                                      request->mode, request->n_prompt,
                                      request->max_tokens, length,
                                      &planned->gain);
    if (out->group != 0)
        find_shared(plan, out, request);
    if (out->group != 0 && out->shared == 0) {
        planned->prompt = malloc(request->n_prompt * sizeof(int32_t));
        if (planned->prompt)
            memcpy(planned->prompt, request->prompt,
                   request->n_prompt * sizeof(int32_t));
    }
    plan->n++;
    if (!planned->id || (out->group != 0 && out->shared == 0 &&
                         !planned->prompt))
        return ns_fail(err, NS_FATAL, "out of memory for job %zu", plan->n);
    return NS_OK;
}

static enum ns_status
check_and_add(struct plan *plan, const struct ns_job *job, uint64_t line,
              const struct ns_request *request, struct ns_error *err)
{
    enum ns_status status = ns_request_check(
        plan->model, ns_tokenizer_id(plan->tokenizer, "<channel|>") >= 0,
        request, err);

    return status == NS_OK ? add_job(plan, job, line, request, err) : status;
}

/* A text that is summarised in parts: a request a node. The parts are what they
 * will be; of the summaries that the others read the length alone is known. */
static enum ns_status
add_parts(struct plan *plan, const struct ns_job *job, uint64_t line,
          enum ns_mode mode, struct ns_parts *parts, struct ns_error *err)
{
    const struct ns_summary *tree = parts->tree;
    enum ns_status status = NS_OK;

    for (uint32_t i = 0; i < tree->n_nodes && status == NS_OK; i++) {
        uint32_t read = tree->node[i].n * (tree->node_tokens +
                                           NS_SUMMARY_LABEL);
        struct ns_ids ids;
        struct ns_request request;

        status = ns_prepare_node(job, plan->model, plan->tokenizer,
                                 plan->empty_thought, mode, parts,
                                 read ? 0 : i, &ids, &request, err);
        if (read && read < request.n_prompt)
            request.n_prompt = read;
        if (i == ns_summary_final(tree) && job->has_max_tokens)
            request.max_tokens = job->max_tokens;
        if (status == NS_OK)
            status = check_and_add(plan, job, line, &request, err);
        ns_ids_fini(&ids);
    }
    return status;
}

static enum ns_status
add_message(struct plan *plan, struct ns_job *job, uint64_t line,
            struct ns_error *err)
{
    const struct ns_pipeline_tuning tuning = ns_setup_tuning(plan->options);
    struct ns_request_image images[NS_JOB_IMAGES];
    struct ns_references references;
    struct ns_pictures pictures = { 0 };
    struct ns_parts *parts = NULL;
    struct ns_request request;
    struct ns_ids ids = { 0 };
    enum ns_status status;
    enum ns_mode mode;
    bool in_thought;

    status = ns_prepare_mode(job, plan->model, tuning.mode, &mode, err);
    if (status != NS_OK)
        return status;
    status = ns_references_load(&plan->references, job, INT64_MAX, &references,
                                err);
    if (status == NS_OK)
        status = ns_pictures_load(&plan->pictures, job, &references, NULL,
                                  &pictures, err);
    if (status == NS_OK)
        status = ns_prepare_tokens(job, plan->tokenizer, plan->empty_thought,
                                   &pictures, &ids, &in_thought, err);
    if (status == NS_OK)
        status = ns_parts_create(job, NULL, &plan->model->config,
                                 plan->tokenizer, mode, ids.n,
                                 tuning.summary_chunk, &parts, err);
    if (status == NS_OK && parts)
        status = add_parts(plan, job, line, mode, parts, err);
    if (status == NS_OK && !parts) {
        status = ns_prepare_request(job, plan->model, mode, &ids, in_thought,
                                    &pictures, images,
                                    tuning.default_max_tokens, &request, err);
        if (status == NS_OK)
            status = check_and_add(plan, job, line, &request, err);
    }
    ns_parts_destroy(parts);
    ns_ids_fini(&ids);
    ns_pictures_fini(&pictures);
    ns_references_fini(&references);
    return status;
}

static enum ns_status
add_line(struct plan *plan, const struct ns_line *line, struct ns_error *err)
{
    const struct ns_job_options options = {
        .max_bytes = plan->options->limits.message_bytes,
        .canvas_length = plan->model->config.canvas_length,
        .id_from_position = true,
        .images = plan->decoder != NULL,
        .documents = plan->references.documents || plan->references.roots,
        .now_ms = ns_unix_now_ms(),
    };
    const struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .offset = line->number },
        .origin = plan->input,
        .bytes = line->bytes,
        .length = line->length,
    };
    struct ns_job *job = NULL;
    enum ns_status status = ns_job_parse(&message, &options, &job, err);

    if (status == NS_OK)
        status = add_message(plan, job, line->number, err);
    plan->n_lines += status == NS_OK;
    if (status == NS_REJECT) { /* `validate` says what is wrong with it */
        plan->n_bad++;
        status = NS_OK;
    }
    ns_job_destroy(job);
    return status;
}

static enum ns_status
read_jobs(struct plan *plan, int fd, struct ns_error *err)
{
    const struct ns_lines_options options = {
        .max_line = plan->options->limits.message_bytes,
        .no_hash = true,
    };
    struct ns_lines *lines = NULL;
    struct ns_line line;
    enum ns_status status;
    bool end = false;

    status = ns_lines_create(fd, &options, NULL, &lines, err);
    while (status == NS_OK && !end) {
        status = ns_lines_next(lines, &line, &end, err);
        if (status == NS_OK && !end)
            status = add_line(plan, &line, err);
    }
    ns_lines_destroy(lines);
    return status;
}

/* ---- what is said ------------------------------------------------------ */

static void
print_time(const char *name, double seconds)
{
    if (seconds >= 5400)
        printf("%s%.1f h", name, seconds / 3600);
    else if (seconds >= 90)
        printf("%s%.1f min", name, seconds / 60);
    else
        printf("%s%.2f s", name, seconds);
}

static void
print_jobs(const struct plan *plan)
{
    printf("%-32s %-9s %8s %8s %8s %10s %10s\n", "job", "mode", "prompt",
           "shared", "answer", "begins s", "ends s");
    for (size_t i = 0; i < plan->n; i++) {
        const struct ns_sim_job *job = &plan->jobs[i];
        const struct planned *planned = &plan->planned[i];

        printf("%-32s %-9s %8" PRIu32 " %8" PRIu32 " %8" PRIu32
               " %10.2f %10.2f%s\n",
               planned->id, ns_request_mode_name(job->mode), job->prompt,
               job->cached, job->answer, job->start_s, job->end_s,
               job->missed ? "  misses its deadline" : "");
    }
}

static void
print_modes(const struct plan *plan)
{
    size_t by_mode[NS_MODE_HYBRID + 1] = { 0 }, n_faster = 0;
    double most = 1;

    for (size_t i = 0; i < plan->n; i++) {
        by_mode[plan->jobs[i].mode]++;
        n_faster += plan->planned[i].faster != plan->jobs[i].mode;
        if (plan->planned[i].gain > most)
            most = plan->planned[i].gain;
    }
    printf("  modes    ");
    for (int m = NS_MODE_DIFFUSION; m <= NS_MODE_HYBRID; m++)
        if (by_mode[m] > 0)
            printf(" %zu %s", by_mode[m],
                   ns_request_mode_name((enum ns_mode)m));
    if (n_faster > 0)
        printf("; for %zu another would be faster, by up to %.2f "
               "(engine.auto = throughput chooses it)", n_faster, most);
    printf("\n");
}

static void
print_plan(const struct plan *plan, const struct ns_sim_report *report)
{
    const struct ns_outlook_options *options =
        ns_outlook_options(plan->outlook);
    double seconds = report->seconds > 0 ? report->seconds : 1e-9;

    printf("%zu jobs", plan->n_lines);
    if (plan->n > plan->n_lines)
        printf(" in %zu requests", plan->n);
    if (plan->n_bad > 0)
        printf(" (%" PRIu64 " more are bad: see nightshift validate)",
               plan->n_bad);
    printf(": %" PRIu64 " prompt tokens, %" PRIu64 " of them shared; %" PRIu64
           " answer tokens expected, ",
           report->prompt_tokens, report->cached_tokens,
           report->answer_tokens);
    if (plan->history.used > 0)
        printf("as in %" PRIu64 " former results\n", plan->history.used);
    else
        printf("which is a guess: give --history\n");
    if (plan->card)
        printf("on %s, the released 26B-A4B in %s, at the efficiency that is "
               "expected of it\n", plan->card->name,
               plan->fp8 ? "FP8" : "bf16");
    else
        printf("on this machine: %s\n", ns_engine_revision(plan->engine));
    print_time("  time      ", report->seconds);
    print_time(": prompts ", report->prefill_s);
    print_time(", canvases ", report->denoise_s);
    print_time(", commits and single tokens ", report->commit_s);
    printf("\n  rate      %.0f tokens/s, %.1f jobs/h\n",
           (double)report->answer_tokens / seconds,
           3600 * report->done / seconds * (double)plan->n_lines /
               (double)(plan->n ? plan->n : 1));
    printf("  passes    %" PRIu64 " of %.0f rows and %.1f jobs on average\n",
           report->passes, report->mean_rows, report->mean_sequences);
    printf("  memory    %.1f MiB of %.1f MiB for prefixes and canvases\n",
           report->peak_bytes / (1 << 20),
           options->memory_bytes / (1 << 20));
    print_modes(plan);
    if (report->missed > 0)
        printf("  deadlines %u jobs would miss theirs\n", report->missed);
    if (report->refused > 0)
        printf("  refused   %u jobs do not fit the memory\n",
               report->refused);
    if (plan->price > 0)
        printf("  cost      %.4g, %.4g a million answer tokens\n",
               plan->price * report->seconds / 3600,
               plan->price * report->seconds / 3600 * 1e6 /
                   (double)(report->answer_tokens ? report->answer_tokens
                                                  : 1));
}

static enum ns_status
simulate(struct plan *plan, struct ns_sim_report *report,
         struct ns_error *err)
{
    const struct ns_outlook_options *options =
        ns_outlook_options(plan->outlook);
    const struct ns_sim_machine machine = {
        .shape = options->shape,
        .rates = ns_outlook_rates(plan->outlook),
        .memory_bytes = options->memory_bytes,
        .pass_tokens = options->pass_tokens,
        .age_step_ms = (uint32_t)plan->options->engine.age_step_ms,
    };
    const struct ns_sim_policy policy = {
        .name = "ours",
        .ranked = true,
        .sharing = plan->options->engine.prefix_sharing,
        .expires = true,
        .sated = true,
        .riders = NS_GROUP_RIDERS,
        .max_sequences = options->max_sequences,
    };

    return ns_simulate(&machine, &policy, plan->jobs, plan->n, report, err);
}

static int
plan_file(struct plan *plan)
{
    struct ns_sim_report report;
    struct ns_error err = { 0 };
    enum ns_status status;
    int fd;

    if (ns_arguments_load(&plan->arguments, &plan->options, &err) != NS_OK ||
        set_up(plan, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    fd = strcmp(plan->input, "-") ? open(plan->input, O_RDONLY | O_CLOEXEC)
                                  : STDIN_FILENO;
    if (fd == -1)
        return ns_command_fail(NS_EXIT_INPUT, "%s: %s", plan->input,
                               strerror(errno));
    status = read_jobs(plan, fd, &err);
    if (fd != STDIN_FILENO)
        close(fd);
    if (status == NS_OK)
        status = simulate(plan, &report, &err);
    if (status != NS_OK)
        return ns_command_fail(status == NS_FATAL ? NS_EXIT_INTERNAL
                                                  : NS_EXIT_INPUT,
                               "%s: %s", plan->input, err.text);
    if (plan->list)
        print_jobs(plan);
    print_plan(plan, &report);
    return plan->n > 0 || plan->n_bad == 0 ? NS_EXIT_OK : NS_EXIT_NONE;
}

/* ---- the command ------------------------------------------------------- */

static int
read_arguments(struct plan *plan, int argc, char **argv)
{
    const char *card = NULL, *price = NULL;
    const struct ns_argument table[] = {
        { "model", 'm', "DIR", "this model", .key = "engine.model" },
        { "card", 0, "NAME", "on this card, with the released 26B-A4B model:\n"
          "h100-80gb or h200", .text = &card },
        { "fp8", 0, NULL, "its weights in FP8", .flag = &plan->fp8 },
        { "history", 0, "FILE", "results of former runs: how long answers are "
          "and\nhow many steps they take", .text = &plan->history_path },
        { "price", 0, "AMOUNT", "of an hour of the machine", .text = &price },
        { "jobs", 'j', NULL, "also the expected begin and end of each job",
          .flag = &plan->list },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift plan", "FILE|- [options]", about, table, 1, 1, false,
    };
    int status = ns_arguments_parse(&plan->arguments, &usage, argc, argv);
    char *end;

    if (status != -1)
        return status;
    if (card)
        plan->card = ns_cost_card(card);
    if (card && !plan->card)
        return ns_command_fail(NS_EXIT_USAGE, "--card %s: known are h100-80gb "
                               "and h200", card);
    if (price) {
        plan->price = strtod(price, &end);
        if (end == price || *end || !(plan->price >= 0) || plan->price > 1e12)
            return ns_command_fail(NS_EXIT_USAGE, "--price %s: not an amount",
                                   price);
    }
    if (plan->fp8 && !plan->card)
        return ns_command_fail(NS_EXIT_USAGE, "--fp8 goes with --card");
    plan->input = argv[optind];
    return -1;
}

int
ns_command_plan(int argc, char **argv)
{
    struct plan plan = { 0 };
    int status = read_arguments(&plan, argc, argv);

    if (status == -1)
        status = plan_file(&plan);
    for (size_t i = 0; i < plan.n; i++) {
        free(plan.planned[i].id);
        free(plan.planned[i].prompt);
    }
    free(plan.planned);
    free(plan.jobs);
    ns_fetcher_destroy(plan.fetcher);
    ns_decoder_destroy(plan.decoder);
    ns_documents_destroy(plan.documents);
    ns_engine_close(plan.engine);
    ns_outlook_destroy(plan.own_outlook);
    ns_tokenizer_close(plan.own_tokenizer);
    ns_model_close(plan.described);
    ns_backend_close(plan.be);
    ns_options_destroy(plan.options);
    return status;
}
