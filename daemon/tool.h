/* tool.h - a parser of someone else's, over code that a model wrote.
 *
 * The tool runs in a process of its own, which is told apart from us by all
 * that a process can be: no descriptor but its pipes, an empty environment, /
 * as its folder, limits of memory and time, no file written, no process but
 * those that it waits for, no new rights, no network, no tracing, no signals to
 * others, and a process group that is killed as a whole when the clock says so.
 * Where the kernel has Landlock it reads programs, libraries and headers, and
 * no other file. It reads the code from its standard input and never runs it.
 *
 * Thread: any; waits for the tool, NS_TOOL_MS at most.
 */
#ifndef NS_DAEMON_TOOL_H
#define NS_DAEMON_TOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum {
    NS_TOOL_MS = 10000,
    NS_TOOL_CPU_S = 5,
    NS_TOOL_MEMORY = 1 << 30, /* bytes of address space */
    NS_TOOL_SAYS = 4096,      /* bytes of what it says that are kept */
};

struct ns_tool_answer {
    int exit_status; /* -1: it was killed, by a limit or by the clock */
    char says[NS_TOOL_SAYS + 1];
};

#define NS_TOOL_ARGUMENT "--nightshift-tool"

/* The process between us and the tool is this program itself, started anew:
 * main() hands over to ns_tool_main before it does anything else. It gives up
 * what the tool shall not have and becomes the tool. */
bool ns_tool_is_helper(int argc, char **argv);
int ns_tool_main(char **argv); /* does not come back */

/* Whether `path` is a file that can be run. NS_REJECT names `key`. */
enum ns_status ns_tool_check(const char *path, const char *key,
                             struct ns_error *err);

/* Whether the kernel holds the tool to its own files. */
bool ns_tool_fences_files(void);

/* argv[0] is the tool's path. NS_RETRY: it can't be started. */
enum ns_status ns_tool_run(const char *const *argv, const char *input,
                           size_t length, struct ns_tool_answer *out,
                           struct ns_error *err);

/* Python and C. True: it parses. False: `says` is why, in one line; `*status`
 * is not NS_OK where the tool itself failed, which says nothing of the code.
 * C's includes are held to names inside the compiler's own folders, and what
 * the compiler says of a file other than the code is not passed on. */
bool ns_tool_python(const char *python, const char *code, size_t length,
                    struct ns_tool_answer *answer, enum ns_status *status,
                    struct ns_error *err);
bool ns_tool_c(const char *cc, const char *code, size_t length,
               struct ns_tool_answer *answer, enum ns_status *status,
               struct ns_error *err);

/* Whether no line of it names a file but a header of the compiler's own. Pure;
 * what ns_tool_c asks first. */
bool ns_tool_c_is_harmless(const char *code, size_t length, size_t *line);

/* ns_tool_check, and whether the tool tells good code from bad: one that does
 * not would turn down each answer, or none. NS_REJECT names the key. */
enum ns_status ns_tool_try_python(const char *python, struct ns_error *err);
enum ns_status ns_tool_try_c(const char *cc, struct ns_error *err);

#endif
