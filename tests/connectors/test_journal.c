#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/log.h"
#include "connectors/journal.h"
#include "tests/connectors/faulty_io.h"
#include "tests/connectors/folder.h"
#include "tests/fault.h"

/* Lines of the form that a result has, as far as a journal looks at it. */
#define L(n) "{\"id\":\"batch_req_" #n "\"}\n"

struct found {
    char text[4096];
    size_t n;
};

static enum ns_journal_verdict
judge(void *context, const char *line, size_t length)
{
    struct found *found = context;

    if (length < 5 || line[0] != '{' || line[length - 1] != '}' ||
        memchr(line, '\0', length))
        return NS_JOURNAL_ALIEN;
    if (memmem(line, length, "drop", 4))
        return NS_JOURNAL_DROP;
    memcpy(found->text + found->n, line, length);
    found->n += length;
    found->text[found->n++] = '\n';
    found->text[found->n] = '\0';
    return NS_JOURNAL_KEEP;
}

static struct ns_journal_options
options_for(struct found *found, bool compressed)
{
    *found = (struct found){ .n = 0 };
    return (struct ns_journal_options){
        .compressed = compressed,
        .mode = 0600,
        .io = &faulty_io,
        .judge = judge,
        .context = found,
    };
}

static struct ns_journal *
open_ok(const struct ns_journal_options *options)
{
    struct ns_journal *journal = NULL;
    struct ns_error err;

    if (ns_journal_open(folder_fd, "out", options, &journal, &err) != NS_OK)
        fail_msg("%s", err.text);
    return journal;
}

static void
append_ok(struct ns_journal *journal, const char *lines)
{
    struct ns_error err;

    assert_int_equal(ns_journal_append(journal, lines, strlen(lines), &err),
                     NS_OK);
}

static void
what_was_appended_is_read_back(void **state)
{
    struct found found;

    (void)state;
    for (int compressed = 0; compressed < 2; compressed++) {
        struct ns_journal_options options = options_for(&found, compressed);
        struct ns_journal *journal;

        folder_empty(folder_fd);
        journal = open_ok(&options);
        append_ok(journal, L(1) L(2));
        append_ok(journal, L(3));
        ns_journal_close(journal);
        journal = open_ok(&options);
        assert_string_equal(found.text, L(1) L(2) L(3));
        append_ok(journal, L(4));
        ns_journal_close(journal);
        found.n = 0;
        ns_journal_close(open_ok(&options));
        assert_string_equal(found.text, L(1) L(2) L(3) L(4));
    }
}

/* Row 35: a journal cut at any byte gives the longest prefix of whole units,
 * and goes on from there. */
static void
every_truncation_gives_the_whole_prefix(void **state)
{
    static const char *const batches[] = { L(1) L(2), L(33), L(444) L(5) };
    struct found found;

    (void)state;
    for (int compressed = 0; compressed < 2; compressed++) {
        struct ns_journal_options options = options_for(&found, compressed);
        struct ns_journal *journal;
        size_t ends[3], length;
        char *whole;

        folder_empty(folder_fd);
        journal = open_ok(&options);
        for (int i = 0; i < 3; i++) {
            append_ok(journal, batches[i]);
            free(folder_read("out", &ends[i]));
        }
        ns_journal_close(journal);
        whole = folder_read("out", &length);
        for (size_t cut = 0; cut <= length; cut++) {
            char want[256] = "";

            for (int i = 0; compressed && i < 3; i++)
                if (cut >= ends[i])
                    strcat(want, batches[i]);
            if (!compressed && cut > 0) {
                memcpy(want, whole, cut);
                want[cut] = '\0';
                *(strrchr(want, '\n') ? strrchr(want, '\n') + 1 : want) = '\0';
            }
            folder_write("out", whole, cut);
            found = (struct found){ .n = 0 };
            journal = open_ok(&options);
            assert_string_equal(found.text, want);
            append_ok(journal, L(9));
            ns_journal_close(journal);
            found = (struct found){ .n = 0 };
            ns_journal_close(open_ok(&options));
            strcat(want, L(9));
            assert_string_equal(found.text, want);
            assert_false(folder_has("out.corrupt")); /* torn, not damaged */
        }
        free(whole);
    }
}

/* Row 35: no flipped bit of an LZ4 journal goes unseen, and what it damages is
 * kept aside. */
static void
every_flipped_bit_of_lz4_ends_the_prefix_and_is_kept(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, true);
    struct ns_journal *journal;
    size_t first, length;
    char *whole;

    (void)state;
    options.ours = true;
    folder_empty(folder_fd);
    journal = open_ok(&options);
    append_ok(journal, L(1) L(2));
    free(folder_read("out", &first));
    append_ok(journal, L(3));
    append_ok(journal, L(4));
    ns_journal_close(journal);
    whole = folder_read("out", &length);
    ns_log_set_level(NS_LOG_ERROR);
    for (size_t bit = 0; bit < length * 8; bit++) {
        size_t kept;
        char *copy;

        whole[bit / 8] = (char)(whole[bit / 8] ^ 1 << bit % 8);
        folder_write("out", whole, length);
        found = (struct found){ .n = 0 };
        journal = open_ok(&options);
        ns_journal_close(journal);
        if (strstr(found.text, bit / 8 < first ? L(1) : L(4)) ||
            (bit / 8 >= first && !strstr(found.text, L(1) L(2))))
            fail_msg("bit %zu: %s", bit, found.text);
        copy = folder_read("out.corrupt", &kept);
        if (copy) { /* else the flip made it look torn */
            assert_int_equal(kept, length);
            assert_memory_equal(copy, whole, length);
            free(copy);
            unlinkat(folder_fd, "out.corrupt", 0);
        }
        whole[bit / 8] = (char)(whole[bit / 8] ^ 1 << bit % 8);
    }
    ns_log_set_level(NS_LOG_INFO);
    free(whole);
}

static void
damage_in_the_middle_is_kept_aside_and_what_follows_is_cut(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, false);
    static const char damaged[] = L(1) "\0\0\0\0\n" L(3);
    size_t length;
    char *text;

    (void)state;
    folder_empty(folder_fd);
    folder_write("out", damaged, sizeof(damaged) - 1);
    ns_journal_close(open_ok(&options));
    assert_string_equal(found.text, L(1));
    text = folder_read("out", NULL);
    assert_string_equal(text, L(1));
    free(text);
    text = folder_read("out.corrupt", &length);
    assert_int_equal(length, sizeof(damaged) - 1);
    assert_memory_equal(text, damaged, length);
    free(text);
}

static void
somebody_elses_file_is_refused_and_left_alone(void **state)
{
    static const char *const alien[] = { "dear diary", "dear diary\n",
                                         "{\"id\":\"x", "a\n" L(1),
                                         "\x04\x22\x4d" };
    struct found found;
    struct ns_journal_options options = options_for(&found, false);

    (void)state;
    for (size_t i = 0; i < sizeof(alien) / sizeof(alien[0]); i++) {
        struct ns_journal *journal = NULL;
        struct ns_error err;
        char *text;

        folder_empty(folder_fd);
        folder_write("out", alien[i], strlen(alien[i]));
        assert_int_equal(
            ns_journal_open(folder_fd, "out", &options, &journal, &err),
            NS_REJECT);
        assert_string_equal(err.code, "not_ours");
        text = folder_read("out", NULL);
        assert_string_equal(text, alien[i]);
        free(text);
    }
}

static void
a_locked_journal_is_refused(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, false);
    struct ns_journal *journal, *second = NULL;
    struct ns_error err;

    (void)state;
    folder_empty(folder_fd);
    options.lock = true;
    journal = open_ok(&options);
    assert_int_equal(ns_journal_open(folder_fd, "out", &options, &second, &err),
                     NS_RETRY);
    assert_string_equal(err.code, "locked");
    ns_journal_close(journal);
    ns_journal_close(open_ok(&options));
}

static void
a_rewrite_drops_lines_and_keeps_the_lock(void **state)
{
    struct found found;

    (void)state;
    for (int compressed = 0; compressed < 2; compressed++) {
        struct ns_journal_options options = options_for(&found, compressed);
        struct ns_journal *journal, *second = NULL;
        struct ns_error err;

        folder_empty(folder_fd);
        journal = open_ok(&options);
        append_ok(journal, L(1) L(drop) L(2));
        append_ok(journal, L(dropped));
        ns_journal_close(journal);
        options.rewrite = options.lock = true;
        found = (struct found){ .n = 0 };
        journal = open_ok(&options);
        assert_int_equal(
            ns_journal_open(folder_fd, "out", &options, &second, &err),
            NS_RETRY);
        append_ok(journal, L(3));
        ns_journal_close(journal);
        options.rewrite = false;
        found = (struct found){ .n = 0 };
        ns_journal_close(open_ok(&options));
        assert_string_equal(found.text, L(1) L(2) L(3));
        assert_false(folder_has("out.new"));
    }
}

/* Row 33: any call of an append may fail, once or for ever; a line is in the
 * file exactly once if the append said OK, and not at all if it did not. */
static void
the_nth_failing_call_leaves_whole_batches(void **state)
{
    static const int errors[] = { ENOSPC, EIO };
    struct found found;
    int failures = 0;

    (void)state;
    for (int variant = 0; variant < 8; variant++) {
        bool compressed = variant & 1, for_ever = variant & 2;
        struct ns_journal_options options = options_for(&found, compressed);
        bool fired = true;

        options.reserve_bytes = 1 << 16;
        for (int n = 0; fired; n++) {
            char want[256] = "";
            struct ns_journal *journal;
            struct ns_error err;
            enum ns_status status;

            folder_empty(folder_fd);
            journal = open_ok(&options);
            append_ok(journal, L(1));
            strcat(want, L(1));
            faulty_arm(n, errors[variant >> 2], for_ever);
            for (int i = 0; i < 2; i++) {
                status = ns_journal_append(journal, L(2), strlen(L(2)), &err);
                if (status == NS_OK) {
                    strcat(want, L(2));
                } else {
                    assert_int_equal(status, NS_RETRY);
                    assert_string_equal(err.code,
                                        variant >> 2 ? "io" : "storage_full");
                    failures++;
                }
            }
            fired = faulty_fired();
            append_ok(journal, L(3)); /* the world is well again */
            strcat(want, L(3));
            assert_int_equal(ns_journal_finish(journal, &err), NS_OK);
            ns_journal_close(journal);
            found = (struct found){ .n = 0 };
            ns_journal_close(open_ok(&options));
            assert_string_equal(found.text, want);
        }
    }
    assert_true(failures > 8);
}

/* A process that dies anywhere in an append leaves what the next one can read:
 * all that was said to be stored, and of the rest whole lines or none. */
static void
dying_inside_an_append_loses_nothing_that_was_stored(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, false);
    bool fired = true;

    (void)state;
    for (int n = 0; fired; n++) {
        struct ns_journal *journal;
        struct ns_error err;

        folder_empty(folder_fd);
        journal = open_ok(&options);
        append_ok(journal, L(1));
        faulty_arm(n, EIO, true); /* from here no call does anything */
        (void)ns_journal_append(journal, L(2), strlen(L(2)), &err);
        fired = faulty_fired();
        ns_journal_close(journal);
        found = (struct found){ .n = 0 };
        ns_journal_close(open_ok(&options));
        assert_true(strcmp(found.text, L(1)) == 0 ||
                    strcmp(found.text, L(1) L(2)) == 0);
    }
}

static void
every_failing_call_of_an_open_is_an_error_and_loses_nothing(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, false);
    bool fired = true;

    (void)state;
    options.rewrite = true;
    for (int n = 0; fired; n++) {
        struct ns_journal *journal = NULL;
        struct ns_error err;
        enum ns_status status;

        folder_empty(folder_fd);
        folder_write("out", L(1) L(drop) L(2) "{\"id\":\"batch",
                     strlen(L(1) L(drop) L(2)) + 12);
        faulty_arm(n, EIO, false);
        status = ns_journal_open(folder_fd, "out", &options, &journal, &err);
        fired = faulty_fired();
        assert_true(status == NS_OK || (fired && status == NS_RETRY));
        ns_journal_close(journal);
        found = (struct found){ .n = 0 };
        ns_journal_close(open_ok(&options));
        assert_string_equal(found.text, L(1) L(2));
    }
}

static void
a_failed_flush_goes_on_with_another_descriptor(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, false);
    struct ns_journal *journal;
    struct ns_error err;

    (void)state;
    folder_empty(folder_fd);
    options.lock = true;
    journal = open_ok(&options);
    append_ok(journal, L(1));
    faulty.only = "fdatasync";
    faulty_arm(0, EIO, false);
    append_ok(journal, L(2)); /* the second attempt, on a fresh descriptor */
    assert_true(faulty_fired());
    faulty_arm(0, EIO, true);
    assert_int_equal(ns_journal_append(journal, L(3), strlen(L(3)), &err),
                     NS_RETRY);
    faulty_fired();
    faulty.only = NULL;
    append_ok(journal, L(4));
    /* A file that became another one is not written to. */
    faulty.only = "fdatasync";
    faulty_arm(0, EIO, false);
    unlinkat(folder_fd, "out", 0);
    folder_write("out", "x", 1);
    assert_int_equal(ns_journal_append(journal, L(5), strlen(L(5)), &err),
                     NS_FATAL);
    faulty_fired();
    faulty.only = NULL;
    ns_journal_close(journal);
}

static void
an_empty_lz4_journal_ends_as_a_valid_file(void **state)
{
    struct found found;
    struct ns_journal_options options = options_for(&found, true);
    struct ns_journal *journal;
    struct ns_error err;
    size_t length;

    (void)state;
    folder_empty(folder_fd);
    journal = open_ok(&options);
    assert_int_equal(ns_journal_finish(journal, &err), NS_OK);
    ns_journal_close(journal);
    free(folder_read("out", &length));
    assert_true(length > 4);
    ns_journal_close(open_ok(&options));
    assert_int_equal(found.n, 0);
}

static void
memory_running_out_is_an_error_and_no_leak(void **state)
{
    struct found found;
    enum ns_status status = NS_FATAL;

    (void)state;
    for (int n = 0; status != NS_OK; n++) {
        struct ns_journal_options options = options_for(&found, true);
        struct ns_journal *journal = NULL;
        struct ns_error err;
        bool fired;

        options.rewrite = true;
        folder_empty(folder_fd);
        fault_arm(n);
        status = ns_journal_open(folder_fd, "out", &options, &journal, &err);
        if (status == NS_OK)
            status = ns_journal_append(journal, L(1), strlen(L(1)), &err);
        fired = fault_fired();
        ns_journal_close(journal);
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
    }
}

static int
setup(void **state)
{
    (void)state;
    folder_open();
    return 0;
}

static int
teardown(void **state)
{
    (void)state;
    folder_close();
    return 0;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_appended_is_read_back),
        cmocka_unit_test(every_truncation_gives_the_whole_prefix),
        cmocka_unit_test(every_flipped_bit_of_lz4_ends_the_prefix_and_is_kept),
        cmocka_unit_test(
            damage_in_the_middle_is_kept_aside_and_what_follows_is_cut),
        cmocka_unit_test(somebody_elses_file_is_refused_and_left_alone),
        cmocka_unit_test(a_locked_journal_is_refused),
        cmocka_unit_test(a_rewrite_drops_lines_and_keeps_the_lock),
        cmocka_unit_test(the_nth_failing_call_leaves_whole_batches),
        cmocka_unit_test(dying_inside_an_append_loses_nothing_that_was_stored),
        cmocka_unit_test(
            every_failing_call_of_an_open_is_an_error_and_loses_nothing),
        cmocka_unit_test(a_failed_flush_goes_on_with_another_descriptor),
        cmocka_unit_test(an_empty_lz4_journal_ends_as_a_valid_file),
        cmocka_unit_test(memory_running_out_is_an_error_and_no_leak),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
