/* references.h - the documents that a job names, put where they are named.
 *
 *     {"type":"document","document":{"id","sha256"}}
 *         text     -->  {"type":"text","text":...}
 *         picture  -->  a part for pictures.h, which asks for its bytes here
 *
 * So the prompt is the one of a job that carries all of it: jobs on one
 * document begin with the same tokens, and share them. Documents come from the
 * database where there is one (documents.h), else from files below the folders
 * of documents.roots, whose path is the id.
 *
 * Errors name the part. Beside those of documents.h: document_missing as
 * NS_REJECT once the job has waited long enough for it; document_type, of what
 * is neither text nor a picture; path_denied.
 *
 * Thread: any; shared is only what documents.h shares.
 */
#ifndef NS_DAEMON_REFERENCES_H
#define NS_DAEMON_REFERENCES_H

#include "connectors/documents.h"
#include "connectors/job.h"

struct ns_references_options {
    struct ns_documents *documents; /* NULL: files, or none at all */
    const char *roots;              /* folders, a comma list; NULL: none */
    size_t limit_bytes;             /* of a file */
    int64_t wait_ms; /* for a document to be put, from the job's arrival on */
};

struct ns_reference {
    const struct ns_document *document;
    void *bytes;        /* of a file: owned, and so is its struct */
    const json_t *part; /* of the messages below */
};

struct ns_references {
    struct ns_documents *documents;
    struct ns_job *job;       /* borrowed */
    const json_t *as_written; /* the job's messages */
    json_t *messages; /* owned: with the documents in them; NULL: the job
                       * names none */
    uint32_t n;
    struct ns_reference reference[NS_JOB_DOCUMENTS];
};

/* Until fini the messages of the job are those with the documents in them.
 * Zeroes `out` first; fini whatever comes back. `waited_ms`: since the job
 * came. */
enum ns_status ns_references_load(const struct ns_references_options *options,
                                  struct ns_job *job, int64_t waited_ms,
                                  struct ns_references *out,
                                  struct ns_error *err);
void ns_references_fini(struct ns_references *references); /* and twice */

/* The document that became this part of the messages, or NULL. */
const struct ns_document *
ns_references_of(const struct ns_references *references, const json_t *part);

/* What a document's bytes are: "text/plain", "image/png"; NULL: neither text
 * nor a picture that could be read. */
const char *ns_references_type(const void *bytes, size_t length);

#endif
