#include "connectors/postgres_link.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "connectors/secret.h"

enum { CONNECT_MS = 5000, ANSWER_MS = 30000 };

static int64_t
now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- errors ----------------------------------------------------------- */

enum ns_pg_class
ns_pg_classify(const char *sqlstate)
{
    static const struct {
        const char *begin;
        enum ns_pg_class class;
    } classes[] = {
        { "08", NS_PG_AWAY },     /* connection */
        { "57P", NS_PG_AWAY },    /* shut down, crashed, starting */
        { "25006", NS_PG_AWAY },  /* read-only: it failed over */
        { "57014", NS_PG_WORLD }, /* statement timeout */
        { "53", NS_PG_WORLD },    /* disk, memory, connections */
        { "58", NS_PG_WORLD },    /* I/O */
        { "40", NS_PG_WORLD },    /* serialization, deadlock */
        { "55", NS_PG_WORLD },    /* lock not to be had, in use */
        { "28", NS_PG_SETUP },    /* authentication */
        { "3D000", NS_PG_SETUP }, /* no such database */
        { "3F000", NS_PG_SETUP }, /* no such schema */
        { "42P01", NS_PG_SETUP }, /* no such table */
        { "42703", NS_PG_SETUP }, /* no such column */
        { "42883", NS_PG_SETUP }, /* no such function */
        { "42501", NS_PG_SETUP }, /* not allowed */
        { "22", NS_PG_DATA },
        { "23", NS_PG_DATA },
        { "54", NS_PG_DATA }, /* too large */
    };

    if (!sqlstate || !*sqlstate)
        return NS_PG_AWAY;
    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++)
        if (strncmp(sqlstate, classes[i].begin, strlen(classes[i].begin)) == 0)
            return classes[i].class;
    return NS_PG_BROKEN;
}

/* The first line, without what may echo values or hosts' secrets. */
static void
first_line(const char *text, char *out, size_t out_size)
{
    size_t n = strcspn(text, "\n");

    snprintf(out, out_size, "%.*s", (int)n, text);
}

static enum ns_status
fail_setup(struct ns_error *err, const char *state, const char *text)
{
    bool missing = strcmp(state, "42P01") == 0 || strcmp(state, "3F000") == 0;

    return ns_refuse(err, "postgres_setup", NULL, "postgres: %s %s%s", state,
                     text, missing ? "; run `nightshift db init`" : "");
}

static void
drop(struct ns_pg_link *link)
{
    PQfinish(link->conn);
    link->conn = NULL;
}

/* ---- connecting ------------------------------------------------------- */

/* The daemon's own timeouts and keepalives stand first, so that conninfo may
 * say otherwise; what must hold stands behind it. */
static int
connect_words(const struct ns_pg_link *link, const char *password, bool remote,
              const char *keys[24], const char *values[24], char texts[3][24])
{
    const struct ns_postgres_options *options = &link->options;
    int64_t connect_ms = options->connect_ms ? options->connect_ms : CONNECT_MS;
    int n = 0;

#define WORD(key, value) (keys[n] = (key), values[n++] = (value))
    /* libpq counts seconds, and takes 1 for 2. */
    snprintf(texts[0], 24, "%lld", (long long)(connect_ms + 999) / 1000);
    WORD("application_name", "nightshift");
    WORD("connect_timeout", texts[0]);
    WORD("keepalives_idle", "10");
    WORD("keepalives_interval", "5");
    WORD("keepalives_count", "3");
    WORD("tcp_user_timeout", "20000");
    WORD("gssencmode", "disable");
    WORD("target_session_attrs", "read-write");
    if (remote && !options->allow_plaintext)
        WORD("sslmode", "require"); /* by default libpq would do without */
    WORD("dbname", options->conninfo);
    WORD("client_encoding", "UTF8");
    if (password)
        WORD("password", password);
#undef WORD
    keys[n] = values[n] = NULL;
    return n;
}

/* How many SQLSTATEs stand in a verbose message, and how many of them say
 * that the set-up is wrong: "FATAL:  28P01: password authentication ...". */
static void
count_states(const char *text, int *n_states, int *n_setup, char state[6])
{
    for (const char *at = text; (at = strstr(at, ":  ")) != NULL; at += 3) {
        if (strspn(at + 3, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5)
            continue;
        memcpy(state, at + 3, 5);
        state[5] = '\0';
        (*n_states)++;
        *n_setup += ns_pg_classify(state) == NS_PG_SETUP;
    }
}

/* libpq keeps the SQLSTATE of a refused connection to itself, but puts it into
 * the message when asked to. That can only be asked between start and poll,
 * and there libpq keeps no time-out for several hosts; so a connection that
 * was refused is tried once more, to hear why. */
static bool
is_setup_fault(const char *const *keys, const char *const *values,
               char *text, size_t text_size)
{
    PGconn *conn = PQconnectStartParams(keys, values, 1);
    PostgresPollingStatusType step = PGRES_POLLING_WRITING;
    int64_t until = now_ms() + 2000;
    int n_states = 0, n_setup = 0;
    char state[6] = "";

    if (!conn)
        return false;
    PQsetErrorVerbosity(conn, PQERRORS_VERBOSE);
    while (PQstatus(conn) != CONNECTION_BAD && step != PGRES_POLLING_FAILED &&
           step != PGRES_POLLING_OK && now_ms() < until) {
        struct pollfd pollfd = {
            .fd = PQsocket(conn),
            .events = step == PGRES_POLLING_READING ? POLLIN : POLLOUT,
        };

        if (poll(&pollfd, 1, 100) > 0)
            step = PQconnectPoll(conn);
    }
    /* A server that only now came up again is no fault of the set-up, nor is
     * one host of many that is. */
    if (step == PGRES_POLLING_FAILED) {
        count_states(PQerrorMessage(conn), &n_states, &n_setup, state);
        snprintf(text, text_size, "%s", state);
    }
    PQfinish(conn);
    return n_states > 0 && n_setup == n_states;
}

/* A certificate of another name, or of nobody we know, or no TLS where it must
 * be: libpq has only words for it. One host of many that is down may hide what
 * the others would do, so all have to say so. */
static bool
is_tls_fault(const char *text)
{
    static const char *const words[] = {
        "does not match host name",
        "certificate verify failed",
        "does not support SSL",
        "root certificate file",
    };
    int n_hosts = 0, n_faults = 0;

    for (const char *at = text; (at = strstr(at, "connection to server")); at++)
        n_hosts++;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        for (const char *at = text; (at = strstr(at, words[i])); at++)
            n_faults++;
    return n_faults > 0 && n_faults >= n_hosts;
}

/* Whether one of a comma list of hosts or addresses is not this machine. */
static bool
has_remote(const char *list)
{
    for (const char *at = list; at && *at; at += strspn(at, ",")) {
        size_t n = strcspn(at, ",");

        if (*at != '/' && *at != '@' && strncmp(at, "127.", 4) != 0 &&
            !(n == 3 && memcmp(at, "::1", 3) == 0) &&
            !(n == 9 && memcmp(at, "localhost", 9) == 0))
            return true;
        at += n;
    }
    return false;
}

/* A password in conninfo would stand in every copy of the configuration, and
 * in `ps` when it comes from the command line. `*remote`: it names another
 * machine. */
static enum ns_status
check_conninfo(const char *conninfo, bool *remote, struct ns_error *err)
{
    char *why = NULL, text[200];
    PQconninfoOption *words = PQconninfoParse(conninfo, &why);
    enum ns_status status = NS_OK;

    *remote = false;
    if (!words) {
        first_line(why ? why : "out of memory", text, sizeof(text));
        status = ns_refuse(err, "postgres_setup", NULL,
                           "postgres.conninfo: %s", text);
    }
    for (PQconninfoOption *word = words; word && word->keyword; word++) {
        if (word->val && strcmp(word->keyword, "password") == 0)
            status = ns_refuse(err, "postgres_setup", NULL,
                               "postgres.conninfo holds a password: put it "
                               "into a file, and its name into "
                               "postgres.password_file");
        if (strcmp(word->keyword, "host") == 0 ||
            strcmp(word->keyword, "hostaddr") == 0)
            *remote |= has_remote(word->val);
    }
    PQconninfoFree(words);
    PQfreemem(why);
    return status;
}

static enum ns_status
open_connection(struct ns_pg_link *link, struct ns_error *err)
{
    const char *keys[24], *values[24];
    char texts[3][24], password[NS_SECRET_BYTES], why[200], state[6];
    const char *file = link->options.password_file;
    enum ns_status status;
    bool remote;

    status = check_conninfo(link->options.conninfo, &remote, err);
    if (status != NS_OK)
        return status;
    if (file) {
        status = ns_secret_read(file, "postgres.password_file", password, err);
        if (status != NS_OK)
            return status;
    }
    connect_words(link, file ? password : NULL, remote, keys, values, texts);
    link->conn = PQconnectdbParams(keys, values, 1);
    if (!link->conn) {
        status = ns_fail(err, NS_FATAL, "out of memory for a connection");
    } else if (PQstatus(link->conn) != CONNECTION_OK) {
        first_line(PQerrorMessage(link->conn), why, sizeof(why));
        if (is_tls_fault(PQerrorMessage(link->conn)))
            status = ns_refuse(err, "postgres_setup", NULL, "postgres: %s",
                               why);
        else if (is_setup_fault(keys, values, state, sizeof(state)))
            status = fail_setup(err, state, why);
        else
            status = ns_fail(err, NS_RETRY, "postgres: %s",
                             *why ? why : "no connection");
        drop(link);
    } else {
        status = NS_OK;
    }
    explicit_bzero(password, sizeof(password));
    return status;
}

/* A host that is not this machine gets no jobs in clear, whatever conninfo, a
 * service file or the environment made of sslmode. */
static enum ns_status
check_secrecy(struct ns_pg_link *link, struct ns_error *err)
{
    const char *address = PQhostaddr(link->conn), *host = PQhost(link->conn);

    if (link->options.allow_plaintext || PQsslInUse(link->conn) ||
        !address || !*address || strncmp(address, "127.", 4) == 0 ||
        strcmp(address, "::1") == 0 || (host && *host == '/'))
        return NS_OK;
    return ns_refuse(err, "postgres_setup", NULL, "postgres: %s answers "
                     "without TLS: set sslmode=verify-full, or "
                     "postgres.allow_plaintext", host && *host ? host
                                                               : address);
}

static enum ns_status
check_server(struct ns_pg_link *link, struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT current_setting('synchronous_commit'),"
               " current_setting('fsync'),"
               " (SELECT max(version) FROM nightshift.schema_version),"
               " has_table_privilege('nightshift.result', 'INSERT')"
    };
    enum ns_status status = ns_pg_ask(link, &call, err);
    const char *commit, *fsync;
    int64_t version;

    if (status != NS_OK)
        return status;
    commit = ns_pg_text(call.result, 0, 0);
    fsync = ns_pg_text(call.result, 0, 1);
    version = ns_pg_int(call.result, 0, 2);
    if (version != NS_POSTGRES_SCHEMA)
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: the schema "
                           "is of version %lld, this build needs %d: %s",
                           (long long)version, NS_POSTGRES_SCHEMA,
                           version < NS_POSTGRES_SCHEMA
                               ? "run `nightshift db migrate`"
                               : "it is of a newer nightshift");
    else if (!ns_pg_bool(call.result, 0, 3))
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: user %s may "
                           "not store results: GRANT nightshift_rw",
                           PQuser(link->conn));
    else if (!link->options.allow_async_commit &&
             (strcmp(commit, "off") == 0 || strcmp(fsync, "off") == 0))
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: %s is off, "
                           "so that the server may forget what it has "
                           "confirmed; set postgres.allow_async_commit to "
                           "accept that",
                           strcmp(fsync, "off") == 0 ? "fsync"
                                                     : "synchronous_commit");
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_pg_connect(struct ns_pg_link *link, struct ns_error *err)
{
    enum ns_status status;

    if (link->conn)
        return NS_OK;
    status = open_connection(link, err);
    if (status != NS_OK)
        return status;
    link->connects++;
    if (PQsetnonblocking(link->conn, 1) != 0 ||
        PQenterPipelineMode(link->conn) != 1)
        status = ns_fail(err, NS_RETRY, "postgres: no pipeline");
    if (status == NS_OK)
        status = check_secrecy(link, err);
    if (status == NS_OK && !link->admin)
        status = check_server(link, err);
    if (status != NS_OK)
        drop(link);
    return status;
}

void
ns_pg_link_init(struct ns_pg_link *link,
                const struct ns_postgres_options *options)
{
    memset(link, 0, sizeof(*link));
    link->options = *options;
}

void
ns_pg_link_fini(struct ns_pg_link *link)
{
    drop(link);
}

/* ---- a call ----------------------------------------------------------- */

static void
add_param(struct ns_pg_call *call, Oid type, const char *value, size_t length)
{
    if (call->n_params == NS_PG_PARAMS)
        abort(); /* a statement of ours has more than this file allows */
    call->type[call->n_params] = type;
    call->value[call->n_params] = value;
    call->length[call->n_params++] = (int)length;
}

void
ns_pg_call_array(struct ns_pg_call *call, const struct ns_pg_array *array)
{
    add_param(call, ns_pg_array_type(array), array->buf.data,
              array->buf.length);
}

void
ns_pg_call_text(struct ns_pg_call *call, const char *text)
{
    add_param(call, NS_PG_TEXT, text, text ? strlen(text) : 0);
}

void
ns_pg_call_int(struct ns_pg_call *call, int64_t value)
{
    unsigned char *word = call->word[call->n_params];

    for (int i = 0; i < 8; i++)
        word[i] = (unsigned char)((uint64_t)value >> (56 - 8 * i));
    add_param(call, NS_PG_INT8, (const char *)word, 8);
}

void
ns_pg_call_bool(struct ns_pg_call *call, bool value)
{
    unsigned char *word = call->word[call->n_params];

    word[0] = value;
    add_param(call, NS_PG_BOOL, (const char *)word, 1);
}

void
ns_pg_call_fini(struct ns_pg_call *call)
{
    PQclear(call->result);
    call->result = NULL;
}

/* ---- running ---------------------------------------------------------- */

static enum ns_status
lost(struct ns_pg_link *link, const char *what, struct ns_error *err)
{
    char why[200];

    first_line(PQerrorMessage(link->conn), why, sizeof(why));
    drop(link);
    return ns_fail(err, NS_RETRY, "postgres: %s%s%s", what, *why ? ": " : "",
                   why);
}

/* Sends what is pending and reads what there is, until a result can be taken
 * without waiting. */
static enum ns_status
await(struct ns_pg_link *link, int64_t until, struct ns_error *err)
{
    for (;;) {
        struct pollfd pollfd = { .fd = PQsocket(link->conn),
                                 .events = POLLIN };
        int flushed = PQflush(link->conn);
        int64_t left = until - now_ms();

        if (flushed == -1)
            return lost(link, "the connection broke", err);
        if (flushed == 0 && !PQisBusy(link->conn))
            return NS_OK;
        if (left <= 0)
            return lost(link, "no answer in time", err);
        if (flushed == 1)
            pollfd.events |= POLLOUT;
        if (poll(&pollfd, 1, left > 1000 ? 1000 : (int)left) == -1 &&
            errno != EINTR)
            return lost(link, "poll", err);
        if ((pollfd.revents & (POLLIN | POLLERR | POLLHUP)) &&
            PQconsumeInput(link->conn) != 1)
            return lost(link, "the connection broke", err);
    }
}

static void
note_fault(struct ns_pg_call *call, const PGresult *result)
{
    const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
    const char *text = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);

    snprintf(call->state, sizeof(call->state), "%s", state ? state : "");
    first_line(text ? text : PQresultErrorMessage(result), call->text,
               sizeof(call->text));
    call->fault = ns_pg_classify(state);
}

/* The result of one call: rows or a fault, then the end of the command, then
 * the sync that belongs to it. */
static enum ns_status
take_result(struct ns_pg_link *link, struct ns_pg_call *call, int64_t until,
            struct ns_error *err)
{
    bool synced = false, has = false;
    enum ns_status status;
    PGresult *result;

    while (!synced) {
        status = await(link, until, err);
        if (status != NS_OK)
            return status;
        result = PQgetResult(link->conn);
        if (!result) {
            if (PQstatus(link->conn) != CONNECTION_OK)
                return lost(link, "the connection broke", err);
            continue;
        }
        switch (PQresultStatus(result)) {
        case PGRES_PIPELINE_SYNC:
            synced = true;
            PQclear(result);
            break;
        case PGRES_COMMAND_OK:
        case PGRES_TUPLES_OK:
            PQclear(call->result);
            call->result = result;
            has = true;
            break;
        default:
            /* Also behind rows: the commit comes with the sync, and may fail
             * when all has been answered. */
            ns_pg_call_fini(call);
            note_fault(call, result);
            PQclear(result);
            has = true;
            if (call->fault == NS_PG_AWAY) /* no sync may ever come */
                return NS_OK;
            break;
        }
    }
    return has ? NS_OK : lost(link, "an answer without a result", err);
}

static enum ns_status
send_all(struct ns_pg_link *link, struct ns_pg_call *calls, size_t n,
         struct ns_error *err)
{
    int formats[NS_PG_PARAMS];

    for (int i = 0; i < NS_PG_PARAMS; i++)
        formats[i] = 1;
    for (size_t i = 0; i < n; i++) {
        struct ns_pg_call *call = &calls[i];

        ns_pg_call_fini(call);
        call->state[0] = call->text[0] = '\0';
        if (PQsendQueryParams(link->conn, call->sql, call->n_params,
                              call->type, call->value, call->length, formats,
                              1) != 1 ||
            PQpipelineSync(link->conn) != 1)
            return lost(link, "the connection broke", err);
        link->statements++;
    }
    return NS_OK;
}

enum ns_status
ns_pg_run(struct ns_pg_link *link, struct ns_pg_call *calls, size_t n,
          struct ns_error *err)
{
    int64_t answer_ms = link->options.answer_ms ? link->options.answer_ms
                                                : ANSWER_MS;
    enum ns_status status = ns_pg_connect(link, err);

    if (status == NS_OK)
        status = send_all(link, calls, n, err);
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        struct ns_pg_call *call = &calls[i];

        status = take_result(link, call, now_ms() + answer_ms, err);
        if (status != NS_OK || call->result || call->fault == NS_PG_DATA)
            continue;
        if (call->fault == NS_PG_SETUP)
            status = fail_setup(err, call->state, call->text);
        else
            status = ns_fail(err, call->fault == NS_PG_BROKEN ? NS_FATAL
                                                              : NS_RETRY,
                             "postgres: %s %s", call->state, call->text);
        /* What of the pipeline is still to come is not worth the reading. */
        if (call->fault != NS_PG_WORLD || i + 1 < n)
            drop(link);
    }
    return status;
}

enum ns_status
ns_pg_ask(struct ns_pg_link *link, struct ns_pg_call *call,
          struct ns_error *err)
{
    enum ns_status status = ns_pg_run(link, call, 1, err);

    if (status == NS_OK && !call->result)
        status = ns_fail(err, NS_FATAL, "postgres: %s %s", call->state,
                         call->text);
    return status;
}

/* ---- values ----------------------------------------------------------- */

int64_t
ns_pg_int(const PGresult *result, int row, int column)
{
    const unsigned char *at =
        (const unsigned char *)PQgetvalue(result, row, column);
    int n = PQgetlength(result, row, column);
    uint64_t value = n > 0 && (at[0] & 0x80) ? UINT64_MAX : 0;

    for (int i = 0; i < n && i < 8; i++)
        value = value << 8 | at[i];
    return (int64_t)value;
}

bool
ns_pg_bool(const PGresult *result, int row, int column)
{
    return PQgetlength(result, row, column) == 1 &&
           PQgetvalue(result, row, column)[0] != 0;
}

const char *
ns_pg_text(const PGresult *result, int row, int column)
{
    return PQgetvalue(result, row, column);
}
