#include "connectors/sha256.h"

#include <openssl/evp.h>

enum ns_status
ns_sha256(const void *bytes, size_t length,
          unsigned char out[NS_SHA256_BYTES], struct ns_error *err)
{
    if (EVP_Digest(bytes, length, out, NULL, EVP_sha256(), NULL) != 1)
        return ns_fail(err, NS_FATAL, "hash %zu bytes", length);
    return NS_OK;
}

void
ns_hex(const unsigned char *bytes, size_t length, char *out)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < length; i++) {
        *out++ = digits[bytes[i] >> 4];
        *out++ = digits[bytes[i] & 15];
    }
    *out = '\0';
}

bool
ns_sha256_from(const char *text, unsigned char out[NS_SHA256_BYTES])
{
    for (int i = 0; i < 2 * NS_SHA256_BYTES; i++) {
        char c = text[i];
        int value = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;

        if (value < 0)
            return false;
        out[i / 2] = (unsigned char)(i % 2 ? out[i / 2] | value : value << 4);
    }
    return text[2 * NS_SHA256_BYTES] == '\0';
}
