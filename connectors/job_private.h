/* job_private.h - what the parts of the job parser share.
 *
 * Private to job.c (the line, the ids, the whole), job_text.c (the bytes before
 * they are parsed), job_fields.c (the fields of `body`), job_form.c (those that
 * give the answer a form) and job_ours.c (those of `nightshift`).
 */
#ifndef NS_CONNECTORS_JOB_PRIVATE_H
#define NS_CONNECTORS_JOB_PRIVATE_H

#include "connectors/job.h"

enum {
    NS_JOB_SHOWN = 48, /* bytes of a value that an error quotes */
    NS_JOB_MOST_TOKENS = 262144, /* the longest context of the family */
};

/* One parse: what the handlers of single fields see and leave. */
struct ns_parse {
    struct ns_job *job;
    const struct ns_job_options *options;
    struct ns_error *err;
    const json_t *nightshift; /* NULL: none */
    bool has_effort, has_budget;
    uint32_t effort_tokens;
    bool tools_off; /* tool_choice none */
};

/* One look over the bytes for what must be told apart from a plain mistake in
 * the grammar, and for the depth, which bounds the parser's recursion. */
enum ns_status ns_job_scan(const char *bytes, size_t length,
                           struct ns_error *err);

/* Each takes every field of the object into the job. */
enum ns_status ns_job_take_body(struct ns_parse *p, const json_t *body);
enum ns_status ns_job_take_ours(struct ns_parse *p, const json_t *nightshift);

/* job_form.c: each takes the form that its value gives the answer. */
enum ns_status ns_job_take_response_format(struct ns_parse *p,
                                           const json_t *value,
                                           const char *path);
enum ns_status ns_job_take_structured(struct ns_parse *p, const json_t *value,
                                      const char *path);
enum ns_status ns_job_take_schema(struct ns_parse *p, const json_t *value,
                                  const char *path);
enum ns_status ns_job_take_regex(struct ns_parse *p, const json_t *value,
                                 const char *path);
enum ns_status ns_job_take_choice(struct ns_parse *p, const json_t *value,
                                  const char *path);
enum ns_status ns_job_take_grammar(struct ns_parse *p, const json_t *value,
                                   const char *path);

/* Why `text` can not be an id or a name of at most that many bytes, or NULL. */
const char *ns_job_bad_name(const char *text, size_t length, size_t most);
enum ns_status ns_job_take_name(struct ns_parse *p, const json_t *value,
                                const char *path, const char **out);

/* Refusals: the value is not what is needed; the thing is not built. */
enum ns_status ns_job_wrong_kind(struct ns_parse *p, const json_t *value,
                                 const char *path, const char *needed);
enum ns_status ns_job_unsupported(struct ns_parse *p, const char *path,
                                  const char *what);
enum ns_status ns_job_no_memory(struct ns_error *err);

/* A field of an object: its name, and what takes its value. `path` is the
 * field's full name. A null is an absent field: SDKs send it for that. */
struct ns_job_field {
    const char *name;
    enum ns_status (*take)(struct ns_parse *p, const json_t *value,
                           const char *path);
};

/* Takes every field of `object`. A field that the table lacks is an error
 * when `strict`, else a warning. */
enum ns_status ns_job_take_fields(struct ns_parse *p, const json_t *object,
                                  const char *prefix,
                                  const struct ns_job_field *fields,
                                  bool strict);

/* Numbers within limits, which the refusal names. `above`: the least value
 * itself is excluded. */
enum ns_status ns_job_take_integer(struct ns_parse *p, const json_t *value,
                                   const char *path, int64_t least,
                                   int64_t most, int64_t *out);
enum ns_status ns_job_take_u32(struct ns_parse *p, const json_t *value,
                               const char *path, uint32_t least,
                               uint32_t most, uint32_t *out);
enum ns_status ns_job_take_number(struct ns_parse *p, const json_t *value,
                                  const char *path, double least, bool above,
                                  double most, double *out);

#endif
