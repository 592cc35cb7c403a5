#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/json.h"
#include "engine/schema_private.h"

void
ns_schema_clean(char *text)
{
    text[ns_utf8_span(text, strlen(text))] = '\0';
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

bool
ns_schema_is_note(const char *keyword)
{
    static const char *const note[] = {
        "title", "description", "default", "examples", "$comment", "$schema",
        "$defs", "definitions", "deprecated", "readOnly", "writeOnly",
        "$anchor", "$dynamicAnchor", "contentMediaType", "contentEncoding",
        "contentSchema", "example", "externalDocs", "xml", "discriminator",
    };

    if (strncmp(keyword, "x-", 2) == 0)
        return true;
    for (size_t i = 0; i < sizeof(note) / sizeof(*note); i++)
        if (strcmp(note[i], keyword) == 0)
            return true;
    return false;
}

bool
ns_schema_is_nullable(const json_t *schema)
{
    return json_is_true(json_object_get(schema, "nullable"));
}

bool
ns_schema_is_draft(const json_t *uri)
{
    const char *text = json_string_value(uri);

    return text && (strncmp(text, "https://json-schema.org/", 24) == 0 ||
                    strncmp(text, "http://json-schema.org/", 23) == 0);
}

static enum ns_status
refuse(const char *code, const json_t *ref, const char *what,
       struct ns_error *err)
{
    char shown[80];

    return ns_refuse(err, code, "$ref", "schema: $ref: %s %s",
                     ns_json_show(ref, shown, sizeof(shown)), what);
}

static int
hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Takes percents apart in place; a pointer in a fragment is written so. */
static void
unescape(char *text)
{
    char *to = text;

    for (; *text; text++)
        if (*text == '%' && hex(text[1]) >= 0 && hex(text[2]) >= 0) {
            *to++ = (char)(hex(text[1]) << 4 | hex(text[2]));
            text += 2;
        } else {
            *to++ = *text;
        }
    *to = '\0';
}

/* ~1 and ~0 of one step of a pointer, in place. */
static void
unescape_step(char *text)
{
    char *to = text;

    for (; *text; text++)
        if (*text == '~' && (text[1] == '0' || text[1] == '1'))
            *to++ = *++text == '1' ? '/' : '~';
        else
            *to++ = *text;
    *to = '\0';
}

static const json_t *
item_at(const json_t *list, const char *number)
{
    char *end;
    unsigned long index = strtoul(number, &end, 10);

    return *number >= '0' && *number <= '9' && !*end
               ? json_array_get(list, index)
               : NULL;
}

/* Behind the #; changes `pointer`. */
static const json_t *
follow(const json_t *at, char *pointer)
{
    while (at && *pointer) {
        char *name = pointer + 1, *end = strchr(name, '/');

        pointer = end ? end : name + strlen(name);
        if (end)
            *end = '\0';
        unescape_step(name);
        at = json_is_array(at) ? item_at(at, name) : json_object_get(at, name);
        if (end)
            *end = '/'; /* the loop looks for it */
    }
    return at;
}

/* The schema with that anchor, wherever one can stand. ($dynamicAnchor is
 * more to $dynamicRef alone, which is refused.) */
static const json_t *
find_anchor(const json_t *at, const char *name)
{
    static const char *const kind[] = { "$anchor", "$dynamicAnchor" };
    const json_t *found = NULL;

    for (size_t i = 0; i < sizeof(kind) / sizeof(*kind); i++) {
        const char *anchor = json_string_value(json_object_get(at, kind[i]));

        if (anchor && strcmp(anchor, name) == 0)
            return at;
    }
    if (json_is_object(at)) {
        json_t *object = (json_t *)at; /* for its iterators */

        for (void *i = json_object_iter(object); i && !found;
             i = json_object_iter_next(object, i)) {
            const char *key = json_object_iter_key(i);

            if (strcmp(key, "enum") && strcmp(key, "const") &&
                strcmp(key, "default") && strcmp(key, "examples"))
                found = find_anchor(json_object_iter_value(i), name);
        }
    } else if (json_is_array(at)) {
        for (size_t i = 0; i < json_array_size(at) && !found; i++)
            found = find_anchor(json_array_get(at, i), name);
    }
    return found;
}

enum ns_status
ns_schema_resolve(const json_t *root, const json_t *ref, const json_t **out,
                  struct ns_error *err)
{
    const char *text = json_string_value(ref);
    const char *id = json_string_value(json_object_get(root, "$id"));
    const json_t *found = NULL;
    char *fragment;

    if (!text)
        return ns_refuse(err, "bad_param", "$ref",
                         "schema: $ref: it is not a string");
    if (id && strncmp(text, id, strlen(id)) == 0 &&
        (text[strlen(id)] == '#' || text[strlen(id)] == '\0'))
        text += strlen(id);
    else if (text[0] != '#')
        return refuse("unsupported", ref,
                      "leads out of the schema; only # is looked up", err);
    if (text[0] == '\0' || text[1] == '\0') {
        *out = root;
        return NS_OK;
    }
    fragment = strdup(text + 1);
    if (!fragment)
        return ns_fail(err, NS_FATAL, "out of memory for a reference");
    unescape(fragment);
    found = fragment[0] == '/' ? follow(root, fragment)
                               : find_anchor(root, fragment);
    free(fragment);
    if (!found)
        return refuse("bad_param", ref, "names nothing", err);
    *out = found;
    return NS_OK;
}
