#include <stdlib.h>
#include <string.h>

#include "engine/grammar_json.h"
#include "engine/grow.h"

/* How the digits so far stand to those of a bound. */
enum order { EQUAL, BELOW, ABOVE };

/* The digits of a number without its sign, between two bounds that have none
 * either. What comes after some digits depends on a place alone, and places
 * never come back: each is written once, the later ones first. */
struct place {
    uint32_t remainder; /* of all digits so far, by the step */
    uint8_t n_int, n_frac;
    bool zero;  /* the whole part is 0: nothing may follow it but a point */
    bool point; /* behind the point */
    uint8_t low, high; /* enum order */
    uint8_t unused[2]; /* zero: the struct is hashed */
};

struct known {
    struct place place;
    uint32_t at;
};

struct digits {
    struct ns_program *p;
    const struct ns_decimal *low, *high; /* or NULL */
    bool low_open, high_open;
    uint32_t step, step_digits;
    unsigned most_int, most_frac, most; /* digits; in all */
    uint32_t next;
    struct known *known;
    uint32_t n_known, known_capacity;
    struct ns_table table; /* of known + 1 */
};

/* With one digit more. */
static enum order
compare_next(const struct ns_decimal *bound, enum order order,
             const struct place *place, char digit)
{
    char other = '0';

    if (!bound)
        return EQUAL;
    if (!place->point) {
        if (place->n_int >= bound->n_int)
            return ABOVE; /* longer, and no zero in front */
        other = bound->whole[place->n_int];
    } else if (place->n_frac < bound->n_frac) {
        other = bound->frac[place->n_frac];
    }
    if (order != EQUAL || digit == other)
        return order;
    return digit < other ? BELOW : ABOVE;
}

/* At the end of the whole part: a shorter one is smaller. */
static enum order
compare_whole(const struct ns_decimal *bound, enum order order,
              const struct place *place)
{
    return bound && place->n_int < bound->n_int ? BELOW : order;
}

static bool
is_within(const struct digits *d, const struct place *place)
{
    enum order low = place->low, high = place->high;
    uint64_t remainder = place->remainder;

    if (!place->point) {
        low = compare_whole(d->low, low, place);
        high = compare_whole(d->high, high, place);
    }
    if (d->low && low == EQUAL && place->n_frac < d->low->n_frac)
        low = BELOW;
    if (d->high && high == EQUAL && place->n_frac < d->high->n_frac)
        high = BELOW;
    if (d->low && (low == BELOW || (low == EQUAL && d->low_open)))
        return false;
    if (d->high && (high == ABOVE || (high == EQUAL && d->high_open)))
        return false;
    for (uint32_t i = place->n_frac; d->step && i < d->step_digits; i++)
        remainder = remainder * 10 % d->step;
    return d->step == 0 || remainder == 0;
}

static uint32_t write_place(struct digits *d, const struct place *place);

static uint32_t
write_digit(struct digits *d, const struct place *place, char digit)
{
    struct place then = *place;

    then.low = (uint8_t)compare_next(d->low, place->low, place, digit);
    then.high = (uint8_t)compare_next(d->high, place->high, place, digit);
    if (d->step)
        then.remainder =
            (place->remainder * 10 + (uint32_t)(digit - '0')) % d->step;
    if (place->point)
        then.n_frac++;
    else
        then.n_int++;
    then.zero = !place->point && place->n_int == 0 && digit == '0';
    return write_place(d, &then);
}

/* Digits that lead to the same place are one range. */
static uint32_t
write_digits(struct digits *d, const struct place *place)
{
    uint32_t at = NS_PROGRAM_FAIL, to[10];
    unsigned first = 0;

    for (unsigned i = 0; i < 10; i++)
        to[i] = write_digit(d, place, (char)('0' + i));
    for (unsigned i = 0; i < 10; i++)
        if (i == 9 || to[i + 1] != to[i]) {
            at = ns_program_split(
                d->p, at, ns_program_range(d->p, '0' + first, '0' + i, to[i]));
            first = i + 1;
        }
    return at;
}

static uint32_t
write_new(struct digits *d, const struct place *place)
{
    unsigned n = place->n_int + place->n_frac;
    uint32_t at = NS_PROGRAM_FAIL;
    struct place point = *place;

    if (place->point) {
        if (place->n_frac > 0 && is_within(d, place))
            at = d->next;
        if (place->n_frac < d->most_frac && n < d->most)
            at = ns_program_split(d->p, at, write_digits(d, place));
        return at;
    }
    if (place->n_int > 0 && is_within(d, place))
        at = d->next;
    if (!place->zero && place->n_int < d->most_int)
        at = ns_program_split(d->p, at, write_digits(d, place));
    if (place->n_int > 0 && d->most_frac > 0 && n < d->most) {
        point.point = true;
        point.zero = false;
        point.low = (uint8_t)compare_whole(d->low, place->low, place);
        point.high = (uint8_t)compare_whole(d->high, place->high, place);
        at = ns_program_split(
            d->p, at, ns_program_range(d->p, '.', '.', write_place(d, &point)));
    }
    return at;
}

/* Calls nest once a digit. */
static uint32_t
write_place(struct digits *d, const struct place *place)
{
    uint32_t hash = ns_table_hash(place, sizeof(*place)), number, at;
    struct known *moved;
    size_t i;

    for (i = ns_table_first(&d->table, hash);
         (number = ns_table_at(&d->table, &i, hash)) != 0;)
        if (memcmp(&d->known[number - 1].place, place, sizeof(*place)) == 0)
            return d->known[number - 1].at;
    if (!ns_program_step(d->p))
        return NS_PROGRAM_FAIL;
    at = write_new(d, place);
    moved =
        ns_grown(d->known, d->n_known + 1, &d->known_capacity, sizeof(*moved));
    if (moved)
        d->known = moved;
    if (!moved || !ns_table_reserve(&d->table)) {
        ns_program_no_memory(d->p);
        return NS_PROGRAM_FAIL;
    }
    d->known[d->n_known++] = (struct known){ *place, at };
    ns_table_put(&d->table, hash, d->n_known);
    return at;
}

/* All sizes from low to high; NULL is no bound. */
static uint32_t
write_sizes(struct digits *d, const struct ns_decimal *low, bool low_open,
            const struct ns_decimal *high, bool high_open)
{
    struct place start = { 0 };
    uint32_t at;

    d->low = low;
    d->high = high;
    d->low_open = low_open;
    d->high_open = high_open;
    at = write_place(d, &start);
    free(d->known);
    ns_table_fini(&d->table);
    d->known = NULL;
    d->n_known = d->known_capacity = 0;
    return at;
}

/* JSON's own grammar, with lengths that every reader takes. */
static uint32_t
write_any(struct ns_program *p, uint32_t next)
{
    uint32_t exponent, at, sign, point, leave;

    exponent = ns_program_range(
        p, '0', '9',
        ns_program_split(p, next, ns_program_range(p, '0', '9', next)));
    sign = ns_program_split(
        p, exponent,
        ns_program_split(p, ns_program_range(p, '+', '+', exponent),
                         ns_program_range(p, '-', '-', exponent)));
    leave = ns_program_split(
        p, next,
        ns_program_split(p, ns_program_range(p, 'e', 'e', sign),
                         ns_program_range(p, 'E', 'E', sign)));
    at = leave;
    for (int i = 1; i < NS_DECIMAL_DIGITS; i++)
        at = ns_program_split(p, leave, ns_program_range(p, '0', '9', at));
    point = ns_program_split(
        p, leave,
        ns_program_range(p, '.', '.', ns_program_range(p, '0', '9', at)));
    at = point;
    for (int i = 1; i < NS_DECIMAL_DIGITS; i++)
        at = ns_program_split(p, point, ns_program_range(p, '0', '9', at));
    at = ns_program_split(p, ns_program_range(p, '0', '0', point),
                          ns_program_range(p, '1', '9', at));
    return ns_program_split(p, at, ns_program_range(p, '-', '-', at));
}

/* The size of a bound without its sign; none, or one that no 64 bits hold, is
 * as far as whole numbers go. */
static const struct ns_decimal *
size_of(const struct ns_decimal *bound, bool whole, bool *open,
        struct ns_decimal *size)
{
    static const struct ns_decimal largest = { .n_int = 19,
                                               .whole = "9223372036854775807" };

    if (bound) {
        *size = *bound;
        size->negative = false;
    }
    if (whole && (!bound || ns_decimal_compare(size, &largest) > 0)) {
        *open = false;
        return &largest;
    }
    return bound ? size : NULL;
}

uint32_t
ns_json_number(struct ns_json_writer *w, const struct ns_number_limits *limits,
               uint32_t next)
{
    static const struct ns_decimal zero = { .n_int = 1, .whole = "0" };
    const struct ns_decimal *low = limits->low, *high = limits->high, *most;
    struct ns_decimal low_size, high_size;
    uint32_t at = NS_PROGRAM_FAIL;
    bool whole = limits->whole, open;
    struct digits d = {
        .p = w->p,
        .next = next,
        .step = limits->step,
        .step_digits = limits->step_digits,
        .most_int = whole ? 19 : NS_DECIMAL_DIGITS,
        .most = whole ? 19 : NS_DECIMAL_DIGITS,
        .most_frac = NS_DECIMAL_DIGITS,
    };

    if (!whole && !low && !high && !limits->step)
        return write_any(w->p, next);
    if (whole)
        d.most_frac = 0;
    else if (limits->step)
        d.most_frac = limits->step_digits;
    /* Zero and above: from low, or 0, up to high. */
    if (!high || !high->negative) {
        open = limits->high_open;
        most = size_of(high, whole, &open, &high_size);
        at = write_sizes(&d, low && !low->negative ? low : NULL,
                         limits->low_open, most, open);
    }
    /* Below zero: the sizes from that of high, or 0, up to that of low. */
    if (!low || low->negative) {
        bool least_open = true;
        const struct ns_decimal *least = &zero;

        if (high && high->negative) {
            high_size = *high;
            high_size.negative = false;
            least = &high_size;
            least_open = limits->high_open;
        }
        open = limits->low_open;
        most = size_of(low, whole, &open, &low_size);
        at = ns_program_split(
            w->p, at,
            ns_program_range(w->p, '-', '-',
                             write_sizes(&d, least, least_open, most, open)));
    }
    return at;
}
