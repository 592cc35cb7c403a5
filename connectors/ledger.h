/* ledger.h - positions in flight of one partition, and the lowest of them.
 *
 * Offsets are received in rising order, with gaps (compaction, transaction
 * markers, lines done before), and finish in any order. What may be forgotten
 * is everything below the lowest unfinished one: that is the watermark. A ring
 * of {offset, done} in the order received; finished entries leave at its head.
 *
 *     receive 5 6 9    done 6    watermark 5    done 5    watermark 9
 *
 * The span (entries between head and newest, done ones in between counted) is
 * bounded: one long job at the head must not let the ring grow for ever, nor
 * make a restart replay a million messages.
 *
 * Owns:   its ring, allocated once.
 * Thread: one at a time; the source that it belongs to.
 */
#ifndef NS_CONNECTORS_LEDGER_H
#define NS_CONNECTORS_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct ns_ledger;

/* `span` entries at most, above 0. `next` is the offset expected first: the
 * watermark of an empty ledger. */
enum ns_status ns_ledger_create(uint32_t span, uint64_t next,
                                struct ns_ledger **out, struct ns_error *err);
void ns_ledger_destroy(struct ns_ledger *ledger); /* takes NULL */

/* Whether another one may be received. */
bool ns_ledger_has_room(const struct ns_ledger *ledger);

/* The offset is in flight. False, and nothing changes, when there is no room
 * or when the offset is not above all received before. */
bool ns_ledger_receive(struct ns_ledger *ledger, uint64_t offset);

/* The offset is done. False when it is not in flight (unknown, or done
 * before): a second acknowledgement moves nothing. */
bool ns_ledger_done(struct ns_ledger *ledger, uint64_t offset);

/* Everything below is finished: the lowest offset in flight, or one past the
 * newest received. */
uint64_t ns_ledger_watermark(const struct ns_ledger *ledger);

uint32_t ns_ledger_in_flight(const struct ns_ledger *ledger); /* not done */

#endif
