/* job.h - one job: an OpenAI Batch request line and our own object in it.
 *
 * The parser is strict where a mistake would cost a night (a misspelt limit, a
 * duplicate key, a field that is not built) and lenient where OpenAI files of
 * other engines carry harmless extras: those are listed as warnings. Every
 * refusal has a stable code and the name of the field:
 *
 *     bad_json     not JSON, not an object, a duplicate key, depth, trailing
 *                  bytes, a byte order mark, a number out of range
 *     bad_text     NUL, invalid UTF-8, a lone surrogate, a raw control
 *                  character inside a string
 *     too_large    over max_bytes; judged before parsing
 *     bad_lz4      a broken LZ4 frame (Kafka)
 *     missing_id   no custom_id (where ids are not made from the position)
 *     bad_id       custom_id or batch empty, too long, control characters
 *     bad_param    a value of the wrong type or out of its range, or a field
 *                  that must be there and is not; `param` names it
 *     unknown_field   inside `nightshift`; `param` names it
 *     unknown_model   not among the names served
 *     unsupported  a field whose part is not built; `param` names it
 *     image_limit  more than NS_JOB_IMAGES pictures
 *     document_limit  more than NS_JOB_DOCUMENTS documents
 *     empty_prompt no message says anything
 *     tombstone    no bytes at all
 *     cancel       no bytes at all, and that cancels the job of the key
 *
 * Owns:    its arena and all that hangs on it, the struct itself included, so
 *          ns_job_destroy is one call. Strings and JSON are borrowed from it.
 * Thread:  one at a time: whoever holds the job. The JSON is not changed after
 *          the parse, and its reference counts are left alone.
 */
#ifndef NS_CONNECTORS_JOB_H
#define NS_CONNECTORS_JOB_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/error.h"
#include "connectors/message.h"

enum {
    NS_JOB_DEPTH = 64,        /* of the JSON */
    NS_JOB_ID_BYTES = 200,    /* custom_id */
    NS_JOB_BATCH_BYTES = 100, /* nightshift.batch, nightshift.tenant */
    NS_JOB_STOPS = 16,        /* stop strings, each of */
    NS_JOB_STOP_BYTES = 256,
    NS_JOB_MESSAGES = 4096,
    NS_JOB_TOOLS = 128,
    NS_JOB_IMAGES = 16,
    NS_JOB_DOCUMENTS = 16,
    NS_JOB_RETRIES = 8,        /* of an answer that a validator turns down */
    NS_JOB_WARNINGS = 32,      /* further ones are counted in the last */
    NS_JOB_DEADLINE_DAYS = 30, /* later ones are cut, with a warning */
};

enum ns_job_mode {
    NS_JOB_AUTO,
    NS_JOB_DIFFUSION,
    NS_JOB_AR,
    NS_JOB_HYBRID,
};

/* What an answer's content has to be. */
enum ns_job_form {
    NS_JOB_FORM_ANY,
    NS_JOB_FORM_OBJECT, /* a JSON object */
    NS_JOB_FORM_SCHEMA, /* JSON that satisfies form_of */
    NS_JOB_FORM_REGEX,  /* a match of the text form_of */
    NS_JOB_FORM_CHOICE, /* one of the texts in the array form_of */
};

/* What may judge an answer before it is final. Bits: 1 << it. */
enum ns_validator {
    NS_VALIDATOR_CONTROL,    /* no control string of the chat format */
    NS_VALIDATOR_REPETITION, /* has not collapsed into repeating itself */
    NS_VALIDATOR_FENCE,      /* each fenced block is closed */
    NS_VALIDATOR_JSON,       /* is one JSON value */
    NS_VALIDATOR_SCHEMA,     /* and satisfies answer_schema */
    NS_VALIDATOR_PYTHON,     /* Python in it parses */
    NS_VALIDATOR_C,          /* C in it parses */
    NS_N_VALIDATORS,
};

enum ns_job_task { NS_JOB_TASK_NONE, NS_JOB_TASK_CODE, NS_JOB_TASK_SUMMARIZE };

struct ns_job_options { /* the server's limits; all zero is a good default */
    size_t max_bytes;   /* of a message; 0: 16 MB */
    uint32_t max_tokens_limit; /* highest max_tokens accepted; 0: 262,144 */
    uint32_t canvas_length;    /* L: the highest canvas asked for; 0: 256 */
    const char *const *model_names; /* served; NULL: any */
    size_t n_model_names;
    const char *model_warning; /* `run`: any model is taken, with a warning
                                * that this one ran; NULL: no warning */
    bool images; /* taken; else `unsupported` */
    bool documents; /* likewise, by reference: there is somewhere to look */
    bool id_from_position;     /* files: a line without custom_id gets
                                * "<origin>:<line>:<12 hex of its hash>" */
    int64_t now_ms;            /* Unix time, to cap deadlines; 0: no cap */
};

struct ns_job {
    struct ns_arena *arena; /* owned; holds this struct */

    /* Set also for a refused job, as far as they could be read. */
    struct ns_position position;
    const char *origin;
    unsigned char sha256[NS_SHA256_BYTES]; /* of the message's bytes */
    uint64_t length;                       /* of the message */
    const char *custom_id; /* NULL when there was none to read */
    const char *batch;     /* NULL: none */
    const char *id;        /* "batch/custom_id", or custom_id; NULL as above */
    const char *tenant;    /* "default" */
    const char *trace_parent, *trace_state; /* of the message; NULL: none */
    const char *headers; /* of the message, a JSON object; NULL: none */
    const char *const *warnings; /* "body.user: ignored" */
    size_t n_warnings;
    struct ns_error refusal; /* status NS_OK, or NS_REJECT and why */

    /* Of an accepted job only, from here on. */
    const char *model;      /* as asked for; NULL: none named */
    const json_t *body;     /* the whole body, as it stood in the line */
    const json_t *messages; /* array; of NS_JOB_TASK_SUMMARIZE with the
                             * instruction already in it */
    const json_t *tools;    /* array; NULL: none, or tool_choice none */
    enum ns_job_form form;
    const json_t *form_of;
    const char *form_path;  /* the field that gave it; NULL: none did */
    const json_t *metadata; /* object of texts, or NULL; for the result */

    bool has_max_tokens, has_temperature, has_top_p, has_seed;
    uint32_t max_tokens; /* from either name */
    double temperature;  /* 0..2 */
    double top_p;        /* above 0, at most 1 */
    uint64_t seed;
    const char *const *stop;
    size_t n_stop;

    /* reasoning_effort and nightshift.thinking_budget; a budget of 0 means
     * off, and an absent one leaves thinking to the configuration. */
    bool has_thinking, thinking;
    uint32_t thinking_budget; /* tokens, when thinking */

    enum ns_job_mode mode;
    enum ns_job_task task;
    uint32_t chunk_tokens; /* of NS_JOB_TASK_SUMMARIZE; 0: not asked for */
    const char *draft; /* a text to start from; NULL: none */
    size_t draft_length;
    bool has_validators, has_retries; /* else the configuration's */
    uint32_t validators;         /* bits of enum ns_validator */
    const json_t *answer_schema; /* of NS_VALIDATOR_SCHEMA */
    uint32_t retries;
    int32_t priority; /* -100..100, higher first */
    const char *replay_of;  /* id of the job that this one is again; or NULL */
    bool has_deadline;
    int64_t deadline_ms;    /* Unix time */
    uint32_t n_images;      /* image_url parts of the messages */
    uint32_t n_documents;   /* document parts; what they are is not known yet */
    uint32_t image_tokens;  /* soft tokens of each at most; 0: not asked for */
    uint32_t canvas_length; /* 0: not asked for */
    bool has_t_min, has_t_max, has_entropy_bound, has_confidence_threshold;
    double t_min, t_max, entropy_bound, confidence_threshold;
    uint32_t max_denoising_steps; /* 0: not asked for */
    uint32_t stability_threshold; /* valid with the flag; 0 is a value */
    bool has_stability_threshold;
};

/* Parses the message, of which nothing is kept by pointer. NS_OK: `*out` is an
 * accepted job. NS_REJECT hands over a job too: it holds what was read, and
 * `refusal` is a copy of `err`, so that the refusal can be stored and travels
 * with what it refuses. NS_FATAL (memory): `*out` is left alone. */
enum ns_status ns_job_parse(const struct ns_message *message,
                            const struct ns_job_options *options,
                            struct ns_job **out, struct ns_error *err);
void ns_job_destroy(struct ns_job *job); /* takes NULL */

/* The custom_id of a line, without parsing it: what a file's source needs to
 * know in the order of lines, before the parses run side by side. Agrees with
 * ns_job_parse on every line that it accepts; false when the line has none, or
 * none that would be accepted. Takes no memory but for an id or a key with
 * escapes. */
bool ns_job_peek_id(const char *bytes, size_t length,
                    char out[NS_JOB_ID_BYTES + 1]);

/* Adds a warning (copied) that the result will list. For the holder of the
 * job, after the parse: "max_tokens cut to 8192". Out of memory drops it. */
void ns_job_warn(struct ns_job *job, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The seed of a job that names none: a hash of its id and `base` (--seed), of
 * 53 bits, so that every JSON reader gets it back from the result whole. */
uint64_t ns_job_seed(const struct ns_job *job, uint64_t base);

const char *ns_validator_name(enum ns_validator validator); /* "control" */
/* False when there is none of that name. */
bool ns_validator_from(const char *name, enum ns_validator *out);

const char *ns_job_mode_name(enum ns_job_mode mode); /* "hybrid" */
/* False when there is no mode of that name. */
bool ns_job_mode_from(const char *name, enum ns_job_mode *out);

#endif
