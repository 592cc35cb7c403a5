#include "engine/planner.h"

static int64_t
effective(const struct ns_rank *rank, uint32_t age_step_ms)
{
    return rank->priority +
           (age_step_ms ? rank->waited_ms / (int64_t)age_step_ms : 0);
}

static int
compare_levels(const struct ns_rank *a, const struct ns_rank *b,
               uint32_t age_step_ms)
{
    int64_t x = effective(a, age_step_ms), y = effective(b, age_step_ms);

    if (x != y)
        return x > y ? -1 : 1;
    x = a->deadline_ms ? a->deadline_ms : INT64_MAX;
    y = b->deadline_ms ? b->deadline_ms : INT64_MAX;
    return x < y ? -1 : x > y;
}

bool
ns_rank_presses(const struct ns_rank *a, const struct ns_rank *b,
                uint32_t age_step_ms)
{
    return compare_levels(a, b, age_step_ms) < 0;
}

int
ns_rank_compare(const struct ns_rank *a, const struct ns_rank *b,
                uint32_t age_step_ms)
{
    int order = compare_levels(a, b, age_step_ms);

    if (order != 0)
        return order;
    if (a->prefix_ready != b->prefix_ready)
        return a->prefix_ready ? -1 : 1;
    if (a->length != b->length)
        return a->length > b->length ? -1 : 1;
    return a->number < b->number ? -1 : a->number > b->number;
}

struct filling {
    uint32_t left, used, n_segments, max_segments;
};

/* A whole segment of `rows`, or nothing. The first of a pass always goes. */
static bool
grant_whole(struct filling *f, uint32_t rows)
{
    if (f->n_segments == f->max_segments || (f->used > 0 && rows > f->left))
        return false;
    f->left -= rows < f->left ? rows : f->left;
    f->used += rows;
    f->n_segments++;
    return true;
}

/* The longest chunk of up to `most` rows that cuts nothing that is whole; 0 if
 * something whole begins right there and is longer. */
static uint32_t
chunk(const struct ns_want *want, uint32_t most)
{
    uint32_t rows = want->n_encode < most ? want->n_encode : most;

    for (uint32_t i = 0; i < want->n_whole; i++) {
        const struct ns_whole *whole = &want->whole[i];
        uint32_t end = want->at + rows;

        if (whole->first < end && end < whole->end)
            return whole->first > want->at ? whole->first - want->at : 0;
    }
    return rows;
}

/* What has to go into one pass before anything else of this sequence can. */
static uint32_t
least(const struct ns_want *want)
{
    for (uint32_t i = 0; i < want->n_whole; i++)
        if (want->whole[i].first <= want->at && want->at < want->whole[i].end)
            return want->whole[i].end - want->at;
    return 1;
}

static bool
grant_prefill(struct filling *f, const struct ns_want *want, uint32_t rows,
              struct ns_grant *grant)
{
    if (rows == 0 || !grant_whole(f, rows))
        return false;
    grant->n_encode = rows;
    if (rows == want->n_encode && want->n_canvas > 0 &&
        grant_whole(f, want->n_canvas))
        grant->canvas = true;
    return true;
}

/* Fills from the sequences from..to - 1, which are on one level. Returns the
 * first of them whose picture found too little room where text would have found
 * some; or `none`. */
static uint32_t
fill_level(const struct ns_want *want, uint32_t from, uint32_t to,
           uint32_t none, struct filling *f, struct ns_grant *grant)
{
    uint32_t stuck = none;

    for (uint32_t i = from; i < to; i++)
        if (!want[i].prefill && want[i].n_encode > 0 &&
            grant_whole(f, want[i].n_encode))
            grant[i].n_encode = want[i].n_encode;
    for (uint32_t i = from; i < to; i++)
        if (want[i].n_canvas > 0 && !grant[i].canvas &&
            grant[i].n_encode == want[i].n_encode &&
            grant_whole(f, want[i].n_canvas))
            grant[i].canvas = true;
    for (uint32_t i = from; i < to; i++) {
        uint32_t rows;

        if (!want[i].prefill || grant[i].n_encode > 0)
            continue;
        rows = chunk(&want[i], f->left);
        if (!grant_prefill(f, &want[i], rows, &grant[i]) && stuck == none &&
            rows == 0 && f->left > 0)
            stuck = i;
    }
    return stuck;
}

/* Fills with `first` (n: none) in front of all levels. Returns whose picture
 * got stuck, or n. */
static uint32_t
fill(const struct ns_want *want, uint32_t n, struct filling *f, uint32_t first,
     struct ns_grant *grant)
{
    uint32_t stuck = n, to;

    for (uint32_t i = 0; i < n; i++)
        grant[i] = (struct ns_grant){ 0, false };
    if (first < n) {
        uint32_t rows = chunk(&want[first], f->left);

        (void)grant_prefill(f, &want[first],
                            rows > 0 ? rows : least(&want[first]),
                            &grant[first]);
    }
    for (uint32_t from = 0; from < n; from = to) {
        uint32_t found;

        for (to = from + 1; to < n && want[to].level == want[from].level;)
            to++;
        found = fill_level(want, from, to, n, f, grant);
        if (stuck == n)
            stuck = found;
    }
    return stuck;
}

uint32_t
ns_planner_fill(const struct ns_want *want, uint32_t n, uint32_t budget,
                uint32_t max_segments, struct ns_grant *grant)
{
    struct filling f = { budget, 0, 0, max_segments };
    uint32_t stuck = fill(want, n, &f, n, grant);

    if (stuck < n) {
        f = (struct filling){ budget, 0, 0, max_segments };
        fill(want, n, &f, stuck, grant);
    }
    return f.used;
}

uint32_t
ns_planner_victim(const struct ns_rank *rank, uint32_t n)
{
    uint32_t oldest = 0, victim = n;

    for (uint32_t i = 1; i < n; i++)
        if (rank[i].number < rank[oldest].number)
            oldest = i;
    for (uint32_t i = 0; i < n; i++) {
        if (i == oldest)
            continue;
        if (victim == n || rank[i].priority < rank[victim].priority ||
            (rank[i].priority == rank[victim].priority &&
             rank[i].number > rank[victim].number))
            victim = i;
    }
    return victim;
}
