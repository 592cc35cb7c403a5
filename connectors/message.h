/* message.h - what a source hands up: bytes, and the place they came from.
 *
 * A position names one message for as long as anyone may ask for it: of Kafka
 * the partition and the offset, of a file the file's slot and the line, counted
 * from 1. The epoch is raised whenever a partition is taken or given up, so an
 * acknowledgement that arrives after a rebalance is told from a fresh one.
 */
#ifndef NS_CONNECTORS_MESSAGE_H
#define NS_CONNECTORS_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NS_SHA256_BYTES = 32 };

struct ns_position {
    uint32_t partition; /* the source's own number; a file has one too */
    uint32_t epoch;
    uint64_t offset; /* of a message; of a file: the line, from 1 */
};

enum ns_message_kind {
    NS_MESSAGE_NONE,    /* nothing now: poll again later */
    NS_MESSAGE_SKIPPED, /* nothing yet, what was looked at is done: poll again
                         * at once, behind whatever else is to be done */
    NS_MESSAGE_JOB,
    NS_MESSAGE_END, /* nothing will ever come again (a file at its end) */
};

struct ns_message {
    enum ns_message_kind kind;
    struct ns_position position;
    const char *origin; /* "jobs.jsonl", "topic/3": for people, dead letters */
    const char *bytes;  /* NULL: too long to be kept, or a tombstone */
    uint64_t length;    /* true length, also when the bytes were not kept */
    unsigned char sha256[NS_SHA256_BYTES]; /* of all bytes, end of line out */

    /* What Kafka carries beside the bytes; NULL everywhere else. Texts. */
    const char *id;      /* custom_id for a body without one: from the key or a
                          * header, where that is configured */
    const char *batch;   /* likewise nightshift.batch: header nightshift-batch,
                          * which `nightshift submit` sets */
    const char *trace_parent, *trace_state; /* W3C trace context */
    const char *headers; /* all of them, as a JSON object: for dead letters */
    bool bad_frame;      /* the bytes are a broken LZ4 frame, as they came */
    bool cancels;        /* a tombstone that cancels the job of its id */
};

#endif
