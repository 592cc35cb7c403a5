/* Jobs that name documents: from the table and from folders, texts and
 * pictures, and every way in which one can be wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "connectors/documents.h"
#include "tests/connectors/postgres_server.h"
#include "tests/daemon/program.h"

#define PICTURE "tests/cases/vision_fp32/images/a.png"

static PGconn *admin;
static char owner[128], table[160], model[] = "/tmp/test_documents-XXXXXX";

static void
sql(const char *text)
{
    PGresult *result = PQexec(admin, text);

    if (PQresultStatus(result) != PGRES_COMMAND_OK)
        fail_msg("%s: %s", text, PQerrorMessage(admin));
    PQclear(result);
}

static int
setup(void **state)
{
    static const char *const files[][2] = {
        { "vision_fp32/model/config.json", "config.json" },
        { "vision_fp32/model/generation_config.json",
          "generation_config.json" },
        { "vision_fp32/model/model.safetensors", "model.safetensors" },
        { "tokenizer/tiny/tokenizer.json", "tokenizer.json" },
    };
    char cwd[PATH_MAX], from[2 * PATH_MAX], to[PATH_MAX];

    if (make_folder(state) || !mkdtemp(model) || !getcwd(cwd, sizeof(cwd)))
        return -1;
    for (size_t i = 0; i < 4; i++) {
        snprintf(from, sizeof(from), "%s/tests/cases/%s", cwd, files[i][0]);
        snprintf(to, sizeof(to), "%s/%s", model, files[i][1]);
        if (symlink(from, to) == -1)
            return -1;
    }
    pg_create();
    admin = pg_open_as("ns", "postgres");
    snprintf(owner, sizeof(owner), "host=127.0.0.1 port=%d user=ns "
             "dbname=postgres", pg_server.port);
    snprintf(table, sizeof(table), "postgres.conninfo=host=127.0.0.1 port=%d "
             "user=reader dbname=postgres", pg_server.port);
    if (RUN("db", "init", "--conninfo", owner) != 0)
        return -1;
    sql("CREATE ROLE reader LOGIN IN ROLE nightshift_rw");
    sql("CREATE ROLE writer LOGIN IN ROLE nightshift_submit");
    return 0;
}

static int
teardown(void **state)
{
    PQfinish(admin);
    pg_remove();
    return remove_folder(state) |
           nftw(model, remove_one, 4, FTW_DEPTH | FTW_PHYS);
}

/* --- putting ------------------------------------------------------------- */

static int
put(const char *path, const char *id, const char *type)
{
    char conninfo[160];

    snprintf(conninfo, sizeof(conninfo), "host=127.0.0.1 port=%d user=writer "
             "dbname=postgres", pg_server.port);
    if (type)
        return RUN("db", "document", "put", path, "--conninfo", conninfo,
                   "--id", id, "--type", type);
    return RUN("db", "document", "put", path, "--conninfo", conninfo, "--id",
               id);
}

static void
write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* What `put` printed: the part that names the document. Free it. */
static char *
part(void)
{
    char *text = slurp(in_folder("stdout"));

    text[strcspn(text, "\n")] = '\0';
    return text;
}

/* A text that fills pages of keys and values. */
static const char *
long_text(void)
{
    static char text[2048];

    if (!text[0])
        for (int i = 0; i < 60; i++)
            snprintf(text + strlen(text), sizeof(text) - strlen(text),
                     "line %d of the report. ", i);
    return text;
}

static void
a_document_is_put_once_and_says_how_it_is_named(void **state)
{
    char *named;

    (void)state;
    write_file(in_folder("a.txt"), long_text());
    assert_int_equal(put(in_folder("a.txt"), "report", NULL), 0);
    assert_true(file_says(in_folder("stderr"), "text/plain, put"));
    named = part();
    assert_non_null(strstr(named, "{\"type\":\"document\",\"document\":{\"id\":"
                                  "\"report\",\"sha256\":\""));
    free(named);
    assert_int_equal(put(in_folder("a.txt"), "report", NULL), 0);
    assert_true(file_says(in_folder("stderr"), "there already"));
    write_file(in_folder("b.txt"), "other bytes");
    assert_int_equal(put(in_folder("b.txt"), "report", NULL), 78);
    assert_true(file_says(in_folder("stderr"), "another --id"));
    assert_int_equal(put(in_folder("none.txt"), "none", NULL), 65);
    write_file(in_folder("c.bin"), "\x01\xff\xfe");
    assert_int_equal(put(in_folder("c.bin"), "bin", NULL), 65);
    assert_int_equal(put(in_folder("a.txt"), "", NULL), 64);
    assert_int_equal(RUN("db", "document", "get", "x"), 64);
    assert_int_equal(RUN("db", "document"), 64);
    /* By default the id is the file's name and a part of its hash. */
    assert_int_equal(RUN("db", "document", "put", in_folder("b.txt"),
                         "--conninfo", owner), 0);
    assert_true(file_says(in_folder("stdout"), "\"id\":\"b.txt-"));
}

/* --- jobs ---------------------------------------------------------------- */

static void
add_job(FILE *file, const char *id, const char *parts)
{
    fprintf(file, "{\"custom_id\":\"%s\",\"method\":\"POST\",\"url\":"
            "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
            "\"user\",\"content\":[%s,{\"type\":\"text\",\"text\":"
            "\"what is it?\"}]}],\"max_tokens\":32,\"seed\":5},"
            "\"nightshift\":{\"image_tokens\":70,\"mode\":\"diffusion\"}}\n",
            id, parts);
}

static void
add_text_job(FILE *file, const char *id, const char *text)
{
    char parts[4096];

    snprintf(parts, sizeof(parts), "{\"type\":\"text\",\"text\":\"%s\"}",
             text);
    add_job(file, id, parts);
}

static bool
says_the_same(const char *a, const char *b)
{
    a = strstr(a, "\"content\"");
    b = strstr(b, "\"content\"");
    return a && b && strncmp(a, b, strcspn(a, "}")) == 0;
}

#define ZEROS "0000000000000000000000000000000000000000000000000000000000000000"
#define NAMED(id, sha256) \
    "{\"type\":\"document\",\"document\":{\"id\":\"" id "\",\"sha256\":\"" \
    sha256 "\"}}"

static void
a_job_with_a_document_is_the_job_that_carries_it(void **state)
{
    struct answers answers;
    char *text, *picture, *text_of_all;
    int n_shared = 0;
    FILE *file = fopen(in_folder("jobs.jsonl"), "w");

    (void)state;
    assert_int_equal(put(in_folder("a.txt"), "report", NULL), 0);
    text = part();
    assert_int_equal(put(PICTURE, "picture", NULL), 0);
    assert_true(file_says(in_folder("stderr"), "image/png"));
    picture = part();
    add_text_job(file, "carried", long_text());
    add_job(file, "named", text);
    add_job(file, "picture", picture);
    add_job(file, "file", "{\"type\":\"image_url\",\"image_url\":{\"url\":"
                          "\"a.png\"}}");
    for (int i = 0; i < 20; i++) {
        char id[16];

        snprintf(id, sizeof(id), "more-%d", i);
        add_job(file, id, text);
    }
    fclose(file);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("out.jsonl"), "-m", model, "--set", table,
                         "--set", "images.roots=tests/cases/vision_fp32/images",
                         "--set", "engine.max_sequences=2"), 0);
    read_answers(in_folder("out.jsonl"), &answers);
    assert_int_equal(answers.n, 24);
    assert_true(says_the_same(answers.text[1], answers.text[2]));
    assert_true(says_the_same(answers.text[3], answers.text[4]));
    assert_false(says_the_same(answers.text[1], answers.text[3]));
    for (int i = 5; i <= 24; i++)
        assert_true(says_the_same(answers.text[1], answers.text[i]));
    answers_fini(&answers);
    /* They share the prefix: of nearly 600 tokens most are computed once. */
    text_of_all = slurp(in_folder("out.jsonl"));
    for (const char *at = text_of_all;
         (at = strstr(at, "\"cached_tokens\":")) != NULL; at++)
        n_shared += strtol(at + 16, NULL, 10) > 500;
    free(text_of_all);
    assert_in_range(n_shared, 19, 22);
    assert_int_equal(RUN("validate", "-m", model, "--set", table, "--set",
                         "images.roots=tests/cases/vision_fp32/images",
                         in_folder("jobs.jsonl")), 0);
    free(text);
    free(picture);
}

static void
a_document_that_is_wrong_costs_its_own_job_and_says_why(void **state)
{
    static const char *const codes[] = {
        "document_missing", "document_hash", "document_limit",
        "document_broken", "document_type", "document_type", "bad_image",
        "bad_param", "unknown_field", "\"error\":null",
    };
    char *large, *broken, *pdf, *text, *picture;
    struct answers answers;
    FILE *file;

    (void)state;
    file = fopen(in_folder("large.txt"), "w");
    for (int i = 0; i < 5000; i++)
        fputc('x', file);
    fclose(file);
    assert_int_equal(put(in_folder("large.txt"), "large", NULL), 0);
    large = part();
    assert_int_equal(put(in_folder("b.txt"), "broken", NULL), 0);
    broken = part();
    sql("UPDATE nightshift.document SET content_lz4 = (SELECT content_lz4 FROM"
        " nightshift.document WHERE id = 'large') WHERE id = 'broken'");
    assert_int_equal(put(in_folder("c.bin"), "pdf", "application/pdf"), 0);
    pdf = part();
    assert_int_equal(put(in_folder("c.bin"), "text", "text/plain"), 0);
    text = part();
    assert_int_equal(put(in_folder("c.bin"), "image", "image/png"), 0);
    picture = part();
    file = fopen(in_folder("wrong.jsonl"), "w");
    add_job(file, "missing", NAMED("nowhere", ZEROS));
    add_job(file, "hash", NAMED("report", ZEROS));
    add_job(file, "large", large);
    add_job(file, "broken", broken);
    add_job(file, "pdf", pdf);
    add_job(file, "text", text);
    add_job(file, "picture", picture);
    add_job(file, "digits", NAMED("report", "abc"));
    add_job(file, "more", "{\"type\":\"document\",\"document\":{\"id\":\"a\","
                          "\"sha256\":\"" ZEROS "\",\"url\":\"b\"}}");
    add_text_job(file, "well", "all is well");
    fclose(file);
    assert_int_equal(RUN("run", in_folder("wrong.jsonl"), "-o",
                         in_folder("wrong.out"), "-m", model, "--set", table,
                         "--set", "documents.limit=2K", "--set",
                         "documents.wait=50ms", "--set", "daemon.retry=20ms"),
                     1);
    read_answers(in_folder("wrong.out"), &answers);
    assert_int_equal(answers.n, 10);
    for (int i = 1; i <= 10; i++) {
        if (!strstr(answers.text[i], codes[i - 1]))
            fail_msg("job %d: no %s in %.400s", i, codes[i - 1],
                     answers.text[i]);
        if (i < 10)
            assert_non_null(strstr(answers.text[i],
                                   "body.messages[0].content[0]"));
    }
    answers_fini(&answers);
    free(large);
    free(broken);
    free(pdf);
    free(text);
    free(picture);
}

/* More tries than a job has retries of its own: the waiting counts none. */
static void
a_job_waits_for_its_document_and_for_the_server(void **state)
{
    char *named;
    pid_t pid;
    FILE *file;

    (void)state;
    write_file(in_folder("late.txt"), "late but here");
    assert_int_equal(put(in_folder("late.txt"), "late", NULL), 0);
    named = part();
    sql("DELETE FROM nightshift.document WHERE id = 'late'");
    file = fopen(in_folder("late.jsonl"), "w");
    add_job(file, "late", named);
    fclose(file);
    free(named);
    pid = spawn((const char *const[]){ "nightshift", "run",
                                       in_folder("late.jsonl"), "-o",
                                       in_folder("late.out"), "-m", model,
                                       "--set", table, "--set",
                                       "daemon.retry=10ms", NULL },
                in_folder("late.stdout"), in_folder("late.stderr"));
    wait_until_says(in_folder("late.stderr"), "code=document_missing");
    pg_stop(SIGQUIT);
    wait_until_says(in_folder("late.stderr"), "code=documents_away");
    pg_start();
    PQreset(admin);
    for (int n = 0, lines; n < 6; n = lines) { /* a few more tries */
        char *said = slurp(in_folder("late.stderr"));

        lines = 0;
        for (const char *at = said; (at = strstr(at, "job.retry")); at++)
            lines++;
        free(said);
        usleep(5000);
    }
    assert_int_equal(put(in_folder("late.txt"), "late", NULL), 0);
    assert_int_equal(wait_for(pid, LIMIT_MS), 0);
    assert_true(file_says(in_folder("late.out"), "\"error\":null"));
}

static void
without_a_database_documents_are_files_below_allowed_folders(void **state)
{
    static const char *const codes[] = { "\"error\":null", "document_hash",
                                         "path_denied", "path_denied" };
    char roots[PATH_MAX + 32], *report;
    struct answers answers;
    FILE *file;

    (void)state;
    assert_int_equal(mkdir(in_folder("papers"), 0700), 0);
    write_file(in_folder("papers/report"), long_text());
    assert_int_equal(put(in_folder("a.txt"), "report", NULL), 0);
    report = part(); /* the same bytes, so the same name does */
    file = fopen(in_folder("files.jsonl"), "w");
    add_job(file, "file", report);
    add_job(file, "hash", NAMED("report", ZEROS));
    add_job(file, "missing", NAMED("nowhere", ZEROS));
    add_job(file, "outside", NAMED("../a.txt", ZEROS));
    fclose(file);
    free(report);
    snprintf(roots, sizeof(roots), "documents.roots=%s", in_folder("papers"));
    assert_int_equal(RUN("run", in_folder("files.jsonl"), "-o",
                         in_folder("files.out"), "-m", model, "--set", roots),
                     1);
    read_answers(in_folder("files.out"), &answers);
    for (int i = 1; i <= 4; i++)
        if (!strstr(answers.text[i], codes[i - 1]))
            fail_msg("job %d: no %s in %.400s", i, codes[i - 1],
                     answers.text[i]);
    answers_fini(&answers);
    assert_int_equal(RUN("run", in_folder("files.jsonl"), "-o",
                         in_folder("none.out"), "-m", model), 2);
    read_answers(in_folder("none.out"), &answers);
    for (int i = 1; i <= 4; i++)
        assert_non_null(strstr(answers.text[i], "\"unsupported\""));
    answers_fini(&answers);
}

/* --- the cache ----------------------------------------------------------- */

static void
documents_of_late_are_kept_up_to_the_bound(void **state)
{
    struct ns_postgres_options postgres = { .conninfo = owner };
    struct ns_documents_options options = {
        .postgres = postgres,
        .limit_bytes = 1 << 20,
        .cache_bytes = 3000, /* two of them */
    };
    const struct ns_document *held[4], *again;
    unsigned char sha256[4][NS_SHA256_BYTES];
    struct ns_documents *documents;
    struct ns_documents_counts counts;
    struct ns_error err;
    bool was_there;
    char text[600];

    (void)state;
    memset(text, 'k', sizeof(text));
    for (int i = 0; i < 4; i++) {
        char id[16];

        snprintf(id, sizeof(id), "kept-%d", i);
        text[0] = (char)('0' + i);
        assert_int_equal(ns_documents_put(&postgres, id, "text/plain", text,
                                          sizeof(text), sha256[i], &was_there,
                                          &err), NS_OK);
        assert_false(was_there);
    }
    assert_int_equal(ns_documents_create(&options, &documents, &err), NS_OK);
    for (int i = 0; i < 4; i++) { /* in use, all stay */
        char id[16];

        snprintf(id, sizeof(id), "kept-%d", i);
        assert_int_equal(ns_documents_get(documents, id, sha256[i], &held[i],
                                          &err), NS_OK);
        assert_int_equal(held[i]->length, sizeof(text));
        assert_int_equal(held[i]->bytes[0], '0' + i);
        assert_int_equal(held[i]->bytes[sizeof(text)], '\0');
    }
    counts = ns_documents_counts(documents);
    assert_int_equal(counts.n_kept, 4);
    assert_int_equal(counts.fetched, 4);
    assert_int_equal(ns_documents_get(documents, "kept-3", sha256[3], &again,
                                      &err), NS_OK);
    assert_ptr_equal(again, held[3]);
    ns_documents_let_go(documents, again);
    for (int i = 0; i < 4; i++)
        ns_documents_let_go(documents, held[i]);
    counts = ns_documents_counts(documents);
    assert_in_range(counts.n_kept, 1, 2);
    assert_true(counts.bytes_kept <= options.cache_bytes);
    assert_int_equal(counts.found, 1);
    /* The latest is there, the first one is asked for again. */
    assert_int_equal(ns_documents_get(documents, "kept-3", sha256[3], &again,
                                      &err), NS_OK);
    ns_documents_let_go(documents, again);
    assert_int_equal(ns_documents_get(documents, "kept-0", sha256[0], &again,
                                      &err), NS_OK);
    ns_documents_let_go(documents, again);
    counts = ns_documents_counts(documents);
    assert_int_equal(counts.found, 2);
    assert_int_equal(counts.fetched, 5);
    ns_documents_destroy(documents);
}

struct crowd {
    struct ns_documents *documents;
    unsigned char sha256[NS_SHA256_BYTES];
    _Atomic int n_failed;
};

static void *
one_of_many(void *data)
{
    struct crowd *crowd = data;

    for (int i = 0; i < 50; i++) {
        const struct ns_document *document;
        struct ns_error err;

        if (ns_documents_get(crowd->documents, "kept-1", crowd->sha256,
                             &document, &err) != NS_OK ||
            document->bytes[0] != '1') {
            crowd->n_failed++;
            return NULL;
        }
        ns_documents_let_go(crowd->documents, document);
    }
    return NULL;
}

static void
those_who_want_the_same_at_once_ask_once(void **state)
{
    struct ns_postgres_options postgres = { .conninfo = owner };
    struct ns_documents_options options = {
        .postgres = postgres, .limit_bytes = 1 << 20, .cache_bytes = 1 << 20,
    };
    struct crowd crowd = { 0 };
    pthread_t threads[8];
    struct ns_error err;
    char text[600];
    bool was_there;

    (void)state;
    memset(text, 'k', sizeof(text));
    text[0] = '1';
    assert_int_equal(ns_documents_put(&postgres, "kept-1", "text/plain", text,
                                      sizeof(text), crowd.sha256, &was_there,
                                      &err), NS_OK);
    assert_true(was_there);
    assert_int_equal(ns_documents_create(&options, &crowd.documents, &err),
                     NS_OK);
    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, one_of_many,
                                        &crowd), 0);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(crowd.n_failed, 0);
    assert_int_equal(ns_documents_counts(crowd.documents).fetched, 1);
    assert_int_equal(ns_documents_counts(crowd.documents).found, 399);
    ns_documents_destroy(crowd.documents);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_document_is_put_once_and_says_how_it_is_named),
        cmocka_unit_test(a_job_with_a_document_is_the_job_that_carries_it),
        cmocka_unit_test(
            a_document_that_is_wrong_costs_its_own_job_and_says_why),
        cmocka_unit_test(a_job_waits_for_its_document_and_for_the_server),
        cmocka_unit_test(
            without_a_database_documents_are_files_below_allowed_folders),
        cmocka_unit_test(documents_of_late_are_kept_up_to_the_bound),
        cmocka_unit_test(those_who_want_the_same_at_once_ask_once),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
