/* spool_private.h - what the two ends of a spool share.
 *
 * Private to spool.c (open, recover, finish files), spool_source.c (read,
 * acknowledge) and spool_store.c (claim, checkpoint, finish). Everything here
 * is guarded by ns_spool.mutex, which is the only lock and so has no order.
 */
#ifndef NS_CONNECTORS_SPOOL_PRIVATE_H
#define NS_CONNECTORS_SPOOL_PRIVATE_H

#include <pthread.h>

#include "connectors/blocks.h"
#include "connectors/index.h"
#include "connectors/journal.h"
#include "connectors/ledger.h"
#include "connectors/lines.h"
#include "connectors/spool.h"

enum {
    NS_SPOOL_NAME = 256,
    NS_SPOOL_RETRIES = 3, /* failures of its own that a job may have */
    NS_SPOOL_STALLS = 3,  /* takeovers without a new block */
};

enum ns_spool_dir { IN, WORK, OUT, DONE, DEAD, N_DIRS };

/* A job that is claimed, or was and waits to be claimed again. */
struct ns_spool_claim {
    struct ns_spool_claim *next;
    uint64_t line, sha, fence;
    struct ns_blocks_key key;
    uint32_t attempt, retries, stalls;
    bool running;
    int64_t due_ms;   /* monotonic */
    const char *code; /* of the last failure */
};

/* An input file that is open. `run` has one for its whole life. */
struct ns_spool_file {
    struct ns_spool_file *next;
    uint32_t number; /* the partition of its positions */
    char name[NS_SPOOL_NAME];
    int fd;
    bool regular;     /* can be looked at again: a change is noticed */
    struct stat stat; /* as it was when it was opened */
    uint64_t looked;  /* bytes read when it was last looked at */
    char batch[101]; /* of messages whose answers go elsewhere; or "" */
    struct ns_lines *lines;
    struct ns_ledger *ledger;
    struct ns_journal *journal;
    struct ns_blocks *blocks; /* NULL: none are kept */
    struct ns_index *index;
    struct ns_spool_claim *claims;
    uint64_t max_line; /* line numbers in old results above this are ignored */
    bool at_end;       /* every line was handed out or is done */
    bool dead;         /* unusable; `reason` says why. Its claims are fenced */
    struct ns_error reason;
};

struct ns_spool {
    struct ns_source source; /* first: the ends lead back to the spool */
    struct ns_store store;
    pthread_mutex_t mutex;
    struct ns_spool_options options; /* its texts are owned copies */
    char *model_rev, *engine_rev;
    const struct ns_io *io;
    bool is_directory;
    int root, lock; /* a directory spool's; else -1 */
    int dirs[N_DIRS];
    int out_dir; /* of OUT, in file mode */
    struct ns_spool_file *files;
    uint32_t next_number, in_flight;
    uint64_t next_fence;
    int64_t scan_due_ms;  /* when in/ is looked at again */
    uint64_t ignored[64]; /* hashes of names in in/ that were reported */
    uint32_t n_ignored;
    struct ns_spool_progress progress;
};

extern const struct ns_source_ops ns_spool_source_ops;
extern const struct ns_store_ops ns_spool_store_ops;

static inline struct ns_spool *
ns_spool_of_store(struct ns_store *store)
{
    return (struct ns_spool *)((char *)store -
                               offsetof(struct ns_spool, store));
}

struct ns_spool_file *ns_spool_find(struct ns_spool *spool, uint32_t number);

/* Takes the next file of in/ into work/ and opens it. `*taken` false: there
 * is none. */
enum ns_status ns_spool_take(struct ns_spool *spool, bool *taken,
                             struct ns_error *err);

/* Publishes the results of a file that is at its end, or dead, and has nothing
 * in flight; moves its input away and drops it. */
enum ns_status ns_spool_retire(struct ns_spool *spool,
                               struct ns_spool_file *file,
                               struct ns_error *err);

/* The input is not what it was, or can not be read. Of a directory's file, its
 * end: NS_OK. Of `run`'s only file, the run's: NS_REJECT. */
enum ns_status ns_spool_condemn(struct ns_spool *spool,
                                struct ns_spool_file *file,
                                struct ns_error *err);

void ns_spool_drop_claim(struct ns_spool_file *file, uint64_t line);
int64_t ns_spool_now_ms(void); /* monotonic */

#endif
