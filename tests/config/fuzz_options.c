/* The configuration parser over arbitrary bytes: a refusal names the file, what
 * is accepted can be printed. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char *
print(const struct ns_options *options, size_t *length)
{
    char *text = NULL;
    FILE *file = open_memstream(&text, length);

    if (!file)
        abort();
    ns_options_print(options, file);
    fclose(file);
    return text;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_options *options;
    struct ns_error err;
    size_t length;
    char *text;

    if (ns_options_parse((const char *)data, size, "fuzz", &options, &err) !=
        NS_OK) {
        if (strncmp(err.text, "fuzz", 4) != 0)
            abort();
        return 0;
    }
    text = print(options, &length);
    free(text);
    ns_options_destroy(options);
    return 0;
}
