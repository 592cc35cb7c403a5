#include "daemon/fetch_allow.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_ENTRIES = 256, MAX_ENTRY = 255 };

struct network {
    int family;
    uint32_t bits;
    uint8_t bytes[16];
};

struct host {
    const char *name; /* borrowed from `text`; "*": any */
    bool below;       /* "*.name": with the dot in front */
    uint32_t port;    /* 0: the scheme's own */
};

struct ns_fetch_allow {
    char *text; /* owned: all names */
    uint32_t n_hosts, n_networks;
    struct host host[MAX_ENTRIES];
    struct network network[MAX_ENTRIES];
};

/* ---- addresses -------------------------------------------------------- */

#define V4(a, b, c, d, bits) { AF_INET, bits, { a, b, c, d } }

/* Special-purpose ranges of IANA's registry, and multicast. */
static const struct network refused_v4[] = {
    V4(0, 0, 0, 0, 8),       /* this network */
    V4(10, 0, 0, 0, 8),      /* private */
    V4(100, 64, 0, 0, 10),   /* carrier's translation */
    V4(127, 0, 0, 0, 8),     /* loopback */
    V4(169, 254, 0, 0, 16),  /* link-local; clouds' metadata */
    V4(172, 16, 0, 0, 12),   /* private */
    V4(192, 0, 0, 0, 24),    /* protocol assignments */
    V4(192, 0, 2, 0, 24),    /* documentation */
    V4(192, 88, 99, 0, 24),  /* 6to4 relays */
    V4(192, 168, 0, 0, 16),  /* private */
    V4(198, 18, 0, 0, 15),   /* benchmarks */
    V4(198, 51, 100, 0, 24), /* documentation */
    V4(203, 0, 113, 0, 24),  /* documentation */
    V4(224, 0, 0, 0, 3),     /* multicast, reserved, broadcast */
};

/* Only global unicast is public: loopback, link-local, unique local, mapped
 * and translated IPv4 lie outside of it. */
static const struct network global_v6 = { AF_INET6, 3, { 0x20 } };
static const struct network refused_v6[] = {
    { AF_INET6, 23, { 0x20, 0x01, 0x00 } },       /* assignments; Teredo */
    { AF_INET6, 32, { 0x20, 0x01, 0x0d, 0xb8 } }, /* documentation */
    { AF_INET6, 16, { 0x20, 0x02 } },             /* 6to4: any IPv4 inside */
    { AF_INET6, 20, { 0x3f, 0xff, 0x00 } },       /* documentation */
};

static bool
within(const struct network *network, int family, const uint8_t *bytes)
{
    uint32_t whole = network->bits / 8, rest = network->bits % 8;

    return network->family == family &&
           memcmp(network->bytes, bytes, whole) == 0 &&
           (rest == 0 ||
            ((network->bytes[whole] ^ bytes[whole]) >> (8 - rest)) == 0);
}

static bool
within_any(const struct network *network, size_t n, int family,
           const uint8_t *bytes)
{
    for (size_t i = 0; i < n; i++)
        if (within(&network[i], family, bytes))
            return true;
    return false;
}

bool
ns_fetch_allow_address(const struct ns_fetch_allow *allow,
                       const struct sockaddr *address)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    uint8_t bytes[16] = { 0 };
    bool public_;

    switch (address->sa_family) {
    case AF_INET:
        memcpy(&v4, address, sizeof(v4));
        memcpy(bytes, &v4.sin_addr, 4);
        public_ = !within_any(refused_v4,
                              sizeof(refused_v4) / sizeof(refused_v4[0]),
                              AF_INET, bytes);
        break;
    case AF_INET6:
        memcpy(&v6, address, sizeof(v6));
        memcpy(bytes, &v6.sin6_addr, 16);
        public_ = within(&global_v6, AF_INET6, bytes) &&
                  !within_any(refused_v6,
                              sizeof(refused_v6) / sizeof(refused_v6[0]),
                              AF_INET6, bytes);
        break;
    default:
        return false;
    }
    return public_ || within_any(allow->network, allow->n_networks,
                                 address->sa_family, bytes);
}

static bool
parse_network(const char *text, struct network *out)
{
    char address[MAX_ENTRY + 1], *slash, *end;
    unsigned long bits, most;

    snprintf(address, sizeof(address), "%s", text);
    slash = strchr(address, '/');
    if (slash)
        *slash = '\0';
    out->family = strchr(address, ':') ? AF_INET6 : AF_INET;
    most = out->family == AF_INET ? 32 : 128;
    if (inet_pton(out->family, address, out->bytes) != 1)
        return false;
    if (!slash) {
        out->bits = (uint32_t)most;
        return true;
    }
    bits = strtoul(slash + 1, &end, 10);
    out->bits = (uint32_t)bits;
    return slash[1] >= '0' && slash[1] <= '9' && *end == '\0' && bits <= most;
}

/* ---- hosts ------------------------------------------------------------ */

static bool
good_name(const char *name)
{
    size_t n = strlen(name);

    if (n > 2 && name[0] == '[' && name[n - 1] == ']')
        return strspn(name, "[]0123456789abcdefABCDEF:.") == n;
    return n > 0 && name[0] != '.' && name[n - 1] != '.' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                        "0123456789-._") == n;
}

static bool
parse_host(char *text, struct host *out)
{
    char *colon = strrchr(text, ':'), *end;
    bool below = strncmp(text, "*.", 2) == 0;

    *out = (struct host){ .name = text, .below = below };
    if (colon && !strchr(colon, ']')) {
        unsigned long port = strtoul(colon + 1, &end, 10);

        if (colon[1] < '0' || colon[1] > '9' || *end || port == 0 ||
            port > 65535)
            return false;
        out->port = (uint32_t)port;
        *colon = '\0';
    }
    if (strcmp(text, "*") == 0)
        return true;
    if (below)
        out->name = text + 1;
    return good_name(below ? text + 2 : text);
}

bool
ns_fetch_allow_host(const struct ns_fetch_allow *allow, const char *host,
                    uint32_t port, uint32_t port_of_scheme)
{
    size_t n = strlen(host);

    if (n > 0 && host[n - 1] == '.') /* a name from the root is that name */
        n--;
    for (uint32_t i = 0; i < allow->n_hosts; i++) {
        const struct host *entry = &allow->host[i];
        size_t length = strlen(entry->name);
        bool same;

        if (port != (entry->port ? entry->port : port_of_scheme))
            continue;
        if (strcmp(entry->name, "*") == 0)
            same = true;
        else if (entry->below)
            same = n > length &&
                   strncasecmp(host + n - length, entry->name, length) == 0;
        else
            same = n == length && strncasecmp(host, entry->name, n) == 0;
        if (same)
            return true;
    }
    return false;
}

/* ---- the lists -------------------------------------------------------- */

static enum ns_status
refuse_entry(const char *option, const char *entry, const char *why,
             struct ns_error *err)
{
    return ns_fail(err, NS_REJECT, "%s: '%.100s' %s", option, entry, why);
}

enum ns_status
ns_fetch_allow_create(const char *hosts, const char *networks,
                      struct ns_fetch_allow **out, struct ns_error *err)
{
    struct ns_fetch_allow *allow = calloc(1, sizeof(*allow));
    size_t n = strlen(hosts) + 1, m = networks ? strlen(networks) + 1 : 1;
    enum ns_status status = NS_OK;
    char *rest, *copy;

    if (allow)
        allow->text = malloc(n + m);
    if (!allow || !allow->text) {
        ns_fetch_allow_destroy(allow);
        return ns_fail(err, NS_FATAL, "out of memory for images.url_hosts");
    }
    memcpy(allow->text, hosts, n);
    copy = memcpy(allow->text + n, networks ? networks : "", m);
    for (char *at = strtok_r(allow->text, ", \t", &rest);
         at && status == NS_OK; at = strtok_r(NULL, ", \t", &rest)) {
        if (allow->n_hosts == MAX_ENTRIES || strlen(at) > MAX_ENTRY)
            status = refuse_entry("images.url_hosts", at, "is one too many, "
                                  "or too long", err);
        else if (!parse_host(at, &allow->host[allow->n_hosts++]))
            status = refuse_entry("images.url_hosts", at, "is no host: name, "
                                  "name:port, *.name or *", err);
    }
    for (char *at = strtok_r(copy, ", \t", &rest); at && status == NS_OK;
         at = strtok_r(NULL, ", \t", &rest)) {
        if (allow->n_networks == MAX_ENTRIES || strlen(at) > MAX_ENTRY)
            status = refuse_entry("images.url_networks", at, "is one too "
                                  "many, or too long", err);
        else if (!parse_network(at, &allow->network[allow->n_networks++]))
            status = refuse_entry("images.url_networks", at, "is no network: "
                                  "address or address/bits", err);
    }
    if (status == NS_OK && allow->n_hosts == 0)
        status = ns_fail(err, NS_REJECT, "images.url_hosts: no host");
    if (status == NS_OK)
        *out = allow;
    else
        ns_fetch_allow_destroy(allow);
    return status;
}

void
ns_fetch_allow_destroy(struct ns_fetch_allow *allow)
{
    if (!allow)
        return;
    free(allow->text);
    free(allow);
}
