/* lines.h - golden cases: a JSON object a line. */
#ifndef NS_TESTS_LINES_H
#define NS_TESTS_LINES_H

#include <jansson.h>
#include <stddef.h>

/* Calls `visit` for every line of `path`, numbered from 1, and returns how
 * many there were. A file or line that cannot be read ends the program: a
 * test without its cases has not passed. */
size_t lines_each(const char *path,
                  void (*visit)(size_t line, const json_t *value, void *data),
                  void *data);

/* A whole file with a NUL behind it; the caller frees it. */
char *lines_file(const char *path, size_t *length);

/* Where scripts/fetch-tokenizer.sh puts the 262k-entry tokenizer.json: beside
 * the tests of the build that this program belongs to. */
const char *lines_real_tokenizer(void);

#endif
