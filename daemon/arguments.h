/* arguments.h - the command line: options from a table, settings over the file.
 *
 * Each command has one table of its options. It drives the parsing and what
 * --help prints, so that neither can know what the other does not.
 *
 * Options that are settings of nightshift.conf(5), by a name of their own or by
 * --set, are read before the file that they override is known: they are kept
 * and set once it is loaded, and again after each reload. An option of its own
 * name with what can not be its value is misuse of the command; what stands
 * behind --set is judged with the file.
 *
 * Borrows: argv. Thread: one at a time.
 */
#ifndef NS_DAEMON_ARGUMENTS_H
#define NS_DAEMON_ARGUMENTS_H

#include <stdbool.h>

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

struct ns_argument {     /* an option; exactly one of the last three is set */
    const char *name;    /* "output" */
    char letter;         /* 'o'; 0: it has none */
    const char *value;   /* what --help calls its value; NULL: a flag */
    const char *meaning; /* lines, without indent */
    bool *flag;
    const char **text;
    const char *key; /* of a setting: "engine.model" */
};

struct ns_synopsis {
    const char *program;  /* "nightshift run" */
    const char *operands; /* "FILE|- [options]" */
    const char *about;    /* lines, the last one ended; NULL: none */
    const struct ns_argument *table; /* ends with an option without name */
    int least, most;      /* operands */
    bool plain;           /* takes no --config and no --set */
};

/* Reads all of them; the operands then stand from argv[optind] on. -1: go on.
 * Else the status to leave with: --help was answered, or complained. */
int ns_arguments_parse(struct ns_arguments *arguments,
                       const struct ns_synopsis *usage, int argc, char **argv);

/* What is wrong although each option is right, with the usage behind it:
 * "nightshift db: TEXT". Returns the status of misuse. */
int ns_arguments_misused(const struct ns_synopsis *usage, const char *text);

enum ns_status ns_arguments_add(struct ns_arguments *arguments,
                                const char *key, const char *value,
                                struct ns_error *err);
enum ns_status ns_arguments_load(const struct ns_arguments *arguments,
                                 struct ns_options **out,
                                 struct ns_error *err);

/* Where both daemon and operator look when no file is named. */
#define NS_ETC_CONFIG "/etc/nightshift/nightshift.conf"

#endif
