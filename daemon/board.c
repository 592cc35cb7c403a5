#include "daemon/board.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/work.h"

enum { PUT_MS = 200 };

void
ns_board_init(struct ns_board *board)
{
    memset(board, 0, sizeof(*board));
    pthread_mutex_init(&board->lock, NULL);
}

void
ns_board_fini(struct ns_board *board)
{
    pthread_mutex_destroy(&board->lock);
}

static void
replace(struct ns_board *board, const struct ns_board_view *view)
{
    pthread_mutex_lock(&board->lock);
    board->view.n = view->n;
    board->view.n_running = view->n_running;
    memcpy(board->view.job, view->job, view->n * sizeof(view->job[0]));
    pthread_mutex_unlock(&board->lock);
}

void
ns_board_put(struct ns_board *board, const struct ns_engine *engine)
{
    int64_t now_ms = ns_now_ms();
    struct ns_board_view view;

    if (now_ms < board->put_at_ms)
        return;
    board->put_at_ms = now_ms + PUT_MS;
    view.n_running = ns_engine_load(engine).running;
    view.n = ns_engine_progress(engine, view.job, NS_BOARD_JOBS);
    replace(board, &view);
}

void
ns_board_clear(struct ns_board *board)
{
    struct ns_board_view view;

    view.n = view.n_running = 0;
    board->put_at_ms = 0;
    replace(board, &view);
}

static int
by_number(const void *a, const void *b)
{
    uint64_t x = ((const struct ns_engine_progress *)a)->id;
    uint64_t y = ((const struct ns_engine_progress *)b)->id;

    return (x > y) - (x < y);
}

static void
write_job(const struct ns_engine_progress *job, int64_t now_ms, struct ns_buf *out)
{
    static const char *const modes[] = { "auto", "diffusion", "ar", "hybrid" };
    static const char *const stages[] = { "prefill", "denoise", "commit",
                                          "ar" };

    ns_buf_printf(out,
                  "{\"job\":%" PRIu64 ",\"mode\":\"%s\",\"stage\":\"%s\""
                  ",\"run_ms\":%" PRId64 ",\"prompt\":%u,\"read\":%u"
                  ",\"tokens\":%u,\"max_tokens\":%u,\"block\":%u",
                  job->id, modes[job->mode], stages[job->stage],
                  now_ms - job->submitted_ms, job->n_prompt, job->n_read,
                  job->n_tokens, job->max_tokens, job->block);
    if (job->stage == NS_STAGE_DENOISE) {
        uint32_t n = job->canvas_length < NS_PROGRESS_CELLS
                         ? job->canvas_length : NS_PROGRESS_CELLS;

        ns_buf_printf(out, ",\"step\":%u,\"max_steps\":%u,\"canvas\":%u"
                      ",\"accepted\":%u,\"cells\":\"", job->step,
                      job->max_steps, job->canvas_length, job->n_accepted);
        for (uint32_t i = 0; i < (n + 7) / 8; i++)
            ns_buf_printf(out, "%02x", job->accepted[i]);
        ns_buf_byte(out, '"');
    }
    ns_buf_byte(out, '}');
}

void
ns_board_write(struct ns_board *board, struct ns_buf *out)
{
    int64_t now_ms = ns_now_ms();
    struct ns_board_view view;

    pthread_mutex_lock(&board->lock);
    view = board->view;
    pthread_mutex_unlock(&board->lock);
    qsort(view.job, view.n, sizeof(view.job[0]), by_number);
    ns_buf_byte(out, '[');
    for (uint32_t i = 0; i < view.n; i++) {
        ns_buf_text(out, i ? "," : "");
        write_job(&view.job[i], now_ms, out);
    }
    ns_buf_byte(out, ']');
}
