#include "engine/ranges.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>

#include "engine/grow.h"

void
ns_ranges_fini(struct ns_ranges *r)
{
    free(r->at);
    memset(r, 0, sizeof(*r));
}

void
ns_ranges_add(struct ns_ranges *r, uint32_t first, uint32_t last)
{
    struct ns_range *moved = NULL;

    if (!r->failed)
        moved = ns_grown(r->at, r->n + 1, &r->capacity, sizeof(*moved));
    r->failed |= !moved;
    if (r->failed)
        return;
    r->at = moved;
    r->at[r->n++] = (struct ns_range){ first, last };
}

static int
by_first(const void *a, const void *b)
{
    const struct ns_range *x = a, *y = b;

    return (x->first > y->first) - (x->first < y->first);
}

void
ns_ranges_join(struct ns_ranges *r, uint32_t from)
{
    struct ns_range *range = r->at + from;
    uint32_t n = r->n - from, kept = 0;

    if (n == 0)
        return;
    qsort(range, n, sizeof(*range), by_first);
    for (uint32_t i = 1; i < n; i++)
        if (range[i].first > range[kept].last + 1)
            range[++kept] = range[i];
        else if (range[i].last > range[kept].last)
            range[kept].last = range[i].last;
    r->n = from + kept + 1;
}

void
ns_ranges_complement(struct ns_ranges *r, uint32_t from)
{
    uint32_t n, begin = 0;

    ns_ranges_join(r, from);
    n = r->n;
    for (uint32_t i = from; i < n && !r->failed; i++) {
        struct ns_range range = r->at[i];

        if (range.first > begin)
            ns_ranges_add(r, begin, range.first - 1);
        begin = range.last + 1;
    }
    if (begin <= NS_LAST_CODE)
        ns_ranges_add(r, begin, NS_LAST_CODE);
    if (r->failed)
        return;
    memmove(r->at + from, r->at + n, (r->n - n) * sizeof(*r->at));
    r->n -= n - from;
}

bool
ns_ranges_shorthand(struct ns_ranges *r, char letter)
{
    static const struct ns_range space[] = {
        { 0x09, 0x0d },     { 0x20, 0x20 },     { 0xa0, 0xa0 },
        { 0x1680, 0x1680 }, { 0x2000, 0x200a }, { 0x2028, 0x2029 },
        { 0x202f, 0x202f }, { 0x205f, 0x205f }, { 0x3000, 0x3000 },
        { 0xfeff, 0xfeff },
    };
    uint32_t from = r->n;

    switch (letter | 0x20) {
    case 'd':
        ns_ranges_add(r, '0', '9');
        break;
    case 'w':
        ns_ranges_add(r, '0', '9');
        ns_ranges_add(r, 'A', 'Z');
        ns_ranges_add(r, '_', '_');
        ns_ranges_add(r, 'a', 'z');
        break;
    case 's':
        for (size_t i = 0; i < sizeof(space) / sizeof(*space); i++)
            ns_ranges_add(r, space[i].first, space[i].last);
        break;
    default:
        return false;
    }
    if (!(letter & 0x20))
        ns_ranges_complement(r, from);
    return true;
}

bool
ns_ranges_property(struct ns_ranges *r, const char *name, size_t length)
{
    char text[64];
    const char *value;
    uc_general_category_t category = { 0 };
    const uc_script_t *script = NULL;
    uint32_t first = UINT32_MAX;

    snprintf(text, sizeof(text), "%.*s", (int)length, name);
    value = strchr(text, '=');
    value = value ? value + 1 : text;
    if (strncmp(text, "Script=", 7) == 0 || strncmp(text, "sc=", 3) == 0)
        script = uc_script_byname(value);
    else if (value == text || strncmp(text, "gc=", 3) == 0 ||
             strncmp(text, "General_Category=", 17) == 0)
        category = uc_general_category_byname(value);
    if (!script && !category.bitmask)
        return false;
    for (uint32_t code = 0; code <= NS_LAST_CODE + 1; code++) {
        bool has = code <= NS_LAST_CODE &&
                   (script ? uc_is_script(code, script)
                           : uc_is_general_category(code, category));

        if (has && first == UINT32_MAX)
            first = code;
        if (!has && first != UINT32_MAX) {
            ns_ranges_add(r, first, code - 1);
            first = UINT32_MAX;
        }
    }
    return true;
}
