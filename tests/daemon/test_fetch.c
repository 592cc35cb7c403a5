/* Pictures by URL: what is allowed, and a server on loopback that does all
 * that servers do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/fetch.h"
#include "daemon/fetch_allow.h"
#include "tests/servers/web.h"

/* ---- what is allowed --------------------------------------------------- */

static struct ns_fetch_allow *
allow(const char *hosts, const char *networks)
{
    struct ns_fetch_allow *out = NULL;
    struct ns_error err;

    if (ns_fetch_allow_create(hosts, networks, &out, &err) != NS_OK)
        fail_msg("%s", err.text);
    return out;
}

static bool
address_allowed(const struct ns_fetch_allow *allowed, const char *text)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };

    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        return ns_fetch_allow_address(allowed, (struct sockaddr *)&v4);
    assert_int_equal(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
    return ns_fetch_allow_address(allowed, (struct sockaddr *)&v6);
}

static void
only_public_addresses_are_connected_to(void **state)
{
    static const char *const public_[] = {
        "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255",
        "100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255",
        "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255",
        "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
        "2001:4860:4860::8888", "2606:4700::1111", "2a00::1", "2003::1",
        "3ffe::1",
    };
    static const char *const private_[] = {
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1",
        "100.127.255.255", "127.0.0.1", "127.255.255.254", "169.254.169.254",
        "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1",
        "192.88.99.1", "192.168.0.1", "192.168.255.255", "198.18.0.1",
        "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
        "240.0.0.1", "255.255.255.255",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::8.8.8.8",
        "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "fc00::1", "fdff::1",
        "fe80::1", "febf::1", "fec0::1", "ff02::1", "2001::1", "2001:1ff::1",
        "2001:db8::1", "2002:7f00:1::1", "3fff::1", "5f00::1",
    };
    struct ns_fetch_allow *a = allow("*", NULL);
    struct sockaddr other = { .sa_family = AF_UNIX };

    (void)state;
    for (size_t i = 0; i < sizeof(public_) / sizeof(public_[0]); i++)
        if (!address_allowed(a, public_[i]))
            fail_msg("%s is refused", public_[i]);
    for (size_t i = 0; i < sizeof(private_) / sizeof(private_[0]); i++)
        if (address_allowed(a, private_[i]))
            fail_msg("%s is allowed", private_[i]);
    assert_false(ns_fetch_allow_address(a, &other));
    ns_fetch_allow_destroy(a);
}

static void
listed_networks_are_allowed_and_no_more(void **state)
{
    struct ns_fetch_allow *a =
        allow("*", "10.20.0.0/16, 127.0.0.5 172.16.0.0/13,fd00:1::/33,::1/128");

    (void)state;
    assert_true(address_allowed(a, "10.20.255.1"));
    assert_false(address_allowed(a, "10.21.0.1"));
    assert_true(address_allowed(a, "127.0.0.5"));
    assert_false(address_allowed(a, "127.0.0.4"));
    assert_true(address_allowed(a, "172.23.0.1"));
    assert_false(address_allowed(a, "172.24.0.1"));
    assert_true(address_allowed(a, "fd00:1:7fff::1"));
    assert_false(address_allowed(a, "fd00:1:8000::1"));
    assert_true(address_allowed(a, "::1"));
    /* An IPv4 network says nothing of how IPv6 writes it. */
    assert_false(address_allowed(a, "::ffff:10.20.0.1"));
    ns_fetch_allow_destroy(a);
}

static void
hosts_are_those_of_the_list_at_their_port(void **state)
{
    struct ns_fetch_allow *a = allow(
        "Img.example.org, *.cdn.example.net,local:8080,*.x.org:81,[::1]:82",
        "");
    struct ns_fetch_allow *any = allow("*", NULL);

    (void)state;
    assert_true(ns_fetch_allow_host(a, "img.EXAMPLE.org", 443, 443));
    assert_true(ns_fetch_allow_host(a, "img.example.org.", 80, 80));
    assert_false(ns_fetch_allow_host(a, "img.example.org", 80, 443));
    assert_false(ns_fetch_allow_host(a, "img.example.org", 22, 443));
    assert_false(ns_fetch_allow_host(a, "img.example.org.evil.org", 443, 443));
    assert_false(ns_fetch_allow_host(a, "ximg.example.org", 443, 443));
    assert_false(ns_fetch_allow_host(a, "img.example.or", 443, 443));
    assert_true(ns_fetch_allow_host(a, "a.cdn.example.net", 443, 443));
    assert_true(ns_fetch_allow_host(a, "a.b.cdn.example.net", 443, 443));
    assert_false(ns_fetch_allow_host(a, "cdn.example.net", 443, 443));
    assert_false(ns_fetch_allow_host(a, ".cdn.example.net", 443, 443));
    assert_false(ns_fetch_allow_host(a, "evilcdn.example.net", 443, 443));
    assert_true(ns_fetch_allow_host(a, "local", 8080, 80));
    assert_false(ns_fetch_allow_host(a, "local", 80, 80));
    assert_true(ns_fetch_allow_host(a, "b.x.org", 81, 80));
    assert_true(ns_fetch_allow_host(a, "[::1]", 82, 80));
    assert_false(ns_fetch_allow_host(a, "[::2]", 82, 80));
    assert_false(ns_fetch_allow_host(a, "", 443, 443));
    assert_true(ns_fetch_allow_host(any, "whatever", 443, 443));
    assert_false(ns_fetch_allow_host(any, "whatever", 8080, 80));
    ns_fetch_allow_destroy(a);
    ns_fetch_allow_destroy(any);
}

static void
lists_that_say_nothing_sure_are_refused(void **state)
{
    static const char *const hosts[] = {
        "", " , ", "a:0", "a:65536", "a:x", "a:", "*x", "**", "*.", "*..a",
        "a*", ".a", "a.", "http://a", "a/b", "[::1", "u@a", "a:1:2", "*.*",
    };
    static const char *const networks[] = {
        "10.0.0.0/33", "10.0.0/8", "10.0.0.0/", "10.0.0.0/-1", "::/129",
        "::/1x", "localhost", "10.0.0.0/8/8", "/8",
    };
    struct ns_fetch_allow *out = NULL;
    struct ns_error err;

    (void)state;
    for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
        if (ns_fetch_allow_create(hosts[i], NULL, &out, &err) != NS_REJECT)
            fail_msg("'%s' is taken", hosts[i]);
        assert_non_null(strstr(err.text, "images.url_hosts"));
    }
    for (size_t i = 0; i < sizeof(networks) / sizeof(networks[0]); i++) {
        if (ns_fetch_allow_create("a", networks[i], &out, &err) != NS_REJECT)
            fail_msg("'%s' is taken", networks[i]);
        assert_non_null(strstr(err.text, "images.url_networks"));
    }
    assert_null(out);
}

/* ---- names, as this test wants them ------------------------------------- */

static _Atomic int n_lookups;

/* In front of the C library's: rebind.test leads to 127.0.0.1 the first time
 * and to 127.0.0.9 ever after, both.test to both. */
int
getaddrinfo(const char *name, const char *service,
            const struct addrinfo *hints, struct addrinfo **out)
{
    static int (*real)(const char *, const char *, const struct addrinfo *,
                       struct addrinfo **);
    struct addrinfo numeric = { .ai_flags = AI_NUMERICHOST,
                                .ai_family = AF_INET,
                                .ai_socktype = SOCK_STREAM };
    void *symbol = dlsym(RTLD_NEXT, "getaddrinfo");
    int rc;

    memcpy(&real, &symbol, sizeof(real));
    if (name && strcmp(name, "rebind.test") == 0)
        return real(atomic_fetch_add(&n_lookups, 1) == 0 ? "127.0.0.1"
                                                         : "127.0.0.9",
                    service, &numeric, out);
    if (name && strcmp(name, "both.test") == 0) {
        rc = real("127.0.0.9", service, &numeric, out);
        return rc != 0 ? rc
                       : real("127.0.0.1", service, &numeric,
                              &(*out)->ai_next);
    }
    return real(name, service, hints, out);
}

/* ---- a server ------------------------------------------------------------ */

static const char picture[] = "bytes that someone else will look at";
static struct web web;   /* 127.0.0.1 */
static struct web other; /* 127.0.0.9, on the same port */

static int
start_servers(void **state)
{
    (void)state;
    web_start(&web, "127.0.0.1", 0, picture, sizeof(picture));
    web_start(&other, "127.0.0.9", web.port, picture, sizeof(picture));
    return 0;
}

static int
stop_servers(void **state)
{
    (void)state;
    web_stop(&web);
    web_stop(&other);
    return 0;
}

static struct ns_fetcher *
fetcher(const char *hosts, const char *networks, uint64_t max_bytes,
        uint64_t time_ms, uint32_t n_lanes)
{
    struct ns_fetch_options options = {
        .networks = networks, .max_bytes = max_bytes, .time_ms = time_ms,
        .max_redirects = 3, .n_lanes = n_lanes,
    };
    struct ns_fetcher *out = NULL;
    struct ns_error err;
    char list[200] = "";

    for (const char *at = hosts; *at; at++) { /* @ is the servers' port */
        size_t n = strlen(list);

        if (*at == '@')
            snprintf(list + n, sizeof(list) - n, "%d", web.port);
        else
            list[n] = *at;
    }
    options.hosts = list;
    if (ns_fetcher_create(&options, &out, &err) != NS_OK)
        fail_msg("%s", err.text);
    return out;
}

#define HERE "127.0.0.1:@", "127.0.0.1"
#define LONG_MS 600000

static struct ns_fetch
ask(struct ns_fetcher *f, const char *format, ...)
{
    static char url[64][9000];
    static int next;
    char *text = url[next++ % 64];
    struct ns_fetch fetch = { .n = 1 };
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(url[0]), format, ap);
    va_end(ap);
    fetch.item[0].url = text;
    ns_fetcher_wait(f, &fetch);
    return fetch;
}

static void
brings(struct ns_fetch fetch)
{
    if (fetch.status != NS_OK)
        fail_msg("%s: %s", fetch.item[0].url, fetch.error.text);
    assert_int_equal(fetch.item[0].length, sizeof(picture));
    assert_memory_equal(fetch.item[0].bytes, picture, sizeof(picture));
    ns_fetch_fini(&fetch);
}

static void
fails(struct ns_fetch fetch, enum ns_status status, const char *code,
      const char *words)
{
    if (fetch.status == NS_OK)
        fail_msg("%s was fetched", fetch.item[0].url);
    if (fetch.status != status || !fetch.error.code ||
        strcmp(fetch.error.code, code) != 0 ||
        !strstr(fetch.error.text, words))
        fail_msg("%s: %s (%s)", fetch.item[0].url, fetch.error.text,
                 fetch.error.code ? fetch.error.code : "no code");
    assert_null(fetch.item[0].bytes);
    ns_fetch_fini(&fetch);
}

static void
a_picture_comes_whatever_its_headers_say(void **state)
{
    struct ns_fetcher *f = fetcher(HERE, 1 << 20, LONG_MS, 4);

    (void)state;
    brings(ask(f, "http://127.0.0.1:%d/file", web.port));
    brings(ask(f, "HTTP://0x7f.1:%d/file", web.port)); /* the same address */
    brings(ask(f, "http://127.0.0.1:%d/hops/1", web.port));
    brings(ask(f, "http://127.0.0.1:%d/hops/3", web.port));
    assert_false(atomic_load(&web.secret)); /* no cookie came back */
    ns_fetcher_destroy(f);
}

static void
answers_that_are_no_picture_are_told_apart(void **state)
{
    struct ns_fetcher *f = fetcher(HERE, 100000, LONG_MS, 4);

    (void)state;
    fails(ask(f, "http://127.0.0.1:%d/404", web.port), NS_REJECT, "url_failed",
          "answered 404");
    fails(ask(f, "http://127.0.0.1:%d/204", web.port), NS_REJECT, "url_failed",
          "answered 204");
    fails(ask(f, "http://127.0.0.1:%d/503", web.port), NS_RETRY, "url_failed",
          "answered 503");
    fails(ask(f, "http://127.0.0.1:%d/429", web.port), NS_RETRY, "url_failed",
          "answered 429");
    fails(ask(f, "http://127.0.0.1:%d/short", web.port), NS_RETRY,
          "url_failed", "");
    fails(ask(f, "http://127.0.0.1:%d/lost", web.port), NS_REJECT,
          "url_failed", "names no place");
    fails(ask(f, "http://127.0.0.1:%d/hops/4", web.port), NS_REJECT,
          "image_limit", "100000"); /* pages of redirects count */
    ns_fetcher_destroy(f);
    f = fetcher(HERE, 1 << 20, LONG_MS, 4);
    fails(ask(f, "http://127.0.0.1:%d/hops/4", web.port), NS_REJECT,
          "url_failed", "more than 3 redirects");
    ns_fetcher_destroy(f);
}

static void
there_is_an_end_to_bytes_and_to_time(void **state)
{
    struct ns_fetcher *f = fetcher(HERE, 200000, LONG_MS, 4);

    (void)state;
    fails(ask(f, "http://127.0.0.1:%d/endless", web.port), NS_REJECT,
          "image_limit", "200000 bytes (images.url_bytes)");
    fails(ask(f, "http://127.0.0.1:%d/huge", web.port), NS_REJECT,
          "image_limit", "200000");
    ns_fetcher_destroy(f);
    f = fetcher(HERE, 200000, 100, 4);
    fails(ask(f, "http://127.0.0.1:%d/hang", web.port), NS_RETRY, "url_failed",
          "within 100 ms (images.url_time)");
    ns_fetcher_destroy(f);
    f = fetcher(HERE, sizeof(picture), LONG_MS, 4); /* just enough */
    brings(ask(f, "http://127.0.0.1:%d/file", web.port));
    ns_fetcher_destroy(f);
    f = fetcher(HERE, sizeof(picture) - 1, LONG_MS, 4);
    fails(ask(f, "http://127.0.0.1:%d/file", web.port), NS_REJECT,
          "image_limit", "");
    ns_fetcher_destroy(f);
}

static void
what_is_not_listed_is_not_even_connected_to(void **state)
{
    struct ns_fetcher *f =
        fetcher("127.0.0.1:@, localhost:@, 127.0.0.9:@", NULL, 1 << 20,
                LONG_MS, 4);
    int before = atomic_load(&web.n_asked);
    char long_url[9000];

    (void)state;
    /* The hosts are, but where they lead to is this machine. */
    fails(ask(f, "http://127.0.0.1:%d/file", web.port), NS_REJECT,
          "url_denied", "its address is private");
    fails(ask(f, "http://localhost:%d/file", web.port), NS_REJECT,
          "url_denied", "its address is private");
    ns_fetcher_destroy(f);
    f = fetcher(HERE, 1 << 20, LONG_MS, 4);
    fails(ask(f, "http://localhost:%d/file", web.port), NS_REJECT,
          "url_denied", "not one of images.url_hosts");
    fails(ask(f, "http://127.0.0.1/file"), NS_REJECT, "url_denied",
          "not one of images.url_hosts"); /* the port is not */
    fails(ask(f, "http://me:secret@127.0.0.1:%d/file", web.port), NS_REJECT,
          "url_denied", "credentials");
    fails(ask(f, "ftp://127.0.0.1:%d/file", web.port), NS_REJECT,
          "url_denied", "only http and https");
    fails(ask(f, "gopher://127.0.0.1:%d/file", web.port), NS_REJECT,
          "url_denied", "only http and https");
    fails(ask(f, "http://[fe80::1%%25lo]:%d/file", web.port), NS_REJECT,
          "url_denied", "one link");
    fails(ask(f, "http://127.0.0.1:%d /file", web.port), NS_REJECT,
          "url_denied", "");
    fails(ask(f, "://"), NS_REJECT, "url_denied", "");
    memset(long_url, 'a', sizeof(long_url) - 1);
    long_url[sizeof(long_url) - 1] = '\0';
    memcpy(long_url, "http://127.0.0.1/", 17);
    fails(ask(f, "%s", long_url), NS_REJECT, "url_denied", "too long");
    assert_int_equal(atomic_load(&web.n_asked), before);
    ns_fetcher_destroy(f);
}

static void
redirects_are_judged_like_the_first(void **state)
{
    struct ns_fetcher *f =
        fetcher("127.0.0.1:@, 127.0.0.9:@, localhost:@", "127.0.0.1",
                1 << 20, LONG_MS, 4);
    int before = atomic_load(&other.n_asked);

    (void)state;
    brings(ask(f, "http://127.0.0.1:%d/away?http://localhost:%d/file",
               web.port, web.port));
    fails(ask(f, "http://127.0.0.1:%d/away?http://127.0.0.9:%d/file",
              web.port, web.port), NS_REJECT, "url_denied",
          "its address is private");
    fails(ask(f, "http://127.0.0.1:%d/away?http://example.org/file",
              web.port), NS_REJECT, "url_denied", "not one of");
    fails(ask(f, "http://127.0.0.1:%d/away?file:///etc/passwd", web.port),
          NS_REJECT, "url_denied", "no web address");
    fails(ask(f, "http://127.0.0.1:%d/away?ftp://127.0.0.1/file", web.port),
          NS_REJECT, "url_denied", "only http and https");
    fails(ask(f, "http://127.0.0.1:%d/away?http://a:b@localhost:%d/file",
              web.port, web.port), NS_REJECT, "url_denied", "credentials");
    assert_int_equal(atomic_load(&other.n_asked), before);
    ns_fetcher_destroy(f);
}

static void
a_name_that_leads_elsewhere_the_second_time_gains_nothing(void **state)
{
    int before = atomic_load(&other.n_asked);

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct ns_fetcher *f =
            fetcher("rebind.test:@", "127.0.0.1", 1 << 20, LONG_MS, 4);

        if (i == 0)
            brings(ask(f, "http://rebind.test:%d/file", web.port));
        else
            fails(ask(f, "http://rebind.test:%d/file", web.port), NS_REJECT,
                  "url_denied", "its address is private");
        ns_fetcher_destroy(f);
    }
    assert_int_equal(atomic_load(&n_lookups), 2);
    assert_int_equal(atomic_load(&other.n_asked), before);
}

static void
of_two_addresses_the_allowed_one_is_taken(void **state)
{
    int before = atomic_load(&other.n_asked);
    struct ns_fetcher *f =
        fetcher("both.test:@", "127.0.0.1", 1 << 20, LONG_MS, 4);

    (void)state;
    brings(ask(f, "http://both.test:%d/file", web.port));
    assert_int_equal(atomic_load(&other.n_asked), before);
    ns_fetcher_destroy(f);
}

/* ---- many at a time ------------------------------------------------------- */

static _Atomic int n_done;

static void
count_done(struct ns_fetch *fetch)
{
    (void)fetch;
    atomic_fetch_add(&n_done, 1);
}

static void
until(_Atomic int *number, int wanted)
{
    for (int i = 0; i < 60000 && atomic_load(number) != wanted; i++)
        usleep(1000);
    assert_int_equal(atomic_load(number), wanted);
}

static void
a_job_has_all_its_pictures_or_the_first_error(void **state)
{
    struct ns_fetcher *f = fetcher(HERE, 1 << 20, LONG_MS, 4);
    struct ns_fetch fetch = { .n = NS_FETCH_URLS };
    char good[64], bad[64];

    (void)state;
    snprintf(good, sizeof(good), "http://127.0.0.1:%d/file", web.port);
    snprintf(bad, sizeof(bad), "http://127.0.0.1:%d/404", web.port);
    for (uint32_t i = 0; i < fetch.n; i++)
        fetch.item[i].url = good;
    ns_fetcher_wait(f, &fetch);
    assert_int_equal(fetch.status, NS_OK);
    for (uint32_t i = 0; i < fetch.n; i++) {
        assert_int_equal(fetch.item[i].length, sizeof(picture));
        free(fetch.item[i].bytes);
        fetch.item[i].bytes = NULL;
    }
    fetch.item[11].url = bad;
    ns_fetcher_wait(f, &fetch);
    assert_int_equal(fetch.failed, 11);
    fails(fetch, NS_REJECT, "url_failed", "404");
    ns_fetcher_destroy(f);
}

static void
a_server_that_hangs_holds_half_of_the_lanes_and_no_more(void **state)
{
    enum { LANES = 4, HANGING = 6 };
    struct ns_fetcher *f = fetcher("127.0.0.1:@, localhost:@", "127.0.0.1",
                                   1 << 20, LONG_MS, LANES);
    struct ns_fetch hanging[HANGING];
    char hang[64];

    (void)state;
    snprintf(hang, sizeof(hang), "http://localhost:%d/hang", web.port);
    until(&web.n_hanging, 0);
    atomic_store(&n_done, 0);
    for (int i = 0; i < HANGING; i++) {
        hanging[i] = (struct ns_fetch){ .n = 1, .done = count_done };
        hanging[i].item[0].url = hang;
        ns_fetcher_start(f, &hanging[i]);
    }
    until(&web.n_hanging, LANES / 2);
    for (int i = 0; i < 10; i++) /* others go by */
        brings(ask(f, "http://127.0.0.1:%d/file", web.port));
    assert_int_equal(atomic_load(&web.n_hanging), LANES / 2);
    assert_int_equal(atomic_load(&n_done), 0);
    web_release(&web);
    until(&n_done, HANGING);
    for (int i = 0; i < HANGING; i++)
        brings(hanging[i]);
    atomic_store(&web.released, false);
    ns_fetcher_destroy(f);
}

static void
a_stop_ends_what_is_under_way_and_what_comes(void **state)
{
    struct ns_fetcher *f = fetcher(HERE, 1 << 20, LONG_MS, 2);
    struct ns_fetch fetch[5];
    char hang[64];

    (void)state;
    snprintf(hang, sizeof(hang), "http://127.0.0.1:%d/hang", web.port);
    atomic_store(&n_done, 0);
    for (int i = 0; i < 5; i++) {
        fetch[i] = (struct ns_fetch){ .n = 2, .done = count_done };
        fetch[i].item[0].url = fetch[i].item[1].url = hang;
    }
    for (int i = 0; i < 4; i++)
        ns_fetcher_start(f, &fetch[i]);
    until(&web.n_hanging, 2);
    ns_fetcher_stop(f);
    until(&n_done, 4);
    ns_fetcher_start(f, &fetch[4]);
    assert_int_equal(atomic_load(&n_done), 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(fetch[i].status, NS_STOP);
    ns_fetcher_destroy(f);
    ns_fetcher_stop(NULL);
    ns_fetcher_destroy(NULL);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_public_addresses_are_connected_to),
        cmocka_unit_test(listed_networks_are_allowed_and_no_more),
        cmocka_unit_test(hosts_are_those_of_the_list_at_their_port),
        cmocka_unit_test(lists_that_say_nothing_sure_are_refused),
        cmocka_unit_test(a_picture_comes_whatever_its_headers_say),
        cmocka_unit_test(answers_that_are_no_picture_are_told_apart),
        cmocka_unit_test(there_is_an_end_to_bytes_and_to_time),
        cmocka_unit_test(what_is_not_listed_is_not_even_connected_to),
        cmocka_unit_test(redirects_are_judged_like_the_first),
        cmocka_unit_test(a_name_that_leads_elsewhere_the_second_time_gains_nothing),
        cmocka_unit_test(of_two_addresses_the_allowed_one_is_taken),
        cmocka_unit_test(a_job_has_all_its_pictures_or_the_first_error),
        cmocka_unit_test(a_server_that_hangs_holds_half_of_the_lanes_and_no_more),
        cmocka_unit_test(a_stop_ends_what_is_under_way_and_what_comes),
    };

    return cmocka_run_group_tests(tests, start_servers, stop_servers);
}
