#include "daemon/parts.h"

#include <stdlib.h>
#include <string.h>

#include "connectors/result.h"
#include "engine/reply.h"
#include "engine/request.h"

enum { INSTRUCTIONS = 1024 }; /* tokens kept for what stands beside a part */

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_RETRY, "out of memory for the parts of a job");
}

/* ---- which jobs ---------------------------------------------------------- */

/* Texts that are no instruction but something to summarise. */
struct texts {
    size_t message; /* the one of the user */
    json_t *holder[NS_PARTS_TEXTS];
    size_t n, length; /* of all */
    const char *key;  /* of a text in its holder */
};

/* The longest text of the one user message and, if there are `part_tokens`, all
 * that are of about a quarter of a part or more. False: nothing can be split. */
static bool
find_texts(const json_t *messages, uint32_t part_tokens, struct texts *out)
{
    size_t n_users = 0, longest = 0, least;
    json_t *content = NULL, *message = NULL;

    memset(out, 0, sizeof(*out));
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *one = json_array_get(messages, i);
        const char *role = json_string_value(json_object_get(one, "role"));

        if (!role || strcmp(role, "system") == 0 ||
            strcmp(role, "developer") == 0)
            continue;
        if (strcmp(role, "user") != 0 || n_users++ > 0)
            return false;
        out->message = i;
        message = one;
        content = json_object_get(one, "content");
    }
    out->key = json_is_string(content) ? "content" : "text";
    if (json_is_string(content)) {
        out->holder[0] = message;
        out->length = json_string_length(content);
        out->n = 1;
        return out->length > 0;
    }
    for (size_t p = 0; p < json_array_size(content); p++) {
        const json_t *text = json_object_get(json_array_get(content, p),
                                             "text");

        if (!json_is_string(text))
            return false;
        if (json_string_length(text) > longest)
            longest = json_string_length(text);
    }
    least = part_tokens > 0 && part_tokens < longest ? part_tokens : longest;
    for (size_t p = 0; p < json_array_size(content); p++) {
        json_t *one = json_array_get(content, p);
        size_t length = json_string_length(json_object_get(one, "text"));

        if (length < least || out->n == NS_PARTS_TEXTS)
            continue;
        out->holder[out->n++] = one;
        out->length += length;
    }
    return longest > 0;
}

static bool
is_wanted(const struct ns_job *job, const struct ns_config *config,
          enum ns_mode mode, size_t n_prompt, uint32_t limit)
{
    uint32_t room = n_prompt < UINT32_MAX
                        ? ns_request_max_tokens(config, (uint32_t)n_prompt,
                                                mode, job->canvas_length)
                        : 0;
    struct texts texts;
    bool fits = room > 0 && (!job->has_max_tokens || job->max_tokens <= room);

    if (job->task != NS_JOB_TASK_SUMMARIZE || job->n_images > 0 ||
        job->tools || job->thinking || job->draft ||
        !find_texts(job->messages, 0, &texts))
        return false;
    return !fits || (limit > 0 && n_prompt > limit);
}

/* Tokens of a part: `limit`, within what the context leaves beside an answer and
 * the instruction. The final node takes a part's worth of summaries, too. */
static enum ns_status
size_of_part(const struct ns_job *job, const struct ns_config *config,
             uint32_t limit, uint32_t *out, struct ns_error *err)
{
    uint32_t canvas = config->canvas_length;
    uint32_t answer = job->has_max_tokens && job->max_tokens > canvas
                          ? job->max_tokens
                          : canvas;
    uint64_t beside = (uint64_t)answer + canvas + NS_SUMMARY_MOST_NODE +
                      (config->max_position > 4 * INSTRUCTIONS
                           ? INSTRUCTIONS
                           : config->max_position / 4);

    if (beside + NS_SUMMARY_LEAST > config->max_position)
        return ns_refuse(err, "over_context", "body.max_tokens",
                         "beside an answer of %u tokens the context of %u "
                         "leaves no room for a part of the text", answer,
                         config->max_position);
    *out = config->max_position - (uint32_t)beside;
    if (limit > 0 && limit < *out)
        *out = limit < NS_SUMMARY_LEAST ? NS_SUMMARY_LEAST : limit;
    return NS_OK;
}

/* ---- the tree and what is known of it ------------------------------------- */

/* Copies the messages and joins the texts. The first one's place is that of what
 * a node reads; the others are taken out. */
static enum ns_status
take_messages(struct ns_parts *parts, const struct ns_job *job,
              uint32_t part_tokens, struct ns_error *err)
{
    struct texts texts;
    json_t *content;
    const char *system;

    parts->messages = json_deep_copy(job->messages);
    if (!parts->messages)
        return no_memory(err);
    if (!find_texts(parts->messages, part_tokens, &texts))
        return ns_fail(err, NS_FATAL, "a summary without a text");
    parts->system = json_array_get(parts->messages, 0);
    parts->key = texts.key;
    parts->holder = texts.holder[0];
    parts->text = malloc(texts.length + 1);
    system = json_string_value(json_object_get(parts->system, "content"));
    parts->instruction = strdup(system ? system : "");
    if (!parts->text || !parts->instruction)
        return no_memory(err);
    for (size_t i = 0; i < texts.n; i++) {
        const json_t *text = json_object_get(texts.holder[i], texts.key);

        memcpy(parts->text + parts->length, json_string_value(text),
               json_string_length(text));
        parts->length += json_string_length(text);
        parts->end[parts->n_texts++] = parts->length;
    }
    parts->text[parts->length] = '\0';
    content = json_object_get(json_array_get(parts->messages, texts.message),
                              "content");
    for (size_t p = json_array_size(content); p-- > 0;)
        for (size_t i = 1; i < texts.n; i++)
            if (json_array_get(content, p) == texts.holder[i]) {
                json_array_remove(content, p);
                break;
            }
    return NS_OK;
}

/* What a stored node begins with. */
enum { NODE, PART_TOKENS, READ, WROTE, HEAD };

/* The text of a node's answer, whether it came just now or from a store: what a
 * reader would see of it. A NUL would end it early in the next prompt. */
static enum ns_status
keep(struct ns_parts *parts, uint32_t node, const int32_t *tokens, uint32_t n,
     struct ns_error *err)
{
    const struct ns_reply_options options = {
        .tokenizer = parts->tokenizer,
        .limit_bytes = SIZE_MAX / 2,
    };
    struct ns_reply *reply = NULL;
    struct ns_reply_text text;
    struct ns_buf plain;
    enum ns_status status;

    ns_buf_init(&plain, SIZE_MAX / 2);
    status = ns_reply_create(&options, &reply, err);
    for (uint32_t i = 0; i < n && status == NS_OK; i++)
        ns_reply_push(reply, tokens[i]);
    if (status == NS_OK)
        status = ns_reply_finish(reply, &text, err);
    if (status == NS_OK) {
        ns_result_plain(&plain, text.content, text.content_length);
        status = ns_buf_check(&plain, "a summary", err);
    }
    if (status == NS_OK)
        status = ns_summary_set(parts->tree, node,
                                plain.data ? plain.data : "", plain.length,
                                err);
    ns_buf_fini(&plain);
    ns_reply_destroy(reply);
    return status;
}

/* The nodes among the blocks of an earlier process. */
static enum ns_status
remember(struct ns_parts *parts, const struct ns_claim *claim,
         struct ns_error *err)
{
    const int32_t *at = claim->tokens;
    enum ns_status status = NS_OK;

    for (uint32_t b = 0; b < claim->n_blocks && status == NS_OK; b++) {
        uint32_t n = claim->block_tokens[b];

        if (n >= HEAD && at[NODE] < 0 &&
            (uint32_t)(-1 - at[NODE]) < parts->n_node_blocks &&
            at[PART_TOKENS] == (int32_t)parts->tree->part_tokens) {
            status = keep(parts, (uint32_t)(-1 - at[NODE]), at + HEAD,
                          n - HEAD, err);
            parts->prompt_tokens += (uint32_t)at[READ];
            parts->completion_tokens += (uint32_t)at[WROTE];
        } else if (b < parts->n_node_blocks) {
            parts->alien = true; /* the job was split in another way */
        }
        at += n;
    }
    return status;
}

void
ns_parts_resume(const struct ns_parts *parts, const struct ns_claim *claim,
                uint32_t *n_tokens, uint32_t *n_blocks)
{
    *n_tokens = 0;
    *n_blocks = parts->n_node_blocks;
    for (uint32_t b = 0; b < claim->n_blocks && b < parts->n_node_blocks; b++)
        *n_tokens += claim->block_tokens[b];
}

enum ns_status
ns_parts_create(const struct ns_job *job, const struct ns_claim *claim,
                const struct ns_config *config,
                const struct ns_tokenizer *tokenizer, enum ns_mode mode,
                size_t n_prompt, uint32_t limit, struct ns_parts **out,
                struct ns_error *err)
{
    struct ns_parts *parts;
    enum ns_status status;
    uint32_t size = 0;

    *out = NULL;
    if (job->chunk_tokens)
        limit = job->chunk_tokens;
    if (!is_wanted(job, config, mode, n_prompt, limit))
        return NS_OK;
    status = size_of_part(job, config, limit, &size, err);
    if (status != NS_OK)
        return status;
    parts = calloc(1, sizeof(*parts));
    if (!parts)
        return no_memory(err);
    parts->tokenizer = tokenizer;
    status = take_messages(parts, job, size, err);
    if (status == NS_OK)
        status = ns_summary_create(parts->text, parts->end, parts->n_texts,
                                   tokenizer, size, &parts->tree, err);
    if (status == NS_OK && parts->tree) {
        parts->n_node_blocks = ns_summary_final(parts->tree);
        if (claim)
            status = remember(parts, claim, err);
    }
    if (status == NS_OK && parts->tree) {
        *out = parts;
        parts = NULL;
    }
    ns_parts_destroy(parts);
    return status;
}

static void
forget_round(struct ns_parts *parts)
{
    for (uint32_t i = 0; parts->prompt && i < parts->n; i++)
        ns_ids_fini(&parts->prompt[i]);
    free(parts->node);
    free(parts->prompt);
    free(parts->request);
    free(parts->child);
    parts->node = NULL;
    parts->prompt = NULL;
    parts->request = NULL;
    parts->child = NULL;
    parts->n = parts->n_done = 0;
}

void
ns_parts_destroy(struct ns_parts *parts)
{
    if (!parts)
        return;
    forget_round(parts);
    ns_summary_destroy(parts->tree);
    json_decref(parts->messages);
    free(parts->instruction);
    free(parts->text);
    free(parts);
}

enum ns_status
ns_parts_begin_round(struct ns_parts *parts, struct ns_error *err)
{
    const struct ns_summary *tree = parts->tree;
    uint32_t first = tree->round_first[tree->round], n;

    forget_round(parts);
    n = tree->round_first[tree->round + 1] - first;
    parts->node = calloc(n, sizeof(*parts->node));
    parts->prompt = calloc(n, sizeof(*parts->prompt));
    parts->request = calloc(n, sizeof(*parts->request));
    parts->child = calloc(n, sizeof(struct ns_work *));
    if (!parts->node || !parts->prompt || !parts->request || !parts->child)
        return no_memory(err);
    for (uint32_t i = first; i < first + n; i++)
        if (!tree->node[i].text)
            parts->node[parts->n++] = i;
    return NS_OK;
}

size_t
ns_parts_tokens(const struct ns_parts *parts)
{
    size_t sum = 0;

    for (uint32_t i = 0; i < parts->n; i++)
        sum += parts->prompt[i].n;
    return sum;
}

/* ---- what a node says and hears --------------------------------------------- */

/* The number of a part stands with its text and not in the instruction, which so
 * is the same for all parts: they share it, and all that stands before the text,
 * as one prefix. */
enum ns_status
ns_parts_messages(struct ns_parts *parts, uint32_t node, struct ns_error *err)
{
    const struct ns_summary *tree = parts->tree;
    bool is_part = tree->node[node].n == 0;
    char *source = ns_summary_source(tree, node, parts->text);
    json_t *system, *text;

    system = is_part
                 ? json_sprintf("%s\n\nThe text is a part of a longer one, of "
                                "which there are %u. Summarise this part "
                                "alone, in a few sentences that can be "
                                "combined with those of the other parts.",
                                parts->instruction, tree->n_parts)
                 : json_sprintf("%s\n\nThe text has been read in %u parts. What "
                                "follows are their summaries, each under the "
                                "label of its parts. Combine them into one, "
                                "and name the parts that a statement comes "
                                "from like this: [parts 2-3].",
                                parts->instruction, tree->n_parts);
    text = !source   ? NULL
           : is_part ? json_sprintf("Part %u:\n\n%s", node + 1, source)
                     : json_string(source);
    free(source);
    if (!system || !text ||
        json_object_set(parts->system, "content", system) != 0 ||
        json_object_set(parts->holder, parts->key, text) != 0) {
        json_decref(system);
        json_decref(text);
        return no_memory(err);
    }
    json_decref(system);
    json_decref(text);
    return NS_OK;
}

void
ns_parts_blame(const struct ns_parts *parts, uint32_t node,
               struct ns_error *err)
{
    const struct ns_summary_node *at = &parts->tree->node[node];

    ns_context(err, "parts %u-%u of %u", at->first_part + 1,
               at->last_part + 1, parts->tree->n_parts);
}

enum ns_status
ns_parts_take(struct ns_parts *parts, uint32_t node, const int32_t *tokens,
              uint32_t n_tokens, const struct ns_usage *usage,
              struct ns_ids *block, struct ns_error *err)
{
    const int32_t head[HEAD] = {
        [NODE] = -1 - (int32_t)node,
        [PART_TOKENS] = (int32_t)parts->tree->part_tokens,
        [READ] = (int32_t)usage->prompt_tokens,
        [WROTE] = (int32_t)usage->completion_tokens,
    };
    enum ns_status status = keep(parts, node, tokens, n_tokens, err);

    *block = (struct ns_ids){ .limit = (size_t)n_tokens + HEAD };
    for (uint32_t i = 0; i < HEAD && status == NS_OK; i++)
        status = ns_ids_add(block, head[i], err);
    for (uint32_t i = 0; i < n_tokens && status == NS_OK; i++)
        status = ns_ids_add(block, tokens[i], err);
    parts->prompt_tokens += usage->prompt_tokens;
    parts->cached_tokens += usage->cached_tokens;
    parts->completion_tokens += usage->completion_tokens;
    return status;
}
