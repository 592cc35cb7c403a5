/* error.h - what a function says when it fails.
 *
 * A function that can fail returns a status and takes a `struct ns_error *`
 * last (never NULL). The status says what happens next, the code is a stable
 * word for result rows, the text is one line for a person. On failure the
 * function leaves its outputs alone.
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_BASE_ERROR_H
#define NS_BASE_ERROR_H

enum ns_status {
    NS_OK = 0,
    NS_RETRY,  /* the world was at fault: leave the job queued, try later */
    NS_REJECT, /* the input was at fault: it will fail every time         */
    NS_STOP,   /* we were asked to stop: unwind quietly                   */
    NS_FATAL,  /* we are at fault or broken: drain, exit, be restarted    */
};

struct ns_error {
    enum ns_status status;
    const char *code; /* static storage: "bad_param"; or NULL */
    char param[64];   /* field of the input, "body.max_tokens"; or "" */
    char text[400];   /* "messages[2]: image is 90 megapixels, limit 64" */
};

/* Each returns `status`, so that `return ns_fail(...)` fails in one line. */
enum ns_status ns_fail(struct ns_error *err, enum ns_status status,
                       const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As ns_fail, with ": " and the text of errno appended. */
enum ns_status ns_fail_errno(struct ns_error *err, enum ns_status status,
                             const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* NS_REJECT with a stable code and the name of the field (may be NULL). */
enum ns_status ns_refuse(struct ns_error *err, const char *code,
                         const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts "context: " in front of the text of an error that already stands. */
void ns_context(struct ns_error *err, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

const char *ns_status_name(enum ns_status status);

#endif
