#include "daemon/command.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/arguments.h"
#include "daemon/setup.h"
#include "engine/prompt.h"
#include "engine/tokenizer.h"

static const char about[] =
    "Text (the arguments, or standard input) to token ids. Control tokens never\n"
    "come of text: they are spelt out as the characters they are.\n";

enum { INPUT_LIMIT = 64 << 20, ID_LIMIT = 64 << 20 };

struct tokenize {
    bool decode, chat, text, thinking, count;
    struct ns_tokenizer *tokenizer;
    bool empty_thought; /* the model's dialect */
};

/* The arguments with a space between, or all of standard input. */
static enum ns_status
read_input(int argc, char **argv, struct ns_buf *out, struct ns_error *err)
{
    size_t n;

    if (optind < argc) {
        for (int i = optind; i < argc; i++) {
            if (i > optind)
                ns_buf_byte(out, ' ');
            ns_buf_text(out, argv[i]);
        }
        return ns_buf_check(out, "the text", err);
    }
    do {
        char *room = ns_buf_room(out, 65536);

        if (!room)
            break;
        n = fread(room, 1, 65536, stdin);
        out->length += n;
    } while (n > 0);
    if (ferror(stdin))
        return ns_fail_errno(err, NS_REJECT, "standard input");
    return ns_buf_check(out, "standard input", err);
}

static enum ns_status
decode(const struct tokenize *t, const char *text, struct ns_error *err)
{
    struct ns_ids ids = { .limit = ID_LIMIT };
    enum ns_status status = NS_OK;
    struct ns_buf out;
    char *end;

    ns_buf_init(&out, SIZE_MAX / 2);
    for (const char *at = text; status == NS_OK; at = end) {
        long id;

        at += strspn(at, " \t\r\n,[]");
        if (*at == '\0')
            break;
        errno = 0;
        id = strtol(at, &end, 10);
        if (end == at || errno || id < 0 ||
            (uint64_t)id >= ns_tokenizer_size(t->tokenizer))
            status = ns_fail(err, NS_REJECT, "\"%.20s\" is not an id below %u",
                             at, ns_tokenizer_size(t->tokenizer));
        else
            status = ns_ids_add(&ids, (int32_t)id, err);
    }
    if (status == NS_OK) {
        ns_tokenizer_decode(t->tokenizer, ids.id, ids.n, false, &out);
        status = ns_buf_check(&out, "the text", err);
    }
    if (status == NS_OK) {
        fwrite(out.data, 1, out.length, stdout);
        printf("\n");
    }
    ns_buf_fini(&out);
    ns_ids_fini(&ids);
    return status;
}

static void
print_ids(const struct tokenize *t, const struct ns_ids *ids)
{
    if (t->count) {
        printf("%zu\n", ids->n);
        return;
    }
    for (size_t i = 0; i < ids->n; i++)
        printf("%s%d", i ? " " : "", ids->id[i]);
    printf("\n");
}

static enum ns_status
encode(const struct tokenize *t, const struct ns_buf *text,
       struct ns_error *err)
{
    const struct ns_span span = { text->data ? text->data : "", text->length,
                                  false };
    struct ns_ids ids = { .limit = ID_LIMIT };
    enum ns_status status;

    status = ns_tokenizer_encode(t->tokenizer, &span, 1, &ids, err);
    if (status == NS_OK)
        print_ids(t, &ids);
    ns_ids_fini(&ids);
    return status;
}

static enum ns_status
chat(const struct tokenize *t, const struct ns_buf *text,
     struct ns_error *err)
{
    const struct ns_prompt_options options = { .thinking = t->thinking,
                                               .generation_prompt = true,
                                               .empty_thought =
                                                   t->empty_thought };
    struct ns_prompt prompt = { 0 };
    struct ns_ids ids = { .limit = ID_LIMIT };
    enum ns_status status;
    json_error_t where;
    json_t *root, *messages;

    root = json_loadb(text->data ? text->data : "", text->length,
                      JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return ns_fail(err, NS_REJECT, "line %d, column %d: %s", where.line,
                       where.column, where.text);
    messages = json_is_object(root) ? json_object_get(root, "messages") : root;
    status = ns_prompt_open_arguments(messages, err); /* as a job's are */
    if (status == NS_OK)
        status = ns_prompt_render(messages, json_object_get(root, "tools"),
                                  &options, INPUT_LIMIT, &prompt, err);
    if (status == NS_OK && t->text) {
        fwrite(prompt.text.data, 1, prompt.text.length, stdout);
        printf("\n");
    } else if (status == NS_OK) {
        status = ns_prompt_encode(&prompt, t->tokenizer, NULL, NULL, &ids, err);
        if (status == NS_OK)
            print_ids(t, &ids);
    }
    ns_ids_fini(&ids);
    ns_prompt_fini(&prompt);
    json_decref(root);
    return status;
}

static enum ns_status
tokenize(struct tokenize *t, const struct ns_options *options, int argc,
         char **argv, struct ns_error *err)
{
    char directory[PATH_MAX], path[PATH_MAX + 16];
    enum ns_status status;
    struct ns_buf text;

    status = ns_setup_model(options, directory, sizeof(directory), err);
    if (status != NS_OK)
        return status;
    snprintf(path, sizeof(path), "%s/tokenizer.json", directory);
    t->empty_thought = ns_prompt_wants_empty_thought(directory);
    status = ns_tokenizer_open(path, &t->tokenizer, err);
    if (status != NS_OK)
        return status;
    ns_buf_init(&text, INPUT_LIMIT);
    status = read_input(argc, argv, &text, err);
    if (status == NS_OK)
        status = t->decode ? decode(t, text.data ? text.data : "", err)
                 : t->chat ? chat(t, &text, err)
                           : encode(t, &text, err);
    if (status == NS_REJECT) /* whatever it is called in a job */
        err->code = "unreadable_input";
    ns_buf_fini(&text);
    return status;
}

int
ns_command_tokenize(int argc, char **argv)
{
    struct tokenize t = { 0 };
    const struct ns_argument table[] = {
        { "model", 'm', "DIR", "checkpoint folder", .key = "engine.model" },
        { "decode", 'd', NULL, "ids to text", .flag = &t.decode },
        { "chat", 'c', NULL, "a JSON array of messages, or an object with "
          "messages\nand tools, to the ids of its prompt", .flag = &t.chat },
        { "text", 0, NULL, "with --chat: the prompt's text instead of its ids",
          .flag = &t.text },
        { "thinking", 't', NULL, "with --chat: ask for a thought",
          .flag = &t.thinking },
        { "count", 'n', NULL, "only how many", .flag = &t.count },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift tokenize", "[options] [TEXT...]", about, table, 0, INT_MAX,
        false,
    };
    struct ns_arguments arguments = { 0 };
    struct ns_options *options = NULL;
    struct ns_error err = { 0 };
    enum ns_status status;
    int leave = ns_arguments_parse(&arguments, &usage, argc, argv);

    if (leave != -1)
        return leave;
    if (t.decode && t.chat)
        return ns_arguments_misused(&usage, "--decode and --chat are two ways");
    if (!t.chat && (t.text || t.thinking))
        return ns_arguments_misused(&usage,
                                    "--text and --thinking go with --chat");
    if (t.count && (t.text || t.decode))
        return ns_arguments_misused(&usage, "--count is of ids, not of text");
    status = ns_arguments_load(&arguments, &options, &err);
    if (status == NS_OK)
        status = tokenize(&t, options, argc, argv, &err);
    ns_tokenizer_close(t.tokenizer);
    ns_options_destroy(options);
    if (status != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    return NS_EXIT_OK;
}
