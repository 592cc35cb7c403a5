#include "engine/program.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/grow.h"
#include "engine/table.h"

struct ns_program {
    struct ns_instruction *code;
    struct ns_byte_set *set;
    uint32_t *rule;                    /* the first instruction of each */
    struct ns_table known, known_sets; /* sets: index + 1 */
    uint32_t n_code, code_capacity;
    uint32_t n_sets, set_capacity, n_rules, rule_capacity;
    uint32_t n_steps;
    bool over_code, over_sets, over_steps, out_of_memory;
};

static bool
failed(const struct ns_program *p)
{
    return p->over_code || p->over_sets || p->over_steps || p->out_of_memory;
}

void
ns_program_no_memory(struct ns_program *p)
{
    p->out_of_memory = true;
}

bool
ns_program_work(struct ns_program *p, size_t steps)
{
    if (steps > NS_GRAMMAR_STEPS - p->n_steps)
        p->over_steps = true;
    else
        p->n_steps += (uint32_t)steps;
    return !failed(p);
}

bool
ns_program_step(struct ns_program *p)
{
    return ns_program_work(p, 1);
}

/* Room for one more element; NULL when memory has run out. */
static void *
grown(struct ns_program *p, void *array, uint32_t n, uint32_t *capacity,
      size_t size)
{
    void *moved = ns_grown(array, n + 1, capacity, size);

    p->out_of_memory |= !moved;
    return moved;
}

static uint32_t
append(struct ns_program *p, const struct ns_instruction *in)
{
    struct ns_instruction *code;

    if (p->n_code >= NS_GRAMMAR_CODE) {
        p->over_code = true;
        return NS_PROGRAM_FAIL;
    }
    code = grown(p, p->code, p->n_code, &p->code_capacity, sizeof(*code));
    if (!code)
        return NS_PROGRAM_FAIL;
    p->code = code;
    p->code[p->n_code] = *in;
    return p->n_code++;
}

/* The instruction that says this: one that is there, or a new one. */
static uint32_t
emit(struct ns_program *p, uint32_t op, uint32_t a, uint32_t b, uint32_t next)
{
    struct ns_instruction in = { op, a, b, next };
    uint32_t hash = ns_table_hash(&in, sizeof(in)), at;
    size_t i;

    if (!ns_program_step(p))
        return NS_PROGRAM_FAIL;
    for (i = ns_table_first(&p->known, hash);
         (at = ns_table_at(&p->known, &i, hash)) != 0;)
        if (memcmp(&p->code[at], &in, sizeof(in)) == 0)
            return at;
    if (!ns_table_reserve(&p->known)) {
        p->out_of_memory = true;
        return NS_PROGRAM_FAIL;
    }
    at = append(p, &in);
    if (at != NS_PROGRAM_FAIL)
        ns_table_put(&p->known, hash, at);
    return at;
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
    ns_table_fini(&p->known);
    ns_table_fini(&p->known_sets);
    free(p->rule);
    free(p->code);
    free(p->set);
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
    uint32_t hash = ns_table_hash(set, sizeof(*set)), number;
    struct ns_byte_set *sets;
    size_t i;

    if (next == NS_PROGRAM_FAIL)
        return NS_PROGRAM_FAIL;
    for (i = ns_table_first(&p->known_sets, hash);
         (number = ns_table_at(&p->known_sets, &i, hash)) != 0;)
        if (memcmp(&p->set[number - 1], set, sizeof(*set)) == 0)
            return emit(p, NS_OP_SET, number - 1, 0, next);
    if (p->n_sets >= NS_GRAMMAR_SETS) {
        p->over_sets = true;
        return NS_PROGRAM_FAIL;
    }
    sets = grown(p, p->set, p->n_sets, &p->set_capacity, sizeof(*sets));
    if (!sets)
        return NS_PROGRAM_FAIL;
    p->set = sets;
    if (!ns_table_reserve(&p->known_sets)) {
        p->out_of_memory = true;
        return NS_PROGRAM_FAIL;
    }
    p->set[p->n_sets++] = *set;
    ns_table_put(&p->known_sets, hash, p->n_sets);
    return emit(p, NS_OP_SET, p->n_sets - 1, 0, next);
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

uint32_t
ns_program_span(struct ns_program *p, const struct ns_radix *radix,
                uint32_t lead, uint32_t first, uint32_t last, unsigned shift,
                uint32_t next)
{
    uint32_t mask = (1u << shift) - 1, low = first >> shift,
             high = last >> shift, at = NS_PROGRAM_FAIL;

    if (shift == 0)
        return radix->digit(p, lead, first, last, next);
    /* What stands below the first digit: from `first`, or up to `last`, or
     * all that there is. */
    if (low == high)
        return radix->digit(p, lead, low, high,
                            ns_program_span(p, radix, radix->trail,
                                            first & mask, last & mask,
                                            shift - radix->bits, next));
    if ((first & mask) != 0) {
        at = radix->digit(p, lead, low, low,
                          ns_program_span(p, radix, radix->trail, first & mask,
                                          mask, shift - radix->bits, next));
        low++;
    }
    if ((last & mask) != mask) {
        at = ns_program_split(
            p, at,
            radix->digit(p, lead, high, high,
                         ns_program_span(p, radix, radix->trail, 0, last & mask,
                                         shift - radix->bits, next)));
        high--; /* above low, so not below zero */
    }
    if (low <= high)
        at = ns_program_split(
            p, at,
            radix->digit(p, lead, low, high,
                         ns_program_span(p, radix, radix->trail, 0, mask,
                                         shift - radix->bits, next)));
    return at;
}

static uint32_t
utf8_digit(struct ns_program *p, uint32_t lead, uint32_t first, uint32_t last,
           uint32_t next)
{
    return ns_program_range(p, lead | first, lead | last, next);
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
    static const struct ns_radix utf8 = { 6, 0x80, utf8_digit };
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
                                      ns_program_span(p, &utf8, plane[k].lead,
                                                      first, last,
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
ns_program_rule(struct ns_program *p)
{
    uint32_t *rule;

    if (!ns_program_step(p))
        return 0;
    rule = grown(p, p->rule, p->n_rules, &p->rule_capacity, sizeof(*rule));
    if (!rule)
        return 0;
    p->rule = rule;
    p->rule[p->n_rules] = NS_PROGRAM_FAIL;
    return p->n_rules++;
}

void
ns_program_define(struct ns_program *p, uint32_t rule, uint32_t first)
{
    if (!failed(p))
        p->rule[rule] = first;
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
ns_program_steps(const struct ns_program *p)
{
    return p->n_steps;
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
    uint32_t *order; /* new number to old */
    uint32_t *set;   /* old set to new number + 1 */
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
        return which ? in->next : p->rule[in->a];
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
            to->a = number(l, p->rule[in->a], &n);
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
    for (uint32_t i = 0; i < grammar->n_code; i++) {
        struct ns_instruction *in = &grammar->code[i];

        if (in->op != NS_OP_SET)
            continue;
        if (l->set[in->a] == 0) {
            grammar->set[grammar->n_sets++] = p->set[in->a];
            l->set[in->a] = grammar->n_sets;
        }
        in->a = l->set[in->a] - 1;
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
    size_t n = p->n_code;
    struct link l = { .p = p };
    enum ns_status status = ns_program_check(p, err);
    uint32_t *work;

    if (status != NS_OK)
        return status;
    work = calloc(7 * n + p->n_sets, sizeof(*work));
    if (!work)
        return ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
    l.rest = work;
    l.user = l.rest + n;
    l.other = l.user + n;
    l.heap = l.other + 2 * n;
    l.place = l.heap + n;
    l.order = l.place + n;
    l.set = l.order + n;
    memset(l.rest, 0xff, n * sizeof(*l.rest));
    find_rests(&l);
    if (l.rest[start] == UINT32_MAX)
        status = ns_refuse(err, "bad_param", NULL, "no text satisfies it");
    else if (l.rest[start] > NS_GRAMMAR_BYTES)
        status = ns_refuse(err, "grammar_limit", NULL,
                           "the shortest text that satisfies it has more "
                           "than %d bytes",
                           NS_GRAMMAR_BYTES);
    if (status == NS_OK)
        status = lay_out(&l, start, out, err);
    free(work);
    return status;
}
