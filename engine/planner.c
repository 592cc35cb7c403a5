#include "engine/planner.h"

static int64_t
effective(const struct ns_rank *rank, uint32_t age_step_ms)
{
    return rank->priority +
           (age_step_ms ? rank->waited_ms / (int64_t)age_step_ms : 0);
}

int
ns_rank_compare(const struct ns_rank *a, const struct ns_rank *b,
                uint32_t age_step_ms)
{
    int64_t x = effective(a, age_step_ms), y = effective(b, age_step_ms);

    if (x != y)
        return x > y ? -1 : 1;
    x = a->deadline_ms ? a->deadline_ms : INT64_MAX;
    y = b->deadline_ms ? b->deadline_ms : INT64_MAX;
    if (x != y)
        return x < y ? -1 : 1;
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

uint32_t
ns_planner_fill(const struct ns_want *want, uint32_t n, uint32_t budget,
                uint32_t max_segments, struct ns_grant *grant)
{
    struct filling f = { budget, 0, 0, max_segments };

    for (uint32_t i = 0; i < n; i++) {
        grant[i] = (struct ns_grant){ 0, false };
        if (!want[i].prefill && want[i].n_encode > 0 &&
            grant_whole(&f, want[i].n_encode))
            grant[i].n_encode = want[i].n_encode;
    }
    for (uint32_t i = 0; i < n; i++)
        if (want[i].n_canvas > 0 && grant[i].n_encode == want[i].n_encode &&
            grant_whole(&f, want[i].n_canvas))
            grant[i].canvas = true;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rows = want[i].n_encode < f.left ? want[i].n_encode : f.left;

        if (!want[i].prefill || rows == 0 || !grant_whole(&f, rows))
            continue;
        grant[i].n_encode = rows;
        if (rows == want[i].n_encode && want[i].n_canvas > 0 &&
            grant_whole(&f, want[i].n_canvas))
            grant[i].canvas = true;
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
