/* kafka_private.h - what source and producer share of librdkafka. */
#ifndef NS_CONNECTORS_KAFKA_PRIVATE_H
#define NS_CONNECTORS_KAFKA_PRIVATE_H

#include <librdkafka/rdkafka.h>
#include <openssl/evp.h>

#include "base/buf.h"
#include "connectors/kafka.h"

/* kafka_conf.c: our defaults, then the settings, then what must hold. The
 * caller hangs its callbacks on it; rd_kafka_new takes it over. */
enum ns_status ns_kafka_conf(const struct ns_kafka_options *options,
                             rd_kafka_type_t type, rd_kafka_conf_t **out,
                             struct ns_error *err);

/* Whether the error says that no retry helps: who we are, what we may do. */
bool ns_kafka_is_refusal(rd_kafka_resp_err_t code);

/* Ends the client in at most `wait_ms`: what then still runs is left to the
 * end of the process (a look-up of a name can take as long as it likes). */
void ns_kafka_end(rd_kafka_t *client, int wait_ms);

int64_t ns_kafka_now_ms(void); /* monotonic */

/* kafka_message.c: one message of a topic as ours. */
struct ns_kafka_reader {
    EVP_MD *sha256;
    EVP_MD_CTX *hash;
    struct ns_buf id, batch, trace_parent, trace_state, headers;
    struct ns_buf unpacked; /* of a value that is an LZ4 frame */
};
enum ns_status ns_kafka_reader_init(struct ns_kafka_reader *reader,
                                    struct ns_error *err);
void ns_kafka_reader_fini(struct ns_kafka_reader *reader);
/* Fills all of `out` but position and origin. It borrows from both. */
enum ns_status ns_kafka_read(struct ns_kafka_reader *reader,
                             const struct ns_kafka_options *options,
                             const rd_kafka_message_t *message,
                             struct ns_message *out, struct ns_error *err);

#endif
