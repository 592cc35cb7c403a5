/* client.h - asks a web server on loopback, one request a connection.
 *
 * A header of static functions, since only tests/daemon needs them.
 */
#ifndef NS_TESTS_DAEMON_CLIENT_H
#define NS_TESTS_DAEMON_CLIENT_H

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/daemon/program.h"

enum { CLIENT_ANSWER = 512 << 10 };

static inline int
connect_to(uint16_t port)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port),
                              .sin_addr = { htonl(INADDR_LOOPBACK) } };
    struct timeval limit = { .tv_sec = 20 };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

/* All that comes back for `request`, until the server closes. */
static inline char *
exchange(uint16_t port, const char *request, size_t length)
{
    int fd = connect_to(port);
    char *text = calloc(1, CLIENT_ANSWER);
    size_t at = 0;
    ssize_t n;

    assert_non_null(text);
    send(fd, request, length, MSG_NOSIGNAL);
    while (at < CLIENT_ANSWER - 1 &&
           (n = read(fd, text + at, CLIENT_ANSWER - 1 - at)) > 0)
        at += (size_t)n;
    close(fd);
    return text;
}

static inline char *
ask(uint16_t port, const char *method, const char *path)
{
    char request[256];
    int n = snprintf(request, sizeof(request),
                     "%s %s HTTP/1.1\r\nHost: x\r\n\r\n", method, path);

    return exchange(port, request, (size_t)n);
}

static inline int
status_of(const char *answer)
{
    return strncmp(answer, "HTTP/1.1 ", 9) == 0 ? atoi(answer + 9) : 0;
}

static inline const char *
body_of(const char *answer)
{
    const char *gap = strstr(answer, "\r\n\r\n");

    assert_non_null(gap);
    return gap + 4;
}

/* The status of GET `path`. */
static inline int
get_status(uint16_t port, const char *path)
{
    char *answer = ask(port, "GET", path);
    int status = status_of(answer);

    free(answer);
    return status;
}

/* Where the daemon that writes this log listens; it has said so. */
static inline uint16_t
port_in(const char *log_path)
{
    char *log = slurp(log_path);
    int port;

    assert_non_null(strstr(log, "port="));
    port = atoi(strstr(log, "port=") + 5);
    free(log);
    return (uint16_t)port;
}

/* A counter or gauge without labels; -1: there is none of that name. */
static inline int64_t
metric_of(uint16_t port, const char *name)
{
    char *answer = ask(port, "GET", "/metrics"), line[128];
    const char *at;
    int64_t value = -1;

    snprintf(line, sizeof(line), "\n%s ", name);
    at = strstr(answer, line);
    if (at)
        value = strtoll(at + strlen(line), NULL, 10);
    free(answer);
    return value;
}

static inline void
wait_for_metric(uint16_t port, const char *name, int64_t least)
{
    int64_t until = now_ms() + LIMIT_MS;

    while (metric_of(port, name) < least) {
        if (now_ms() > until)
            fail_msg("%s is never %d", name, (int)least);
        usleep(20000);
    }
}

static inline void
wait_for_status(uint16_t port, const char *path, int status)
{
    int64_t until = now_ms() + LIMIT_MS;

    while (get_status(port, path) != status) {
        if (now_ms() > until)
            fail_msg("%s never said %d", path, status);
        usleep(20000);
    }
}

#endif
