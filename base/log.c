#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic int threshold = NS_LOG_INFO;

void
ns_log_set_level(enum ns_log_level level)
{
    atomic_store(&threshold, (int)level);
}

static const char *
level_word(enum ns_log_level level)
{
    switch (level) {
    case NS_LOG_ERROR:
        return "error: ";
    case NS_LOG_WARN:
        return "warning: ";
    case NS_LOG_INFO:
        return "";
    case NS_LOG_DEBUG:
        return "debug: ";
    }
    return "";
}

void
ns_log(enum ns_log_level level, const char *event, const char *format, ...)
{
    int saved = errno;
    char line[2048];
    size_t used;
    va_list ap;

    if ((int)level > atomic_load(&threshold))
        return;
    if (getenv("JOURNAL_STREAM"))
        snprintf(line, sizeof(line), "<%d>%s ", (int)level, event);
    else
        snprintf(line, sizeof(line), "%s%s ", level_word(level), event);
    used = strlen(line);
    va_start(ap, format);
    vsnprintf(line + used, sizeof(line) - used - 1, format, ap);
    va_end(ap);
    used = strlen(line);
    while (used && line[used - 1] == ' ')
        used--;
    line[used++] = '\n';
    if (write(STDERR_FILENO, line, used) < 0) {
        /* no one is left to be told */
    }
    errno = saved;
}

const char *
ns_log_escape(const char *text, size_t length, char *out, size_t out_size)
{
    size_t used = 0;

    if (out_size < 8) {
        if (out_size)
            out[0] = '\0';
        return out;
    }
    out[used++] = '"';
    for (size_t i = 0; i < length && used + 6 < out_size; i++) {
        unsigned char c = (unsigned char)text[i];

        if (c == '"' || c == '\\') {
            out[used++] = '\\';
            out[used++] = (char)c;
        } else if (c >= 0x20 && c < 0x7f) {
            out[used++] = (char)c;
        } else {
            used += (size_t)snprintf(out + used, out_size - used, "\\x%02x",
                                     c);
        }
    }
    out[used++] = '"';
    out[used] = '\0';
    return out;
}
