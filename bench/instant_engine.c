/* instant_engine.c - in front of the engine: every request is answered at once.
 *
 * Linked into build/bench/nightshiftd alone, by the linker's --wrap: what the
 * daemon calls of the engine while it runs jobs comes here, and nothing is
 * computed. All else is the daemon as it ships. So what is measured is all
 * that stands around the engine: intake, parsing, prompts, claims, results.
 *
 * Thread: the engine thread. One engine a process, so its state is static.
 */
#include "engine/engine.h"

#include <string.h>

enum { ROOM = 4096 };

static struct {
    uint64_t id[ROOM];
    uint32_t n_prompt[ROOM];
    uint32_t n, next; /* submitted; told of */
    bool passed;      /* what is there has had its pass */
} instant;

enum ns_status __wrap_ns_engine_submit(struct ns_engine *engine,
                                       const struct ns_request *request,
                                       struct ns_error *err);
enum ns_status __wrap_ns_engine_pass(struct ns_engine *engine,
                                     struct ns_pass_report *report,
                                     struct ns_error *err);
bool __wrap_ns_engine_next_event(struct ns_engine *engine,
                                 struct ns_event *out);
void __wrap_ns_engine_cancel(struct ns_engine *engine, uint64_t id);
struct ns_engine_load __wrap_ns_engine_load(const struct ns_engine *engine);
uint32_t __wrap_ns_engine_progress(const struct ns_engine *engine,
                                   struct ns_engine_progress *out, uint32_t n);

enum ns_status
__wrap_ns_engine_submit(struct ns_engine *engine,
                        const struct ns_request *request, struct ns_error *err)
{
    (void)engine;
    if (instant.n == ROOM)
        return ns_fail(err, NS_RETRY, "full");
    instant.id[instant.n] = request->id;
    instant.n_prompt[instant.n++] = request->n_prompt;
    return NS_OK;
}

enum ns_status
__wrap_ns_engine_pass(struct ns_engine *engine, struct ns_pass_report *report,
                      struct ns_error *err)
{
    (void)engine;
    (void)err;
    *report = (struct ns_pass_report){ .n_rows = instant.n };
    instant.passed = true;
    return NS_OK;
}

bool
__wrap_ns_engine_next_event(struct ns_engine *engine, struct ns_event *out)
{
    static const char answer[] = "Blue, as the night was when it began.";

    (void)engine;
    if (!instant.passed || instant.next == instant.n) {
        if (instant.passed)
            instant.n = instant.next = 0;
        instant.passed = false;
        return false;
    }
    *out = (struct ns_event){
        .kind = NS_EVENT_DONE,
        .id = instant.id[instant.next],
        .reply = { .content = answer, .content_length = sizeof(answer) - 1 },
        .usage = { .prompt_tokens = instant.n_prompt[instant.next],
                   .completion_tokens = 10, .blocks = 1, .passes = 1,
                   .denoise_steps = 1, .new_tokens = 10 },
    };
    instant.next++;
    return true;
}

/* One that is dropped may be told of all the same: nobody looks for it. */
void
__wrap_ns_engine_cancel(struct ns_engine *engine, uint64_t id)
{
    (void)engine;
    (void)id;
}

struct ns_engine_load
__wrap_ns_engine_load(const struct ns_engine *engine)
{
    (void)engine;
    return (struct ns_engine_load){ .running = instant.n,
                                    .pass_tokens = ROOM };
}

uint32_t
__wrap_ns_engine_progress(const struct ns_engine *engine,
                          struct ns_engine_progress *out, uint32_t n)
{
    (void)engine;
    (void)out;
    (void)n;
    return 0;
}
