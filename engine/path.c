/* path.c - the likeliest text of a grammar over a canvas (ns_guide_path).
 *
 * Positions go by one after the other. At each stand the best ways so far, one
 * for each place of the grammar that they lead to, NS_PATH_BEAM at most; each
 * goes on with every candidate of the position that the grammar allows there. A
 * token's worth is its logit less the position's highest: what divides it from
 * a probability is the same for all paths.
 */
#include "engine/constraint_private.h"

#include <math.h>

/* Below the last candidate, for what the model did not name. */
static const float unnamed = 4.0f;
/* What is so much less likely than the likeliest is not tried: a candidate of a
 * position, and a way among those to a position. */
static const float hopeless = 16.0f, lost = 48.0f;

struct walk {
    struct ns_guide *guide;
    const struct ns_candidate (*top)[NS_HEAD_TOP];
    uint32_t length;
    int32_t *path;
};

struct beam {
    struct step *step;
    uint32_t n;
};

/* One way to each place, and only so many. The first to come stays among
 * equals. */
static void
offer(struct beam *beam, const struct step *step)
{
    uint32_t worst = 0;

    for (uint32_t i = 0; i < beam->n; i++) {
        if (beam->step[i].place == step->place) {
            if (step->score > beam->step[i].score)
                beam->step[i] = *step;
            return;
        }
        if (beam->step[i].score <= beam->step[worst].score)
            worst = i;
    }
    if (beam->n < NS_PATH_BEAM)
        beam->step[beam->n++] = *step;
    else if (step->score > beam->step[worst].score)
        beam->step[worst] = *step;
}

/* Adds the way by one token. False: the automaton is full. */
static bool
go_on(const struct walk *walk, struct beam *to, const struct step *at,
      uint32_t from, int32_t id, float worth)
{
    struct step step = {
        .place = ns_guide_next(walk->guide, at->place, id),
        .token = id,
        .from = from,
        .score = at->score + worth,
    };

    if (step.place == NS_AUTOMATON_FULL)
        return false;
    if (step.place != NS_AUTOMATON_DEAD)
        offer(to, &step);
    return true;
}

/* What takes a text nearer to its end, whatever the model says. */
static int32_t
forced_token(const struct ns_guide *guide, uint32_t place)
{
    struct ns_automaton *automaton = guide->held->automaton;

    if (place == THOUGHT)
        return guide->c->close_id;
    if (place == BEFORE)
        place = ns_automaton_start(automaton);
    if (ns_automaton_accepts(automaton, place))
        return guide->c->end_id[0];
    return ns_vocabulary_shortest(guide->c->vocabulary, automaton, place);
}

static bool
step_from(const struct walk *walk, struct beam *to, const struct step *at,
          uint32_t from, const struct ns_candidate top[NS_HEAD_TOP])
{
    float highest = top[0].z, least = highest;
    uint32_t n = at->place == OVER ? 1 : NS_HEAD_TOP;

    for (uint32_t i = 0; i < n && top[i].id >= 0 &&
                         top[i].z >= highest - hopeless; i++) {
        least = top[i].z;
        if (!go_on(walk, to, at, from, top[i].id, top[i].z - highest))
            return false;
    }
    return at->place == OVER ||
           go_on(walk, to, at, from, forced_token(walk->guide, at->place),
                 least - highest - unnamed);
}

static bool
find_path(void *ctx)
{
    struct walk *walk = ctx;
    struct step *all = walk->guide->c->step;
    struct beam beam = { all, 1 };
    uint32_t best = 0;

    beam.step[0] = (struct step){ .place = walk->guide->place };
    for (uint32_t p = 0; p < walk->length; p++) {
        struct beam next = { beam.step + NS_PATH_BEAM, 0 };
        float most = -INFINITY;

        for (uint32_t i = 0; i < beam.n; i++)
            most = fmaxf(most, beam.step[i].score);
        for (uint32_t i = 0; i < beam.n; i++)
            if (beam.step[i].score >= most - lost &&
                !step_from(walk, &next, &beam.step[i], i, walk->top[p]))
                return false;
        beam = next;
    }
    if (beam.n == 0) {
        ns_guide_fail_unspeakable(walk->guide);
        return true;
    }
    for (uint32_t i = 1; i < beam.n; i++)
        if (beam.step[i].score > beam.step[best].score)
            best = i;
    for (uint32_t p = walk->length; p-- > 0;) {
        const struct step *step = &all[(p + 1) * NS_PATH_BEAM + best];

        walk->path[p] = step->token;
        best = step->from;
    }
    return true;
}

bool
ns_guide_path(struct ns_guide *guide,
              const struct ns_candidate (*top)[NS_HEAD_TOP], uint32_t length,
              int32_t *path)
{
    struct walk walk = { guide, top, length, path };

    return ns_guide_work(guide, find_path, &walk) &&
           guide->failure.status == NS_OK;
}
