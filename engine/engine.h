/* engine.h - the public face: requests in, passes, blocks and completions out.
 *
 * The engine holds a model on a backend and a set of sequences in flight.
 * ns_engine_pass runs one forward pass over a ragged batch that the planner
 * fills from all of them; what it finished comes out as events. Nothing here
 * knows of jobs: daemon/ turns a job into a request and a completion into a
 * result.
 *
 *     submit --> waiting --> PREFILL --> DENOISE <--> COMMIT --> done event
 *                   ^            `--> AR --> AR ...  --------------^
 *                   `---- put back when pages run out (loses no block)
 *
 * Owns:    model, tokenizer, backend, pages, sequences.
 * Borrows: a request's prompt, images, stop strings and resume tokens, until
 *          its done or failed event has been taken.
 * Thread:  the engine thread, except the functions marked `any`, which read
 *          only what is const after open.
 */
#ifndef NS_ENGINE_ENGINE_H
#define NS_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/grammar.h"
#include "engine/image.h"
#include "engine/model.h"
#include "engine/reply.h"
#include "engine/tokenizer.h"
#include "kernels/backend.h"

enum ns_mode {
    NS_MODE_AUTO, /* of a job only: resolved before submit */
    NS_MODE_DIFFUSION,
    NS_MODE_AR,
    NS_MODE_HYBRID,
};

/* Jobs that are alike: what they are expected to cost is learnt apart. */
enum ns_job_class {
    NS_CLASS_OTHER,
    NS_CLASS_CODE,
    NS_CLASS_SUMMARY,
    NS_CLASS_PICTURE,
    NS_N_JOB_CLASSES,
};

struct ns_engine_options {
    const char *model_directory;
    struct ns_backend_options backend;
    uint32_t pass_tokens;    /* rows of a pass; 0: 512 (cpu), 8192 (cuda) */
    uint32_t max_sequences;  /* running at once; 0: 16 (cpu), 64 (cuda). Four
                              * times as many may wait */
    uint64_t kv_bytes;       /* both pools; 0: 256 MB, or what one job of
                              * the longest context needs */
    uint64_t memory_bytes;   /* all that the engine may take; 0: 3/4 of what
                              * the machine has available */
    uint32_t reserve_tokens; /* admission reserves prompt + this; 0: 2048 */
    uint32_t age_step_s;     /* waiting this long raises priority by 1; 0: 600 */
    bool kv_plain;           /* K and V of full layers apart: the reference of
                              * the compact form */
    bool no_prefix_sharing;
    uint64_t image_cache_bytes; /* image soft tokens kept for further jobs with
                                 * the same picture; 0: room for 32, at most
                                 * 128 MB */
};

struct ns_engine;

enum ns_status ns_engine_open(const struct ns_engine_options *options,
                              struct ns_engine **out, struct ns_error *err);
void ns_engine_close(struct ns_engine *engine); /* takes NULL */

const struct ns_model *ns_engine_model(const struct ns_engine *); /* any */
const struct ns_tokenizer *ns_engine_tokenizer(
    const struct ns_engine *); /* any */
/* Whether the checkpoint's chat_template.jinja is of the dialect that ends a
 * prompt without thinking in an empty thought (ns_prompt_options). any */
bool ns_engine_empty_thought(const struct ns_engine *);
/* Build, backend and arithmetic: equal bytes are promised within one. any */
const char *ns_engine_revision(const struct ns_engine *);

/* Where the memory goes; all of it is taken at open. any */
struct ns_memory_plan {
    uint64_t weight_bytes, full_bytes, sliding_bytes; /* the two pools */
    uint64_t workspace_bytes, canvas_bytes, total_bytes;
    uint32_t full_pages, sliding_pages; /* of NS_PAGE positions */
    uint64_t full_page_bytes, sliding_page_bytes; /* over all their layers */
};
const struct ns_memory_plan *ns_engine_memory(const struct ns_engine *);
/* The same without opening: for `inspect`. `model` from ns_model_describe. */
enum ns_status ns_engine_plan_memory(const struct ns_model *model,
                                     const struct ns_engine_options *options,
                                     struct ns_memory_plan *out,
                                     struct ns_error *err);

struct ns_sampler_options { /* ns_generation's values where a job names none */
    float t_min, t_max;
    float entropy_bound;
    uint32_t max_denoising_steps;
    uint32_t stability_threshold;
    float confidence_threshold;
};

struct ns_request_image {
    uint32_t position; /* in the prompt, of its first placeholder: there are
                        * image->size.n_tokens of them */
    const struct ns_image *image;
};

struct ns_request {
    uint64_t id; /* the caller's; comes back in events */
    const int32_t *prompt;
    uint32_t n_prompt;
    const struct ns_request_image *images; /* in order of position */
    uint32_t n_images;
    enum ns_mode mode; /* not AUTO */
    enum ns_job_class job_class;
    uint64_t seed;
    uint32_t max_tokens;
    uint32_t canvas_length; /* 16..L, multiple of 16; 0: L */
    bool has_temperature;   /* absent: ar and hybrid take the argmax, diffusion
                             * keeps its schedule */
    float temperature;      /* of ar's draw, so of hybrid's verdict; 0: argmax.
                             * diffusion: scales t_min and t_max */
    float top_p;            /* 1: off; ar and hybrid only */
    bool thinking;          /* the prompt asks for a thought */
    bool in_thought;        /* the prompt already opened it */
    uint32_t thinking_budget; /* tokens; 0: none but max_tokens */
    struct ns_sampler_options sampler;
    const char *const *stop;
    size_t n_stop;
    int32_t priority;    /* higher first */
    int64_t deadline_ms; /* Unix time; 0: none. Orders, does not expire. */
    /* A resumed request: tokens of blocks committed before, in order. */
    const int32_t *resume;
    uint32_t n_resume, resume_blocks;
    /* A text to start from (draft.h); not in ar. Borrowed like the prompt. */
    const int32_t *draft;
    uint32_t n_draft;
    /* What the answer's content must be a text of (grammar.h); NULL: any.
     * Borrowed like the prompt. */
    const struct ns_grammar *grammar;
};

/* Whether the request can ever run here: context, pools, ranges. Codes:
 * over_context, over_memory, bad_param, unsupported, empty_prompt, image_limit.
 * any */
enum ns_status ns_engine_check(const struct ns_engine *,
                               const struct ns_request *request,
                               struct ns_error *err);

/* Copies the request; NS_RETRY when too many wait already. */
enum ns_status ns_engine_submit(struct ns_engine *,
                                const struct ns_request *request,
                                struct ns_error *err);
/* Drops the sequence; no further pass makes an event of it. Unknown ids are
 * ignored. May be called while events are being read. */
void ns_engine_cancel(struct ns_engine *, uint64_t id);

enum ns_finish { NS_FINISH_STOP, NS_FINISH_LENGTH, NS_FINISH_TOOL_CALLS };

struct ns_usage {
    uint32_t prompt_tokens, cached_tokens; /* cached: shared prefix */
    uint32_t image_tokens; /* of the prompt's */
    uint32_t completion_tokens, reasoning_tokens;
    uint32_t blocks;        /* committed, those before a resume counted */
    uint32_t passes;        /* all passes but prefill, since submit */
    uint32_t denoise_steps; /* since submit */
    uint32_t drafted, kept; /* hybrid: draft tokens judged, kept */
    uint32_t new_tokens;    /* generated since submit, padding not counted */
};

enum ns_event_kind {
    NS_EVENT_BLOCK,  /* a block joined the prefix: a checkpoint */
    NS_EVENT_DONE,   /* the completion */
    NS_EVENT_FAILED, /* error: REJECT (the request's fault) or RETRY */
};

struct ns_event { /* borrowed until the next pass */
    enum ns_event_kind kind;
    uint64_t id;
    uint32_t block;        /* BLOCK: index from 0 */
    const int32_t *tokens; /* BLOCK: that block's; DONE: all, end token out */
    uint32_t n_tokens;
    struct ns_reply_text reply; /* DONE */
    enum ns_finish finish;      /* DONE */
    struct ns_usage usage;
    struct ns_error error; /* FAILED */
};

/* False when there is none left. */
bool ns_engine_next_event(struct ns_engine *, struct ns_event *out);

struct ns_pass_report {
    uint32_t n_rows, n_segments, n_canvases;
    uint32_t prefill_rows, canvas_rows, commit_rows, ar_rows;
    uint32_t new_tokens; /* that became part of an answer */
    uint64_t ns;         /* wall time */
    uint64_t predicted_ns; /* what it was expected to take; 0 while the rates
                            * of this machine are a guess */
    uint64_t plan_ns;    /* of it, before the first operation */
};

/* One pass; at most one. `report->n_rows` is 0 when there was nothing to do.
 * NS_FATAL when the backend is broken: the engine is then only good to close. */
enum ns_status ns_engine_pass(struct ns_engine *,
                              struct ns_pass_report *report,
                              struct ns_error *err);

/* What is to be expected of jobs here (outlook.h). any */
struct ns_outlook;
struct ns_outlook *ns_engine_outlook(const struct ns_engine *);

struct ns_engine_load { /* a snapshot */
    uint32_t running, waiting;
    uint32_t pass_tokens; /* rows that a pass may have */
    uint32_t age_step_ms;
    uint32_t full_pages_free, sliding_pages_free;
    uint64_t put_back; /* sequences sent back to their last block, ever */
    uint64_t images_asked, images_encoded; /* ever; the rest was kept */
};
struct ns_engine_load ns_engine_load(const struct ns_engine *);

enum ns_stage { /* of a running sequence, as drawn above */
    NS_STAGE_PREFILL,
    NS_STAGE_DENOISE,
    NS_STAGE_COMMIT,
    NS_STAGE_AR,
};

enum { NS_PROGRESS_CELLS = 256 };

struct ns_engine_progress { /* how far it is: counts, and no token */
    uint64_t id;
    enum ns_mode mode;
    enum ns_stage stage;
    int64_t submitted_ms;          /* monotonic */
    uint32_t n_prompt, n_read;     /* tokens; of them in the prefix */
    uint32_t n_tokens, max_tokens; /* of the answer: known; at most */
    uint32_t block;                /* index of the one that is being made */
    /* DENOISE; else all 0. */
    uint32_t step, max_steps;           /* taken; of the schedule */
    uint32_t canvas_length, n_accepted; /* by the last step */
    uint8_t accepted[NS_PROGRESS_CELLS / 8]; /* bit i % 8 of byte i / 8: the
                                              * canvas's position i */
};

/* Fills `out` for the first `n` running sequences. Returns how many it did. */
uint32_t ns_engine_progress(const struct ns_engine *, struct ns_engine_progress *out,
                            uint32_t n);

#endif
