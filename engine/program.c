#include "engine/program.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct rule {
    uint32_t first; /* NS_PROGRAM_FAIL until it is defined */
    char *where;    /* owned, or NULL */
};

struct ns_program {
    struct ns_instruction *code;
    struct ns_byte_set *set;
    struct rule *rule;
    uint32_t *slot; /* hash of an instruction to its index; 0 is free */
    uint32_t n_code, code_capacity, n_slots;
    uint32_t n_sets, set_capacity, n_rules, rule_capacity;
    uint32_t n_steps;
    uint16_t set_slot[2 * NS_GRAMMAR_SETS]; /* index + 1 */
    bool over_code, over_sets, over_steps, out_of_memory;
};

static bool
failed(const struct ns_program *p)
{
    return p->over_code || p->over_sets || p->over_steps || p->out_of_memory;
}

bool
ns_program_step(struct ns_program *p)
{
    if (p->n_steps++ >= NS_GRAMMAR_STEPS) {
        p->n_steps = NS_GRAMMAR_STEPS;
        p->over_steps = true;
    }
    return !failed(p);
}

/* Room for one more element; false when memory has run out. */
static bool
grow(struct ns_program *p, void **array, uint32_t n, uint32_t *capacity,
     size_t size)
{
    uint32_t wanted = *capacity ? 2 * *capacity : 64;
    void *moved;

    if (n < *capacity)
        return true;
    moved = realloc(*array, wanted * size); /* all counts stay below 2^23 */
    if (!moved) {
        p->out_of_memory = true;
        return false;
    }
    *array = moved;
    *capacity = wanted;
    return true;
}

static uint32_t
hash_of(const struct ns_instruction *in)
{
    return (uint32_t)XXH3_64bits(in, sizeof(*in));
}

static bool
grow_slots(struct ns_program *p)
{
    uint32_t n_slots = p->n_slots ? 2 * p->n_slots : 256;
    uint32_t *slot = calloc(n_slots, sizeof(*slot));

    if (!slot) {
        p->out_of_memory = true;
        return false;
    }
    for (uint32_t i = 0; i < p->n_slots; i++) {
        uint32_t at;

        if (p->slot[i] == 0)
            continue;
        at = hash_of(&p->code[p->slot[i]]) & (n_slots - 1);
        while (slot[at] != 0)
            at = (at + 1) & (n_slots - 1);
        slot[at] = p->slot[i];
    }
    free(p->slot);
    p->slot = slot;
    p->n_slots = n_slots;
    return true;
}

static uint32_t
append(struct ns_program *p, const struct ns_instruction *in)
{
    if (p->n_code >= NS_GRAMMAR_CODE) {
        p->over_code = true;
        return NS_PROGRAM_FAIL;
    }
    if (!grow(p, (void **)&p->code, p->n_code, &p->code_capacity,
              sizeof(*p->code)))
        return NS_PROGRAM_FAIL;
    p->code[p->n_code] = *in;
    return p->n_code++;
}

/* The instruction that says this: one that is there, or a new one. */
static uint32_t
emit(struct ns_program *p, uint32_t op, uint32_t a, uint32_t b, uint32_t next)
{
    struct ns_instruction in = { op, a, b, next };
    uint32_t at;

    if (!ns_program_step(p))
        return NS_PROGRAM_FAIL;
    if (2 * p->n_code >= p->n_slots && !grow_slots(p))
        return NS_PROGRAM_FAIL;
    at = hash_of(&in) & (p->n_slots - 1);
    while (p->slot[at] != 0) {
        if (memcmp(&p->code[p->slot[at]], &in, sizeof(in)) == 0)
            return p->slot[at];
        at = (at + 1) & (p->n_slots - 1);
    }
    p->slot[at] = append(p, &in);
    return p->slot[at];
}

struct ns_program *
ns_program_create(void)
{
    struct ns_program *p = calloc(1, sizeof(*p));
    struct ns_instruction fail = { .op = NS_OP_FAIL };

    if (!p)
        return NULL;
    append(p, &fail); /* index 0: what fails is found there */
    if (failed(p)) {
        ns_program_destroy(p);
        return NULL;
    }
    return p;
}

void
ns_program_destroy(struct ns_program *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < p->n_rules; i++)
        free(p->rule[i].where);
    free(p->rule);
    free(p->code);
    free(p->set);
    free(p->slot);
    free(p);
}

uint32_t
ns_program_end(struct ns_program *p, enum ns_op op)
{
    return emit(p, op, 0, 0, NS_PROGRAM_FAIL);
}

uint32_t
ns_program_range(struct ns_program *p, uint32_t first, uint32_t last,
                 uint32_t next)
{
    if (next == NS_PROGRAM_FAIL)
        return NS_PROGRAM_FAIL;
    return emit(p, NS_OP_RANGE, first, last, next);
}

uint32_t
ns_program_set(struct ns_program *p, const struct ns_byte_set *set,
               uint32_t next)
{
    uint64_t at = XXH3_64bits(set, sizeof(*set));

    if (next == NS_PROGRAM_FAIL)
        return NS_PROGRAM_FAIL;
    for (;; at++) {
        uint16_t *slot = &p->set_slot[at % (2 * NS_GRAMMAR_SETS)];

        if (*slot == 0) {
            if (p->n_sets >= NS_GRAMMAR_SETS) {
                p->over_sets = true;
                return NS_PROGRAM_FAIL;
            }
            if (!grow(p, (void **)&p->set, p->n_sets, &p->set_capacity,
                      sizeof(*set)))
                return NS_PROGRAM_FAIL;
            p->set[p->n_sets++] = *set;
            *slot = (uint16_t)p->n_sets;
        }
        if (memcmp(&p->set[*slot - 1], set, sizeof(*set)) == 0)
            return emit(p, NS_OP_SET, *slot - 1u, 0, next);
    }
}

uint32_t
ns_program_text(struct ns_program *p, const char *text, size_t length,
                uint32_t next)
{
    while (length > 0) {
        unsigned char byte = (unsigned char)text[--length];

        next = ns_program_range(p, byte, byte, next);
    }
    return next;
}

static int
by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A tree over sorted texts that are equal up to `from`. Calls nest once for
 * each length at which a text on the way ends or parts from another. */
static uint32_t
choose(struct ns_program *p, const char *const *text, size_t n, size_t from,
       uint32_t next)
{
    const char *first = text[0], *last = text[n - 1];
    size_t common = from, i = 0;
    uint32_t at = NS_PROGRAM_FAIL;

    if (strcmp(first + from, last + from) == 0)
        return ns_program_text(p, first + from, strlen(first + from), next);
    while (first[common] && first[common] == last[common])
        common++;
    while (i < n && text[i][common] == '\0') {
        at = next; /* the shortest come first */
        i++;
    }
    while (i < n && ns_program_step(p)) {
        size_t k = i + 1;

        while (k < n && text[k][common] == text[i][common])
            k++;
        at = ns_program_split(p, at, choose(p, text + i, k - i, common, next));
        i = k;
    }
    return ns_program_text(p, first + from, common - from, at);
}

uint32_t
ns_program_choice(struct ns_program *p, const char *const *text, size_t n,
                  uint32_t next)
{
    const char **sorted = n ? malloc(n * sizeof(*sorted)) : NULL;
    uint32_t at;

    if (!sorted) {
        p->out_of_memory |= n > 0;
        return NS_PROGRAM_FAIL;
    }
    memcpy(sorted, text, n * sizeof(*sorted));
    qsort(sorted, n, sizeof(*sorted), by_text);
    at = choose(p, sorted, n, 0, next);
    free(sorted);
    return at;
}

uint32_t
ns_program_anchor(struct ns_program *p, enum ns_op op, uint32_t next)
{
    if (next == NS_PROGRAM_FAIL)
        return NS_PROGRAM_FAIL;
    return emit(p, op, 0, 0, next);
}

uint32_t
ns_program_split(struct ns_program *p, uint32_t a, uint32_t b)
{
    if (a == NS_PROGRAM_FAIL || a == b)
        return b;
    if (b == NS_PROGRAM_FAIL)
        return a;
    return emit(p, NS_OP_SPLIT, a, b, NS_PROGRAM_FAIL);
}

/* The trailing bytes of code points that differ in `shift` + 6 low bits. */
static uint32_t
utf8_tail(struct ns_program *p, uint32_t lead, uint32_t first, uint32_t last,
          unsigned shift, uint32_t next)
{
    uint32_t mask = (1u << shift) - 1, low = first >> shift,
             high = last >> shift, at = NS_PROGRAM_FAIL;

    if (shift == 0)
        return ns_program_range(p, lead | first, lead | last, next);
    if (low == high)
        return ns_program_range(
            p, lead | low, lead | low,
            utf8_tail(p, 0x80, first & mask, last & mask, shift - 6, next));
    if ((first & mask) != 0) {
        at = ns_program_range(
            p, lead | low, lead | low,
            utf8_tail(p, 0x80, first & mask, mask, shift - 6, next));
        low++;
    }
    if ((last & mask) != mask) {
        at =
            ns_program_split(p, at,
                             ns_program_range(p, lead | high, lead | high,
                                              utf8_tail(p, 0x80, 0, last & mask,
                                                        shift - 6, next)));
        high--; /* above low, so not below zero */
    }
    if (low <= high)
        at = ns_program_split(
            p, at,
            ns_program_range(p, lead | low, lead | high,
                             utf8_tail(p, 0x80, 0, mask, shift - 6, next)));
    return at;
}

uint32_t
ns_program_utf8(struct ns_program *p, const struct ns_range *range, size_t n,
                uint32_t next)
{
    static const struct {
        uint32_t first, last, lead;
        unsigned shift;
    } plane[] = { { 0x80, 0x7ff, 0xc0, 6 },
                  { 0x800, 0xd7ff, 0xe0, 12 },
                  { 0xe000, 0xffff, 0xe0, 12 },
                  { 0x10000, 0x10ffff, 0xf0, 18 } };
    struct ns_byte_set ascii = { { 0 } };
    uint32_t at = NS_PROGRAM_FAIL;

    for (size_t i = 0; i < n; i++) {
        if (range[i].first < 0x80)
            ns_byte_set_add(&ascii, range[i].first,
                            range[i].last < 0x80 ? range[i].last : 0x7f);
        for (size_t k = 0; k < sizeof(plane) / sizeof(*plane); k++) {
            uint32_t first = range[i].first, last = range[i].last;

            if (first < plane[k].first)
                first = plane[k].first;
            if (last > plane[k].last)
                last = plane[k].last;
            if (first <= last)
                at = ns_program_split(p, at,
                                      utf8_tail(p, plane[k].lead, first, last,
                                                plane[k].shift, next));
        }
    }
    if (ascii.word[0] || ascii.word[1])
        at = ns_program_split(p, ns_program_set(p, &ascii, next), at);
    return at;
}

uint32_t
ns_program_loop(struct ns_program *p, uint32_t leave)
{
    struct ns_instruction in = { .op = NS_OP_SPLIT, .b = leave };

    /* Not in the table: what it says is not known yet. */
    return ns_program_step(p) ? append(p, &in) : NS_PROGRAM_FAIL;
}

void
ns_program_close(struct ns_program *p, uint32_t loop, uint32_t body)
{
    if (loop != NS_PROGRAM_FAIL)
        p->code[loop].a = body;
}

uint32_t
ns_program_rule(struct ns_program *p, const char *where)
{
    struct rule *rule;

    if (!ns_program_step(p) || !grow(p, (void **)&p->rule, p->n_rules,
                                     &p->rule_capacity, sizeof(*p->rule)))
        return 0;
    rule = &p->rule[p->n_rules];
    rule->first = NS_PROGRAM_FAIL;
    rule->where = where ? strdup(where) : NULL;
    if (where && !rule->where)
        p->out_of_memory = true;
    return p->n_rules++;
}

void
ns_program_define(struct ns_program *p, uint32_t rule, uint32_t first)
{
    if (!failed(p))
        p->rule[rule].first = first;
}

uint32_t
ns_program_call(struct ns_program *p, uint32_t rule, uint32_t next)
{
    if (next == NS_PROGRAM_FAIL)
        return NS_PROGRAM_FAIL;
    return emit(p, NS_OP_CALL, rule, 0, next);
}

const struct ns_instruction *
ns_program_at(const struct ns_program *p, uint32_t at)
{
    return &p->code[at];
}

uint32_t
ns_program_size(const struct ns_program *p)
{
    return p->n_code;
}

enum ns_status
ns_program_check(const struct ns_program *p, struct ns_error *err)
{
    if (p->out_of_memory)
        return ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
    if (p->over_code)
        return ns_refuse(err, "grammar_limit", NULL,
                         "it compiles to more than %d instructions",
                         NS_GRAMMAR_CODE);
    if (p->over_sets)
        return ns_refuse(err, "grammar_limit", NULL,
                         "it needs more than %d sets of characters",
                         NS_GRAMMAR_SETS);
    if (p->over_steps)
        return ns_refuse(err, "grammar_limit", NULL,
                         "it takes more than %d steps to compile",
                         NS_GRAMMAR_STEPS);
    return NS_OK;
}

/* --- linking */

struct link {
    const struct ns_program *p;
    uint32_t *rest;  /* per instruction, UINT32_MAX where there is no end */
    uint32_t *user;  /* what waits for it: the first edge of a list */
    uint32_t *other; /* per edge: the next one of its list */
    uint32_t *heap, n_heap;
    uint32_t *place; /* in the heap, then in the result: + 1, 0 is nowhere */
    uint32_t *seen;  /* rule + 1 whose walk has come by */
    uint32_t *todo, *order;
    uint32_t *callers, *begin, *from; /* per rule */
};

/* An edge is 2 * instruction + which of its two ways: what waits for the end
 * of another. For a call these are the rule's first and the next. */
static uint32_t
way(const struct ns_program *p, uint32_t at, int which)
{
    const struct ns_instruction *in = &p->code[at];

    switch (in->op) {
    case NS_OP_SPLIT:
        return which ? in->b : in->a;
    case NS_OP_CALL:
        return which ? in->next : p->rule[in->a].first;
    default:
        return which ? NS_PROGRAM_FAIL : in->next;
    }
}

static void
heap_swap(struct link *l, uint32_t i, uint32_t k)
{
    uint32_t at = l->heap[i];

    l->heap[i] = l->heap[k];
    l->heap[k] = at;
    l->place[l->heap[i]] = i + 1;
    l->place[l->heap[k]] = k + 1;
}

static void
heap_offer(struct link *l, uint32_t at, uint32_t rest)
{
    uint32_t i;

    if (rest >= l->rest[at])
        return;
    l->rest[at] = rest;
    if (l->place[at] == 0) {
        l->heap[l->n_heap++] = at;
        l->place[at] = l->n_heap;
    }
    for (i = l->place[at] - 1; i > 0 && l->rest[l->heap[(i - 1) / 2]] > rest;
         i = (i - 1) / 2)
        heap_swap(l, i, (i - 1) / 2);
}

static uint32_t
heap_take(struct link *l)
{
    uint32_t at = l->heap[0], i = 0;

    heap_swap(l, 0, --l->n_heap);
    l->place[at] = 0;
    for (;;) {
        uint32_t least = i;

        for (uint32_t k = 2 * i + 1; k <= 2 * i + 2 && k < l->n_heap; k++)
            if (l->rest[l->heap[k]] < l->rest[l->heap[least]])
                least = k;
        if (least == i)
            return at;
        heap_swap(l, i, least);
        i = least;
    }
}

/* The shortest ends, as Knuth's generalisation of Dijkstra's algorithm finds
 * them for grammars ("A generalization of Dijkstra's algorithm", 1977): what
 * is taken from the heap is final. */
static void
find_rests(struct link *l)
{
    const struct ns_program *p = l->p;

    for (uint32_t at = 1; at < p->n_code; at++) {
        for (int which = 0; which < 2; which++) {
            uint32_t to = way(p, at, which), edge = 2 * at + (uint32_t)which;

            if (to != NS_PROGRAM_FAIL) {
                l->other[edge] = l->user[to];
                l->user[to] = edge;
            }
        }
        if (p->code[at].op == NS_OP_RETURN || p->code[at].op == NS_OP_MATCH)
            heap_offer(l, at, 0);
    }
    while (l->n_heap > 0) {
        uint32_t done = heap_take(l), rest = l->rest[done];

        for (uint32_t edge = l->user[done]; edge; edge = l->other[edge]) {
            uint32_t at = edge / 2, op = p->code[at].op;
            uint64_t sum = rest;

            if (op == NS_OP_RANGE || op == NS_OP_SET)
                sum++;
            if (op == NS_OP_CALL) {
                /* The other one of the two may not be known yet: then it
                 * will come by here. */
                uint32_t also = l->rest[way(p, at, edge % 2 ? 0 : 1)];

                if (also == UINT32_MAX)
                    continue;
                sum += also;
            }
            heap_offer(l, at,
                       sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX - 1);
        }
    }
}

/* From rule to rule, where the first can call the second before it has taken
 * a byte: those of rule r are to[begin[r]] and on, up to begin[r + 1]. */
struct arrows {
    uint32_t *to, *begin;
    uint32_t n, capacity;
};

/* Through splits, and behind calls of what may be empty. */
static bool
find_arrows(struct link *l, struct ns_program *p, uint32_t rule,
            struct arrows *arrows)
{
    uint32_t n = 0;

    arrows->begin[rule] = arrows->n;
    l->todo[n++] = p->rule[rule].first;
    while (n > 0) {
        uint32_t at = l->todo[--n];
        const struct ns_instruction *in = &p->code[at];

        if (l->rest[at] == UINT32_MAX || l->seen[at] == rule + 1)
            continue;
        l->seen[at] = rule + 1;
        if (!ns_program_step(p))
            return false;
        if (in->op == NS_OP_SPLIT) {
            l->todo[n++] = in->a;
            l->todo[n++] = in->b;
        } else if (in->op == NS_OP_CALL) {
            if (!grow(p, (void **)&arrows->to, arrows->n, &arrows->capacity,
                      sizeof(*arrows->to)))
                return false;
            arrows->to[arrows->n++] = in->a;
            if (l->rest[p->rule[in->a].first] == 0)
                l->todo[n++] = in->next;
        }
    }
    arrows->begin[rule + 1] = arrows->n;
    return true;
}

/* Takes away, again and again, the rules that no other one calls first. What
 * is left stands on a circle or behind one: backwards from there is no end,
 * and after as many steps as there are rules we are on the circle. */
static enum ns_status
refuse_circle(struct link *l, const struct arrows *arrows, struct ns_error *err)
{
    const struct ns_program *p = l->p;
    uint32_t *callers = l->callers, *from = l->from, n = 0, left, at = 0;

    for (uint32_t i = 0; i < arrows->n; i++)
        callers[arrows->to[i]]++;
    for (uint32_t rule = 0; rule < p->n_rules; rule++)
        if (callers[rule] == 0)
            l->todo[n++] = rule;
    for (left = p->n_rules; n > 0; left--) {
        uint32_t rule = l->todo[--n];

        for (uint32_t i = arrows->begin[rule]; i < arrows->begin[rule + 1]; i++)
            if (--callers[arrows->to[i]] == 0)
                l->todo[n++] = arrows->to[i];
    }
    if (left == 0)
        return NS_OK;
    for (uint32_t rule = 0; rule < p->n_rules; rule++)
        for (uint32_t i = arrows->begin[rule];
             callers[rule] > 0 && i < arrows->begin[rule + 1]; i++)
            from[arrows->to[i]] = rule;
    while (callers[at] == 0)
        at++;
    for (uint32_t i = 0; i < p->n_rules; i++)
        at = from[at];
    return ns_refuse(err, "unsupported", NULL,
                     "%s refers to itself with nothing in between",
                     p->rule[at].where ? p->rule[at].where : "a rule");
}

static enum ns_status
check_recursion(struct link *l, struct ns_program *p, struct ns_error *err)
{
    struct arrows arrows = { .begin = l->begin };
    enum ns_status status = NS_OK;

    for (uint32_t rule = 0; rule < p->n_rules; rule++)
        if (!find_arrows(l, p, rule, &arrows)) {
            status = ns_program_check(p, err);
            goto out;
        }
    status = refuse_circle(l, &arrows, err);
out:
    free(arrows.to);
    return status;
}

/* What `at` comes down to when ways without an end are gone. */
static uint32_t
live(const struct link *l, uint32_t at)
{
    const struct ns_instruction *in = &l->p->code[at];

    while (in->op == NS_OP_SPLIT) {
        if (l->rest[in->a] == UINT32_MAX)
            at = in->b;
        else if (l->rest[in->b] == UINT32_MAX)
            at = in->a;
        else
            break;
        in = &l->p->code[at];
    }
    return at;
}

/* Its new number; where it has none yet, the next one. */
static uint32_t
number(struct link *l, uint32_t at, uint32_t *n)
{
    at = live(l, at);
    if (l->place[at] == 0) {
        l->order[(*n)++] = at;
        l->place[at] = *n; /* the heap is done with it */
    }
    return l->place[at] - 1;
}

/* Breadth first from the start, so that equal programs look equal however
 * they were put together. */
static void
renumber(struct link *l, uint32_t start, struct ns_grammar *grammar)
{
    const struct ns_program *p = l->p;
    uint32_t n = 0;

    number(l, start, &n);
    for (uint32_t i = 0; i < n; i++) {
        const struct ns_instruction *in = &p->code[l->order[i]];
        struct ns_instruction *to = &grammar->code[i];

        *to = *in;
        grammar->rest[i] = l->rest[l->order[i]];
        switch (in->op) {
        case NS_OP_SPLIT:
            to->a = number(l, in->a, &n);
            to->b = number(l, in->b, &n);
            break;
        case NS_OP_CALL:
            to->a = number(l, p->rule[in->a].first, &n);
            to->next = number(l, in->next, &n);
            break;
        case NS_OP_RANGE:
        case NS_OP_SET:
            to->next = number(l, in->next, &n);
            break;
        default:
            break;
        }
    }
    grammar->n_code = n;
}

/* One block: the code, the sets that it uses by the order of their first use,
 * and the rests. */
static enum ns_status
lay_out(struct link *l, uint32_t start, struct ns_grammar **out,
        struct ns_error *err)
{
    const struct ns_program *p = l->p;
    struct ns_grammar *grammar = malloc(
        sizeof(*grammar) + p->n_code * sizeof(*grammar->code) +
        p->n_sets * sizeof(*grammar->set) + p->n_code * sizeof(*grammar->rest));
    XXH128_hash_t hash;

    if (!grammar)
        return ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
    memset(grammar, 0, sizeof(*grammar));
    grammar->set = (struct ns_byte_set *)(grammar + 1);
    grammar->code = (struct ns_instruction *)(grammar->set + p->n_sets);
    grammar->rest = (uint32_t *)(grammar->code + p->n_code);
    renumber(l, start, grammar);
    memset(l->from, 0, p->n_sets * sizeof(*l->from));
    for (uint32_t i = 0; i < grammar->n_code; i++) {
        struct ns_instruction *in = &grammar->code[i];

        if (in->op != NS_OP_SET)
            continue;
        if (l->from[in->a] == 0) {
            grammar->set[grammar->n_sets++] = p->set[in->a];
            l->from[in->a] = grammar->n_sets;
        }
        in->a = l->from[in->a] - 1;
    }
    hash = XXH3_128bits_withSeed(
        grammar->code, grammar->n_code * sizeof(*grammar->code),
        XXH3_64bits(grammar->set, grammar->n_sets * sizeof(*grammar->set)));
    memcpy(grammar->hash, &hash, sizeof(grammar->hash));
    *out = grammar;
    return NS_OK;
}

enum ns_status
ns_program_link(struct ns_program *p, uint32_t start, struct ns_grammar **out,
                struct ns_error *err)
{
    size_t n = p->n_code, n_rules = p->n_rules, n_sets = p->n_sets;
    struct link l = { .p = p };
    enum ns_status status = ns_program_check(p, err);
    uint32_t *work;

    if (status != NS_OK)
        return status;
    work = calloc(10 * n + 4 + 3 * n_rules + n_sets, sizeof(*work));
    if (!work)
        return ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
    l.rest = work;
    l.user = l.rest + n;
    l.other = l.user + n;
    l.heap = l.other + 2 * n;
    l.place = l.heap + n;
    l.seen = l.place + n;
    l.todo = l.seen + n;
    l.order = l.todo + 2 * n + 2;
    l.callers = l.order + n;
    l.begin = l.callers + n_rules;
    l.from = l.begin + n_rules + 1; /* n_rules or n_sets of them */
    memset(l.rest, 0xff, n * sizeof(*l.rest));
    find_rests(&l);
    if (l.rest[start] == UINT32_MAX)
        status = ns_refuse(err, "bad_param", NULL, "no text satisfies it");
    else if (l.rest[start] > NS_GRAMMAR_BYTES)
        status = ns_refuse(err, "grammar_limit", NULL,
                           "the shortest text that satisfies it has more "
                           "than %d bytes",
                           NS_GRAMMAR_BYTES);
    else
        status = check_recursion(&l, p, err);
    if (status == NS_OK)
        status = lay_out(&l, start, out, err);
    free(work);
    return status;
}
