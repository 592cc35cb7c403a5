/* web.h - a web server for tests, on loopback, that behaves as paths ask.
 *
 *     /file         200, web_body as the body, and a Content-Type that lies
 *     /N            three digits: that status, with a page
 *     /hops/N       N redirects, then /file
 *     /away?URL     a redirect to URL
 *     /lost         a redirect that names no place
 *     /endless      200, bytes without an end
 *     /huge         200, announces 1 GB
 *     /short        200, announces more than it sends
 *     /hang         /file, once web_release is called
 *
 * A connection is closed behind its answer. Header only.
 */
#ifndef NS_TESTS_SERVERS_WEB_H
#define NS_TESTS_SERVERS_WEB_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WEB_CONNECTIONS = 1024 };

struct web {
    int listener, port;
    pthread_t thread, connection[WEB_CONNECTIONS];
    int n_connections;
    const void *body;
    size_t length;
    _Atomic bool released, ending;
    _Atomic int n_asked, n_hanging;
    _Atomic bool secret; /* a request with credentials or cookies was seen */
};

struct web_call {
    struct web *web;
    int fd;
};

static void
web_send(int fd, const void *bytes, size_t n)
{
    const char *at = bytes;

    while (n > 0) {
        ssize_t part = send(fd, at, n, MSG_NOSIGNAL);

        if (part <= 0)
            return;
        at += part;
        n -= (size_t)part;
    }
}

static void
web_head(int fd, int answer, const char *more)
{
    char head[9000];
    int n = snprintf(head, sizeof(head), "HTTP/1.1 %d X\r\nConnection: close"
                     "\r\nContent-Type: text/html\r\nSet-Cookie: a=b\r\n%s"
                     "\r\n\r\n", answer, more);

    web_send(fd, head, (size_t)n);
}

static void
web_file(struct web *web, int fd)
{
    char length[64];

    snprintf(length, sizeof(length), "Content-Length: %zu", web->length);
    web_head(fd, 200, length);
    web_send(fd, web->body, web->length);
}

/* False once the other side has gone, or the server ends. */
static bool
web_wait(struct web *web, int fd)
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    char byte;

    while (!atomic_load(&web->released)) {
        if (atomic_load(&web->ending) ||
            (poll(&p, 1, 10) > 0 && recv(fd, &byte, 1, 0) <= 0))
            return false;
    }
    return true;
}

static void
web_answer(struct web *web, int fd, const char *path)
{
    static const char page[50000];
    char more[9000];
    int n;

    if (strcmp(path, "/file") == 0) {
        web_file(web, fd);
    } else if (sscanf(path, "/hops/%d", &n) == 1) {
        snprintf(more, sizeof(more), n > 1 ? "Location: /hops/%d"
                                           : "Location: ../file", n - 1);
        web_head(fd, 302, more);
        web_send(fd, page, sizeof(page));
    } else if (strncmp(path, "/away?", 6) == 0) {
        snprintf(more, sizeof(more), "Location: %.8000s", path + 6);
        web_head(fd, 307, more);
    } else if (strcmp(path, "/lost") == 0) {
        web_head(fd, 302, "X: y");
    } else if (strcmp(path, "/endless") == 0) {
        struct pollfd p = { .fd = fd, .events = POLLOUT };

        web_head(fd, 200, "X: y");
        while (!atomic_load(&web->ending) && poll(&p, 1, 10) >= 0 &&
               !(p.revents & (POLLERR | POLLHUP)))
            web_send(fd, page, sizeof(page));
    } else if (strcmp(path, "/huge") == 0) {
        web_head(fd, 200, "Content-Length: 1073741824");
        web_send(fd, page, 100);
    } else if (strcmp(path, "/short") == 0) {
        web_head(fd, 200, "Content-Length: 1000");
        web_send(fd, page, 100);
    } else if (strcmp(path, "/hang") == 0) {
        atomic_fetch_add(&web->n_hanging, 1);
        if (web_wait(web, fd))
            web_file(web, fd);
        atomic_fetch_sub(&web->n_hanging, 1);
    } else if (sscanf(path, "/%3d", &n) == 1) {
        web_head(fd, n, "X: y");
        web_send(fd, page, 200);
    } else {
        web_head(fd, 404, "X: y");
    }
}

static void *
web_connection(void *data)
{
    struct web_call *call = data;
    char request[10000] = "", path[9000] = "";
    size_t used = 0;

    while (used < sizeof(request) - 1 && !strstr(request, "\r\n\r\n")) {
        ssize_t part = recv(call->fd, request + used,
                            sizeof(request) - 1 - used, 0);

        if (part <= 0)
            break;
        used += (size_t)part;
        request[used] = '\0';
    }
    if (sscanf(request, "GET %8999s ", path) == 1) {
        atomic_fetch_add(&call->web->n_asked, 1);
        if (strcasestr(request, "\nCookie:") ||
            strcasestr(request, "\nAuthorization:"))
            atomic_store(&call->web->secret, true);
        web_answer(call->web, call->fd, path);
    }
    shutdown(call->fd, SHUT_WR); /* and then what is still on its way, so */
    while (recv(call->fd, request, sizeof(request), 0) > 0) /* that no reset */
        ;                                                 /* overtakes it */
    close(call->fd);
    free(call);
    return NULL;
}

static void *
web_listen(void *data)
{
    struct web *web = data;
    int fd;

    while ((fd = accept(web->listener, NULL, NULL)) != -1) {
        struct web_call *call = malloc(sizeof(*call));

        if (!call || web->n_connections == WEB_CONNECTIONS)
            abort(); /* more than a test asks for */
        *call = (struct web_call){ web, fd };
        pthread_create(&web->connection[web->n_connections++], NULL,
                       web_connection, call);
    }
    return NULL;
}

/* Serves at `address`, an IPv4 of loopback, on `port` or, for 0, any. */
static void
web_start(struct web *web, const char *address, int port, const void *body,
          size_t length)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_port = htons((uint16_t)port) };
    socklen_t size = sizeof(at);
    int yes = 1;

    memset(web, 0, sizeof(*web));
    web->body = body;
    web->length = length;
    web->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(web->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    inet_pton(AF_INET, address, &at.sin_addr);
    if (bind(web->listener, (struct sockaddr *)&at, sizeof(at)) != 0 ||
        listen(web->listener, 64) != 0 ||
        getsockname(web->listener, (struct sockaddr *)&at, &size) != 0)
        abort();
    web->port = ntohs(at.sin_port);
    pthread_create(&web->thread, NULL, web_listen, web);
}

static inline void
web_release(struct web *web)
{
    atomic_store(&web->released, true);
}

/* Once nothing asks any more. */
static void
web_stop(struct web *web)
{
    atomic_store(&web->ending, true);
    shutdown(web->listener, SHUT_RDWR);
    pthread_join(web->thread, NULL);
    for (int i = 0; i < web->n_connections; i++)
        pthread_join(web->connection[i], NULL);
    close(web->listener);
}

#endif
