#include "daemon/ends.h"

#include <stdlib.h>

static enum ns_status
check_pair(const struct ns_options *options, struct ns_error *err)
{
    if (options->intake.spool && options->intake.topics)
        return ns_fail(err, NS_REJECT, "intake.spool and intake.topics are "
                       "both given: jobs come from one of them");
    if (!options->intake.spool && !options->intake.topics)
        return ns_fail(err, NS_REJECT, "no spool: give --spool DIR or "
                       "intake.spool (or intake.topics, for jobs from Kafka)");
    if (options->intake.topics && !options->postgres.conninfo)
        return ns_fail(err, NS_REJECT, "intake.topics is given without "
                       "postgres.conninfo: results of jobs from Kafka can only "
                       "go to PostgreSQL, which keeps two daemons apart");
    if (options->intake.spool && options->n_kafka > 0)
        return ns_fail(err, NS_REJECT, "[kafka] is given, and jobs come from "
                       "intake.spool: set intake.topics, or take it out");
    return NS_OK;
}

struct ns_postgres_options
ns_ends_postgres(const struct ns_options *options)
{
    return (struct ns_postgres_options){
        .conninfo = options->postgres.conninfo,
        .password_file = options->postgres.password_file,
        .connect_ms = (int64_t)options->postgres.connect_ms,
        .answer_ms = (int64_t)options->postgres.answer_ms,
        .allow_async_commit = options->postgres.allow_async_commit,
        .allow_plaintext = options->postgres.allow_plaintext,
        .lease_ms = (int64_t)options->postgres.lease_ms,
        .notify = options->postgres.notify,
    };
}

struct ns_kafka_options
ns_ends_kafka(const struct ns_options *options,
              struct ns_kafka_setting *settings)
{
    for (size_t i = 0; i < options->n_kafka; i++)
        settings[i] = (struct ns_kafka_setting){ options->kafka[i].key,
                                                 options->kafka[i].value };
    return (struct ns_kafka_options){
        .settings = settings,
        .n_settings = options->n_kafka,
        .allow_plaintext = options->intake.allow_plaintext,
        .max_message = options->limits.message_bytes,
        .topics = options->intake.topics,
        .window = options->intake.window,
        .span = options->intake.span,
        .id_from = options->intake.id_from,
        .tombstone_cancels = options->intake.tombstone_cancels,
    };
}

enum ns_status
ns_ends_check(const struct ns_options *options, struct ns_error *err)
{
    struct ns_kafka_setting *settings;
    struct ns_kafka_options kafka;
    enum ns_status status;

    status = check_pair(options, err);
    if (status != NS_OK || !options->intake.topics)
        return status;
    settings = calloc(options->n_kafka + 1, sizeof(*settings));
    if (!settings)
        return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
    kafka = ns_ends_kafka(options, settings);
    status = ns_kafka_check(&kafka, err);
    free(settings);
    return status;
}

static enum ns_status
open_postgres(const struct ns_options *options, const char *model_rev,
              const char *engine_rev, struct ns_ends *ends,
              struct ns_error *err)
{
    struct ns_postgres_options postgres = ns_ends_postgres(options);
    enum ns_status status;

    postgres.model_rev = model_rev;
    postgres.engine_rev = engine_rev;
    status = ns_postgres_store_open(&postgres, &ends->postgres, err);
    if (status != NS_OK)
        return status;
    ends->store = ends->postgres;
    ends->keep_payloads = true;
    return NS_OK;
}

static enum ns_status
open_spool(const struct ns_options *options, const char *model_rev,
           const char *engine_rev, struct ns_ends *ends, struct ns_error *err)
{
    struct ns_spool_options spool = {
        .directory = options->intake.spool,
        .allow_nfs = options->intake.allow_nfs,
        .max_line = options->limits.message_bytes,
        .window = options->intake.window,
        .model_rev = model_rev,
        .engine_rev = engine_rev,
        .answers_elsewhere = options->postgres.conninfo != NULL,
    };
    enum ns_status status = NS_OK;

    if (spool.answers_elsewhere)
        status = open_postgres(options, model_rev, engine_rev, ends, err);
    if (status == NS_OK)
        status = ns_spool_open(&spool, &ends->spool, err);
    if (status != NS_OK)
        return status;
    ends->source = ns_spool_source(ends->spool);
    if (!spool.answers_elsewhere)
        ends->store = ns_spool_store(ends->spool);
    return NS_OK;
}

/* The store first: a message that is taken needs a place for its answer. */
static enum ns_status
open_servers(const struct ns_options *options,
             const struct ns_kafka_options *kafka, const char *model_rev,
             const char *engine_rev, struct ns_ends *ends,
             struct ns_error *err)
{
    enum ns_status status;

    status = open_postgres(options, model_rev, engine_rev, ends, err);
    if (status != NS_OK)
        return status;
    if (options->intake.results_topic || options->intake.dead_letter_topic) {
        status = ns_kafka_producer_open(kafka, &ends->producer, err);
        if (status == NS_OK)
            status = ns_kafka_topics_open(
                ends->postgres, ends->producer, options->intake.results_topic,
                options->intake.dead_letter_topic, &ends->topics, err);
        if (status != NS_OK)
            return status;
        ends->store = ends->topics;
    }
    status = ns_kafka_source_open(kafka, &ends->kafka, err);
    if (status == NS_OK)
        ends->source = ns_kafka_source(ends->kafka);
    return status;
}

enum ns_status
ns_ends_open(const struct ns_options *options, const char *model_rev,
             const char *engine_rev, struct ns_ends *ends,
             struct ns_error *err)
{
    struct ns_kafka_setting *settings = NULL;
    struct ns_kafka_options kafka;
    enum ns_status status;

    status = check_pair(options, err);
    if (status != NS_OK)
        return status;
    if (options->intake.spool) {
        status = open_spool(options, model_rev, engine_rev, ends, err);
    } else {
        settings = calloc(options->n_kafka + 1, sizeof(*settings));
        if (!settings)
            return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
        kafka = ns_ends_kafka(options, settings);
        status = open_servers(options, &kafka, model_rev, engine_rev, ends,
                              err);
        free(settings);
    }
    if (status != NS_OK)
        ns_ends_close(ends);
    return status;
}

bool
ns_ends_ready(const struct ns_ends *ends, const char **why)
{
    struct ns_kafka_state state;

    *why = NULL;
    if (!ends->kafka)
        return true;
    state = ns_kafka_source_state(ends->kafka);
    *why = state.trouble;
    return state.ready;
}

void
ns_ends_close(struct ns_ends *ends)
{
    ns_kafka_source_close(ends->kafka);
    if (ends->topics)
        ends->topics->ops->close(ends->topics);
    ns_kafka_producer_close(ends->producer);
    if (ends->postgres)
        ends->postgres->ops->close(ends->postgres);
    ns_spool_close(ends->spool);
    *ends = (struct ns_ends){ 0 };
}
