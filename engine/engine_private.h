/* engine_private.h - what the halves of the engine share.
 *
 * Private to engine_open.c (opening, closing, what is const between) and
 * engine.c (requests, events, the pass).
 */
#ifndef NS_ENGINE_ENGINE_PRIVATE_H
#define NS_ENGINE_ENGINE_PRIVATE_H

#include "engine/batch.h"
#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/kvcache.h"
#include "engine/outlook.h"
#include "engine/planner.h"
#include "engine/sequence.h"
#include "engine/trace.h"
#include "engine/vision.h"

enum { NS_WAITING_PER_RUNNING = 4 };

struct ns_sequence_list {
    struct ns_sequence **item;
    uint32_t n, capacity;
};

struct ns_engine {
    struct ns_engine_options options;
    struct ns_backend *be;
    struct ns_model *model;
    struct ns_tokenizer *tokenizer;
    struct ns_kvcache *kv;
    struct ns_batch *batch;
    struct ns_forward *fw;
    struct ns_vision *vision; /* NULL: the model does not see */
    struct ns_memory_plan memory;
    struct ns_answer_rules rules;
    char revision[80];
    bool empty_thought;

    struct ns_sequence_list waiting, running, over; /* over: their events may be read */
    struct ns_event *events;
    uint32_t n_events, next_event, event_capacity;
    /* scratch of a pass, [max_sequences] */
    struct ns_want *want;
    struct ns_grant *grant;
    struct ns_rank *rank;
    /* and of its pictures, [n_image_room] */
    const struct ns_image **image;
    const float **image_soft;
    uint32_t n_image_room;

    struct ns_outlook *outlook;
    uint32_t n_learnt; /* passes that the outlook has seen */

    const struct ns_trace *trace;
    uint64_t n_submitted, n_put_back;
};

/* Drops the sequences and their holds; the list is empty then. */
void ns_engine_drop_all(struct ns_engine *engine,
                        struct ns_sequence_list *list);

#endif
