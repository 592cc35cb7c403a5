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

static enum ns_status
read_bytes(const struct ns_pictures_options *options, struct ns_job *job,
           const json_t *url, const char *at, void **bytes, size_t *n,
           struct ns_error *err)
{
    const char *text = json_string_value(url);

    if (begins(text, "data:"))
        return read_data_url(job, text, json_string_length(url), at, bytes, n,
                             err);
    if (strstr(text, "://") && !begins(text, "file://"))
        return ns_refuse(err, "url_disabled", NULL, "URLs are not fetched "
                         "here; send a data: URL or a file");
    return ns_attachment_read(options->roots, text, NS_PICTURE_BYTES, bytes,
                              n, err);
}

static enum ns_status
decode(const struct ns_pictures_options *options, struct ns_job *job,
       const json_t *url, const char *at, struct ns_picture *out,
       struct ns_error *err)
{
    enum ns_status status;
    void *bytes = NULL;
    size_t n = 0;

    status = read_bytes(options, job, url, at, &bytes, &n, err);
    if (status == NS_OK)
        status = ns_decoder_decode(options->decoder, bytes, n, out, err);
    free(bytes);
    return status;
}

static enum ns_status
load_part(const struct ns_pictures_options *options, struct ns_job *job,
          const json_t *part, const struct ns_document *document,
          const char *at, struct ns_pictures *out, struct ns_error *err)
{
    const json_t *image = json_object_get(part, "image_url");
    const json_t *url = json_is_string(image) ? image
                                              : json_object_get(image, "url");
    struct ns_picture picture = { 0 };
    enum ns_status status;

    if (!options->decoder)
        return ns_refuse(err, "unsupported", NULL,
                         "this checkpoint cannot read images");
    if (out->n == NS_JOB_IMAGES)
        return ns_refuse(err, "image_limit", NULL, "more than %d images",
                         NS_JOB_IMAGES);
    if (!document && !json_is_string(url))
        return ns_refuse(err, "bad_param", NULL, "there is no url"); /* parsed */
    if (document)
        status = ns_decoder_decode(options->decoder, document->bytes,
                                   document->length, &picture, err);
    else
        status = decode(options, job, url, at, &picture, err);
    if (status == NS_OK)
        status = ns_image_prepare(&options->config->vision, picture.rgb,
                                  picture.width, picture.height,
                                  budget(job, image), &out->image[out->n],
                                  err);
    if (status == NS_OK)
        out->n++;
    ns_picture_fini(&picture);
    return status;
}

static bool
is_image(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));

    return type && strcmp(type, "image_url") == 0;
}

enum ns_status
ns_pictures_load(const struct ns_pictures_options *options, struct ns_job *job,
                 const struct ns_references *references,
                 struct ns_pictures *out, struct ns_error *err)
{
    memset(out, 0, sizeof(*out));
    if (job->n_images == 0 && (!references || references->n == 0))
        return NS_OK;
    out->ids = (struct ns_image_ids){ options->config->image_begin_id,
                                      options->config->image_id,
                                      options->config->image_end_id };
    for (size_t i = 0; i < json_array_size(job->messages); i++) {
        const json_t *content =
            json_object_get(json_array_get(job->messages, i), "content");

        for (size_t j = 0; j < json_array_size(content); j++) {
            const json_t *part = json_array_get(content, j);
            enum ns_status status;
            char at[64];

            if (!is_image(part))
                continue;
            snprintf(at, sizeof(at), "body.messages[%zu].content[%zu]", i, j);
            status = load_part(options, job, part,
                               ns_references_of(references, part), at, out,
                               err);
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
ns_pictures_fini(struct ns_pictures *pictures)
{
    while (pictures->n > 0)
        ns_image_fini(&pictures->image[--pictures->n]);
}
