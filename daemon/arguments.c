#include "daemon/arguments.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/setup.h"

enum { MAX_OPTIONS = 32, COLUMN = 23 };

enum ns_status
ns_arguments_add(struct ns_arguments *arguments, const char *key,
                 const char *value, struct ns_error *err)
{
    if (arguments->n == NS_MAX_ARGUMENTS)
        return ns_fail(err, NS_REJECT, "over %d settings on the command line",
                       NS_MAX_ARGUMENTS);
    arguments->key[arguments->n] = key;
    arguments->value[arguments->n++] = value;
    return NS_OK;
}

static enum ns_status
apply(struct ns_options *options, const char *key, const char *value,
      struct ns_error *err)
{
    char name[80];
    size_t n;

    if (key)
        return ns_options_set(options, key, value, err);
    n = strcspn(value, "=");
    if (value[n] == '\0' || n >= sizeof(name))
        return ns_fail(err, NS_REJECT, "--set %.60s: give KEY=VALUE", value);
    memcpy(name, value, n);
    name[n] = '\0';
    return ns_options_set(options, name, value + n + 1, err);
}

enum ns_status
ns_arguments_load(const struct ns_arguments *arguments,
                  struct ns_options **out, struct ns_error *err)
{
    const char *path = arguments->config;
    struct ns_options *options;
    enum ns_status status;

    if (!path && arguments->fallback_config &&
        access(arguments->fallback_config, F_OK) == 0)
        path = arguments->fallback_config;
    status = path ? ns_options_load(path, &options, err)
                  : ns_options_create(&options, err);
    if (status != NS_OK)
        return status;
    for (size_t i = 0; status == NS_OK && i < arguments->n; i++)
        status = apply(options, arguments->key[i], arguments->value[i], err);
    if (status != NS_OK) {
        ns_options_destroy(options);
        return status;
    }
    *out = options;
    return NS_OK;
}

/* --- the table ---------------------------------------------------------- */

static const struct ns_argument common[] = {
    { "config", 0, "FILE", "see nightshift.conf(5)", NULL, NULL, NULL },
    { "set", 0, "KEY=VALUE", "one key of it", NULL, NULL, NULL },
    { "help", 'h', NULL, NULL, NULL, NULL, NULL },
};

/* "  -o, --output OUT     results\n" and further lines below the first. */
static void
print_option(FILE *file, const struct ns_argument *option)
{
    const char *at = option->meaning;
    int n;

    if (!at)
        return;
    n = fprintf(file, option->letter ? "  -%c, --%s%s%s" : "  %c   --%s%s%s",
                option->letter ? option->letter : ' ', option->name,
                option->value ? " " : "", option->value ? option->value : "");
    if (n > COLUMN - 2) {
        fputc('\n', file);
        n = 0;
    }
    while (*at) {
        size_t length = strcspn(at, "\n");

        fprintf(file, "%*s%.*s\n", COLUMN - n, "", (int)length, at);
        at += length;
        at += *at == '\n';
        n = 0;
    }
}

static void
print_usage(FILE *file, const struct ns_synopsis *usage, const char *fallback)
{
    fprintf(file, "usage: %s%s%s\n", usage->program,
            *usage->operands ? " " : "", usage->operands);
    if (usage->about)
        fprintf(file, "\n%s", usage->about);
    fputc('\n', file);
    for (const struct ns_argument *option = usage->table; option->name;
         option++)
        print_option(file, option);
    if (usage->plain)
        return;
    print_option(file, &common[0]);
    if (fallback)
        fprintf(file, "%*sdefault: %s, if there\n", COLUMN, "", fallback);
    print_option(file, &common[1]);
}

int
ns_arguments_misused(const struct ns_synopsis *usage, const char *text)
{
    fprintf(stderr, "%s: %s\n\n", usage->program, text);
    print_usage(stderr, usage, NULL);
    return NS_EXIT_USAGE;
}

/* Whether what options of their own name can be values of their keys. What
 * stands behind --set is configuration, as if it stood in the file. */
static enum ns_status
check_settings(const struct ns_arguments *arguments, struct ns_error *err)
{
    struct ns_options *scratch;
    enum ns_status status = ns_options_create(&scratch, err);

    if (status != NS_OK)
        return status;
    for (size_t i = 0; status == NS_OK && i < arguments->n; i++)
        if (arguments->key[i])
            status = ns_options_set(scratch, arguments->key[i],
                                    arguments->value[i], err);
    ns_options_destroy(scratch);
    return status;
}

static enum ns_status
take_option(struct ns_arguments *arguments, const struct ns_argument *option,
            struct ns_error *err)
{
    if (option->flag)
        *option->flag = true;
    else if (option->text)
        *option->text = optarg;
    else if (option->key)
        return ns_arguments_add(arguments, option->key, optarg, err);
    else if (option == &common[0])
        arguments->config = optarg;
    else
        return ns_arguments_add(arguments, NULL, optarg, err);
    return NS_OK;
}

/* The table in getopt's form. The value returned for an option is its place,
 * past all letters. */
static size_t
make_getopt(const struct ns_synopsis *usage, struct option *out, char *letters,
            const struct ns_argument **options)
{
    size_t n = 0;

    for (size_t i = 0; i < MAX_OPTIONS; i++) {
        const struct ns_argument *option = &usage->table[i];

        if (!option->name)
            break;
        options[n++] = option;
    }
    for (size_t i = usage->plain ? 2 : 0; i < 3; i++)
        options[n++] = &common[i];
    for (size_t i = 0; i < n; i++) {
        out[i] = (struct option){ options[i]->name,
                                  options[i]->value ? required_argument
                                                    : no_argument,
                                  NULL, 256 + (int)i };
        if (options[i]->letter)
            *letters++ = options[i]->letter;
        if (options[i]->letter && options[i]->value)
            *letters++ = ':';
    }
    *letters = '\0';
    out[n] = (struct option){ 0 };
    return n;
}

int
ns_arguments_parse(struct ns_arguments *arguments,
                   const struct ns_synopsis *usage, int argc, char **argv)
{
    const struct ns_argument *options[MAX_OPTIONS + 3];
    struct option table[MAX_OPTIONS + 4];
    char letters[2 * MAX_OPTIONS + 8];
    size_t n = make_getopt(usage, table, letters, options), at;
    struct ns_error err = { 0 };
    enum ns_status status = NS_OK;
    int c;

    argv[0] = (char *)(uintptr_t)usage->program; /* what getopt complains as */
    while ((c = getopt_long(argc, argv, letters, table, NULL)) != -1) {
        for (at = 0; at < n; at++)
            if (c == 256 + (int)at || (c != 0 && c == options[at]->letter))
                break;
        if (at == n) {
            print_usage(stderr, usage, arguments->fallback_config);
            return NS_EXIT_USAGE;
        }
        if (options[at] == &common[2]) {
            print_usage(stdout, usage, arguments->fallback_config);
            return NS_EXIT_OK;
        }
        status = take_option(arguments, options[at], &err);
        if (status != NS_OK)
            break;
    }
    if (status == NS_OK)
        status = check_settings(arguments, &err);
    if (status != NS_OK) {
        fprintf(stderr, "%s: %s\n", usage->program, err.text);
        return status == NS_FATAL ? NS_EXIT_INTERNAL : NS_EXIT_USAGE;
    }
    if (argc - optind < usage->least || argc - optind > usage->most) {
        print_usage(stderr, usage, arguments->fallback_config);
        return NS_EXIT_USAGE;
    }
    return -1;
}
