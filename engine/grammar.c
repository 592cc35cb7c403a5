#include "engine/grammar.h"

#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/program.h"
#include "engine/regex.h"

void
ns_grammar_destroy(struct ns_grammar *grammar)
{
    free(grammar);
}

void
ns_grammar_hash(const struct ns_grammar *grammar, unsigned char out[16])
{
    memcpy(out, grammar->hash, sizeof(grammar->hash));
}

static enum ns_status
check_choices(const char *const *choice, size_t n, struct ns_error *err)
{
    size_t bytes = 0;

    if (n == 0)
        return ns_refuse(err, "bad_param", NULL, "there is no choice");
    for (size_t i = 0; i < n; i++) {
        size_t length = strlen(choice[i]);

        if (length == 0)
            return ns_refuse(err, "bad_param", NULL, "choice %zu is empty", i);
        if (ns_utf8_span(choice[i], length) != length)
            return ns_refuse(err, "bad_param", NULL, "choice %zu is not UTF-8",
                             i);
        if (length > NS_CHOICE_BYTES - bytes)
            return ns_refuse(err, "grammar_limit", NULL,
                             "the choices have more than %d bytes",
                             NS_CHOICE_BYTES);
        bytes += length;
    }
    return NS_OK;
}

enum ns_status
ns_grammar_choice(const char *const *choice, size_t n, struct ns_grammar **out,
                  struct ns_error *err)
{
    struct ns_program *p;
    enum ns_status status = check_choices(choice, n, err);

    if (status != NS_OK)
        return status;
    p = ns_program_create();
    if (!p)
        return ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
    status = ns_program_link(
        p, ns_program_choice(p, choice, n, ns_program_end(p, NS_OP_MATCH)), out,
        err);
    ns_program_destroy(p);
    return status;
}

enum ns_status
ns_grammar_regex(const char *pattern, size_t length, struct ns_grammar **out,
                 struct ns_error *err)
{
    struct ns_program *p = NULL;
    struct ns_regex *regex;
    enum ns_status status = ns_regex_parse(pattern, length, &regex, err);
    uint32_t first = NS_PROGRAM_FAIL;

    if (status != NS_OK)
        return status;
    p = ns_program_create();
    if (!p) {
        status = ns_fail(err, NS_FATAL, "out of memory compiling a grammar");
        goto out;
    }
    status =
        ns_regex_bytes(regex, p, ns_program_end(p, NS_OP_MATCH), &first, err);
    if (status == NS_OK)
        status = ns_program_link(p, first, out, err);
out:
    ns_program_destroy(p);
    ns_regex_destroy(regex);
    return status;
}
