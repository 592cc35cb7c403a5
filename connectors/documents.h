/* documents.h - what jobs refer to instead of carrying it.
 *
 * A document is a row of nightshift.document: an id, bytes, their SHA-256 and
 * a media type, put once and never changed. A job names id and hash; what it
 * gets has that hash, or it gets an error:
 *
 *     document_missing   NS_RETRY: there is no such row; it may still come
 *     document_hash      NS_REJECT: the row is of other bytes
 *     document_limit     NS_REJECT: larger than the limit
 *     document_broken    NS_REJECT: what is stored is not what its hash says
 *     (no code)          NS_RETRY: the server is away
 *
 * Documents of late are kept, up to a bound, so that a thousand jobs on one
 * cost one query. Those in use count, and stay however little the bound is.
 *
 * Owns:   one connection of its own, made when it is needed, and the cache.
 * Thread: any. Whoever asks waits for the answer, and others who ask at the
 *         same time wait behind him: pool threads, never the engine's.
 */
#ifndef NS_CONNECTORS_DOCUMENTS_H
#define NS_CONNECTORS_DOCUMENTS_H

#include <stdbool.h>
#include <stddef.h>

#include "connectors/message.h"
#include "connectors/postgres.h"

enum { NS_DOCUMENT_ID_BYTES = 200, NS_DOCUMENT_TYPE_BYTES = 100 };

struct ns_document {
    const char *media_type;
    const char *bytes; /* and a NUL behind them */
    size_t length;
    unsigned char sha256[NS_SHA256_BYTES];
};

struct ns_documents_options {
    struct ns_postgres_options postgres; /* texts borrowed */
    size_t limit_bytes;                  /* of one document */
    size_t cache_bytes;                  /* of those that nobody uses */
};

struct ns_documents;

/* Connects to nothing yet. */
enum ns_status ns_documents_create(const struct ns_documents_options *options,
                                   struct ns_documents **out,
                                   struct ns_error *err);
void ns_documents_destroy(struct ns_documents *documents); /* takes NULL */

/* The document, which stays until it is let go. */
enum ns_status ns_documents_get(struct ns_documents *documents, const char *id,
                                const unsigned char sha256[NS_SHA256_BYTES],
                                const struct ns_document **out,
                                struct ns_error *err);
void ns_documents_let_go(struct ns_documents *documents,
                         const struct ns_document *document);

struct ns_documents_counts {
    uint64_t fetched, found; /* by a query, in the cache */
    uint64_t n_kept, bytes_kept;
};
struct ns_documents_counts ns_documents_counts(struct ns_documents *documents);

/* Puts one as a member of nightshift_submit. `sha256` is set. `*was_there`: so
 * it had been put before. NS_REJECT, document_hash: the id stands for other
 * bytes; ids are not given anew. */
enum ns_status ns_documents_put(const struct ns_postgres_options *options,
                                const char *id, const char *media_type,
                                const void *bytes, size_t length,
                                unsigned char sha256[NS_SHA256_BYTES],
                                bool *was_there, struct ns_error *err);

#endif
