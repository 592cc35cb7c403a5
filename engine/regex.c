#include "engine/regex.h"

#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/grow.h"
#include "engine/ranges.h"

enum kind { EMPTY, CLASS, CONCAT, ALTERNATE, REPEAT, ANCHOR };
#define NONE     UINT32_MAX
#define NO_LIMIT UINT32_MAX

/* A node's children are a list from the last to the first, as programs are
 * built; a class has ranges, a repetition one child. */
struct node {
    enum kind kind;
    uint32_t child, before; /* before: the sibling on its left, or NONE */
    uint32_t first, n;      /* CLASS: its ranges */
    uint32_t least, most;   /* REPEAT */
    enum ns_op anchor;      /* ANCHOR */
};

struct ns_regex {
    struct node *node;
    struct ns_ranges ranges; /* of all classes */
    uint32_t n_nodes, node_capacity, root;
    uint32_t n_properties;
};

struct parser {
    struct ns_regex *regex;
    const char *begin, *at, *end;
    unsigned depth;
    struct ns_error *err;
    enum ns_status status; /* the first failure */
};

/* --- the reader. A function returns a node, or NONE once it has failed. */

static uint32_t
refuse(struct parser *in, const char *code, const char *what)
{
    if (in->status == NS_OK)
        in->status = ns_refuse(in->err, code, NULL, "pattern, byte %zu: %s",
                               (size_t)(in->at - in->begin), what);
    return NONE;
}

static void
no_memory(struct parser *in)
{
    if (in->status == NS_OK)
        in->status =
            ns_fail(in->err, NS_FATAL, "out of memory reading a pattern");
}

static uint32_t
make(struct parser *in, enum kind kind, uint32_t child)
{
    struct ns_regex *regex = in->regex;
    struct node *moved = ns_grown(regex->node, regex->n_nodes + 1,
                                  &regex->node_capacity, sizeof(*moved));

    if (!moved) {
        no_memory(in);
        return NONE;
    }
    regex->node = moved;
    regex->node[regex->n_nodes] =
        (struct node){ .kind = kind, .child = child, .before = NONE };
    return regex->n_nodes++;
}

static bool
more(const struct parser *in)
{
    return in->status == NS_OK && in->at < in->end;
}

static bool
take(struct parser *in, char byte)
{
    if (!more(in) || *in->at != byte)
        return false;
    in->at++;
    return true;
}

static bool
take_text(struct parser *in, const char *text)
{
    size_t length = strlen(text);

    if (in->status != NS_OK || (size_t)(in->end - in->at) < length ||
        memcmp(in->at, text, length) != 0)
        return false;
    in->at += length;
    return true;
}

/* --- classes */

static uint32_t
hex(struct parser *in, unsigned n)
{
    uint32_t code = 0;

    for (unsigned i = 0; i < n; i++) {
        char c = more(in) ? *in->at : 0;
        char lower = (char)(c | 0x20);

        if (c >= '0' && c <= '9')
            code = code << 4 | (uint32_t)(c - '0');
        else if (lower >= 'a' && lower <= 'f')
            code = code << 4 | (uint32_t)(lower - 'a' + 10);
        else
            return refuse(in, "bad_param", "hex digits are missing");
        in->at++;
    }
    return code;
}

/* Behind \u: four digits, two times four of a surrogate pair, or {digits}. */
static uint32_t
take_unicode(struct parser *in)
{
    uint32_t code, low;

    if (take(in, '{')) {
        unsigned n = 0;

        while (in->at + n < in->end && in->at[n] != '}' && n <= 6)
            n++;
        code = n >= 1 && n <= 6 ? hex(in, n) : NS_LAST_CODE + 1;
        if (!take(in, '}') || code > NS_LAST_CODE)
            return refuse(in, "bad_param", "\\u{...} is no code point");
        return code;
    }
    code = hex(in, 4);
    if (in->status != NS_OK || code < 0xd800 || code > 0xdfff)
        return code;
    if (code > 0xdbff || !take_text(in, "\\u"))
        return refuse(in, "bad_param", "half a surrogate pair");
    low = hex(in, 4);
    if (in->status == NS_OK && (low < 0xdc00 || low > 0xdfff))
        return refuse(in, "bad_param", "half a surrogate pair");
    return 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
}

static uint32_t
take_character(struct parser *in)
{
    uint32_t code = 0;

    /* The whole pattern is UTF-8: ns_regex_parse has looked. */
    in->at += ns_utf8_char(in->at, (size_t)(in->end - in->at), &code);
    return code;
}

/* Behind \p or \P: {L}, {Letter}, {gc=Lu}, {Script=Greek}. */
static void
take_property(struct parser *in, bool all_but)
{
    uint32_t from = in->regex->ranges.n;
    const char *name = in->at, *end;

    if (!take(in, '{')) {
        refuse(in, "bad_param", "\\p wants a name in braces");
        return;
    }
    name = in->at;
    end = memchr(name, '}', (size_t)(in->end - name));
    if (!end) {
        refuse(in, "bad_param", "\\p wants a name in braces");
        return;
    }
    if (in->regex->n_properties++ == NS_REGEX_PROPERTIES) {
        refuse(in, "grammar_limit", "more than 8 properties of Unicode");
        return;
    }
    if (!ns_ranges_property(&in->regex->ranges, name, (size_t)(end - name))) {
        refuse(in, "unsupported", "a property of Unicode that is not known");
        return;
    }
    in->at = end + 1;
    if (all_but && in->status == NS_OK)
        ns_ranges_complement(&in->regex->ranges, from);
}

/* Behind a backslash, what stands for a class of its own. Takes nothing
 * of anything else. */
static bool
take_class_escape(struct parser *in)
{
    if (take(in, 'p') || take(in, 'P')) {
        take_property(in, in->at[-1] == 'P');
        return true;
    }
    if (!more(in) || !ns_ranges_shorthand(&in->regex->ranges, *in->at))
        return false;
    in->at++;
    return true;
}

/* Behind a backslash, what stands for one character. */
static uint32_t
take_escape(struct parser *in)
{
    char c = more(in) ? *in->at : 0;

    if (c == 0)
        return refuse(in, "bad_param", "it ends in a backslash");
    in->at++;
    switch (c) {
    case 't':
        return '\t';
    case 'n':
        return '\n';
    case 'v':
        return '\v';
    case 'f':
        return '\f';
    case 'r':
        return '\r';
    case 'x':
        return hex(in, 2);
    case 'u':
        return take_unicode(in);
    case 'c':
        c = more(in) ? (char)(*in->at | 0x20) : 0;
        if (c < 'a' || c > 'z')
            return refuse(in, "bad_param", "\\c wants a letter");
        in->at++;
        return (uint32_t)(c - 'a' + 1);
    case '0':
        if (more(in) && *in->at >= '0' && *in->at <= '9')
            return refuse(in, "unsupported", "an octal escape");
        return 0;
    case 'b':
    case 'B':
        return refuse(in, "unsupported", "a word boundary");
    case 'k':
        return refuse(in, "unsupported", "a reference back");
    default:
        break;
    }
    if (c >= '1' && c <= '9')
        return refuse(in, "unsupported", "a reference back");
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        return refuse(in, "bad_param", "an escape that has no meaning");
    in->at--; /* any other character, of as many bytes as it has, is itself */
    return take_character(in);
}

/* One end of a range, or a whole shorthand: then *whole. */
static uint32_t
class_atom(struct parser *in, bool *whole)
{
    *whole = false;
    if (!take(in, '\\'))
        return take_character(in);
    if (take(in, 'b'))
        return '\b';
    if (take_class_escape(in)) {
        *whole = true;
        return 0;
    }
    return take_escape(in);
}

static void
class_body(struct parser *in)
{
    while (more(in) && *in->at != ']') {
        bool whole, whole_last;
        uint32_t first = class_atom(in, &whole), last;

        if (in->status != NS_OK)
            return;
        if (in->end - in->at < 2 || *in->at != '-' || in->at[1] == ']') {
            if (!whole)
                ns_ranges_add(&in->regex->ranges, first, first);
            continue;
        }
        in->at++;
        last = class_atom(in, &whole_last);
        if (in->status != NS_OK)
            return;
        if (whole || whole_last || last < first) {
            refuse(in, "bad_param", "a range that has no order");
            return;
        }
        ns_ranges_add(&in->regex->ranges, first, last);
    }
    if (!take(in, ']'))
        refuse(in, "bad_param", "a class is not closed");
}

/* Makes a node of the ranges behind `from`. */
static uint32_t
make_class(struct parser *in, uint32_t from)
{
    struct ns_ranges *ranges = &in->regex->ranges;
    uint32_t at = in->status == NS_OK ? make(in, CLASS, NONE) : NONE;

    if (at == NONE)
        return NONE;
    if (ranges->failed) {
        no_memory(in);
        return NONE;
    }
    ns_ranges_join(ranges, from);
    in->regex->node[at].first = from;
    in->regex->node[at].n = ranges->n - from;
    return at;
}

/* --- terms */

static uint32_t parse_alternatives(struct parser *in);

static uint32_t
parse_group(struct parser *in)
{
    uint32_t at;

    if (take_text(in, "?=") || take_text(in, "?!") || take_text(in, "?<=") ||
        take_text(in, "?<!"))
        return refuse(in, "unsupported", "look-around");
    if (take_text(in, "?<")) {
        while (more(in) && *in->at != '>')
            in->at++;
        if (!take(in, '>'))
            return refuse(in, "bad_param", "a group's name is not closed");
    } else if (take(in, '?') && !take(in, ':')) {
        return refuse(in, "unsupported", "a group of this kind");
    }
    if (++in->depth > NS_REGEX_DEPTH)
        return refuse(in, "grammar_limit", "groups are nested deeper than 64");
    at = parse_alternatives(in);
    in->depth--;
    if (!take(in, ')'))
        return refuse(in, "bad_param", "a group is not closed");
    return at;
}

static uint32_t
parse_atom(struct parser *in)
{
    static const struct ns_range newline[] = { { '\n', '\n' },
                                               { '\r', '\r' },
                                               { 0x2028, 0x2029 } };
    uint32_t from = in->regex->ranges.n, at, code;

    if (take(in, '('))
        return parse_group(in);
    if (take(in, '^') || take(in, '$')) {
        at = make(in, ANCHOR, NONE);
        if (at != NONE)
            in->regex->node[at].anchor =
                in->at[-1] == '^' ? NS_OP_BEGIN : NS_OP_END;
        return at;
    }
    if (take(in, '.')) {
        for (size_t i = 0; i < sizeof(newline) / sizeof(*newline); i++)
            ns_ranges_add(&in->regex->ranges, newline[i].first,
                          newline[i].last);
        ns_ranges_complement(&in->regex->ranges, from);
        return make_class(in, from);
    }
    if (take(in, '[')) {
        bool all_but = take(in, '^');

        class_body(in);
        if (all_but && in->status == NS_OK)
            ns_ranges_complement(&in->regex->ranges, from);
        return make_class(in, from);
    }
    if (strchr("*+?", *in->at))
        return refuse(in, "bad_param", "there is nothing to repeat");
    if (take(in, '\\')) {
        if (take_class_escape(in))
            return make_class(in, from);
        code = take_escape(in);
        if (in->status != NS_OK)
            return NONE;
    } else {
        code = take_character(in);
    }
    ns_ranges_add(&in->regex->ranges, code, code);
    return make_class(in, from);
}

/* A number of at most NS_REGEX_REPEAT; false where there is no digit. */
static bool
take_count(struct parser *in, uint32_t *count)
{
    const char *begin = in->at;

    *count = 0;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9') {
        if (*count <= NS_REGEX_REPEAT)
            *count = 10 * *count + (uint32_t)(*in->at - '0');
        in->at++;
    }
    return in->at > begin;
}

/* {m}, {m,} or {m,n}; anything else behind a brace is text, as browsers have
 * it. */
static bool
take_braces(struct parser *in, uint32_t *least, uint32_t *most)
{
    const char *begin = in->at;
    bool known = take(in, '{') && take_count(in, least);

    *most = *least;
    if (known && take(in, ',') && !take_count(in, most))
        *most = NO_LIMIT;
    if (!known || !take(in, '}')) {
        in->at = begin;
        return false;
    }
    if (*least > NS_REGEX_REPEAT ||
        (*most > NS_REGEX_REPEAT && *most != NO_LIMIT))
        refuse(in, "grammar_limit", "a repeat count is larger than 65536");
    else if (*most < *least)
        refuse(in, "bad_param", "a repetition that has no order");
    return true;
}

static uint32_t
parse_term(struct parser *in)
{
    uint32_t atom = parse_atom(in), at, least, most;

    if (atom == NONE)
        return NONE;
    if (take(in, '*'))
        least = 0, most = NO_LIMIT;
    else if (take(in, '+'))
        least = 1, most = NO_LIMIT;
    else if (take(in, '?'))
        least = 0, most = 1;
    else if (!take_braces(in, &least, &most))
        return in->status == NS_OK ? atom : NONE;
    if (in->status != NS_OK)
        return NONE;
    if (in->regex->node[atom].kind == ANCHOR)
        return refuse(in, "bad_param", "an anchor is repeated");
    take(in, '?'); /* lazy or not, the texts are the same */
    at = make(in, REPEAT, atom);
    if (at == NONE)
        return NONE;
    in->regex->node[at].least = least;
    in->regex->node[at].most = most;
    return at;
}

static uint32_t
parse_sequence(struct parser *in)
{
    uint32_t last = NONE, n = 0;

    while (more(in) && *in->at != '|' && *in->at != ')') {
        uint32_t term = parse_term(in);

        if (term == NONE)
            return NONE;
        in->regex->node[term].before = last;
        last = term;
        n++;
    }
    if (in->status != NS_OK)
        return NONE;
    if (n == 1)
        return last;
    return make(in, n ? CONCAT : EMPTY, last);
}

static uint32_t
parse_alternatives(struct parser *in)
{
    uint32_t last = NONE, n = 0;

    do {
        uint32_t sequence = parse_sequence(in);

        if (sequence == NONE)
            return NONE;
        in->regex->node[sequence].before = last;
        last = sequence;
        n++;
    } while (take(in, '|'));
    return n == 1 ? last : make(in, ALTERNATE, last);
}

enum ns_status
ns_regex_parse(const char *pattern, size_t length, struct ns_regex **out,
               struct ns_error *err)
{
    struct parser in = { .begin = pattern,
                         .at = pattern,
                         .end = pattern + length,
                         .err = err,
                         .status = NS_OK };

    if (length > NS_REGEX_BYTES)
        return ns_refuse(err, "grammar_limit", NULL,
                         "the pattern has %zu bytes, limit %d", length,
                         NS_REGEX_BYTES);
    if (ns_utf8_span(pattern, length) != length || memchr(pattern, 0, length))
        return ns_refuse(err, "bad_param", NULL,
                         "the pattern is not text in UTF-8");
    in.regex = calloc(1, sizeof(*in.regex));
    if (!in.regex)
        return ns_fail(err, NS_FATAL, "out of memory reading a pattern");
    in.regex->root = parse_alternatives(&in);
    if (in.status == NS_OK && in.at < in.end)
        refuse(&in, "bad_param", "a group is closed that was not opened");
    if (in.status != NS_OK) {
        ns_regex_destroy(in.regex);
        return in.status;
    }
    *out = in.regex;
    return NS_OK;
}

uint64_t
ns_regex_steps(const struct ns_regex *regex)
{
    return regex->n_properties * (uint64_t)NS_LAST_CODE;
}

void
ns_regex_destroy(struct ns_regex *regex)
{
    if (!regex)
        return;
    free(regex->node);
    ns_ranges_fini(&regex->ranges);
    free(regex);
}

/* --- into programs */

struct writer {
    const struct ns_regex *regex;
    struct ns_program *p;
    bool bytes;  /* else code points */
    bool inside; /* an anchor stands where it is not at an end */
};

static uint32_t
write_class(struct writer *w, const struct node *node, uint32_t next)
{
    const struct ns_range *range = w->regex->ranges.at + node->first;
    uint32_t at = NS_PROGRAM_FAIL;

    if (w->bytes)
        return ns_program_utf8(w->p, range, node->n, next);
    for (uint32_t i = node->n; i > 0; i--)
        at = ns_program_split(
            w->p,
            ns_program_range(w->p, range[i - 1].first, range[i - 1].last, next),
            at);
    return at;
}

/* `begins` and `ends`: nothing can stand before or behind what is written
 * here. */
static uint32_t
write_node(struct writer *w, uint32_t at, bool begins, bool ends, uint32_t next)
{
    const struct node *node = &w->regex->node[at];
    uint32_t child, first = NS_PROGRAM_FAIL;

    if (!ns_program_step(w->p))
        return NS_PROGRAM_FAIL;
    switch (node->kind) {
    case EMPTY:
        return next;
    case CLASS:
        return write_class(w, node, next);
    case ANCHOR:
        if (!w->bytes)
            return ns_program_anchor(w->p, node->anchor, next);
        if (node->anchor == NS_OP_BEGIN ? !begins : !ends)
            w->inside = true;
        return next;
    case ALTERNATE:
        for (child = node->child; child != NONE;
             child = w->regex->node[child].before)
            first = ns_program_split(
                w->p, write_node(w, child, begins, ends, next), first);
        return first;
    case CONCAT:
        for (child = node->child; child != NONE;) {
            uint32_t before = w->regex->node[child].before;

            /* ^^a and a$$ are odd, and right, but not worth the words. */
            next = write_node(w, child, begins && before == NONE,
                              ends && child == node->child, next);
            child = before;
        }
        return next;
    case REPEAT:
        break;
    }
    child = node->child;
    if (node->most == NO_LIMIT) {
        uint32_t loop = ns_program_loop(w->p, next);

        ns_program_close(w->p, loop, write_node(w, child, false, false, loop));
        next = loop;
    } else {
        uint32_t leave = next;

        for (uint32_t i = node->least; i < node->most; i++)
            next = ns_program_split(
                w->p, write_node(w, child, false, false, next), leave);
    }
    for (uint32_t i = 0; i < node->least; i++)
        next = write_node(w, child, false, false, next);
    return next;
}

enum ns_status
ns_regex_bytes(const struct ns_regex *regex, struct ns_program *p,
               uint32_t next, uint32_t *out, struct ns_error *err)
{
    struct writer w = { .regex = regex, .p = p, .bytes = true };
    uint32_t first = write_node(&w, regex->root, true, true, next);

    if (w.inside)
        return ns_refuse(err, "unsupported", NULL,
                         "pattern: ^ or $ inside, where it could change "
                         "what matches");
    *out = first;
    return NS_OK;
}

uint32_t
ns_regex_code_points(const struct ns_regex *regex, struct ns_program *p,
                     uint32_t next)
{
    struct writer w = { .regex = regex, .p = p };

    return write_node(&w, regex->root, true, true, next);
}
