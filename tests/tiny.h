/* tiny.h - checkpoints with random weights, made where a test needs one.
 *
 * A checkpoint is a function of its recipe: the draws are keyed by seed,
 * tensor name and element, and use exact arithmetic only, so that every
 * machine writes the same bytes. The gains are such that denoising converges:
 * the layers mix weakly and the head mostly sees the token it stands on.
 *
 * Functions that make files abort the program when they fail: a test that
 * cannot write its input has nothing to say. Needs base/ and jansson alone.
 */
#ifndef NS_TESTS_TINY_H
#define NS_TESTS_TINY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tiny_recipe {
    uint32_t vocab, hidden, intermediate, n_layers, n_heads;
    uint32_t n_kv_heads, head_dim;               /* sliding layers */
    uint32_t n_global_kv_heads, global_head_dim; /* full layers    */
    uint32_t full_every; /* layer i is full if (i + 1) % this == 0; the last
                          * one always */
    uint32_t sliding_window, canvas, max_position;
    uint32_t n_experts, top_k, expert_dim;
    const char *dtype; /* "F32", "BF16", "F16" */
    uint32_t n_shards; /* above 1: shards and an index */
    bool per_layer_config; /* the newer form of config.json */
    bool vision;           /* with a small tower */
    bool clipped;          /* whose projections have limits */
    bool copies;           /* shared tensors stored for the encoder too, and
                            * lm_head.weight */
    bool fp8;              /* layers' matrices in F8_E4M3 with a scale a row, as
                            * compressed-tensors has them, each expert's by
                            * itself; the values are those of the recipe
                            * without, rounded */
    bool sparse_experts;   /* the experts' data are holes in the file: zeros */
    uint64_t seed;
    float mixing; /* gain of what layers add to the residual; 0: 0.12 */
};

/* Seven layers (full at 3 and 6), H 64, V 512, W 16, L 32, 8 experts of 24 top
 * 2, one F32 file: nearly the shape of tests/cases/text_fp32. */
struct tiny_recipe tiny_recipe(void);
/* Canvas 64, bf16, eight layers: for `make demo` without the trained model. */
struct tiny_recipe tiny_demo_recipe(void);
/* The real widths of 26B-A4B, one sliding and one full layer, sparse experts,
 * two shards: 4.7 GB to read, 1.7 GB on disk. */
struct tiny_recipe tiny_released_recipe(void);

/* Writes config.json, generation_config.json and the tensors into an existing
 * directory. */
void tiny_write(const struct tiny_recipe *recipe, const char *directory);

/* An empty directory under $TMPDIR or /tmp; free it with tiny_remove. */
char *tiny_directory(void);
/* Both at once. */
char *tiny_make(const struct tiny_recipe *recipe);
/* Deletes the directory with the files in it, and frees the name. */
void tiny_remove(char *directory);

/* The tokenizer of 512 entries (tests/cases/tokenizer/tiny) into it; tests run
 * from the project's root. */
void tiny_add_tokenizer(const char *directory);

/* Whole files, for tests that break them. The caller frees what was read. */
void *tiny_read_file(const char *directory, const char *name, size_t *length);
void tiny_write_file(const char *directory, const char *name,
                     const void *bytes, size_t length);

/* The value of one element as tiny_write stores it, before rounding. */
double tiny_gauss(uint64_t seed, const char *tensor, uint64_t element);

#endif
