/* A safetensors file of arbitrary bytes: a refusal names the file. The reader
 * is given exactly the bytes, so that a read behind them is seen. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_error err;
    enum ns_status status = ns_safetensors_check(data, size, "fuzz", &err);

    if (status != NS_OK && !strstr(err.text, "fuzz"))
        abort();
    if (status != NS_OK && status != NS_REJECT && status != NS_FATAL)
        abort();
    return 0;
}
