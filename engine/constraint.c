#include "engine/constraint_private.h"

#include <stdlib.h>
#include <string.h>

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for a grammar's masks");
}

enum ns_status
ns_constraints_create(const struct ns_constraint_options *options,
                      struct ns_constraints **out, struct ns_error *err)
{
    size_t mask_bytes = ((size_t)options->vocab + 31) / 32 * 4;
    struct ns_constraints *c = calloc(1, sizeof(*c));

    if (!c)
        return no_memory(err);
    c->end_id = calloc(options->n_end + 1u, sizeof(*c->end_id));
    if (!c->end_id) {
        free(c);
        return no_memory(err);
    }
    for (uint32_t i = 0; i < options->n_end; i++)
        if (options->end_id[i] != options->call_id)
            c->end_id[c->n_end++] = options->end_id[i];
    c->options = *options;
    if (c->options.automaton_bytes == 0)
        c->options.automaton_bytes = NS_AUTOMATON_BYTES;
    c->open_id = ns_tokenizer_id(options->tokenizer, "<|channel>");
    c->close_id = ns_tokenizer_id(options->tokenizer, "<channel|>");
    /* Two for each that runs, whatever the vocabulary. */
    c->masks_each = (uint32_t)(NS_MASK_BYTES / mask_bytes) /
                    options->max_sequences;
    if (c->masks_each < 2)
        c->masks_each = 2;
    if (c->masks_each > options->canvas_length + 1)
        c->masks_each = options->canvas_length + 1;
    c->n_masks = c->masks_each * options->max_sequences;
    *out = c;
    return NS_OK;
}

void
ns_constraints_destroy(struct ns_constraints *c)
{
    if (!c)
        return;
    while (c->held) {
        struct held *held = c->held;

        c->held = held->next;
        ns_automaton_destroy(held->automaton);
        free(held);
    }
    for (uint32_t i = 0; c->mask && i < c->n_masks; i++)
        free(c->mask[i].bits);
    free(c->end_id);
    free(c->mask);
    free(c->bucket);
    free(c->step);
    ns_vocabulary_destroy(c->vocabulary);
    free(c);
}

void
ns_constraints_begin_pass(struct ns_constraints *c)
{
    c->pass++;
}

/* What no engine without grammars needs. */
static enum ns_status
make_tables(struct ns_constraints *c, struct ns_error *err)
{
    size_t positions = (size_t)c->options.canvas_length + 1;
    struct ns_vocabulary *vocabulary;
    enum ns_status status;

    if (c->vocabulary)
        return NS_OK;
    if (!c->mask)
        c->mask = calloc(c->n_masks, sizeof(*c->mask));
    if (!c->bucket)
        c->bucket = calloc(c->n_masks, sizeof(struct mask *));
    if (!c->step)
        c->step = calloc(positions * NS_PATH_BEAM, sizeof(*c->step));
    if (!c->mask || !c->bucket || !c->step)
        return no_memory(err);
    status = ns_vocabulary_create(c->options.tokenizer, &vocabulary, err);
    if (status == NS_OK)
        c->vocabulary = vocabulary;
    return status;
}

static bool
is_end(const struct ns_constraints *c, int32_t id)
{
    for (uint32_t i = 0; i < c->n_end; i++)
        if (c->end_id[i] == id)
            return true;
    return false;
}

/* ---- automata -------------------------------------------------------- */

/* The least lately taken of those that nobody runs, where there are too many. */
static void
let_go_of_spare(struct ns_constraints *c)
{
    struct held **oldest = NULL;
    uint32_t n_spare = 0;

    for (struct held **at = &c->held; *at; at = &(*at)->next) {
        if ((*at)->n_guides > 0)
            continue;
        n_spare++;
        if (!oldest || (*at)->used < (*oldest)->used)
            oldest = at;
    }
    if (n_spare > NS_SPARE_AUTOMATA) {
        struct held *held = *oldest;

        *oldest = held->next;
        ns_automaton_destroy(held->automaton);
        free(held);
    }
}

static enum ns_status
take_automaton(struct ns_guide *guide, struct ns_error *err)
{
    struct ns_constraints *c = guide->c;
    unsigned char hash[16];
    struct held *held;
    enum ns_status status;

    if (guide->held)
        return NS_OK;
    ns_grammar_hash(guide->grammar, hash);
    for (held = c->held; held; held = held->next)
        if (memcmp(held->hash, hash, sizeof(hash)) == 0)
            break;
    if (!held) {
        held = calloc(1, sizeof(*held));
        if (!held)
            return no_memory(err);
        status = ns_automaton_create(guide->grammar,
                                     c->options.automaton_bytes,
                                     &held->automaton, err);
        if (status != NS_OK) {
            free(held);
            return status;
        }
        memcpy(held->hash, hash, sizeof(hash));
        held->serial = ++c->n_serials;
        held->next = c->held;
        c->held = held;
    }
    held->n_guides++;
    held->used = ++c->n_takes;
    guide->held = held;
    return NS_OK;
}

/* ---- guides ---------------------------------------------------------- */

enum ns_status
ns_guide_create(struct ns_constraints *c, const struct ns_grammar *grammar,
                bool thinking, bool in_thought, struct ns_guide **out,
                struct ns_error *err)
{
    enum ns_status status = make_tables(c, err);
    struct ns_guide *guide;

    if (status != NS_OK)
        return status;
    guide = calloc(1, sizeof(*guide));
    if (!guide)
        return no_memory(err);
    guide->c = c;
    guide->grammar = grammar;
    guide->first = in_thought ? THOUGHT : thinking ? BEFORE : 0;
    guide->failure.status = NS_OK;
    *out = guide;
    return NS_OK;
}

void
ns_guide_release(struct ns_guide *guide)
{
    if (!guide->held)
        return;
    guide->held->n_guides--;
    guide->held = NULL;
    guide->serial = 0;
    let_go_of_spare(guide->c);
}

void
ns_guide_destroy(struct ns_guide *guide)
{
    if (!guide)
        return;
    ns_guide_release(guide);
    free(guide);
}

enum ns_status
ns_guide_check(const struct ns_guide *guide, struct ns_error *err)
{
    if (guide->failure.status != NS_OK)
        *err = guide->failure;
    return guide->failure.status;
}

uint32_t
ns_guide_next(struct ns_guide *guide, uint32_t place, int32_t id)
{
    const struct ns_constraints *c = guide->c;
    struct ns_automaton *automaton = guide->held->automaton;

    if (place == OVER || place == NS_AUTOMATON_DEAD)
        return place;
    if (place == BEFORE) {
        if (id == c->open_id)
            return THOUGHT;
        place = ns_automaton_start(automaton);
    }
    if (place == THOUGHT) {
        if (id == c->close_id)
            return ns_automaton_start(automaton);
        return ns_vocabulary_has(c->vocabulary, id) ? THOUGHT
                                                    : NS_AUTOMATON_DEAD;
    }
    if (is_end(c, id))
        return ns_automaton_accepts(automaton, place) ? OVER
                                                      : NS_AUTOMATON_DEAD;
    return ns_vocabulary_next(c->vocabulary, automaton, place, id);
}

static bool
find_place(struct ns_guide *guide)
{
    if (guide->serial != guide->held->serial) {
        guide->serial = guide->held->serial;
        guide->n_followed = 0;
        guide->place = guide->first
                           ? guide->first
                           : ns_automaton_start(guide->held->automaton);
    }
    while (guide->n_followed < guide->n_answer) {
        uint32_t next = ns_guide_next(guide, guide->place,
                                      guide->answer[guide->n_followed]);

        if (next == NS_AUTOMATON_FULL)
            return false;
        guide->place = next;
        guide->n_followed++;
    }
    return true;
}

bool
ns_guide_work(struct ns_guide *guide, bool (*work)(void *ctx), void *ctx)
{
    if (guide->failure.status != NS_OK ||
        take_automaton(guide, &guide->failure) != NS_OK)
        return false;
    for (int i = 0; i < 2; i++) {
        if (find_place(guide) && (!work || work(ctx)))
            return true;
        ns_automaton_reset(guide->held->automaton);
        guide->held->serial = ++guide->c->n_serials;
    }
    ns_refuse(&guide->failure, "grammar_limit", "body.response_format",
              "the grammar takes more than %zu KB of states",
              guide->c->options.automaton_bytes >> 10);
    return false;
}

void
ns_guide_follow(struct ns_guide *guide, const int32_t *answer, uint32_t n)
{
    guide->answer = answer;
    guide->n_answer = n;
    ns_guide_work(guide, NULL, NULL);
}

void
ns_guide_fail_unspeakable(struct ns_guide *guide)
{
    ns_refuse(&guide->failure, "unsupported", "body.response_format",
              "the model has no token that goes on in this grammar");
}

static bool
in_grammar(uint32_t place)
{
    return place != BEFORE && place != THOUGHT && place != OVER;
}

bool
ns_guide_ended(const struct ns_guide *guide)
{
    return guide->failure.status == NS_OK && guide->held &&
           guide->serial == guide->held->serial && in_grammar(guide->place) &&
           ns_automaton_ended(guide->held->automaton, guide->place);
}

struct judging {
    struct ns_automaton *automaton;
    const char *content;
    size_t length;
    uint32_t state;
};

static bool
read_content(void *ctx)
{
    struct judging *j = ctx;

    j->state = ns_automaton_start(j->automaton);
    for (size_t i = 0; i < j->length && j->state != NS_AUTOMATON_FULL; i++)
        j->state = ns_automaton_next(j->automaton, j->state,
                                     (uint8_t)j->content[i]);
    return j->state != NS_AUTOMATON_FULL;
}

enum ns_status
ns_guide_judge(struct ns_guide *guide, const char *content, size_t length,
               const char *cut, struct ns_error *err)
{
    struct judging j = { .content = content, .length = length };

    if (guide->failure.status == NS_OK &&
        take_automaton(guide, &guide->failure) == NS_OK)
        j.automaton = guide->held->automaton;
    if (!ns_guide_work(guide, read_content, &j))
        return ns_guide_check(guide, err);
    if (ns_automaton_accepts(j.automaton, j.state))
        return NS_OK;
    if (j.state == NS_AUTOMATON_DEAD)
        return ns_refuse(err, "grammar_incomplete", "body.response_format",
                         "%s: the answer is not of the form that was asked "
                         "for", cut);
    return ns_refuse(err, "grammar_incomplete", "body.response_format",
                     "%s: the answer is not whole, %u bytes are missing at "
                     "least", cut,
                     ns_automaton_rest(j.automaton, j.state));
}

/* ---- masks ----------------------------------------------------------- */

static void
allow(uint32_t *bits, int32_t id)
{
    if (id >= 0)
        bits[id / 32] |= 1u << id % 32;
}

static bool
make_bits(struct ns_guide *guide, uint32_t place, uint32_t *bits)
{
    const struct ns_constraints *c = guide->c;
    struct ns_automaton *automaton = guide->held->automaton;
    size_t words = ((size_t)c->options.vocab + 31) / 32;

    memset(bits, 0, words * sizeof(*bits));
    if (place == THOUGHT) {
        for (int32_t id = 0; id < (int32_t)c->options.vocab; id++)
            if (ns_vocabulary_has(c->vocabulary, id))
                allow(bits, id);
        allow(bits, c->close_id);
        return true;
    }
    if (place == BEFORE) {
        allow(bits, c->open_id);
        place = ns_automaton_start(automaton);
    }
    if (ns_automaton_accepts(automaton, place))
        for (uint32_t i = 0; i < c->n_end; i++)
            allow(bits, c->end_id[i]);
    if (!ns_vocabulary_mask(c->vocabulary, automaton, place, bits))
        return false;
    for (size_t i = 0; i < words; i++)
        if (bits[i] != 0)
            return true;
    ns_guide_fail_unspeakable(guide);
    return true;
}

static struct mask **
bucket_of(const struct ns_constraints *c, uint64_t serial, uint32_t state)
{
    uint64_t key = (serial << 32 | state) * 0x9e3779b97f4a7c15u;

    return &c->bucket[(key >> 32) % c->n_masks];
}

static void
take_out(struct ns_constraints *c, struct mask *mask)
{
    struct mask **at = bucket_of(c, mask->serial, mask->state);

    while (*at != mask)
        at = &(*at)->next;
    *at = mask->next;
    mask->serial = 0;
}

/* One that this pass does not use, by turns. */
static struct mask *
free_mask(struct ns_constraints *c)
{
    for (uint32_t i = 0; i < c->n_masks; i++) {
        struct mask *mask = &c->mask[c->next_mask++ % c->n_masks];

        if (mask->serial != 0 && mask->pass == c->pass)
            continue;
        if (mask->serial != 0)
            take_out(c, mask);
        if (!mask->bits)
            mask->bits = malloc(((size_t)c->options.vocab + 31) / 32 *
                                sizeof(*mask->bits));
        return mask->bits ? mask : NULL;
    }
    return NULL;
}

/* NULL in `out` when there is no room for one more in this pass. False: the
 * automaton is full. */
static bool
mask_of(struct ns_guide *guide, uint32_t place, const uint32_t **out)
{
    struct ns_constraints *c = guide->c;
    uint64_t serial = guide->held->serial;
    struct mask **bucket = bucket_of(c, serial, place), *mask = *bucket;

    while (mask && (mask->serial != serial || mask->state != place))
        mask = mask->next;
    if (!mask) {
        mask = free_mask(c);
        *out = NULL;
        if (!mask)
            return true;
        if (!make_bits(guide, place, mask->bits))
            return false;
        mask->serial = serial;
        mask->state = place;
        mask->next = *bucket;
        *bucket = mask;
    }
    mask->pass = c->pass;
    *out = mask->bits;
    return true;
}

struct masking {
    struct ns_guide *guide;
    const int32_t *draft;
    const uint32_t **out;
    uint32_t n, n_done;
};

static bool
make_masks(void *ctx)
{
    struct masking *m = ctx;
    uint32_t place = m->guide->place;

    for (m->n_done = 0; m->n_done <= m->n; m->n_done++) {
        const uint32_t **out = &m->out[m->n_done];

        if (m->n_done > 0)
            place = ns_guide_next(m->guide, place, m->draft[m->n_done - 1]);
        if (place == NS_AUTOMATON_FULL)
            return false;
        *out = NULL;
        if (place == NS_AUTOMATON_DEAD || place == OVER)
            continue;
        if (!mask_of(m->guide, place, out))
            return false;
        if (!*out)
            break;
    }
    return true;
}

uint32_t
ns_guide_masks(struct ns_guide *guide, const int32_t *draft, uint32_t n,
               const uint32_t **out)
{
    uint32_t most = guide->c->masks_each - 1;
    struct masking m = { guide, draft, out, n < most ? n : most, 0 };

    if (!ns_guide_work(guide, make_masks, &m))
        return 0;
    if (m.n_done == 0 || (n > 0 && m.n_done == 1))
        no_memory(&guide->failure);
    return guide->failure.status == NS_OK ? m.n_done : 0;
}
