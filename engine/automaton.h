/* automaton.h - a grammar as it runs: states, and what a byte does to them.
 *
 * A state is a set of places in the program, each with the calls that it is
 * inside of. States are made when they are first asked for and kept, and so
 * are the ways between them: where a way is known, a step is two loads. Stacks
 * of calls are kept once each and shared, so that recursion is exact at any
 * depth, and two ways to one set of places are one state.
 *
 * A state is a number, good until ns_automaton_reset or destroy. All but
 * NS_AUTOMATON_DEAD and NS_AUTOMATON_FULL can still come to an end, by
 * ns_automaton_rest bytes at least.
 *
 *     state = ns_automaton_start(a);
 *     while (length-- > 0)
 *         state = ns_automaton_next(a, state, *text++);
 *     valid = ns_automaton_accepts(a, state);
 *
 * Owns:   a copy of the grammar's program, so it may outlive the grammar; its
 *         states, in at most `limit_bytes`.
 * Thread: one at a time (the engine's): asking makes states.
 */
#ifndef NS_ENGINE_AUTOMATON_H
#define NS_ENGINE_AUTOMATON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/grammar.h"

#define NS_AUTOMATON_DEAD 0u         /* no text goes on like this */
#define NS_AUTOMATON_FULL UINT32_MAX /* `limit_bytes` are in use */

struct ns_automaton; /* opaque */

/* NS_REJECT with code `grammar_limit` when the program and its first state do
 * not fit the limit, NS_FATAL when memory runs out. */
enum ns_status ns_automaton_create(const struct ns_grammar *grammar,
                                   size_t limit_bytes,
                                   struct ns_automaton **out,
                                   struct ns_error *err);
void ns_automaton_destroy(struct ns_automaton *a); /* takes NULL */

uint32_t ns_automaton_start(const struct ns_automaton *a);

/* NS_AUTOMATON_FULL when the state would be a new one and finds no room (or
 * no memory): then ns_automaton_reset, and the texts again from the start. A
 * text that does not fit an empty automaton never will. From DEAD and FULL
 * there is no way but to themselves. */
uint32_t ns_automaton_next(struct ns_automaton *a, uint32_t state,
                           uint8_t byte);

/* The text so far is whole. */
bool ns_automaton_accepts(const struct ns_automaton *a, uint32_t state);

/* It is whole, and nothing can follow. */
bool ns_automaton_ended(const struct ns_automaton *a, uint32_t state);

/* Least number of bytes to a whole text; 0 where it is whole, UINT32_MAX for
 * DEAD and FULL. */
uint32_t ns_automaton_rest(const struct ns_automaton *a, uint32_t state);

/* The next byte of one shortest end; 0 where ns_automaton_rest is 0 or
 * UINT32_MAX. */
uint8_t ns_automaton_shortest(const struct ns_automaton *a, uint32_t state);

/* Forgets all states but the first, whose number stays. */
void ns_automaton_reset(struct ns_automaton *a);

/* What it holds now, for the log. */
size_t ns_automaton_bytes(const struct ns_automaton *a);
uint32_t ns_automaton_n_states(const struct ns_automaton *a);

#endif
