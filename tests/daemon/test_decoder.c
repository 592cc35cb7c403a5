/* A picture that never ends to be decoded costs its own job alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/decoder.h"

enum { CPU_SECONDS = 1 };

/* A tenth of a second of the processor. */
static void
work(void)
{
    struct timespec now, end;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    end.tv_sec += end.tv_nsec >= 900000000;
    end.tv_nsec = (end.tv_nsec + 100000000) % 1000000000;
    do
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    while (now.tv_sec < end.tv_sec ||
           (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
}

static enum ns_status
decode_or_spin(const void *bytes, size_t length, struct ns_picture *out,
               struct ns_error *err)
{
    static volatile uint64_t n;

    (void)err;
    if (length == 4 && memcmp(bytes, "spin", 4) == 0)
        for (;;)
            n++;
    if (length == 4 && memcmp(bytes, "work", 4) == 0)
        work();
    *out = (struct ns_picture){ 1, 1, calloc(3, 1) };
    return out->rgb ? NS_OK : NS_FATAL;
}

static void
a_picture_that_spins_is_given_up_and_the_next_is_read(void **state)
{
    struct ns_decoder *decoder = NULL;
    struct ns_picture got = { 0 };
    struct ns_error err = { 0 };

    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return; /* no limits are set there: see decoder.c */
#endif
    assert_int_equal(ns_decoder_create(1, &decoder, &err), NS_OK);
    assert_int_equal(ns_decoder_decode(decoder, "spin", 4, &got, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "bad_image");
    assert_non_null(strstr(err.text, "more time than a picture may"));
    assert_null(got.rgb);
    assert_true(ns_decoder_deaths(decoder) >= 1);
    for (int i = 0; i < 3; i++) {
        if (ns_decoder_decode(decoder, "good", 4, &got, &err) != NS_OK)
            fail_msg("%s", err.text);
        ns_picture_fini(&got);
    }
    ns_decoder_destroy(decoder);
}

/* Many small pictures use up a helper's time, too: it ends before that kills
 * one of them. */
static void
a_helper_ends_between_two_pictures_before_its_time_is_up(void **state)
{
    struct ns_decoder *decoder = NULL;
    struct ns_picture got = { 0 };
    struct ns_error err = { 0 };

    (void)state;
    assert_int_equal(ns_decoder_create(1, &decoder, &err), NS_OK);
    for (int i = 0; i < 20; i++) { /* twice what one helper may use */
        if (ns_decoder_decode(decoder, "work", 4, &got, &err) != NS_OK)
            fail_msg("%s", err.text);
        ns_picture_fini(&got);
    }
    assert_int_equal(ns_decoder_deaths(decoder), 0);
    ns_decoder_destroy(decoder);
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_picture_that_spins_is_given_up_and_the_next_is_read),
        cmocka_unit_test(a_helper_ends_between_two_pictures_before_its_time_is_up),
    };

    if (ns_decoder_is_helper(argc, argv))
        return ns_decoder_main(decode_or_spin, CPU_SECONDS);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
