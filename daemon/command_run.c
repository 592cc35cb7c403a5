#include "daemon/command.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "connectors/lines.h"
#include "connectors/spool.h"
#include "daemon/arguments.h"
#include "daemon/progress.h"
#include "daemon/setup.h"
#include "daemon/signals.h"

static const char about[] =
    "Runs the jobs of an OpenAI Batch file and writes a line for each. Running\n"
    "again with the same OUT carries on where the last run stopped.\n";

struct run {
    struct ns_arguments arguments;
    const char *input, *output;
    bool restart, retry_failed, quiet, progress;

    struct ns_options *options;
    struct ns_engine *engine;
    struct ns_spool *spool;
    struct ns_pipeline *pipeline;
    struct ns_decoder *decoder;
    struct ns_documents *documents;
    struct ns_fetcher *fetcher;
    char **model_names;
    char model[PATH_MAX], model_name[256];
};

/* -1 to go on, else the status to leave with. */
static int
read_arguments(struct run *run, int argc, char **argv)
{
    const struct ns_argument table[] = {
        { "output", 'o', "OUT", "results (default: standard output, which "
          "cannot\nbe carried on)", .text = &run->output },
        { "model", 'm', "DIR", "checkpoint folder", .key = "engine.model" },
        { "mode", 0, "MODE", "of jobs that name none: auto, diffusion, ar, "
          "hybrid", .key = "engine.mode" },
        { "seed", 0, "N", "with the job id, the seed of jobs that name none",
          .key = "engine.seed" },
        { "restart", 0, NULL, "put an existing OUT aside and begin anew",
          .flag = &run->restart },
        { "retry-failed", 0, NULL, "run lines again whose result is an error",
          .flag = &run->retry_failed },
        { "threads", 0, "N", "of a pass; no result depends on it",
          .key = "cpu.threads" },
        { "quiet", 'q', NULL, "no progress, no summary", .flag = &run->quiet },
        { "progress", 0, NULL, "both, also where standard error is no "
          "terminal", .flag = &run->progress },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift run", "FILE|- [options]", about, table, 1, 1, false,
    };
    int status = ns_arguments_parse(&run->arguments, &usage, argc, argv);

    if (status != -1)
        return status;
    run->input = argv[optind];
    if (!run->output)
        run->output = "-";
    return -1;
}

/* Jobs of a file, for the progress line; 0 when that cannot be known. */
static uint64_t
count_jobs(const char *path)
{
    const struct ns_lines_options options = { .no_hash = true };
    struct ns_lines *lines;
    struct ns_line line;
    struct ns_error err;
    uint64_t n = 0;
    bool end = false;
    int fd;

    if (strcmp(path, "-") == 0)
        return 0;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return 0;
    if (ns_lines_create(fd, &options, NULL, &lines, &err) == NS_OK) {
        while (ns_lines_next(lines, &line, &end, &err) == NS_OK && !end)
            n++;
        ns_lines_destroy(lines);
    }
    close(fd);
    return n;
}

static enum ns_status
open_parts(struct run *run, struct ns_error *err)
{
    struct ns_engine_options engine_options;
    struct ns_spool_options spool = {
        .input = run->input,
        .output = run->output,
        .restart = run->restart,
        .retry_failed = run->retry_failed,
        .max_line = run->options->limits.message_bytes,
        .window = run->options->intake.window,
    };
    enum ns_status status;

    /* What is cheap to find wrong is looked at before the model is read. */
    if (strcmp(run->input, "-") != 0 && access(run->input, R_OK) == -1) {
        ns_fail_errno(err, NS_REJECT, "%s", run->input);
        err->code = "unreadable_input";
        return NS_REJECT;
    }
    status = ns_setup_model(run->options, run->model, sizeof(run->model), err);
    if (status != NS_OK)
        return status;
    ns_setup_model_name(run->model, run->model_name, sizeof(run->model_name));
    engine_options = ns_setup_engine(run->options, run->model);
    status = ns_engine_open(&engine_options, &run->engine, err);
    if (status != NS_OK)
        return status;
    spool.model_rev = ns_engine_model(run->engine)->revision;
    spool.engine_rev = ns_engine_revision(run->engine);
    return ns_spool_open(&spool, &run->spool, err);
}

static enum ns_status
start(struct run *run, struct ns_error *err)
{
    struct ns_pipeline_options pipeline;
    enum ns_status status =
        ns_setup_pipeline(run->options, run->engine, run->model_name,
                          &run->model_names, &run->decoder, &run->fetcher,
                          &run->documents, &pipeline, err);

    if (status != NS_OK)
        return status;
    pipeline.source = ns_spool_source(run->spool);
    pipeline.store = ns_spool_store(run->spool);
    pipeline.job.id_from_position = true;
    if (!run->model_names) /* any name will do, with a word about it */
        pipeline.job.model_warning = run->model_name;
    return ns_pipeline_create(&pipeline, &run->pipeline, err);
}

/* Whether a line that rewrites itself has a place: a terminal that results do
 * not go to. */
static bool
wants_live(const struct run *run)
{
    if (run->quiet || !isatty(STDERR_FILENO))
        return false;
    return strcmp(run->output, "-") != 0 || !isatty(STDOUT_FILENO);
}

/* Turns until everything is done, or a stop is through. True if stopped. */
static bool
loop(struct run *run, struct ns_progress *progress)
{
    struct ns_pipeline_counts counts;
    bool stopped = false;
    int wait_ms;

    while (ns_pipeline_turn(run->pipeline, &wait_ms)) {
        ns_signals_wait(ns_pipeline_descriptor(run->pipeline),
                        progress->live && wait_ms > 250 ? 250 : wait_ms);
        if (ns_signals_take() & NS_SIGNAL_STOP && !stopped) {
            stopped = true;
            ns_progress_clear(progress);
            if (!run->quiet)
                fprintf(stderr, "stopping after this pass%s; again to stop "
                        "at once\n",
                        strcmp(run->output, "-") ? ", the same command "
                                                   "carries on" : "");
            ns_pipeline_stop(run->pipeline, 0);
        }
        if (progress->live && !stopped) {
            counts = ns_pipeline_counts(run->pipeline);
            ns_progress_show(progress, &counts);
        }
    }
    ns_progress_clear(progress);
    return stopped;
}

/* Of the whole of OUT, what former runs wrote included: a file whose every
 * job failed is no success the second time either. */
static int
exit_status(const struct ns_pipeline_counts *counts,
            const struct ns_spool_progress *before)
{
    uint64_t ok = counts->ok + before->lines_done_before -
                  before->failed_before;

    if (counts->failed + before->failed_before == 0)
        return NS_EXIT_OK;
    return ok ? NS_EXIT_SOME : NS_EXIT_NONE;
}

static int
run_jobs(struct run *run)
{
    struct ns_pipeline_counts counts;
    struct ns_progress progress;
    struct ns_error err = { 0 };
    struct ns_spool_progress before;
    uint64_t total;
    bool stopped;
    int status;

    if (ns_arguments_load(&run->arguments, &run->options, &err) != NS_OK)
        return ns_command_fail(NS_EXIT_CONFIG, "%s", err.text);
    if (run->arguments.config)
        ns_setup_log(run->options);
    else
        ns_log_set_level(NS_LOG_WARN); /* a person sits here, not a journal */
    if (open_parts(run, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    before = ns_spool_progress(run->spool);
    total = wants_live(run) ? count_jobs(run->input) : 0;
    total = total > before.lines_done_before
                ? total - before.lines_done_before
                : 0;
    if (ns_signals_ready(NS_EXIT_INTERRUPTED, &err) != NS_OK ||
        start(run, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    ns_progress_init(&progress, stderr, wants_live(run), total,
                     before.lines_done_before);
    stopped = loop(run, &progress);
    counts = ns_pipeline_counts(run->pipeline);
    status = stopped ? NS_EXIT_INTERRUPTED : exit_status(&counts, &before);
    if (ns_pipeline_failure(run->pipeline, &err) != NS_OK) {
        bool edited = err.code && strcmp(err.code, "edited") == 0;

        bool input = err.status == NS_REJECT;

        status = ns_command_fail(ns_exit_of(&err, NS_EXIT_INPUT), "%s%s%s%s",
                                 input ? run->input : "", input ? ": " : "",
                                 err.text, edited ? " with --restart"
                                                  : "");
    }
    if (!run->quiet && (isatty(STDERR_FILENO) || run->progress))
        ns_progress_summary(&progress, &counts);
    return status;
}

int
ns_command_run(int argc, char **argv)
{
    struct run run = { 0 };
    int status = read_arguments(&run, argc, argv);

    if (status == -1)
        status = run_jobs(&run);
    ns_pipeline_destroy(run.pipeline);
    ns_spool_close(run.spool);
    ns_engine_close(run.engine);
    ns_fetcher_destroy(run.fetcher);
    ns_decoder_destroy(run.decoder);
    ns_documents_destroy(run.documents);
    free(run.model_names);
    ns_options_destroy(run.options);
    return status;
}
