#include "daemon/references.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/log.h"
#include "base/reader.h"
#include "connectors/json.h"
#include "connectors/sha256.h"
#include "daemon/pictures.h"

static bool
is_text(const void *bytes, size_t length)
{
    return !memchr(bytes, '\0', length) && ns_utf8_span(bytes, length) == length;
}

const char *
ns_references_type(const void *bytes, size_t length)
{
    static const char *const kinds[][2] = {
        { "JPEG", "image/jpeg" },
        { "PNG", "image/png" },
        { "WEBP", "image/webp" },
    };
    const char *kind = ns_picture_kind(bytes, length);

    for (size_t i = 0; kind && i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcasecmp(kind, kinds[i][0]) == 0)
            return kinds[i][1];
    return is_text(bytes, length) ? "text/plain" : NULL;
}

/* --- files -------------------------------------------------------------- */

/* Whoever names a file by its id names its hash too: a file that was changed
 * is not taken for what it was. */
static enum ns_status
read_file(const struct ns_references_options *options, const char *id,
          const unsigned char *sha256, struct ns_reference *out,
          struct ns_error *err)
{
    struct ns_document *document = calloc(1, sizeof(*document));
    enum ns_status status;
    size_t length = 0;
    void *bytes = NULL;

    if (!document)
        return ns_fail(err, NS_FATAL, "out of memory for a document");
    status = ns_attachment_read(options->roots, id, options->limit_bytes,
                                &bytes, &length, err);
    if (status == NS_REJECT && err->code &&
        strcmp(err->code, "image_limit") == 0)
        err->code = "document_limit";
    if (status == NS_OK)
        status = ns_sha256(bytes, length, document->sha256, err);
    if (status == NS_OK &&
        memcmp(document->sha256, sha256, NS_SHA256_BYTES) != 0)
        status = ns_refuse(err, "document_hash", NULL, "the file is of other "
                           "bytes than the job's sha256 says");
    if (status != NS_OK) {
        free(bytes);
        free(document);
        return status;
    }
    document->media_type = ns_references_type(bytes, length);
    document->bytes = bytes;
    document->length = length;
    out->document = document;
    out->bytes = bytes;
    return NS_OK;
}

/* --- a part ------------------------------------------------------------- */

static enum ns_status
get(const struct ns_references_options *options, const json_t *part,
    int64_t waited_ms, struct ns_reference *out, struct ns_error *err)
{
    const json_t *value = json_object_get(part, "document");
    const char *id = json_string_value(json_object_get(value, "id"));
    const char *hex = json_string_value(json_object_get(value, "sha256"));
    unsigned char sha256[NS_SHA256_BYTES];
    enum ns_status status;

    if (!id || !hex || !ns_sha256_from(hex, sha256)) /* parsed already */
        return ns_refuse(err, "bad_param", NULL, "no id and sha256");
    if (!options->documents && !options->roots)
        return ns_refuse(err, "unsupported", NULL, "there is nowhere to look "
                         "for documents");
    if (!options->documents)
        return read_file(options, id, sha256, out, err);
    status = ns_documents_get(options->documents, id, sha256, &out->document,
                              err);
    if (status == NS_RETRY && err->code && waited_ms >= options->wait_ms)
        err->status = status = NS_REJECT;
    return status;
}

static bool
begins(const char *text, const char *with)
{
    return strncasecmp(text, with, strlen(with)) == 0;
}

/* What stands in the document's place; NULL: `err` says why. */
static json_t *
new_part(const struct ns_document *document, struct ns_error *err)
{
    const char *type = document->media_type ? document->media_type : "";
    json_t *part = NULL;
    char shown[120];

    if (begins(type, "image/")) {
        part = json_pack("{s:s, s:{}}", "type", "image_url", "image_url");
    } else if (begins(type, "text/") || begins(type, "application/json") ||
               begins(type, "application/xml")) {
        if (!is_text(document->bytes, document->length)) {
            ns_refuse(err, "document_type", NULL, "it is put as %s, and is no "
                      "valid UTF-8 without NUL",
                      ns_log_escape(type, strlen(type), shown, sizeof(shown)));
            return NULL;
        }
        part = json_pack("{s:s, s:o}", "type", "text", "text",
                         json_stringn_nocheck(document->bytes,
                                              document->length));
    } else {
        ns_refuse(err, "document_type", NULL, "%s is neither text nor a "
                  "picture", *type ? ns_log_escape(type, strlen(type), shown,
                                                   sizeof(shown))
                                   : "what it holds");
        return NULL;
    }
    if (!part)
        ns_fail(err, NS_FATAL, "out of memory for a document");
    return part;
}

static enum ns_status
replace(const struct ns_references_options *options, json_t *content, size_t at,
        int64_t waited_ms, struct ns_references *out, struct ns_error *err)
{
    struct ns_reference *reference = &out->reference[out->n];
    enum ns_status status;
    json_t *part;

    if (out->n == NS_JOB_DOCUMENTS)
        return ns_refuse(err, "document_limit", NULL, "too many"); /* parsed */
    status = get(options, json_array_get(content, at), waited_ms, reference,
                 err);
    if (status != NS_OK)
        return status;
    out->n++;
    part = new_part(reference->document, err);
    if (!part)
        return err->status;
    reference->part = part;
    if (json_array_set_new(content, at, part) == -1)
        return ns_fail(err, NS_FATAL, "out of memory for a document");
    return NS_OK;
}

/* --- all of a job ------------------------------------------------------- */

static bool
is_reference(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));

    return type && strcmp(type, "document") == 0;
}

enum ns_status
ns_references_load(const struct ns_references_options *options,
                   struct ns_job *job, int64_t waited_ms,
                   struct ns_references *out, struct ns_error *err)
{
    memset(out, 0, sizeof(*out));
    if (job->n_documents == 0)
        return NS_OK;
    out->documents = options->documents;
    out->messages = json_deep_copy(job->messages);
    if (!out->messages)
        return ns_fail(err, NS_FATAL, "out of memory for the messages");
    out->job = job;
    out->as_written = job->messages;
    job->messages = out->messages;
    for (size_t i = 0; i < json_array_size(out->messages); i++) {
        json_t *content =
            json_object_get(json_array_get(out->messages, i), "content");

        for (size_t j = 0; j < json_array_size(content); j++) {
            enum ns_status status;
            char at[64];

            if (!is_reference(json_array_get(content, j)))
                continue;
            snprintf(at, sizeof(at), "body.messages[%zu].content[%zu]", i, j);
            status = replace(options, content, j, waited_ms, out, err);
            if (status != NS_OK) {
                if (status == NS_REJECT)
                    memcpy(err->param, at, sizeof(at));
                ns_context(err, "%s", at);
                return status;
            }
        }
    }
    return NS_OK;
}

void
ns_references_fini(struct ns_references *references)
{
    while (references->n > 0) {
        struct ns_reference *reference = &references->reference[--references->n];

        if (reference->bytes)
            free((void *)(uintptr_t)reference->document);
        else
            ns_documents_let_go(references->documents, reference->document);
        free(reference->bytes);
    }
    if (references->messages)
        references->job->messages = references->as_written;
    json_decref(references->messages);
    references->messages = NULL;
}

const struct ns_document *
ns_references_of(const struct ns_references *references, const json_t *part)
{
    for (uint32_t i = 0; references && i < references->n; i++)
        if (references->reference[i].part == part)
            return references->reference[i].document;
    return NULL;
}
