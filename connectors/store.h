/* store.h - where results go: exactly one final row for each job.
 *
 *     claim --+--> RUN from block n --> checkpoint* --> finish
 *             |                    `--> retry (given back, due later)
 *             +--> WAIT   someone else runs it, or it is not due: ask again
 *             +--> FINAL  its row stands: acknowledge as a duplicate
 *             `--> CONFLICT  same id, other input: refuse
 *     refuse ----> dead letter
 *
 * A claim takes a fence, a number that only grows; every later write names it.
 * A holder whose fence was overtaken (its lease ran out, someone else claimed)
 * is told FENCED and drops the job without a trace: its late result can not
 * overwrite the newer owner's. A store that has a single writer by its nature
 * (a locked file) keeps the same contract with fences that are never overtaken.
 *
 * Every operation takes an array: one statement, or one write and one flush,
 * for all. The outcome is per item. What is said about the whole call:
 *
 *     NS_OK     every item has its outcome, and it is durable
 *     NS_RETRY  the world was at fault and nothing is known: keep the items,
 *               wait, call again with the same ones. Each operation can be
 *               asked again after an answer was lost: a finish that already
 *               happened says STORED, not FENCED.
 *     NS_REJECT the store can not be used with this input as a whole (an
 *               edited line whose result stands): stop the run, text says why
 *     NS_FATAL  broken: exit; nothing stored is lost
 *
 * A finish that fails for one job's data does not undo its neighbours.
 *
 * Thread: one at a time (the sink thread), but close, which comes after it.
 */
#ifndef NS_CONNECTORS_STORE_H
#define NS_CONNECTORS_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/job.h"
#include "connectors/result.h"

enum ns_claim_outcome {
    NS_CLAIM_RUN = 1,  /* ours: from block n_blocks */
    NS_CLAIM_WAIT,     /* park, ask again after wait_ms */
    NS_CLAIM_FINAL,    /* a final row stands, or the store just wrote it
                        * (cancelled, given up): acknowledge */
    NS_CLAIM_CONFLICT, /* `error` says why (id_conflict, duplicate_id):
                        * refuse the job with it */
};

struct ns_claim {
    /* In. Mode and seed as resolved at admission: the first claim stores them,
     * and blocks made under others are not taken over. */
    struct ns_job *job; /* the blocks' tokens go into its arena */
    enum ns_job_mode mode;
    uint64_t seed;

    /* Out. */
    enum ns_claim_outcome outcome;
    uint64_t fence;
    uint32_t attempt; /* executions begun, this one counted */
    uint32_t stalls;  /* takeovers in a row without a new block; from 2 on the
                       * job runs alone */
    enum ns_job_mode stored_mode; /* of the first claim; run in this one */
    uint64_t stored_seed;
    const int32_t *tokens; /* of the committed blocks, one after another */
    const uint32_t *block_tokens; /* [n_blocks] how many in each */
    uint32_t n_tokens, n_blocks;
    uint32_t n_dropped;    /* blocks that are there and can't be used */
    bool resumed_across;   /* some block came from another engine_rev */
    bool cancel;           /* RUN: all of its batch is to be cancelled */
    int64_t clock_ms;      /* Unix time by the store's own clock, by which
                            * deadlines count; 0: it has the host's */
    int64_t wait_ms;       /* WAIT */
    struct ns_error error; /* CONFLICT */
    bool given_up; /* FINAL: the row was written just now, as follows */
    enum ns_result_status ended;
    char ended_code[48]; /* "stalled" */
};

enum ns_store_outcome {
    NS_STORE_DONE = 1, /* durable, now or by an earlier call */
    NS_STORE_FENCED,   /* someone newer owns the job: drop it, write nothing */
};

struct ns_heartbeat {
    const struct ns_job *job; /* in */
    uint64_t fence;
    enum ns_store_outcome outcome; /* out */
    bool cancel; /* a cancel was asked for: stop at the next block, finish
                  * with status cancelled */
};

struct ns_checkpoint {
    const struct ns_job *job; /* in */
    uint64_t fence;
    uint32_t block; /* index from 0, without holes */
    const int32_t *tokens;
    uint32_t n_tokens;
    enum ns_store_outcome outcome; /* out */
};

struct ns_finished { /* engine.h has an ns_finish: why an answer ended */
    const struct ns_job *job; /* in */
    uint64_t fence;
    const struct ns_result *result;
    enum ns_store_outcome outcome; /* out */
};

struct ns_refusal {           /* a dead letter: needs no claim */
    const struct ns_job *job; /* in: as far as it could be read */
    struct ns_error error;
    const char *payload; /* the message's bytes, to be looked at later; NULL:
                          * not kept, or the store has the input itself */
    size_t payload_length;
    enum ns_store_outcome outcome; /* out */
};

struct ns_give_back {         /* a retry */
    const struct ns_job *job; /* in */
    uint64_t fence;
    int64_t delay_ms;
    bool own_fault;   /* counts against the job's retries; a drain or a
                       * neighbour's failure does not */
    const char *code; /* "out_of_memory"; static */
    enum ns_store_outcome outcome; /* out */
};

struct ns_store;

struct ns_store_ops {
    const char *name; /* "files", "spool", "postgres" */

    enum ns_status (*claim)(struct ns_store *, struct ns_claim *, size_t n,
                            struct ns_error *);
    enum ns_status (*heartbeat)(struct ns_store *, struct ns_heartbeat *,
                                size_t n, struct ns_error *);
    enum ns_status (*checkpoint)(struct ns_store *, struct ns_checkpoint *,
                                 size_t n, struct ns_error *);
    enum ns_status (*finish)(struct ns_store *, struct ns_finished *, size_t n,
                             struct ns_error *);
    enum ns_status (*refuse)(struct ns_store *, struct ns_refusal *, size_t n,
                             struct ns_error *);
    enum ns_status (*retry)(struct ns_store *, struct ns_give_back *, size_t n,
                            struct ns_error *);
    void (*close)(struct ns_store *);

    /* NULL: a claim costs no more. Which jobs have a final row already: their
     * outcome is FINAL, that of all others 0. Claims nothing. */
    enum ns_status (*look)(struct ns_store *, struct ns_claim *, size_t n,
                           struct ns_error *);

    /* How often a holder must call heartbeat; 0: no leases, but call it every
     * second or so all the same to hear of cancels. */
    int64_t (*heartbeat_ms)(const struct ns_store *);

    /* NULL: always. Whether jobs of the tenant may be claimed: not while an
     * operator has paused it, or all. As of the last tend. */
    bool (*may_claim)(const struct ns_store *, const char *tenant);

    /* NULL: it is always there. Whether it is in reach, and what operators
     * ask for: once a second or so, busy or not. */
    enum ns_status (*tend)(struct ns_store *, struct ns_error *);
};

struct ns_store { /* the first member of each kind */
    const struct ns_store_ops *ops;
};

#endif
