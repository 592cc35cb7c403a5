/* sampler.h - the rules of denoising: temperature, acceptance, stopping.
 *
 * Pure functions over one canvas's numbers. Source of every formula: the
 * model's reference loop (docs/MODEL.md section 8).
 */
#ifndef NS_ENGINE_SAMPLER_H
#define NS_ENGINE_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

/* T of the step with `n` of `n_steps` remaining (n = n_steps first, then down
 * to 1): t_min + (t_max - t_min) * n / n_steps. */
float ns_sampler_temperature(float t_min, float t_max, uint32_t n,
                             uint32_t n_steps);

/* Accepts the positions of lowest entropy while the sum of all smaller ones
 * stays within `bound`: at least one, and the first that crosses is still in.
 * Equal entropies: lowest position first. `order`: scratch [length]. Returns
 * how many were accepted. NaN entropies count as the largest. */
uint32_t ns_sampler_accept(const float *entropy, uint32_t length, float bound,
                           uint8_t *accepted, uint32_t *order);

/* Mean entropy over the canvas. */
float ns_sampler_mean(const float *entropy, uint32_t length);

#endif
