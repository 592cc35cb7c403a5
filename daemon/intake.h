/* intake.h - the event loop's stage: poll, park, acknowledge.
 *
 * The only stage that touches the source. It takes messages in while the
 * window has room, keeps parked works until they are due, and tells the source
 * what is durable. Thread: the event loop.
 */
#ifndef NS_DAEMON_INTAKE_H
#define NS_DAEMON_INTAKE_H

#include "daemon/work.h"

/* Takes from the queue what came back, then parks, then the source. */
void ns_intake_turn(struct ns_pipeline *pipeline);

/* How long until a parked work is due or the source is to be asked again. */
int64_t ns_intake_wait_ms(struct ns_pipeline *pipeline);

#endif
