/* nightshiftd(8): jobs from a spool directory or from Kafka, night after night.
 *
 *     start --> ready --> working --SIGTERM--> draining --> stopped
 *                  ^         |
 *                  '-SIGHUP--'
 *
 * The event loop below is the whole daemon; the pipeline does the work. Exit
 * statuses are those of setup.h: 75 and 70 are worth another start, 78 is not.
 */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/version.h"
#include "daemon/arguments.h"
#include "daemon/board.h"
#include "daemon/ends.h"
#include "daemon/http.h"
#include "daemon/metrics.h"
#include "daemon/notify.h"
#include "daemon/setup.h"
#include "daemon/tool.h"
#include "daemon/signals.h"
#include "daemon/work.h"
#include "engine/measure.h"

enum {
    STATUS_EVERY_MS = 5000,
    EXTEND_MS = 15000,
    MEASURE_MS = 500,
    WAIT_MS = 1000,
    PUBLISH_MS = 250,
};

struct nightshiftd {
    struct ns_arguments arguments;
    bool print_config, check_config;

    struct ns_options *options;
    struct ns_engine *engine;
    struct ns_ends ends;
    struct ns_pipeline *pipeline;
    struct ns_notify notify;
    struct ns_decoder *decoder;
    struct ns_documents *documents;
    struct ns_fetcher *fetcher;
    struct ns_metrics metrics;
    struct ns_board board;
    struct ns_http *http; /* NULL: not asked for */
    int64_t publish_at_ms;
    char **model_names;
    char model[PATH_MAX], model_name[256];
    int64_t status_at_ms, extend_at_ms;
    bool storage_was_full, ready, paused;
};

/* -1 to go on, else the status to leave with. */
static int
read_arguments(struct nightshiftd *d, int argc, char **argv)
{
    bool version = false;
    const struct ns_argument table[] = {
        { "spool", 0, "DIR", "folder with in/, work/, out/, done/, dead/",
          .key = "intake.spool" },
        { "model", 0, "DIR", "checkpoint folder", .key = "engine.model" },
        { "print-config", 0, NULL, "what is in force, and exit",
          .flag = &d->print_config },
        { "check-config", 0, NULL, "say what is wrong with it, and exit",
          .flag = &d->check_config },
        { "version", 0, NULL, "say which this is, and exit",
          .flag = &version },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshiftd", "[options]", NULL, table, 0, 0, false,
    };
    int status;

    d->arguments.fallback_config = NS_ETC_CONFIG;
    status = ns_arguments_parse(&d->arguments, &usage, argc, argv);
    if (status != -1)
        return status;
    if (version) {
        printf("nightshiftd %s\n", NS_VERSION);
        return NS_EXIT_OK;
    }
    return -1;
}

/* From here on, since loading a model takes minutes in which someone asks. */
static enum ns_status
open_http(struct nightshiftd *d, struct ns_error *err)
{
    struct ns_http_options options = { .listen = d->options->http.listen,
                                       .metrics = &d->metrics,
                                       .board = &d->board,
                                       .version = NS_VERSION };
    enum ns_status status;

    if (!options.listen)
        return NS_OK;
    status = ns_http_open(&options, &d->http, err);
    if (status != NS_OK)
        return status;
    if (ns_http_is_local(d->http))
        ns_log_info("http.listening", "listen=\"%s\" port=%u", options.listen,
                    ns_http_port(d->http));
    else
        ns_log_warn("http.listening", "listen=\"%s\" port=%u others_can_read=1",
                    options.listen, ns_http_port(d->http));
    return NS_OK;
}

/* Before there is a pipeline its phase is said, and that nothing hangs. */
static void
publish(struct nightshiftd *d, enum ns_http_phase phase)
{
    struct ns_http_state state = {
        .phase = phase,
        .healthy = !d->pipeline || ns_pipeline_healthy(d->pipeline),
        .model = d->model_name,
        .model_revision = ns_engine_model(d->engine)->revision,
    };

    if (!d->http)
        return;
    if (d->ends.kafka) {
        state.has_kafka = true;
        state.kafka = ns_kafka_source_state(d->ends.kafka);
        state.kafka.trouble = NULL; /* does not live long enough */
    }
    ns_http_publish(d->http, &state);
}

static enum ns_http_phase
phase(struct nightshiftd *d, int64_t grace_ms)
{
    const char *why;

    if (grace_ms >= 0)
        return NS_HTTP_DRAINING;
    if (!ns_ends_ready(&d->ends, &why) ||
        atomic_load(&d->metrics.source_away) ||
        atomic_load(&d->metrics.store_away))
        return NS_HTTP_WAITING;
    return NS_HTTP_WORKING;
}

static enum ns_status
open_engine(struct nightshiftd *d, struct ns_error *err)
{
    const struct ns_options *options = d->options;
    struct ns_engine_options engine;
    enum ns_status status;

    status = ns_ends_check(options, err);
    if (status == NS_OK)
        status = ns_setup_model(options, d->model, sizeof(d->model), err);
    if (status != NS_OK)
        return status;
    ns_setup_model_name(d->model, d->model_name, sizeof(d->model_name));
    engine = ns_setup_engine(options, d->model);
    status = ns_engine_open(&engine, &d->engine, err);
    return status == NS_OK ? ns_measure(d->engine, MEASURE_MS, err) : status;
}

/* A database that is away is waited for, as a broker is: loading the model
 * again would not bring it back. NS_STOP: told to end meanwhile. */
static enum ns_status
open_ends(struct nightshiftd *d, struct ns_error *err)
{
    enum ns_status status;

    for (int n_tries = 0;; n_tries++) {
        status = ns_ends_open(d->options, ns_engine_model(d->engine)->revision,
                              ns_engine_revision(d->engine), &d->ends, err);
        if (status != NS_RETRY || err->code)
            return status;
        if (n_tries == 0)
            ns_log_warn("daemon.waiting", "error=\"%s\"", err->text);
        ns_notify_extend(EXTEND_MS);
        ns_notify_status("waiting: %s", err->text);
        ns_notify_watchdog(&d->notify, (uint64_t)ns_now_ms(), true);
        publish(d, NS_HTTP_WAITING);
        ns_signals_wait(-1, WAIT_MS);
        if (ns_signals_take() & NS_SIGNAL_STOP)
            return ns_fail(err, NS_STOP, "told to end");
    }
}

static enum ns_status
start(struct nightshiftd *d, struct ns_error *err)
{
    struct ns_pipeline_options pipeline;
    enum ns_status status =
        ns_setup_pipeline(d->options, d->engine, d->model_name,
                          &d->model_names, &d->decoder, &d->fetcher,
                          &d->documents, &pipeline, err);

    if (status != NS_OK)
        return status;
    pipeline.source = d->ends.source;
    pipeline.store = d->ends.store;
    pipeline.job.id_from_position = d->ends.spool != NULL;
    pipeline.keep_payloads = d->ends.keep_payloads;
    pipeline.metrics = &d->metrics;
    pipeline.board = d->http ? &d->board : NULL;
    return ns_pipeline_create(&pipeline, &d->pipeline, err);
}

static void
note_change(void *data, const char *key, bool taken)
{
    (void)data;
    if (taken)
        ns_log_info("config.changed", "key=%s", key);
    else
        ns_log_warn("config.needs_restart", "key=%s", key);
}

static void
reload(struct nightshiftd *d)
{
    struct ns_options *fresh = NULL;
    struct ns_pipeline_tuning tuning;
    struct ns_error err;

    ns_notify_reloading();
    if (ns_arguments_load(&d->arguments, &fresh, &err) == NS_OK &&
        ns_options_adopt(d->options, fresh, note_change, NULL, &err) ==
            NS_OK) {
        ns_setup_log(d->options);
        tuning = ns_setup_tuning(d->options);
        ns_pipeline_tune(d->pipeline, &tuning);
        ns_log_info("config.reloaded", "%s", "");
    } else {
        ns_log_error("config.reload_failed", "kept=old error=\"%s\"",
                     err.text);
    }
    ns_options_destroy(fresh);
    if (d->ready)
        ns_notify_ready("working");
    d->status_at_ms = 0;
}

/* Ready is what can take jobs in: the systemd unit starts for as long as no
 * broker is in reach. */
static void
report_ready(struct nightshiftd *d, int64_t now_ms)
{
    const struct ns_options *options = d->options;
    const char *why;

    if (ns_ends_ready(&d->ends, &why)) {
        d->ready = true;
        publish(d, phase(d, -1)); /* before others hear of it */
        ns_log_info("daemon.ready", "version=%s model=%s model_rev=%.12s "
                    "engine_rev=\"%s\" %s=\"%s\"", NS_VERSION, d->model_name,
                    ns_engine_model(d->engine)->revision,
                    ns_engine_revision(d->engine),
                    options->intake.topics ? "topics" : "spool",
                    options->intake.topics ? options->intake.topics
                                           : options->intake.spool);
        ns_notify_ready("working");
    } else if (now_ms >= d->extend_at_ms) {
        ns_notify_extend(EXTEND_MS);
        ns_notify_status("waiting: %s", why);
        d->extend_at_ms = now_ms + EXTEND_MS / 3;
    }
}

static void
report_storage(struct nightshiftd *d)
{
    struct ns_spool_progress progress = ns_spool_progress(d->ends.spool);

    if (progress.storage_full == d->storage_was_full)
        return;
    d->storage_was_full = progress.storage_full;
    if (progress.storage_full)
        ns_log_error("spool.full", "%s", "results wait for room");
    else
        ns_log_info("spool.has_room", "%s", "");
}

/* Every few seconds, to systemd: what `systemctl status` shows. */
static void
report(struct nightshiftd *d, int64_t now_ms, int64_t grace_ms)
{
    struct ns_pipeline_counts counts;
    const char *why;
    bool ready;

    ns_notify_watchdog(&d->notify, (uint64_t)now_ms,
                       ns_pipeline_healthy(d->pipeline));
    if (grace_ms >= 0 && now_ms >= d->extend_at_ms) {
        ns_notify_extend(EXTEND_MS);
        d->extend_at_ms = now_ms + EXTEND_MS / 3;
    }
    if (!d->ready && grace_ms < 0)
        report_ready(d, now_ms);
    if (now_ms >= d->publish_at_ms) {
        publish(d, phase(d, grace_ms));
        d->publish_at_ms = now_ms + PUBLISH_MS;
    }
    if (now_ms < d->status_at_ms || !d->ready)
        return;
    d->status_at_ms = now_ms + STATUS_EVERY_MS;
    counts = ns_pipeline_counts(d->pipeline);
    ready = ns_ends_ready(&d->ends, &why);
    ns_notify_status("%s%" PRIu64 " in flight, %" PRIu64 " ok, %" PRIu64
                     " failed, %" PRIu64 " tokens%s%s",
                     grace_ms >= 0 ? "draining: "
                     : d->paused   ? "paused: "
                                   : "", counts.in_flight,
                     counts.ok, counts.failed, counts.new_tokens,
                     ready ? "" : "; ", ready ? "" : why);
    if (d->ends.spool)
        report_storage(d);
}

static void
loop(struct nightshiftd *d)
{
    int wait_ms, most_ms = 1000;
    unsigned signals;

    if (d->notify.interval_ms > 0 && d->notify.interval_ms < 2000)
        most_ms = (int)(d->notify.interval_ms / 2);
    while (ns_pipeline_turn(d->pipeline, &wait_ms)) {
        ns_signals_wait(ns_pipeline_descriptor(d->pipeline),
                        wait_ms < most_ms ? wait_ms : most_ms);
        signals = ns_signals_take();
        if (signals & NS_SIGNAL_STOP) {
            ns_log_info("daemon.draining", "grace_ms=%" PRIu64,
                        d->options->daemon.drain_ms);
            ns_notify_stopping();
            ns_pipeline_stop(d->pipeline, (int64_t)d->options->daemon.drain_ms);
            d->status_at_ms = d->publish_at_ms = 0;
        } else if (signals & NS_SIGNAL_RELOAD) {
            reload(d);
        }
        if (signals & (NS_SIGNAL_PAUSE | NS_SIGNAL_RESUME)) {
            d->paused = signals & NS_SIGNAL_PAUSE;
            ns_log_info(d->paused ? "daemon.paused" : "daemon.resumed", "%s",
                        "by a signal");
            ns_pipeline_pause(d->pipeline, d->paused);
            d->status_at_ms = 0;
        }
        report(d, ns_now_ms(), ns_pipeline_grace_left(d->pipeline));
    }
}

static int
complain(const struct ns_error *err, enum ns_exit otherwise)
{
    ns_log_error("daemon.failed", "error=\"%s\"", err->text);
    return ns_exit_of(err, otherwise);
}

static int
work(struct nightshiftd *d)
{
    struct ns_pipeline_counts counts;
    struct ns_error err = { 0 };
    int status = NS_EXIT_OK;

    ns_signals_ignore_pauses();
    umask(0027); /* results are read by the spool's group, by nobody else */
    ns_notify_init(&d->notify);
    ns_metrics_init(&d->metrics);
    ns_board_init(&d->board);
    if (open_http(d, &err) != NS_OK || open_engine(d, &err) != NS_OK ||
        ns_signals_ready(NS_EXIT_AGAIN, &err) != NS_OK)
        return complain(&err, NS_EXIT_CONFIG);
    publish(d, NS_HTTP_OPENING);
    if (open_ends(d, &err) == NS_STOP)
        return NS_EXIT_OK;
    if (!d->ends.source || start(d, &err) != NS_OK)
        return complain(&err, NS_EXIT_CONFIG);
    report_ready(d, ns_now_ms());
    loop(d);
    counts = ns_pipeline_counts(d->pipeline);
    if (ns_pipeline_failure(d->pipeline, &err) != NS_OK)
        status = complain(&err, NS_EXIT_CONFIG);
    ns_log_info("daemon.stopped", "ok=%" PRIu64 " failed=%" PRIu64
                " tokens=%" PRIu64, counts.ok, counts.failed,
                counts.new_tokens);
    return status;
}

int
main(int argc, char **argv)
{
    struct nightshiftd *d;
    struct ns_error err = { 0 };
    int status;

    if (ns_tool_is_helper(argc, argv))
        return ns_tool_main(argv);
    if (ns_decoder_is_helper(argc, argv))
        return ns_decoder_main(ns_picture_decode, NS_DECODER_CPU_SECONDS);
    d = calloc(1, sizeof(*d));
    if (!d)
        return NS_EXIT_INTERNAL;
    status = read_arguments(d, argc, argv);
    if (status == -1 &&
        ns_arguments_load(&d->arguments, &d->options, &err) != NS_OK) {
        fprintf(stderr, "nightshiftd: %s\n", err.text);
        status = NS_EXIT_CONFIG;
    }
    if (status == -1 && d->print_config) {
        ns_options_print(d->options, stdout);
        status = NS_EXIT_OK;
    }
    if (status == -1 && d->check_config) {
        status = NS_EXIT_OK;
        /* A file without any source may wait for --spool. */
        if ((d->options->intake.spool || d->options->intake.topics) &&
            ns_ends_check(d->options, &err) != NS_OK) {
            fprintf(stderr, "nightshiftd: %s\n", err.text);
            status = NS_EXIT_CONFIG;
        }
    }
    if (status == -1) {
        ns_setup_log(d->options);
        status = work(d);
    }
    ns_http_close(d->http);
    ns_pipeline_destroy(d->pipeline);
    ns_ends_close(&d->ends);
    ns_engine_close(d->engine);
    ns_fetcher_destroy(d->fetcher);
    ns_decoder_destroy(d->decoder);
    ns_documents_destroy(d->documents);
    free(d->model_names);
    ns_options_destroy(d->options);
    free(d);
    return status;
}
