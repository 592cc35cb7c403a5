#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/options.h"
#include "tests/fault.h"

static struct ns_error err;

static enum ns_status
parse(const char *text, struct ns_options **out)
{
    return ns_options_parse(text, strlen(text), "x.conf", out, &err);
}

static void
refused(const char *text, const char *sentence)
{
    struct ns_options *options = NULL;

    assert_int_equal(parse(text, &options), NS_REJECT);
    assert_null(options);
    if (!strstr(err.text, sentence))
        fail_msg("\"%s\" is not in \"%s\"", sentence, err.text);
}

static char *
print(const struct ns_options *options)
{
    char *text = NULL;
    size_t length;
    FILE *file = open_memstream(&text, &length);

    assert_non_null(file);
    ns_options_print(options, file);
    fclose(file);
    return text;
}

static void
an_empty_file_gives_the_defaults(void **state)
{
    struct ns_options *options;

    (void)state;
    assert_int_equal(parse("", &options), NS_OK);
    assert_null(options->engine.model);
    assert_string_equal(options->engine.backend, "cpu");
    assert_int_equal(options->engine.mode, NS_CHOOSE_AUTO);
    assert_int_equal(options->limits.default_max_tokens, 8192);
    assert_int_equal(options->limits.message_bytes, 16 << 20);
    assert_int_equal(options->daemon.drain_ms, 90000);
    assert_true(options->engine.prefix_sharing);
    ns_options_destroy(options);
}

static void
every_kind_of_value_is_read(void **state)
{
    struct ns_options *options;

    (void)state;
    assert_int_equal(parse("; first\n[engine]\nmodel = /m n/x ; tail\n"
                           "mode=hybrid\nseed=18446744073709551615\n"
                           "memory = 3G\ncompact_kv = Off\n"
                           "# second\n[daemon]\r\ndrain: 1500ms\r\n"
                           "checkpoint = 0\n[cpu]\nthreads = 8",
                           &options),
                     NS_OK);
    assert_string_equal(options->engine.model, "/m n/x");
    assert_int_equal(options->engine.mode, NS_CHOOSE_HYBRID);
    assert_true(options->engine.seed == UINT64_MAX);
    assert_true(options->engine.memory_bytes == (uint64_t)3 << 30);
    assert_false(options->engine.compact_kv);
    assert_int_equal(options->daemon.drain_ms, 1500);
    assert_int_equal(options->daemon.checkpoint_ms, 0);
    assert_int_equal(options->cpu.threads, 8);
    ns_options_destroy(options);
}

static void
errors_name_file_line_and_limit(void **state)
{
    char line[600];

    (void)state;
    refused("[engine]\n\nmodle = x\n", "x.conf:3: unknown key engine.modle");
    refused("model = x\n", "x.conf:1: unknown key model");
    refused("[engine]\nmodel = a\n[cpu]\n[engine]\nmodel = b\n",
            "x.conf:5: engine.model is set twice");
    refused("[engine]\nmodel = a\n  b\n", "x.conf:3: engine.model is set twice");
    refused("[engine]\nmodel =\n", "x.conf:2: engine.model is empty");
    refused("[engine]\nmode = fast\n", "auto|diffusion|ar|hybrid");
    refused("[engine]\nmode = au\n", "\"au\" is not one of");
    refused("[engine]\nmax_sequences = 0\n", "not within 1 and 4096");
    refused("[engine]\nmax_sequences = -1\n", "not a whole number");
    refused("[engine]\nmax_sequences = 64 \t 5\n", "not a whole number");
    refused("[engine]\nseed = 18446744073709551616\n", "not a whole number");
    refused("[limits]\nmessage = 99999999999999T\n", "not a size like 16M");
    refused("[limits]\nmessage = 2G\n", "not within 1K and 1G");
    refused("[daemon]\ndrain = 90\n", "not a time like 90s");
    refused("[daemon]\ndrain = 25h\n", "not within 0s and 1d");
    refused("[engine]\ncompact_kv = maybe\n", "is not yes or no");
    refused("[engine\nmodel = a\n", "x.conf:1: neither [section]");
    refused("[engine]\nmodel\n", "x.conf:2: neither [section]");
    refused("[http]\nlisten = a\nport = 1\n",
            "x.conf:3: unknown key http.port");
    memset(line, 'x', sizeof(line));
    memcpy(line, "[engine]\nmodel=", 15);
    line[sizeof(line) - 1] = '\0';
    refused(line, "x.conf:2: line is longer than");
    refused("[engine]\nmodel = \xff\n", "not a text file");
    assert_int_equal(ns_options_parse("[a]\0", 4, "x.conf", NULL, &err),
                     NS_REJECT);
}

static void
kafka_keys_are_kept_verbatim_but_not_the_two_of_ours(void **state)
{
    struct ns_options *options;
    char *text;

    (void)state;
    assert_int_equal(parse("[kafka]\nbootstrap.servers = a:1,b:2\n"
                           "sasl.password = canary\n", &options), NS_OK);
    assert_int_equal(options->n_kafka, 2);
    assert_string_equal(options->kafka[0].key, "bootstrap.servers");
    assert_string_equal(options->kafka[0].value, "a:1,b:2");
    assert_string_equal(options->kafka[1].value, "canary");
    text = print(options);
    assert_null(strstr(text, "canary"));
    assert_non_null(strstr(text, "sasl.password = ***"));
    free(text);
    ns_options_destroy(options);
    refused("[kafka]\nenable.auto.commit = false\n", "set by nightshift");
    refused("[kafka]\nenable.auto.offset.store = 0\n", "set by nightshift");
    refused("[kafka]\na = 1\na = 2\n", "x.conf:3: kafka.a is set twice");
}

static void
what_is_printed_reads_back_to_the_same(void **state)
{
    struct ns_options *first, *second;
    char *one, *two;

    (void)state;
    assert_int_equal(parse("[engine]\nmodel = /m\nmemory = 1536M\nseed = 7\n"
                           "[daemon]\ndrain = 61s\nretry = 20ms\n"
                           "[kafka]\ngroup.id = g\n", &first), NS_OK);
    one = print(first);
    assert_int_equal(parse(one, &second), NS_OK);
    two = print(second);
    assert_string_equal(one, two);
    assert_non_null(strstr(one, "memory = 1536M\n"));
    assert_non_null(strstr(one, "drain = 61s\n"));
    free(one);
    free(two);
    ns_options_destroy(first);
    ns_options_destroy(second);
}

static char reported[512];

static void
note(void *data, const char *key, bool taken)
{
    size_t used = strlen(reported);

    (void)data;
    snprintf(reported + used, sizeof(reported) - used, "%s:%s ", key,
             taken ? "taken" : "restart");
}

static void
a_reload_takes_what_may_change_and_names_the_rest(void **state)
{
    struct ns_options *live, *fresh;
    const char *model;

    (void)state;
    assert_int_equal(parse("[engine]\nmodel = /a\n", &live), NS_OK);
    model = live->engine.model;
    assert_int_equal(parse("[engine]\nmodel = /b\n[daemon]\ndrain = 5s\n",
                           &fresh), NS_OK);
    reported[0] = '\0';
    assert_int_equal(ns_options_adopt(live, fresh, note, NULL, &err), NS_OK);
    assert_string_equal(reported, "engine.model:restart daemon.drain:taken ");
    ns_options_destroy(fresh);
    assert_ptr_equal(live->engine.model, model);
    assert_string_equal(live->engine.model, "/a");
    assert_int_equal(live->daemon.drain_ms, 5000);
    ns_options_destroy(live);
}

static void
a_reload_that_fails_changes_nothing(void **state)
{
    struct ns_options *live, *fresh = NULL;
    char *before, *after;

    (void)state;
    assert_int_equal(parse("[daemon]\ndrain = 7s\n", &live), NS_OK);
    before = print(live);
    refused("[daemon]\ndrain = 5s\nlog_level = loud\n", "x.conf:3");
    assert_null(fresh);
    after = print(live);
    assert_string_equal(before, after);
    free(before);
    free(after);
    ns_options_destroy(live);
}

static void
a_file_that_others_may_write_is_refused(void **state)
{
    char path[] = "/tmp/nightshift-options-XXXXXX";
    struct ns_options *options = NULL;
    int fd = mkstemp(path);

    (void)state;
    assert_int_not_equal(fd, -1);
    assert_int_equal(write(fd, "[cpu]\nthreads=3\n", 16), 16);
    for (mode_t bit = 0; bit <= S_IWGRP; bit++) {
        if (bit != 0 && bit != S_IWGRP && bit != S_IWOTH)
            continue;
        assert_int_equal(fchmod(fd, 0600 | bit), 0);
        if (bit == 0) {
            assert_int_equal(ns_options_load(path, &options, &err), NS_OK);
            assert_int_equal(options->cpu.threads, 3);
            ns_options_destroy(options);
            options = NULL;
        } else {
            assert_int_equal(ns_options_load(path, &options, &err), NS_REJECT);
            assert_non_null(strstr(err.text, "may be written"));
            assert_null(options);
        }
    }
    close(fd);
    unlink(path);
    assert_int_equal(ns_options_load(path, &options, &err), NS_REJECT);
    assert_int_equal(ns_options_load("/", &options, &err), NS_REJECT);
}

/* The whole of a small file, NUL-terminated. */
static char *
slurp(const char *path)
{
    char *text = NULL;
    size_t size = 0, n;
    char chunk[4096];
    FILE *in = fopen(path, "r"), *out = open_memstream(&text, &size);

    assert_non_null(in);
    assert_non_null(out);
    while ((n = fread(chunk, 1, sizeof(chunk), in)) > 0)
        fwrite(chunk, 1, n, out);
    fclose(in);
    fclose(out);
    return text;
}

static void
the_manual_names_every_key_and_no_other(void **state)
{
    char *manual = slurp("config/nightshift.conf.5"), *at = manual;
    struct ns_option_info info;
    char entry[160];
    size_t n = 0, n_entries = 0;

    (void)state;
    for (; ns_option_at(n, &info); n++) {
        snprintf(entry, sizeof(entry),
                 info.reload ? ".TP\n.BR %s \" (reload)\"\n" : ".TP\n.B %s\n",
                 info.key);
        if (!strstr(manual, entry))
            fail_msg("nightshift.conf(5) lacks %s%s", info.key,
                     info.reload ? " (reload)" : "");
        assert_true(strlen(info.meaning) > 0);
    }
    while ((at = strstr(at, ".TP\n")) != NULL) {
        n_entries++;
        at++;
    }
    assert_int_equal(n_entries, n);
    free(manual);
}

static void
the_sample_holds_every_key_at_its_default(void **state)
{
    struct ns_options *sample, *plain;
    char *text = slurp("config/nightshift.conf"), *one, *two;
    struct ns_option_info info;
    char entry[160];

    (void)state;
    for (size_t i = 0; ns_option_at(i, &info); i++) {
        snprintf(entry, sizeof(entry), "\n%s%s =", info.fallback ? "" : "# ",
                 strchr(info.key, '.') + 1);
        if (!strstr(text, entry))
            fail_msg("the sample lacks %s", info.key);
    }
    assert_int_equal(parse(text, &sample), NS_OK);
    assert_int_equal(parse("", &plain), NS_OK);
    one = print(sample);
    two = print(plain);
    assert_string_equal(one, two);
    free(one);
    free(two);
    free(text);
    ns_options_destroy(sample);
    ns_options_destroy(plain);
}

static void
running_out_of_memory_is_fatal_and_leaks_nothing(void **state)
{
    enum ns_status status;
    int n;

    (void)state;
    for (n = 0;; n++) {
        struct ns_options *options = NULL;

        fault_arm(n);
        status = parse("[engine]\nmodel = /a\n[kafka]\na = b\nc = d\n",
                       &options);
        if (!fault_fired()) {
            ns_options_destroy(options);
            break;
        }
        assert_int_equal(status, NS_FATAL);
        assert_null(options);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n > 2);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_file_gives_the_defaults),
        cmocka_unit_test(every_kind_of_value_is_read),
        cmocka_unit_test(errors_name_file_line_and_limit),
        cmocka_unit_test(kafka_keys_are_kept_verbatim_but_not_the_two_of_ours),
        cmocka_unit_test(what_is_printed_reads_back_to_the_same),
        cmocka_unit_test(a_reload_takes_what_may_change_and_names_the_rest),
        cmocka_unit_test(a_reload_that_fails_changes_nothing),
        cmocka_unit_test(a_file_that_others_may_write_is_refused),
        cmocka_unit_test(the_manual_names_every_key_and_no_other),
        cmocka_unit_test(the_sample_holds_every_key_at_its_default),
        cmocka_unit_test(running_out_of_memory_is_fatal_and_leaks_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
