/* json_scan.h - a pull reader for one large JSON text, value by value.
 *
 * tokenizer.json holds a million and a half values in 33 MB. As a tree that
 * is a second and hundreds of megabytes; read as a stream it is a tenth of
 * both, and keys keep their order, their repetitions and their NUL bytes.
 * The grammar is RFC 8259's, strings must be well-formed UTF-8, nesting is at
 * most NS_SCAN_DEPTH deep and one string at most NS_SCAN_STRING bytes.
 *
 *     if (ns_scan_open(&scan, '{'))
 *         while (ns_scan_member(&scan))           a key is in scan.text
 *             ns_scan_skip(&scan, NULL);         or another take of a value
 *
 * The first failure sticks: every later call returns false, so a loop ends,
 * and the caller looks at `scan.problem` once, behind it.
 *
 * Borrows: the bytes. Owns: the text of the last string, until fini.
 */
#ifndef NS_ENGINE_JSON_SCAN_H
#define NS_ENGINE_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/reader.h"

enum { NS_SCAN_DEPTH = 32, NS_SCAN_STRING = 1 << 20 };

struct ns_scan {
    struct ns_reader in;
    const unsigned char *begin;
    struct ns_buf text;  /* the last string or key, unescaped */
    const char *problem; /* NULL while all is well */
    unsigned depth;
    bool fresh; /* the container was opened just now */
};

void ns_scan_init(struct ns_scan *scan, const char *json, size_t length);
void ns_scan_fini(struct ns_scan *scan);

/* First byte of the next value, or 0 at the end. Takes nothing. */
char ns_scan_peek(struct ns_scan *scan);

/* Enters an object or array. */
bool ns_scan_open(struct ns_scan *scan, char bracket);
/* Whether another element follows in this array; else leaves it. */
bool ns_scan_element(struct ns_scan *scan);
/* The same for an object: the member's key is then in `text`. */
bool ns_scan_member(struct ns_scan *scan);

bool ns_scan_string(struct ns_scan *scan);
bool ns_scan_uint(struct ns_scan *scan, uint64_t *out);
/* Passes one value of any kind; `out` (may be NULL) gets its bytes. */
bool ns_scan_skip(struct ns_scan *scan, struct ns_reader *out);
/* True when nothing but white space is left. */
bool ns_scan_end(struct ns_scan *scan);

/* What went wrong and at which byte: NS_REJECT, or NS_FATAL for memory. */
enum ns_status ns_scan_check(const struct ns_scan *scan, const char *name,
                             struct ns_error *err);

#endif
