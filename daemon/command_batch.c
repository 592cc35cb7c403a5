/* nightshift status, watch, results, cancel, pause, resume: what operators ask
 * of the database, or, of jobs that come from files to files, of the spool.
 */
#include "daemon/command.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/operator.h"
#include "connectors/spool_look.h"
#include "daemon/arguments.h"
#include "daemon/ends.h"
#include "daemon/setup.h"
#include "daemon/work.h"

enum {
    SHOWN = 50, /* batches, unless one is asked for */
    LOOK_MS = 500,
};

struct query {
    struct ns_arguments arguments;
    struct ns_options *options;
    struct ns_operator *op; /* NULL: the spool is asked */
    const char *spool;

    const char *output, *errors, *timeout, *tenant;
    bool job, batch; /* cancel: what the names are */
};

#define SPOOL_OPTION \
    { "spool", 0, "DIR", "ask this spool instead of a database", \
      .key = "intake.spool" }
#define CONNINFO_OPTION \
    { "conninfo", 0, "TEXT", "the database; default: postgres.conninfo", \
      .key = "postgres.conninfo" }

/* The database where one is given, else the spool. */
static enum ns_status
open_query(struct query *query, struct ns_error *err)
{
    struct ns_postgres_options postgres;
    enum ns_status status;

    status = ns_arguments_load(&query->arguments, &query->options, err);
    if (status != NS_OK)
        return status;
    ns_setup_log(query->options);
    query->spool = query->options->intake.spool;
    if (!query->options->postgres.conninfo && query->spool)
        return NS_OK;
    if (!query->options->postgres.conninfo)
        return ns_fail(err, NS_REJECT, "nowhere to ask: give --conninfo or "
                       "postgres.conninfo, or of a spool without a database "
                       "--spool or intake.spool");
    postgres = ns_ends_postgres(query->options);
    return ns_operator_create(&postgres, &query->op, err);
}

static void
close_query(struct query *query)
{
    ns_operator_destroy(query->op);
    ns_options_destroy(query->options);
}

static int
fail(const struct ns_error *err)
{
    bool unknown = err->code && strcmp(err->code, "unknown") == 0;

    return ns_command_fail(unknown ? NS_EXIT_INPUT
                                   : ns_exit_of(err, NS_EXIT_CONFIG),
                           "%s", err->text);
}

static enum ns_status
no_such(const char *name, struct ns_error *err)
{
    return ns_refuse(err, "unknown", NULL, "there is no batch %s", name);
}

/* --- status -------------------------------------------------------------- */

struct listing {
    uint64_t n;
};

static enum ns_status
list_batch(void *context, const struct ns_batch_status *row,
           struct ns_error *err)
{
    struct listing *listing = context;
    char expected[24] = "?";

    (void)err;
    if (listing->n++ == 0)
        printf("%-40s %9s %9s %9s %8s %8s %12s  %-11s %s\n", "BATCH",
               "EXPECTED", "OK", "FAILED", "RUNNING", "WAITING", "TOKENS",
               "OUTCOME", "LAST");
    if (row->expected >= 0)
        snprintf(expected, sizeof(expected), "%" PRId64, row->expected);
    printf("%-40s %9s %9" PRId64 " %9" PRId64 " %8" PRId64 " %8" PRId64
           " %12" PRId64 "  %-11s %s\n", row->batch, expected, row->ok,
           row->failed, row->running, row->waiting, row->tokens,
           row->cancelled && !row->done ? "cancelling" : row->outcome,
           row->last_at);
    return NS_OK;
}

static const char *
state_name(enum ns_spool_state state)
{
    static const char *const names[] = { "waiting", "running", "done", "dead" };

    return names[state];
}

static enum ns_status
list_file(void *context, const struct ns_spool_entry *entry,
          struct ns_error *err)
{
    struct listing *listing = context;

    (void)err;
    if (listing->n++ == 0)
        printf("%-40s %-8s %9s %9s\n", "FILE", "STATE", "OK", "FAILED");
    printf("%-40s %-8s %9" PRIu64 " %9" PRIu64 "\n", entry->name,
           state_name(entry->state), entry->ok, entry->failed);
    return NS_OK;
}

static enum ns_status
show_status(struct query *query, const char *name, struct ns_error *err)
{
    struct listing listing = { 0 };
    enum ns_status status;

    if (query->op)
        status = ns_operator_batches(query->op, name, SHOWN, list_batch,
                                     &listing, err);
    else
        status = ns_spool_look(query->spool, name, list_file, &listing, err);
    if (status == NS_OK && listing.n == 0 && name)
        return no_such(name, err);
    if (status == NS_OK && listing.n == 0)
        printf("no batches\n");
    return status;
}

int
ns_command_status(int argc, char **argv)
{
    static const char about[] =
        "Says how batches stand, the latest first; of a spool, its files.\n";
    struct query query = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = { CONNINFO_OPTION, SPOOL_OPTION, { 0 } };
    const struct ns_synopsis usage = {
        "nightshift status", "[BATCH] [options]", about, table, 0, 1, false,
    };
    int status = ns_arguments_parse(&query.arguments, &usage, argc, argv);
    struct ns_error err = { 0 };

    if (status != -1)
        return status;
    status = NS_EXIT_OK;
    if (open_query(&query, &err) != NS_OK ||
        show_status(&query, optind < argc ? argv[optind] : NULL, &err) !=
            NS_OK)
        status = fail(&err);
    close_query(&query);
    return status;
}

/* --- watch --------------------------------------------------------------- */

struct watch {
    bool found, done;
    int64_t expected; /* -1: not known */
    int64_t ok, failed, shown;
};

static enum ns_status
watch_batch(void *context, const struct ns_batch_status *row,
            struct ns_error *err)
{
    struct watch *watch = context;

    (void)err;
    watch->found = true;
    watch->done = row->done;
    watch->expected = row->expected;
    watch->ok = row->ok;
    watch->failed = row->failed;
    return NS_OK;
}

static enum ns_status
watch_file(void *context, const struct ns_spool_entry *entry,
           struct ns_error *err)
{
    struct watch *watch = context;

    (void)err;
    watch->found = true;
    watch->done = entry->state == NS_SPOOL_DONE ||
                  entry->state == NS_SPOOL_DEAD;
    watch->expected = -1;
    watch->ok = (int64_t)entry->ok;
    watch->failed = (int64_t)entry->failed +
                    (entry->state == NS_SPOOL_DEAD && entry->failed == 0);
    return NS_OK;
}

static enum ns_status
look(struct query *query, const char *name, struct watch *watch,
     struct ns_error *err)
{
    if (query->op)
        return ns_operator_batches(query->op, name, 1, watch_batch, watch, err);
    return ns_spool_look(query->spool, name, watch_file, watch, err);
}

static void
show_progress(struct watch *watch, const char *name)
{
    int64_t n = watch->ok + watch->failed;

    if (n == watch->shown)
        return;
    watch->shown = n;
    fprintf(stderr, "%s: %" PRId64, name, n);
    if (watch->expected >= 0)
        fprintf(stderr, " of %" PRId64, watch->expected);
    fprintf(stderr, ", %" PRId64 " failed\n", watch->failed);
}

static int
exit_of(int64_t ok, int64_t failed)
{
    return failed == 0 ? NS_EXIT_OK : ok > 0 ? NS_EXIT_SOME : NS_EXIT_NONE;
}

/* A server that goes away is waited for, as everywhere; one that is away at
 * the first look is said to be. */
static int
watch_it(struct query *query, const char *name, int64_t until,
         struct ns_error *err)
{
    struct watch watch = { .shown = -1 };
    enum ns_status status;
    bool asked = false;

    for (;;) {
        status = look(query, name, &watch, err);
        if (status != NS_OK && (status != NS_RETRY || !asked))
            return fail(err);
        if (status == NS_OK && !watch.found) {
            no_such(name, err);
            return fail(err);
        }
        asked = true;
        if (status == NS_OK)
            show_progress(&watch, name);
        if (watch.done)
            break;
        if (ns_now_ms() >= until)
            return ns_command_fail(NS_EXIT_AGAIN, "%s has not ended; %" PRId64
                                   " of its jobs have", name,
                                   watch.ok + watch.failed);
        usleep(LOOK_MS * 1000);
    }
    printf("%s: %s, %" PRId64 " ok, %" PRId64 " failed\n", name,
           watch.failed == 0 ? "ok"
           : watch.ok > 0    ? "some failed"
                             : "all failed",
           watch.ok, watch.failed);
    return exit_of(watch.ok, watch.failed);
}

int
ns_command_watch(int argc, char **argv)
{
    static const char about[] =
        "Waits until a batch has ended: 0 all of it is ok, 1 some failed, 2 all\n"
        "failed, 75 it has not ended within --timeout.\n";
    struct query query = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "timeout", 0, "SECONDS", "default: wait as long as it takes",
          .text = &query.timeout },
        CONNINFO_OPTION,
        SPOOL_OPTION,
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift watch", "BATCH [options]", about, table, 1, 1, false,
    };
    int status = ns_arguments_parse(&query.arguments, &usage, argc, argv);
    int64_t until = INT64_MAX;
    struct ns_error err = { 0 };
    char *end;

    if (status != -1)
        return status;
    if (query.timeout) {
        unsigned long seconds = strtoul(query.timeout, &end, 10);

        if (end == query.timeout || *end || seconds > 100000000)
            return ns_arguments_misused(&usage, "--timeout is in seconds");
        until = ns_now_ms() + (int64_t)seconds * 1000;
    }
    if (open_query(&query, &err) != NS_OK)
        status = fail(&err);
    else
        status = watch_it(&query, argv[optind], until, &err);
    close_query(&query);
    return status;
}

/* --- results ------------------------------------------------------------- */

struct output {
    const char *path; /* NULL: it is not asked for */
    char part[PATH_MAX]; /* "PATH.part", which becomes PATH when all is there */
    FILE *file;
};

struct files {
    struct output out, errors;
    uint64_t n_ok, n_failed;
};

static enum ns_status
write_line(struct files *files, const char *line, size_t length, bool ok,
           struct ns_error *err)
{
    FILE *file = !ok && files->errors.file ? files->errors.file
                 : files->out.file         ? files->out.file
                                           : stdout;

    if (ok)
        files->n_ok++;
    else
        files->n_failed++;
    if (fwrite(line, 1, length, file) != length || fputc('\n', file) == EOF)
        return ns_fail_errno(err, NS_RETRY, "write results");
    return NS_OK;
}

static enum ns_status
write_row(void *context, const struct ns_batch_result *result,
          struct ns_error *err)
{
    return write_line(context, result->line, result->length, result->ok, err);
}

static enum ns_status
write_spooled(void *context, const char *line, size_t length, bool ok,
              struct ns_error *err)
{
    return write_line(context, line, length, ok, err);
}

static enum ns_status
open_output(struct output *output, struct ns_error *err)
{
    if (!output->path)
        return NS_OK;
    if ((size_t)snprintf(output->part, sizeof(output->part), "%s.part",
                         output->path) >= sizeof(output->part))
        return ns_fail(err, NS_REJECT, "%.200s: the path is too long",
                       output->path);
    output->file = fopen(output->part, "we");
    return output->file ? NS_OK
                        : ns_fail_errno(err, NS_REJECT, "%s", output->part);
}

/* `status`: of all that was to be written; only then the file comes to be. */
static enum ns_status
close_output(struct output *output, enum ns_status status,
             struct ns_error *err)
{
    FILE *file = output->file;
    bool good;

    if (!file)
        return status;
    output->file = NULL;
    good = fflush(file) == 0 && fsync(fileno(file)) == 0;
    good = fclose(file) == 0 && good;
    if (status == NS_OK && (!good || rename(output->part, output->path) == -1))
        status = ns_fail_errno(err, NS_RETRY, "%s", output->path);
    if (status != NS_OK)
        unlink(output->part);
    return status;
}

static int
judge(struct query *query, const char *name, const struct files *files,
      uint64_t n_letters, struct ns_error *err)
{
    struct watch watch = { 0 };
    enum ns_status status = look(query, name, &watch, err);

    if (status != NS_OK)
        return fail(err);
    fprintf(stderr, "%s: %" PRIu64 " ok, %" PRIu64 " failed\n", name,
            files->n_ok, files->n_failed);
    if (n_letters > 0)
        fprintf(stderr, "%" PRIu64 " messages of it had no usable id: "
                "nightshift dlq list --batch %s\n", n_letters, name);
    if (!watch.done && watch.expected >= 0)
        return ns_command_fail(NS_EXIT_AGAIN, "it has not ended: %" PRId64
                               " of %" PRId64, watch.ok + watch.failed,
                               watch.expected);
    if (!watch.done)
        return ns_command_fail(NS_EXIT_AGAIN, "whether it has ended is not "
                               "known");
    return exit_of((int64_t)files->n_ok,
                   (int64_t)(files->n_failed + n_letters));
}

static int
write_results(struct query *query, const char *name, struct ns_error *err)
{
    struct files files = { .out.path = query->output,
                           .errors.path = query->errors };
    uint64_t n_letters = 0;
    bool is_batch = true, is_job;
    enum ns_status status = NS_OK;

    if (query->op)
        status = ns_operator_find(query->op, name, &is_batch, &is_job, err);
    if (status == NS_OK && !is_batch)
        status = no_such(name, err);
    if (status == NS_OK)
        status = open_output(&files.out, err);
    if (status == NS_OK)
        status = open_output(&files.errors, err);
    if (status == NS_OK && query->op)
        status = ns_operator_results(query->op, name, write_row, &files,
                                     &n_letters, err);
    else if (status == NS_OK)
        status = ns_spool_results(query->spool, name, write_spooled, &files,
                                  err);
    status = close_output(&files.out, status, err);
    status = close_output(&files.errors, status, err);
    return status == NS_OK ? judge(query, name, &files, n_letters, err)
                           : fail(err);
}

int
ns_command_results(int argc, char **argv)
{
    static const char about[] =
        "Writes the results of a batch as OpenAI output lines, as far as there\n"
        "are any: 0 all of it is ok, 1 some failed, 2 all failed, 75 it has not\n"
        "ended. Of a spool the batch is a file's name.\n";
    struct query query = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "output", 'o', "FILE", "default: standard output",
          .text = &query.output },
        { "errors", 'e', "FILE", "lines of jobs that failed; default: with the "
          "others", .text = &query.errors },
        CONNINFO_OPTION,
        SPOOL_OPTION,
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift results", "BATCH [options]", about, table, 1, 1, false,
    };
    int status = ns_arguments_parse(&query.arguments, &usage, argc, argv);
    struct ns_error err = { 0 };

    if (status != -1)
        return status;
    if (open_query(&query, &err) != NS_OK)
        status = fail(&err);
    else
        status = write_results(&query, argv[optind], &err);
    close_query(&query);
    return status;
}

/* --- cancel -------------------------------------------------------------- */

static enum ns_status
cancel(struct query *query, const char *name, struct ns_error *err)
{
    bool is_batch = query->batch, is_job = query->job;
    enum ns_status status = NS_OK;
    char state[16];
    uint64_t n;

    if (!is_batch && !is_job)
        status = ns_operator_find(query->op, name, &is_batch, &is_job, err);
    if (status == NS_OK && is_batch && is_job)
        return ns_refuse(err, "unknown", NULL, "%s is a batch and a job: say "
                         "which, by --batch or --job", name);
    if (status == NS_OK && !is_batch && !is_job)
        return ns_refuse(err, "unknown", NULL, "there is no batch and no job "
                         "%s; one that is still to come can be cancelled by "
                         "--job or --batch", name);
    if (status == NS_OK && is_batch) {
        status = ns_operator_cancel_batch(query->op, name, &n, err);
        if (status == NS_OK)
            printf("%s: cancelling, %" PRIu64 " begun jobs among it\n", name,
                   n);
    } else if (status == NS_OK) {
        status = ns_operator_cancel_job(query->op, name, state, err);
        if (status == NS_OK)
            printf("%s: %s\n", name, state);
    }
    return status;
}

/* The commands that only a database can be asked. */
static enum ns_status
open_database(struct query *query, struct ns_error *err)
{
    enum ns_status status = open_query(query, err);

    if (status == NS_OK && !query->op)
        status = ns_fail(err, NS_REJECT, "jobs of this spool are answered in "
                         "files, and this needs a database: a file that waits "
                         "can be taken out of in/");
    return status;
}

int
ns_command_cancel(int argc, char **argv)
{
    static const char about[] =
        "Asks for the end of jobs, or of all of a batch, those to come too. What\n"
        "runs stops at its next block; what has ended stays as it is.\n";
    struct query query = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "job", 0, NULL, "each name is a job, seen or not: BATCH/CUSTOM_ID",
          .flag = &query.job },
        { "batch", 0, NULL, "each name is a batch, seen or not",
          .flag = &query.batch },
        CONNINFO_OPTION,
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift cancel", "BATCH|JOB... [options]", about, table, 1,
        INT_MAX, false,
    };
    int status = ns_arguments_parse(&query.arguments, &usage, argc, argv);
    struct ns_error err = { 0 };

    if (status != -1)
        return status;
    if (query.job && query.batch)
        return ns_arguments_misused(&usage, "--job or --batch, not both");
    status = NS_EXIT_OK;
    if (open_database(&query, &err) != NS_OK)
        status = fail(&err);
    for (int i = optind; i < argc && status == NS_EXIT_OK; i++)
        if (cancel(&query, argv[i], &err) != NS_OK)
            status = fail(&err);
    close_query(&query);
    return status;
}

/* --- pause and resume ----------------------------------------------------- */

static int
pause_or_resume(bool paused, const char *program, const char *about, int argc,
                char **argv)
{
    struct query query = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "tenant", 0, "NAME", "jobs of this tenant; default: all jobs",
          .text = &query.tenant },
        CONNINFO_OPTION,
        { 0 },
    };
    const struct ns_synopsis usage = {
        program, "[options]", about, table, 0, 0, false,
    };
    int status = ns_arguments_parse(&query.arguments, &usage, argc, argv);
    struct ns_error err = { 0 };

    if (status != -1)
        return status;
    status = NS_EXIT_OK;
    if (open_database(&query, &err) != NS_OK ||
        ns_operator_pause(query.op, query.tenant ? query.tenant : "", paused,
                          &err) != NS_OK)
        status = fail(&err);
    else
        printf("%s: %s\n", query.tenant ? query.tenant : "all jobs",
               paused ? "paused" : "resumed");
    close_query(&query);
    return status;
}

int
ns_command_pause(int argc, char **argv)
{
    static const char about[] =
        "No daemon of this database begins a job until it is resumed; what runs\n"
        "goes on. One daemon alone is paused by SIGUSR1, resumed by SIGUSR2.\n";

    return pause_or_resume(true, "nightshift pause", about, argc, argv);
}

int
ns_command_resume(int argc, char **argv)
{
    static const char about[] = "Takes back a pause of the same tenant, or of all.\n";

    return pause_or_resume(false, "nightshift resume", about, argc, argv);
}
