/* board.h - where each job in the engine stands, for who looks on.
 *
 * The engine thread puts up what it sees between two passes, a few times a
 * second at most; the web server reads it. Both copy a few kilobytes under the
 * lock, so neither waits for more than that. Jobs are numbers here, given out
 * by the engine: no id and no text comes in.
 *
 * Owns: its copies. Thread: any, put from one.
 */
#ifndef NS_DAEMON_BOARD_H
#define NS_DAEMON_BOARD_H

#include <pthread.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/engine.h"

enum { NS_BOARD_JOBS = 64 };

struct ns_board_view {
    uint32_t n, n_running; /* shown; in the engine, those left out counted */
    struct ns_engine_progress job[NS_BOARD_JOBS];
};

struct ns_board {
    pthread_mutex_t lock; /* guards the rest; innermost, held for a copy */
    struct ns_board_view view;
    int64_t put_at_ms; /* the engine thread's: not before */
};

void ns_board_init(struct ns_board *board);
void ns_board_fini(struct ns_board *board);

/* The engine thread, behind a pass, and when nothing runs any more. */
void ns_board_put(struct ns_board *board, const struct ns_engine *engine);
void ns_board_clear(struct ns_board *board);

/* Appends a JSON array of what stands there, lowest number first. */
void ns_board_write(struct ns_board *board, struct ns_buf *out);

#endif
