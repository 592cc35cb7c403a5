/* The shapes of 26B-A4B: real widths, 128 experts, a vocabulary of 262,144,
 * one sliding and one full layer. The experts' data are holes in the files, so
 * that 4.8 GB of checkpoint take 1.7 GB of disk; packed they take 6.3 GB. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/rng.h"
#include "tests/rig.h"
#include "tests/tiny.h"

#if defined(__SANITIZE_ADDRESS__)
enum { PROMPT = 1, CANVAS = 16 }; /* ten times as slow: fewer rows */
#else
enum { PROMPT = 40, CANVAS = 256 };
#endif
enum { NEEDED_GB = 9 };

/* A line of a file under /proc in KiB; 0 if it is not there. */
static uint64_t
proc_kib(const char *path, const char *key)
{
    FILE *file = fopen(path, "r");
    char line[256];
    uint64_t kib = 0;

    while (file && fgets(line, sizeof(line), file))
        if (strncmp(line, key, strlen(key)) == 0)
            kib = strtoull(line + strlen(key), NULL, 10);
    if (file)
        fclose(file);
    return kib;
}

static bool
too_small(void)
{
#if defined(__SANITIZE_THREAD__)
    print_message("left out: the thread sanitizer takes five times as much "
                  "memory\n");
    return true;
#endif
    if (proc_kib("/proc/meminfo", "MemAvailable:") >>
        20 >= NEEDED_GB)
        return false;
    print_message("left out: needs %d GB of memory\n", NEEDED_GB);
    return true;
}

static void
check_shapes(const struct ns_model *model)
{
    const struct ns_weights *w = &model->weights;

    assert_int_equal(model->dtype, NS_BF16);
    assert_int_equal(model->n_shards, 2);
    assert_int_equal(model->n_unused, 0);
    assert_int_equal(model->part_parameters[NS_PART_EMBEDDING], 738197504);
    assert_int_equal(model->part_parameters[NS_PART_EXPERTS],
                     2ull * 128 * 3 * 704 * 2816);
    assert_int_equal(w->embedding.n, 262144);
    assert_int_equal(w->layer[0].qkv.n, 16 * 256 + 2 * 8 * 256);
    assert_int_equal(w->layer[1].qkv.n, 16 * 512 + 2 * 512);
    assert_int_equal(w->layer[1].o.k, 16 * 512);
    assert_int_equal(w->layer[0].experts_gated.count, 128);
    assert_int_equal(w->layer[0].experts_gated.n, 704);
    assert_int_equal(w->layer[0].experts_down.k, 704);
    assert_int_equal(w->n_rotated_full, 64);
    assert_true(w->embedding_scale == 53.0f);
}

/* What was mapped is let go of as it is packed: at no time is much more than
 * the packed copy resident. */
static void
check_peak(const struct ns_model *model)
{
    uint64_t peak = proc_kib("/proc/self/status", "VmHWM:") << 10;

#if defined(__SANITIZE_ADDRESS__)
    (void)model; /* its shadow and quarantine are not ours */
#else
    if (peak > model->weight_bytes / 10 * 11)
        fail_msg("peak %.2f GB for %.2f GB of weights", (double)peak / 1e9,
                 (double)model->weight_bytes / 1e9);
#endif
    print_message("%.2f GB of weights, peak %.2f GB\n",
                  (double)model->weight_bytes / 1e9, (double)peak / 1e9);
}

static void
the_released_shapes_load_and_run_a_canvas(void **state)
{
    struct tiny_recipe recipe = tiny_released_recipe();
    const struct ns_backend_options backend = { .name = "cpu" };
    int32_t prompt[PROMPT], canvas[CANVAS];
    struct ns_error err;
    uint32_t n_own = 0;
    char *directory;
    struct rig rig;

    (void)state;
    if (too_small())
        skip();
    directory = tiny_make(&recipe);
    if (rig_open(&rig, directory, &backend, false, &err) != NS_OK)
        fail_msg("%s", err.text);
    check_shapes(rig.model);
    check_peak(rig.model);
    ns_forward_set_probe(rig.fw, NULL, NULL); /* no whole logits */

    for (int i = 0; i < PROMPT; i++)
        prompt[i] = ns_draw_token(ns_draw(1, 0, 0, NS_DRAW_RENOISE, i),
                                  recipe.vocab);
    for (int i = 0; i < CANVAS; i++)
        canvas[i] = ns_draw_token(ns_draw(1, 0, 0, NS_DRAW_CANVAS, i),
                                  recipe.vocab);
    canvas[0] = 0;
    canvas[CANVAS - 1] = (int32_t)recipe.vocab - 1;
    if (rig_run(&rig, NS_SEGMENT_PREFILL, prompt, PROMPT, 0, NULL, &err) !=
            NS_OK ||
        rig_run(&rig, NS_SEGMENT_CANVAS, canvas, CANVAS, PROMPT, NULL,
                &err) != NS_OK)
        fail_msg("%s", err.text);

    /* The layers of such weights mix weakly, so the head sees above all the
     * token that a row stands for: out of 262,144 it has to be found. */
    for (int i = 0; i < CANVAS; i++) {
        n_own += rig.batch->argmax[i] == canvas[i];
        assert_true(rig.batch->entropy[i] >= 0.0f &&
                    rig.batch->entropy[i] < logf(262144.0f));
    }
    assert_int_equal(n_own, CANVAS);
    rig_close(&rig);
    tiny_remove(directory);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_released_shapes_load_and_run_a_canvas),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
