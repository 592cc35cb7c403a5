#include "connectors/frame.h"

#include <lz4frame.h>
#include <string.h>

enum { CHUNK_BYTES = 64 << 10 };

bool
ns_frame_is(const void *bytes, size_t length)
{
    static const unsigned char magic[] = { 0x04, 0x22, 0x4d, 0x18 };

    return length >= sizeof(magic) && memcmp(bytes, magic, sizeof(magic)) == 0;
}

void
ns_frame_pack(const void *bytes, size_t length, struct ns_buf *out)
{
    LZ4F_preferences_t preferences = {
        .frameInfo = { .contentChecksumFlag = LZ4F_contentChecksumEnabled,
                       .contentSize = length },
    };
    size_t bound = LZ4F_compressFrameBound(length, &preferences), n;
    char *room = ns_buf_room(out, bound);

    if (!room)
        return;
    n = LZ4F_compressFrame(room, bound, bytes, length, &preferences);
    if (LZ4F_isError(n))
        out->failed = true;
    else
        out->length += n;
}

static enum ns_status
unpack(LZ4F_dctx *context, const char *bytes, size_t length,
       struct ns_buf *out, struct ns_error *err)
{
    size_t at = 0, hint = 1, start = out->length;
    char spill = 0; /* at the limit: whether there is one byte more */

    while (hint != 0) {
        size_t left = out->limit - out->length, taken = length - at;
        size_t made = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        char *room = made ? ns_buf_room(out, made) : &spill;

        if (!room)
            return ns_buf_check(out, "an LZ4 frame", err);
        made += made == 0;
        hint = LZ4F_decompress(context, room, &made, bytes + at, &taken, NULL);
        if (LZ4F_isError(hint))
            return ns_refuse(err, "bad_lz4", NULL, "lz4, at byte %zu: %s", at,
                             LZ4F_getErrorName(hint));
        if (room == &spill && made > 0)
            return ns_refuse(err, "too_large", NULL, "over %zu bytes when "
                             "unpacked", out->limit - start);
        at += taken;
        out->length += made;
        if (hint != 0 && taken == 0 && made == 0)
            return ns_refuse(err, "bad_lz4", NULL, "lz4: the frame is cut off "
                             "after %zu bytes", length);
    }
    if (out->data)
        out->data[out->length] = '\0';
    if (at != length)
        return ns_refuse(err, "bad_lz4", NULL, "lz4: %zu bytes behind the "
                         "frame", length - at);
    return NS_OK;
}

enum ns_status
ns_frame_unpack(const void *bytes, size_t length, struct ns_buf *out,
                struct ns_error *err)
{
    LZ4F_dctx *context;
    enum ns_status status;

    if (LZ4F_isError(LZ4F_createDecompressionContext(&context, LZ4F_VERSION)))
        return ns_fail(err, NS_FATAL, "out of memory for an LZ4 frame");
    status = unpack(context, bytes, length, out, err);
    LZ4F_freeDecompressionContext(context);
    return status;
}
