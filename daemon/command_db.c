#include "daemon/command.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/arguments.h"
#include "daemon/ends.h"
#include "daemon/setup.h"

static const char about[] =
    "  init       install the schema; run by the role that shall own it\n"
    "  migrate    bring it to what this version needs\n"
    "  purge      remove what ended longer ago than --older-than\n";

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
    const char *older_than;
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
    status = ns_postgres_purge(postgres, age_ms, &purged, err);
    if (status == NS_OK)
        printf("%" PRIu64 " jobs, %" PRIu64 " dead letters, %" PRIu64
               " batches, %" PRIu64 " documents removed\n",
               purged.jobs, purged.dead_letters, purged.batches,
               purged.documents);
    return status;
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
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift db", "init|migrate|purge [options]", about, table, 1, 1,
        false,
    };
    int status = ns_arguments_parse(&db.arguments, &usage, argc, argv);
    const char *what;

    if (status != -1)
        return status;
    what = argv[optind];
    if (strcmp(what, "init") != 0 && strcmp(what, "migrate") != 0 &&
        strcmp(what, "purge") != 0)
        return ns_arguments_misused(&usage, "init, migrate or purge is needed");
    status = run(&db, what);
    ns_options_destroy(db.options);
    return status;
}
