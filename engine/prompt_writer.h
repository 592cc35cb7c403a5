/* prompt_writer.h - how the parts of prompt.c write: spans, and one failure.
 *
 * Private to prompt.c and prompt_tools.c. What the template says is marked,
 * what the job says is said; only in the former are markers markers.
 */
#ifndef NS_ENGINE_PROMPT_WRITER_H
#define NS_ENGINE_PROMPT_WRITER_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/prompt.h"

enum { PROMPT_MAX_FIELD = 64 };

#define QUOTE "<|\"|>"

/* What has been written, and the first failure, which sticks: the functions
 * below then read as the template does. */
struct writer {
    struct ns_prompt *out;
    enum ns_status status;
    struct ns_error *err;
    char field[PROMPT_MAX_FIELD]; /* where we are: "messages[2]" */
};

/* Refuses `field` + `suffix`. */
static inline void __attribute__((format(printf, 4, 5)))
refuse(struct writer *w, const char *code, const char *suffix,
       const char *format, ...)
{
    char field[PROMPT_MAX_FIELD], why[200];
    va_list ap;

    if (w->status != NS_OK)
        return;
    va_start(ap, format);
    vsnprintf(why, sizeof(why), format, ap);
    va_end(ap);
    snprintf(field, sizeof(field), "%s%s", w->field, suffix);
    w->status = ns_refuse(w->err, code, field, "%s %s", field, why);
}

static inline void
out_of_memory(struct writer *w)
{
    if (w->status == NS_OK)
        w->status = ns_fail(w->err, NS_FATAL, "out of memory for the prompt");
}

/* Puts `length` bytes under a span that says whose they are. */
static inline void
put(struct writer *w, const char *bytes, size_t length, bool trusted,
    int32_t image)
{
    struct ns_prompt *out = w->out;
    struct ns_prompt_span *last =
        out->n_spans ? &out->spans[out->n_spans - 1] : NULL;
    size_t start = out->text.length;

    if (w->status != NS_OK || length == 0)
        return;
    ns_buf_add(&out->text, bytes, length);
    w->status = ns_buf_check(&out->text, "the prompt", w->err);
    if (w->status != NS_OK)
        return;
    if (last && last->trusted == trusted && last->image < 0 && image < 0) {
        last->length += length;
        return;
    }
    if (out->n_spans == out->capacity) {
        size_t capacity = 2 * out->capacity + 64;
        struct ns_prompt_span *grown =
            realloc(out->spans, capacity * sizeof(*grown));

        if (!grown) {
            out_of_memory(w);
            return;
        }
        out->spans = grown;
        out->capacity = capacity;
    }
    out->spans[out->n_spans++] =
        (struct ns_prompt_span){ start, length, trusted, image };
}

/* The template's own text: markers count. */
static inline void
mark(struct writer *w, const char *text)
{
    put(w, text, strlen(text), true, -1);
}

/* The job's text: nothing in it is a marker. */
static inline void
say(struct writer *w, const char *text, size_t length)
{
    put(w, text, length, false, -1);
}

static inline void
say_string(struct writer *w, const json_t *string)
{
    say(w, json_string_value(string), json_string_length(string));
}

static inline void
say_quoted(struct writer *w, const json_t *string)
{
    mark(w, QUOTE);
    say_string(w, string);
    mark(w, QUOTE);
}

/* Values, as arguments of calls and in declarations (prompt_tools.c). */
void ns_prompt_put_value(struct writer *w, const json_t *value,
                         bool quoted_keys, int depth);
/* `key:VALUE` joined by commas, sorted by key without regard to case. */
void ns_prompt_put_pairs(struct writer *w, const json_t *map, bool quoted_keys,
                         int depth);
void ns_prompt_put_declaration(struct writer *w, const json_t *tool);

#endif
