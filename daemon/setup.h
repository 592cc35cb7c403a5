/* setup.h - from the configuration to the parts: what both programs share.
 *
 * Turns the options into the plain structs that engine, connectors and the
 * pipeline declare, finds the model, and maps errors to exit statuses.
 */
#ifndef NS_DAEMON_SETUP_H
#define NS_DAEMON_SETUP_H

#include "config/options.h"
#include "daemon/pipeline.h"
#include "engine/engine.h"

enum ns_exit { /* of both programs */
    NS_EXIT_OK = 0,      /* all jobs ok */
    NS_EXIT_SOME = 1,    /* some failed */
    NS_EXIT_NONE = 2,    /* none succeeded */
    NS_EXIT_USAGE = 64,
    NS_EXIT_INPUT = 65,    /* the input can not be read */
    NS_EXIT_INTERNAL = 70,
    NS_EXIT_AGAIN = 75,    /* try again: a lock is held */
    NS_EXIT_CONFIG = 78,   /* configuration, rights, model: no restart helps */
    NS_EXIT_INTERRUPTED = 130, /* a second run carries on */
};

/* What an error means for the process. `otherwise` is for a REJECT that no
 * code tells more about. */
enum ns_exit ns_exit_of(const struct ns_error *err, enum ns_exit otherwise);

/* Where the model is: the option, $NIGHTSHIFT_MODEL, or models/demo beside the
 * program, above it or in its share. `out` holds the path. NS_REJECT says
 * where was looked. */
enum ns_status ns_setup_model(const struct ns_options *options, char *out,
                              size_t out_size, struct ns_error *err);

/* Name of a model: the last part of its folder's path, resolved. */
void ns_setup_model_name(const char *directory, char *out, size_t out_size);

struct ns_engine_options ns_setup_engine(const struct ns_options *options,
                                         const char *model_directory);

struct ns_pipeline_tuning ns_setup_tuning(const struct ns_options *options);

/* Helpers for pictures where the model sees, as many as threads prepare jobs;
 * else `*decoder` stays NULL and pictures are refused. `*fetcher` only where
 * images.url_hosts allows any. `out` borrows all; the caller destroys both. */
enum ns_status ns_setup_pictures(const struct ns_options *options,
                                 const struct ns_model *model,
                                 struct ns_decoder **decoder,
                                 struct ns_fetcher **fetcher,
                                 struct ns_pictures_options *out,
                                 struct ns_error *err);

/* Where documents by reference come from: the database where one is given,
 * else documents.roots; neither: jobs that name one are refused. `*documents`
 * is NULL at first and the caller's, also on failure. */
enum ns_status ns_setup_references(const struct ns_options *options,
                                   struct ns_documents **documents,
                                   struct ns_references_options *out,
                                   struct ns_error *err);

/* The validators that the configuration names. NS_REJECT: a name that is none,
 * a tool that is not there or is not named. */
enum ns_status ns_setup_judge(const struct ns_options *options,
                              struct ns_judge_options *out,
                              struct ns_error *err);

/* What `run` and nightshiftd ask of a pipeline alike: all but its two ends.
 * `model_name` is borrowed. `*names`, `*decoder`, `*fetcher` and `*documents`,
 * NULL at first, are the caller's: freed and destroyed behind the pipeline, also
 * on failure. */
enum ns_status ns_setup_pipeline(const struct ns_options *options,
                                 struct ns_engine *engine,
                                 const char *model_name, char ***names,
                                 struct ns_decoder **decoder,
                                 struct ns_fetcher **fetcher,
                                 struct ns_documents **documents,
                                 struct ns_pipeline_options *out,
                                 struct ns_error *err);

void ns_setup_log(const struct ns_options *options);

#endif
