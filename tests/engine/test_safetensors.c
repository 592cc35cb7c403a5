#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/safetensors.h"
#include "tests/fault.h"
#include "tests/tiny.h"

#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"
#define FIRST "model-00001-of-00003.safetensors"
#define SECOND "model-00002-of-00003.safetensors"
#define EMBEDDING "model.decoder.embed_tokens.weight"

/* --- good files -------------------------------------------------------- */

static char *
make(uint32_t n_shards)
{
    struct tiny_recipe recipe = tiny_recipe();

    recipe.n_layers = 2;
    recipe.n_shards = n_shards;
    return tiny_make(&recipe);
}

static struct ns_safetensors *
open_good(const char *directory)
{
    struct ns_safetensors *st = NULL;
    struct ns_error err;

    if (ns_safetensors_open(directory, &st, &err) != NS_OK)
        fail_msg("%s", err.text);
    return st;
}

static void
a_file_gives_its_tensors_by_name_shape_and_value(void **state)
{
    char *directory = make(1);
    struct ns_safetensors *st = open_good(directory);
    const struct ns_stored_tensor *tensor, *all;
    float value;
    size_t n;

    (void)state;
    all = ns_safetensors_all(st, &n);
    assert_true(n > 40);
    for (size_t i = 1; i < n; i++)
        assert_true(strcmp(all[i - 1].name, all[i].name) < 0);

    tensor = ns_safetensors_find(st, EMBEDDING);
    assert_non_null(tensor);
    assert_string_equal(ns_stored_name(tensor->dtype), "F32");
    assert_int_equal(tensor->rank, 2);
    assert_int_equal(tensor->dim[0], 512);
    assert_int_equal(tensor->dim[1], 64);
    assert_int_equal(tensor->bytes, 512 * 64 * 4);
    memcpy(&value, (const char *)tensor->data + 777 * sizeof(value),
           sizeof(value));
    assert_true(value == (float)(tiny_gauss(1, EMBEDDING, 777) / sqrt(64)));

    assert_null(ns_safetensors_find(st, "model.decoder.nothing"));
    for (size_t i = 0; i < n; i++)
        assert_int_equal(all[i].used, &all[i] == tensor);
    ns_safetensors_close(st);
    tiny_remove(directory);
}

static void
shards_give_the_same_tensors_as_one_file(void **state)
{
    char *one = make(1), *many = make(3);
    struct ns_safetensors *a = open_good(one), *b = open_good(many);
    const struct ns_stored_tensor *x, *y;
    size_t n, n_many, length, file_bytes;
    bool seen[3] = { false };

    (void)state;
    x = ns_safetensors_all(a, &n);
    y = ns_safetensors_all(b, &n_many);
    assert_int_equal(n, n_many);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(x[i].name, y[i].name);
        assert_int_equal(x[i].bytes, y[i].bytes);
        assert_memory_equal(x[i].data, y[i].data, x[i].bytes);
        seen[y[i].shard] = true;
    }
    assert_true(seen[0] && seen[1] && seen[2]);
    assert_int_equal(ns_safetensors_n_shards(b), 3);
    assert_string_equal(ns_safetensors_shard_name(b, 1), SECOND);
    assert_null(ns_safetensors_index(a, &length));
    assert_non_null(ns_safetensors_index(b, &length));
    assert_true(length > 100);
    assert_non_null(ns_safetensors_header(b, 1, &length, &file_bytes));
    assert_true(length > 100 && length < file_bytes);
    ns_safetensors_close(a);
    ns_safetensors_close(b);
    tiny_remove(one);
    tiny_remove(many);
}

static void
bytes_can_be_read_again_after_pages_were_dropped(void **state)
{
    char *directory = make(3);
    struct ns_safetensors *st = open_good(directory);
    size_t n;
    const struct ns_stored_tensor *all = ns_safetensors_all(st, &n);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        void *before = malloc(all[i].bytes);

        assert_non_null(before);
        ns_safetensors_want(st, &all[i]);
        memcpy(before, all[i].data, all[i].bytes);
        ns_safetensors_drop(st, &all[i]);
        assert_memory_equal(before, all[i].data, all[i].bytes);
        free(before);
    }
    ns_safetensors_close(st);
    tiny_remove(directory);
}

static void
vector_files_with_integers_and_masks_open(void **state)
{
    struct ns_safetensors *st = NULL;
    const struct ns_stored_tensor *ids;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_safetensors_open_file(
                         "tests/cases/text_fp32/forward_len15.safetensors",
                         &st, &err), NS_OK);
    ids = ns_safetensors_find(st, "prompt_ids");
    assert_non_null(ids);
    assert_int_equal(ids->dtype, NS_STORED_I32);
    assert_int_equal(ids->dim[0], 15);
    ns_safetensors_close(st);
}

static void
a_single_file_goes_before_an_index(void **state)
{
    char *directory = make(1);

    (void)state;
    tiny_write_file(directory, INDEX, "not read", 8);
    ns_safetensors_close(open_good(directory));
    tiny_remove(directory);
}

/* --- bad files: each is a good one with one thing changed -------------- */

struct file {
    json_t *header;
    unsigned char *data;
    size_t n;
};

static struct file
load(const char *directory, const char *name)
{
    struct file file;
    size_t length, header_length = 0;
    unsigned char *bytes = tiny_read_file(directory, name, &length);

    for (int i = 7; i >= 0; i--)
        header_length = header_length << 8 | bytes[i];
    file.header = json_loadb((char *)bytes + 8, header_length, 0, NULL);
    assert_non_null(file.header);
    file.n = length - 8 - header_length;
    file.data = malloc(file.n + 64);
    assert_non_null(file.data);
    memcpy(file.data, bytes + 8 + header_length, file.n);
    memset(file.data + file.n, 0, 64);
    free(bytes);
    return file;
}

/* A file with this header's text and this data. */
static void
save_text(const char *directory, const char *name, const char *header,
          size_t header_length, const void *data, size_t n)
{
    unsigned char *bytes = malloc(8 + header_length + n);

    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)header_length >> (8 * i));
    memcpy(bytes + 8, header, header_length);
    if (n > 0)
        memcpy(bytes + 8 + header_length, data, n);
    tiny_write_file(directory, name, bytes, 8 + header_length + n);
    free(bytes);
}

static void
save(const char *directory, const char *name, struct file *file)
{
    char *text = json_dumps(file->header, JSON_COMPACT);

    assert_non_null(text);
    save_text(directory, name, text, strlen(text), file->data, file->n);
    free(text);
    json_decref(file->header);
    free(file->data);
}

static void
set_offsets(struct file *file, const char *name, json_int_t begin,
            json_int_t end)
{
    json_t *entry = json_object_get(file->header, name);

    assert_non_null(entry);
    json_object_set_new(entry, "data_offsets",
                        json_pack("[I, I]", begin, end));
}

static json_int_t
offset(const struct file *file, const char *name, size_t which)
{
    const json_t *entry = json_object_get(file->header, name);

    return json_integer_value(
        json_array_get(json_object_get(entry, "data_offsets"), which));
}

/* Opening says no, leaves its output alone, and the sentence holds all of
 * `words`, which are separated by '|'. Removes the directory. */
static void
expect(char *directory, const char *words)
{
    struct ns_safetensors *st = NULL;
    struct ns_error err = { 0 };
    char copy[400], *word, *rest = NULL;

    assert_int_equal(ns_safetensors_open(directory, &st, &err), NS_REJECT);
    assert_null(st);
    snprintf(copy, sizeof(copy), "%s", words);
    for (word = strtok_r(copy, "|", &rest); word;
         word = strtok_r(NULL, "|", &rest))
        if (!strstr(err.text, word))
            fail_msg("\"%s\" does not say \"%s\"", err.text, word);
    tiny_remove(directory);
}

static void
a_truncated_shard_is_refused(void **state)
{
    static const size_t kept[] = { 0, 7, 8, 100, 5000, 20000 };

    (void)state;
    for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) {
        char *directory = make(3);
        size_t length;
        void *bytes = tiny_read_file(directory, SECOND, &length);

        assert_true(length > kept[i]);
        tiny_write_file(directory, SECOND, bytes, kept[i]);
        free(bytes);
        expect(directory, SECOND);
    }
    for (size_t cut = 1; cut < 5; cut++) {
        char *directory = make(1);
        size_t length;
        void *bytes = tiny_read_file(directory, SINGLE, &length);

        tiny_write_file(directory, SINGLE, bytes, length - cut);
        free(bytes);
        expect(directory, SINGLE "|tensor model.|truncated|ends at byte");
    }
}

static void
a_missing_shard_is_refused(void **state)
{
    char *directory = make(3), path[256];

    (void)state;
    snprintf(path, sizeof(path), "%s/" SECOND, directory);
    assert_int_equal(unlink(path), 0);
    expect(directory, SECOND "|No such file");
    expect(tiny_directory(), SINGLE "|" INDEX);
}

static json_t *
load_index(const char *directory)
{
    size_t length;
    char *text = tiny_read_file(directory, INDEX, &length);
    json_t *index = json_loadb(text, length, 0, NULL);

    assert_non_null(index);
    free(text);
    return index;
}

static void
save_index(const char *directory, json_t *index)
{
    char *text = json_dumps(index, 0);

    assert_non_null(text);
    tiny_write_file(directory, INDEX, text, strlen(text));
    free(text);
    json_decref(index);
}

/* One entry of weight_map changed (NULL: taken out). */
static char *
with_entry(const char *name, json_t *value)
{
    char *directory = make(3);
    json_t *index = load_index(directory);
    json_t *map = json_object_get(index, "weight_map");

    if (value)
        json_object_set_new(map, name, value);
    else
        json_object_del(map, name);
    save_index(directory, index);
    return directory;
}

static void
an_index_that_differs_from_its_shards_is_refused(void **state)
{
    (void)state;
    expect(with_entry(EMBEDDING, json_string(SECOND)),
           INDEX "|" EMBEDDING "|should be in " SECOND "|it is in " FIRST);
    expect(with_entry("model.decoder.more", json_string(SECOND)),
           INDEX "|model.decoder.more|" SECOND "|does not hold it");
    expect(with_entry(EMBEDDING, NULL),
           INDEX "|" EMBEDDING "|" FIRST "|not in the index");
}

static void
an_index_that_leaves_its_directory_is_refused(void **state)
{
    static const char *const names[] = {
        "../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".",
        ".hidden", "", "a b", "caf\xc3\xa9.safetensors", "a\nb",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        expect(with_entry(EMBEDDING, json_string(names[i])),
               INDEX "|" EMBEDDING "|not a file name");
    expect(with_entry(EMBEDDING, json_integer(7)), "the shard 7");
    expect(with_entry(EMBEDDING, json_null()), "the shard null");
}

static void
an_index_without_a_map_is_refused(void **state)
{
    static const char *const texts[] = {
        "{}", "{\"weight_map\": []}", "{\"weight_map\": {}}", "[1]", "",
        "{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}",
        "{\"weight_map\": {\"a\": \"x\"}", "{\"weight_map\": {\"\": \"x\"}}",
        "\xff\xfe",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        char *directory = make(3);

        tiny_write_file(directory, INDEX, texts[i], strlen(texts[i]));
        expect(directory, INDEX);
    }
}

static void
too_many_shards_are_refused(void **state)
{
    char *directory = make(3);
    json_t *index = load_index(directory);
    json_t *map = json_object_get(index, "weight_map");

    (void)state;
    for (int i = 0; i < 1100; i++) {
        char name[32];

        snprintf(name, sizeof(name), "t%d", i);
        json_object_set_new(map, name, json_string(name));
    }
    save_index(directory, index);
    expect(directory, INDEX "|1103 shards|limit 1024");
}

static void
a_tensor_in_two_shards_is_refused(void **state)
{
    char *directory = make(3);
    struct file file = load(directory, SECOND);

    (void)state;
    json_object_set_new(file.header, EMBEDDING,
                        json_pack("{s:s, s:[i], s:[I, I]}", "dtype", "F32",
                                  "shape", 4, "data_offsets",
                                  (json_int_t)file.n,
                                  (json_int_t)file.n + 16));
    file.n += 16;
    save(directory, SECOND, &file);
    expect(directory, EMBEDDING "|" FIRST "|" SECOND);
}

static void
a_header_that_lies_about_its_length_is_refused(void **state)
{
    static const uint64_t lies[] = { UINT64_MAX, UINT64_MAX - 7,
                                     (uint64_t)INT64_MAX, 1ull << 32 };
    char *directory, path[256];
    unsigned char *bytes;
    size_t length;

    (void)state;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        directory = make(1);
        bytes = tiny_read_file(directory, SINGLE, &length);
        memcpy(bytes, &lies[i], sizeof(lies[i]));
        tiny_write_file(directory, SINGLE, bytes, length);
        free(bytes);
        expect(directory, SINGLE "|the header is said to be");
    }
    /* A file that is long enough for it: the limit stops it. */
    directory = make(1);
    bytes = tiny_read_file(directory, SINGLE, &length);
    memcpy(bytes, &(uint64_t){ 100u << 20 }, 8);
    tiny_write_file(directory, SINGLE, bytes, length);
    free(bytes);
    snprintf(path, sizeof(path), "%s/" SINGLE, directory);
    assert_int_equal(truncate(path, 200 << 20), 0);
    expect(directory, SINGLE "|104857600 bytes long|limit 33554432");
}

static void
trailing_bytes_are_refused(void **state)
{
    char *directory = make(1);
    struct file file = load(directory, SINGLE);

    (void)state;
    file.n += 3;
    save(directory, SINGLE, &file);
    expect(directory, SINGLE "|3 trailing bytes");
}

/* The file with other offsets for the norm, which lies between others. */
#define NORM "model.decoder.norm.weight"

static char *
with_offsets(json_int_t begin_by, json_int_t end_by)
{
    char *directory = make(1);
    struct file file = load(directory, SINGLE);

    set_offsets(&file, NORM, offset(&file, NORM, 0) + begin_by,
                offset(&file, NORM, 1) + end_by);
    save(directory, SINGLE, &file);
    return directory;
}

static void
offsets_that_do_not_tile_the_data_are_refused(void **state)
{
    (void)state;
    expect(with_offsets(-4, -4), SINGLE "|overlaps|by 4 bytes|" NORM);
    expect(with_offsets(4, 4), SINGLE "|4 bytes in front of|" NORM);
    expect(with_offsets(0, 4), SINGLE "|" NORM "|shape takes 256|give 260");
    expect(with_offsets(256, 0), SINGLE "|" NORM "|shape takes 256|give 0");
    expect(with_offsets(257, 0), SINGLE "|" NORM "|backwards");
    expect(with_offsets(100000000, 100000000), SINGLE "|" NORM "|ends at");
    expect(with_offsets(-10000000, 0), SINGLE "|" NORM "|data_offsets is -");
    expect(with_offsets(0, INT64_MAX / 2), SINGLE "|" NORM "|ends at");
}

/* The entry of NORM with one field replaced. */
static char *
with_field(const char *field, json_t *value)
{
    char *directory = make(1);
    struct file file = load(directory, SINGLE);
    json_t *entry = json_object_get(file.header, NORM);

    assert_non_null(entry);
    if (value)
        json_object_set_new(entry, field, value);
    else
        json_object_del(entry, field);
    save(directory, SINGLE, &file);
    return directory;
}

static void
a_wrong_field_is_refused(void **state)
{
    (void)state;
    expect(with_field("dtype", json_string("F4")), NORM "|dtype is \"F4\"");
    expect(with_field("dtype", json_integer(4)), NORM "|dtype is 4");
    expect(with_field("dtype", NULL), NORM "|dtype is missing");
    expect(with_field("dtype", json_string("BF16")), NORM "|shape takes 128");
    expect(with_field("shape", NULL), NORM "|shape is missing");
    expect(with_field("shape", json_string("64")), NORM "|shape is \"64\"");
    expect(with_field("shape", json_pack("[i]", 63)), NORM "|takes 252");
    expect(with_field("shape", json_pack("[i]", -64)), NORM "|is -64");
    expect(with_field("shape", json_pack("[f]", 64.0)), NORM "|is 64.0");
    expect(with_field("shape", json_pack("[n]")), NORM "|is null");
    expect(with_field("shape", json_pack("[iiiiiiiii]", 64, 1, 1, 1, 1, 1, 1,
                                         1, 1)),
           NORM "|9 dimensions|limit 8");
    expect(with_field("shape", json_pack("[II]", (json_int_t)1 << 40,
                                         (json_int_t)1 << 40)),
           NORM "|overflows at dimension 1");
    expect(with_field("shape", json_pack("[II]", (json_int_t)1 << 62,
                                         (json_int_t)4)),
           NORM "|overflows at dimension 0");
    expect(with_field("data_offsets", NULL), NORM "|data_offsets is missing");
    expect(with_field("data_offsets", json_pack("[i]", 0)),
           NORM "|data_offsets is a list");
    expect(with_field("data_offsets", json_pack("[fi]", 0.5, 64)),
           NORM "|data_offsets is 0.5");
}

/* A file of this header over `n` bytes of zeros. */
static char *
with_header(const char *header, size_t length, size_t n)
{
    static const unsigned char zeros[64];
    char *directory = tiny_directory();

    assert_true(n <= sizeof(zeros));
    save_text(directory, SINGLE, header, length, zeros, n);
    return directory;
}

#define ENTRY "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}"
#define HEADER(text) with_header(text, sizeof(text) - 1, 1)

static void
a_header_that_is_no_header_is_refused(void **state)
{
    char name[600], header[800];

    (void)state;
    expect(HEADER(""), SINGLE "|not JSON");
    expect(HEADER("[]"), SINGLE "|not an object");
    expect(HEADER("{"), SINGLE "|not JSON");
    expect(HEADER("{\"a\":" ENTRY "} x"), SINGLE "|not JSON");
    expect(HEADER("{\"a\":" ENTRY ",\"a\":" ENTRY "}"),
           SINGLE "|duplicate object key");
    expect(HEADER("{\"a\":7}"), SINGLE "|tensor a: dtype is missing");
    expect(HEADER("{\"\":" ENTRY "}"), SINGLE "|name of tensor 0");
    expect(HEADER("{\"a\\u001b[2J\":" ENTRY "}"), SINGLE "|printable ASCII");
    expect(HEADER("{\"a\\u0000b\":" ENTRY "}"), SINGLE "|not JSON");
    expect(HEADER("{\"\xc3\xa9\":" ENTRY "}"), SINGLE "|printable ASCII");
    expect(HEADER("{\"\xff\":" ENTRY "}"), SINGLE "|not JSON");
    expect(HEADER("{}"), SINGLE "|1 trailing bytes");
    expect(HEADER("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":"
                  "[0,99999999999999999999]}}"), SINGLE "|not JSON");
    memset(name, 'n', sizeof(name));
    snprintf(header, sizeof(header), "{\"%.300s\":" ENTRY "}", name);
    expect(with_header(header, strlen(header), 1), SINGLE "|longer than 200");
}

static void
what_is_no_file_is_refused(void **state)
{
    char *directory = tiny_directory(), path[256];

    (void)state;
    snprintf(path, sizeof(path), "%s/" SINGLE, directory);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect(directory, SINGLE "|not a regular file");

    directory = tiny_directory();
    snprintf(path, sizeof(path), "%s/" SINGLE, directory);
    assert_int_equal(symlink("nowhere", path), 0);
    expect(directory, "neither");
}

static void
odd_but_lawful_files_open(void **state)
{
    static const char *const headers[] = {
        "{\"a\":" ENTRY "}      ",
        "{\"__metadata__\":{\"x\":\"y\"},\"a\":" ENTRY "}",
        /* no bytes at all, at both ends and in the middle */
        "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]},"
        "\"a\":" ENTRY ","
        "\"f\":{\"dtype\":\"F64\",\"shape\":[0],\"data_offsets\":[1,1]}}",
        "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[0,1]}}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        char *directory = with_header(headers[i], strlen(headers[i]), 1);

        ns_safetensors_close(open_good(directory));
        tiny_remove(directory);
    }
}

static void
a_check_of_bytes_says_what_opening_the_file_says(void **state)
{
    char *directory = make(1);
    struct ns_error err = { 0 };
    size_t length;
    unsigned char *bytes = tiny_read_file(directory, SINGLE, &length);

    (void)state;
    assert_int_equal(ns_safetensors_check(bytes, length, "x", &err), NS_OK);
    assert_int_equal(ns_safetensors_check(bytes, length - 1, "x", &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "truncated"));
    assert_int_equal(ns_safetensors_check(NULL, 0, "x", &err), NS_REJECT);
    free(bytes);
    tiny_remove(directory);
}

/* Opens with the n-th allocation failing, for all n. Where jansson's count too
 * (`lax`), it may take a string without memory for bad JSON, or lose a byte of
 * it and go on: no more can be asked than that nothing leaks or is used. */
static void
open_with_failures(const char *directory, bool lax)
{
    struct ns_safetensors *st = NULL;
    struct ns_error err = { 0 };
    enum ns_status status;
    int n;

    for (n = 0;; n++) {
        fault_arm(n);
        status = ns_safetensors_open(directory, &st, &err);
        if (!fault_fired())
            break;
        if (status == NS_OK && lax) {
            ns_safetensors_close(st);
            st = NULL;
        } else if (status != NS_FATAL && !lax) {
            fail_msg("allocation %d: %s: %s", n, ns_status_name(status),
                     err.text);
        }
        assert_null(st);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n >= (lax ? 100 : 5));
    ns_safetensors_close(st);
}

static void
every_allocation_may_fail(void **state)
{
    char *one = make(1), *three = make(3);

    (void)state;
    open_with_failures(one, false);
    open_with_failures(three, false);
    /* jansson allocates in its own library, which the linker does not wrap:
     * through this it takes our malloc, and fails when that does. */
    json_set_alloc_funcs(malloc, free);
    open_with_failures(one, true);
    open_with_failures(three, true);
    tiny_remove(one);
    tiny_remove(three);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_gives_its_tensors_by_name_shape_and_value),
        cmocka_unit_test(shards_give_the_same_tensors_as_one_file),
        cmocka_unit_test(bytes_can_be_read_again_after_pages_were_dropped),
        cmocka_unit_test(vector_files_with_integers_and_masks_open),
        cmocka_unit_test(a_single_file_goes_before_an_index),
        cmocka_unit_test(a_truncated_shard_is_refused),
        cmocka_unit_test(a_missing_shard_is_refused),
        cmocka_unit_test(an_index_that_differs_from_its_shards_is_refused),
        cmocka_unit_test(an_index_that_leaves_its_directory_is_refused),
        cmocka_unit_test(an_index_without_a_map_is_refused),
        cmocka_unit_test(too_many_shards_are_refused),
        cmocka_unit_test(a_tensor_in_two_shards_is_refused),
        cmocka_unit_test(a_header_that_lies_about_its_length_is_refused),
        cmocka_unit_test(trailing_bytes_are_refused),
        cmocka_unit_test(offsets_that_do_not_tile_the_data_are_refused),
        cmocka_unit_test(a_wrong_field_is_refused),
        cmocka_unit_test(a_header_that_is_no_header_is_refused),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(odd_but_lawful_files_open),
        cmocka_unit_test(a_check_of_bytes_says_what_opening_the_file_says),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
