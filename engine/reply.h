/* reply.h - the way back: generated tokens to thought, content and tool calls.
 *
 * The model writes a thought as <|channel>thought\n...<channel|>, tool calls as
 * <|tool_call>call:name{...}<tool_call|>, and ends with <turn|>, <eos> or
 * <|tool_response>. Control tokens are told by id, never by text, and none is
 * left in content. A tool call that does not parse is a marked error: the
 * result is failed with code bad_tool_call and keeps the raw text, never an
 * empty success. Spellings that occur in the wild are understood (a missing
 * call: prefix, JSON arguments, single or plain double quotes, parentheses).
 *
 * Works token by token so that stop strings and thinking budgets can be judged
 * at block borders; feeding tokens one by one or in blocks gives the same.
 * Thread: one at a time.
 */
#ifndef NS_ENGINE_REPLY_H
#define NS_ENGINE_REPLY_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"
#include "engine/tokenizer.h"

struct ns_reply; /* parser state */

struct ns_reply_options {
    const struct ns_tokenizer *tokenizer; /* borrowed */
    bool in_thought;          /* the prompt already opened the thought */
    const char *const *stop;  /* strings that end the content; borrowed */
    size_t n_stop;
    size_t limit_bytes;       /* of each of its texts */
};

enum ns_status ns_reply_create(const struct ns_reply_options *options,
                               struct ns_reply **out, struct ns_error *err);
void ns_reply_destroy(struct ns_reply *reply); /* takes NULL */

/* Feeds one token that is not an end token. Returns true when a stop string
 * has been completed in the content: the content is cut in front of it, and
 * nothing may be fed any more. */
bool ns_reply_push(struct ns_reply *reply, int32_t id);

/* Whether the next token stands inside the thought; tokens of it so far. */
bool ns_reply_in_thought(const struct ns_reply *reply);
uint32_t ns_reply_thought_tokens(const struct ns_reply *reply);

struct ns_reply_text {
    const char *thought; /* NULL when there was none; borrowed from the reply */
    size_t thought_length;
    const char *content; /* "" at least; NUL terminated, may hold NUL bytes */
    size_t content_length;
    json_t *tool_calls; /* OpenAI form, arguments as a JSON text; NULL if none;
                         * borrowed from the reply */
    bool bad_tool_call;          /* some call did not parse ...            */
    const char *bad_call_text;   /* ... and this is its raw text           */
    bool open_thought;           /* ended inside the thought               */
    bool stopped; /* a stop string cut it: known at the end only when the last
                   * characters were still open, as runs of byte tokens are */
};

/* Ends the reply and says what it was. NS_OK also when bad_tool_call. */
enum ns_status ns_reply_finish(struct ns_reply *reply,
                               struct ns_reply_text *out,
                               struct ns_error *err);

#endif
