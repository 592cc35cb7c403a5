#include "engine/safetensors.h"

#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/reader.h"
#include "base/size.h"
#include "engine/json.h"

enum {
    LENGTH_BYTES = 8, /* of the header's length, in front of it */
    MAX_HEADER_BYTES = 32 << 20,
    MAX_INDEX_BYTES = 64 << 20,
    MAX_SHARDS = 1024,
    MAX_NAME = 200, /* a tensor's or a shard's: fits an error with its path */
};

static const struct {
    const char *name;
    size_t bytes;
} stored[] = {
    [NS_STORED_F64] = { "F64", 8 },         [NS_STORED_F32] = { "F32", 4 },
    [NS_STORED_F16] = { "F16", 2 },         [NS_STORED_BF16] = { "BF16", 2 },
    [NS_STORED_F8_E4M3] = { "F8_E4M3", 1 }, [NS_STORED_F8_E5M2] = { "F8_E5M2",
                                                                    1 },
    [NS_STORED_I64] = { "I64", 8 },         [NS_STORED_I32] = { "I32", 4 },
    [NS_STORED_I16] = { "I16", 2 },         [NS_STORED_I8] = { "I8", 1 },
    [NS_STORED_U64] = { "U64", 8 },         [NS_STORED_U32] = { "U32", 4 },
    [NS_STORED_U16] = { "U16", 2 },         [NS_STORED_U8] = { "U8", 1 },
    [NS_STORED_BOOL] = { "BOOL", 1 },
};
enum { N_STORED = sizeof(stored) / sizeof(stored[0]) };

struct shard {
    const char *name, *path;     /* in the arena */
    const unsigned char *bytes;  /* the whole file */
    size_t length, header_bytes; /* the eight bytes of its length included */
    bool mapped;                 /* by us: unmap at close */
};

struct ns_safetensors {
    struct ns_arena *arena; /* names and paths */
    struct shard *shards;
    uint32_t n_shards;
    struct ns_stored_tensor *tensors; /* sorted by name once open */
    size_t n, capacity;
    struct ns_buf index; /* bytes of the index; empty for a single file */
};

static enum ns_status
no_memory(const char *path, struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory opening %s", path);
}

/* Names come from the file and go into errors and paths. */
static bool
plain_name(const char *name)
{
    size_t length = strlen(name);

    if (length == 0 || length > MAX_NAME)
        return false;
    for (size_t i = 0; i < length; i++)
        if (name[i] <= ' ' || name[i] > '~')
            return false;
    return true;
}

static const unsigned char *
data_of(const struct shard *shard)
{
    return shard->bytes + shard->header_bytes;
}

static enum ns_status
refuse(const struct shard *shard, const char *tensor, const char *field,
       const json_t *value, struct ns_error *err)
{
    char shown[64];

    return ns_fail(err, NS_REJECT, "%s: tensor %s: %s is %s", shard->path,
                   tensor, field,
                   ns_json_show(value, shown, sizeof(shown)));
}

/* A tensor's room, or NULL. */
static struct ns_stored_tensor *
add_tensor(struct ns_safetensors *st)
{
    if (st->n == st->capacity) {
        size_t capacity = st->capacity ? st->capacity * 2 : 64;
        struct ns_stored_tensor *tensors;
        size_t bytes;

        if (!ns_size_mul(capacity, sizeof(*tensors), &bytes))
            return NULL;
        tensors = realloc(st->tensors, bytes);
        if (!tensors)
            return NULL;
        st->tensors = tensors;
        st->capacity = capacity;
    }
    memset(&st->tensors[st->n], 0, sizeof(st->tensors[0]));
    return &st->tensors[st->n];
}

static enum ns_status
take_shape(const struct shard *shard, const char *name, const json_t *shape,
           struct ns_stored_tensor *tensor, struct ns_error *err)
{
    size_t bytes = stored[tensor->dtype].bytes;

    if (!json_is_array(shape))
        return refuse(shard, name, "shape", shape, err);
    if (json_array_size(shape) > NS_MAX_RANK)
        return ns_fail(err, NS_REJECT,
                       "%s: tensor %s: shape has %zu dimensions, limit %d",
                       shard->path, name, json_array_size(shape), NS_MAX_RANK);
    tensor->rank = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        const json_t *dim = json_array_get(shape, i);

        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return refuse(shard, name, "a dimension of shape", dim, err);
        tensor->dim[i] = (uint64_t)json_integer_value(dim);
        if (!ns_size_mul(bytes, tensor->dim[i], &bytes))
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s: shape overflows at dimension %u",
                           shard->path, name, i);
    }
    tensor->bytes = bytes;
    return NS_OK;
}

/* data_offsets against the file and against the shape. */
static enum ns_status
take_range(const struct shard *shard, const char *name, const json_t *offsets,
           struct ns_stored_tensor *tensor, struct ns_error *err)
{
    size_t data_bytes = shard->length - shard->header_bytes;
    uint64_t at[2];

    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return refuse(shard, name, "data_offsets", offsets, err);
    for (size_t i = 0; i < 2; i++) {
        const json_t *offset = json_array_get(offsets, i);

        if (!json_is_integer(offset) || json_integer_value(offset) < 0)
            return refuse(shard, name, "an entry of data_offsets", offset,
                          err);
        at[i] = (uint64_t)json_integer_value(offset);
    }
    if (at[0] > at[1])
        return ns_fail(err, NS_REJECT,
                       "%s: tensor %s: data_offsets run backwards, %" PRIu64
                       " to %" PRIu64, shard->path, name, at[0], at[1]);
    if (at[1] > data_bytes)
        return ns_fail(err, NS_REJECT,
                       "%s: tensor %s ends at byte %" PRIu64 " of the data, "
                       "the file holds %zu: truncated or wrong offsets",
                       shard->path, name, at[1], data_bytes);
    if (at[1] - at[0] != tensor->bytes)
        return ns_fail(err, NS_REJECT,
                       "%s: tensor %s: its shape takes %zu bytes, its "
                       "data_offsets give %" PRIu64, shard->path, name,
                       tensor->bytes, at[1] - at[0]);
    tensor->data = data_of(shard) + at[0];
    return NS_OK;
}

static enum ns_status
take_tensor(struct ns_safetensors *st, uint32_t shard_index, const char *name,
            const json_t *entry, struct ns_error *err)
{
    const struct shard *shard = &st->shards[shard_index];
    struct ns_stored_tensor *tensor;
    const json_t *dtype;
    enum ns_status status;
    uint32_t i;

    if (!plain_name(name))
        return ns_fail(err, NS_REJECT,
                       "%s: the name of tensor %zu is empty, longer than %d "
                       "bytes, or not printable ASCII", shard->path, st->n,
                       MAX_NAME);
    tensor = add_tensor(st);
    if (!tensor)
        return no_memory(shard->path, err);
    tensor->shard = shard_index;
    tensor->name = ns_arena_text(st->arena, name, strlen(name));
    if (!tensor->name)
        return no_memory(shard->path, err);

    dtype = json_object_get(entry, "dtype");
    for (i = 0; i < N_STORED; i++)
        if (json_is_string(dtype) &&
            strcmp(json_string_value(dtype), stored[i].name) == 0)
            break;
    if (i == N_STORED)
        return refuse(shard, name, "dtype", dtype, err);
    tensor->dtype = (enum ns_stored)i;
    status = take_shape(shard, name, json_object_get(entry, "shape"), tensor,
                        err);
    if (status == NS_OK)
        status = take_range(shard, name,
                            json_object_get(entry, "data_offsets"), tensor,
                            err);
    if (status == NS_OK)
        st->n++;
    return status;
}

static int
by_place(const void *a, const void *b)
{
    const struct ns_stored_tensor *x = a, *y = b;

    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int
by_name(const void *a, const void *b)
{
    const struct ns_stored_tensor *x = a, *y = b;

    return strcmp(x->name, y->name);
}

static void
sort(struct ns_stored_tensor *tensors, size_t n,
     int (*compare)(const void *, const void *))
{
    if (n > 1) /* none: there may be no array */
        qsort(tensors, n, sizeof(*tensors), compare);
}

/* A shard's tensors lie one behind the other and fill its data. */
static enum ns_status
check_places(const struct shard *shard, struct ns_stored_tensor *tensors,
             size_t n, struct ns_error *err)
{
    const unsigned char *at = data_of(shard);
    const unsigned char *end = shard->bytes + shard->length;

    sort(tensors, n, by_place);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *data = tensors[i].data;

        if (data < at)
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s overlaps tensor %s by %td bytes",
                           shard->path, tensors[i].name, tensors[i - 1].name,
                           at - data);
        if (data > at)
            return ns_fail(err, NS_REJECT,
                           "%s: %td bytes in front of tensor %s belong to no "
                           "tensor", shard->path, data - at, tensors[i].name);
        at = data + tensors[i].bytes;
    }
    if (at != end)
        return ns_fail(err, NS_REJECT,
                       "%s: %td trailing bytes behind the last tensor",
                       shard->path, end - at);
    return NS_OK;
}

/* The header of the shard added last. */
static enum ns_status
parse_shard(struct ns_safetensors *st, struct ns_error *err)
{
    uint32_t shard_index = st->n_shards - 1;
    struct shard *shard = &st->shards[shard_index];
    struct ns_reader reader = ns_reader_over(shard->bytes, shard->length);
    size_t first = st->n;
    json_t *header = NULL, *entry;
    enum ns_status status;
    const char *name;
    uint64_t length;

    if (!ns_reader_u64le(&reader, &length))
        return ns_fail(err, NS_REJECT,
                       "%s: %zu bytes, a safetensors file has 8 at least",
                       shard->path, shard->length);
    if (length > ns_reader_left(&reader))
        return ns_fail(err, NS_REJECT,
                       "%s: the header is said to be %" PRIu64 " bytes long, "
                       "the file has %zu behind its length", shard->path,
                       length, ns_reader_left(&reader));
    if (length > MAX_HEADER_BYTES)
        return ns_fail(err, NS_REJECT,
                       "%s: the header is %" PRIu64 " bytes long, limit %d",
                       shard->path, length, MAX_HEADER_BYTES);
    shard->header_bytes = LENGTH_BYTES + (size_t)length;

    status = ns_json_parse((const char *)reader.at, (size_t)length,
                           shard->path, &header, err);
    if (status != NS_OK)
        goto out;
    if (!json_is_object(header)) {
        status = ns_fail(err, NS_REJECT, "%s: the header is not an object",
                         shard->path);
        goto out;
    }
    json_object_foreach (header, name, entry) {
        if (strcmp(name, "__metadata__") == 0)
            continue; /* free text for people */
        status = take_tensor(st, shard_index, name, entry, err);
        if (status != NS_OK)
            goto out;
    }
    status = check_places(shard, st->tensors + first, st->n - first, err);
out:
    json_decref(header);
    return status;
}

/* Room for one shard more; its bytes are the caller's to fill in. */
static struct shard *
add_shard(struct ns_safetensors *st, const char *name, const char *path)
{
    struct shard *shards =
        realloc(st->shards, (st->n_shards + 1u) * sizeof(*shards));
    struct shard *shard;

    if (!shards)
        return NULL;
    st->shards = shards;
    shard = &shards[st->n_shards];
    memset(shard, 0, sizeof(*shard));
    shard->bytes = (const unsigned char *)"";
    shard->name = ns_arena_text(st->arena, name, strlen(name));
    shard->path = ns_arena_text(st->arena, path, strlen(path));
    if (!shard->name || !shard->path)
        return NULL;
    st->n_shards++;
    return shard;
}

static enum ns_status
open_shard(struct ns_safetensors *st, const char *name, const char *path,
           struct ns_error *err)
{
    struct shard *shard;
    enum ns_status status = NS_OK;
    struct stat info;
    void *map;
    int fd;

    /* Not blocking: a fifo under that name must not hang the start. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "open %s", path);
    if (fstat(fd, &info) == -1) {
        status = ns_fail_errno(err, NS_REJECT, "stat %s", path);
        goto out;
    }
    if (!S_ISREG(info.st_mode)) {
        status = ns_fail(err, NS_REJECT, "%s: not a regular file", path);
        goto out;
    }
    shard = add_shard(st, name, path);
    if (!shard) {
        status = no_memory(path, err);
        goto out;
    }
    if (info.st_size > 0) { /* an empty file cannot be mapped */
        map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            status = ns_fail_errno(err, NS_FATAL, "map %s", path);
            goto out;
        }
        shard->bytes = map;
        shard->length = (size_t)info.st_size;
        shard->mapped = true;
    }
    status = parse_shard(st, err);
out:
    close(fd); /* the mapping outlives it */
    return status;
}

/* NULL when there is no memory; `err` then says so. */
static struct ns_safetensors *
create(const char *path, struct ns_error *err)
{
    struct ns_safetensors *st = calloc(1, sizeof(*st));

    if (!st) {
        (void)no_memory(path, err);
        return NULL;
    }
    ns_buf_init(&st->index, MAX_INDEX_BYTES);
    if (ns_arena_create(0, &st->arena, err) != NS_OK) {
        free(st);
        return NULL;
    }
    return st;
}

void
ns_safetensors_close(struct ns_safetensors *st)
{
    if (!st)
        return;
    for (uint32_t i = 0; i < st->n_shards; i++)
        if (st->shards[i].mapped)
            munmap((void *)st->shards[i].bytes, st->shards[i].length);
    ns_buf_fini(&st->index);
    free(st->tensors);
    free(st->shards);
    ns_arena_destroy(st->arena);
    free(st);
}

static enum ns_status
sort_tensors(struct ns_safetensors *st, struct ns_error *err)
{
    sort(st->tensors, st->n, by_name);
    for (size_t i = 1; i < st->n; i++) {
        const struct ns_stored_tensor *a = &st->tensors[i - 1];
        const struct ns_stored_tensor *b = &st->tensors[i];

        if (strcmp(a->name, b->name) == 0) /* two shards: JSON has no two */
            return ns_fail(err, NS_REJECT, "tensor %s is in %s and in %s",
                           a->name, st->shards[a->shard].path,
                           st->shards[b->shard].path);
    }
    return NS_OK;
}

static struct ns_stored_tensor *
lookup(const struct ns_safetensors *st, const char *name)
{
    struct ns_stored_tensor key = { .name = name };

    if (st->n == 0)
        return NULL;
    return bsearch(&key, st->tensors, st->n, sizeof(key), by_name);
}

/* The distinct shards that the map names, as keys of `shards`. */
static enum ns_status
collect_shards(const char *path, const json_t *map, json_t *shards,
               struct ns_error *err)
{
    const char *name;
    json_t *value;

    json_object_foreach ((json_t *)map, name, value) {
        const char *shard = json_string_value(value);
        char shown[64];

        if (!plain_name(name))
            return ns_fail(err, NS_REJECT,
                           "%s: a tensor's name is empty, longer than %d "
                           "bytes, or not printable ASCII", path, MAX_NAME);
        /* No slash and no leading dot: nothing outside the directory. */
        if (!shard || !plain_name(shard) || strchr(shard, '/') ||
            shard[0] == '.')
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s: the shard %s is not a file name",
                           path, name,
                           ns_json_show(value, shown, sizeof(shown)));
        if (json_object_set(shards, shard, json_true()) != 0)
            return no_memory(path, err);
    }
    if (json_object_size(shards) == 0)
        return ns_fail(err, NS_REJECT, "%s: weight_map names no tensor", path);
    if (json_object_size(shards) > MAX_SHARDS)
        return ns_fail(err, NS_REJECT, "%s: %zu shards, limit %d", path,
                       json_object_size(shards), MAX_SHARDS);
    return NS_OK;
}

/* The map and the shards say the same of every tensor. */
static enum ns_status
check_map(const struct ns_safetensors *st, const char *path,
          const json_t *map, struct ns_error *err)
{
    const char *name;
    json_t *value;

    json_object_foreach ((json_t *)map, name, value) {
        const struct ns_stored_tensor *tensor = lookup(st, name);
        const char *said = json_string_value(value);

        if (!tensor)
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s should be in %s, which does not "
                           "hold it", path, name, said);
        if (strcmp(st->shards[tensor->shard].name, said) != 0)
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s should be in %s, but it is in %s",
                           path, name, said,
                           st->shards[tensor->shard].name);
    }
    for (size_t i = 0; i < st->n; i++)
        if (!json_object_get(map, st->tensors[i].name))
            return ns_fail(err, NS_REJECT,
                           "%s: tensor %s of %s is not in the index", path,
                           st->tensors[i].name,
                           st->shards[st->tensors[i].shard].name);
    return NS_OK;
}

static int
by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static enum ns_status
open_index(struct ns_safetensors *st, const char *directory, const char *path,
           struct ns_error *err)
{
    json_t *root = NULL, *shards = NULL;
    const char **names = NULL, *name;
    const json_t *map;
    enum ns_status status;
    char shard[PATH_MAX];
    json_t *value;
    size_t n = 0;

    status = ns_json_parse(st->index.data, st->index.length, path, &root,
                           err);
    if (status != NS_OK)
        goto out;
    map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        status = ns_fail(err, NS_REJECT, "%s: weight_map is not an object",
                         path);
        goto out;
    }
    shards = json_object();
    if (!shards) {
        status = no_memory(path, err);
        goto out;
    }
    status = collect_shards(path, map, shards, err);
    if (status != NS_OK)
        goto out;

    names = calloc(json_object_size(shards), sizeof(*names));
    if (!names) {
        status = no_memory(path, err);
        goto out;
    }
    json_object_foreach (shards, name, value)
        names[n++] = name;
    qsort(names, n, sizeof(*names), by_text);
    for (size_t i = 0; i < n; i++) {
        if ((size_t)snprintf(shard, sizeof(shard), "%s/%s", directory,
                             names[i]) >= sizeof(shard)) {
            status = ns_fail(err, NS_REJECT, "%s: path too long", directory);
            goto out;
        }
        status = open_shard(st, names[i], shard, err);
        if (status != NS_OK)
            goto out;
    }
    status = sort_tensors(st, err);
    if (status == NS_OK)
        status = check_map(st, path, map, err);
out:
    free(names);
    json_decref(shards);
    json_decref(root);
    return status;
}

enum ns_status
ns_safetensors_open(const char *directory, struct ns_safetensors **out,
                    struct ns_error *err)
{
    struct ns_safetensors *st;
    char single[PATH_MAX], index[PATH_MAX];
    enum ns_status status;
    bool absent;

    if ((size_t)snprintf(index, sizeof(index),
                         "%s/model.safetensors.index.json",
                         directory) >= sizeof(index))
        return ns_fail(err, NS_REJECT, "%s: path too long", directory);
    snprintf(single, sizeof(single), "%s/model.safetensors", directory);
    if (access(single, F_OK) == 0)
        return ns_safetensors_open_file(single, out, err);

    st = create(index, err);
    if (!st)
        return err->status;
    status = ns_file_read(index, MAX_INDEX_BYTES, &st->index, &absent, err);
    if (status != NS_OK)
        goto out;
    if (absent) {
        status = ns_fail(err, NS_REJECT,
                         "%s: neither model.safetensors nor "
                         "model.safetensors.index.json is there", directory);
        goto out;
    }
    status = open_index(st, directory, index, err);
    if (status != NS_OK)
        goto out;
    *out = st;
    st = NULL;
out:
    ns_safetensors_close(st);
    return status;
}

enum ns_status
ns_safetensors_open_file(const char *path, struct ns_safetensors **out,
                         struct ns_error *err)
{
    const char *slash = strrchr(path, '/');
    struct ns_safetensors *st = create(path, err);
    enum ns_status status;

    if (!st)
        return err->status;
    status = open_shard(st, slash ? slash + 1 : path, path, err);
    if (status == NS_OK)
        status = sort_tensors(st, err);
    if (status == NS_OK) {
        *out = st;
        st = NULL;
    }
    ns_safetensors_close(st);
    return status;
}

enum ns_status
ns_safetensors_check(const void *bytes, size_t length, const char *name,
                     struct ns_error *err)
{
    struct ns_safetensors *st = create(name, err);
    enum ns_status status;
    struct shard *shard;

    if (!st)
        return err->status;
    shard = add_shard(st, name, name);
    if (shard) {
        shard->bytes = bytes;
        shard->length = length;
        status = parse_shard(st, err);
    } else {
        status = no_memory(name, err);
    }
    ns_safetensors_close(st);
    return status;
}

const struct ns_stored_tensor *
ns_safetensors_find(struct ns_safetensors *st, const char *name)
{
    struct ns_stored_tensor *tensor = lookup(st, name);

    if (tensor)
        tensor->used = true;
    return tensor;
}

const struct ns_stored_tensor *
ns_safetensors_all(const struct ns_safetensors *st, size_t *n)
{
    *n = st->n;
    return st->tensors;
}

const char *
ns_safetensors_shard_name(const struct ns_safetensors *st, uint32_t shard)
{
    return st->shards[shard].name;
}

const char *
ns_stored_name(enum ns_stored dtype)
{
    return stored[dtype].name;
}

const void *
ns_safetensors_index(const struct ns_safetensors *st, size_t *length)
{
    *length = st->index.length;
    return st->index.data;
}

uint32_t
ns_safetensors_n_shards(const struct ns_safetensors *st)
{
    return st->n_shards;
}

const void *
ns_safetensors_header(const struct ns_safetensors *st, uint32_t shard,
                      size_t *length, size_t *file_bytes)
{
    *length = st->shards[shard].header_bytes;
    *file_bytes = st->shards[shard].length;
    return st->shards[shard].bytes;
}

/* madvise takes whole pages; a neighbour's bytes in the first and last one are
 * read again from the file when they are wanted. */
static void
advise(const struct ns_safetensors *st, const struct ns_stored_tensor *tensor,
       int advice)
{
    const struct shard *shard = &st->shards[tensor->shard];
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t from = (size_t)((const unsigned char *)tensor->data - shard->bytes);
    size_t start = from / page * page;

    if (shard->mapped && tensor->bytes > 0)
        (void)madvise((void *)(shard->bytes + start),
                      from + tensor->bytes - start, advice);
}

void
ns_safetensors_want(const struct ns_safetensors *st,
                    const struct ns_stored_tensor *tensor)
{
    advise(st, tensor, MADV_WILLNEED);
}

void
ns_safetensors_drop(const struct ns_safetensors *st,
                    const struct ns_stored_tensor *tensor)
{
    advise(st, tensor, MADV_DONTNEED);
}
