#include "tests/tiny.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/float8.h"

enum { CHUNK = 1 << 16 /* elements written at a time */ };

static void die(const char *format, ...)
    __attribute__((format(printf, 1, 2), noreturn));

static void
die(const char *format, ...)
{
    va_list ap;

    fprintf(stderr, "tiny: ");
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fprintf(stderr, ": %s\n", strerror(errno));
    abort();
}

static void *
need(void *memory)
{
    if (!memory)
        die("memory");
    return memory;
}

struct tiny_recipe
tiny_recipe(void)
{
    return (struct tiny_recipe){
        .vocab = 512, .hidden = 64, .intermediate = 96, .n_layers = 7,
        .n_heads = 4, .n_kv_heads = 2, .head_dim = 16,
        .n_global_kv_heads = 1, .global_head_dim = 32, .full_every = 4,
        .sliding_window = 16, .canvas = 32, .max_position = 4096,
        .n_experts = 8, .top_k = 2, .expert_dim = 24,
        .dtype = "F32", .n_shards = 1, .seed = 1,
    };
}

struct tiny_recipe
tiny_demo_recipe(void)
{
    struct tiny_recipe recipe = tiny_recipe();

    recipe.hidden = 128;
    recipe.intermediate = 192;
    recipe.expert_dim = 48;
    recipe.n_layers = 8;
    recipe.sliding_window = 128;
    recipe.canvas = 64;
    recipe.max_position = 32768;
    recipe.dtype = "BF16";
    recipe.seed = 20261201;
    return recipe;
}

struct tiny_recipe
tiny_released_recipe(void)
{
    return (struct tiny_recipe){
        .vocab = 262144, .hidden = 2816, .intermediate = 2112, .n_layers = 2,
        .n_heads = 16, .n_kv_heads = 8, .head_dim = 256,
        .n_global_kv_heads = 2, .global_head_dim = 512, .full_every = 6,
        .sliding_window = 1024, .canvas = 256, .max_position = 262144,
        .n_experts = 128, .top_k = 8, .expert_dim = 704,
        .dtype = "BF16", .n_shards = 2, .sparse_experts = true, .seed = 26,
    };
}

/* --- draws ------------------------------------------------------------- */

static uint64_t
mix(uint64_t z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t
key_of(uint64_t seed, const char *tensor)
{
    uint64_t key = mix(seed);

    for (; *tensor; tensor++)
        key = mix(key ^ (unsigned char)*tensor);
    return key;
}

/* Nearly normal, of variance 1: the sum of four uniforms. No libm, so that
 * the bytes do not depend on one. */
static double
gauss(uint64_t key, uint64_t element)
{
    uint64_t r = mix(key ^ element);
    double sum = 0.0;

    for (int i = 0; i < 4; i++, r >>= 16)
        sum += (double)(r & 0xffff) / 65536.0;
    return (sum - 2.0) * 1.7320508075688772;
}

static double
uniform(uint64_t key, uint64_t element, double least, double most)
{
    double u = (double)(mix(key ^ element) >> 11) * 0x1p-53;

    return least + (most - least) * u;
}

double
tiny_gauss(uint64_t seed, const char *tensor, uint64_t element)
{
    return gauss(key_of(seed, tensor), element);
}

/* --- storage ----------------------------------------------------------- */

static size_t
element_bytes(const char *dtype)
{
    return strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "F8_E4M3") == 0 ? 1 : 2;
}

/* To nearest, ties to even: the mantissas are long enough for that to be the
 * only rounding. Values here are small and normal, or zero. */
static void
store(const char *dtype, double value, unsigned char *out)
{
    float f = (float)value;
    uint32_t bits;
    uint16_t half;

    memcpy(&bits, &f, sizeof(bits));
    if (strcmp(dtype, "F32") == 0) {
        memcpy(out, &bits, sizeof(bits));
        return;
    }
    if (strcmp(dtype, "BF16") == 0) {
        half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        double magnitude = fabs((double)f);
        uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);

        if (magnitude < 0x1p-14) { /* subnormal: multiples of 2^-24 */
            half = (uint16_t)(sign | (uint16_t)rint(magnitude * 0x1p24));
        } else {
            int exponent;
            double fraction = frexp(magnitude, &exponent); /* [0.5, 1) */
            uint32_t m = (uint32_t)rint(fraction * 2048.0); /* [1024, 2048] */

            half = (uint16_t)(sign + ((uint32_t)(exponent + 13) << 10) + m);
        }
    }
    memcpy(out, &half, sizeof(half));
}

/* A tensor's values: gain * gauss, or uniform with some signs turned. */
struct fill {
    double gain;
    double least, most;  /* uniform when most > least */
    double turned_share; /* of the signs */
    bool hole;
};

struct tensor {
    char name[160];
    uint32_t rank;
    uint64_t dim[3];
    struct fill fill;
    const char *dtype;
    char key[160]; /* the name that its draws are keyed by; "": its own */
    uint64_t first; /* of these draws */
    uint32_t row; /* above 0: codes, or with `scales` the scales, of rows of
                   * so many */
    bool scales;
    uint32_t shard;
    uint64_t bytes;
};

struct list {
    const struct tiny_recipe *recipe;
    struct tensor *tensors;
    size_t n, capacity;
};

static struct tensor *
add(struct list *list, struct fill fill, uint32_t rank, const uint64_t *dim,
    const char *name)
{
    struct tensor *tensor;
    uint64_t elements = 1;

    if (list->n == list->capacity) {
        list->capacity = list->capacity ? list->capacity * 2 : 256;
        list->tensors = need(realloc(list->tensors, list->capacity *
                                                        sizeof(*tensor)));
    }
    tensor = &list->tensors[list->n++];
    memset(tensor, 0, sizeof(*tensor));
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    tensor->rank = rank;
    for (uint32_t i = 0; i < rank; i++) {
        tensor->dim[i] = dim[i];
        elements *= dim[i];
    }
    tensor->fill = fill;
    tensor->dtype = list->recipe->dtype;
    tensor->bytes = elements * element_bytes(tensor->dtype);
    return tensor;
}

/* A matrix as codes and scales; its draws are those of `key` from `first` on. */
static void
add_codes(struct list *list, struct fill fill, uint64_t n, uint64_t k,
          const char *name, const char *key, uint64_t first)
{
    const uint64_t codes[3] = { n, k }, scales[3] = { n, 1 };
    char scale_name[160];
    struct tensor *tensor = add(list, fill, 2, codes, name);

    tensor->dtype = "F8_E4M3";
    tensor->bytes = n * k;
    for (int i = 0; i < 2; i++) {
        snprintf(tensor->key, sizeof(tensor->key), "%s", key);
        tensor->first = first;
        tensor->row = (uint32_t)k;
        tensor->scales = i == 1;
        if (i == 1)
            break;
        snprintf(scale_name, sizeof(scale_name), "%s_scale", name);
        tensor = add(list, fill, 2, scales, scale_name);
    }
}

/* gate_up [X, 2M, H] or down [X, H, M], expert by expert. */
static void
add_experts(struct list *list, const char *layer, struct fill fill, bool down)
{
    const struct tiny_recipe *r = list->recipe;
    uint64_t n = down ? r->hidden : r->expert_dim;
    uint64_t k = down ? r->expert_dim : r->hidden;
    uint64_t n_parts = down ? 1 : 2;
    static const char *const names[] = { "gate", "up", "down" };
    char name[160], key[160];

    snprintf(key, sizeof(key), "%sexperts.%s", layer,
             down ? "down_proj" : "gate_up_proj");
    for (uint64_t i = 0; i < r->n_experts; i++)
        for (uint64_t part = 0; part < n_parts; part++) {
            snprintf(name, sizeof(name), "%sexperts.%u.%s_proj.weight", layer,
                     (unsigned)i, names[down ? 2 : part]);
            add_codes(list, fill, n, k, name, key,
                      (i * n_parts + part) * n * k);
        }
}

static void
put(struct list *list, const char *prefix, const char *suffix,
    struct fill fill, uint32_t rank, uint64_t d0, uint64_t d1, uint64_t d2)
{
    const uint64_t dim[3] = { d0, d1, d2 };
    char name[160];

    snprintf(name, sizeof(name), "%s%s", prefix, suffix);
    if (list->recipe->fp8 && rank == 3 && strstr(name, "experts.")) {
        add_experts(list, prefix, fill, strstr(suffix, "down") != NULL);
        return;
    }
    if (list->recipe->fp8 && rank == 2 &&
        (strstr(name, ".layers.") || strstr(name, "self_conditioning")) &&
        !strstr(name, "router") && !strstr(name, "vision")) {
        add_codes(list, fill, d0, d1, name, name, 0);
        return;
    }
    add(list, fill, rank, dim, name);
    if (list->recipe->copies &&
        strncmp(prefix, "model.decoder.", 14) == 0 &&
        !strstr(name, "self_conditioning") && !strstr(name, "layer_scalar")) {
        snprintf(name, sizeof(name), "model.encoder.language_model.%s%s",
                 prefix + 14, suffix);
        add(list, fill, rank, dim, name);
        if (strcmp(suffix, "embed_tokens.weight") == 0)
            add(list, fill, rank, dim, "lm_head.weight");
    }
}

static struct fill
norm_fill(double base)
{
    return (struct fill){ .least = 0.6 * base, .most = 1.4 * base,
                          .turned_share = 0.05 };
}

static struct fill
linear_fill(double gain, uint32_t k)
{
    return (struct fill){ .gain = gain / sqrt(k) };
}

static void
norm(struct list *list, const char *prefix, const char *suffix, double base,
     uint64_t n)
{
    put(list, prefix, suffix, norm_fill(base), 1, n, 0, 0);
}

static void
linear(struct list *list, const char *prefix, const char *suffix, double gain,
       uint32_t n, uint32_t k)
{
    put(list, prefix, suffix, linear_fill(gain, k), 2, n, k, 0);
}

static bool
is_full(const struct tiny_recipe *r, uint32_t i)
{
    return i + 1 == r->n_layers || (i + 1) % r->full_every == 0;
}

static void
list_layer(struct list *list, uint32_t i)
{
    const struct tiny_recipe *r = list->recipe;
    const struct fill scalar = { .least = 0.6, .most = 1.1 };
    bool full = is_full(r, i);
    uint32_t d = full ? r->global_head_dim : r->head_dim;
    uint32_t nkv = full ? r->n_global_kv_heads : r->n_kv_heads;
    double mixing = r->mixing > 0.0f ? (double)r->mixing : 0.12;
    struct fill experts;
    char p[80];

    snprintf(p, sizeof(p), "model.encoder.language_model.layers.%u.", i);
    put(list, p, "layer_scalar", scalar, 1, 1, 0, 0);
    snprintf(p, sizeof(p), "model.decoder.layers.%u.", i);
    put(list, p, "layer_scalar", scalar, 1, 1, 0, 0);

    norm(list, p, "input_layernorm.weight", 1.0, r->hidden);
    linear(list, p, "self_attn.q_proj.weight", 1.0, r->n_heads * d,
           r->hidden);
    linear(list, p, "self_attn.k_proj.weight", 1.0, nkv * d, r->hidden);
    if (!full)
        linear(list, p, "self_attn.v_proj.weight", 1.0, nkv * d, r->hidden);
    linear(list, p, "self_attn.o_proj.weight", 1.0, r->hidden,
           r->n_heads * d);
    norm(list, p, "self_attn.q_norm.weight", 0.6, d);
    norm(list, p, "self_attn.k_norm.weight", 0.6, d);
    norm(list, p, "post_attention_layernorm.weight", mixing, r->hidden);

    norm(list, p, "pre_feedforward_layernorm.weight", 1.0, r->hidden);
    linear(list, p, "mlp.gate_proj.weight", 1.0, r->intermediate, r->hidden);
    linear(list, p, "mlp.up_proj.weight", 1.0, r->intermediate, r->hidden);
    linear(list, p, "mlp.down_proj.weight", 1.0, r->hidden, r->intermediate);
    norm(list, p, "post_feedforward_layernorm_1.weight", 1.0, r->hidden);

    norm(list, p, "pre_feedforward_layernorm_2.weight", 1.0, r->hidden);
    linear(list, p, "router.proj.weight", 3.0, r->n_experts, r->hidden);
    put(list, p, "router.scale", (struct fill){ .least = 0.5, .most = 1.5 },
        1, r->hidden, 0, 0);
    put(list, p, "router.per_expert_scale",
        (struct fill){ .least = 0.4, .most = 1.8 }, 1, r->n_experts, 0, 0);
    experts = linear_fill(1.2, r->hidden);
    experts.hole = r->sparse_experts;
    put(list, p, "experts.gate_up_proj", experts, 3, r->n_experts,
        2ull * r->expert_dim, r->hidden);
    experts = linear_fill(1.2, r->expert_dim);
    experts.hole = r->sparse_experts;
    put(list, p, "experts.down_proj", experts, 3, r->n_experts, r->hidden,
        r->expert_dim);
    norm(list, p, "post_feedforward_layernorm_2.weight", 1.0, r->hidden);
    norm(list, p, "post_feedforward_layernorm.weight", mixing, r->hidden);
}

enum { /* the tower of a checkpoint with pictures */
    V_HIDDEN = 16, V_INNER = 24, V_HEADS = 2, V_HEAD_DIM = 8, V_PATCH = 4,
    V_POOLING = 3, V_POSITIONS = 32,
};

static void
list_vision(struct list *list)
{
    const char *p = "model.encoder.vision_tower.encoder.layers.0.";
    const char *tower = "model.encoder.vision_tower.";
    const uint32_t nq = V_HEADS * V_HEAD_DIM;
    static const char *const modules[] = {
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
        "mlp.gate", "mlp.up", "mlp.down",
    };
    static const char *const limits[] = { "input_min", "input_max",
                                          "output_min", "output_max" };
    /* Where about a third of the values lie beyond. */
    const struct fill below = { .least = -0.9, .most = -0.2 };
    const struct fill above = { .least = 0.2, .most = 0.9 };

    linear(list, "model.encoder.embed_vision.",
           "embedding_projection.weight", 1.0, list->recipe->hidden,
           V_HIDDEN);
    linear(list, tower, "patch_embedder.input_proj.weight", 1.0, V_HIDDEN,
           3 * V_PATCH * V_PATCH);
    put(list, tower, "patch_embedder.position_embedding_table",
        (struct fill){ .gain = 0.5 }, 3, 2, V_POSITIONS, V_HIDDEN);
    put(list, tower, "std_bias", (struct fill){ .gain = 0.5 }, 1, V_HIDDEN, 0,
        0);
    put(list, tower, "std_scale", (struct fill){ .least = 0.2, .most = 0.6 },
        1, V_HIDDEN, 0, 0);
    for (int i = 0; i < 7 && list->recipe->clipped; i++)
        for (int j = 0; j < 4; j++) {
            char suffix[64];

            snprintf(suffix, sizeof(suffix), "%s_proj.%s", modules[i],
                     limits[j]);
            put(list, p, suffix, j % 2 ? above : below, 0, 0, 0, 0);
        }
    linear(list, p, "self_attn.q_proj.linear.weight", 1.0, nq, V_HIDDEN);
    linear(list, p, "self_attn.k_proj.linear.weight", 1.0, nq, V_HIDDEN);
    linear(list, p, "self_attn.v_proj.linear.weight", 1.0, nq, V_HIDDEN);
    linear(list, p, "self_attn.o_proj.linear.weight", 1.0, V_HIDDEN, nq);
    norm(list, p, "self_attn.q_norm.weight", 0.6, V_HEAD_DIM);
    norm(list, p, "self_attn.k_norm.weight", 0.6, V_HEAD_DIM);
    linear(list, p, "mlp.gate_proj.linear.weight", 1.0, V_INNER, V_HIDDEN);
    linear(list, p, "mlp.up_proj.linear.weight", 1.0, V_INNER, V_HIDDEN);
    linear(list, p, "mlp.down_proj.linear.weight", 1.0, V_HIDDEN, V_INNER);
    norm(list, p, "input_layernorm.weight", 0.8, V_HIDDEN);
    norm(list, p, "post_attention_layernorm.weight", 0.8, V_HIDDEN);
    norm(list, p, "pre_feedforward_layernorm.weight", 0.8, V_HIDDEN);
    norm(list, p, "post_feedforward_layernorm.weight", 0.8, V_HIDDEN);
}

static void
list_all(struct list *list)
{
    const struct tiny_recipe *r = list->recipe;
    const char *sc = "model.decoder.self_conditioning.";

    linear(list, "model.decoder.", "embed_tokens.weight", 1.0, r->vocab,
           r->hidden);
    /* A token's own logit is the gain times sqrt(H): 64, whatever H is. */
    norm(list, "model.decoder.", "norm.weight", 64.0 / sqrt(r->hidden),
         r->hidden);
    norm(list, sc, "pre_norm.weight", 1.0, r->hidden);
    linear(list, sc, "gate_proj.weight", 0.4, r->intermediate, r->hidden);
    linear(list, sc, "up_proj.weight", 0.4, r->intermediate, r->hidden);
    linear(list, sc, "down_proj.weight", 0.4, r->hidden, r->intermediate);
    for (uint32_t i = 0; i < r->n_layers; i++)
        list_layer(list, i);
    if (r->vision)
        list_vision(list);
}

/* Copies hold what the tensor that they copy holds. */
static const char *
key_name(const char *name, char *out, size_t out_size)
{
    const char *encoder = "model.encoder.language_model.";

    if (strcmp(name, "lm_head.weight") == 0)
        return "model.decoder.embed_tokens.weight";
    if (strncmp(name, encoder, strlen(encoder)) == 0 &&
        !strstr(name, "layer_scalar")) {
        snprintf(out, out_size, "model.decoder.%s", name + strlen(encoder));
        return out;
    }
    return name;
}

/* The largest first to the emptiest shard would be fair; in order and by the
 * share of bytes is what writers do. */
static void
share_out(struct list *list)
{
    uint64_t total = 0, before = 0;

    for (size_t i = 0; i < list->n; i++)
        total += list->tensors[i].bytes;
    for (size_t i = 0; i < list->n; i++) {
        list->tensors[i].shard =
            (uint32_t)(before * list->recipe->n_shards / total);
        before += list->tensors[i].bytes;
    }
}

static void
shard_name(const struct tiny_recipe *recipe, uint32_t shard, char *out,
           size_t out_size)
{
    if (recipe->n_shards <= 1)
        snprintf(out, out_size, "model.safetensors");
    else
        snprintf(out, out_size, "model-%05u-of-%05u.safetensors", shard + 1,
                 recipe->n_shards);
}

static void
write_at(int fd, const void *bytes, size_t length, uint64_t offset)
{
    const unsigned char *at = bytes;

    while (length > 0) {
        ssize_t n = pwrite(fd, at, length, (off_t)offset);

        if (n <= 0)
            die("write");
        at += n;
        length -= (size_t)n;
        offset += (uint64_t)n;
    }
}

/* The scale of a row of draws: so that its largest becomes 448, in bf16. */
static float
row_scale(const struct fill *fill, uint64_t key, uint64_t first, uint32_t n)
{
    unsigned char half[2];
    uint32_t bits;
    double most = 0;
    float scale;

    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, fabs(fill->gain * gauss(key, first + i)));
    store("BF16", most / (double)NS_E4M3_MAX, half);
    bits = (uint32_t)(half[0] | half[1] << 8) << 16;
    memcpy(&scale, &bits, sizeof(scale));
    return scale;
}

static void
write_rows(int fd, uint64_t offset, const struct tensor *tensor,
           const struct tiny_recipe *recipe, uint64_t key)
{
    uint32_t k = tensor->row;
    unsigned char *bytes = need(malloc(tensor->bytes));

    for (uint64_t row = 0; row < tensor->dim[0]; row++) {
        uint64_t first = tensor->first + row * k;
        float scale = row_scale(&tensor->fill, key, first, k);

        for (uint32_t i = 0; i < k && !tensor->scales; i++)
            bytes[row * k + i] = ns_e4m3_code(
                (float)(tensor->fill.gain * gauss(key, first + i)) / scale);
        if (tensor->scales)
            store(recipe->dtype, (double)scale,
                  bytes + row * element_bytes(recipe->dtype));
    }
    write_at(fd, bytes, tensor->bytes, offset);
    free(bytes);
}

static void
write_tensor(int fd, uint64_t offset, const struct tensor *tensor,
             const struct tiny_recipe *recipe, unsigned char *chunk)
{
    size_t size = element_bytes(recipe->dtype);
    uint64_t n = tensor->bytes / size;
    const struct fill *fill = &tensor->fill;
    char name[160];
    uint64_t key = key_of(recipe->seed,
                          tensor->key[0] ? tensor->key
                                         : key_name(tensor->name, name,
                                                    sizeof(name)));

    if (tensor->row > 0) {
        write_rows(fd, offset, tensor, recipe, key);
        return;
    }
    for (uint64_t i = 0; i < n; i += CHUNK) {
        uint64_t end = n - i < CHUNK ? n : i + CHUNK;

        for (uint64_t j = i; j < end; j++) {
            double value;

            if (fill->most > fill->least) {
                value = uniform(key, 2 * j, fill->least, fill->most);
                if (uniform(key, 2 * j + 1, 0.0, 1.0) < fill->turned_share)
                    value = -value;
            } else {
                value = fill->gain * gauss(key, j);
            }
            store(recipe->dtype, value, chunk + (j - i) * size);
        }
        write_at(fd, chunk, (end - i) * size, offset + i * size);
    }
}

static int
create_file(const char *directory, const char *name)
{
    char path[PATH_MAX];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", directory, name);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd == -1)
        die("open %s", path);
    return fd;
}

static void
write_shard(const struct list *list, uint32_t shard, const char *directory)
{
    json_t *header = need(json_object());
    unsigned char length_bytes[8], *chunk;
    uint64_t offset = 0, data_at;
    size_t length, padded;
    char name[64], *text;
    int fd;

    json_object_set_new(header, "__metadata__",
                        need(json_pack("{s:s}", "format", "pt")));
    for (size_t i = 0; i < list->n; i++) {
        const struct tensor *tensor = &list->tensors[i];
        json_t *dim = need(json_array());

        for (uint32_t j = 0; j < tensor->rank; j++)
            json_array_append_new(dim,
                                  json_integer((json_int_t)tensor->dim[j]));
        if (tensor->shard == shard) {
            uint64_t end = offset + tensor->bytes;

            json_object_set_new(
                header, tensor->name,
                need(json_pack("{s:s, s:O, s:[I, I]}", "dtype",
                               tensor->dtype, "shape", dim,
                               "data_offsets", (json_int_t)offset,
                               (json_int_t)end)));
            offset = end;
        }
        json_decref(dim);
    }
    text = need(json_dumps(header, JSON_COMPACT));
    length = strlen(text);
    padded = (length + 7) / 8 * 8;
    text = need(realloc(text, padded + 1));
    memset(text + length, ' ', padded - length);
    for (int i = 0; i < 8; i++)
        length_bytes[i] = (unsigned char)(padded >> (8 * i));

    shard_name(list->recipe, shard, name, sizeof(name));
    fd = create_file(directory, name);
    write_at(fd, length_bytes, 8, 0);
    write_at(fd, text, padded, 8);
    data_at = 8 + padded;
    if (ftruncate(fd, (off_t)(data_at + offset)) == -1)
        die("ftruncate %s", name);
    chunk = need(malloc((size_t)CHUNK * 4));
    for (size_t i = 0; i < list->n; i++) {
        const struct tensor *tensor = &list->tensors[i];

        if (tensor->shard != shard)
            continue;
        if (!tensor->fill.hole)
            write_tensor(fd, data_at, tensor, list->recipe, chunk);
        data_at += tensor->bytes;
    }
    if (close(fd) == -1)
        die("close %s", name);
    free(chunk);
    free(text);
    json_decref(header);
}

static void
write_json(const char *directory, const char *name, json_t *value)
{
    char *text = need(json_dumps(need(value), JSON_INDENT(2)));

    tiny_write_file(directory, name, text, strlen(text));
    free(text);
    json_decref(value);
}

static void
write_index(const struct list *list, const char *directory)
{
    json_t *map = need(json_object());
    uint64_t total = 0;
    char name[64];

    for (size_t i = 0; i < list->n; i++) {
        shard_name(list->recipe, list->tensors[i].shard, name, sizeof(name));
        json_object_set_new(map, list->tensors[i].name, json_string(name));
        total += list->tensors[i].bytes;
    }
    write_json(directory, "model.safetensors.index.json",
               json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                         (json_int_t)total, "weight_map", map));
}

static json_t *
text_config(const struct tiny_recipe *r)
{
    json_t *types = need(json_array()), *per_layer = need(json_object());
    json_t *text;

    for (uint32_t i = 0; i < r->n_layers; i++) {
        char key[16];

        json_array_append_new(types, json_string(is_full(r, i)
                                                     ? "full_attention"
                                                     : "sliding_attention"));
        snprintf(key, sizeof(key), "%u", i);
        if (is_full(r, i))
            json_object_set_new(
                per_layer, key,
                json_pack("{s:i, s:i}", "head_dim", (int)r->global_head_dim,
                          "num_key_value_heads", (int)r->n_global_kv_heads));
    }
    text = need(json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:O,"
        " s:s, s:s, s:s, s:b, s:b, s:f, s:f, s:i, s:i, s:i,"
        " s:{s:{s:s, s:f}, s:{s:s, s:f, s:f}}}",
        "vocab_size", (int)r->vocab, "hidden_size", (int)r->hidden,
        "intermediate_size", (int)r->intermediate,
        "num_hidden_layers", (int)r->n_layers,
        "num_attention_heads", (int)r->n_heads,
        "num_key_value_heads", (int)r->n_kv_heads,
        "head_dim", (int)r->head_dim,
        "sliding_window", (int)r->sliding_window,
        "max_position_embeddings", (int)r->max_position,
        "num_experts", (int)r->n_experts, "top_k_experts", (int)r->top_k,
        "moe_intermediate_size", (int)r->expert_dim, "layer_types", types,
        "model_type", "diffusion_gemma_text",
        "hidden_activation", "gelu_pytorch_tanh",
        "use_bidirectional_attention", "vision", "attention_bias", 0,
        "tie_word_embeddings", 1, "rms_norm_eps", 1e-6,
        "final_logit_softcapping", 30.0, "pad_token_id", 0, "bos_token_id", 2,
        "eos_token_id", 1, "rope_parameters", "sliding_attention",
        "rope_type", "default", "rope_theta", 1e4, "full_attention",
        "rope_type", "proportional", "rope_theta", 1e6,
        "partial_rotary_factor", 0.25));
    if (r->per_layer_config) {
        json_object_set(text, "per_layer_config", per_layer);
    } else {
        json_object_set_new(text, "global_head_dim",
                            json_integer(r->global_head_dim));
        json_object_set_new(text, "num_global_key_value_heads",
                            json_integer(r->n_global_kv_heads));
    }
    json_decref(types);
    json_decref(per_layer);
    return text;
}

static json_t *
vision_config(bool clipped)
{
    return need(json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b, s:b,"
        " s:s, s:b, s:{s:s, s:f}}",
        "model_type", "gemma4_vision", "hidden_size", V_HIDDEN,
        "intermediate_size", V_INNER, "num_hidden_layers", 1,
        "num_attention_heads", V_HEADS, "num_key_value_heads", V_HEADS,
        "head_dim", V_HEAD_DIM, "patch_size", V_PATCH,
        "pooling_kernel_size", V_POOLING,
        "position_embedding_size", V_POSITIONS, "rms_norm_eps", 1e-6,
        "standardize", 1, "use_clipped_linears", clipped,
        "hidden_activation", "gelu_pytorch_tanh", "attention_bias", 0,
        "rope_parameters", "rope_type", "axial", "rope_theta", 100.0));
}

/* As llm-compressor's FP8_DYNAMIC scheme writes it. */
static json_t *
fp8_config(void)
{
    return need(json_pack(
        "{s:s, s:s, s:s, s:n, s:[s, s], s:{s:{s:[s], s:n,"
        " s:{s:i, s:s, s:b, s:s, s:b, s:n, s:n, s:s},"
        " s:{s:i, s:s, s:b, s:s, s:b, s:n, s:n, s:n}}}}",
        "quant_method", "compressed-tensors", "format", "float-quantized",
        "quantization_status", "compressed", "kv_cache_scheme", "ignore",
        "lm_head", "re:.*router.*", "config_groups", "group_0", "targets",
        "Linear", "output_activations", "weights", "num_bits", 8, "type",
        "float", "symmetric", 1, "strategy", "channel", "dynamic", 0,
        "group_size", "block_structure", "observer", "minmax",
        "input_activations", "num_bits", 8, "type", "float", "symmetric", 1,
        "strategy", "token", "dynamic", 1, "group_size", "block_structure",
        "observer"));
}

static void
write_config(const struct tiny_recipe *r, const char *directory)
{
    /* The tokenizer of 512 entries has its markers here (README.md of the
     * vectors); the family's own stand where there is room for them. */
    bool small = r->vocab <= 258882;
    json_t *config = need(json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:b, s:[i, i], s:o}",
        "architectures", "DiffusionGemmaForBlockDiffusion",
        "model_type", "diffusion_gemma", "canvas_length", (int)r->canvas,
        "boi_token_id", small ? 500 : 255999,
        "image_token_id", small ? 502 : 258880,
        "eoi_token_id", small ? 501 : 258882, "tie_word_embeddings", 1,
        "eos_token_id", 1, 106, "text_config", text_config(r)));

    if (r->vision)
        json_object_set_new(config, "vision_config", vision_config(r->clipped));
    if (r->fp8)
        json_object_set_new(config, "quantization_config", fp8_config());
    write_json(directory, "config.json", config);
    write_json(directory, "generation_config.json",
               json_pack("{s:i, s:i, s:f, s:f, s:i, s:f, s:[i, i, i], s:i,"
                         " s:i, s:{s:s, s:f}}",
                         "max_new_tokens", 256, "max_denoising_steps", 48,
                         "t_min", 0.4, "t_max", 0.8, "stability_threshold", 1,
                         "confidence_threshold", 0.005, "eos_token_id", 1,
                         106, 50, "pad_token_id", 0, "bos_token_id", 2,
                         "sampler_config", "_cls_name",
                         "EntropyBoundSamplerConfig", "entropy_bound", 0.1));
}

void
tiny_write(const struct tiny_recipe *recipe, const char *directory)
{
    struct list list = { .recipe = recipe };

    list_all(&list);
    share_out(&list);
    write_config(recipe, directory);
    for (uint32_t i = 0; i < recipe->n_shards; i++)
        write_shard(&list, i, directory);
    if (recipe->n_shards > 1)
        write_index(&list, directory);
    free(list.tensors);
}

/* --- files ------------------------------------------------------------- */

char *
tiny_directory(void)
{
    const char *base = getenv("TMPDIR");
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/nightshift-XXXXXX",
             base && *base ? base : "/tmp");
    if (!mkdtemp(path))
        die("mkdtemp %s", path);
    return need(strdup(path));
}

char *
tiny_make(const struct tiny_recipe *recipe)
{
    char *directory = tiny_directory();

    tiny_write(recipe, directory);
    return directory;
}

void
tiny_remove(char *directory)
{
    char path[PATH_MAX];
    struct dirent *entry;
    DIR *dir;

    if (!directory)
        return;
    dir = opendir(directory);
    if (!dir)
        die("opendir %s", directory);
    while ((entry = readdir(dir))) {
        if (strcmp(entry->d_name, ".") == 0 ||
            strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
        if (unlink(path) == -1)
            die("unlink %s", path);
    }
    closedir(dir);
    if (rmdir(directory) == -1)
        die("rmdir %s", directory);
    free(directory);
}

void *
tiny_read_file(const char *directory, const char *name, size_t *length)
{
    char path[PATH_MAX], *bytes;
    struct stat st;
    size_t got = 0;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", directory, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1 || fstat(fd, &st) == -1)
        die("open %s", path);
    bytes = need(malloc((size_t)st.st_size + 1));
    while (got < (size_t)st.st_size) {
        ssize_t n = read(fd, bytes + got, (size_t)st.st_size - got);

        if (n <= 0)
            die("read %s", path);
        got += (size_t)n;
    }
    close(fd);
    bytes[got] = '\0';
    *length = got;
    return bytes;
}

void
tiny_write_file(const char *directory, const char *name, const void *bytes,
                size_t length)
{
    int fd = create_file(directory, name);

    write_at(fd, bytes, length, 0);
    if (close(fd) == -1)
        die("close %s", name);
}

void
tiny_add_tokenizer(const char *directory)
{
    size_t length;
    void *bytes = tiny_read_file("tests/cases/tokenizer/tiny",
                                 "tokenizer.json", &length);

    tiny_write_file(directory, "tokenizer.json", bytes, length);
    free(bytes);
}
