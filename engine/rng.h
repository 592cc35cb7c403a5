/* rng.h - counter-based random numbers: a draw is a function of its key.
 *
 * The key is (seed, block, step, purpose, index), so that a job's draws do
 * not depend on what it was packed with, nor on how often it was restarted.
 * `step` is the remaining-steps counter n of the denoise loop (N .. 1), 0 for
 * the initial canvas. Source: splitmix64's finaliser, chained; the reference
 * vectors were recorded with the same generator.
 */
#ifndef NS_ENGINE_RNG_H
#define NS_ENGINE_RNG_H

#include <stdint.h>

enum ns_purpose {
    NS_DRAW_CANVAS = 0,  /* the noise a block starts from; index: position */
    NS_DRAW_SAMPLE = 1,  /* the sample of a denoise step; index: position  */
    NS_DRAW_RENOISE = 2, /* tokens for what was not accepted               */
    NS_DRAW_AR = 3,      /* the ar draw; index: output position            */
    NS_DRAW_RETRY = 4,   /* seeds of retries; index: the attempt           */
};

static inline uint64_t
ns_mix(uint64_t z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline uint64_t
ns_draw(uint64_t seed, uint32_t block, uint32_t step, enum ns_purpose purpose,
        uint64_t index)
{
    uint64_t stream = (uint64_t)block << 32 | (uint64_t)step << 8 |
                      (uint64_t)purpose;

    return ns_mix(ns_mix(ns_mix(seed) ^ stream) ^ index);
}

/* Uniform in [0, 1) with 53 bits. */
static inline double
ns_draw_uniform(uint64_t draw)
{
    return (double)(draw >> 11) * 0x1p-53;
}

/* Uniform token of a vocabulary of `vocab`. */
static inline int32_t
ns_draw_token(uint64_t draw, uint32_t vocab)
{
    return (int32_t)(((draw >> 32) * vocab) >> 32);
}

#endif
