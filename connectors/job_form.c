/* job_form.c - the fields that say what form an answer has.
 *
 * OpenAI's response_format, with two types of ours (regex, choice), and the
 * names that other engines give the same: a file that was made for them must
 * not lose its constraint in silence.
 */
#include <string.h>

#include "connectors/job_private.h"

enum { CHOICES = 4096 };

static enum ns_status
take_form(struct ns_parse *p, enum ns_job_form form, const json_t *of,
          const char *path)
{
    struct ns_job *job = p->job;

    if (job->form != NS_JOB_FORM_ANY)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %s gives a form too; one is enough", path,
                         job->form_path);
    job->form = form;
    job->form_of = of;
    job->form_path = ns_arena_text(job->arena, path, strlen(path));
    return job->form_path ? NS_OK : ns_job_no_memory(p->err);
}

/* A member of `value` that has to be there. */
static enum ns_status
take_member(struct ns_parse *p, enum ns_job_form form, const json_t *value,
            const char *name, const char *path)
{
    const json_t *member = json_object_get(value, name);
    char full[64];

    snprintf(full, sizeof(full), "%.40s.%s", path, name);
    if (!member)
        return ns_refuse(p->err, "bad_param", full, "%s: missing", full);
    switch (form) {
    case NS_JOB_FORM_REGEX:
        return ns_job_take_regex(p, member, full);
    case NS_JOB_FORM_CHOICE:
        return ns_job_take_choice(p, member, full);
    default:
        return ns_job_take_schema(p, member, full);
    }
}

enum ns_status
ns_job_take_schema(struct ns_parse *p, const json_t *value, const char *path)
{
    if (!json_is_object(value) && !json_is_boolean(value))
        return ns_job_wrong_kind(p, value, path, "a JSON Schema");
    return take_form(p, NS_JOB_FORM_SCHEMA, value, path);
}

enum ns_status
ns_job_take_regex(struct ns_parse *p, const json_t *value, const char *path)
{
    if (!json_is_string(value) || json_string_length(value) == 0)
        return ns_job_wrong_kind(p, value, path, "a regular expression");
    return take_form(p, NS_JOB_FORM_REGEX, value, path);
}

enum ns_status
ns_job_take_choice(struct ns_parse *p, const json_t *value, const char *path)
{
    size_t n = json_array_size(value);

    if (n == 0 || n > CHOICES)
        return ns_job_wrong_kind(p, value, path, "1 to 4096 texts");
    for (size_t i = 0; i < n; i++)
        if (json_string_length(json_array_get(value, i)) == 0)
            return ns_refuse(p->err, "bad_param", path,
                             "%s[%zu]: a text is needed, and not an empty one",
                             path, i);
    return take_form(p, NS_JOB_FORM_CHOICE, value, path);
}

static enum ns_status
take_json_schema(struct ns_parse *p, const json_t *value, const char *path)
{
    const json_t *holder = json_object_get(value, "json_schema");
    char full[64];

    snprintf(full, sizeof(full), "%.40s.json_schema", path);
    if (!holder)
        return ns_refuse(p->err, "bad_param", full, "%s: missing", full);
    if (!json_is_object(holder))
        return ns_job_wrong_kind(p, holder, full, "an object with a schema");
    return take_member(p, NS_JOB_FORM_SCHEMA, holder, "schema", full);
}

enum ns_status
ns_job_take_response_format(struct ns_parse *p, const json_t *value,
                            const char *path)
{
    const char *type = json_string_value(json_object_get(value, "type"));

    if (!json_is_object(value) || !type)
        return ns_job_wrong_kind(p, value, path, "an object with a type");
    if (strcmp(type, "text") == 0)
        return NS_OK;
    if (strcmp(type, "json_object") == 0)
        return take_form(p, NS_JOB_FORM_OBJECT, NULL, path);
    if (strcmp(type, "json_schema") == 0)
        return take_json_schema(p, value, path);
    if (strcmp(type, "regex") == 0)
        return take_member(p, NS_JOB_FORM_REGEX, value, "regex", path);
    if (strcmp(type, "choice") == 0)
        return take_member(p, NS_JOB_FORM_CHOICE, value, "choice", path);
    return ns_refuse(p->err, "unsupported", path,
                     "%s.type: text, json_object, json_schema, regex and "
                     "choice are built", path);
}

static enum ns_status
take_object(struct ns_parse *p, const json_t *value, const char *path)
{
    return json_is_true(value)
               ? take_form(p, NS_JOB_FORM_OBJECT, NULL, path)
               : NS_OK;
}

enum ns_status
ns_job_take_grammar(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)value;
    return ns_job_unsupported(p, path, "a grammar of another notation");
}

/* Other engines' extra fields of a body, and of their structured_outputs. */
static const struct ns_job_field structured[] = {
    { "json", ns_job_take_schema },
    { "json_object", take_object },
    { "regex", ns_job_take_regex },
    { "choice", ns_job_take_choice },
    { "grammar", ns_job_take_grammar },
    { "structural_tag", ns_job_take_grammar },
    { NULL, NULL },
};

enum ns_status
ns_job_take_structured(struct ns_parse *p, const json_t *value,
                       const char *path)
{
    char prefix[64];

    if (!json_is_object(value))
        return ns_job_wrong_kind(p, value, path, "an object");
    snprintf(prefix, sizeof(prefix), "%.40s.", path);
    return ns_job_take_fields(p, value, prefix, structured, false);
}
