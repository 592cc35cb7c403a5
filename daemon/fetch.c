#include "daemon/fetch.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/version.h"
#include "daemon/fetch_allow.h"

enum {
    CONNECT_MS = 10000, /* of one connection, within the job's time */
    FIRST_BYTES = 64 << 10,
    MAX_URL = 8192,
    MAX_IDLE = 16, /* connections kept for the next picture */
};

/* One URL under way, behind its redirects. */
struct transfer {
    struct ns_fetcher *fetcher;
    struct ns_fetch *fetch; /* NULL: free */
    uint32_t item, n_redirects;
    CURL *easy;             /* owned */
    CURLU *url;             /* owned: where we are */
    char place[100];        /* host and port, for errors */
    bool https, too_large;
    bool denied, opened; /* some address was not, some was allowed */
    char *bytes;            /* owned */
    size_t used, capacity;
};

struct ns_fetcher {
    struct ns_fetch_allow *allow;
    struct ns_fetch_options options; /* but for the texts */
    CURLM *multi;
    pthread_t thread;
    bool started;

    /* Guards what follows; innermost. */
    pthread_mutex_t lock;
    struct ns_fetch *incoming; /* the last first */
    bool stopping;

    /* The thread's own. */
    struct ns_fetch *waiting; /* the first first */
    struct ns_fetch **running; /* [n_lanes], NULL: free */
    struct transfer *transfers; /* [n_lanes][NS_FETCH_URLS] */
};

static int64_t
now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- what libcurl asks ------------------------------------------------ */

static size_t
take_bytes(char *bytes, size_t one, size_t n, void *data)
{
    struct transfer *t = data;
    uint64_t left = t->fetcher->options.max_bytes - t->fetch->n_bytes;
    long answer = 0;

    (void)one; /* always 1 */
    if (n > left) {
        t->too_large = true;
        return 0;
    }
    t->fetch->n_bytes += n; /* of an error's page, too */
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &answer);
    if (answer != 200)
        return n;
    if (n > t->capacity - t->used) {
        size_t capacity = t->capacity ? t->capacity : FIRST_BYTES;
        char *larger;

        while (capacity - t->used < n)
            capacity *= 2; /* bounded by max_bytes */
        larger = realloc(t->bytes, capacity);
        if (!larger)
            return 0;
        t->bytes = larger;
        t->capacity = capacity;
    }
    memcpy(t->bytes + t->used, bytes, n);
    t->used += n;
    return n;
}

/* The address is the one that is connected to: nothing is looked up again
 * behind this. */
static curl_socket_t
open_socket(void *data, curlsocktype purpose, struct curl_sockaddr *address)
{
    struct transfer *t = data;

    if (purpose != CURLSOCKTYPE_IPCXN ||
        !ns_fetch_allow_address(t->fetcher->allow, &address->addr)) {
        t->denied = true;
        return CURL_SOCKET_BAD;
    }
    t->opened = true;
    return socket(address->family, address->socktype | SOCK_CLOEXEC,
                  address->protocol);
}

/* ---- one URL ---------------------------------------------------------- */

static enum ns_status
deny(struct transfer *t, const char *why)
{
    return ns_refuse(&t->fetch->error, "url_denied", NULL, "%s: %s",
                     t->place[0] ? t->place : "the URL", why);
}

/* Judges `text`, before a thing is done for it. */
static enum ns_status
judge(struct transfer *t, const char *text)
{
    char *scheme = NULL, *host = NULL, *port = NULL, *zone = NULL;
    enum ns_status status = NS_OK;
    bool was_https = t->https && t->n_redirects > 0, web;
    unsigned long number;

    t->place[0] = '\0';
    if (strlen(text) > MAX_URL ||
        curl_url_set(t->url, CURLUPART_URL, text, CURLU_DISALLOW_USER) != 0 ||
        curl_url_get(t->url, CURLUPART_SCHEME, &scheme, 0) != 0 ||
        curl_url_get(t->url, CURLUPART_HOST, &host, 0) != 0 ||
        curl_url_get(t->url, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) != 0) {
        status = deny(t, "it is no web address, is too long or holds "
                      "credentials");
        goto out;
    }
    snprintf(t->place, sizeof(t->place), "%.90s:%.6s", host, port);
    number = strtoul(port, NULL, 10);
    t->https = strcmp(scheme, "https") == 0;
    web = t->https || strcmp(scheme, "http") == 0;
    if (!web)
        status = deny(t, "only http and https are fetched");
    else if (curl_url_get(t->url, CURLUPART_ZONEID, &zone, 0) == 0)
        status = deny(t, "an address of one link");
    else if (was_https && !t->https)
        status = deny(t, "a redirect from https to http");
    else if (!ns_fetch_allow_host(t->fetcher->allow, host, (uint32_t)number,
                                  t->https ? 443 : 80))
        status = deny(t, "the host is not one of images.url_hosts");
out:
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_free(zone);
    return status;
}

static bool
set_up(struct transfer *t)
{
    CURL *easy = t->easy;
    int64_t left = t->fetch->until_ms - now_ms();
    long time_ms = left > 1 ? (long)left : 1;

    curl_easy_reset(easy);
#define SET(option, value) (curl_easy_setopt(easy, option, value) == CURLE_OK)
    return SET(CURLOPT_CURLU, t->url) && SET(CURLOPT_PRIVATE, t) &&
           SET(CURLOPT_PROTOCOLS_STR, "http,https") &&
           SET(CURLOPT_FOLLOWLOCATION, 0L) && SET(CURLOPT_PROXY, "") &&
           SET(CURLOPT_NOSIGNAL, 1L) && SET(CURLOPT_NETRC, 0L) &&
           SET(CURLOPT_QUICK_EXIT, 1L) && /* no waiting for a name server */
           SET(CURLOPT_USERAGENT, "nightshift/" NS_VERSION) &&
           SET(CURLOPT_OPENSOCKETFUNCTION, open_socket) &&
           SET(CURLOPT_OPENSOCKETDATA, t) &&
           SET(CURLOPT_WRITEFUNCTION, take_bytes) &&
           SET(CURLOPT_WRITEDATA, t) &&
           SET(CURLOPT_MAXFILESIZE_LARGE,
               (curl_off_t)t->fetcher->options.max_bytes) &&
           SET(CURLOPT_CONNECTTIMEOUT_MS,
               time_ms < CONNECT_MS ? time_ms : (long)CONNECT_MS) &&
           SET(CURLOPT_TIMEOUT_MS, time_ms);
#undef SET
}

/* Sets out for `text`, the first URL or a redirect's. */
static enum ns_status
set_out(struct transfer *t, const char *text)
{
    enum ns_status status = judge(t, text);

    if (status != NS_OK)
        return status;
    t->denied = t->opened = t->too_large = false;
    t->used = 0;
    if (!set_up(t) || curl_multi_add_handle(t->fetcher->multi, t->easy) != 0)
        return ns_fail(&t->fetch->error, NS_RETRY, "out of memory fetching "
                       "from %s", t->place);
    return NS_OK;
}

static enum ns_status
redirect(struct transfer *t)
{
    uint32_t most = t->fetcher->options.max_redirects;
    enum ns_status status;
    char *where = NULL, *copy;

    curl_easy_getinfo(t->easy, CURLINFO_REDIRECT_URL, &where);
    if (!where)
        return ns_refuse(&t->fetch->error, "url_failed", NULL,
                         "%s: a redirect that names no place", t->place);
    if (t->n_redirects++ == most)
        return ns_refuse(&t->fetch->error, "url_failed", NULL,
                         "%s: more than %u redirects "
                         "(images.url_redirects)", t->place, most);
    copy = strdup(where); /* the handle is about to be reset */
    if (!copy)
        return ns_fail(&t->fetch->error, NS_RETRY, "out of memory for a "
                       "redirect");
    status = set_out(t, copy);
    free(copy);
    return status;
}

static enum ns_status
failed(struct transfer *t, CURLcode code)
{
    struct ns_error *err = &t->fetch->error;

    if (t->too_large || code == CURLE_FILESIZE_EXCEEDED)
        return ns_refuse(err, "image_limit", NULL, "%s: the pictures of the "
                         "job have more than %llu bytes (images.url_bytes)",
                         t->place,
                         (unsigned long long)t->fetcher->options.max_bytes);
    if (t->denied && !t->opened)
        return deny(t, "its address is private, and not in "
                       "images.url_networks");
    if (code == CURLE_OPERATION_TIMEDOUT)
        ns_fail(err, NS_RETRY, "%s: no whole picture within %llu ms "
                "(images.url_time)", t->place,
                (unsigned long long)t->fetcher->options.time_ms);
    else
        ns_fail(err, NS_RETRY, "%s: %s", t->place, curl_easy_strerror(code));
    err->code = "url_failed";
    if (code == CURLE_PEER_FAILED_VERIFICATION)
        err->status = NS_REJECT;
    return err->status;
}

/* What a transfer that has ended means; NS_OK also where another is under way
 * in its place, which `*more` says. */
static enum ns_status
judge_answer(struct transfer *t, CURLcode code, bool *more)
{
    struct ns_fetch *fetch = t->fetch;
    enum ns_status status;
    long answer = 0;

    if (code != CURLE_OK)
        return failed(t, code);
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &answer);
    if (answer / 100 == 3 && answer != 304) {
        status = redirect(t);
        *more = status == NS_OK;
        return status;
    }
    if (answer == 200) {
        fetch->item[t->item].bytes = t->bytes;
        fetch->item[t->item].length = t->used;
        t->bytes = NULL;
        t->used = t->capacity = 0;
        return NS_OK;
    }
    if (answer == 408 || answer == 425 || answer == 429 || answer >= 500) {
        ns_fail(&fetch->error, NS_RETRY, "%s answered %ld", t->place, answer);
        fetch->error.code = "url_failed";
        return NS_RETRY;
    }
    return ns_refuse(&fetch->error, "url_failed", NULL, "%s answered %ld",
                     t->place, answer);
}

/* ---- one job ---------------------------------------------------------- */

static struct transfer *
of_lane(struct ns_fetcher *fetcher, uint32_t lane)
{
    return fetcher->transfers + (size_t)lane * NS_FETCH_URLS;
}

static void
let_go(struct transfer *t)
{
    if (t->easy) {
        curl_multi_remove_handle(t->fetcher->multi, t->easy);
        curl_easy_cleanup(t->easy);
    }
    curl_url_cleanup(t->url);
    free(t->bytes);
    *t = (struct transfer){ 0 };
}

static void
finish(struct ns_fetch *fetch, enum ns_status status)
{
    for (uint32_t i = 0; status != NS_OK && i < fetch->n; i++) {
        free(fetch->item[i].bytes);
        fetch->item[i].bytes = NULL;
        fetch->item[i].length = 0;
    }
    fetch->status = status;
    fetch->done(fetch); /* it is its owner's from here */
}

static void
end_lane(struct ns_fetcher *fetcher, uint32_t lane, enum ns_status status)
{
    struct ns_fetch *fetch = fetcher->running[lane];

    for (uint32_t i = 0; i < NS_FETCH_URLS; i++)
        let_go(&of_lane(fetcher, lane)[i]);
    fetcher->running[lane] = NULL;
    finish(fetch, status);
}

static void
begin_lane(struct ns_fetcher *fetcher, uint32_t lane, struct ns_fetch *fetch)
{
    struct transfer *transfer = of_lane(fetcher, lane);

    fetcher->running[lane] = fetch;
    fetch->until_ms = now_ms() + (int64_t)fetcher->options.time_ms;
    for (uint32_t i = 0; i < fetch->n; i++) {
        struct transfer *t = &transfer[i];
        enum ns_status status;

        *t = (struct transfer){ .fetcher = fetcher, .fetch = fetch,
                                .item = i };
        t->easy = curl_easy_init();
        t->url = curl_url();
        if (!t->easy || !t->url)
            status = ns_fail(&fetch->error, NS_RETRY,
                             "out of memory fetching a picture");
        else
            status = set_out(t, fetch->item[i].url);
        if (status != NS_OK) {
            fetch->failed = i;
            end_lane(fetcher, lane, status);
            return;
        }
    }
}

static void
collect(struct ns_fetcher *fetcher)
{
    struct CURLMsg *message;
    int n_left;

    while ((message = curl_multi_info_read(fetcher->multi, &n_left))) {
        CURL *easy = message->easy_handle;
        CURLcode code = message->data.result;
        struct transfer *t = NULL;
        enum ns_status status;
        uint32_t lane, n_open = 0;
        bool more = false;

        if (message->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(easy, CURLINFO_PRIVATE, &t);
        lane = (uint32_t)((t - fetcher->transfers) / NS_FETCH_URLS);
        curl_multi_remove_handle(fetcher->multi, easy);
        status = judge_answer(t, code, &more);
        if (more)
            continue;
        if (status != NS_OK) {
            t->fetch->failed = t->item;
            end_lane(fetcher, lane, status);
            continue;
        }
        let_go(t);
        for (uint32_t i = 0; i < NS_FETCH_URLS; i++)
            n_open += of_lane(fetcher, lane)[i].fetch != NULL;
        if (n_open == 0)
            end_lane(fetcher, lane, NS_OK);
    }
}

/* ---- the thread ------------------------------------------------------- */

static uint64_t
host_of(const char *text)
{
    CURLU *url = curl_url();
    char *host = NULL;
    uint64_t hash = 0;

    if (url && curl_url_set(url, CURLUPART_URL, text, 0) == 0 &&
        curl_url_get(url, CURLUPART_HOST, &host, 0) == 0)
        hash = XXH3_64bits(host, strlen(host));
    curl_free(host);
    curl_url_cleanup(url);
    return hash;
}

/* What came since, behind what waits; whether to stop. */
static bool
take_in(struct ns_fetcher *fetcher)
{
    struct ns_fetch *incoming, *turned = NULL, **end = &fetcher->waiting;
    bool stopping;

    pthread_mutex_lock(&fetcher->lock);
    incoming = fetcher->incoming;
    fetcher->incoming = NULL;
    stopping = fetcher->stopping;
    pthread_mutex_unlock(&fetcher->lock);
    while (incoming) {
        struct ns_fetch *next = incoming->next;

        incoming->next = turned;
        turned = incoming;
        turned->host = host_of(turned->item[0].url);
        incoming = next;
    }
    while (*end)
        end = &(*end)->next;
    *end = turned;
    return stopping;
}

static bool
host_has_room(const struct ns_fetcher *fetcher, uint64_t host)
{
    uint32_t n = 0, most = (fetcher->options.n_lanes + 1) / 2;

    for (uint32_t i = 0; i < fetcher->options.n_lanes; i++)
        n += fetcher->running[i] && fetcher->running[i]->host == host;
    return n < most;
}

/* The first that waits for a host that has room. */
static struct ns_fetch *
next_fetch(struct ns_fetcher *fetcher)
{
    struct ns_fetch **at = &fetcher->waiting, *fetch;

    while ((fetch = *at) != NULL && !host_has_room(fetcher, fetch->host))
        at = &fetch->next;
    if (fetch)
        *at = fetch->next;
    return fetch;
}

static void
fill_lanes(struct ns_fetcher *fetcher)
{
    struct ns_fetch *fetch;

    for (uint32_t lane = 0; lane < fetcher->options.n_lanes; lane++)
        while (!fetcher->running[lane] &&
               (fetch = next_fetch(fetcher)) != NULL)
            begin_lane(fetcher, lane, fetch); /* may end at once */
}

static void
end_all(struct ns_fetcher *fetcher)
{
    struct ns_fetch *fetch;

    for (uint32_t lane = 0; lane < fetcher->options.n_lanes; lane++) {
        if (!fetcher->running[lane])
            continue;
        ns_fail(&fetcher->running[lane]->error, NS_STOP, "stopped");
        end_lane(fetcher, lane, NS_STOP);
    }
    while ((fetch = fetcher->waiting) != NULL) {
        fetcher->waiting = fetch->next;
        ns_fail(&fetch->error, NS_STOP, "stopped");
        finish(fetch, NS_STOP);
    }
}

static void *
fetcher_thread(void *data)
{
    struct ns_fetcher *fetcher = data;
    int n_running;

    while (!take_in(fetcher)) {
        fill_lanes(fetcher);
        curl_multi_perform(fetcher->multi, &n_running);
        collect(fetcher);
        fill_lanes(fetcher);
        curl_multi_poll(fetcher->multi, NULL, 0, 1000, NULL);
    }
    end_all(fetcher);
    return NULL;
}

/* ---- outside ---------------------------------------------------------- */

void
ns_fetcher_start(struct ns_fetcher *fetcher, struct ns_fetch *fetch)
{
    bool stopping;

    fetch->status = NS_OK;
    fetch->n_bytes = 0;
    pthread_mutex_lock(&fetcher->lock);
    stopping = fetcher->stopping;
    if (!stopping) {
        fetch->next = fetcher->incoming;
        fetcher->incoming = fetch;
    }
    pthread_mutex_unlock(&fetcher->lock);
    if (stopping) { /* the thread may have looked for the last time */
        ns_fail(&fetch->error, NS_STOP, "stopped");
        finish(fetch, NS_STOP);
        return;
    }
    curl_multi_wakeup(fetcher->multi);
}

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
};

static void
wake_waiter(struct ns_fetch *fetch)
{
    struct waiter *waiter = fetch->data;

    pthread_mutex_lock(&waiter->lock);
    waiter->done = true;
    pthread_cond_signal(&waiter->ended);
    pthread_mutex_unlock(&waiter->lock);
}

void
ns_fetcher_wait(struct ns_fetcher *fetcher, struct ns_fetch *fetch)
{
    struct waiter waiter = { .done = false };

    pthread_mutex_init(&waiter.lock, NULL);
    pthread_cond_init(&waiter.ended, NULL);
    fetch->done = wake_waiter;
    /* It lasts as long as the fetch does. */
    fetch->data = &waiter; // cppcheck-suppress autoVariables
    ns_fetcher_start(fetcher, fetch);
    pthread_mutex_lock(&waiter.lock);
    while (!waiter.done)
        pthread_cond_wait(&waiter.ended, &waiter.lock);
    pthread_mutex_unlock(&waiter.lock);
    pthread_cond_destroy(&waiter.ended);
    pthread_mutex_destroy(&waiter.lock);
}

void
ns_fetcher_stop(struct ns_fetcher *fetcher)
{
    if (!fetcher)
        return;
    pthread_mutex_lock(&fetcher->lock);
    fetcher->stopping = true;
    pthread_mutex_unlock(&fetcher->lock);
    curl_multi_wakeup(fetcher->multi);
}

enum ns_status
ns_fetcher_create(const struct ns_fetch_options *options,
                  struct ns_fetcher **out, struct ns_error *err)
{
    struct ns_fetcher *fetcher = calloc(1, sizeof(*fetcher));
    enum ns_status status;
    int rc;

    if (!fetcher)
        return ns_fail(err, NS_FATAL, "out of memory for the fetcher");
    pthread_mutex_init(&fetcher->lock, NULL);
    fetcher->options = *options;
    status = ns_fetch_allow_create(options->hosts, options->networks,
                                   &fetcher->allow, err);
    if (status != NS_OK)
        goto out;
    fetcher->running = calloc(options->n_lanes, sizeof(*fetcher->running));
    fetcher->transfers = calloc((size_t)options->n_lanes * NS_FETCH_URLS,
                                sizeof(*fetcher->transfers));
    if (curl_global_init(CURL_GLOBAL_DEFAULT) == 0)
        fetcher->multi = curl_multi_init();
    if (!fetcher->running || !fetcher->transfers || !fetcher->multi) {
        status = ns_fail(err, NS_FATAL, "out of memory for the fetcher");
        goto out;
    }
    curl_multi_setopt(fetcher->multi, CURLMOPT_MAXCONNECTS, (long)MAX_IDLE);
    rc = pthread_create(&fetcher->thread, NULL, fetcher_thread, fetcher);
    if (rc != 0) {
        status = ns_fail(err, NS_FATAL, "start a thread: %s", strerror(rc));
        goto out;
    }
    fetcher->started = true;
    *out = fetcher;
    fetcher = NULL;
out:
    ns_fetcher_destroy(fetcher);
    return status;
}

void
ns_fetcher_destroy(struct ns_fetcher *fetcher)
{
    if (!fetcher)
        return;
    if (fetcher->started) {
        ns_fetcher_stop(fetcher);
        pthread_join(fetcher->thread, NULL);
    }
    if (fetcher->multi)
        curl_multi_cleanup(fetcher->multi);
    free(fetcher->transfers);
    free(fetcher->running);
    ns_fetch_allow_destroy(fetcher->allow);
    pthread_mutex_destroy(&fetcher->lock);
    free(fetcher);
}

void
ns_fetch_fini(struct ns_fetch *fetch)
{
    for (uint32_t i = 0; i < fetch->n; i++)
        free(fetch->item[i].bytes);
    *fetch = (struct ns_fetch){ 0 };
}
