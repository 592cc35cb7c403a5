#include "engine/request.h"

#include "engine/image.h"

enum ns_status
ns_request_resolve_mode(const struct ns_model *model, enum ns_mode asked,
                        bool code, bool thinking, enum ns_mode *out,
                        struct ns_error *err)
{
    bool ar = model->generation.ar_capable;

    if (asked == NS_MODE_AUTO)
        asked = ar && (code || thinking) ? NS_MODE_HYBRID : NS_MODE_DIFFUSION;
    if (asked != NS_MODE_DIFFUSION && !ar)
        return ns_refuse(err, "unsupported", "nightshift.mode",
                         "this checkpoint is not declared able to decode "
                         "autoregressively");
    *out = asked;
    return NS_OK;
}

uint32_t
ns_request_max_tokens(const struct ns_config *config, uint32_t n_prompt,
                      enum ns_mode mode, uint32_t length)
{
    uint32_t context = config->max_position;

    if (length == 0)
        length = config->canvas_length;
    if (n_prompt >= context || context - n_prompt < length)
        return 0;
    if (mode == NS_MODE_AR)
        return context - n_prompt;
    return (context - n_prompt) / length * length;
}

static bool
between(float value, float least, float most) /* false for NaN */
{
    return value >= least && value <= most;
}

static enum ns_status
check_sampler(const struct ns_sampler_options *sampler, struct ns_error *err)
{
    if (!between(sampler->t_min, 1e-3f, 100.0f))
        return ns_refuse(err, "bad_param", "nightshift.t_min",
                         "t_min is %g, allowed are 0.001 to 100",
                         (double)sampler->t_min);
    if (!between(sampler->t_max, sampler->t_min, 100.0f))
        return ns_refuse(err, "bad_param", "nightshift.t_max",
                         "t_max is %g, allowed are t_min (%g) to 100",
                         (double)sampler->t_max, (double)sampler->t_min);
    if (!between(sampler->entropy_bound, 0.0f, 1e6f))
        return ns_refuse(err, "bad_param", "nightshift.entropy_bound",
                         "entropy_bound is %g, allowed are 0 to 1000000",
                         (double)sampler->entropy_bound);
    if (sampler->max_denoising_steps < 1 ||
        sampler->max_denoising_steps > 1000)
        return ns_refuse(err, "bad_param", "nightshift.max_denoising_steps",
                         "max_denoising_steps is %u, allowed are 1 to 1000",
                         sampler->max_denoising_steps);
    if (sampler->stability_threshold > 1000)
        return ns_refuse(err, "bad_param", "nightshift.stability_threshold",
                         "stability_threshold is %u, allowed are 0 to 1000",
                         sampler->stability_threshold);
    if (!between(sampler->confidence_threshold, 0.0f, 100.0f))
        return ns_refuse(err, "bad_param", "nightshift.confidence_threshold",
                         "confidence_threshold is %g, allowed are 0 to 100",
                         (double)sampler->confidence_threshold);
    return NS_OK;
}

static enum ns_status
check_draw(const struct ns_request *request, struct ns_error *err)
{
    if (request->has_temperature &&
        !between(request->temperature, 0.0f, 2.0f))
        return ns_refuse(err, "bad_param", "body.temperature",
                         "temperature is %g, allowed are 0 to 2",
                         (double)request->temperature);
    if (!(request->top_p > 0.0f && request->top_p <= 1.0f))
        return ns_refuse(err, "bad_param", "body.top_p",
                         "top_p is %g, it must be above 0 and at most 1",
                         (double)request->top_p);
    if (request->top_p < 1.0f && request->mode == NS_MODE_DIFFUSION)
        return ns_refuse(err, "unsupported", "body.top_p",
                         "top_p below 1 is not supported in mode diffusion");
    return NS_OK;
}

static enum ns_status
check_lengths(const struct ns_config *config,
              const struct ns_request *request, uint32_t length,
              struct ns_error *err)
{
    uint32_t most = ns_request_max_tokens(config, request->n_prompt,
                                          request->mode, length);

    if (request->n_prompt == 0)
        return ns_refuse(err, "empty_prompt", "messages",
                         "the prompt has no tokens");
    if (most == 0)
        return ns_refuse(err, "over_context", "messages",
                         "the prompt has %u tokens; with a canvas of %u the "
                         "context of %u is exceeded", request->n_prompt,
                         length, config->max_position);
    if (request->max_tokens == 0)
        return ns_refuse(err, "bad_param", "body.max_tokens",
                         "max_tokens is 0, it must be at least 1");
    if (request->max_tokens > most)
        return ns_refuse(err, "over_context", "body.max_tokens",
                         "max_tokens is %u; behind a prompt of %u tokens the "
                         "context of %u leaves %u", request->max_tokens,
                         request->n_prompt, config->max_position, most);
    return NS_OK;
}

static enum ns_status
check_image(const struct ns_config *config, const struct ns_request *request,
            uint32_t index, uint32_t from, struct ns_error *err)
{
    const struct ns_request_image *image = &request->images[index];
    const struct ns_image_size *size = &image->image->size;
    uint32_t side = size->width > size->height ? size->width : size->height;

    if (side / config->vision.patch > config->vision.n_positions)
        return ns_refuse(err, "image_limit", "messages",
                         "image %u is %u x %u pixels for the model, which "
                         "knows places of %u patches", index, size->width,
                         size->height, config->vision.n_positions);
    if (size->n_tokens > NS_IMAGE_MAX_TOKENS || image->position < from ||
        image->position > request->n_prompt ||
        size->n_tokens > request->n_prompt - image->position)
        return ns_refuse(err, "bad_param", "messages",
                         "image %u has %u tokens at %u in a prompt of %u",
                         index, size->n_tokens, image->position,
                         request->n_prompt);
    for (uint32_t i = 0; i < size->n_tokens; i++)
        if (request->prompt[image->position + i] != config->image_id)
            return ns_refuse(err, "bad_param", "messages",
                             "image %u: prompt token %u is no placeholder",
                             index, image->position + i);
    return NS_OK;
}

static enum ns_status
check_images(const struct ns_model *model, const struct ns_request *request,
             struct ns_error *err)
{
    enum ns_status status = NS_OK;
    uint32_t from = 0;

    if (request->n_images > 0 && !ns_model_sees(model))
        return ns_refuse(err, "unsupported", "messages",
                         "this checkpoint cannot read images");
    for (uint32_t i = 0; i < request->n_images && status == NS_OK; i++) {
        status = check_image(&model->config, request, i, from, err);
        from = request->images[i].position +
               request->images[i].image->size.n_tokens;
    }
    return status;
}

enum ns_status
ns_request_check(const struct ns_model *model, bool thinks,
                 const struct ns_request *request, struct ns_error *err)
{
    const struct ns_config *config = &model->config;
    uint32_t length = request->canvas_length;
    enum ns_status status;

    if (length == 0)
        length = config->canvas_length;
    if (length > config->canvas_length || length % 16 != 0)
        return ns_refuse(err, "bad_param", "nightshift.canvas_length",
                         "canvas_length is %u, allowed are multiples of 16 "
                         "up to %u", length, config->canvas_length);
    if ((request->thinking || request->thinking_budget) && !thinks)
        return ns_refuse(err, "unsupported", "reasoning_effort",
                         "this checkpoint's tokenizer has no thought marks");
    if (request->n_resume > request->max_tokens)
        return ns_refuse(err, "bad_param", NULL,
                         "%u tokens to resume from, max_tokens is %u",
                         request->n_resume, request->max_tokens);
    status = check_draw(request, err);
    if (status == NS_OK)
        status = check_sampler(&request->sampler, err);
    if (status == NS_OK)
        status = check_lengths(config, request, length, err);
    if (status == NS_OK)
        status = check_images(model, request, err);
    for (uint32_t i = 0; status == NS_OK && i < request->n_prompt; i++)
        if ((uint32_t)request->prompt[i] >= config->vocab)
            status = ns_refuse(err, "bad_param", "messages",
                               "prompt token %u is %d, the vocabulary %u", i,
                               request->prompt[i], config->vocab);
    for (uint32_t i = 0; status == NS_OK && i < request->n_draft; i++)
        if ((uint32_t)request->draft[i] >= config->vocab)
            status = ns_refuse(err, "bad_param", "nightshift.draft",
                               "draft token %u is %d, the vocabulary %u", i,
                               request->draft[i], config->vocab);
    if (status == NS_OK && request->n_draft > config->max_position)
        status = ns_refuse(err, "bad_param", "nightshift.draft",
                           "the draft is %u tokens, the context %u",
                           request->n_draft, config->max_position);
    if (status == NS_OK && request->n_draft > 0 &&
        (request->mode == NS_MODE_AR || request->thinking))
        status = ns_refuse(err, "unsupported", "nightshift.draft",
                           "a draft goes with diffusion and hybrid, and "
                           "without a thought in front of the answer");
    for (uint32_t i = 0; status == NS_OK && i < request->n_resume; i++)
        if ((uint32_t)request->resume[i] >= config->vocab)
            status = ns_refuse(err, "bad_param", NULL,
                               "resumed token %u is %d, the vocabulary %u", i,
                               request->resume[i], config->vocab);
    return status;
}

const char *
ns_request_mode_name(enum ns_mode mode)
{
    switch (mode) {
    case NS_MODE_AUTO:
        break;
    case NS_MODE_DIFFUSION:
        return "diffusion";
    case NS_MODE_AR:
        return "ar";
    case NS_MODE_HYBRID:
        return "hybrid";
    }
    return "auto";
}
