#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void
set(struct ns_error *err, enum ns_status status, const char *code,
    const char *param)
{
    err->status = status;
    err->code = code;
    snprintf(err->param, sizeof(err->param), "%s", param ? param : "");
}

enum ns_status
ns_fail(struct ns_error *err, enum ns_status status, const char *format, ...)
{
    va_list ap;

    set(err, status, NULL, NULL);
    va_start(ap, format);
    vsnprintf(err->text, sizeof(err->text), format, ap);
    va_end(ap);
    return status;
}

enum ns_status
ns_fail_errno(struct ns_error *err, enum ns_status status, const char *format,
              ...)
{
    int saved = errno;
    va_list ap;
    size_t used;

    set(err, status, NULL, NULL);
    va_start(ap, format);
    vsnprintf(err->text, sizeof(err->text), format, ap);
    va_end(ap);
    used = strlen(err->text);
    snprintf(err->text + used, sizeof(err->text) - used, ": %s",
             strerror(saved));
    errno = saved;
    return status;
}

enum ns_status
ns_refuse(struct ns_error *err, const char *code, const char *param,
          const char *format, ...)
{
    va_list ap;

    set(err, NS_REJECT, code, param);
    va_start(ap, format);
    vsnprintf(err->text, sizeof(err->text), format, ap);
    va_end(ap);
    return NS_REJECT;
}

void
ns_context(struct ns_error *err, const char *format, ...)
{
    char front[sizeof(err->text)];
    char back[sizeof(err->text)];
    va_list ap;
    size_t used;

    va_start(ap, format);
    vsnprintf(front, sizeof(front), format, ap);
    va_end(ap);
    memcpy(back, err->text, sizeof(back));
    used = strlen(front);
    memcpy(err->text, front, used + 1);
    snprintf(err->text + used, sizeof(err->text) - used, ": %s", back);
}

const char *
ns_status_name(enum ns_status status)
{
    switch (status) {
    case NS_OK:
        return "ok";
    case NS_RETRY:
        return "retry";
    case NS_REJECT:
        return "reject";
    case NS_STOP:
        return "stop";
    case NS_FATAL:
        return "fatal";
    }
    return "unknown";
}
