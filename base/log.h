/* log.h - one line per event on stderr, which systemd hands to the journal.
 *
 *     <6>batch.planned canvases=12 prefill_tokens=512
 *
 * Events are noun.verb and stable, to be grepped; then key=value pairs. The
 * "<level>" prefix is written only when the journal reads it (JOURNAL_STREAM),
 * else the level's word. Values that come from outside go through
 * ns_log_escape. Prompts and completions are never logged.
 *
 * Thread: any. A line is one write(2) and never mixes with another.
 */
#ifndef NS_BASE_LOG_H
#define NS_BASE_LOG_H

#include <stddef.h>

enum ns_log_level { NS_LOG_ERROR = 3, NS_LOG_WARN = 4, NS_LOG_INFO = 6,
                    NS_LOG_DEBUG = 7 };

/* Lines above this level are dropped. The default is NS_LOG_INFO. */
void ns_log_set_level(enum ns_log_level level);

void ns_log(enum ns_log_level level, const char *event, const char *format,
            ...) __attribute__((format(printf, 3, 4)));

#define ns_log_error(event, ...) ns_log(NS_LOG_ERROR, event, __VA_ARGS__)
#define ns_log_warn(event, ...) ns_log(NS_LOG_WARN, event, __VA_ARGS__)
#define ns_log_info(event, ...) ns_log(NS_LOG_INFO, event, __VA_ARGS__)
#define ns_log_debug(event, ...) ns_log(NS_LOG_DEBUG, event, __VA_ARGS__)

/* Writes `text` quoted into `out`, control characters and non-ASCII as \xNN;
 * cut to fit. Returns `out`. */
const char *ns_log_escape(const char *text, size_t length, char *out,
                          size_t out_size);

#endif
