/* vocabulary.h - the tokens by their bytes: which of them go on in a grammar.
 *
 * A trie in depth-first order, so that a walk is one loop: a byte that leads
 * nowhere skips all that begins with it. Control tokens and ids without bytes
 * are not in it, and so no grammar ever lets them through.
 *
 * Owns:   its tables. Const after create: any thread.
 */
#ifndef NS_ENGINE_VOCABULARY_H
#define NS_ENGINE_VOCABULARY_H

#include <stdint.h>

#include "engine/automaton.h"
#include "engine/tokenizer.h"

enum { NS_TOKEN_BYTES = 256 }; /* longer tokens are left out */

struct ns_vocabulary; /* opaque */

enum ns_status ns_vocabulary_create(const struct ns_tokenizer *tokenizer,
                                    struct ns_vocabulary **out,
                                    struct ns_error *err);
void ns_vocabulary_destroy(struct ns_vocabulary *vocabulary); /* takes NULL */

/* Sets bit id % 32 of word id / 32 of every token that can follow in `state`.
 * False when the automaton is full: the bits are then not to be used. */
bool ns_vocabulary_mask(const struct ns_vocabulary *vocabulary,
                        struct ns_automaton *automaton, uint32_t state,
                        uint32_t *bits);

/* Whether the token has bytes. */
bool ns_vocabulary_has(const struct ns_vocabulary *vocabulary, int32_t id);

/* The state behind the token; NS_AUTOMATON_DEAD also for one without bytes. */
uint32_t ns_vocabulary_next(const struct ns_vocabulary *vocabulary,
                            struct ns_automaton *automaton, uint32_t state,
                            int32_t id);

/* The longest token along a shortest end of what stands in `state`, which is
 * not whole; -1 when there is none. */
int32_t ns_vocabulary_shortest(const struct ns_vocabulary *vocabulary,
                               struct ns_automaton *automaton, uint32_t state);

#endif
