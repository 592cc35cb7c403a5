/* A message of a topic as ours: its hash, its id, its trace context. */
#include <ctype.h>
#include <string.h>

#include "base/reader.h"
#include "connectors/frame.h"
#include "connectors/kafka_private.h"
#include "connectors/result.h"

enum {
    HEADERS_BYTES = 65536, /* of all headers as JSON; longer ones are dropped */
    STATE_BYTES = 512,     /* of tracestate */
    NAME_BYTES = 400,      /* of an id or a batch: more than may be accepted */
    DEFAULT_MESSAGE = 16 << 20,
};

enum ns_status
ns_kafka_reader_init(struct ns_kafka_reader *reader, struct ns_error *err)
{
    *reader = (struct ns_kafka_reader){ 0 };
    ns_buf_init(&reader->id, NAME_BYTES);
    ns_buf_init(&reader->batch, NAME_BYTES);
    ns_buf_init(&reader->trace_parent, STATE_BYTES);
    ns_buf_init(&reader->trace_state, STATE_BYTES);
    ns_buf_init(&reader->headers, HEADERS_BYTES);
    reader->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    reader->hash = EVP_MD_CTX_new();
    if (!reader->sha256 || !reader->hash) {
        ns_kafka_reader_fini(reader);
        return ns_fail(err, NS_FATAL, "out of memory for a hash");
    }
    return NS_OK;
}

void
ns_kafka_reader_fini(struct ns_kafka_reader *reader)
{
    EVP_MD_CTX_free(reader->hash);
    EVP_MD_free(reader->sha256);
    ns_buf_fini(&reader->id);
    ns_buf_fini(&reader->batch);
    ns_buf_fini(&reader->trace_parent);
    ns_buf_fini(&reader->trace_state);
    ns_buf_fini(&reader->headers);
    ns_buf_fini(&reader->unpacked);
    reader->hash = NULL;
    reader->sha256 = NULL;
}

/* The bytes as a text in `buf`; NULL when they are none: NUL, not UTF-8, too
 * long, or memory ran out, which the allocation behind the message will say. */
static const char *
text_of(struct ns_buf *buf, const void *bytes, size_t length)
{
    ns_buf_reset(buf);
    if (!bytes || length == 0 || memchr(bytes, '\0', length) ||
        ns_utf8_span(bytes, length) != length)
        return NULL;
    ns_buf_add(buf, bytes, length);
    return buf->over || buf->failed ? NULL : buf->data;
}

/* "00-<32 hex>-<16 hex>-<2 hex>"; later versions may say more behind that. */
static bool
is_trace_parent(const char *text)
{
    static const int dashes[] = { 2, 35, 52 };
    size_t length = strlen(text);

    if (length < 55 || length > 256 || (length > 55 && text[55] != '-'))
        return false;
    for (int i = 0, dash = 0; i < 55; i++) {
        if (dash < 3 && i == dashes[dash]) {
            dash++;
            if (text[i] != '-')
                return false;
        } else if (!isxdigit((unsigned char)text[i])) {
            return false;
        }
    }
    return true;
}

static void
add_header(struct ns_buf *json, const char *name, const void *value,
           size_t length)
{
    ns_buf_byte(json, json->length ? ',' : '{');
    ns_buf_byte(json, '"');
    ns_result_text(json, name, strlen(name));
    ns_buf_text(json, "\":");
    if (!value) {
        ns_buf_text(json, "null");
        return;
    }
    ns_buf_byte(json, '"');
    ns_result_text(json, value, length);
    ns_buf_byte(json, '"');
}

static void
read_headers(struct ns_kafka_reader *reader,
             const struct ns_kafka_options *options, rd_kafka_headers_t *list,
             struct ns_message *out)
{
    const char *name, *text;
    const void *value;
    size_t length;

    for (size_t i = 0; rd_kafka_header_get_all(list, i, &name, &value,
                                               &length) ==
                       RD_KAFKA_RESP_ERR_NO_ERROR; i++) {
        add_header(&reader->headers, name, value, length);
        if (strcmp(name, "traceparent") == 0) {
            text = text_of(&reader->trace_parent, value, length);
            out->trace_parent = text && is_trace_parent(text) ? text : NULL;
        } else if (strcmp(name, "tracestate") == 0) {
            out->trace_state = text_of(&reader->trace_state, value, length);
        } else if (strcmp(name, "nightshift-batch") == 0) {
            out->batch = text_of(&reader->batch, value, length);
        }
        if (options->id_from && strcmp(options->id_from, name) == 0)
            out->id = text_of(&reader->id, value, length);
    }
    if (reader->headers.length == 0)
        return;
    ns_buf_byte(&reader->headers, '}');
    if (!reader->headers.over && !reader->headers.failed)
        out->headers = reader->headers.data;
}

/* A value that is an LZ4 frame is the message that it holds, hash and all, as a
 * line of a compressed file is. What a frame's name promises and does not hold
 * is kept as it came. */
static enum ns_status
unpack(struct ns_kafka_reader *reader, size_t most, struct ns_message *out,
       struct ns_error *err)
{
    enum ns_status status;

    ns_buf_fini(&reader->unpacked); /* the last one may have been large */
    ns_buf_init(&reader->unpacked, most);
    status = ns_frame_unpack(out->bytes, (size_t)out->length,
                             &reader->unpacked, err);
    if (status == NS_OK) {
        out->bytes = reader->unpacked.data ? reader->unpacked.data : "";
        out->length = reader->unpacked.length;
    } else if (status == NS_REJECT && strcmp(err->code, "too_large") == 0) {
        out->bytes = NULL; /* as one that came so */
        out->length = most + 1;
    } else if (status == NS_REJECT) {
        out->bad_frame = true;
    } else {
        return status;
    }
    return NS_OK;
}

enum ns_status
ns_kafka_read(struct ns_kafka_reader *reader,
              const struct ns_kafka_options *options,
              const rd_kafka_message_t *message, struct ns_message *out,
              struct ns_error *err)
{
    size_t most = options->max_message ? options->max_message
                                       : DEFAULT_MESSAGE;
    rd_kafka_headers_t *headers = NULL;
    size_t length = message->payload ? message->len : 0;
    enum ns_status status;
    bool unpacked, is_key = options->id_from && strcmp(options->id_from, "key") == 0;

    *out = (struct ns_message){ .kind = NS_MESSAGE_JOB, .length = length };
    if (length > 0 && length <= most)
        out->bytes = message->payload;
    if (out->bytes && ns_frame_is(out->bytes, length)) {
        status = unpack(reader, most, out, err);
        if (status != NS_OK)
            return status;
    }
    unpacked = out->bytes && out->bytes != message->payload;
    if (EVP_DigestInit_ex2(reader->hash, reader->sha256, NULL) != 1 ||
        EVP_DigestUpdate(reader->hash, unpacked ? out->bytes
                                       : message->payload ? message->payload
                                                          : "",
                         unpacked ? out->length : length) != 1 ||
        EVP_DigestFinal_ex(reader->hash, out->sha256, NULL) != 1)
        return ns_fail(err, NS_FATAL, "hash a message of %zu bytes", length);

    ns_buf_reset(&reader->headers);
    if (rd_kafka_message_headers(message, &headers) ==
        RD_KAFKA_RESP_ERR_NO_ERROR)
        read_headers(reader, options, headers, out);
    out->cancels = !message->payload && options->tombstone_cancels;
    /* A tombstone says nothing but its key, so the key is the id. */
    if (is_key || out->cancels)
        out->id = text_of(&reader->id, message->key, message->key_len);
    if (out->cancels && !out->id)
        out->cancels = false;
    if (out->cancels) /* meets a body of any hash */
        memset(out->sha256, 0, sizeof(out->sha256));
    return NS_OK;
}
