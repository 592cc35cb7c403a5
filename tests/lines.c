#include "tests/lines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *
lines_file(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long size;

    if (!file || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0) {
        perror(path);
        exit(1);
    }
    rewind(file);
    text = malloc((size_t)size + 1);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(file);
    text[size] = '\0';
    *length = (size_t)size;
    return text;
}

const char *
lines_real_tokenizer(void)
{
    static char path[4096];
    const char *program = program_invocation_name;
    const char *below = strstr(program, "/tests/");

    snprintf(path, sizeof(path), "%.*s/tokenizer/tokenizer.json",
             below ? (int)(below - program) : 5, below ? program : "build");
    return path;
}

size_t
lines_each(const char *path,
           void (*visit)(size_t line, const json_t *value, void *data),
           void *data)
{
    size_t length, n = 0;
    char *text = lines_file(path, &length);

    for (char *at = text; at < text + length;) {
        char *end = strchr(at, '\n');
        size_t n_line = end ? (size_t)(end - at) : strlen(at);
        json_error_t why;
        json_t *value = json_loadb(at, n_line, JSON_ALLOW_NUL, &why);

        n++;
        if (!value) {
            fprintf(stderr, "%s: line %zu: %s\n", path, n, why.text);
            exit(1);
        }
        visit(n, value, data);
        json_decref(value);
        at += n_line + 1;
    }
    free(text);
    return n;
}
