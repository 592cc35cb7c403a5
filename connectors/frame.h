/* frame.h - bytes to an LZ4 frame and back, within a limit.
 *
 * What the database keeps (results, payloads, documents) and what a message of
 * Kafka may be. Unpacking streams and stops at the limit, whatever size the
 * frame declares: one that declares none is as good.
 *
 * Thread: any; nothing is kept between calls.
 */
#ifndef NS_CONNECTORS_FRAME_H
#define NS_CONNECTORS_FRAME_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/error.h"

/* Whether the bytes begin as a frame does. No text does: one byte of its magic
 * number stands in no UTF-8. */
bool ns_frame_is(const void *bytes, size_t length);

/* Adds one frame with the size and a checksum. Failures stick to `out`. */
void ns_frame_pack(const void *bytes, size_t length, struct ns_buf *out);

/* Adds what the one frame holds. NS_REJECT: too_large (of `out`'s limit),
 * bad_lz4 (broken, cut off, or more behind it). */
enum ns_status ns_frame_unpack(const void *bytes, size_t length,
                               struct ns_buf *out, struct ns_error *err);

#endif
