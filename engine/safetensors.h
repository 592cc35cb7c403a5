/* safetensors.h - a checkpoint's tensors, mapped and checked.
 *
 * Opens model.safetensors, or the shards that model.safetensors.index.json
 * names, in one directory. Headers are input and lie: lengths, names, dtypes,
 * shapes and offsets are checked against the file before anything of its data
 * is used. Refused, naming file and tensor: a truncated or missing shard, an
 * index that points at the wrong shard or escapes the directory, offsets out
 * of range, overlapping or leaving holes, a header longer than the file or
 * the limit, trailing bytes, a shape that does not fit its byte range,
 * duplicate names.
 *
 * Where model.safetensors and an index both lie there, the single file is
 * taken, as the reference does. Tensor and shard names are printable ASCII
 * without blanks, so they may be shown as they are. What is not guarded
 * against: a file that is cut while it is mapped kills the process.
 *
 * Owns:   the mappings; tensors point into them until close.
 * Thread: const after open, but for the `used` marks, which the opener sets.
 */
#ifndef NS_ENGINE_SAFETENSORS_H
#define NS_ENGINE_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { NS_MAX_RANK = 8 };

enum ns_stored { /* as the file names them */
    NS_STORED_F64, NS_STORED_F32, NS_STORED_F16, NS_STORED_BF16,
    NS_STORED_F8_E4M3, NS_STORED_F8_E5M2, NS_STORED_I64, NS_STORED_I32,
    NS_STORED_I16, NS_STORED_I8, NS_STORED_U64, NS_STORED_U32, NS_STORED_U16,
    NS_STORED_U8, NS_STORED_BOOL,
};

struct ns_stored_tensor {
    const char *name;
    enum ns_stored dtype;
    uint32_t rank;
    uint64_t dim[NS_MAX_RANK];
    const void *data; /* borrowed from the mapping, any alignment */
    size_t bytes;
    uint32_t shard;
    bool used; /* set by ns_safetensors_find */
};

struct ns_safetensors;

enum ns_status ns_safetensors_open(const char *directory,
                                   struct ns_safetensors **out,
                                   struct ns_error *err);
/* One file by its path (test vectors). */
enum ns_status ns_safetensors_open_file(const char *path,
                                        struct ns_safetensors **out,
                                        struct ns_error *err);
/* Header alone, for the fuzzer: checks `length` bytes as a whole file. */
enum ns_status ns_safetensors_check(const void *bytes, size_t length,
                                    const char *name, struct ns_error *err);
void ns_safetensors_close(struct ns_safetensors *st); /* takes NULL */

/* NULL if there is no such tensor. Marks it used. */
const struct ns_stored_tensor *ns_safetensors_find(struct ns_safetensors *st,
                                                   const char *name);
/* All tensors, sorted by name. */
const struct ns_stored_tensor *ns_safetensors_all(
    const struct ns_safetensors *st, size_t *n);
const char *ns_safetensors_shard_name(const struct ns_safetensors *st,
                                      uint32_t shard);
const char *ns_stored_name(enum ns_stored dtype);

/* The index's bytes, for the revision; NULL for a single file. */
const void *ns_safetensors_index(const struct ns_safetensors *st,
                                 size_t *length);
uint32_t ns_safetensors_n_shards(const struct ns_safetensors *st);
/* A shard's header with the eight bytes of its length in front, and the size
 * of the file that it describes. */
const void *ns_safetensors_header(const struct ns_safetensors *st,
                                  uint32_t shard, size_t *length,
                                  size_t *file_bytes);

/* Asks for a tensor's pages ahead of reading them, and lets go of them behind:
 * what was packed need not stay resident twice. Only advice: the bytes may be
 * read at any time. */
void ns_safetensors_want(const struct ns_safetensors *st,
                         const struct ns_stored_tensor *tensor);
void ns_safetensors_drop(const struct ns_safetensors *st,
                         const struct ns_stored_tensor *tensor);

#endif
