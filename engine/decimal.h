/* decimal.h - numbers of a schema by their digits.
 *
 * A JSON real is read as the shortest decimal that is the same double.
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_ENGINE_DECIMAL_H
#define NS_ENGINE_DECIMAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NS_DECIMAL_DIGITS = 15, /* that a double keeps apart, whatever they are */
    NS_DECIMAL_INT = 310,   /* the longest whole part, and fraction */
    NS_DECIMAL_FRAC = 342,
    NS_NUMBER_TEXT = 32,
};

/* No zero in front but of 0 itself, and none behind the fraction. */
struct ns_decimal {
    bool negative;
    uint16_t n_int, n_frac;
    char whole[NS_DECIMAL_INT], frac[NS_DECIMAL_FRAC]; /* digits; no NUL */
};

/* `number` is an integer or a real. */
void ns_decimal_of(const json_t *number, struct ns_decimal *out);

/* Below, above, or 0 for equal. */
int ns_decimal_compare(const struct ns_decimal *a, const struct ns_decimal *b);

/* The shortest JSON text of a number, without a point where it is whole.
 * Returns `out`. */
const char *ns_number_text(const json_t *number, char out[NS_NUMBER_TEXT]);

#endif
