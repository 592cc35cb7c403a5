#include "engine/grammar_json.h"

#include <stdlib.h>
#include <string.h>

#include "engine/grow.h"

static uint32_t
byte(struct ns_json_writer *w, char c, uint32_t next)
{
    return ns_program_range(w->p, (unsigned char)c, (unsigned char)c, next);
}

/* --- white space */

static uint32_t
make_rule(struct ns_json_writer *w, uint32_t first)
{
    uint32_t rule = ns_program_rule(w->p);

    ns_program_define(w->p, rule, first);
    return rule;
}

void
ns_json_writer_init(struct ns_json_writer *w, struct ns_program *p)
{
    uint32_t end = ns_program_end(p, NS_OP_RETURN), at = end;

    memset(w, 0, sizeof(*w));
    w->p = p;
    for (int i = 0; i < NS_JSON_INDENT; i++)
        at = ns_program_split(p, end, byte(w, ' ', at));
    at = ns_program_split(p, end, byte(w, '\n', at));
    w->line = make_rule(w, at);
    w->item = make_rule(w, ns_program_split(p, byte(w, ' ', end), at));
}

void
ns_json_writer_fini(struct ns_json_writer *w)
{
    free(w->class);
    free(w->range);
    ns_table_fini(&w->known);
}

uint32_t
ns_json_line(struct ns_json_writer *w, uint32_t next)
{
    return ns_program_call(w->p, w->line, next);
}

uint32_t
ns_json_comma(struct ns_json_writer *w, uint32_t next)
{
    return byte(w, ',', ns_program_call(w->p, w->item, next));
}

uint32_t
ns_json_colon(struct ns_json_writer *w, uint32_t next)
{
    return byte(w, ':', ns_program_split(w->p, next, byte(w, ' ', next)));
}

/* --- characters */

/* The letters behind a backslash, and what they mean. */
static const char short_escape[][2] = {
    { '"', '"' },  { '\\', '\\' }, { '/', '/' },  { 'b', '\b' },
    { 'f', '\f' }, { 'n', '\n' },  { 'r', '\r' }, { 't', '\t' },
};
enum { N_SHORT = sizeof(short_escape) / sizeof(*short_escape) };

static uint32_t
hex_digit(struct ns_program *p, uint32_t lead, uint32_t first, uint32_t last,
          uint32_t next)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    struct ns_byte_set set = { { 0 } };

    (void)lead;
    for (uint32_t i = first; i <= last; i++) {
        ns_byte_set_add(&set, (unsigned char)digits[i],
                        (unsigned char)digits[i]);
        if (i >= 10)
            ns_byte_set_add(&set, (unsigned char)digits[i + 6],
                            (unsigned char)digits[i + 6]);
    }
    return ns_program_set(p, &set, next);
}

/* \u and four digits. */
static uint32_t
hex_escape(struct ns_program *p, uint32_t first, uint32_t last, uint32_t next)
{
    static const struct ns_radix hex = { 4, 0, hex_digit };

    return ns_program_text(p, "\\u", 2,
                           ns_program_span(p, &hex, 0, first, last, 12, next));
}

/* Half of a pair: ten bits above `lead`. */
static uint32_t
surrogate(struct ns_program *p, uint32_t lead, uint32_t first, uint32_t last,
          uint32_t next)
{
    return hex_escape(p, lead + first, lead + last, next);
}

static bool
holds(const struct ns_range *range, size_t n, uint32_t code)
{
    for (size_t i = 0; i < n; i++)
        if (code >= range[i].first && code <= range[i].last)
            return true;
    return false;
}

/* Escapes of the code points first..last, as far as the spelling has them. */
static uint32_t
spell_hex(struct ns_json_writer *w, uint32_t first, uint32_t last,
          uint32_t next)
{
    static const struct ns_radix pair = { 10, 0xdc00, surrogate };
    static const struct ns_range part[] = { { 0x1, 0xd7ff },
                                            { 0xe000, 0xffff },
                                            { 0x10000, NS_LAST_CODE } };
    uint32_t at = NS_PROGRAM_FAIL;

    for (size_t i = 0; i < sizeof(part) / sizeof(*part); i++) {
        uint32_t from = first > part[i].first ? first : part[i].first;
        uint32_t to = last < part[i].last ? last : part[i].last;

        if (from > to)
            continue;
        if (from < 0x10000)
            at = ns_program_split(w->p, at, hex_escape(w->p, from, to, next));
        else
            at = ns_program_split(w->p, at,
                                  ns_program_span(w->p, &pair, 0xd800,
                                                  from - 0x10000, to - 0x10000,
                                                  10, next));
    }
    return at;
}

/* Every way to write one of these code points. */
static uint32_t
spell_class(struct ns_json_writer *w, const struct ns_range *range, size_t n,
            uint32_t next)
{
    /* What stands for itself: all but controls, quote and backslash. */
    static const struct ns_range plain[] = { { 0x20, 0x21 },
                                             { 0x23, 0x5b },
                                             { 0x5d, NS_LAST_CODE } };
    struct ns_byte_set letter = { { 0 } };
    bool shortest = w->spelling == NS_SPELL_SHORTEST, any_letter = false;
    uint32_t at = NS_PROGRAM_FAIL;

    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < sizeof(plain) / sizeof(*plain); k++) {
            struct ns_range both = range[i];

            if (both.first < plain[k].first)
                both.first = plain[k].first;
            if (both.last > plain[k].last)
                both.last = plain[k].last;
            if (both.first <= both.last)
                at = ns_program_split(w->p, at,
                                      ns_program_utf8(w->p, &both, 1, next));
        }
    for (size_t i = 0; i < N_SHORT; i++) {
        unsigned char c = (unsigned char)short_escape[i][0];

        if (!holds(range, n, (unsigned char)short_escape[i][1]) ||
            (shortest && c == '/'))
            continue;
        ns_byte_set_add(&letter, c, c);
        any_letter = true;
    }
    if (any_letter)
        at = ns_program_split(
            w->p, at, byte(w, '\\', ns_program_set(w->p, &letter, next)));
    for (size_t i = 0; i < n; i++) {
        uint32_t code = range[i].first, last = range[i].last;

        if (!shortest) {
            at = ns_program_split(w->p, at, spell_hex(w, code, last, next));
            continue;
        }
        for (; code <= last && code < 0x20; code++) {
            bool has_letter = false;

            for (size_t k = 0; k < N_SHORT; k++)
                has_letter |= (unsigned char)short_escape[k][1] == code;
            if (!has_letter)
                at = ns_program_split(w->p, at, spell_hex(w, code, code, next));
        }
    }
    return at;
}

/* The rule that spells this class; made when it is first asked for. False
 * when the program has failed. */
static bool
class_rule(struct ns_json_writer *w, const struct ns_range *range, uint32_t n,
           uint32_t *rule)
{
    uint32_t number,
        hash = ns_table_hash(range, n * sizeof(*range)) + w->spelling;
    struct ns_json_class *class;
    struct ns_range *ranges;
    size_t i;

    for (i = ns_table_first(&w->known, hash);
         (number = ns_table_at(&w->known, &i, hash)) != 0;) {
        class = &w->class[number - 1];
        if (class->n == n && class->spelling == w->spelling &&
            memcmp(w->range + class->first, range, n * sizeof(*range)) == 0) {
            *rule = class->rule;
            return true;
        }
    }
    if (!ns_program_step(w->p))
        return false;
    class = ns_grown(w->class, w->n_classes + 1, &w->class_capacity,
                     sizeof(*class));
    if (class)
        w->class = class;
    ranges = ns_grown(w->range, w->n_ranges + n, &w->range_capacity,
                      sizeof(*ranges));
    if (ranges)
        w->range = ranges;
    if (!class || !ranges || !ns_table_reserve(&w->known)) {
        ns_program_no_memory(w->p);
        return false;
    }
    memcpy(w->range + w->n_ranges, range, n * sizeof(*range));
    *rule = make_rule(
        w, spell_class(w, range, n, ns_program_end(w->p, NS_OP_RETURN)));
    w->class[w->n_classes++] =
        (struct ns_json_class){ w->n_ranges, n, *rule, w->spelling };
    w->n_ranges += n;
    ns_table_put(&w->known, hash, w->n_classes);
    return true;
}

static uint32_t
spell(void *with, struct ns_program *p, const struct ns_range *range, size_t n,
      uint32_t next)
{
    struct ns_json_writer *w = with;
    uint32_t rule;

    /* One letter that is always spelled by itself needs no rule. */
    if (n == 1 && range[0].first == range[0].last && range[0].first < 0x80 &&
        w->spelling == NS_SPELL_SHORTEST)
        return spell_class(w, range, n, next);
    return class_rule(w, range, (uint32_t)n, &rule)
               ? ns_program_call(p, rule, next)
               : NS_PROGRAM_FAIL;
}

/* --- values */

uint32_t
ns_json_string(struct ns_json_writer *w, const struct ns_language *language,
               enum ns_spelling spelling, uint32_t next)
{
    w->spelling = spelling;
    return byte(
        w, '"',
        ns_language_write(language, w->p, spell, w, byte(w, '"', next)));
}

uint32_t
ns_json_scalar(struct ns_json_writer *w, const json_t *value, uint32_t next)
{
    char *text = ns_json_spell(value);

    if (!text) {
        ns_program_no_memory(w->p);
        return NS_PROGRAM_FAIL;
    }
    next = ns_program_text(w->p, text, strlen(text), next);
    free(text);
    return next;
}

uint32_t
ns_json_text(struct ns_json_writer *w, const char *text, uint32_t next)
{
    json_t *value = json_string(text);

    if (!value) {
        ns_program_no_memory(w->p);
        return NS_PROGRAM_FAIL;
    }
    next = ns_json_scalar(w, value, next);
    json_decref(value);
    return next;
}

char *
ns_json_spell(const json_t *value)
{
    char number[NS_NUMBER_TEXT];

    if (json_is_number(value))
        return strdup(ns_number_text(value, number));
    return json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
}

static uint32_t
write_items(struct ns_json_writer *w, const json_t *list, uint32_t next)
{
    size_t n = json_array_size(list);

    if (n == 0)
        return ns_program_text(w->p, "[]", 2, next);
    next = ns_json_line(w, byte(w, ']', next));
    while (n > 0) {
        next = ns_json_value(w, json_array_get(list, --n), next);
        next = n > 0 ? ns_json_comma(w, next) : ns_json_line(w, next);
    }
    return byte(w, '[', next);
}

/* Members in the order of the object; programs are built from the end. */
static uint32_t
write_members(struct ns_json_writer *w, json_t *object, uint32_t next)
{
    size_t n = json_object_size(object), i = 0;
    const char **name;
    void *iter;

    if (n == 0)
        return ns_program_text(w->p, "{}", 2, next);
    name = malloc(n * sizeof(*name));
    if (!name) {
        ns_program_no_memory(w->p);
        return NS_PROGRAM_FAIL;
    }
    for (iter = json_object_iter(object); iter;
         iter = json_object_iter_next(object, iter))
        name[i++] = json_object_iter_key(iter);
    next = ns_json_line(w, byte(w, '}', next));
    while (n > 0) {
        const char *key = name[--n];

        next = ns_json_value(w, json_object_get(object, key), next);
        next = ns_json_text(w, key, ns_json_colon(w, next));
        next = n > 0 ? ns_json_comma(w, next) : ns_json_line(w, next);
    }
    free(name);
    return byte(w, '{', next);
}

uint32_t
ns_json_value(struct ns_json_writer *w, const json_t *value, uint32_t next)
{
    if (!ns_program_step(w->p))
        return NS_PROGRAM_FAIL;
    if (json_is_array(value))
        return write_items(w, value, next);
    if (json_is_object(value)) /* jansson's iterators want it without const */
        return write_members(w, (json_t *)value, next);
    return ns_json_scalar(w, value, next);
}
