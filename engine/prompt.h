/* prompt.h - the Gemma 4 chat format: messages, tools and image slots to spans.
 *
 * Writes the published template's text natively (no template engine), as a
 * list of spans that say which bytes are the template's and which the job's,
 * so that a document cannot forge a turn. Image parts become slots; the caller
 * expands each to <|image> + n x <|image|> + <image|> once n is known.
 *
 * Borrows: the JSON values, until the prompt is dropped. Owns: its text.
 * Thread:  any; nothing is shared.
 */
#ifndef NS_ENGINE_PROMPT_H
#define NS_ENGINE_PROMPT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/error.h"
#include "engine/tokenizer.h"

struct ns_prompt_options {
    bool thinking;
    bool generation_prompt; /* end with the model's header */
    bool preserve_thinking; /* keep thoughts of earlier tool calls */
    /* The other dialect of the family: with thinking off the generation prompt
     * closes an empty thought. See ns_prompt_wants_empty_thought. */
    bool empty_thought;
};

struct ns_prompt_span {
    size_t start, length; /* bytes of ns_prompt.text */
    bool trusted;
    int32_t image; /* >= 0: the placeholder of that image part, in order */
};

struct ns_prompt {
    struct ns_buf text; /* the template's text, placeholders as <|image|> */
    struct ns_prompt_span *spans;
    size_t n_spans, capacity;
    uint32_t n_images;
    bool in_thought; /* it ends inside an opened thought (for reply.h) */
};

/* `messages`: array in the OpenAI form (roles system, developer, user,
 * assistant, tool; content text, parts or null; tool_calls, tool_responses,
 * reasoning or reasoning_content). `tools`: array or NULL. Every refusal names
 * the field ("messages[2].role"). Arguments of tool calls must be objects: see
 * ns_prompt_open_arguments. Call fini whatever comes back. */
enum ns_status ns_prompt_render(const json_t *messages, const json_t *tools,
                                const struct ns_prompt_options *options,
                                size_t limit_bytes, struct ns_prompt *out,
                                struct ns_error *err);

/* Clients send the arguments of a tool call as a JSON text. Puts the object
 * that it holds in its place, throughout `messages`; what is no object is
 * refused by its field. What is not of the expected form is left to render. */
enum ns_status ns_prompt_open_arguments(json_t *messages,
                                        struct ns_error *err);

/* Which of its two dialects a checkpoint was trained in: what to put into
 * ns_prompt_options.empty_thought. The template is written natively; the
 * folder's chat_template.jinja is only searched for the literal. */
bool ns_prompt_wants_empty_thought(const char *model_directory);

/* Ids of the whole prompt. `image_tokens[i]` is the number of soft tokens of
 * image i (NULL when there are none): each slot becomes begin marker, that
 * many placeholders, end marker. */
struct ns_image_ids {
    int32_t begin, placeholder, end;
};
enum ns_status ns_prompt_encode(const struct ns_prompt *prompt,
                                const struct ns_tokenizer *tokenizer,
                                const struct ns_image_ids *image_ids,
                                const uint32_t *image_tokens,
                                struct ns_ids *out, struct ns_error *err);

void ns_prompt_fini(struct ns_prompt *prompt);

#endif
