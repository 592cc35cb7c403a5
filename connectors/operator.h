/* operator.h - what people ask of the database: batches, results, cancels.
 *
 * The other side of the store: `nightshift status`, `watch`, `results`,
 * `cancel`, `dlq`, `pause`. Everything is asked as a member of
 * nightshift_submit, which may read and call four functions, and can change no
 * row by itself. Nothing here knows a daemon: what is asked of the daemons
 * stands in rows that they read (a cancel, a pause).
 *
 * Visitors are called for each row in the order said; what they are given is
 * borrowed until they return. One that does not return NS_OK ends the query,
 * and its status is the query's.
 *
 * Owns:   one connection, made when it is needed and again when it was lost.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_OPERATOR_H
#define NS_CONNECTORS_OPERATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "connectors/postgres.h"

struct ns_operator;

/* Connects to nothing yet. All calls: NS_RETRY when the server is away. */
enum ns_status ns_operator_create(const struct ns_postgres_options *options,
                                  struct ns_operator **out,
                                  struct ns_error *err);
void ns_operator_destroy(struct ns_operator *op); /* takes NULL */

/* --- batches ------------------------------------------------------------ */

struct ns_batch_status {
    const char *batch;
    int64_t expected; /* -1: nobody said */
    int64_t ok, failed, running, waiting, tokens;
    const char *outcome; /* "running", "ok", "some_failed", "all_failed" */
    const char *first_at, *last_at; /* of its jobs, its rows; "" */
    bool done, cancelled;
};

typedef enum ns_status (*ns_batch_visitor)(void *context,
                                           const struct ns_batch_status *,
                                           struct ns_error *err);
/* One batch, or (NULL) all, the latest first, at most `limit`. NS_OK also when
 * there is none. */
enum ns_status ns_operator_batches(struct ns_operator *op, const char *batch,
                                   uint32_t limit, ns_batch_visitor visit,
                                   void *context, struct ns_error *err);

/* Says how many jobs the batch has, before or after they come; its end is told
 * by it. `*done`, which may be NULL: it has ended. */
enum ns_status ns_operator_expect(struct ns_operator *op, const char *batch,
                                  uint64_t n_jobs, bool *done,
                                  struct ns_error *err);

struct ns_batch_result {
    const char *job_id;
    bool ok;
    const char *line; /* an OpenAI result line, without its end */
    size_t length;
};

typedef enum ns_status (*ns_result_visitor)(void *context,
                                            const struct ns_batch_result *,
                                            struct ns_error *err);
/* The final rows of a batch by their ids, and how many refused messages it has
 * that no row stands for. In pieces of bounded size. */
enum ns_status ns_operator_results(struct ns_operator *op, const char *batch,
                                   ns_result_visitor visit, void *context,
                                   uint64_t *n_letters, struct ns_error *err);

/* --- jobs --------------------------------------------------------------- */

/* What stands under the name. */
enum ns_status ns_operator_find(struct ns_operator *op, const char *name,
                                bool *is_batch, bool *is_job,
                                struct ns_error *err);

/* Asks for a job's end. `state`: "cancelling", or that of one that has ended.
 * One that was not seen yet is cancelled when it comes. */
enum ns_status ns_operator_cancel_job(struct ns_operator *op, const char *job,
                                      char state[16], struct ns_error *err);
/* The same for all of a batch; `*n`: of those that were seen. */
enum ns_status ns_operator_cancel_batch(struct ns_operator *op,
                                        const char *batch, uint64_t *n,
                                        struct ns_error *err);

/* Whether daemons take jobs of the tenant ("": of anyone) in. */
enum ns_status ns_operator_pause(struct ns_operator *op, const char *tenant,
                                 bool paused, struct ns_error *err);

/* --- dead letters -------------------------------------------------------- */

struct ns_letter {
    const char *key; /* "topic/3:12@0a1b2c3d4e5f6071" */
    const char *job_id, *batch, *reason, *param, *detail, *created_at; /* "" */
    bool has_payload;
    int64_t payload_bytes;
};

typedef enum ns_status (*ns_letter_visitor)(void *context,
                                            const struct ns_letter *,
                                            struct ns_error *err);
struct ns_letter_filter { /* NULL: any */
    const char *key, *batch, *reason;
    uint32_t limit; /* 0: none */
};
/* The latest first. */
enum ns_status ns_operator_letters(struct ns_operator *op,
                                   const struct ns_letter_filter *filter,
                                   ns_letter_visitor visit, void *context,
                                   struct ns_error *err);

/* The bytes of the message, added to `out`. NS_REJECT: there is no such
 * letter, or it kept none. */
enum ns_status ns_operator_payload(struct ns_operator *op, const char *key,
                                   struct ns_buf *out, struct ns_error *err);

/* The id under which a message of `job` can run: its own while nothing ended
 * under it, else "job~r1". At most 301 bytes. */
enum ns_status ns_operator_replay_id(struct ns_operator *op, const char *job,
                                     char out[320], struct ns_error *err);

#endif
