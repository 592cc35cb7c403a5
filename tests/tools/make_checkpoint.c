/* make_checkpoint.c - an untrained checkpoint in a directory.
 *
 *     make_checkpoint demo DIR        small, canvas 64, bf16, with the tiny
 *                                     tokenizer: for `make demo` and trials
 *     make_checkpoint fp8 DIR         the same in FP8
 *     make_checkpoint clipped DIR     with a vision tower of clipped linears
 *     make_checkpoint released DIR    the widths of 26B-A4B, two layers, the
 *                                     experts' data holes in the files
 *
 * Run from the project's root. Its text is noise; its shapes are real.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/tiny.h"

int
main(int argc, char **argv)
{
    struct tiny_recipe recipe;

    if (argc == 3 && strcmp(argv[1], "demo") == 0) {
        recipe = tiny_demo_recipe();
    } else if (argc == 3 && strcmp(argv[1], "fp8") == 0) {
        recipe = tiny_demo_recipe();
        recipe.fp8 = true;
    } else if (argc == 3 && strcmp(argv[1], "clipped") == 0) {
        recipe = tiny_recipe();
        recipe.vision = recipe.clipped = true;
    } else if (argc == 3 && strcmp(argv[1], "released") == 0) {
        recipe = tiny_released_recipe();
    } else {
        fprintf(stderr, "usage: make_checkpoint demo|fp8|clipped|released DIR\n");
        return 64;
    }
    if (mkdir(argv[2], 0755) == -1 && errno != EEXIST) {
        fprintf(stderr, "make_checkpoint: %s: %s\n", argv[2],
                strerror(errno));
        return 1;
    }
    tiny_write(&recipe, argv[2]);
    if (strcmp(argv[1], "released") != 0)
        tiny_add_tokenizer(argv[2]);
    return 0;
}
