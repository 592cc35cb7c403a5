#include "daemon/arguments.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
