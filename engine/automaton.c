#include "engine/automaton.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/program.h"
#include "engine/table.h"

enum {
    FIRST = 1, /* the state that a text begins in */
    N_BYTES = 256,
};

#define UNKNOWN (UINT32_MAX - 1) /* a way that no one has asked for */

/* A place: an instruction that takes a byte (or MATCH), and a stack. */
struct place {
    uint32_t at, stack;
};

/* A call that is open: where it returns to, and the stack below. Number 0 is
 * the empty stack. */
struct frame {
    uint32_t at, below;
    uint32_t rest; /* least bytes from the return to the end of the text */
};

struct state {
    uint32_t first, n; /* its places */
    uint32_t rest;
    uint8_t shortest;
    bool accepts;
};

/* An array that grows under the automaton's limit. */
struct vec {
    void *data;
    size_t n, capacity; /* elements */
};

struct ns_automaton {
    struct ns_instruction *code; /* the program's copy */
    struct ns_byte_set *set;
    uint32_t *rest;
    size_t limit, bytes; /* what may be in use, what is */
    bool no_memory;      /* it was not the limit */
    struct vec state;    /* struct state; number 0 is NS_AUTOMATON_DEAD */
    struct vec way;      /* per state, n_classes numbers of states */
    struct vec places;   /* of all states, each sorted */
    struct vec frame;
    struct ns_table states, frames;
    struct vec reached; /* scratch: places of the state that is being made */
    struct vec todo;    /* scratch: places whose ways are to be followed */
    struct vec seen;    /* scratch: struct mark, an open table */
    uint32_t n_classes, n_seen, round;
    uint8_t class_of[N_BYTES]; /* bytes that no instruction tells apart */
    uint8_t byte_of[N_BYTES];  /* one of each class */
};

static const struct state *
state_at(const struct ns_automaton *a, uint32_t state)
{
    return (const struct state *)a->state.data + state;
}

static uint32_t
sum_of(uint32_t a, uint32_t b)
{
    return a > UINT32_MAX - 1 - b ? UINT32_MAX - 1 : a + b;
}

/* Room for `extra` more elements, under the limit: twice what was there, or as
 * much as still fits. */
static bool
reserve(struct ns_automaton *a, struct vec *vec, size_t extra, size_t size)
{
    size_t needed = vec->n + extra, wanted = vec->capacity * 2;
    size_t spare = (a->limit - a->bytes) / size;
    void *moved;

    if (needed <= vec->capacity)
        return true;
    if (needed - vec->capacity > spare || needed >= UNKNOWN)
        return false;
    if (wanted < needed)
        wanted = needed;
    if (wanted - vec->capacity > spare)
        wanted = vec->capacity + spare;
    moved = realloc(vec->data, wanted * size);
    if (!moved) {
        a->no_memory = true;
        return false;
    }
    vec->data = moved;
    a->bytes += (wanted - vec->capacity) * size;
    vec->capacity = wanted;
    return true;
}

static bool
reserve_slot(struct ns_automaton *a, struct ns_table *t)
{
    size_t bytes = ns_table_growth(t) * sizeof(*t->slot);

    if (bytes > a->limit - a->bytes)
        return false;
    if (!ns_table_reserve(t)) {
        a->no_memory = true;
        return false;
    }
    a->bytes += bytes;
    return true;
}

/* The stack on which `at` lies on `below`; 0 when there is no room. */
static uint32_t
push_frame(struct ns_automaton *a, uint32_t at, uint32_t below)
{
    uint32_t key[2] = { at, below }, hash, number;
    struct frame *frame = a->frame.data;
    size_t i;

    hash = ns_table_hash(key, sizeof(key));
    for (i = ns_table_first(&a->frames, hash);
         (number = ns_table_at(&a->frames, &i, hash)) != 0;)
        if (frame[number].at == at && frame[number].below == below)
            return number;
    if (!reserve(a, &a->frame, 1, sizeof(*frame)) ||
        !reserve_slot(a, &a->frames))
        return 0;
    frame = a->frame.data;
    number = (uint32_t)a->frame.n++;
    frame[number] =
        (struct frame){ at, below, sum_of(a->rest[at], frame[below].rest) };
    ns_table_put(&a->frames, hash, number);
    return number;
}

/* --- a state from its places */

/* A table over places that is emptied by counting `round` up. */
struct mark {
    struct place place;
    uint32_t round;
};

static size_t
mark_slot(const struct ns_automaton *a, struct place place)
{
    const struct mark *mark = a->seen.data;
    size_t slot = XXH3_64bits(&place, sizeof(place)) & (a->seen.n - 1);

    while (mark[slot].round == a->round &&
           (mark[slot].place.at != place.at ||
            mark[slot].place.stack != place.stack))
        slot = (slot + 1) & (a->seen.n - 1);
    return slot;
}

/* Twice the table, with what this round has put there. */
static bool
grow_marks(struct ns_automaton *a)
{
    struct vec old = a->seen;
    struct mark *mark = old.data;
    size_t n = old.n ? 2 * old.n : 64;

    if ((n - old.n) * sizeof(*mark) > a->limit - a->bytes)
        return false;
    a->seen.data = calloc(n, sizeof(*mark)); /* round 0 is never one */
    if (!a->seen.data) {
        a->seen = old;
        a->no_memory = true;
        return false;
    }
    a->seen.n = a->seen.capacity = n;
    a->bytes += (n - old.n) * sizeof(*mark);
    for (size_t i = 0; i < old.n; i++)
        if (mark[i].round == a->round)
            ((struct mark *)a->seen.data)[mark_slot(a, mark[i].place)] =
                mark[i];
    free(old.data);
    return true;
}

/* Puts a place on the list of those to follow, once a round. */
static bool
visit(struct ns_automaton *a, uint32_t at, uint32_t stack)
{
    struct place place = { at, stack };
    struct mark *mark;

    if (2 * (a->n_seen + 1) > a->seen.n && !grow_marks(a))
        return false;
    mark = (struct mark *)a->seen.data + mark_slot(a, place);
    if (mark->round == a->round)
        return true;
    *mark = (struct mark){ place, a->round };
    a->n_seen++;
    if (!reserve(a, &a->todo, 1, sizeof(place)))
        return false;
    ((struct place *)a->todo.data)[a->todo.n++] = place;
    return true;
}

/* Follows all ways that take no byte, to the places that do. */
static bool
follow(struct ns_automaton *a)
{
    while (a->todo.n > 0) {
        struct place place = ((struct place *)a->todo.data)[--a->todo.n];
        const struct ns_instruction *in = &a->code[place.at];
        uint32_t stack = place.stack;
        const struct frame *frame;

        switch (in->op) {
        case NS_OP_SPLIT:
            if (!visit(a, in->a, stack) || !visit(a, in->b, stack))
                return false;
            break;
        case NS_OP_CALL:
            /* A call that is all there is left of a rule returns to where the
             * rule would: the stack does not grow with each. */
            if (a->code[in->next].op != NS_OP_RETURN)
                stack = push_frame(a, in->next, stack);
            if ((stack == 0 && a->code[in->next].op != NS_OP_RETURN) ||
                !visit(a, in->a, stack))
                return false;
            break;
        case NS_OP_RETURN:
            frame = (const struct frame *)a->frame.data + stack;
            if (!visit(a, frame->at, frame->below))
                return false;
            break;
        default:
            if (!reserve(a, &a->reached, 1, sizeof(place)))
                return false;
            ((struct place *)a->reached.data)[a->reached.n++] = place;
            break;
        }
    }
    return true;
}

static int
by_place(const void *left, const void *right)
{
    const struct place *x = left, *y = right;

    if (x->at != y->at)
        return x->at < y->at ? -1 : 1;
    return (x->stack > y->stack) - (x->stack < y->stack);
}

/* Of the bytes that an instruction takes, the first one that can be seen. */
static uint8_t
first_byte(const struct ns_automaton *a, const struct ns_instruction *in)
{
    const struct ns_byte_set *set;
    unsigned byte = ' ';

    if (in->op == NS_OP_RANGE)
        return (uint8_t)(in->a < ' ' && in->b >= ' ' ? ' ' : in->a);
    set = &a->set[in->a];
    while (byte < N_BYTES && !ns_byte_set_has(set, byte))
        byte++;
    for (unsigned low = 0; byte == N_BYTES; low++)
        if (ns_byte_set_has(set, low))
            byte = low;
    return (uint8_t)byte;
}

static struct state
describe(const struct ns_automaton *a, uint32_t first, uint32_t n)
{
    const struct place *place = (struct place *)a->places.data + first;
    const struct frame *frame = a->frame.data;
    struct state state = { .first = first, .n = n, .rest = UINT32_MAX };

    for (uint32_t i = 0; i < n; i++) {
        const struct ns_instruction *in = &a->code[place[i].at];
        uint32_t rest =
            sum_of(a->rest[place[i].at], frame[place[i].stack].rest);

        if (in->op == NS_OP_MATCH)
            state.accepts = true;
        if (rest >= state.rest)
            continue;
        state.rest = rest;
        state.shortest = in->op == NS_OP_MATCH ? 0 : first_byte(a, in);
    }
    return state;
}

/* The state of the places reached: one that is there, or a new one; FULL when
 * there is no room. */
static uint32_t
intern(struct ns_automaton *a)
{
    size_t n = a->reached.n, bytes = n * sizeof(struct place), i;
    uint32_t number, hash, *way;

    if (n == 0)
        return NS_AUTOMATON_DEAD;
    qsort(a->reached.data, n, sizeof(struct place), by_place);
    hash = ns_table_hash(a->reached.data, bytes);
    for (i = ns_table_first(&a->states, hash);
         (number = ns_table_at(&a->states, &i, hash)) != 0;) {
        const struct state *state = state_at(a, number);

        if (state->n == n &&
            memcmp((struct place *)a->places.data + state->first,
                   a->reached.data, bytes) == 0)
            return number;
    }
    if (!reserve(a, &a->places, n, sizeof(struct place)) ||
        !reserve(a, &a->state, 1, sizeof(struct state)) ||
        !reserve(a, &a->way, a->n_classes, sizeof(*way)) ||
        !reserve_slot(a, &a->states))
        return NS_AUTOMATON_FULL;
    number = (uint32_t)a->state.n++;
    memcpy((struct place *)a->places.data + a->places.n, a->reached.data,
           bytes);
    ((struct state *)a->state.data)[number] =
        describe(a, (uint32_t)a->places.n, (uint32_t)n);
    way = (uint32_t *)a->way.data + a->way.n;
    for (i = 0; i < a->n_classes; i++)
        way[i] = UNKNOWN;
    a->places.n += n;
    a->way.n += a->n_classes;
    ns_table_put(&a->states, hash, number);
    return number;
}

static void
begin_round(struct ns_automaton *a)
{
    a->reached.n = a->todo.n = 0;
    a->n_seen = 0;
    if (++a->round == 0) { /* after 2^32 states: old marks would come back */
        memset(a->seen.data, 0, a->seen.n * sizeof(struct mark));
        a->round = 1;
    }
}

static bool
takes(const struct ns_automaton *a, const struct ns_instruction *in,
      uint8_t byte)
{
    if (in->op == NS_OP_RANGE)
        return byte >= in->a && byte <= in->b;
    return in->op == NS_OP_SET && ns_byte_set_has(&a->set[in->a], byte);
}

static uint32_t
make_way(struct ns_automaton *a, uint32_t from, uint32_t class)
{
    struct state state = *state_at(a, from);
    uint32_t to;

    begin_round(a);
    for (uint32_t i = 0; i < state.n; i++) {
        struct place place =
            ((struct place *)a->places.data)[state.first + i];
        const struct ns_instruction *in = &a->code[place.at];

        if (takes(a, in, a->byte_of[class]) &&
            (!visit(a, in->next, place.stack) || !follow(a)))
            return NS_AUTOMATON_FULL;
    }
    to = intern(a);
    if (to != NS_AUTOMATON_FULL)
        ((uint32_t *)a->way.data)[(size_t)from * a->n_classes + class] = to;
    return to;
}

/* --- life */

/* Numbers 0 of states and frames, and the first state. */
static bool
begin(struct ns_automaton *a)
{
    a->frame.n = a->state.n = a->way.n = a->places.n = 0;
    if (!reserve(a, &a->frame, 1, sizeof(struct frame)) ||
        !reserve(a, &a->state, 1, sizeof(struct state)) ||
        !reserve(a, &a->way, a->n_classes, sizeof(uint32_t)))
        return false;
    memset(a->frame.data, 0, sizeof(struct frame));
    *(struct state *)a->state.data = (struct state){ .rest = UINT32_MAX };
    memset(a->way.data, 0, a->n_classes * sizeof(uint32_t)); /* all DEAD */
    a->frame.n = a->state.n = 1;
    a->way.n = a->n_classes;
    begin_round(a);
    return visit(a, 0, 0) && follow(a) && intern(a) == FIRST;
}

void
ns_automaton_reset(struct ns_automaton *a)
{
    ns_table_reset(&a->states);
    ns_table_reset(&a->frames);
    begin(a); /* what fitted once fits again: nothing was given back */
}

/* Two bytes are of one class when every instruction takes both or neither. */
static void
find_classes(struct ns_automaton *a, const struct ns_grammar *grammar)
{
    bool cut[N_BYTES + 1] = { false };
    uint32_t n = 0;

    for (uint32_t i = 0; i < grammar->n_code; i++)
        if (a->code[i].op == NS_OP_RANGE)
            cut[a->code[i].a] = cut[a->code[i].b + 1] = true;
    for (unsigned byte = 1; byte < N_BYTES; byte++)
        a->class_of[byte] = (uint8_t)(n += cut[byte]);
    n++;
    for (uint32_t i = 0; i < grammar->n_sets; i++) {
        int of[N_BYTES][2];

        memset(of, 0xff, n * sizeof(*of));
        n = 0;
        for (unsigned byte = 0; byte < N_BYTES; byte++) {
            int *number =
                &of[a->class_of[byte]][ns_byte_set_has(&a->set[i], byte)];

            if (*number == -1)
                *number = (int)n++;
            a->class_of[byte] = (uint8_t)*number;
        }
    }
    a->n_classes = n;
    for (unsigned byte = N_BYTES; byte-- > 0;)
        a->byte_of[a->class_of[byte]] = (uint8_t)byte;
}

enum ns_status
ns_automaton_create(const struct ns_grammar *grammar, size_t limit_bytes,
                    struct ns_automaton **out, struct ns_error *err)
{
    size_t code_bytes = grammar->n_code * sizeof(*grammar->code);
    size_t set_bytes = grammar->n_sets * sizeof(*grammar->set);
    size_t rest_bytes = grammar->n_code * sizeof(*grammar->rest);
    size_t bytes =
        sizeof(struct ns_automaton) + code_bytes + set_bytes + rest_bytes;
    struct ns_automaton *a;

    if (bytes > limit_bytes)
        return ns_refuse(err, "grammar_limit", NULL,
                         "the grammar takes %zu bytes, limit %zu", bytes,
                         limit_bytes);
    a = calloc(1, bytes);
    if (!a)
        return ns_fail(err, NS_FATAL, "out of memory for an automaton");
    a->limit = limit_bytes;
    a->bytes = bytes;
    a->set = (struct ns_byte_set *)(a + 1);
    a->code = (struct ns_instruction *)((char *)a->set + set_bytes);
    a->rest = (uint32_t *)((char *)a->code + code_bytes);
    memcpy(a->set, grammar->set, set_bytes);
    memcpy(a->code, grammar->code, code_bytes);
    memcpy(a->rest, grammar->rest, rest_bytes);
    find_classes(a, grammar);
    if (!begin(a)) {
        bool no_memory = a->no_memory;

        ns_automaton_destroy(a);
        if (no_memory)
            return ns_fail(err, NS_FATAL, "out of memory for an automaton");
        return ns_refuse(err, "grammar_limit", NULL,
                         "the grammar's first state does not fit in %zu bytes",
                         limit_bytes);
    }
    *out = a;
    return NS_OK;
}

void
ns_automaton_destroy(struct ns_automaton *a)
{
    if (!a)
        return;
    free(a->state.data);
    free(a->way.data);
    free(a->places.data);
    free(a->frame.data);
    ns_table_fini(&a->states);
    ns_table_fini(&a->frames);
    free(a->reached.data);
    free(a->todo.data);
    free(a->seen.data);
    free(a);
}

/* --- questions */

uint32_t
ns_automaton_start(const struct ns_automaton *a)
{
    (void)a;
    return FIRST;
}

uint32_t
ns_automaton_next(struct ns_automaton *a, uint32_t state, uint8_t byte)
{
    uint32_t class = a->class_of[byte], to;

    if (state == NS_AUTOMATON_FULL)
        return NS_AUTOMATON_FULL;
    to = ((const uint32_t *)a->way.data)[(size_t)state * a->n_classes + class];
    return to != UNKNOWN ? to : make_way(a, state, class);
}

bool
ns_automaton_accepts(const struct ns_automaton *a, uint32_t state)
{
    return state != NS_AUTOMATON_FULL && state_at(a, state)->accepts;
}

bool
ns_automaton_ended(const struct ns_automaton *a, uint32_t state)
{
    /* Every place goes on to an end, so no other one may be there. */
    return ns_automaton_accepts(a, state) && state_at(a, state)->n == 1;
}

uint32_t
ns_automaton_rest(const struct ns_automaton *a, uint32_t state)
{
    return state == NS_AUTOMATON_FULL ? UINT32_MAX : state_at(a, state)->rest;
}

uint8_t
ns_automaton_shortest(const struct ns_automaton *a, uint32_t state)
{
    return state == NS_AUTOMATON_FULL ? 0 : state_at(a, state)->shortest;
}

size_t
ns_automaton_bytes(const struct ns_automaton *a)
{
    return a->bytes;
}

uint32_t
ns_automaton_n_states(const struct ns_automaton *a)
{
    return (uint32_t)a->state.n - 1;
}
