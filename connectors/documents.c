#include "connectors/documents.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/frame.h"
#include "connectors/postgres_columns.h"
#include "connectors/sha256.h"

enum {
    N_BUCKETS = 1024,
    OVERHEAD = 512, /* of one kept document, beside its bytes */
};

struct entry {
    struct ns_document document; /* first */
    char *id, *media_type;       /* owned */
    struct ns_buf bytes;         /* owned */
    uint32_t n_users;
    struct entry *chain;            /* of its bucket */
    struct entry *newer, *older;    /* while nobody uses it */
};

struct ns_documents {
    struct ns_documents_options options;

    /* Held across a query, so that those who want the same document ask once.
     * Guards the link. Taken before `lock`, never behind it. */
    pthread_mutex_t fetching;
    struct ns_pg_link link;

    /* Guards what follows; innermost, held for a look. */
    pthread_mutex_t lock;
    struct entry *bucket[N_BUCKETS];
    struct entry *newest, *oldest;
    size_t idle_bytes; /* of those that nobody uses */
    struct ns_documents_counts counts;
};

/* --- the cache; under `lock` ------------------------------------------- */

static struct entry **
bucket_of(struct ns_documents *documents, const unsigned char *sha256)
{
    return &documents->bucket[(sha256[0] << 8 | sha256[1]) % N_BUCKETS];
}

static struct entry *
find(struct ns_documents *documents, const char *id,
     const unsigned char *sha256)
{
    struct entry *entry = *bucket_of(documents, sha256);

    while (entry && (memcmp(entry->document.sha256, sha256,
                            NS_SHA256_BYTES) != 0 ||
                     strcmp(entry->id, id) != 0))
        entry = entry->chain;
    return entry;
}

static size_t
cost_of(const struct entry *entry)
{
    return entry->document.length + OVERHEAD;
}

static void
take_off(struct ns_documents *documents, struct entry *entry)
{
    if (entry->newer)
        entry->newer->older = entry->older;
    else
        documents->newest = entry->older;
    if (entry->older)
        entry->older->newer = entry->newer;
    else
        documents->oldest = entry->newer;
    documents->idle_bytes -= cost_of(entry);
}

static void
use(struct ns_documents *documents, struct entry *entry)
{
    if (entry->n_users++ == 0)
        take_off(documents, entry);
}

static void
destroy(struct entry *entry)
{
    if (!entry)
        return;
    ns_buf_fini(&entry->bytes);
    free(entry->media_type);
    free(entry->id);
    free(entry);
}

/* Lets the oldest go until the rest are within the bound. */
static void
shrink(struct ns_documents *documents)
{
    while (documents->oldest &&
           documents->idle_bytes > documents->options.cache_bytes) {
        struct entry *entry = documents->oldest;
        struct entry **at = bucket_of(documents, entry->document.sha256);

        take_off(documents, entry);
        while (*at != entry)
            at = &(*at)->chain;
        *at = entry->chain;
        documents->counts.n_kept--;
        documents->counts.bytes_kept -= cost_of(entry);
        destroy(entry);
    }
}

static struct entry *
look(struct ns_documents *documents, const char *id,
     const unsigned char *sha256)
{
    struct entry *entry;

    pthread_mutex_lock(&documents->lock);
    entry = find(documents, id, sha256);
    if (entry) {
        use(documents, entry);
        documents->counts.found++;
    }
    pthread_mutex_unlock(&documents->lock);
    return entry;
}

void
ns_documents_let_go(struct ns_documents *documents,
                    const struct ns_document *document)
{
    struct entry *entry = (struct entry *)(uintptr_t)document;

    if (!entry)
        return;
    pthread_mutex_lock(&documents->lock);
    if (--entry->n_users == 0) {
        entry->newer = NULL;
        entry->older = documents->newest;
        if (documents->newest)
            documents->newest->newer = entry;
        else
            documents->oldest = entry;
        documents->newest = entry;
        documents->idle_bytes += cost_of(entry);
        shrink(documents);
    }
    pthread_mutex_unlock(&documents->lock);
}

/* --- fetching ---------------------------------------------------------- */

static const char fetch_sql[] =
    "SELECT sha256, media_type, content_bytes,"
    " CASE WHEN content_bytes <= $2 THEN content_lz4 END"
    " FROM nightshift.document WHERE id = $1";

static const char *
shown(const char *id, char out[160])
{
    return ns_log_escape(id, strlen(id), out, 160);
}

/* Unpacking takes room in large steps; what is kept is kept for long. */
static void
trim(struct ns_buf *bytes)
{
    char *data = realloc(bytes->data, bytes->length + 1);

    if (!data)
        return;
    data[bytes->length] = '\0';
    bytes->data = data;
    bytes->capacity = bytes->length + 1;
}

static enum ns_status
unpack(const struct ns_documents *documents, const PGresult *row,
       const char *id, struct entry *entry, struct ns_error *err)
{
    struct ns_document *document = &entry->document;
    unsigned char is[NS_SHA256_BYTES];
    enum ns_status status;
    char name[160];

    ns_buf_init(&entry->bytes, documents->options.limit_bytes);
    status = ns_frame_unpack(PQgetvalue(row, 0, 3),
                             (size_t)PQgetlength(row, 0, 3), &entry->bytes,
                             err);
    if (status == NS_FATAL)
        return status;
    trim(&entry->bytes);
    document->bytes = entry->bytes.data ? entry->bytes.data : "";
    document->length = entry->bytes.length;
    if (status == NS_OK) {
        status = ns_sha256(document->bytes, document->length, is, err);
        if (status != NS_OK)
            return status;
        if (memcmp(is, document->sha256, sizeof(is)) == 0)
            return NS_OK;
    }
    return ns_refuse(err, "document_broken", NULL, "document %s: what the "
                     "database holds is not what its sha256 says",
                     shown(id, name));
}

static enum ns_status
read_row(const struct ns_documents *documents, const PGresult *row,
         const char *id, struct entry *entry, struct ns_error *err)
{
    int64_t bytes;
    char name[160];

    if (PQntuples(row) == 0) {
        ns_fail(err, NS_RETRY, "there is no document %s", shown(id, name));
        err->code = "document_missing";
        return NS_RETRY;
    }
    if (PQgetlength(row, 0, 0) != NS_SHA256_BYTES ||
        memcmp(PQgetvalue(row, 0, 0), entry->document.sha256,
               NS_SHA256_BYTES) != 0)
        return ns_refuse(err, "document_hash", NULL, "document %s is of other "
                         "bytes than the job's sha256 says", shown(id, name));
    bytes = ns_pg_int(row, 0, 2);
    if (bytes < 0 || (uint64_t)bytes > documents->options.limit_bytes)
        return ns_refuse(err, "document_limit", NULL, "document %s has %" PRId64
                         " bytes, at most %zu are read", shown(id, name),
                         bytes, documents->options.limit_bytes);
    entry->media_type = strdup(ns_pg_text(row, 0, 1));
    if (!entry->media_type)
        return ns_fail(err, NS_FATAL, "out of memory for a document");
    entry->document.media_type = entry->media_type;
    return unpack(documents, row, id, entry, err);
}

static enum ns_status
fetch(struct ns_documents *documents, const char *id, struct entry *entry,
      struct ns_error *err)
{
    struct ns_pg_call call = { .sql = fetch_sql };
    enum ns_status status;

    ns_pg_call_text(&call, id);
    ns_pg_call_int(&call, (int64_t)documents->options.limit_bytes);
    status = ns_pg_ask(&documents->link, &call, err);
    if (status == NS_OK)
        status = read_row(documents, call.result, id, entry, err);
    ns_pg_call_fini(&call);
    return status;
}

static enum ns_status
add(struct ns_documents *documents, const char *id,
    const unsigned char *sha256, struct entry **out, struct ns_error *err)
{
    struct entry *entry = calloc(1, sizeof(*entry)), **bucket;
    enum ns_status status;

    if (entry)
        entry->id = strdup(id);
    if (!entry || !entry->id) {
        destroy(entry);
        return ns_fail(err, NS_FATAL, "out of memory for a document");
    }
    memcpy(entry->document.sha256, sha256, NS_SHA256_BYTES);
    status = fetch(documents, id, entry, err);
    if (status != NS_OK) {
        destroy(entry);
        return status;
    }
    entry->n_users = 1;
    bucket = bucket_of(documents, sha256);
    pthread_mutex_lock(&documents->lock);
    entry->chain = *bucket;
    *bucket = entry;
    documents->counts.fetched++;
    documents->counts.n_kept++;
    documents->counts.bytes_kept += cost_of(entry);
    pthread_mutex_unlock(&documents->lock);
    *out = entry;
    return NS_OK;
}

enum ns_status
ns_documents_get(struct ns_documents *documents, const char *id,
                 const unsigned char sha256[NS_SHA256_BYTES],
                 const struct ns_document **out, struct ns_error *err)
{
    struct entry *entry = look(documents, id, sha256);
    enum ns_status status = NS_OK;

    if (!entry) {
        pthread_mutex_lock(&documents->fetching);
        entry = look(documents, id, sha256); /* who was before us may have it */
        if (!entry)
            status = add(documents, id, sha256, &entry, err);
        pthread_mutex_unlock(&documents->fetching);
    }
    if (status == NS_OK)
        *out = &entry->document;
    return status;
}

/* --- the whole --------------------------------------------------------- */

enum ns_status
ns_documents_create(const struct ns_documents_options *options,
                    struct ns_documents **out, struct ns_error *err)
{
    struct ns_documents *documents = calloc(1, sizeof(*documents));

    if (!documents)
        return ns_fail(err, NS_FATAL, "out of memory for documents");
    documents->options = *options;
    ns_pg_link_init(&documents->link, &options->postgres);
    documents->link.admin = true; /* the store looks at schema and durability */
    pthread_mutex_init(&documents->fetching, NULL);
    pthread_mutex_init(&documents->lock, NULL);
    *out = documents;
    return NS_OK;
}

void
ns_documents_destroy(struct ns_documents *documents)
{
    if (!documents)
        return;
    for (int i = 0; i < N_BUCKETS; i++)
        while (documents->bucket[i]) {
            struct entry *entry = documents->bucket[i];

            documents->bucket[i] = entry->chain;
            destroy(entry);
        }
    ns_pg_link_fini(&documents->link);
    pthread_mutex_destroy(&documents->lock);
    pthread_mutex_destroy(&documents->fetching);
    free(documents);
}

struct ns_documents_counts
ns_documents_counts(struct ns_documents *documents)
{
    struct ns_documents_counts counts;

    pthread_mutex_lock(&documents->lock);
    counts = documents->counts;
    pthread_mutex_unlock(&documents->lock);
    return counts;
}

/* --- putting ----------------------------------------------------------- */

static const char put_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5)"
    "  AS x (id, sha, type, content, bytes)),"
    "i AS (INSERT INTO nightshift.document (id, sha256, media_type,"
    "   content_lz4, content_bytes) SELECT * FROM x"
    "  ON CONFLICT (id) DO NOTHING RETURNING sha256, media_type) "
    "SELECT false, true FROM i UNION ALL "
    "SELECT true, d.sha256 = x.sha AND d.media_type = x.type"
    " FROM x JOIN nightshift.document d ON d.id = x.id"
    " WHERE NOT EXISTS (SELECT FROM i)";

enum ns_status
ns_documents_put(const struct ns_postgres_options *options, const char *id,
                 const char *media_type, const void *bytes, size_t length,
                 unsigned char sha256[NS_SHA256_BYTES], bool *was_there,
                 struct ns_error *err)
{
    struct ns_pg_columns columns;
    struct ns_pg_call call;
    struct ns_pg_link link;
    enum ns_status status = ns_sha256(bytes, length, sha256, err);

    if (status != NS_OK)
        return status;
    ns_pg_link_init(&link, options);
    link.admin = true;
    ns_pg_columns_init(&columns, "tbtb8");
    ns_pg_add_text(&columns.array[0], id);
    ns_pg_add_bytes(&columns.array[1], sha256, NS_SHA256_BYTES);
    ns_pg_add_text(&columns.array[2], media_type);
    ns_pg_add_lz4(&columns.array[3], bytes, length);
    ns_pg_add_int(&columns.array[4], (int64_t)length);
    ns_pg_columns_call(&columns, put_sql, &call);
    status = ns_pg_columns_ask(&link, &columns, &call, err);
    /* No row: another put the id between our two looks. The next one sees. */
    if (status == NS_OK && PQntuples(call.result) == 0)
        status = ns_pg_columns_ask(&link, &columns, &call, err);
    if (status == NS_OK && PQntuples(call.result) == 0) {
        status = ns_fail(err, NS_RETRY, "document %s comes and goes", id);
    } else if (status == NS_OK) {
        *was_there = ns_pg_bool(call.result, 0, 0);
        if (!ns_pg_bool(call.result, 0, 1))
            status = ns_refuse(err, "document_hash", NULL, "there is a "
                               "document %s already, of other bytes or of "
                               "another type: give this one another --id", id);
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    ns_pg_link_fini(&link);
    return status;
}
