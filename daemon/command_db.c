#include "daemon/command.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/result.h"
#include "connectors/sha256.h"
#include "daemon/arguments.h"
#include "daemon/ends.h"
#include "daemon/references.h"
#include "daemon/setup.h"

static const char about[] =
    "  init       install the schema; run by the role that shall own it\n"
    "  migrate    bring it to what this version needs\n"
    "  purge      remove what ended longer ago than --older-than\n"
    "  document put FILE\n"
    "             keep FILE for jobs to refer to; prints how they do\n";

/* Settings of the role and not of the connection: a pooler lends its
 * connections out, and what one client sets, another would find. */
static const char next_steps[] =
    "The schema nightshift is installed. What the daemon connects as needs the\n"
    "role nightshift_rw and these settings; the others need theirs:\n"
    "\n"
    "    CREATE ROLE nightshiftd LOGIN IN ROLE nightshift_rw;\n"
    "    ALTER ROLE nightshiftd SET statement_timeout = '15s';\n"
    "    ALTER ROLE nightshiftd SET lock_timeout = '5s';\n"
    "    ALTER ROLE nightshiftd SET idle_in_transaction_session_timeout = "
    "'30s';\n"
    "    ALTER ROLE nightshiftd SET synchronous_commit = on;\n"
    "    -- who submits jobs and reads results\n"
    "    CREATE ROLE submitter LOGIN IN ROLE nightshift_submit;\n"
    "    -- who runs `nightshift db purge`\n"
    "    CREATE ROLE janitor LOGIN IN ROLE nightshift_purge;\n";

struct db {
    struct ns_arguments arguments;
    struct ns_options *options;
    const char *older_than, *id, *type;
    const char *file; /* of document put */
};

/* "30d", "200h". */
static bool
parse_age(const char *text, int64_t *out)
{
    char *end;
    long long n;

    if (!isdigit((unsigned char)*text))
        return false;
    n = strtoll(text, &end, 10);
    if (n > 100000 || (strcmp(end, "d") != 0 && strcmp(end, "h") != 0))
        return false;
    *out = n * (*end == 'd' ? 86400000 : 3600000);
    return true;
}

static enum ns_status
init(const struct ns_postgres_options *postgres, struct ns_error *err)
{
    enum ns_status status = ns_postgres_init(postgres, err);

    if (status == NS_OK)
        fputs(next_steps, stdout);
    return status;
}

static enum ns_status
migrate(const struct ns_postgres_options *postgres, struct ns_error *err)
{
    int from = 0;
    enum ns_status status = ns_postgres_migrate(postgres, &from, err);

    if (status != NS_OK)
        return status;
    if (from == NS_POSTGRES_SCHEMA)
        printf("The schema is of version %d: nothing to do.\n", from);
    else
        printf("The schema went from version %d to %d.\n", from,
               NS_POSTGRES_SCHEMA);
    return NS_OK;
}

/* A message that is read again must find its row, so rows stay for as long as
 * topics keep their messages, where those are known. */
static enum ns_status
check_retention(const struct ns_options *options, int64_t age_ms,
                struct ns_error *err)
{
    struct ns_kafka_setting *settings;
    struct ns_kafka_options kafka;
    int64_t kept_ms = 0;
    enum ns_status status;

    if (!options->intake.topics)
        return NS_OK;
    settings = calloc(options->n_kafka + 1, sizeof(*settings));
    if (!settings)
        return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
    kafka = ns_ends_kafka(options, settings);
    status = ns_kafka_retention(&kafka, &kept_ms, err);
    free(settings);
    if (status != NS_OK || kept_ms < age_ms)
        return status;
    if (kept_ms == INT64_MAX)
        return ns_fail(err, NS_REJECT, "intake.topics keep messages for ever, "
                       "and one that is read again must find its row");
    return ns_fail(err, NS_REJECT, "intake.topics keep messages for %" PRId64
                   " hours, and one that is read again must find its row: "
                   "--older-than must be more", kept_ms / 3600000);
}

static enum ns_status
purge(const struct db *db, const struct ns_postgres_options *postgres,
      struct ns_error *err)
{
    struct ns_postgres_purged purged;
    enum ns_status status;
    int64_t age_ms;

    if (!db->older_than || !parse_age(db->older_than, &age_ms))
        return ns_refuse(err, "usage", NULL,
                         "purge needs --older-than, such as 30d");
    status = check_retention(db->options, age_ms, err);
    if (status == NS_OK)
        status = ns_postgres_purge(postgres, age_ms, &purged, err);
    if (status == NS_OK)
        printf("%" PRIu64 " jobs, %" PRIu64 " dead letters, %" PRIu64
               " batches, %" PRIu64 " documents removed\n",
               purged.jobs, purged.dead_letters, purged.batches,
               purged.documents);
    return status;
}

/* --- documents ----------------------------------------------------------- */

static enum ns_status
read_file(const char *path, size_t limit, struct ns_buf *out,
          struct ns_error *err)
{
    FILE *file = fopen(path, "re");
    enum ns_status status = NS_OK;
    char chunk[65536];
    size_t n;

    ns_buf_init(out, limit);
    while (file && (n = fread(chunk, 1, sizeof(chunk), file)) > 0)
        ns_buf_add(out, chunk, n);
    if (!file || ferror(file)) {
        status = ns_fail_errno(err, NS_REJECT, "%s", path);
        err->code = "unreadable_input";
    }
    if (file)
        fclose(file);
    if (status == NS_OK)
        status = ns_buf_check(out, path, err);
    if (status == NS_REJECT && strcmp(err->code, "too_large") == 0)
        status = ns_refuse(err, "unreadable_input", NULL, "%s is over %zu "
                           "bytes (documents.limit)", path, limit);
    return status;
}

/* "report.txt-0a1b2c3d4e5f": the same for the same bytes under that name. */
static void
name_document(const char *path, const unsigned char *sha256, char *out,
              size_t out_size)
{
    const char *slash = strrchr(path, '/');
    char digits[13];

    ns_hex(sha256, 6, digits);
    snprintf(out, out_size, "%.*s-%s", NS_DOCUMENT_ID_BYTES - 13,
             slash ? slash + 1 : path, digits);
}

static enum ns_status
put(const struct db *db, const struct ns_postgres_options *postgres,
    struct ns_error *err)
{
    const char *type = db->type, *id = db->id;
    char name[NS_DOCUMENT_ID_BYTES + 1], digits[2 * NS_SHA256_BYTES + 1];
    unsigned char sha256[NS_SHA256_BYTES];
    enum ns_status status;
    struct ns_buf bytes;
    bool was_there = false;

    status = read_file(db->file, db->options->documents.limit_bytes, &bytes,
                       err);
    if (status == NS_OK && !type)
        type = ns_references_type(bytes.data ? bytes.data : "", bytes.length);
    if (status == NS_OK && !type)
        status = ns_refuse(err, "unreadable_input", NULL, "%s is neither text "
                           "(UTF-8 without NUL) nor a PNG, JPEG or WebP "
                           "picture", db->file);
    if (status == NS_OK)
        status = ns_sha256(bytes.data ? bytes.data : "", bytes.length, sha256,
                           err);
    if (status == NS_OK && !id) {
        name_document(db->file, sha256, name, sizeof(name));
        id = name;
    }
    if (status == NS_OK)
        status = ns_documents_put(postgres, id, type,
                                  bytes.data ? bytes.data : "", bytes.length,
                                  sha256, &was_there, err);
    ns_buf_fini(&bytes);
    if (status != NS_OK)
        return status;
    ns_hex(sha256, sizeof(sha256), digits);
    ns_buf_init(&bytes, 4096);
    ns_result_text(&bytes, id, strlen(id));
    printf("{\"type\":\"document\",\"document\":{\"id\":\"%s\","
           "\"sha256\":\"%s\"}}\n", bytes.data, digits);
    ns_buf_fini(&bytes);
    fprintf(stderr, "%s, %s\n", type, was_there ? "there already" : "put");
    return NS_OK;
}

static int
run(struct db *db, const char *what)
{
    struct ns_postgres_options postgres;
    struct ns_error err = { 0 };
    enum ns_status status;

    status = ns_arguments_load(&db->arguments, &db->options, &err);
    if (status == NS_OK && !db->options->postgres.conninfo)
        status = ns_refuse(&err, "usage", NULL,
                           "no database: give --conninfo or "
                           "postgres.conninfo");
    if (status == NS_OK) {
        postgres = ns_ends_postgres(db->options);
        if (strcmp(what, "init") == 0)
            status = init(&postgres, &err);
        else if (strcmp(what, "migrate") == 0)
            status = migrate(&postgres, &err);
        else if (strcmp(what, "document") == 0)
            status = put(db, &postgres, &err);
        else
            status = purge(db, &postgres, &err);
    }
    if (status == NS_OK)
        return NS_EXIT_OK;
    if (err.code && strcmp(err.code, "usage") == 0)
        return ns_command_fail(NS_EXIT_USAGE, "%s", err.text);
    return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s", err.text);
}

int
ns_command_db(int argc, char **argv)
{
    struct db db = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "older-than", 0, "TIME", "such as 30d; 7d at least, and longer than "
          "any\ntopic keeps the jobs", .text = &db.older_than },
        { "conninfo", 0, "TEXT", "where to connect to, and as whom",
          .key = "postgres.conninfo" },
        { "id", 0, "ID", "of the document; default: the file's name and a "
          "part\nof its hash", .text = &db.id },
        { "type", 0, "TYPE", "its media type; default: by what it holds",
          .text = &db.type },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift db", "init|migrate|purge|document put FILE [options]",
        about, table, 1, 3, false,
    };
    int status = ns_arguments_parse(&db.arguments, &usage, argc, argv);
    const char *what;

    if (status != -1)
        return status;
    what = argv[optind];
    if (strcmp(what, "document") == 0) {
        if (argc - optind != 3 || strcmp(argv[optind + 1], "put") != 0)
            return ns_arguments_misused(&usage, "document put FILE");
        db.file = argv[optind + 2];
        if (db.id && (!*db.id || strlen(db.id) > NS_DOCUMENT_ID_BYTES))
            return ns_arguments_misused(&usage, "--id of 1 to 200 bytes");
    } else if (argc - optind != 1 ||
               (strcmp(what, "init") != 0 && strcmp(what, "migrate") != 0 &&
                strcmp(what, "purge") != 0)) {
        return ns_arguments_misused(&usage, "one of init, migrate, purge and "
                                            "document put is needed");
    }
    status = run(&db, what);
    ns_options_destroy(db.options);
    return status;
}
