/* decoder.h - pictures are decoded by helper processes.
 *
 * A picture file is the least trusted input there is, and its libraries are
 * the ones with the history. So the bytes go to a helper, which can compute and
 * answer and nothing else (no files, no network, bounded memory and time), and
 * pixels come back. A helper that dies is started again; the picture that it
 * had is tried once more, since the helper may have died of something else
 * (the machine's memory ran out), and then given up.
 *
 *     caller --bytes--> helper: picture.h --pixels or refusal--> caller
 *
 * The helper is this program itself, started anew with NS_DECODER_ARGUMENT:
 * main() hands over to ns_decoder_main before it does anything else. Started
 * anew and not forked: nothing of ours, and no device, is mapped in it.
 *
 * Owns:   the helpers. Thread: any; a caller waits for a helper that is free.
 */
#ifndef NS_DAEMON_DECODER_H
#define NS_DAEMON_DECODER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "daemon/picture.h"

#define NS_DECODER_ARGUMENT "--nightshift-image"

struct ns_decoder;

/* Starts `n_helpers`. */
enum ns_status ns_decoder_create(uint32_t n_helpers, struct ns_decoder **out,
                                 struct ns_error *err);
void ns_decoder_destroy(struct ns_decoder *decoder); /* takes NULL */

/* Codes of NS_REJECT: image_limit, image_type, bad_image. NS_RETRY when no
 * helper can be started. */
enum ns_status ns_decoder_decode(struct ns_decoder *decoder, const void *bytes,
                                 size_t length, struct ns_picture *out,
                                 struct ns_error *err);

/* Helpers that died over a picture, since create. */
uint64_t ns_decoder_deaths(struct ns_decoder *decoder);

/* The helper: whether the program was started as one, and its life, over
 * ns_picture_decode. It may use so much of a processor in all; at half of that
 * it ends by itself, between two pictures. */
enum { NS_DECODER_CPU_SECONDS = 40 };
typedef enum ns_status ns_decode_function(const void *bytes, size_t length,
                                          struct ns_picture *out,
                                          struct ns_error *err);
bool ns_decoder_is_helper(int argc, char **argv);
int ns_decoder_main(ns_decode_function *decode, uint32_t cpu_seconds);

#endif
