#include <math.h>
#include <string.h>

#include "engine/decimal.h"
#include "engine/schema_private.h"

int
ns_json_compare(const json_t *a, const json_t *b)
{
    long double x, y;

    if (json_is_integer(a) && json_is_integer(b))
        return (json_integer_value(a) > json_integer_value(b)) -
               (json_integer_value(a) < json_integer_value(b));
    /* 64 bits of mantissa or more hold both kinds without loss. */
    x = json_is_integer(a) ? (long double)json_integer_value(a)
                           : (long double)json_real_value(a);
    y = json_is_integer(b) ? (long double)json_integer_value(b)
                           : (long double)json_real_value(b);
    return (x > y) - (x < y);
}

bool
ns_json_same(const json_t *a, const json_t *b)
{
    const char *name;
    const json_t *value;
    void *iter;

    if (json_is_number(a) && json_is_number(b))
        return ns_json_compare(a, b) == 0;
    if (json_typeof(a) != json_typeof(b))
        return false;
    if (json_is_array(a)) {
        if (json_array_size(a) != json_array_size(b))
            return false;
        for (size_t i = 0; i < json_array_size(a); i++)
            if (!ns_json_same(json_array_get(a, i), json_array_get(b, i)))
                return false;
        return true;
    }
    if (!json_is_object(a))
        return json_equal(a, b);
    if (json_object_size(a) != json_object_size(b))
        return false;
    /* jansson's iterators want it without const, and change nothing. */
    for (iter = json_object_iter((json_t *)a); iter;
         iter = json_object_iter_next((json_t *)a, iter)) {
        name = json_object_iter_key(iter);
        value = json_object_get(b, name);
        if (!value || !ns_json_same(json_object_iter_value(iter), value))
            return false;
    }
    return true;
}

bool
ns_json_count(const json_t *value, uint32_t *out)
{
    double real = json_number_value(value);

    if (!json_is_number(value) || real < 0 || real >= UINT32_MAX ||
        real != floor(real))
        return false;
    *out = (uint32_t)real;
    return true;
}

/* The digit of 10^-place, place counted from the first of the whole part. */
static unsigned
digit_at(const struct ns_decimal *number, unsigned place)
{
    if (place < number->n_int)
        return (unsigned)(number->whole[place] - '0');
    place -= number->n_int;
    return place < number->n_frac ? (unsigned)(number->frac[place] - '0') : 0;
}

bool
ns_json_multiple(const json_t *value, const json_t *of, bool *out)
{
    unsigned __int128 modulus = 0, rest = 0, most = (unsigned __int128)1 << 120;
    struct ns_decimal number, unit;
    unsigned shift;

    ns_decimal_of(value, &number);
    ns_decimal_of(of, &unit);
    shift = number.n_frac > unit.n_frac ? number.n_frac : unit.n_frac;
    for (unsigned i = 0; i < unit.n_int + shift; i++) {
        modulus = modulus * 10 + digit_at(&unit, i);
        if (modulus >= most)
            return false;
    }
    for (unsigned i = 0; i < number.n_int + shift; i++)
        rest = (rest * 10 + digit_at(&number, i)) % modulus;
    *out = rest == 0;
    return true;
}
