/* arguments.h - settings of the command line, over those of the file.
 *
 * Options are read before the file that they override is known, so they are
 * kept and set once it is loaded, and again after each reload.
 *
 * Borrows: argv. Thread: one at a time.
 */
#ifndef NS_DAEMON_ARGUMENTS_H
#define NS_DAEMON_ARGUMENTS_H

#include "base/error.h"
#include "config/options.h"

enum { NS_MAX_ARGUMENTS = 64 };

struct ns_arguments {
    const char *config;          /* NULL: see below */
    const char *fallback_config; /* read if it is there and none is named */
    size_t n;
    const char *key[NS_MAX_ARGUMENTS]; /* NULL: the value is "KEY=VALUE" */
    const char *value[NS_MAX_ARGUMENTS];
};

enum ns_status ns_arguments_add(struct ns_arguments *arguments,
                                const char *key, const char *value,
                                struct ns_error *err);
enum ns_status ns_arguments_load(const struct ns_arguments *arguments,
                                 struct ns_options **out,
                                 struct ns_error *err);

#endif
