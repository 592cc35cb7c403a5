#include "daemon/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <microhttpd.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/http_private.h"
#include "daemon/work.h"

enum {
    MAX_CLIENTS = 64,
    CLIENT_MS = 5000,
    SILENT_MS = 30000,
    CLIENT_BYTES = 16 << 10, /* headers and what is being sent */
    ANSWER_BYTES = 256 << 10,
    SAMPLE_MS = 10000,
    N_SAMPLES = 180, /* half an hour */
};

struct client {
    struct client *next, *previous;
    int fd;
    int64_t until_ms;
};

struct sample {
    int64_t unix_ms;
    uint64_t tokens, ended, in_flight;
};

struct ns_http {
    struct ns_http_options options;
    int64_t start_unix_ms;
    struct MHD_Daemon *daemon;
    int wake_fd; /* readable: the thread is to end */
    bool local, has_thread;
    uint16_t port;
    pthread_t thread;

    /* Guards the two below; innermost, held for a copy. */
    pthread_mutex_t lock;
    struct ns_http_state state;
    int64_t published_ms;

    /* The server's thread. */
    struct client *clients;
    struct sample sample[N_SAMPLES]; /* a ring */
    size_t n_samples, next_sample;
    int64_t sample_at_ms;
};

/* --- what is so -------------------------------------------------------- */

struct view {
    struct ns_http_state state;
    bool healthy, ready;
    const char *health, *readiness; /* one line each */
};

static struct view
look(struct ns_http *http)
{
    struct view view = { 0 };
    int64_t silent_ms;

    pthread_mutex_lock(&http->lock);
    view.state = http->state;
    silent_ms = ns_now_ms() - http->published_ms;
    pthread_mutex_unlock(&http->lock);

    view.healthy = true;
    view.health = "ok";
    if (view.state.phase == NS_HTTP_LOADING) {
        view.health = "loading the model";
    } else if (silent_ms > http->options.silent_ms) {
        view.healthy = false;
        view.health = "the event loop hangs";
    } else if (!view.state.healthy) {
        view.healthy = false;
        view.health = "a pass or a call into the store hangs";
    }
    switch (view.state.phase) {
    case NS_HTTP_LOADING:
        view.readiness = "loading the model";
        break;
    case NS_HTTP_OPENING:
        view.readiness = "opening source and store";
        break;
    case NS_HTTP_WAITING:
        view.readiness = "source or store is out of reach";
        break;
    case NS_HTTP_DRAINING:
        view.readiness = "draining";
        break;
    case NS_HTTP_WORKING:
        view.ready = view.healthy;
        view.readiness = view.healthy ? "ok" : view.health;
        break;
    }
    return view;
}

static struct ns_metrics_about
about(const struct ns_http *http, const struct view *view)
{
    const struct ns_http_state *state = &view->state;

    return (struct ns_metrics_about){
        .version = http->options.version,
        .model = state->model,
        .model_revision = state->model_revision,
        .start_unix_s = http->start_unix_ms / 1000,
        .ready = view->ready,
        .healthy = view->healthy,
        .kafka = state->has_kafka ? &state->kafka : NULL,
    };
}

static struct sample
sample_now(const struct ns_metrics *metrics)
{
    struct sample sample = { .unix_ms = ns_unix_now_ms(),
                             .tokens = atomic_load(&metrics->new_tokens),
                             .in_flight = atomic_load(&metrics->in_flight) };

    for (size_t i = 0; i < NS_METRICS_STATUSES; i++)
        sample.ended += atomic_load(&metrics->ended[i]);
    return sample;
}

static void
keep_sample(struct ns_http *http)
{
    int64_t now_ms = ns_now_ms();

    if (now_ms < http->sample_at_ms)
        return;
    http->sample_at_ms = now_ms + SAMPLE_MS;
    http->sample[http->next_sample] = sample_now(http->options.metrics);
    http->next_sample = (http->next_sample + 1) % N_SAMPLES;
    if (http->n_samples < N_SAMPLES)
        http->n_samples++;
}

/* --- the answers ------------------------------------------------------- */

static void
write_text(struct ns_buf *out, const char *text)
{
    ns_buf_byte(out, '"');
    for (; text && *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < ' ')
            ns_buf_printf(out, "\\u%04x", (unsigned char)*text);
        else
            ns_buf_byte(out, *text);
    ns_buf_byte(out, '"');
}

static void
write_sample(struct ns_buf *out, const struct sample *sample)
{
    ns_buf_printf(out, "[%" PRId64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]",
                  sample->unix_ms, sample->tokens, sample->ended,
                  sample->in_flight);
}

static void
write_status(struct ns_http *http, struct ns_buf *out)
{
    const struct ns_metrics *m = http->options.metrics;
    struct view view = look(http);
    struct sample now = sample_now(m);
    size_t at = http->next_sample + N_SAMPLES - http->n_samples;

    ns_buf_text(out, "{\"version\":");
    write_text(out, http->options.version);
    ns_buf_text(out, ",\"model\":");
    write_text(out, view.state.model);
    ns_buf_printf(out, ",\"ready\":%s,\"healthy\":%s,\"reason\":",
                  view.ready ? "true" : "false",
                  view.healthy ? "true" : "false");
    write_text(out, view.healthy ? view.readiness : view.health);
    ns_buf_printf(out, ",\"now_ms\":%" PRId64 ",\"start_ms\":%" PRId64,
                  now.unix_ms, http->start_unix_ms);
#define NUMBER(name) \
    ns_buf_printf(out, ",\"" #name "\":%" PRIu64, atomic_load(&m->name))
    NUMBER(received);
    NUMBER(in_flight);
    NUMBER(running);
    NUMBER(window);
    NUMBER(duplicates);
    NUMBER(retries);
    NUMBER(passes);
    NUMBER(new_tokens);
    NUMBER(prompt_tokens);
    NUMBER(cached_tokens);
    NUMBER(canvas_steps);
    NUMBER(canvas_blocks);
    NUMBER(job_tokens);
    NUMBER(job_passes);
    NUMBER(put_back);
    NUMBER(full_pages);
    NUMBER(full_pages_free);
    NUMBER(sliding_pages);
    NUMBER(sliding_pages_free);
#undef NUMBER
    ns_buf_printf(out, ",\"waiting\":%" PRIu64 ",\"fill_sum\":%.6f"
                  ",\"ended\":{\"ok\":%" PRIu64, ns_metrics_waiting(m),
                  (double)atomic_load(&m->pass_fill.sum_micro) / 1e6,
                  atomic_load(&m->ended[NS_RESULT_OK]));
    for (int i = NS_RESULT_OK + 1; i < NS_METRICS_STATUSES; i++)
        ns_buf_printf(out, ",\"%s\":%" PRIu64,
                      ns_result_status_name((enum ns_result_status)i),
                      atomic_load(&m->ended[i]));
    ns_buf_text(out, "},\"errors\":{");
    for (size_t i = 0, n = 0; i < NS_METRICS_CODES; i++)
        if (atomic_load(&m->errors[i]) > 0)
            ns_buf_printf(out, "%s\"%s\":%" PRIu64, n++ ? "," : "",
                          ns_metrics_code(i), atomic_load(&m->errors[i]));
    ns_buf_text(out, "}");
    if (view.state.has_kafka)
        ns_buf_printf(out, ",\"lag\":%" PRIu64 ",\"head_ms\":%" PRId64,
                      view.state.kafka.lag, view.state.kafka.head_ms);
    ns_buf_text(out, ",\"jobs\":");
    if (http->options.board)
        ns_board_write(http->options.board, out);
    else
        ns_buf_text(out, "[]");
    ns_buf_text(out, ",\"history\":[");
    for (size_t i = 0; i < http->n_samples; i++, at++) {
        write_sample(out, &http->sample[at % N_SAMPLES]);
        ns_buf_byte(out, ',');
    }
    write_sample(out, &now);
    ns_buf_text(out, "]}\n");
}

static void
write_metrics(struct ns_http *http, struct ns_buf *out)
{
    struct view view = look(http);
    struct ns_metrics_about known = about(http, &view);

    ns_metrics_write(http->options.metrics, &known, out);
}

static enum MHD_Result
reply(struct MHD_Connection *connection, unsigned status, const char *type,
      const char *text, size_t length, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(length, (void *)text, mode);
    enum MHD_Result result;

    if (!response)
        return MHD_NO;
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Content-Security-Policy",
                            "default-src 'none'; style-src 'unsafe-inline'; "
                            "script-src 'unsafe-inline'; connect-src 'self'; "
                            "frame-ancestors 'none'; base-uri 'none'");
    /* One answer a connection: none is kept that others may wait for. */
    MHD_add_response_header(response, "Connection", "close");
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, "Allow", "GET");
    result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result
reply_line(struct MHD_Connection *connection, unsigned status,
           const char *line)
{
    char text[128];
    int n = snprintf(text, sizeof(text), "%s\n", line);

    return reply(connection, status, "text/plain; charset=utf-8", text,
                 (size_t)n, MHD_RESPMEM_MUST_COPY);
}

static enum MHD_Result
reply_made(struct ns_http *http, struct MHD_Connection *connection,
           const char *type,
           void (*write)(struct ns_http *http, struct ns_buf *out))
{
    enum MHD_Result result;
    struct ns_error err;
    struct ns_buf out;

    ns_buf_init(&out, ANSWER_BYTES);
    write(http, &out);
    if (ns_buf_check(&out, "an answer", &err) != NS_OK)
        result = reply_line(connection, MHD_HTTP_INTERNAL_SERVER_ERROR,
                            "no memory for the answer");
    else
        result = reply(connection, MHD_HTTP_OK, type, out.data, out.length,
                       MHD_RESPMEM_MUST_COPY);
    ns_buf_fini(&out);
    return result;
}

static enum MHD_Result
answer(void *data, struct MHD_Connection *connection, const char *url,
       const char *method, const char *version, const char *upload,
       size_t *upload_size, void **context)
{
    struct ns_http *http = data;
    struct view view;

    (void)version;
    (void)upload;
    (void)upload_size;
    (void)context;
    if (strcmp(method, "GET") != 0)
        return reply_line(connection, MHD_HTTP_METHOD_NOT_ALLOWED,
                          "only GET");
    if (strcmp(url, "/metrics") == 0)
        return reply_made(http, connection,
                          "text/plain; version=0.0.4; charset=utf-8",
                          write_metrics);
    if (strcmp(url, "/status.json") == 0)
        return reply_made(http, connection, "application/json", write_status);
    view = look(http);
    if (strcmp(url, "/healthz") == 0)
        return reply_line(connection, view.healthy
                                          ? MHD_HTTP_OK
                                          : MHD_HTTP_SERVICE_UNAVAILABLE,
                          view.health);
    if (strcmp(url, "/readyz") == 0)
        return reply_line(connection, view.ready
                                          ? MHD_HTTP_OK
                                          : MHD_HTTP_SERVICE_UNAVAILABLE,
                          view.readiness);
    if (strcmp(url, "/") == 0)
        return reply(connection, MHD_HTTP_OK, "text/html; charset=utf-8",
                     ns_http_page, strlen(ns_http_page),
                     MHD_RESPMEM_PERSISTENT);
    return reply_line(connection, MHD_HTTP_NOT_FOUND, "no such page");
}

/* --- clients and their time -------------------------------------------- */

/* The library's own time-out counts from the last byte, so one byte now and
 * then would hold a place for ever: each connection has an end as well. */
static void
note_client(void *data, struct MHD_Connection *connection, void **context,
            enum MHD_ConnectionNotificationCode what)
{
    const union MHD_ConnectionInfo *info;
    struct ns_http *http = data;
    struct client *client = *context;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        info = MHD_get_connection_info(connection,
                                       MHD_CONNECTION_INFO_CONNECTION_FD);
        client = calloc(1, sizeof(*client));
        *context = client;
        if (!client)
            return; /* the library's time-out is left */
        client->fd = info ? info->connect_fd : -1;
        client->until_ms = ns_now_ms() + http->options.client_ms;
        client->next = http->clients;
        if (http->clients)
            http->clients->previous = client;
        http->clients = client;
        return;
    }
    if (!client)
        return;
    if (client->previous)
        client->previous->next = client->next;
    else
        http->clients = client->next;
    if (client->next)
        client->next->previous = client->previous;
    free(client);
    *context = NULL;
}

static void
end_late_clients(struct ns_http *http)
{
    int64_t now_ms = ns_now_ms();

    for (struct client *client = http->clients; client; client = client->next)
        if (client->fd != -1 && now_ms >= client->until_ms) {
            shutdown(client->fd, SHUT_RDWR); /* the library closes it */
            client->until_ms = INT64_MAX;
        }
}

static int
wait_ms(const struct ns_http *http)
{
    int64_t now_ms = ns_now_ms(), wait = http->sample_at_ms - now_ms;
    MHD_UNSIGNED_LONG_LONG wanted;

    for (const struct client *client = http->clients; client;
         client = client->next)
        if (client->until_ms - now_ms < wait)
            wait = client->until_ms - now_ms;
    if (MHD_get_timeout(http->daemon, &wanted) == MHD_YES &&
        wanted < (MHD_UNSIGNED_LONG_LONG)(wait > 0 ? wait : 0))
        wait = (int64_t)wanted;
    return wait > 0 ? (int)wait : 0;
}

static void *
serve(void *data)
{
    struct ns_http *http = data;
    const union MHD_DaemonInfo *info =
        MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    struct pollfd fds[2] = { { .fd = http->wake_fd, .events = POLLIN },
                             { .fd = info->epoll_fd, .events = POLLIN } };

    while (!fds[0].revents) {
        keep_sample(http);
        if (poll(fds, 2, wait_ms(http)) == -1 && errno != EINTR)
            break;
        end_late_clients(http);
        MHD_run(http->daemon);
    }
    return NULL;
}

/* --- open and close ---------------------------------------------------- */

static enum ns_status
split_address(const char *listen, char *host, size_t host_size,
              const char **port, struct ns_error *err)
{
    const char *colon = strrchr(listen, ':');
    size_t n;

    if (!colon || colon == listen || !colon[1] ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1) ||
        strlen(colon + 1) > 5 || atoi(colon + 1) > UINT16_MAX)
        return ns_fail(err, NS_REJECT,
                       "http.listen: \"%.80s\" is not host:port", listen);
    n = (size_t)(colon - listen);
    if (listen[0] == '[' && listen[n - 1] == ']') {
        listen++;
        n -= 2;
    } else if (memchr(listen, ':', n)) {
        return ns_fail(err, NS_REJECT, "http.listen: \"%.80s\": an IPv6 "
                       "address stands in brackets", listen);
    }
    if (n == 0 || n >= host_size)
        return ns_fail(err, NS_REJECT,
                       "http.listen: \"%.80s\" is not host:port", listen);
    memcpy(host, listen, n);
    host[n] = '\0';
    *port = colon + 1;
    return NS_OK;
}

static void
note_address(struct ns_http *http, int fd)
{
    struct sockaddr_storage at = { 0 };
    socklen_t length = sizeof(at);

    if (getsockname(fd, (struct sockaddr *)&at, &length) == -1)
        return;
    if (at.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&at;

        http->port = ntohs(in->sin_port);
        http->local = ntohl(in->sin_addr.s_addr) >> 24 == 127;
    } else {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&at;

        http->port = ntohs(in6->sin6_port);
        http->local = IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
    }
}

static enum ns_status
listen_at(struct ns_http *http, int *out, struct ns_error *err)
{
    const char *where = http->options.listen, *port = NULL;
    struct addrinfo *found = NULL;
    struct addrinfo hints = { .ai_family = AF_UNSPEC,
                              .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    enum ns_status status;
    char host[256];
    int fd, rc, one = 1;

    status = split_address(where, host, sizeof(host), &port, err);
    if (status != NS_OK)
        return status;
    rc = getaddrinfo(host, port, &hints, &found);
    if (rc != 0)
        return ns_fail(err, NS_REJECT, "http.listen: %.80s: %s", where,
                       gai_strerror(rc));
    fd = socket(found->ai_family,
                SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd == -1) {
        status = ns_fail_errno(err, NS_REJECT, "http.listen: %.80s", where);
        goto out;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, found->ai_addr, found->ai_addrlen) == -1 ||
        listen(fd, MAX_CLIENTS) == -1) {
        status = ns_fail_errno(err, errno == EADDRINUSE ? NS_RETRY : NS_REJECT,
                               "http.listen: %.80s", where);
        close(fd);
        goto out;
    }
    note_address(http, fd);
    *out = fd;
out:
    freeaddrinfo(found);
    return status;
}

static enum ns_status
start(struct ns_http *http, struct ns_error *err)
{
    unsigned idle_s = (unsigned)(http->options.client_ms / 1000) + 1;
    enum ns_status status;
    int fd = -1, rc;

    http->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (http->wake_fd == -1)
        return ns_fail_errno(err, NS_FATAL, "eventfd");
    status = listen_at(http, &fd, err);
    if (status != NS_OK)
        return status;
    /* No MHD_USE_ERROR_LOG: what clients do wrong is no news of ours. */
    http->daemon = MHD_start_daemon(
        MHD_USE_EPOLL, 0, NULL, NULL, answer, http, MHD_OPTION_LISTEN_SOCKET,
        fd, MHD_OPTION_CONNECTION_LIMIT, http->options.max_clients,
        MHD_OPTION_CONNECTION_TIMEOUT, idle_s,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CLIENT_BYTES,
        MHD_OPTION_NOTIFY_CONNECTION, note_client, http, MHD_OPTION_END);
    if (!http->daemon) /* and the socket is closed */
        return ns_fail(err, NS_FATAL, "start the web server");
    rc = pthread_create(&http->thread, NULL, serve, http);
    if (rc != 0)
        return ns_fail(err, NS_FATAL, "start a thread: %s", strerror(rc));
    http->has_thread = true;
    pthread_setname_np(http->thread, "http");
    return NS_OK;
}

enum ns_status
ns_http_open(const struct ns_http_options *options, struct ns_http **out,
             struct ns_error *err)
{
    struct ns_http *http = calloc(1, sizeof(*http));
    enum ns_status status;

    if (!http)
        return ns_fail(err, NS_FATAL, "out of memory for the web server");
    http->options = *options;
    if (http->options.max_clients == 0)
        http->options.max_clients = MAX_CLIENTS;
    if (http->options.client_ms == 0)
        http->options.client_ms = CLIENT_MS;
    if (http->options.silent_ms == 0)
        http->options.silent_ms = SILENT_MS;
    http->start_unix_ms = ns_unix_now_ms();
    http->published_ms = ns_now_ms();
    pthread_mutex_init(&http->lock, NULL);
    status = start(http, err);
    if (status != NS_OK) {
        ns_http_close(http);
        return status;
    }
    *out = http;
    return NS_OK;
}

uint16_t
ns_http_port(const struct ns_http *http)
{
    return http->port;
}

bool
ns_http_is_local(const struct ns_http *http)
{
    return http->local;
}

void
ns_http_publish(struct ns_http *http, const struct ns_http_state *state)
{
    int64_t now_ms = ns_now_ms();

    pthread_mutex_lock(&http->lock);
    http->state = *state;
    http->published_ms = now_ms;
    pthread_mutex_unlock(&http->lock);
}

void
ns_http_close(struct ns_http *http)
{
    if (!http)
        return;
    if (http->has_thread) {
        eventfd_write(http->wake_fd, 1);
        pthread_join(http->thread, NULL);
    }
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    if (http->wake_fd != -1)
        close(http->wake_fd);
    pthread_mutex_destroy(&http->lock);
    free(http);
}
