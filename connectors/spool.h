/* spool.h - files as source and store: one file, or a directory of them.
 *
 * A spool is the pair of a source and a store over the same files. Both ends
 * share the struct: the source needs to know which lines are done, the store
 * when a file is finished.
 *
 * One file (`nightshift run FILE -o OUT`): OUT is an OpenAI batch output file,
 * appended, one write and one flush a batch. Running again resumes: a line is
 * done when OUT holds its (line, input_sha256). A torn tail of OUT is cut. An
 * edited line, by its number or its id, whose result stands in OUT stops the
 * run (NS_REJECT from poll, code "edited") unless `restart` puts the old OUT
 * aside as OUT.~1~. Committed blocks stand in OUT.blocks until the end. OUT is
 * locked; code "locked" and status NS_RETRY when another run holds it.
 *
 * A directory (nightshiftd): files come into in/ by rename, are taken into
 * work/, answered in out/<name>.part (the journal), which becomes out/<name>
 * at the end while the input goes to done/, or to dead/ with a .reason when it
 * can not be read. in/ ignores names that start with '.' or end in .tmp or
 * .part; .jsonl and .jsonl.lz4 are taken, and answered in kind. The rest is
 * logged once and left alone. The directory is locked by .lock.
 *
 * With answers_elsewhere no journal tells which lines are done. A file that is
 * read again is handed out whole again, and the store knows what it has.
 *
 *     in/a.jsonl --take--> work/a.jsonl, out/a.jsonl.part, work/a.jsonl.blocks
 *                --end---> done/a.jsonl, out/a.jsonl
 *
 * Owns:   descriptors, the lock, one compact entry (24 bytes) a line.
 * Thread: the source's calls from one thread, the store's from another. One
 *         mutex guards what they share; it is held across file writes, never
 *         across anything that computes or waits for a peer.
 */
#ifndef NS_CONNECTORS_SPOOL_H
#define NS_CONNECTORS_SPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/io.h"
#include "connectors/source.h"
#include "connectors/store.h"

/* The batch of a file whose answers go to a database: its name without its
 * endings, and a part of its hash. At most 100 bytes. */
void ns_spool_batch(const char *name,
                    const unsigned char sha256[NS_SHA256_BYTES],
                    char out[NS_JOB_BATCH_BYTES + 1]);

struct ns_spool_options {
    /* What resumed work is judged by; copied. */
    const char *model_rev, *engine_rev;

    /* One file. */
    const char *input;  /* path; "-": standard input, which resumes if the
                         * same bytes come again */
    const char *output; /* path; "-": standard output: no lock, no resume.
                         * A name ending in .lz4 is written compressed. */
    bool restart;       /* put an existing OUT aside, begin anew */
    bool retry_failed;  /* lines whose result is an error run again */

    /* A directory; `input` and `output` are then NULL. */
    const char *directory;
    bool allow_nfs;
    bool answers_elsewhere; /* the store is another's (postgres.h): there is no
                             * out/, and a message's batch is its file's name
                             * with 12 hex digits of the hash of its bytes */

    size_t max_line;        /* 0: 16 MB */
    uint64_t max_expanded;  /* of an LZ4 input; 0: 64 GB */
    uint32_t window;        /* messages handed out, not acknowledged; 0: 256 */
    uint32_t span;          /* lines between the oldest unfinished and the
                             * newest of a file; 0: 10,000 */
    const struct ns_io *io; /* NULL: the system's */
};

struct ns_spool;

/* Locks, recovers what a former run left, and makes both ends. NS_RETRY with
 * code "locked": another one holds it (exit 75). NS_REJECT with code
 * "unreadable_input" (exit 65), "not_ours" (OUT exists and is no output file of
 * ours) or "bad_spool" (folder missing, another filesystem, NFS: exit 78). */
enum ns_status ns_spool_open(const struct ns_spool_options *options,
                             struct ns_spool **out, struct ns_error *err);

struct ns_source *ns_spool_source(struct ns_spool *spool); /* borrowed */
struct ns_store *ns_spool_store(struct ns_spool *spool);   /* borrowed */

struct ns_spool_progress {      /* a snapshot */
    uint64_t lines_done_before; /* results found at open ... */
    uint64_t failed_before;     /* ... and those of them that are not ok */
    uint64_t lines_handed_out;
    uint64_t ok, failed;              /* stored since open: ok, all others */
    uint64_t bytes_read, bytes_total; /* of the input; total 0: not known */
    uint64_t files_finished, files_dead;
    bool storage_full; /* the last write met a full disk; taken back, retried */
};
struct ns_spool_progress ns_spool_progress(struct ns_spool *spool); /* any */

/* After both ends are at rest. Removes OUT.blocks when every line is done;
 * leaves everything else for the next run. The ends' own close do nothing.
 * Takes NULL. */
void ns_spool_close(struct ns_spool *spool);

#endif
