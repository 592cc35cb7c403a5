/* E4M3 by its definition: every code, every midpoint, and rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "kernels/float8.h"

/* The definition, in doubles. */
static double
defined(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double size = exponent == 0 ? ldexp(mantissa / 8.0, -6)
                                : ldexp(1 + mantissa / 8.0, exponent - 7);

    return code & 0x80 ? -size : size;
}

static void
every_code_has_the_value_of_its_definition_and_comes_back(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        float value = ns_e4m3_value((uint8_t)code);

        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(value));
            assert_int_equal(ns_e4m3_code(value) & 0x7f, 0x7f);
            continue;
        }
        assert_true((double)value == defined((uint8_t)code));
        assert_int_equal(signbit(value) != 0, code >> 7);
        assert_int_equal(ns_e4m3_code(value), code);
    }
    assert_true(ns_e4m3_value(0x7e) == NS_E4M3_MAX);
}

static void
between_two_codes_the_nearest_is_taken_and_the_even_one_at_the_middle(
    void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++) {
        float below = ns_e4m3_value((uint8_t)code);
        float above = ns_e4m3_value((uint8_t)(code + 1));
        float middle = below + (above - below) / 2; /* exact */

        for (int sign = 0; sign < 256; sign += 128) {
            float s = sign ? -1.0f : 1.0f;

            assert_int_equal(ns_e4m3_code(s * middle),
                             sign | (code % 2 == 0 ? code : code + 1));
            assert_int_equal(ns_e4m3_code(s * nextafterf(middle, 0)),
                             sign | code);
            assert_int_equal(ns_e4m3_code(s * nextafterf(middle, above)),
                             sign | (code + 1));
        }
    }
}

static void
what_is_too_large_becomes_the_largest_and_what_is_too_small_zero(void **state)
{
    static const float large[] = { 448, 448.0001f, 464, 465, 480, 1e30f,
                                   INFINITY };

    (void)state;
    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        assert_int_equal(ns_e4m3_code(large[i]), 0x7e);
        assert_int_equal(ns_e4m3_code(-large[i]), 0xfe);
    }
    assert_int_equal(ns_e4m3_code(0x1p-10f), 0); /* halfway: to even */
    assert_int_equal(ns_e4m3_code(nextafterf(0x1p-10f, 1)), 1);
    assert_int_equal(ns_e4m3_code(0x1p-149f), 0);
    assert_int_equal(ns_e4m3_code(-0x1p-149f), 0x80);
    assert_int_equal(ns_e4m3_code(-0.0f), 0x80);
}

static void
no_value_lies_nearer_to_another_code(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 98317) { /* a prime */
        float value;
        double best = INFINITY, got;

        memcpy(&value, &bits, sizeof(value));
        for (int code = 0; code < 0x7f; code++)
            best = fmin(best, fabs(defined((uint8_t)code) - (double)value));
        got = fabs((double)ns_e4m3_value(ns_e4m3_code(value)) - (double)value);
        assert_true(got == best);
    }
}

static void
a_row_has_its_largest_at_448_and_all_else_within_half_a_step(void **state)
{
    float row[67];
    uint8_t code[67];

    (void)state;
    for (int power = -140; power <= 120; power += 10) {
        float scale;
        bool met = false;

        for (int i = 0; i < 67; i++)
            row[i] = ldexpf(sinf((float)(i * i)), power);
        scale = ns_e4m3_row(code, row, 67);
        assert_true(scale >= 0x1p-126f && isfinite(scale));
        for (int i = 0; i < 67; i++) {
            double size = fabs((double)row[i]) / (double)scale;
            double back = (double)ns_e4m3_value(code[i]);
            /* 1/16 of it, or half of the smallest step; and the rounding of
             * the division itself */
            double most = fmax(size / 16, 0x1p-10) * (1 + 1e-6);

            assert_true(fabs(back - (double)row[i] / (double)scale) <= most);
            met |= (code[i] & 0x7f) == 0x7e;
        }
        if (power > -110)
            assert_true(met);
    }
}

static void
rows_without_a_scale_are_told(void **state)
{
    float row[5] = { 0 };
    uint8_t code[5];

    (void)state;
    assert_true(ns_e4m3_row(code, row, 5) == 1.0f);
    for (int i = 0; i < 5; i++)
        assert_int_equal(code[i], 0);
    for (int bad = 0; bad < 2; bad++)
        for (int at = 0; at < 5; at++) {
            for (int i = 0; i < 5; i++)
                row[i] = (float)i;
            row[at] = bad ? NAN : -INFINITY;
            assert_true(isnan(ns_e4m3_row(code, row, 5)));
            for (int i = 0; i < 5; i++)
                assert_true(isnan(ns_e4m3_value(code[i])));
        }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_has_the_value_of_its_definition_and_comes_back),
        cmocka_unit_test(between_two_codes_the_nearest_is_taken_and_the_even_one_at_the_middle),
        cmocka_unit_test(what_is_too_large_becomes_the_largest_and_what_is_too_small_zero),
        cmocka_unit_test(no_value_lies_nearer_to_another_code),
        cmocka_unit_test(a_row_has_its_largest_at_448_and_all_else_within_half_a_step),
        cmocka_unit_test(rows_without_a_scale_are_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
