/* pictures.h - the pictures of a job: content parts to what the engine takes.
 *
 *     image_url part --> bytes --> decoder.h --> pixels --> engine/image.h
 *
 * Bytes come from the message itself (a data: URL), from a document that it
 * names (references.h), from a file below one of the allowed folders, opened so
 * that no link leads out of it, or, where that is configured, from the web
 * (fetch.h). What they are, they say themselves.
 *
 * Codes of NS_REJECT, with the part's name: unsupported (no pictures here),
 * image_limit, image_type, bad_image, bad_base64, path_denied, url_disabled,
 * url_denied, url_failed.
 *
 * Thread: any, the decoder is shared.
 */
#ifndef NS_DAEMON_PICTURES_H
#define NS_DAEMON_PICTURES_H

#include "connectors/job.h"
#include "daemon/decoder.h"
#include "daemon/fetch.h"
#include "engine/image.h"
#include "engine/prompt.h"

struct ns_references;

struct ns_pictures_options {
    struct ns_decoder *decoder; /* NULL: pictures are refused */
    const struct ns_config *config; /* of a model that sees */
    const char *roots; /* folders, a comma list; NULL: no files */
    struct ns_fetcher *fetcher; /* NULL: nothing is fetched */
};

struct ns_pictures {
    struct ns_image_ids ids; /* of the model */
    uint32_t n;
    struct ns_image image[NS_JOB_IMAGES]; /* owned */
};

/* The job's URLs that are to be fetched before load(), borrowed from its
 * messages; true if there are any. Zeroes `out` first. */
bool ns_pictures_urls(const struct ns_pictures_options *options,
                      const struct ns_job *job, struct ns_fetch *out);

/* Of the job's messages; where documents stand in them, those are the ones of
 * `references`, which may be NULL. `fetched`: of the job, done, its bytes taken
 * from it; NULL: load() fetches what there is, and waits. Zeroes `out` first;
 * fini whatever comes back. */
enum ns_status ns_pictures_load(const struct ns_pictures_options *options,
                                struct ns_job *job,
                                const struct ns_references *references,
                                struct ns_fetch *fetched,
                                struct ns_pictures *out,
                                struct ns_error *err);
void ns_pictures_fini(struct ns_pictures *pictures); /* and twice */

/* `text` as base64 that may be broken by white space. NS_REJECT: bad_base64,
 * image_limit before anything of its size is taken. Free `*out`. */
enum ns_status ns_base64_decode(const char *text, size_t length, size_t limit,
                                void **out, size_t *n, struct ns_error *err);

/* The file beneath one of `roots`. NS_REJECT: path_denied, image_limit. */
enum ns_status ns_attachment_read(const char *roots, const char *path,
                                  size_t limit, void **out, size_t *n,
                                  struct ns_error *err);

#endif
