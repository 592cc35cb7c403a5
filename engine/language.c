#include "engine/language.h"

#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/grow.h"
#include "engine/regex.h"
#include "engine/table.h"

enum { N_CODES = NS_LAST_CODE + 1 };

/* Every state has a way for every code point; one of them may be a sink. */
struct ns_language {
    uint32_t *bound; /* the first code point of each class */
    uint32_t *to;    /* per state and class */
    bool *accepts;
    uint32_t n_classes, n_states; /* state 0 is the first */
};

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for a set of strings");
}

static uint32_t
class_of(const struct ns_language *l, uint32_t code)
{
    uint32_t low = 0, high = l->n_classes;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (l->bound[middle] <= code)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int
by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

/* Sorts the bounds, joins equal ones, drops what lies behind the last code. */
static uint32_t
settle(uint32_t *bound, uint32_t n)
{
    uint32_t kept = 0;

    qsort(bound, n, sizeof(*bound), by_number);
    for (uint32_t i = 0; i < n && bound[i] < N_CODES; i++)
        if (kept == 0 || bound[i] != bound[kept - 1])
            bound[kept++] = bound[i];
    return kept;
}

static enum ns_status
check_work(const struct ns_languages *in, struct ns_error *err)
{
    if (in->n_steps <= NS_LANGUAGE_STEPS)
        return NS_OK;
    return ns_refuse(err, "grammar_limit", NULL,
                     "patterns and names together take more than %d steps",
                     NS_LANGUAGE_STEPS);
}

/* Room for state number n_states; its ways are not set yet. */
static enum ns_status
add_state(struct ns_language *l, struct ns_error *err)
{
    uint32_t n = l->n_states, *to;
    bool *accepts;

    if (n >= NS_LANGUAGE_STATES ||
        (n + 1ull) * l->n_classes > NS_LANGUAGE_CELLS)
        return ns_refuse(err, "grammar_limit", NULL,
                         "a set of strings needs more than %u states",
                         (unsigned)n);
    if ((n & (n - 1)) == 0) { /* a power of two: the arrays are full */
        size_t capacity = n ? 2 * (size_t)n : 1;

        to = realloc(l->to, capacity * l->n_classes * sizeof(*to));
        if (!to)
            return no_memory(err);
        l->to = to;
        accepts = realloc(l->accepts, capacity * sizeof(*accepts));
        if (!accepts)
            return no_memory(err);
        l->accepts = accepts;
    }
    l->n_states++;
    return NS_OK;
}

void
ns_language_destroy(struct ns_language *l)
{
    if (!l)
        return;
    free(l->bound);
    free(l->to);
    free(l->accepts);
    free(l);
}

/* --- from a program over code points: sets of its places become states */

struct subset {
    struct ns_languages *in;
    const struct ns_program *p;
    struct ns_language *l;
    struct ns_table states;
    uint32_t *pool, n_pool, pool_capacity; /* places of all states */
    uint32_t *begin;                       /* per state, and one behind */
    uint32_t begin_capacity;
    uint32_t *seen, *todo, n_todo, round;
    uint32_t absorbing; /* a place from where all is accepted, or FAIL */
};

static bool
grow(uint32_t **array, uint32_t needed, uint32_t *capacity)
{
    uint32_t *moved = ns_grown(*array, needed, capacity, sizeof(*moved));

    if (moved)
        *array = moved;
    return moved != NULL;
}

static void
visit(struct subset *s, uint32_t at)
{
    if (s->seen[at] == s->round)
        return;
    s->seen[at] = s->round;
    s->todo[s->n_todo++] = at;
}

/* Follows what takes no code point; the places that are left are put behind
 * the pool. Through `begins` only where nothing stands before, through `ends`
 * only where nothing follows, and then only to see whether *matches. */
static bool
follow(struct subset *s, bool begins, bool ends, bool *matches)
{
    while (s->n_todo > 0) {
        uint32_t at = s->todo[--s->n_todo];
        const struct ns_instruction *in = ns_program_at(s->p, at);

        s->in->n_steps++;
        switch (in->op) {
        case NS_OP_SPLIT:
            visit(s, in->a);
            visit(s, in->b);
            continue;
        case NS_OP_BEGIN:
            if (begins)
                visit(s, in->next);
            continue;
        case NS_OP_END:
            if (ends)
                visit(s, in->next);
            break;
        case NS_OP_FAIL:
            continue;
        case NS_OP_MATCH:
            *matches = true;
            break;
        default:
            break;
        }
        if (ends)
            continue;
        if (s->n_pool >= NS_LANGUAGE_CELLS ||
            !grow(&s->pool, s->n_pool + 1, &s->pool_capacity))
            return false;
        s->pool[s->n_pool++] = at;
    }
    return true;
}

/* The state of the places behind the pool: one that is there, or a new one. */
static enum ns_status
intern(struct subset *s, bool begins, uint32_t *state, struct ns_error *err)
{
    uint32_t first = s->begin[s->l->n_states], n = s->n_pool - first, hash;
    uint32_t *set = s->pool + first, number;
    bool matches = false;
    enum ns_status status;
    size_t i;

    if (s->absorbing != NS_PROGRAM_FAIL && s->seen[s->absorbing] == s->round) {
        set[0] = s->absorbing;
        n = 1;
    }
    qsort(set, n, sizeof(*set), by_number);
    s->n_pool = first;
    hash = ns_table_hash(set, n * sizeof(*set));
    for (i = ns_table_first(&s->states, hash);
         (number = ns_table_at(&s->states, &i, hash)) != 0;) {
        uint32_t from = s->begin[number - 1];

        if (s->begin[number] - from == n &&
            memcmp(s->pool + from, set, n * sizeof(*set)) == 0) {
            *state = number - 1;
            return NS_OK;
        }
    }
    number = s->l->n_states;
    status = add_state(s->l, err);
    if (status != NS_OK)
        return status;
    if (!ns_table_reserve(&s->states) ||
        !grow(&s->begin, number + 2, &s->begin_capacity))
        return no_memory(err);
    ns_table_put(&s->states, hash, number + 1);
    s->n_pool = s->begin[number + 1] = first + n;
    /* What ends here: the places again, now through $ as well. */
    s->round++;
    for (uint32_t k = first; k < first + n; k++)
        visit(s, s->pool[k]);
    follow(s, begins, true, &matches);
    s->l->accepts[number] =
        matches || (n == 1 && s->pool[first] == s->absorbing);
    *state = number;
    return NS_OK;
}

static enum ns_status
step(struct subset *s, uint32_t state, uint32_t class, struct ns_error *err)
{
    uint32_t code = s->l->bound[class], to = 0;
    bool matches = false;
    enum ns_status status;

    s->round++;
    for (uint32_t i = s->begin[state]; i < s->begin[state + 1]; i++) {
        const struct ns_instruction *in = ns_program_at(s->p, s->pool[i]);

        s->in->n_steps++;
        if (in->op == NS_OP_RANGE && code >= in->a && code <= in->b)
            visit(s, in->next);
    }
    if (!follow(s, false, false, &matches))
        return s->n_pool >= NS_LANGUAGE_CELLS
                   ? ns_refuse(err, "grammar_limit", NULL,
                               "a set of strings needs more than %d places",
                               NS_LANGUAGE_CELLS)
                   : no_memory(err);
    status = check_work(s->in, err);
    if (status != NS_OK)
        return status;
    status = intern(s, false, &to, err);
    if (status == NS_OK)
        s->l->to[(size_t)state * s->l->n_classes + class] = to;
    return status;
}

/* Code points that no range tells apart are one class. */
static bool
find_bounds(struct subset *s)
{
    uint32_t n_code = ns_program_size(s->p), n = 0;

    s->l->bound = malloc((2 * (size_t)n_code + 1) * sizeof(*s->l->bound));
    if (!s->l->bound)
        return false;
    s->l->bound[n++] = 0;
    for (uint32_t at = 0; at < n_code; at++) {
        const struct ns_instruction *in = ns_program_at(s->p, at);

        if (in->op != NS_OP_RANGE)
            continue;
        s->l->bound[n++] = in->a;
        s->l->bound[n++] = in->b + 1;
    }
    s->l->n_classes = settle(s->l->bound, n);
    return true;
}

static enum ns_status
determinise(struct ns_languages *in, const struct ns_program *p, uint32_t start,
            uint32_t absorbing, struct ns_language **out, struct ns_error *err)
{
    size_t n_code = ns_program_size(p);
    struct subset s = { .in = in, .p = p, .absorbing = absorbing, .round = 1 };
    enum ns_status status = ns_program_check(p, err);
    bool matches = false;
    uint32_t state;

    in->n_steps += ns_program_steps(p);
    if (status != NS_OK)
        return status;
    s.l = calloc(1, sizeof(*s.l));
    s.seen = calloc(2 * n_code, sizeof(*s.seen));
    if (!s.l || !s.seen || !find_bounds(&s) ||
        !grow(&s.begin, 1, &s.begin_capacity) ||
        !grow(&s.pool, 1, &s.pool_capacity)) {
        status = no_memory(err);
        goto out;
    }
    s.todo = s.seen + n_code;
    s.begin[0] = 0;
    visit(&s, start);
    if (!follow(&s, true, false, &matches)) {
        status = no_memory(err);
        goto out;
    }
    status = intern(&s, true, &state, err);
    for (state = 0; status == NS_OK && state < s.l->n_states; state++)
        for (uint32_t c = 0; status == NS_OK && c < s.l->n_classes; c++)
            status = step(&s, state, c, err);
    if (status == NS_OK) {
        *out = s.l;
        s.l = NULL;
    }
out:
    ns_language_destroy(s.l);
    ns_table_fini(&s.states);
    free(s.pool);
    free(s.begin);
    free(s.seen);
    return status;
}

static enum ns_status
begin_program(struct ns_program **out, struct ns_error *err)
{
    *out = ns_program_create();
    return *out ? NS_OK : no_memory(err);
}

static enum ns_status
make_pattern(struct ns_languages *in, const char *pattern, size_t length,
             struct ns_language **out, struct ns_error *err)
{
    struct ns_program *p = NULL;
    struct ns_regex *regex;
    enum ns_status status = ns_regex_parse(pattern, length, &regex, err);
    uint32_t before, behind, any, first;

    if (status != NS_OK)
        return status;
    in->n_steps += ns_regex_steps(regex);
    status = begin_program(&p, err);
    if (status != NS_OK)
        goto out;
    /* It may stand anywhere: any text before it, any behind. */
    behind = ns_program_loop(p, ns_program_end(p, NS_OP_MATCH));
    any = ns_program_range(p, 0, N_CODES - 1, behind);
    ns_program_close(p, behind, any);
    first = ns_regex_code_points(regex, p, behind);
    before = ns_program_loop(p, first);
    ns_program_close(p, before, ns_program_range(p, 0, N_CODES - 1, before));
    status = determinise(in, p, before, any, out, err);
out:
    ns_program_destroy(p);
    ns_regex_destroy(regex);
    return status;
}

enum ns_status
ns_language_pattern(struct ns_languages *in, const char *pattern, size_t length,
                    const struct ns_language **out, struct ns_error *err)
{
    uint32_t hash = ns_table_hash(pattern, length), number;
    struct ns_kept_language one = { NULL, NULL }, *moved;
    enum ns_status status;
    size_t i;

    for (i = ns_table_first(&in->known, hash);
         (number = ns_table_at(&in->known, &i, hash)) != 0;)
        if (strcmp(in->kept[number - 1].pattern, pattern) == 0) {
            *out = in->kept[number - 1].language;
            return NS_OK;
        }
    moved = ns_grown(in->kept, in->n + 1, &in->capacity, sizeof(*moved));
    if (!moved)
        return no_memory(err);
    in->kept = moved;
    one.pattern = strndup(pattern, length);
    if (!one.pattern || !ns_table_reserve(&in->known)) {
        free(one.pattern);
        return no_memory(err);
    }
    status = make_pattern(in, pattern, length, &one.language, err);
    if (status != NS_OK) {
        free(one.pattern);
        return status;
    }
    in->kept[in->n++] = one;
    ns_table_put(&in->known, hash, in->n);
    *out = one.language;
    return NS_OK;
}

void
ns_languages_fini(struct ns_languages *in)
{
    for (uint32_t i = 0; i < in->n; i++) {
        free(in->kept[i].pattern);
        ns_language_destroy(in->kept[i].language);
    }
    free(in->kept);
    ns_table_fini(&in->known);
}

enum ns_status
ns_language_length(struct ns_languages *in, uint32_t least, uint32_t most,
                   struct ns_language **out, struct ns_error *err)
{
    struct ns_program *p;
    enum ns_status status = begin_program(&p, err);
    uint32_t at, end;

    if (status != NS_OK)
        return status;
    at = end = ns_program_end(p, NS_OP_MATCH);
    if (most == UINT32_MAX) {
        at = ns_program_loop(p, end);
        ns_program_close(p, at, ns_program_range(p, 0, N_CODES - 1, at));
        most = least;
    }
    for (uint32_t i = most; i > 0 && ns_program_step(p); i--) {
        at = ns_program_range(p, 0, N_CODES - 1, at);
        if (i > least)
            at = ns_program_split(p, at, end);
    }
    if (most < least)
        at = NS_PROGRAM_FAIL;
    status = determinise(in, p, at, NS_PROGRAM_FAIL, out, err);
    ns_program_destroy(p);
    return status;
}

enum ns_status
ns_language_texts(struct ns_languages *in, const char *const *text, size_t n,
                  struct ns_language **out, struct ns_error *err)
{
    struct ns_program *p;
    enum ns_status status = begin_program(&p, err);
    uint32_t all = NS_PROGRAM_FAIL, end;

    if (status != NS_OK)
        return status;
    end = ns_program_end(p, NS_OP_MATCH);
    for (size_t i = 0; i < n; i++) {
        size_t left = strlen(text[i]);
        uint32_t at = end;

        while (left > 0) {
            uint32_t code = 0;

            do
                left--;
            while (left > 0 && (text[i][left] & 0xc0) == 0x80);
            ns_utf8_char(text[i] + left, 4, &code);
            at = ns_program_range(p, code, code, at);
        }
        all = ns_program_split(p, at, all);
    }
    status = determinise(in, p, all, NS_PROGRAM_FAIL, out, err);
    ns_program_destroy(p);
    return status;
}

/* Nothing comes of it. (Others of which nothing comes are cut off by the
 * linker; this one is the many dead ends of a product.) */
static bool
is_sink(const struct ns_language *l, uint32_t state)
{
    bool stays = !l->accepts[state];

    for (uint32_t c = 0; c < l->n_classes && stays; c++)
        stays = l->to[(size_t)state * l->n_classes + c] == state;
    return stays;
}

/* --- two at once: pairs of states become states */

struct pairs {
    struct ns_languages *in;
    const struct ns_language *a, *b;
    bool *a_sinks, *b_sinks; /* per state */
    struct ns_language *l;
    struct ns_table states;
    uint32_t *pair; /* per state, two */
    uint32_t pair_capacity;
    enum ns_language_op op;
};

static enum ns_status
intern_pair(struct pairs *s, uint32_t a, uint32_t b, uint32_t *state,
            struct ns_error *err)
{
    uint32_t both[2] = { a, b }, number, hash;
    enum ns_status status;
    size_t i;

    /* Once one of two that are both needed is lost, all ways are one. */
    if (s->op != NS_LANGUAGE_EITHER &&
        (s->a_sinks[a] || (s->op == NS_LANGUAGE_BOTH && s->b_sinks[b])))
        both[0] = both[1] = UINT32_MAX;
    hash = ns_table_hash(both, sizeof(both));

    for (i = ns_table_first(&s->states, hash);
         (number = ns_table_at(&s->states, &i, hash)) != 0;)
        if (memcmp(s->pair + 2 * number - 2, both, sizeof(both)) == 0) {
            *state = number - 1;
            return NS_OK;
        }
    number = s->l->n_states;
    status = add_state(s->l, err);
    if (status != NS_OK)
        return status;
    if (!ns_table_reserve(&s->states) ||
        !grow(&s->pair, 2 * number + 2, &s->pair_capacity))
        return no_memory(err);
    ns_table_put(&s->states, hash, number + 1);
    memcpy(s->pair + 2 * number, both, sizeof(both));
    switch (s->op) {
    case NS_LANGUAGE_BOTH:
        s->l->accepts[number] = s->a->accepts[a] && s->b->accepts[b];
        break;
    case NS_LANGUAGE_EITHER:
        s->l->accepts[number] = s->a->accepts[a] || s->b->accepts[b];
        break;
    case NS_LANGUAGE_FIRST_ONLY:
        s->l->accepts[number] = s->a->accepts[a] && !s->b->accepts[b];
        break;
    }
    *state = number;
    return NS_OK;
}

static enum ns_status
walk_pairs(struct pairs *s, struct ns_error *err)
{
    uint32_t state = 0;
    enum ns_status status = intern_pair(s, 0, 0, &state, err);

    for (state = 0; status == NS_OK && state < s->l->n_states; state++) {
        s->in->n_steps += s->l->n_classes;
        status = check_work(s->in, err);
        for (uint32_t c = 0; status == NS_OK && c < s->l->n_classes; c++) {
            uint32_t code = s->l->bound[c], to = state;
            const uint32_t *at = s->pair + 2 * (size_t)state;

            if (at[0] != UINT32_MAX)
                status = intern_pair(s,
                                     s->a->to[(size_t)at[0] * s->a->n_classes +
                                              class_of(s->a, code)],
                                     s->b->to[(size_t)at[1] * s->b->n_classes +
                                              class_of(s->b, code)],
                                     &to, err);
            if (status == NS_OK)
                s->l->to[(size_t)state * s->l->n_classes + c] = to;
        }
    }
    return status;
}

enum ns_status
ns_language_combine(struct ns_languages *in, const struct ns_language *a,
                    enum ns_language_op op, const struct ns_language *b,
                    struct ns_language **out, struct ns_error *err)
{
    struct pairs s = { .in = in, .a = a, .b = b, .op = op };
    size_t n = (size_t)a->n_classes + b->n_classes;
    enum ns_status status;

    s.l = calloc(1, sizeof(*s.l));
    if (s.l)
        s.l->bound = malloc(n * sizeof(*s.l->bound));
    s.a_sinks = malloc((a->n_states + (size_t)b->n_states) * sizeof(bool));
    if (!s.l || !s.l->bound || !s.a_sinks) {
        status = no_memory(err);
        goto out;
    }
    s.b_sinks = s.a_sinks + a->n_states;
    for (uint32_t i = 0; i < a->n_states; i++)
        s.a_sinks[i] = is_sink(a, i);
    for (uint32_t i = 0; i < b->n_states; i++)
        s.b_sinks[i] = is_sink(b, i);
    memcpy(s.l->bound, a->bound, a->n_classes * sizeof(*a->bound));
    memcpy(s.l->bound + a->n_classes, b->bound,
           b->n_classes * sizeof(*b->bound));
    s.l->n_classes = settle(s.l->bound, (uint32_t)n);
    status = walk_pairs(&s, err);
    if (status == NS_OK) {
        *out = s.l;
        s.l = NULL;
    }
out:
    ns_language_destroy(s.l);
    ns_table_fini(&s.states);
    free(s.pair);
    free(s.a_sinks);
    return status;
}

/* --- questions, and the way into a program */

bool
ns_language_is_empty(const struct ns_language *l)
{
    /* All states were reached from the first. */
    for (uint32_t state = 0; state < l->n_states; state++)
        if (l->accepts[state])
            return false;
    return true;
}

bool
ns_language_has(const struct ns_language *l, const char *text, size_t length)
{
    uint32_t state = 0;

    for (size_t at = 0; at < length;) {
        uint32_t code = 0;
        size_t n = ns_utf8_char(text + at, length - at, &code);

        if (n == 0)
            return false;
        state = l->to[(size_t)state * l->n_classes + class_of(l, code)];
        at += n;
    }
    return l->accepts[state];
}

/* From `state` by one code point to each other state. `range` and `done` have
 * room for every class. */
static uint32_t
write_state(const struct ns_language *l, struct ns_program *p, uint32_t state,
            const uint32_t *entry, ns_spell *spell, void *with, bool *done,
            struct ns_range *range, uint32_t next)
{
    const uint32_t *to = l->to + (size_t)state * l->n_classes;
    uint32_t at = l->accepts[state] ? next : NS_PROGRAM_FAIL;

    memset(done, 0, l->n_classes * sizeof(*done));
    for (uint32_t c = 0; c < l->n_classes && ns_program_step(p); c++) {
        uint32_t n = 0;

        for (uint32_t k = c; k < l->n_classes && !done[c]; k++) {
            uint32_t last =
                (k + 1 < l->n_classes ? l->bound[k + 1] : N_CODES) - 1;

            if (to[k] != to[c])
                continue;
            if (n > 0 && range[n - 1].last + 1 == l->bound[k])
                range[n - 1].last = last;
            else
                range[n++] = (struct ns_range){ l->bound[k], last };
            if (k > c)
                done[k] = true;
        }
        if (n > 0 && entry[to[c]] != NS_PROGRAM_FAIL)
            at =
                ns_program_split(p, at, spell(with, p, range, n, entry[to[c]]));
    }
    return at;
}

uint32_t
ns_language_write(const struct ns_language *l, struct ns_program *p,
                  ns_spell *spell, void *with, uint32_t next)
{
    uint32_t *entry = malloc(l->n_states * sizeof(*entry)), first;
    struct ns_range *range = malloc(l->n_classes * sizeof(*range));
    bool *done = malloc(l->n_classes * sizeof(*done));

    if (!entry || !range || !done) {
        ns_program_no_memory(p);
        first = NS_PROGRAM_FAIL;
        goto out;
    }
    for (uint32_t state = 0; state < l->n_states; state++)
        entry[state] = is_sink(l, state) ? NS_PROGRAM_FAIL
                                         : ns_program_loop(p, NS_PROGRAM_FAIL);
    for (uint32_t state = 0; state < l->n_states; state++)
        if (entry[state] != NS_PROGRAM_FAIL)
            ns_program_close(p, entry[state],
                             write_state(l, p, state, entry, spell, with, done,
                                         range, next));
    first = entry[0];
out:
    free(entry);
    free(range);
    free(done);
    return first;
}
