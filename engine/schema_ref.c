#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/grow.h"
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
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "$schema",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$anchor",
        "$dynamicAnchor",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "example",
        "externalDocs",
        "xml",
        "discriminator",
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

/* Notes every schema that has an anchor, wherever one can stand. (A
 * $dynamicAnchor is more to $dynamicRef alone, which is refused.) False when
 * memory has run out. */
static bool
note_anchors(struct ns_schema_doc *doc, const json_t *at)
{
    json_t *object = (json_t *)at; /* for its iterators */

    for (size_t i = 0; i < json_array_size(at); i++)
        if (!note_anchors(doc, json_array_get(at, i)))
            return false;
    for (void *i = json_object_iter(object); i;
         i = json_object_iter_next(object, i)) {
        const char *key = json_object_iter_key(i);
        const json_t *value = json_object_iter_value(i), **moved;

        if (strcmp(key, "enum") == 0 || strcmp(key, "const") == 0 ||
            strcmp(key, "default") == 0 || strcmp(key, "examples") == 0)
            continue;
        if (!note_anchors(doc, value))
            return false;
        if (!json_is_string(value) ||
            (strcmp(key, "$anchor") != 0 && strcmp(key, "$dynamicAnchor") != 0))
            continue;
        moved = ns_grown(doc->anchor, doc->n_anchors + 1, &doc->anchor_capacity,
                         sizeof(*moved));
        if (moved)
            doc->anchor = moved;
        if (!moved || !ns_table_reserve(&doc->anchors))
            return false;
        doc->anchor[doc->n_anchors++] = at;
        ns_table_put(
            &doc->anchors,
            ns_table_hash(json_string_value(value), json_string_length(value)),
            doc->n_anchors);
    }
    return true;
}

static bool
is_named(const json_t *schema, const char *keyword, const char *name)
{
    const char *anchor = json_string_value(json_object_get(schema, keyword));

    return anchor && strcmp(anchor, name) == 0;
}

/* *out is NULL where there is none. False when memory has run out. */
static bool
find_anchor(struct ns_schema_doc *doc, const char *name, const json_t **out)
{
    uint32_t hash = ns_table_hash(name, strlen(name)), number;
    size_t i;

    if (!doc->has_looked && !note_anchors(doc, doc->root))
        return false;
    doc->has_looked = true;
    for (i = ns_table_first(&doc->anchors, hash);
         (number = ns_table_at(&doc->anchors, &i, hash)) != 0;) {
        const json_t *schema = doc->anchor[number - 1];

        if (!is_named(schema, "$anchor", name) &&
            !is_named(schema, "$dynamicAnchor", name))
            continue;
        *out = schema;
        return true;
    }
    *out = NULL;
    return true;
}

void
ns_schema_doc_fini(struct ns_schema_doc *doc)
{
    ns_languages_fini(&doc->languages);
    ns_table_fini(&doc->anchors);
    free(doc->anchor);
}

enum ns_status
ns_schema_resolve(struct ns_schema_doc *doc, const json_t *ref,
                  const json_t **out, struct ns_error *err)
{
    const char *text = json_string_value(ref);
    const char *id = json_string_value(json_object_get(doc->root, "$id"));
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
        *out = doc->root;
        return NS_OK;
    }
    fragment = strdup(text + 1);
    if (!fragment)
        return ns_fail(err, NS_FATAL, "out of memory for a reference");
    unescape(fragment);
    if (fragment[0] == '/') {
        found = follow(doc->root, fragment);
    } else if (!find_anchor(doc, fragment, &found)) {
        free(fragment);
        return ns_fail(err, NS_FATAL, "out of memory for a reference");
    }
    free(fragment);
    if (!found)
        return refuse("bad_param", ref, "names nothing", err);
    *out = found;
    return NS_OK;
}
