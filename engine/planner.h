/* planner.h - which segments the next pass carries, who runs, who yields.
 *
 * Pure: it sees what sequences want and what a pass may hold, and no device,
 * page or token. Each pass is filled level by level: those of the highest
 * priority, raised by one for each age step waited, and of these those with the
 * earliest deadline. Within a level commits and autoregressive tokens go first
 * (they free canvases), then canvases, then prefill chunks, and among these
 * whose shared prefix is ready; then the longest; then who came first.
 */
#ifndef NS_ENGINE_PLANNER_H
#define NS_ENGINE_PLANNER_H

#include <stdbool.h>
#include <stdint.h>

/* How a sequence stands in the queue. */
struct ns_rank {
    int32_t priority;
    int64_t waited_ms;   /* since it was submitted */
    int64_t deadline_ms; /* 0: none */
    bool prefix_ready;   /* another left a prefix that it can adopt */
    uint32_t length;     /* tokens of prompt and answer */
    uint64_t number;     /* of submission */
};

/* < 0 when a goes before b. Total: never 0 for different numbers. */
int ns_rank_compare(const struct ns_rank *a, const struct ns_rank *b,
                    uint32_t age_step_ms);

/* Whether a is on a higher level than b: by priority or by deadline, and not
 * only ahead of it among equals. */
bool ns_rank_presses(const struct ns_rank *a, const struct ns_rank *b,
                     uint32_t age_step_ms);

/* Positions first..end - 1 of a prompt that go into one pass together: what a
 * picture stands for. */
struct ns_whole {
    uint32_t first, end;
};

/* What a running sequence wants of the next pass. */
struct ns_want {
    uint32_t level;    /* equal on one level, rising in rank order */
    uint32_t n_encode; /* known tokens to put behind the prefix */
    bool prefill;      /* they may be cut into chunks, but not inside of these */
    uint32_t n_canvas; /* rows of a canvas that may run once all are encoded,
                        * in the same pass if there is room; 0: none */
    uint32_t at;       /* position of the first known token */
    const struct ns_whole *whole; /* rising, borrowed for the call */
    uint32_t n_whole;
};

struct ns_grant {
    uint32_t n_encode; /* rows granted; 0 or all unless prefill */
    bool canvas;
};

/* Fills `grant` for the n running sequences, given in rank order. The sum of
 * rows stays within `budget`, but for a first segment that alone is larger. A
 * picture that does not fit into what the others leave of a pass goes first
 * into this one: else there might never be room for it.
 * Returns the rows granted. */
uint32_t ns_planner_fill(const struct ns_want *want, uint32_t n,
                         uint32_t budget, uint32_t max_segments,
                         struct ns_grant *grant);

/* Who is put back when pages run out: the youngest of the lowest priority,
 * never the oldest of all. `rank` of the n running; returns n when no one may
 * be. */
uint32_t ns_planner_victim(const struct ns_rank *rank, uint32_t n);

#endif
