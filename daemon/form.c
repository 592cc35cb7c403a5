#include "daemon/form.h"

#include <stdio.h>
#include <stdlib.h>

static enum ns_status
of_choices(const json_t *choices, struct ns_grammar **out,
           struct ns_error *err)
{
    size_t n = json_array_size(choices);
    const char **text = calloc(n, sizeof(*text));
    enum ns_status status;

    if (!text)
        return ns_fail(err, NS_FATAL, "out of memory for %zu choices", n);
    for (size_t i = 0; i < n; i++)
        text[i] = json_string_value(json_array_get(choices, i));
    status = ns_grammar_choice(text, n, out, err);
    free(text);
    return status;
}

enum ns_status
ns_form_grammar(const struct ns_job *job, struct ns_grammar **out,
                struct ns_error *err)
{
    const json_t *of = job->form_of;
    enum ns_status status = NS_OK;

    *out = NULL;
    switch (job->form) {
    case NS_JOB_FORM_ANY:
        return NS_OK;
    case NS_JOB_FORM_OBJECT:
        status = ns_grammar_json_object(out, err);
        break;
    case NS_JOB_FORM_SCHEMA:
        status = ns_grammar_json_schema(of, out, err);
        break;
    case NS_JOB_FORM_REGEX:
        status = ns_grammar_regex(json_string_value(of),
                                  json_string_length(of), out, err);
        break;
    case NS_JOB_FORM_CHOICE:
        status = of_choices(of, out, err);
        break;
    }
    if (status == NS_OK)
        return NS_OK;
    snprintf(err->param, sizeof(err->param), "%s", job->form_path);
    ns_context(err, "%s", job->form_path);
    return status;
}
