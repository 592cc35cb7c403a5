#include "engine/reply.h"

#include <stdlib.h>
#include <string.h>

#include "engine/toolcall.h"

/* Where the next token belongs. */
enum state { IN_CONTENT, IN_THOUGHT, IN_CALL };

/* The name of the channel, which leads a thought and must not lead content. */
static const char channel_name[] = "thought\n";
enum { CHANNEL_NAME = sizeof(channel_name) - 1 };

struct ns_reply {
    struct ns_reply_options options; /* its pointers are borrowed */
    int32_t channel_open, channel_close, call_open, call_close, quote;

    enum state state;
    struct ns_decoder decoder;
    uint32_t thought_tokens;

    struct ns_buf content;
    size_t run;      /* where the present run of content starts, since the   */
    size_t searched; /* last marker; up to where it is free of stop strings  */
    size_t longest_stop;
    bool undecided; /* so far content is a part of channel_name */
    bool name_cut;  /* channel_name led the content and was cut */
    bool stopped;

    struct ns_buf thought; /* of all pieces */
    struct ns_buf piece;   /* since the thought was opened */
    bool open_thought;

    struct ns_buf call; /* the present call, coded as toolcall.h says */
    struct ns_buf name, arguments, bad_call;
    json_t *calls;
    bool bad_tool_call;
    bool no_memory, too_large; /* of what has been emptied since */
};

enum { N_TEXTS = 7 };

static struct ns_buf *
text_at(struct ns_reply *reply, int i)
{
    struct ns_buf *const texts[N_TEXTS] = {
        &reply->content, &reply->thought,   &reply->piece,    &reply->call,
        &reply->name,    &reply->arguments, &reply->bad_call,
    };

    return texts[i];
}

enum ns_status
ns_reply_create(const struct ns_reply_options *options, struct ns_reply **out,
                struct ns_error *err)
{
    const struct ns_tokenizer *tokenizer = options->tokenizer;
    struct ns_reply *reply = calloc(1, sizeof(*reply));

    if (!reply)
        return ns_fail(err, NS_FATAL, "out of memory for a reply");
    reply->options = *options;
    reply->channel_open = ns_tokenizer_id(tokenizer, "<|channel>");
    reply->channel_close = ns_tokenizer_id(tokenizer, "<channel|>");
    reply->call_open = ns_tokenizer_id(tokenizer, "<|tool_call>");
    reply->call_close = ns_tokenizer_id(tokenizer, "<tool_call|>");
    reply->quote = ns_tokenizer_id(tokenizer, "<|\"|>");
    reply->state = options->in_thought ? IN_THOUGHT : IN_CONTENT;
    reply->undecided = true;
    ns_decoder_init(&reply->decoder);
    for (int i = 0; i < N_TEXTS; i++)
        ns_buf_init(text_at(reply, i), options->limit_bytes);
    for (size_t i = 0; i < options->n_stop; i++)
        if (strlen(options->stop[i]) > reply->longest_stop)
            reply->longest_stop = strlen(options->stop[i]);
    *out = reply;
    return NS_OK;
}

void
ns_reply_destroy(struct ns_reply *reply)
{
    if (!reply)
        return;
    for (int i = 0; i < N_TEXTS; i++)
        ns_buf_fini(text_at(reply, i));
    json_decref(reply->calls);
    free(reply);
}

/* Empties, and remembers what the buffer forgets by it. */
static void
empty(struct ns_reply *reply, struct ns_buf *buf)
{
    reply->no_memory |= buf->failed;
    reply->too_large |= buf->over;
    ns_buf_reset(buf);
}

/* Content ------------------------------------------------------------------ */

static void
cut_content(struct ns_reply *reply, size_t length)
{
    reply->content.length = length;
    reply->content.data[length] = '\0';
}

/* Drops the channel's name where it leads the content: a thought whose marker
 * the model left out. False while that is still open; `last`: no more text of
 * this run will come. */
static bool
lead_is_settled(struct ns_reply *reply, bool last)
{
    struct ns_buf *content = &reply->content;
    size_t n = content->length;

    if (!reply->undecided)
        return true;
    if (n < CHANNEL_NAME && !last &&
        memcmp(content->data, channel_name, n) == 0)
        return false;
    reply->undecided = false;
    if (n >= CHANNEL_NAME &&
        memcmp(content->data, channel_name, CHANNEL_NAME) == 0) {
        memmove(content->data, content->data + CHANNEL_NAME, n - CHANNEL_NAME);
        cut_content(reply, n - CHANNEL_NAME);
        reply->name_cut = true;
    }
    return true;
}

/* Looks for stop strings in what is new, and as far back as one could reach
 * that ends there. The first to be complete wins, of several the longest: so
 * the cut does not depend on how the text came in tokens. */
static void
look_for_stop(struct ns_reply *reply, bool last)
{
    const struct ns_buf *content = &reply->content;
    size_t from, best_end = SIZE_MAX, best_start = 0;

    if (reply->stopped || content->length == 0 || !lead_is_settled(reply, last))
        return;
    from = reply->run;
    if (reply->searched > from + reply->longest_stop)
        from = reply->searched - reply->longest_stop;
    for (size_t i = 0; i < reply->options.n_stop; i++) {
        const char *stop = reply->options.stop[i];
        size_t n = strlen(stop), start;
        const char *hit;

        hit =
            n && from < content->length
                ? memmem(content->data + from, content->length - from, stop, n)
                : NULL;
        if (!hit)
            continue;
        start = (size_t)(hit - content->data);
        if (start + n < best_end ||
            (start + n == best_end && start < best_start)) {
            best_end = start + n;
            best_start = start;
        }
    }
    reply->searched = content->length;
    if (best_end != SIZE_MAX) {
        cut_content(reply, best_start);
        reply->stopped = true;
    }
}

/* Thoughts ----------------------------------------------------------------- */

static bool
is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void
keep_thought(struct ns_reply *reply, const char *text, size_t length)
{
    while (length && is_blank(text[length - 1]))
        length--;
    for (; length && is_blank(*text); text++)
        length--;
    if (length == 0)
        return;
    if (reply->thought.length)
        ns_buf_text(&reply->thought, "\n\n");
    ns_buf_add(&reply->thought, text, length);
}

static void
end_piece(struct ns_reply *reply)
{
    const char *text = reply->piece.data;
    size_t length = reply->piece.length;

    if (length == 0)
        return;
    if (length >= CHANNEL_NAME - 1 &&
        memcmp(text, channel_name, CHANNEL_NAME - 1) == 0 &&
        (length == CHANNEL_NAME - 1 || text[CHANNEL_NAME - 1] == '\n')) {
        text += CHANNEL_NAME - 1;
        length -= CHANNEL_NAME - 1;
    }
    keep_thought(reply, text, length);
    empty(reply, &reply->piece);
}

/* Calls -------------------------------------------------------------------- */

/* The first malformed call is kept as it came. */
static void
mark_bad(struct ns_reply *reply, const char *coded, size_t length)
{
    if (!reply->bad_tool_call)
        ns_toolcall_raw(coded, length, &reply->bad_call);
    reply->bad_tool_call = true;
}

static void
end_call(struct ns_reply *reply, bool whole)
{
    const char *coded = reply->call.data ? reply->call.data : "";
    size_t length = reply->call.length;
    json_t *entry, *name, *arguments;
    char id[32];

    empty(reply, &reply->name);
    empty(reply, &reply->arguments);
    if (!ns_toolcall_parse(coded, length, whole, &reply->name,
                           &reply->arguments)) {
        mark_bad(reply, coded, length);
        empty(reply, &reply->call);
        return;
    }
    if (!reply->calls)
        reply->calls = json_array();
    snprintf(id, sizeof(id), "call_%zu", json_array_size(reply->calls));
    name = json_stringn(reply->name.data, reply->name.length);
    arguments = json_stringn(reply->arguments.data, reply->arguments.length);
    /* takes both, also when it fails */
    entry = json_pack("{s:s, s:s, s:{s:o, s:o}}", "id", id, "type", "function",
                      "function", "name", name, "arguments", arguments);
    if (!entry || json_array_append_new(reply->calls, entry) != 0)
        reply->no_memory = true;
    empty(reply, &reply->call);
}

/* Tokens ------------------------------------------------------------------- */

static struct ns_buf *
text_of(struct ns_reply *reply)
{
    switch (reply->state) {
    case IN_CONTENT:
        return &reply->content;
    case IN_THOUGHT:
        return &reply->piece;
    case IN_CALL:
        return &reply->call;
    }
    return NULL;
}

/* Ends what is open. `whole`: by its own closing marker. */
static void
leave(struct ns_reply *reply, bool whole)
{
    ns_decoder_flush(&reply->decoder, text_of(reply));
    switch (reply->state) {
    case IN_CONTENT:
        look_for_stop(reply, true);
        break;
    case IN_THOUGHT:
        end_piece(reply);
        break;
    case IN_CALL:
        end_call(reply, whole);
        break;
    }
}

static void
enter(struct ns_reply *reply, enum state state)
{
    reply->state = state;
    reply->run = reply->searched = reply->content.length;
}

/* A closing <channel|> with no opening one. If the channel's name led the
 * content, that content was the thought. */
static void
close_unopened_thought(struct ns_reply *reply)
{
    leave(reply, true);
    if (reply->stopped || !reply->name_cut || reply->calls)
        return;
    keep_thought(reply, reply->content.data, reply->content.length);
    cut_content(reply, 0);
    reply->name_cut = false;
    reply->undecided = true;
    enter(reply, IN_CONTENT);
}

/* A closing <tool_call|> with no opening one: some call got lost. */
static void
close_unopened_call(struct ns_reply *reply)
{
    leave(reply, true);
    if (reply->stopped)
        return;
    if (reply->content.length > reply->run)
        mark_bad(reply, reply->content.data + reply->run,
                 reply->content.length - reply->run);
    reply->bad_tool_call = true;
}

static void
push_control(struct ns_reply *reply, int32_t id)
{
    if (id == reply->channel_open) {
        leave(reply, false);
        enter(reply, IN_THOUGHT);
    } else if (id == reply->call_open) {
        leave(reply, false);
        enter(reply, IN_CALL);
    } else if (id == reply->channel_close && reply->state == IN_THOUGHT) {
        leave(reply, true);
        enter(reply, IN_CONTENT);
    } else if (id == reply->call_close && reply->state == IN_CALL) {
        leave(reply, true);
        enter(reply, IN_CONTENT);
    } else if (id == reply->channel_close && reply->state == IN_CONTENT) {
        close_unopened_thought(reply);
    } else if (id == reply->call_close && reply->state == IN_CONTENT) {
        close_unopened_call(reply);
    } else if (reply->state == IN_CALL) {
        ns_decoder_flush(&reply->decoder, &reply->call);
        if (id == reply->quote) {
            ns_buf_byte(&reply->call, NS_TOOLCALL_QUOTE);
        } else {
            ns_buf_byte(&reply->call, NS_TOOLCALL_OTHER);
            ns_buf_text(&reply->call,
                        ns_tokenizer_content(reply->options.tokenizer, id));
        }
    }
    /* any other is left out of content and thought */
}

bool
ns_reply_push(struct ns_reply *reply, int32_t id)
{
    const struct ns_tokenizer *tokenizer = reply->options.tokenizer;

    if (reply->stopped)
        return true;
    if (reply->state == IN_THOUGHT && id != reply->channel_close)
        reply->thought_tokens++;
    if (ns_tokenizer_is_control(tokenizer, id)) {
        push_control(reply, id);
    } else {
        ns_decoder_push(&reply->decoder, tokenizer, id, true, text_of(reply));
        if (reply->state == IN_CONTENT)
            look_for_stop(reply, false);
    }
    return reply->stopped;
}

bool
ns_reply_in_thought(const struct ns_reply *reply)
{
    return reply->state == IN_THOUGHT;
}

uint32_t
ns_reply_thought_tokens(const struct ns_reply *reply)
{
    return reply->thought_tokens;
}

static enum ns_status
check_texts(struct ns_reply *reply, struct ns_error *err)
{
    enum ns_status status = NS_OK;

    for (int i = 0; i < N_TEXTS; i++) {
        const struct ns_buf *text = text_at(reply, i);

        if (status == NS_OK || (text->failed && status != NS_FATAL))
            status = ns_buf_check(text, "the reply", err);
    }
    if (reply->no_memory)
        return ns_fail(err, NS_FATAL, "out of memory for the reply");
    if (status == NS_OK && reply->too_large)
        return ns_refuse(err, "too_large", NULL, "the reply is over %zu bytes",
                         reply->options.limit_bytes);
    return status;
}

/* Beside calls, content of nothing but white space is nothing. */
static void
drop_blank_content(struct ns_reply *reply)
{
    size_t n = 0;

    while (n < reply->content.length && is_blank(reply->content.data[n]))
        n++;
    if (n == reply->content.length && n > 0)
        cut_content(reply, 0);
}

enum ns_status
ns_reply_finish(struct ns_reply *reply, struct ns_reply_text *out,
                struct ns_error *err)
{
    enum ns_status status;

    if (!reply->stopped) {
        reply->open_thought = reply->state == IN_THOUGHT;
        leave(reply, false);
        enter(reply, IN_CONTENT);
    }
    status = check_texts(reply, err);
    if (status != NS_OK)
        return status;
    if (reply->calls)
        drop_blank_content(reply);
    *out = (struct ns_reply_text){
        .stopped = reply->stopped,
        .thought = reply->thought.length ? reply->thought.data : NULL,
        .thought_length = reply->thought.length,
        .content = reply->content.data ? reply->content.data : "",
        .content_length = reply->content.length,
        .tool_calls = reply->calls,
        .bad_tool_call = reply->bad_tool_call,
        .bad_call_text =
            reply->bad_tool_call
                ? (reply->bad_call.data ? reply->bad_call.data : "")
                : NULL,
        .open_thought = reply->open_thought,
    };
    return NS_OK;
}
