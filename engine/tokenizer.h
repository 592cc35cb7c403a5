/* tokenizer.h - tokenizer.json: text to token ids and back.
 *
 * BPE with byte fallback as the Gemma family writes it: added tokens cut the
 * text, spaces become U+2581, merges run over Unicode characters. The file is
 * input and is not trusted: sizes, ids and merges are checked.
 *
 * Job text can never yield a control token. A prompt is a list of spans, each
 * trusted (the chat template) or not (the job). The ids are those of the
 * joined text, merges running across span borders, except that control tokens
 * match only where they lie wholly inside one trusted span. Control tokens are
 * all added tokens flagged "special", the markers of the chat format,
 * <unusedN>, [multimodal] and <mask>; other added tokens (runs of newlines
 * and the like) match everywhere.
 *
 * Owns:   its tables. Const after open: any number of threads may share it.
 */
#ifndef NS_ENGINE_TOKENIZER_H
#define NS_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"

struct ns_tokenizer;

struct ns_span {
    const char *text; /* borrowed; well-formed UTF-8, NUL bytes allowed */
    size_t length;
    bool trusted;
};

/* A growing list of ids, born with a limit; zero it, set limit, then fini. */
struct ns_ids {
    int32_t *id;
    size_t n, capacity, limit;
};

enum ns_status ns_tokenizer_open(const char *path, struct ns_tokenizer **out,
                                 struct ns_error *err);
/* The same from memory; `name` stands in errors. */
enum ns_status ns_tokenizer_parse(const char *json, size_t length,
                                  const char *name, struct ns_tokenizer **out,
                                  struct ns_error *err);
void ns_tokenizer_close(struct ns_tokenizer *tokenizer); /* takes NULL */

/* One more than the highest id. */
uint32_t ns_tokenizer_size(const struct ns_tokenizer *tokenizer);

/* Id of the token with exactly this content, added or not; -1 if none. */
int32_t ns_tokenizer_id(const struct ns_tokenizer *tokenizer,
                        const char *content);
/* Content of a token as the file has it; NULL for an id that is not there. */
const char *ns_tokenizer_content(const struct ns_tokenizer *tokenizer,
                                 int32_t id);
/* The bytes that a token stands for in a text. 0 for a control token, an id that
 * is not there, and one of more than `room` bytes. */
size_t ns_tokenizer_bytes(const struct ns_tokenizer *tokenizer, int32_t id,
                          char *out, size_t room);
/* Whether job text must never yield this id, and content never shows it. */
bool ns_tokenizer_is_control(const struct ns_tokenizer *tokenizer, int32_t id);
/* Whether the file itself flags it "special": most, but not all of these. */
bool ns_tokenizer_is_special(const struct ns_tokenizer *tokenizer, int32_t id);

/* Appends the ids of the joined spans. NS_REJECT with code over_context when
 * `out->limit` is met, bad_text for text that is not UTF-8. No <bos> is added:
 * the template writes it as a trusted span. */
enum ns_status ns_tokenizer_encode(const struct ns_tokenizer *tokenizer,
                                   const struct ns_span *spans, size_t n_spans,
                                   struct ns_ids *out, struct ns_error *err);

void ns_ids_fini(struct ns_ids *ids);
enum ns_status ns_ids_add(struct ns_ids *ids, int32_t id,
                          struct ns_error *err);

/* Decoding, token by token: what is not yet a whole character waits. A run of
 * byte tokens that is not valid UTF-8 gives one U+FFFD a byte of the run. */
struct ns_decoder {
    unsigned char pending[4096]; /* the current run of byte tokens */
    size_t n_pending;
};

void ns_decoder_init(struct ns_decoder *decoder);
/* Appends what `id` completes. Control tokens are left out when skip_control
 * (and then do not separate byte runs), else written as their content. A run
 * longer than `pending` is flushed up to its last whole character. */
void ns_decoder_push(struct ns_decoder *decoder,
                     const struct ns_tokenizer *tokenizer, int32_t id,
                     bool skip_control, struct ns_buf *out);
void ns_decoder_flush(struct ns_decoder *decoder, struct ns_buf *out);

/* All of it at once. */
void ns_tokenizer_decode(const struct ns_tokenizer *tokenizer,
                         const int32_t *ids, size_t n, bool skip_control,
                         struct ns_buf *out);

#endif
