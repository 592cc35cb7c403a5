#include "engine/model.h"

#include <limits.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "engine/json.h"
#include "engine/model_bind.h"

enum {
    MAX_CONFIG_BYTES = 4 << 20,
    MAX_TOKENIZER_BYTES = 256 << 20,
    PRINTED_UNUSED = 20,
};

struct texts { /* the small files, as they lie on disk */
    struct ns_buf config, generation, tokenizer;
    bool no_generation, no_tokenizer;
};

static enum ns_status
read_text(const char *directory, const char *name, size_t limit,
          struct ns_buf *out, bool *absent, struct ns_error *err)
{
    char path[PATH_MAX];

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", directory, name) >=
        sizeof(path))
        return ns_refuse(err, "bad_model", NULL, "%s: path too long",
                         directory);
    return ns_file_read(path, limit, out, absent, err);
}

static enum ns_status
read_texts(const char *directory, struct texts *texts, struct ns_error *err)
{
    enum ns_status status;

    status = read_text(directory, "config.json", MAX_CONFIG_BYTES,
                       &texts->config, NULL, err);
    if (status == NS_OK)
        status = read_text(directory, "generation_config.json",
                           MAX_CONFIG_BYTES, &texts->generation,
                           &texts->no_generation, err);
    if (status == NS_OK)
        status = read_text(directory, "tokenizer.json", MAX_TOKENIZER_BYTES,
                           &texts->tokenizer, &texts->no_tokenizer, err);
    return status;
}

/* Each part with its label and length, so that no two sets of parts give the
 * same bytes. An absent part differs from an empty one. */
static bool
hash_part(EVP_MD_CTX *hash, const char *label, const void *bytes,
          size_t length, bool absent)
{
    unsigned char prefix[9];
    uint64_t n = length;

    prefix[0] = absent ? 0 : 1;
    for (int i = 1; i < 9; i++, n >>= 8)
        prefix[i] = (unsigned char)n;
    return EVP_DigestUpdate(hash, label, strlen(label) + 1) == 1 &&
           EVP_DigestUpdate(hash, prefix, sizeof(prefix)) == 1 &&
           (length == 0 || EVP_DigestUpdate(hash, bytes, length) == 1);
}

/* Two trainings of one configuration have the same headers and sizes. Their
 * norms and scales tell them apart, and are a thousandth of the file. */
static bool
hash_vectors(EVP_MD_CTX *hash, const struct ns_safetensors *st)
{
    size_t n;
    const struct ns_stored_tensor *all = ns_safetensors_all(st, &n);

    for (size_t i = 0; i < n; i++)
        if (all[i].rank <= 1 && !hash_part(hash, all[i].name, all[i].data,
                                           all[i].bytes, false))
            return false;
    return true;
}

static bool
hash_all(EVP_MD_CTX *hash, const struct texts *texts,
         const struct ns_safetensors *st)
{
    size_t length, file_bytes;
    const void *bytes;

    if (EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1 ||
        !hash_part(hash, "config", texts->config.data, texts->config.length,
                   false) ||
        !hash_part(hash, "generation", texts->generation.data,
                   texts->generation.length, texts->no_generation) ||
        !hash_part(hash, "tokenizer", texts->tokenizer.data,
                   texts->tokenizer.length, texts->no_tokenizer))
        return false;
    bytes = ns_safetensors_index(st, &length);
    if (!hash_part(hash, "index", bytes, length, bytes == NULL))
        return false;
    for (uint32_t i = 0; i < ns_safetensors_n_shards(st); i++) {
        char size[32];

        bytes = ns_safetensors_header(st, i, &length, &file_bytes);
        snprintf(size, sizeof(size), "%zu", file_bytes);
        if (!hash_part(hash, "header", bytes, length, false) ||
            !hash_part(hash, "size", size, strlen(size), false))
            return false;
    }
    return hash_vectors(hash, st);
}

static enum ns_status
hash_revision(const struct texts *texts, const struct ns_safetensors *st,
              char out[65], struct ns_error *err)
{
    unsigned char digest[32];
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool done = hash && hash_all(hash, texts, st) &&
                EVP_DigestFinal_ex(hash, digest, NULL) == 1;

    EVP_MD_CTX_free(hash);
    if (!done)
        return ns_fail(err, NS_FATAL, "SHA-256 of the model failed");
    for (size_t i = 0; i < sizeof(digest); i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    return NS_OK;
}

static enum ns_status
load(const char *directory, struct ns_backend *be, bool packed,
     struct ns_model **out, struct ns_error *err)
{
    struct texts texts = { .no_generation = false };
    struct ns_binder b = { .be = be, .err = err };
    struct ns_model *model = NULL;
    enum ns_status status;

    ns_buf_init(&texts.config, MAX_CONFIG_BYTES);
    ns_buf_init(&texts.generation, MAX_CONFIG_BYTES);
    ns_buf_init(&texts.tokenizer, MAX_TOKENIZER_BYTES);
    model = calloc(1, sizeof(*model));
    if (!model) {
        status = ns_fail(err, NS_FATAL, "out of memory opening a model");
        goto out;
    }
    model->backend = be;
    status = read_texts(directory, &texts, err);
    if (status != NS_OK)
        goto out;
    status = ns_config_parse(texts.config.data, texts.config.length,
                             "config.json", &model->config, err);
    if (status == NS_OK)
        status = ns_generation_parse(
            texts.no_generation ? NULL : texts.generation.data,
            texts.generation.length, "generation_config.json", &model->config,
            &model->generation, err);
    if (status != NS_OK) {
        ns_context(err, "%s", directory);
        goto out;
    }
    model->weights.layer =
        calloc(model->config.n_layers, sizeof(*model->weights.layer));
    if (!model->weights.layer) {
        status = ns_fail(err, NS_FATAL, "out of memory opening a model");
        goto out;
    }
    status = ns_safetensors_open(directory, &b.st, err);
    if (status == NS_OK)
        status = hash_revision(&texts, b.st, model->revision, err);
    if (status != NS_OK)
        goto out;

    b.model = model;
    ns_bind_survey(&b);
    if (b.status == NS_OK && packed)
        ns_bind_pack(&b);
    status = b.status;
    if (status != NS_OK) {
        ns_context(err, "%s", directory);
        goto out;
    }
    *out = model;
    model = NULL;
out:
    free(b.host);
    ns_safetensors_close(b.st);
    ns_model_close(model);
    ns_buf_fini(&texts.tokenizer);
    ns_buf_fini(&texts.generation);
    ns_buf_fini(&texts.config);
    return status;
}

enum ns_status
ns_model_describe(const char *directory, struct ns_backend *be,
                  struct ns_model **out, struct ns_error *err)
{
    return load(directory, be, false, out, err);
}

enum ns_status
ns_model_open(const char *directory, struct ns_backend *be,
              struct ns_model **out, struct ns_error *err)
{
    return load(directory, be, true, out, err);
}

static void
drop(struct ns_backend *be, struct ns_weight *weight_)
{
    if (weight_->data)
        be->ops->drop(be, weight_);
}

void
ns_model_close(struct ns_model *model)
{
    struct ns_weights *w;

    if (!model)
        return;
    w = &model->weights;
    for (uint32_t i = 0; w->layer && i < model->config.n_layers; i++) {
        drop(model->backend, &w->layer[i].qkv);
        drop(model->backend, &w->layer[i].o);
        drop(model->backend, &w->layer[i].mlp_gated);
        drop(model->backend, &w->layer[i].mlp_down);
        drop(model->backend, &w->layer[i].router);
        drop(model->backend, &w->layer[i].experts_gated);
        drop(model->backend, &w->layer[i].experts_down);
    }
    for (uint32_t i = 0; w->vision.layer && i < model->config.vision.n_layers;
         i++) {
        struct ns_vision_layer_weights *v = &w->vision.layer[i];
        struct ns_weight *const all[] = { &v->qkv, &v->gated, &v->q, &v->k,
                                          &v->v, &v->gate, &v->up, &v->o,
                                          &v->down };

        for (size_t j = 0; j < sizeof(all) / sizeof(all[0]); j++)
            drop(model->backend, all[j]);
    }
    drop(model->backend, &w->vision.projection);
    drop(model->backend, &w->vision.patch);
    drop(model->backend, &w->sc_down);
    drop(model->backend, &w->sc_gated);
    drop(model->backend, &w->embedding);
    if (w->vectors)
        model->backend->ops->release(model->backend, w->vectors);
    free(w->vision.layer);
    free(w->layer);
    for (size_t i = 0; i < model->n_unused; i++)
        free(model->unused[i]);
    free(model->unused);
    free(model);
}

static void
print_shapes(const struct ns_config *c, FILE *file)
{
    const struct ns_layer_config *full = &c->layer[c->n_layers - 1];
    const struct ns_layer_config *sliding = NULL;
    uint32_t n_full = 0;

    for (uint32_t i = 0; i < c->n_layers; i++) {
        n_full += c->layer[i].full;
        if (!c->layer[i].full)
            sliding = &c->layer[i];
    }
    fprintf(file,
            "family      DiffusionGemma, text%s\n"
            "layers      %u: %u sliding (window %u), %u full\n"
            "shapes      hidden %u, dense %u, vocabulary %u\n"
            "experts     %u of %u, top %u in each layer\n",
            c->vision.present ? " and images" : "", c->n_layers,
            c->n_layers - n_full, c->sliding_window, n_full, c->hidden,
            c->intermediate, c->vocab, c->n_experts, c->expert_dim, c->top_k);
    fprintf(file, "attention   %u heads;", c->n_heads);
    if (sliding)
        fprintf(file, " sliding %u key heads of %u;", sliding->n_kv_heads,
                sliding->head_dim);
    fprintf(file,
            " full %u key heads of %u\n"
            "canvas      %u tokens\n"
            "context     %u tokens\n",
            full->n_kv_heads, full->head_dim, c->canvas_length,
            c->max_position);
}

void
ns_model_print(const struct ns_model *model, FILE *file)
{
    static const char *const parts[NS_N_PARTS] = {
        [NS_PART_EMBEDDING] = "embedding",
        [NS_PART_ATTENTION] = "attention",
        [NS_PART_MLP] = "dense MLP",
        [NS_PART_ROUTER] = "router",
        [NS_PART_EXPERTS] = "experts",
        [NS_PART_SELF_CONDITIONING] = "self-conditioning",
        [NS_PART_VECTORS] = "norms and scales",
    };
    static const char *const types[] = {
        [NS_F32] = "f32", [NS_BF16] = "bf16", [NS_F16] = "f16",
    };
    const struct ns_generation *g = &model->generation;

    print_shapes(&model->config, file);
    fprintf(file,
            "sampling    at most %u steps, entropy bound %g, temperature %g "
            "to %g, stable %u, confident below %g\n"
            "modes       diffusion%s\n"
            "revision    %s\n"
            "files       %u, %.3f GB, weights in %s\n",
            g->max_denoising_steps, (double)g->entropy_bound,
            (double)g->t_max, (double)g->t_min, g->stability_threshold,
            (double)g->confidence_threshold,
            g->ar_capable ? ", ar, hybrid" : "", model->revision,
            model->n_shards, (double)model->file_bytes / 1e9,
            types[model->dtype]);
    if (model->n_codes > 0)
        fprintf(file, "quantised   %.1f %% of the parameters in FP8 (E4M3), a "
                "scale an output\n", 100.0 * (double)model->n_codes /
                                         (double)model->n_parameters);

    fprintf(file, "\n%-20s %15s %12s\n", "part", "parameters", "packed MB");
    for (int i = 0; i < NS_N_PARTS; i++)
        fprintf(file, "%-20s %15llu %12.1f\n", parts[i],
                (unsigned long long)model->part_parameters[i],
                (double)model->part_bytes[i] / 1e6);
    fprintf(file, "%-20s %15llu %12.1f\n", "all",
            (unsigned long long)model->n_parameters,
            (double)(model->weight_bytes - model->vision_bytes) / 1e6);
    fprintf(file, "%-20s %15llu\n", "active for a token",
            (unsigned long long)model->n_active);
    if (model->config.vision.present)
        fprintf(file, "%-20s %15llu %12.1f%s\n", "vision tower",
                (unsigned long long)model->n_vision_parameters,
                (double)model->vision_bytes / 1e6,
                model->config.vision.clipped ? "   clipped" : "");

    if (model->n_copies > 0)
        fprintf(file, "\n%u stored copies of shared tensors, read from one\n",
                model->n_copies);
    if (model->n_unused > 0)
        fprintf(file, "\nunused tensors: %zu\n", model->n_unused);
    for (size_t i = 0; i < model->n_unused && i < PRINTED_UNUSED; i++)
        fprintf(file, "    %s\n", model->unused[i]);
    if (model->n_unused > PRINTED_UNUSED)
        fprintf(file, "    and %zu more\n", model->n_unused - PRINTED_UNUSED);
}
