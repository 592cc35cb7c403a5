#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <lz4frame.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "connectors/lines.h"
#include "tests/connectors/faulty_io.h"
#include "tests/fault.h"

/* A file with these bytes, deleted at its close, read from its start. */
static int
file_of(const void *bytes, size_t length)
{
    FILE *file = tmpfile();
    int fd;

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, length, file), length);
    fflush(file);
    fd = dup(fileno(file));
    fclose(file);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

struct reading {
    char text[8][64];
    struct ns_line lines[8];
    size_t n;
    enum ns_status status;
    struct ns_error err;
};

static struct reading
read_all(const void *bytes, size_t length, struct ns_lines_options options)
{
    struct reading reading = { .n = 0 };
    struct ns_lines *lines = NULL;
    int fd = file_of(bytes, length);
    bool end = false;

    assert_int_equal(ns_lines_create(fd, &options, NULL, &lines, &reading.err),
                     NS_OK);
    for (;;) {
        struct ns_line line;

        reading.status = ns_lines_next(lines, &line, &end, &reading.err);
        if (reading.status != NS_OK || end)
            break;
        assert_true(reading.n < 8);
        reading.lines[reading.n] = line;
        snprintf(reading.text[reading.n], 64, "%.*s",
                 line.bytes ? (int)line.length : 6,
                 line.bytes ? line.bytes : "(over)");
        reading.n++;
    }
    if (reading.status == NS_REJECT) { /* and it stays so */
        struct ns_line line;
        struct ns_error err;

        assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_REJECT);
        assert_string_equal(err.code, reading.err.code);
    }
    ns_lines_destroy(lines);
    close(fd);
    return reading;
}

static struct reading
read_text(const char *text)
{
    return read_all(text, strlen(text), (struct ns_lines_options){ 0 });
}

static void
lines_end_at_newlines_and_at_the_end(void **state)
{
    struct reading r = read_text("one\ntwo\r\n\n \t\r\nfive");

    (void)state;
    assert_int_equal(r.status, NS_OK);
    assert_int_equal(r.n, 3);
    assert_string_equal(r.text[0], "one");
    assert_string_equal(r.text[1], "two");
    assert_string_equal(r.text[2], "five");
    assert_int_equal(r.lines[2].number, 5); /* blank lines are counted */
    r = read_text("");
    assert_int_equal(r.n, 0);
    r = read_text("\n\n");
    assert_int_equal(r.n, 0);
    r = read_text("a\rb\n\r");
    assert_int_equal(r.n, 1);
    assert_string_equal(r.text[0], "a\rb");
}

static void
the_hash_is_that_of_the_line_without_its_end(void **state)
{
    struct reading r = read_text("abc\r\nabc\nabc");
    unsigned char hash[32];

    (void)state;
    SHA256((const unsigned char *)"abc", 3, hash);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(r.lines[i].sha256, hash, 32);
}

static void
a_byte_order_mark_is_refused(void **state)
{
    struct reading r = read_text("\xef\xbb\xbf{}\n");

    (void)state;
    assert_int_equal(r.status, NS_REJECT);
    assert_string_equal(r.err.code, "bad_encoding");
    r = read_all("\xff\xfe{\0", 4, (struct ns_lines_options){ 0 });
    assert_int_equal(r.status, NS_REJECT);
}

/* Lines around the limit, each end of line, each split over reads. */
static void
an_overlong_line_is_measured_hashed_and_passed_by(void **state)
{
    static const char *const ends[] = { "\n", "\r\n", "" };
    enum { LIMIT = 10, MOST = 200000 };
    static const size_t lengths[] = { 9,     10,    11,     12,  65535,
                                      65536, 65537, 131072, MOST };
    char *text = malloc(MOST + 20);
    unsigned char hash[32];

    (void)state;
    for (size_t e = 0; e < 3; e++)
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
            size_t n = lengths[i], end = strlen(ends[e]);
            struct reading r;

            memset(text, 'x', n);
            text[n / 2] = '\r'; /* inside the line it belongs to it */
            memcpy(text + n, ends[e], end);
            memcpy(text + n + end, "y\n", 2);
            r = read_all(text, n + end + (end ? 2 : 0),
                         (struct ns_lines_options){ .max_line = LIMIT });
            assert_int_equal(r.status, NS_OK);
            assert_int_equal(r.n, end ? 2 : 1);
            assert_int_equal(r.lines[0].length, n);
            assert_int_equal(r.lines[0].bytes != NULL, n <= LIMIT);
            SHA256((unsigned char *)text, n, hash);
            assert_memory_equal(r.lines[0].sha256, hash, 32);
            if (end)
                assert_string_equal(r.text[1], "y");
        }
    free(text);
}

static size_t
compress(const char *text, size_t length, bool sized, char *out, size_t room)
{
    LZ4F_preferences_t preferences = {
        .frameInfo = { .contentChecksumFlag = LZ4F_contentChecksumEnabled,
                       .blockChecksumFlag = LZ4F_blockChecksumEnabled,
                       .contentSize = sized ? length : 0 },
    };
    size_t n = LZ4F_compressFrame(out, room, text, length, &preferences);

    assert_false(LZ4F_isError(n));
    return n;
}

static void
lz4_frames_are_read_with_and_without_size_one_after_another(void **state)
{
    char file[4096];
    size_t n;
    struct reading r;

    (void)state;
    n = compress("one\ntw", 6, true, file, sizeof(file));
    n += compress("", 0, false, file + n, sizeof(file) - n);
    n += compress("o\nthree", 7, false, file + n, sizeof(file) - n);
    r = read_all(file, n, (struct ns_lines_options){ 0 });
    assert_int_equal(r.status, NS_OK);
    assert_int_equal(r.n, 3);
    assert_string_equal(r.text[1], "two");
    assert_string_equal(r.text[2], "three");
}

static void
every_truncated_lz4_file_is_refused_or_gives_a_prefix(void **state)
{
    char file[4096];
    size_t first, n;

    (void)state;
    first = compress("one\ntwo\n", 8, false, file, sizeof(file));
    n = first +
        compress("three\n", 6, true, file + first, sizeof(file) - first);
    for (size_t cut = 4; cut < n; cut++) {
        struct reading r = read_all(file, cut, (struct ns_lines_options){ 0 });

        if (cut == first) {
            assert_int_equal(r.status, NS_OK);
            assert_int_equal(r.n, 2);
            continue;
        }
        assert_int_equal(r.status, NS_REJECT);
        assert_string_equal(r.err.code, "bad_lz4");
    }
}

static void
every_flipped_bit_of_an_lz4_file_is_caught(void **state)
{
    char file[4096], flipped[4096];
    size_t n;

    (void)state;
    n = compress("{\"a\":1}\n{\"a\":2}\n", 16, true, file, sizeof(file));
    for (size_t bit = 0; bit < n * 8; bit++) {
        struct reading r;

        memcpy(flipped, file, n);
        flipped[bit / 8] = (char)(flipped[bit / 8] ^ 1 << bit % 8);
        r = read_all(flipped, n, (struct ns_lines_options){ 0 });
        if (bit < 32) /* the magic number: it is a file of another kind */
            continue;
        if (r.status != NS_REJECT)
            fail_msg("bit %zu: %zu lines", bit, r.n);
    }
}

static void
a_bomb_is_stopped_while_it_expands(void **state)
{
    enum { SIZE = 8 << 20 };
    char *zeros = calloc(1, SIZE), *file = malloc(2 * SIZE);
    struct ns_lines_options options = { .max_expanded = 1 << 20,
                                        .max_line = 1 << 16 };
    struct reading r;
    size_t n;

    (void)state;
    n = compress(zeros, SIZE, false, file, 2 * SIZE);
    assert_true(n < SIZE / 100);
    r = read_all(file, n, options);
    assert_int_equal(r.status, NS_REJECT);
    assert_string_equal(r.err.code, "too_large");
    assert_non_null(strstr(r.err.text, "1048576"));
    free(zeros);
    free(file);
}

static void
the_legacy_format_is_named(void **state)
{
    struct reading r =
        read_all("\x02\x21\x4c\x18zzzz", 8, (struct ns_lines_options){ 0 });

    (void)state;
    assert_int_equal(r.status, NS_REJECT);
    assert_non_null(strstr(r.err.text, "legacy"));
}

static void
a_failed_read_loses_nothing(void **state)
{
    enum { SIZE = 300000 };
    char *text = malloc(SIZE);
    struct ns_lines_options options = { 0 };
    int failures = 0;

    (void)state;
    memset(text, 'x', SIZE);
    text[SIZE - 1] = '\n';
    text[1000] = '\n';
    for (int n = 0; n < 10; n++) {
        struct ns_lines *lines = NULL;
        uint64_t lengths[4];
        size_t n_lines = 0;
        struct ns_error err;
        struct ns_line line;
        bool end = false;
        int fd = file_of(text, SIZE);

        assert_int_equal(
            ns_lines_create(fd, &options, &faulty_io, &lines, &err), NS_OK);
        faulty_arm(n, EIO, false);
        while (!end) {
            enum ns_status status = ns_lines_next(lines, &line, &end, &err);

            if (status == NS_RETRY) {
                failures++;
                continue;
            }
            assert_int_equal(status, NS_OK);
            if (!end)
                lengths[n_lines++] = line.length;
        }
        faulty_fired();
        assert_int_equal(n_lines, 2);
        assert_int_equal(lengths[0], 1000);
        assert_int_equal(lengths[1], SIZE - 1002);
        ns_lines_destroy(lines);
        close(fd);
    }
    assert_true(failures >= 5);
    free(text);
}

static void
a_pipe_is_read_as_it_comes(void **state)
{
    struct ns_lines_options options = { .single_read = true };
    struct ns_lines *lines = NULL;
    struct ns_error err;
    struct ns_line line;
    bool end = false;
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_NONBLOCK), 0);
    assert_int_equal(ns_lines_create(fds[0], &options, NULL, &lines, &err),
                     NS_OK);
    assert_int_equal(write(fds[1], "on", 2), 2);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_true(!end && line.number == 0);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_true(!end && line.number == 0);
    assert_int_equal(write(fds[1], "e\ntwo\nth", 8), 8);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_int_equal(line.number, 1);
    assert_int_equal(line.length, 3);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_int_equal(line.number, 2);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_true(!end && line.number == 0);
    close(fds[1]);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_int_equal(line.number, 3);
    assert_int_equal(line.length, 2);
    assert_int_equal(ns_lines_next(lines, &line, &end, &err), NS_OK);
    assert_true(end);
    ns_lines_destroy(lines);
    close(fds[0]);
}

static void
memory_running_out_is_an_error_and_no_leak(void **state)
{
    char file[4096];
    size_t length = compress("one\ntwo\n", 8, false, file, sizeof(file));
    struct ns_lines_options options = { 0 };
    int n;

    (void)state;
    for (n = 0;; n++) {
        int fd = file_of(file, length);
        struct ns_lines *lines = NULL;
        enum ns_status status;
        struct ns_error err;
        struct ns_line line;
        bool end = false, fired;

        fault_arm(n);
        status = ns_lines_create(fd, &options, NULL, &lines, &err);
        while (status == NS_OK && !end)
            status = ns_lines_next(lines, &line, &end, &err);
        fired = fault_fired();
        ns_lines_destroy(lines);
        close(fd);
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
        if (!fired)
            break;
    }
    assert_true(n >= 3);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_end_at_newlines_and_at_the_end),
        cmocka_unit_test(the_hash_is_that_of_the_line_without_its_end),
        cmocka_unit_test(a_byte_order_mark_is_refused),
        cmocka_unit_test(an_overlong_line_is_measured_hashed_and_passed_by),
        cmocka_unit_test(
            lz4_frames_are_read_with_and_without_size_one_after_another),
        cmocka_unit_test(every_truncated_lz4_file_is_refused_or_gives_a_prefix),
        cmocka_unit_test(every_flipped_bit_of_an_lz4_file_is_caught),
        cmocka_unit_test(a_bomb_is_stopped_while_it_expands),
        cmocka_unit_test(the_legacy_format_is_named),
        cmocka_unit_test(a_failed_read_loses_nothing),
        cmocka_unit_test(a_pipe_is_read_as_it_comes),
        cmocka_unit_test(memory_running_out_is_an_error_and_no_leak),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
