/* sha256.h - the hash that names bytes, whole and as text. Thread: any. */
#ifndef NS_CONNECTORS_SHA256_H
#define NS_CONNECTORS_SHA256_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "connectors/message.h"

enum ns_status ns_sha256(const void *bytes, size_t length,
                         unsigned char out[NS_SHA256_BYTES],
                         struct ns_error *err);

/* 2 * length digits and a NUL. */
void ns_hex(const unsigned char *bytes, size_t length, char *out);

/* False unless `text` is just the 64 hex digits of one. */
bool ns_sha256_from(const char *text, unsigned char out[NS_SHA256_BYTES]);

#endif
