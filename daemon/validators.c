#include "daemon/validators.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "engine/schema.h"

enum {
    SHORT_UNIT = 64,
    SHORT_ROUNDS = 8,
    LONG_UNIT = 600,
    LONG_ROUNDS = 5,
    LEAST_CUT = 200,    /* bytes that go round where the limit cut the answer */
    LEAST_ENDED = 400,  /* and where it ended by itself */
    LEAST_DATA = 1000,  /* and of figures, in either */
    MOST_CLOSERS = 64,
    LAST_WORDS = 120,
    LEAST_DOUBLED = 24,
    LONGEST_CONTROL = 40,
};

static bool __attribute__((format(printf, 2, 3)))
turned_down(struct ns_reason *reason, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(reason->text, sizeof(reason->text), format, args);
    va_end(args);
    return false;
}

/* ---- repetition -------------------------------------------------------- */

/* How many bytes at the end repeat what stands `unit` bytes before them. */
static size_t
going_round(const char *text, size_t length, size_t unit)
{
    size_t n = 0;

    while (n + unit < length &&
           text[length - 1 - n] == text[length - 1 - n - unit])
        n++;
    return n == 0 ? 0 : n + unit;
}

/* What a grammar, or a model that comes to, puts behind a run to end its
 * strings, brackets and fences. */
static size_t
without_closers(const char *text, size_t length)
{
    size_t n = 0;

    while (n < length && n < MOST_CLOSERS &&
           strchr(" \n\r\t\"'`}])", text[length - 1 - n]) &&
           text[length - 1 - n] != '\0')
        n++;
    return length - n;
}

/* Figures alone: a row of equal ones is more often right than wrong. */
static bool
is_data(const char *unit, size_t length)
{
    bool digits = false;

    for (size_t i = 0; i < length; i++) {
        if (isalpha((unsigned char)unit[i]) || (unsigned char)unit[i] >= 0x80)
            return false;
        digits |= isdigit((unsigned char)unit[i]) != 0;
    }
    return digits;
}

static bool
goes_round(const char *text, size_t length, bool cut, struct ns_reason *reason)
{
    for (size_t unit = 1; unit <= LONG_UNIT && unit < length; unit++) {
        size_t rounds = unit <= SHORT_UNIT ? SHORT_ROUNDS : LONG_ROUNDS;
        size_t n = going_round(text, length, unit);
        bool data, half = n >= length / 2;

        if (n < rounds * unit)
            continue;
        data = is_data(text + length - unit, unit);
        if (data ? n >= LEAST_DATA && half
                 : n >= (cut ? LEAST_CUT : LEAST_ENDED) && (cut || half)) {
            turned_down(reason, "from byte %zu on, %zu bytes repeat %zu of "
                        "them", length - n, n, unit);
            return true;
        }
    }
    return false;
}

static bool
is_word(unsigned char c)
{
    return isalpha(c) || c >= 0x80 || c == '\'';
}

/* The word that ends in front of `end`; its length, 0 for none. */
static size_t
word_before(const char *text, size_t *end)
{
    size_t start;

    while (*end > 0 && !is_word((unsigned char)text[*end - 1]))
        (*end)--;
    start = *end;
    while (start > 0 && is_word((unsigned char)text[start - 1]))
        start--;
    return *end - start;
}

/* Cells of a table have more between them. */
static bool
blank(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] != ' ')
            return false;
    return true;
}

/* A word that stands thrice or more is doubled once: "we we saw saw" is the
 * sign, a row of one word is the other rule's, and letters are cells. */
static bool
words_double(const char *text, size_t length, struct ns_reason *reason)
{
    size_t end = length, n = word_before(text, &end), start = end - n;
    bool in_run = false;
    int doubled = 0;

    for (int i = 1; i < LAST_WORDS && n > 0; i++) {
        size_t before_end = start, before = word_before(text, &before_end);
        bool same = before == n && n > 1 &&
                    memcmp(text + before_end - before, text + start, n) == 0 &&
                    blank(text + before_end, start - before_end);

        doubled += same && !in_run;
        in_run = same;
        n = before;
        start = before_end - before;
    }
    if (doubled < LEAST_DOUBLED)
        return false;
    turned_down(reason, "words double: %d of the last %d", doubled, LAST_WORDS);
    return true;
}

bool
ns_validate_repetition(const char *text, size_t length, bool cut,
                       struct ns_reason *reason)
{
    size_t closed = without_closers(text, length);

    return !goes_round(text, length, cut, reason) &&
           !(closed < length && goes_round(text, closed, cut, reason)) &&
           !words_double(text, length, reason);
}

/* ---- fences ------------------------------------------------------------- */

struct fence {
    char mark;   /* 0: no fence */
    size_t n;    /* marks */
    size_t info; /* where its info begins */
};

/* Where the line that begins at `at` ends: at its newline, or the end. */
static size_t
line_end(const char *text, size_t length, size_t at)
{
    const char *newline = memchr(text + at, '\n', length - at);

    return newline ? (size_t)(newline - text) : length;
}

static struct fence
fence_at(const char *text, size_t at, size_t end)
{
    size_t indent = 0;
    struct fence fence = { 0 };

    while (indent < 4 && at < end && text[at] == ' ')
        at++, indent++;
    if (indent == 4 || at == end || (text[at] != '`' && text[at] != '~'))
        return fence;
    fence.mark = text[at];
    while (at < end && text[at] == fence.mark)
        at++, fence.n++;
    fence.info = at;
    /* An info of backticks with a backtick in it is a span of code. */
    if (fence.n < 3 ||
        (fence.mark == '`' && memchr(text + at, '`', end - at)))
        fence.mark = 0;
    return fence;
}

static bool
closes(const char *text, struct fence open, struct fence fence, size_t end)
{
    if (fence.mark != open.mark || fence.n < open.n)
        return false;
    for (size_t i = fence.info; i < end; i++)
        if (!isspace((unsigned char)text[i]))
            return false;
    return true;
}

bool
ns_validate_fence(const char *text, size_t length, struct ns_reason *reason)
{
    struct fence open = { 0 };
    size_t line = 1, opened = 0;

    for (size_t at = 0; at < length; line++) {
        size_t end = line_end(text, length, at);
        struct fence fence = fence_at(text, at, end);

        if (open.mark) {
            if (closes(text, open, fence, end))
                open.mark = 0;
        } else if (fence.mark) {
            open = fence;
            opened = line;
        }
        at = end + 1;
    }
    if (!open.mark)
        return true;
    return turned_down(reason, "the fence of line %zu is not closed", opened);
}

static bool
info_is(const char *info, size_t n, const char *names)
{
    while (n > 0 && isspace((unsigned char)*info))
        info++, n--;
    for (const char *name = names; *name;) {
        size_t length = strcspn(name, "|");

        if (n >= length && strncasecmp(info, name, length) == 0 &&
            (n == length || !isalnum((unsigned char)info[length])) &&
            (n == length || (info[length] != '+' && info[length] != '#')))
            return true;
        name += length + (name[length] == '|');
    }
    return false;
}

bool
ns_next_code(const char *text, size_t length, const char *names, size_t *at,
             struct ns_code *out)
{
    struct fence open = { 0 };
    bool ours = false, any = false;
    size_t line = 1;

    for (size_t from = 0; from < length; line++) {
        size_t end = line_end(text, length, from), start = from;
        struct fence fence = fence_at(text, from, end);

        from = end + 1;
        if (open.mark) {
            bool closed = closes(text, open, fence, end);

            if (!closed && from < length)
                continue;
            open.mark = 0;
            if (!ours || start < *at)
                continue;
            /* One that is cut short goes to the end. */
            out->length = (size_t)((closed ? text + start : text + length) -
                                   out->text);
            *at = from;
            return true;
        }
        if (!fence.mark)
            continue;
        any = true;
        open = fence;
        ours = info_is(text + fence.info, end - fence.info, names);
        out->text = text + (from < length ? from : length);
        out->line = line + 1;
    }
    if (open.mark && ours && *at <= length) { /* cut behind its first line */
        out->length = 0;
        *at = length + 1;
        return true;
    }
    if (any || *at > 0)
        return false;
    *out = (struct ns_code){ text, length, 1 };
    *at = length + 1;
    return length > 0;
}

/* ---- control strings, JSON ------------------------------------------------ */

/* Whether a control string begins at text[0]; its text goes to `name`. */
static bool
control_at(const char *text, size_t length,
           const struct ns_tokenizer *tokenizer,
           char name[LONGEST_CONTROL + 1])
{
    size_t n = 1;

    if (length == 0 || (text[0] != '<' && text[0] != '['))
        return false;
    while (n < length && n < LONGEST_CONTROL && text[n] != '>' &&
           text[n] != ']')
        n++;
    if (n == length || n == LONGEST_CONTROL || memchr(text, '\0', n))
        return false;
    memcpy(name, text, n + 1);
    name[n + 1] = '\0';
    return ns_tokenizer_is_control(tokenizer,
                                   ns_tokenizer_id(tokenizer, name));
}

static void
find_controls(const char *text, size_t length,
              const struct ns_tokenizer *tokenizer, struct ns_buf *out)
{
    char name[LONGEST_CONTROL + 1];

    for (size_t i = 0; i < length; i++)
        if (control_at(text + i, length - i, tokenizer, name) &&
            !(out->data && strstr(out->data, name)))
            ns_buf_printf(out, "%s\n", name);
}

void
ns_controls_of(const json_t *value, const struct ns_tokenizer *tokenizer,
               struct ns_buf *out)
{
    const char *key;
    json_t *item;
    size_t i;

    if (json_is_string(value))
        find_controls(json_string_value(value), json_string_length(value),
                      tokenizer, out);
    json_array_foreach(value, i, item) {
        ns_controls_of(item, tokenizer, out);
    }
    json_object_foreach((json_t *)value, key, item) {
        ns_controls_of(item, tokenizer, out);
    }
}

bool
ns_validate_control(const char *text, size_t length, const char *spoken_of,
                    const struct ns_tokenizer *tokenizer,
                    struct ns_reason *reason)
{
    char name[LONGEST_CONTROL + 1];

    for (size_t i = 0; i < length; i++)
        if (control_at(text + i, length - i, tokenizer, name) &&
            !(spoken_of && strstr(spoken_of, name)))
            return turned_down(reason, "%s stands at byte %zu", name, i);
    return true;
}

bool
ns_validate_json(const char *text, size_t length, const json_t *schema,
                 struct ns_reason *reason)
{
    json_error_t at;
    json_t *value = json_loadb(text, length,
                               JSON_DECODE_ANY | JSON_REJECT_DUPLICATES |
                                   JSON_ALLOW_NUL,
                               &at);
    struct ns_error err;
    bool good = true;

    if (!value)
        return turned_down(reason, "not JSON at byte %d: %.120s", at.position,
                           at.text);
    if (schema && ns_schema_check(schema, value, &err) != NS_OK)
        good = turned_down(reason, "%.190s", err.text);
    json_decref(value);
    return good;
}
