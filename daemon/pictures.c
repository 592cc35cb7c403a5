#include "daemon/pictures.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "daemon/references.h"

enum { TOKENS_LOW = 70, TOKENS_AUTO = 280, TOKENS_HIGH = 1120 };

/* The job's own number is for all of its pictures; else `detail` says. */
static uint32_t
budget(const struct ns_job *job, const json_t *image)
{
    const char *detail = json_string_value(json_object_get(image, "detail"));

    if (job->image_tokens)
        return job->image_tokens;
    if (detail && strcmp(detail, "low") == 0)
        return TOKENS_LOW;
    if (detail && strcmp(detail, "high") == 0)
        return TOKENS_HIGH;
    return TOKENS_AUTO;
}

static bool
begins(const char *text, const char *with)
{
    return strncasecmp(text, with, strlen(with)) == 0;
}

/* "data:image/png;base64,..." */
static enum ns_status
read_data_url(struct ns_job *job, const char *url, size_t length,
              const char *at, void **bytes, size_t *n, struct ns_error *err)
{
    const char *comma = memchr(url, ',', length), *kind;
    size_t head = comma ? (size_t)(comma - url) : 0;
    enum ns_status status;

    if (!comma || head < 12 || !begins(comma - 7, ";base64"))
        return ns_refuse(err, "bad_base64", NULL,
                         "a data: URL must be data:<type>;base64,<data>");
    status = ns_base64_decode(comma + 1, length - head - 1, NS_PICTURE_BYTES,
                              bytes, n, err);
    kind = status == NS_OK ? ns_picture_kind(*bytes, *n) : NULL;
    if (kind && begins(url + 5, "image/") &&
        (strlen(kind) != head - 18 ||
         strncasecmp(url + 11, kind, strlen(kind)) != 0) &&
        !(strcmp(kind, "JPEG") == 0 && begins(url + 11, "jpg;")))
        ns_job_warn(job, "%s: declared as %.*s, read as %s", at,
                    (int)(head - 12 < 40 ? head - 12 : 40), url + 5, kind);
    return status;
}

static bool
is_web(const char *url)
{
    return strstr(url, "://") != NULL && !begins(url, "file://") &&
           !begins(url, "data:");
}

/* What the next URL of the job brought; parts come in the order in which
 * ns_pictures_urls found them. */
static enum ns_status
take_fetched(struct ns_fetch *fetched, uint32_t *next, void **bytes, size_t *n,
             struct ns_error *err)
{
    uint32_t i = (*next)++;

    if (fetched->status != NS_OK) {
        if (i < fetched->failed)
            return NS_OK; /* not this part's fault: it has no bytes */
        *err = fetched->error;
        return fetched->status;
    }
    *bytes = fetched->item[i].bytes;
    *n = fetched->item[i].length;
    fetched->item[i].bytes = NULL;
    return NS_OK;
}

/* The work of one ns_pictures_load. */
struct loading {
    const struct ns_pictures_options *options;
    struct ns_job *job;
    const struct ns_references *references;
    struct ns_fetch *fetched;
    uint32_t n_taken; /* of it */
    struct ns_pictures *out;
    struct ns_error *err;
};

static enum ns_status
read_bytes(struct loading *l, const char *text, const char *at, void **bytes,
           size_t *n)
{
    if (begins(text, "data:"))
        return read_data_url(l->job, text, strlen(text), at, bytes, n, l->err);
    if (is_web(text) && !l->options->fetcher)
        return ns_refuse(l->err, "url_disabled", NULL, "URLs are not fetched "
                         "here; send a data: URL or a file");
    if (is_web(text))
        return take_fetched(l->fetched, &l->n_taken, bytes, n, l->err);
    return ns_attachment_read(l->options->roots, text, NS_PICTURE_BYTES, bytes,
                              n, l->err);
}

static bool
is_image(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));

    return type && strcmp(type, "image_url") == 0;
}

/* NULL where the picture is a document. */
static const char *
url_of(const json_t *part)
{
    const json_t *image = json_object_get(part, "image_url");

    return json_string_value(json_is_string(image)
                                 ? image
                                 : json_object_get(image, "url"));
}

/* No picture and NS_OK: another part of the job is to blame. */
static enum ns_status
decode(struct loading *l, const json_t *part, const char *at,
       struct ns_picture *out)
{
    const struct ns_document *document =
        ns_references_of(l->references, part);
    enum ns_status status;
    void *bytes = NULL;
    size_t n = 0;

    if (document)
        return ns_decoder_decode(l->options->decoder, document->bytes,
                                 document->length, out, l->err);
    if (!url_of(part))
        return ns_refuse(l->err, "bad_param", NULL, "there is no url");
    status = read_bytes(l, url_of(part), at, &bytes, &n);
    if (status == NS_OK && bytes)
        status = ns_decoder_decode(l->options->decoder, bytes, n, out, l->err);
    free(bytes);
    return status;
}

static enum ns_status
load_part(struct loading *l, const json_t *part, const char *at)
{
    const struct ns_vision_config *vision = &l->options->config->vision;
    struct ns_pictures *out = l->out;
    struct ns_picture picture = { 0 };
    enum ns_status status;

    if (!l->options->decoder)
        return ns_refuse(l->err, "unsupported", NULL,
                         "this checkpoint cannot read images");
    if (out->n == NS_JOB_IMAGES)
        return ns_refuse(l->err, "image_limit", NULL, "more than %d images",
                         NS_JOB_IMAGES);
    status = decode(l, part, at, &picture);
    if (status == NS_OK && picture.rgb)
        status = ns_image_prepare(
            vision, picture.rgb, picture.width, picture.height,
            budget(l->job, json_object_get(part, "image_url")),
            &out->image[out->n], l->err);
    if (status == NS_OK && picture.rgb)
        out->n++;
    ns_picture_fini(&picture);
    return status;
}

/* Calls `each` for every picture of the job, in order, until it fails. */
static enum ns_status
walk(const struct ns_job *job,
     enum ns_status (*each)(void *data, const json_t *part, const char *at),
     void *data)
{
    enum ns_status status = NS_OK;
    char at[64];

    for (size_t i = 0; i < json_array_size(job->messages); i++) {
        const json_t *content =
            json_object_get(json_array_get(job->messages, i), "content");

        for (size_t j = 0; j < json_array_size(content); j++) {
            const json_t *part = json_array_get(content, j);

            if (!is_image(part))
                continue;
            snprintf(at, sizeof(at), "body.messages[%zu].content[%zu]", i, j);
            status = each(data, part, at);
            if (status != NS_OK)
                return status;
        }
    }
    return NS_OK;
}

static enum ns_status
add_url(void *data, const json_t *part, const char *at)
{
    struct ns_fetch *fetch = data;
    const char *url = url_of(part);

    (void)at;
    if (url && is_web(url) && fetch->n < NS_FETCH_URLS)
        fetch->item[fetch->n++].url = url;
    return NS_OK;
}

bool
ns_pictures_urls(const struct ns_pictures_options *options,
                 const struct ns_job *job, struct ns_fetch *out)
{
    _Static_assert((int)NS_FETCH_URLS == (int)NS_JOB_IMAGES,
                   "a fetch has room for a job");
    *out = (struct ns_fetch){ 0 };
    if (options->decoder && options->fetcher && job->n_images > 0)
        walk(job, add_url, out);
    return out->n > 0;
}

static enum ns_status
load_next(void *data, const json_t *part, const char *at)
{
    struct loading *l = data;
    enum ns_status status = load_part(l, part, at);

    if (status == NS_REJECT)
        snprintf(l->err->param, sizeof(l->err->param), "%s", at);
    if (status != NS_OK)
        ns_context(l->err, "%s", at);
    return status;
}

enum ns_status
ns_pictures_load(const struct ns_pictures_options *options, struct ns_job *job,
                 const struct ns_references *references,
                 struct ns_fetch *fetched, struct ns_pictures *out,
                 struct ns_error *err)
{
    struct loading loading = { .options = options, .job = job,
                               .references = references,
                               .fetched = fetched, .out = out, .err = err };
    struct ns_fetch own = { 0 };
    enum ns_status status;

    memset(out, 0, sizeof(*out));
    if (job->n_images == 0 && (!references || references->n == 0))
        return NS_OK;
    out->ids = (struct ns_image_ids){ options->config->image_begin_id,
                                      options->config->image_id,
                                      options->config->image_end_id };
    if (!fetched) {
        loading.fetched = &own;
        if (ns_pictures_urls(options, job, &own))
            ns_fetcher_wait(options->fetcher, &own);
    }
    status = walk(job, load_next, &loading);
    ns_fetch_fini(&own);
    return status;
}

void
ns_pictures_fini(struct ns_pictures *pictures)
{
    while (pictures->n > 0)
        ns_image_fini(&pictures->image[--pictures->n]);
}
