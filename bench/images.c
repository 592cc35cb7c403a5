/* images.c - the vision path's side of `make bench`: pixels to soft tokens.
 *
 *     build/bench/images MODEL [THREADS] [ISA]
 *
 * Reads commands from standard input and answers each with one JSON line:
 *
 *     encode N W H T   N pictures of W by H, no two alike, each for at most T
 *                      soft tokens: resized, cut into patches, through tower
 *                      and projector, eight at a time
 *
 * Pixels are made by bench/images.py's formula, out of the time that counts.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/vision.h"

enum { AT_A_TIME = 8, MAX_SIDE = 8192 };

struct bench {
    struct ns_backend *be;
    struct ns_model *model;
    struct ns_vision *vision;
    uint32_t next; /* picture */
};

static double
now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void
need(enum ns_status status, const struct ns_error *err)
{
    if (status == NS_OK)
        return;
    fprintf(stderr, "bench: %s\n", err->text);
    exit(1);
}

/* Smooth waves with some noise; the picture's number is in its phase. */
static uint8_t *
pixels(uint32_t number, uint32_t width, uint32_t height)
{
    uint8_t *rgb = malloc((size_t)width * height * 3);

    for (size_t i = 0; rgb && i < (size_t)width * height * 3; i++)
        rgb[i] = (uint8_t)((i / 3 % width * 7 + i / 3 / width * 5 +
                            number * 31 + ((uint32_t)i * 2654435761u >> 28)) >>
                           2);
    if (!rgb)
        exit(1);
    return rgb;
}

static void
run_encode(struct bench *b, uint32_t n, uint32_t width, uint32_t height,
           uint32_t max_tokens)
{
    const struct ns_vision_config *config = &b->model->config.vision;
    uint32_t n_tokens = 0;
    double spent = 0;

    for (uint32_t at = 0; at < n; at += AT_A_TIME) {
        uint32_t part = n - at < AT_A_TIME ? n - at : AT_A_TIME;
        struct ns_image image[AT_A_TIME];
        const struct ns_image *images[AT_A_TIME];
        const float *soft[AT_A_TIME];
        uint8_t *rgb[AT_A_TIME];
        struct ns_error err;
        double start;

        for (uint32_t i = 0; i < part; i++)
            rgb[i] = pixels(b->next++, width, height);
        start = now_ms();
        for (uint32_t i = 0; i < part; i++) {
            need(ns_image_prepare(config, rgb[i], width, height, max_tokens,
                                  &image[i], &err), &err);
            images[i] = &image[i];
            n_tokens = image[i].size.n_tokens;
        }
        need(ns_vision_encode(b->vision, images, part, soft, &err), &err);
        spent += now_ms() - start;
        for (uint32_t i = 0; i < part; i++) {
            ns_image_fini(&image[i]);
            free(rgb[i]);
        }
    }
    printf("{\"kind\":\"images\",\"n\":%u,\"tokens\":%u,\"ms\":%.2f}\n", n,
           n_tokens, spent);
}

/* The tower alone needs scratch here; the rest as small as it may be. */
static void
reserve(struct bench *b)
{
    const struct ns_config *c = &b->model->config;
    struct ns_backend_sizes sizes = {
        .n_rows = 1, .n_head_rows = 1, .hidden = c->hidden,
        .vocab = c->vocab, .n_heads = c->n_heads, .n_kv_heads = 1,
        .head_dim = c->layer[0].head_dim, .n_experts = c->n_experts,
        .top_k = c->top_k, .expert_dim = c->expert_dim,
    };
    struct ns_error err;

    ns_vision_sizes(b->model, &sizes);
    need(b->be->ops->reserve(b->be, &sizes, &err), &err);
}

int
main(int argc, char **argv)
{
    struct ns_backend_options options = { 0 };
    struct bench b = { 0 };
    struct ns_error err;
    uint32_t n, width, height, tokens;
    char line[128];

    if (argc < 2) {
        fprintf(stderr, "usage: images MODEL [THREADS] [ISA]\n");
        return 64;
    }
    options.n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    options.isa = argc > 3 ? argv[3] : NULL;
    need(ns_backend_open(&options, &b.be, &err), &err);
    need(ns_model_open(argv[1], b.be, &b.model, &err), &err);
    if (!ns_model_sees(b.model)) {
        fprintf(stderr, "bench: %s has no vision tower\n", argv[1]);
        return 1;
    }
    reserve(&b);
    need(ns_vision_create(b.model, 0, &b.vision, &err), &err);
    printf("{\"kind\":\"open\",\"arithmetic\":\"%s\"}\n", b.be->arithmetic);
    for (fflush(stdout); fgets(line, sizeof(line), stdin); fflush(stdout)) {
        if (sscanf(line, "encode %" SCNu32 " %" SCNu32 " %" SCNu32
                   " %" SCNu32, &n, &width, &height, &tokens) == 4 &&
            width <= MAX_SIDE && height <= MAX_SIDE)
            run_encode(&b, n, width, height, tokens);
        else
            fprintf(stderr, "bench: no such command: %s", line);
    }
    ns_vision_destroy(b.vision);
    ns_model_close(b.model);
    ns_backend_close(b.be);
    return 0;
}
