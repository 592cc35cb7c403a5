#include "engine/decimal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* d.ddde+xx to digits before and behind the point. */
static void
place_point(const char *text, struct ns_decimal *out)
{
    const char *e = strchr(text, 'e');
    char digit[24] = "0";
    long exponent = strtol(e + 1, NULL, 10);
    int n = 0;

    for (const char *at = text; at < e; at++)
        if (*at >= '0' && *at <= '9')
            digit[n++] = *at;
    while (n > 1 && digit[n - 1] == '0')
        n--;
    out->n_int = out->n_frac = 0;
    for (long i = 0; i <= exponent; i++)
        out->whole[out->n_int++] = i < n ? digit[i] : '0';
    for (long i = exponent + 1; i < n; i++)
        out->frac[out->n_frac++] = i >= 0 ? digit[i] : '0';
    if (out->n_int == 0)
        out->whole[out->n_int++] = '0';
    if (n == 1 && digit[0] == '0') /* not 0.0 */
        out->n_frac = 0;
}

void
ns_decimal_of(const json_t *number, struct ns_decimal *out)
{
    char text[40];
    double value;

    if (json_is_integer(number)) {
        json_int_t whole = json_integer_value(number);
        uint64_t size = whole < 0 ? 0 - (uint64_t)whole : (uint64_t)whole;

        out->negative = whole < 0;
        out->n_frac = 0;
        out->n_int = (uint16_t)snprintf(text, sizeof(text), "%llu",
                                        (unsigned long long)size);
        memcpy(out->whole, text, out->n_int);
        return;
    }
    value = fabs(json_real_value(number));
    out->negative = json_real_value(number) < 0;
    for (int precision = 0; precision <= 17; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision, value);
        if (strtod(text, NULL) == value)
            break;
    }
    place_point(text, out);
}

static int
compare_size(const struct ns_decimal *a, const struct ns_decimal *b)
{
    int order;

    if (a->n_int != b->n_int)
        return a->n_int < b->n_int ? -1 : 1;
    order = memcmp(a->whole, b->whole, a->n_int);
    if (order == 0)
        order = memcmp(a->frac, b->frac,
                       a->n_frac < b->n_frac ? a->n_frac : b->n_frac);
    if (order == 0)
        order = (a->n_frac > b->n_frac) - (a->n_frac < b->n_frac);
    return (order > 0) - (order < 0);
}

int
ns_decimal_compare(const struct ns_decimal *a, const struct ns_decimal *b)
{
    if (a->negative != b->negative)
        return a->negative ? -1 : 1;
    return a->negative ? compare_size(b, a) : compare_size(a, b);
}

const char *
ns_number_text(const json_t *number, char out[NS_NUMBER_TEXT])
{
    double value = json_number_value(number);

    if (json_is_integer(number)) {
        snprintf(out, NS_NUMBER_TEXT, "%" JSON_INTEGER_FORMAT,
                 json_integer_value(number));
        return out;
    }
    if (fabs(value) < 1e15 && value == floor(value)) {
        snprintf(out, NS_NUMBER_TEXT, "%.0f", value == 0.0 ? 0.0 : value);
        return out;
    }
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(out, NS_NUMBER_TEXT, "%.*g", precision, value);
        if (strtod(out, NULL) == value)
            break;
    }
    return out;
}
