#include "engine/kvcache.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"

enum { FULL = 0, SLIDING = 1, N_POOLS = 2 };
#define NONE UINT32_MAX

struct node {
    struct node *parent;  /* NULL: the page of positions 0..63 */
    struct node *chained; /* same bucket */
    struct node *older[N_POOLS], *newer[N_POOLS]; /* in use order */
    struct ns_kv_hold *builder; /* the running hold that computes it */
    uint64_t hash;
    uint32_t page[N_POOLS]; /* NONE; the tree holds one count of each */
    uint32_t users;         /* holds whose prompt runs through it */
    uint32_t keep;          /* waiting forks that need its sliding page */
    uint32_t n_children, n_ready_children;
    bool ready; /* its full page holds final rows */
    int32_t token[NS_PAGE];
};

struct page {
    uint32_t refs;
    struct node *node; /* the tree's, or NULL */
};

struct pool {
    struct page *pages;
    uint32_t n_pages;
    uint32_t *free; /* stack */
    uint32_t n_free;
    uint32_t n_idle;    /* in the tree, held by no sequence */
    uint32_t n_pinned;  /* in the tree and held by some sequence */
    uint32_t n_claimed; /* private or promised, over all holds */
    uint8_t *memory;   /* device */
    int32_t *table;    /* device */
    int32_t *mirror;   /* the same in host memory */
    struct node *oldest, *newest;
};

struct ns_kv_hold {
    struct node **path; /* nodes of its prompt's whole pages */
    uint32_t n_path;
    uint32_t *cut; /* [n_path + 1]: where a fork behind i pages is cut down to,
                    * so that no picture is shared in part */
    uint32_t chunk; /* most positions that one pass adds: with a picture, all
                     * of it */
    uint32_t slot; /* NONE: not admitted */
    uint32_t keep_from, keep_to; /* nodes it asked to keep */
    uint32_t settled;            /* positions */
    uint32_t first[N_POOLS], end[N_POOLS]; /* mapped pages: first..end-1 */
    uint32_t n_private[N_POOLS], cap[N_POOLS], claimed[N_POOLS];
};

struct ns_kvcache {
    struct ns_backend *be;
    struct ns_kvcache_options options;
    struct pool pool[N_POOLS];
    struct ns_kv_layer layer[NS_MAX_LAYERS];
    uint32_t n_layers, window, stride;
    uint32_t *slots; /* stack of free ones */
    uint32_t n_slots_free;
    struct node **buckets;
    uint32_t n_buckets;
    uint64_t evicted;
};

static uint64_t
layer_page_bytes(const struct ns_layer_config *layer, enum ns_dtype type,
                 uint32_t n_rotated_full, bool plain)
{
    uint64_t width = layer->full && !plain
                         ? layer->head_dim + 2 * (uint64_t)n_rotated_full
                         : 2 * (uint64_t)layer->head_dim;

    return width * NS_PAGE * layer->n_kv_heads * ns_dtype_bytes(type);
}

uint64_t
ns_kvcache_full_page_bytes(const struct ns_config *config,
                           enum ns_dtype type, uint32_t n_rotated_full,
                           bool plain)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < config->n_layers; i++)
        if (config->layer[i].full)
            bytes += layer_page_bytes(&config->layer[i], type, n_rotated_full,
                                      plain);
    return bytes;
}

uint64_t
ns_kvcache_sliding_page_bytes(const struct ns_config *config,
                              enum ns_dtype type)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < config->n_layers; i++)
        if (!config->layer[i].full)
            bytes += layer_page_bytes(&config->layer[i], type, 0, true);
    return bytes;
}

static enum ns_status
create_pool(struct ns_kvcache *kv, struct pool *pool, uint32_t n_pages,
            uint64_t page_bytes, const char *what, struct ns_error *err)
{
    enum ns_status status;
    size_t bytes;
    void *memory;

    pool->n_pages = n_pages;
    pool->pages = calloc(n_pages, sizeof(*pool->pages));
    pool->free = calloc(n_pages, sizeof(*pool->free));
    pool->mirror = calloc((size_t)kv->options.n_slots * kv->stride,
                          sizeof(*pool->mirror));
    if (!pool->pages || !pool->free || !pool->mirror)
        return ns_fail(err, NS_FATAL, "out of memory for %u %s", n_pages,
                       what);
    for (uint32_t i = 0; i < n_pages; i++)
        pool->free[pool->n_free++] = n_pages - 1 - i;
    if (!ns_size_mul(n_pages, page_bytes, &bytes))
        return ns_fail(err, NS_REJECT, "%u %s are too many", n_pages, what);
    if (bytes == 0)
        bytes = 64; /* a model without layers of this kind */
    status = kv->be->ops->alloc(kv->be, bytes, what, &memory, err);
    if (status != NS_OK)
        return status;
    pool->memory = memory;
    status = kv->be->ops->alloc(
        kv->be,
        (size_t)kv->options.n_slots * kv->stride * sizeof(*pool->table),
        "page tables", &memory, err);
    if (status != NS_OK)
        return status;
    pool->table = memory;
    return NS_OK;
}

enum ns_status
ns_kvcache_create(const struct ns_config *config, uint32_t n_rotated_full,
                  struct ns_backend *be,
                  const struct ns_kvcache_options *options,
                  struct ns_kvcache **out, struct ns_error *err)
{
    struct ns_kvcache *kv = calloc(1, sizeof(*kv));
    size_t offset[N_POOLS] = { 0, 0 };
    enum ns_status status;

    if (!kv)
        return ns_fail(err, NS_FATAL, "out of memory creating the KV cache");
    kv->be = be;
    kv->options = *options;
    kv->window = config->sliding_window;
    kv->n_layers = config->n_layers;
    kv->stride = (options->max_positions + NS_PAGE - 1) / NS_PAGE + 1;
    status = create_pool(
        kv, &kv->pool[FULL], options->full_pages,
        ns_kvcache_full_page_bytes(config, be->kv_type, n_rotated_full,
                                   options->plain),
        "pages of full layers", err);
    if (status == NS_OK)
        status = create_pool(kv, &kv->pool[SLIDING], options->sliding_pages,
                             ns_kvcache_sliding_page_bytes(config,
                                                           be->kv_type),
                             "pages of sliding layers", err);
    if (status != NS_OK)
        goto out;

    kv->n_buckets = 1024;
    while (kv->n_buckets < 2 * options->full_pages &&
           kv->n_buckets < 1u << 24)
        kv->n_buckets *= 2;
    kv->buckets = calloc(kv->n_buckets, sizeof(struct node *));
    kv->slots = calloc(options->n_slots, sizeof(*kv->slots));
    if (!kv->buckets || !kv->slots) {
        status = ns_fail(err, NS_FATAL, "out of memory creating the KV cache");
        goto out;
    }
    for (uint32_t i = 0; i < options->n_slots; i++)
        kv->slots[kv->n_slots_free++] = options->n_slots - 1 - i;

    for (uint32_t i = 0; i < config->n_layers; i++) {
        const struct ns_layer_config *from = &config->layer[i];
        struct ns_kv_layer *layer = &kv->layer[i];
        int which = from->full ? FULL : SLIDING;
        size_t bytes = layer_page_bytes(from, be->kv_type, n_rotated_full,
                                        options->plain || !from->full);

        layer->base = kv->pool[which].memory + offset[which];
        layer->dtype = be->kv_type;
        layer->page_bytes = bytes;
        layer->n_kv_heads = from->n_kv_heads;
        layer->head_dim = from->head_dim;
        layer->n_rotated = from->full ? n_rotated_full : from->head_dim / 2;
        layer->compact = from->full && !options->plain;
        offset[which] += bytes * kv->pool[which].n_pages;
    }
    *out = kv;
    kv = NULL;
out:
    ns_kvcache_destroy(kv);
    return status;
}

void
ns_kvcache_destroy(struct ns_kvcache *kv)
{
    if (!kv)
        return;
    for (uint32_t i = 0; kv->buckets && i < kv->n_buckets; i++)
        while (kv->buckets[i]) {
            struct node *node = kv->buckets[i];

            kv->buckets[i] = node->chained;
            free(node);
        }
    for (int i = 0; i < N_POOLS; i++) {
        kv->be->ops->release(kv->be, kv->pool[i].memory);
        kv->be->ops->release(kv->be, kv->pool[i].table);
        free(kv->pool[i].pages);
        free(kv->pool[i].free);
        free(kv->pool[i].mirror);
    }
    free(kv->buckets);
    free(kv->slots);
    free(kv);
}

struct ns_kv_layer
ns_kvcache_layer(const struct ns_kvcache *kv, uint32_t layer)
{
    return kv->layer[layer];
}

const int32_t *
ns_kvcache_table(const struct ns_kvcache *kv, bool full)
{
    return kv->pool[full ? FULL : SLIDING].table;
}

uint32_t
ns_kvcache_table_stride(const struct ns_kvcache *kv)
{
    return kv->stride;
}

/* ---- pages ---------------------------------------------------------- */

static void
unlink_use(struct pool *pool, struct node *node, int which)
{
    if (node->older[which])
        node->older[which]->newer[which] = node->newer[which];
    else if (pool->oldest == node)
        pool->oldest = node->newer[which];
    if (node->newer[which])
        node->newer[which]->older[which] = node->older[which];
    else if (pool->newest == node)
        pool->newest = node->older[which];
    node->older[which] = node->newer[which] = NULL;
}

/* Moves the node to the recent end of the pool's order of use. */
static void
touch(struct ns_kvcache *kv, struct node *node, int which)
{
    struct pool *pool = &kv->pool[which];

    unlink_use(pool, node, which);
    node->older[which] = pool->newest;
    if (pool->newest)
        pool->newest->newer[which] = node;
    else
        pool->oldest = node;
    pool->newest = node;
}

static void
ref(struct pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];

    if (p->node && p->refs == 1) {
        pool->n_idle--;
        pool->n_pinned++;
    }
    p->refs++;
}

static void
unref(struct pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];

    p->refs--;
    if (p->refs == 0)
        pool->free[pool->n_free++] = page;
    else if (p->node && p->refs == 1) {
        pool->n_pinned--;
        pool->n_idle++;
    }
}

/* Only idle pages leave: a hold that maps a node's sliding page also maps its
 * full page, and keeps that until release. */
static void
leave_tree(struct ns_kvcache *kv, struct node *node, int which)
{
    struct pool *pool = &kv->pool[which];
    uint32_t page = node->page[which];

    if (page == NONE)
        return;
    pool->n_idle--;
    pool->pages[page].node = NULL;
    node->page[which] = NONE;
    unlink_use(pool, node, which);
    unref(pool, page);
}

static void
join_tree(struct ns_kvcache *kv, struct node *node, int which, uint32_t page)
{
    struct pool *pool = &kv->pool[which];

    node->page[which] = page;
    pool->pages[page].node = node;
    pool->pages[page].refs++; /* from one to two: its builder holds it too */
    pool->n_pinned++;
    touch(kv, node, which);
}

static struct node **
bucket(struct ns_kvcache *kv, uint64_t hash)
{
    return &kv->buckets[hash & (kv->n_buckets - 1)];
}

/* Removes the node, and what above it only it kept, when nothing needs it. */
static void
prune(struct ns_kvcache *kv, struct node *node)
{
    while (node && node->users == 0 && !node->ready && node->n_children == 0) {
        struct node *parent = node->parent;
        struct node **link = bucket(kv, node->hash);

        while (*link != node)
            link = &(*link)->chained;
        *link = node->chained;
        leave_tree(kv, node, SLIDING);
        if (parent)
            parent->n_children--;
        free(node);
        node = parent;
    }
}

static void
unready(struct ns_kvcache *kv, struct node *node)
{
    leave_tree(kv, node, FULL);
    leave_tree(kv, node, SLIDING);
    node->ready = false;
    if (node->parent)
        node->parent->n_ready_children--;
    prune(kv, node);
}

/* Frees one idle page, the least recently used that may go. What someone has
 * declared or asked to keep goes only when there is nothing else. */
static bool
evict(struct ns_kvcache *kv, int which)
{
    struct pool *pool = &kv->pool[which];

    if (pool->n_idle == 0)
        return false;
    for (int round = 0; round < 2; round++)
        for (struct node *node = pool->oldest; node;
             node = node->newer[which]) {
            if (pool->pages[node->page[which]].refs != 1)
                continue;
            if (which == FULL) {
                if (node->n_ready_children || (round == 0 && node->users))
                    continue;
                unready(kv, node);
            } else {
                if (round == 0 && node->keep)
                    continue;
                leave_tree(kv, node, SLIDING);
            }
            kv->evicted++;
            return true;
        }
    return false;
}

static uint32_t
take_page(struct ns_kvcache *kv, int which)
{
    struct pool *pool = &kv->pool[which];
    uint32_t page;

    if (pool->n_free == 0 && !evict(kv, which))
        return NONE;
    page = pool->free[--pool->n_free];
    pool->pages[page].refs = 1;
    pool->pages[page].node = NULL;
    return page;
}

static void
map_page(struct ns_kvcache *kv, const struct ns_kv_hold *hold, int which,
         uint32_t index, int32_t page)
{
    struct pool *pool = &kv->pool[which];
    size_t at = (size_t)hold->slot * kv->stride + index;

    pool->mirror[at] = page;
    kv->be->ops->upload(kv->be, pool->table + at, &pool->mirror[at],
                        sizeof(int32_t));
}

static uint32_t
mapped(const struct ns_kvcache *kv, const struct ns_kv_hold *hold, int which,
       uint32_t index)
{
    return (uint32_t)
        kv->pool[which].mirror[(size_t)hold->slot * kv->stride + index];
}

/* A hold claims what it has for itself and what it was promised beyond what
 * it has mapped. */
static void
reclaim(struct ns_kvcache *kv, struct ns_kv_hold *hold)
{
    for (int i = 0; i < N_POOLS; i++) {
        uint32_t has = hold->end[i] - hold->first[i];
        uint32_t claim = hold->n_private[i];

        if (hold->slot == NONE)
            claim = 0;
        else if (hold->cap[i] > has)
            claim += hold->cap[i] - has;
        kv->pool[i].n_claimed += claim - hold->claimed[i];
        hold->claimed[i] = claim;
    }
}

/* ---- holds ---------------------------------------------------------- */

static uint64_t
page_hash(const struct node *parent, const int32_t *ids)
{
    uint64_t h = parent ? parent->hash : 0x6e69676874u;

    for (int i = 0; i < NS_PAGE; i++) {
        h = (h ^ (uint32_t)ids[i]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

static struct node *
find_node(struct ns_kvcache *kv, struct node *parent, uint64_t hash,
          const int32_t *ids)
{
    struct node *node = *bucket(kv, hash);

    while (node && !(node->hash == hash && node->parent == parent &&
                     memcmp(node->token, ids, sizeof(node->token)) == 0))
        node = node->chained;
    return node;
}

static struct node *
add_node(struct ns_kvcache *kv, struct node *parent, uint64_t hash,
         const int32_t *ids)
{
    struct node *node = calloc(1, sizeof(*node));

    if (!node)
        return NULL;
    node->parent = parent;
    node->hash = hash;
    node->page[FULL] = node->page[SLIDING] = NONE;
    memcpy(node->token, ids, sizeof(node->token));
    node->chained = *bucket(kv, hash);
    *bucket(kv, hash) = node;
    if (parent)
        parent->n_children++;
    return node;
}

/* First page that a query at position `at` needs on sliding layers. */
static uint32_t
window_page(const struct ns_kvcache *kv, uint32_t at)
{
    return at + 1 > kv->window ? (at + 1 - kv->window) / NS_PAGE : 0;
}

static void
find_cuts(struct ns_kv_hold *hold, uint32_t n_pages,
          const struct ns_whole *whole, uint32_t n_whole)
{
    uint32_t w = 0;

    for (uint32_t i = 0; i <= n_pages; i++) {
        uint32_t border = i * NS_PAGE;

        while (w < n_whole && whole[w].end <= border)
            w++;
        hold->cut[i] = w < n_whole && whole[w].first < border
                           ? hold->cut[whole[w].first / NS_PAGE]
                           : i;
    }
}

/* What a sequence that forks off behind n pages will look back to stays. */
static void
keep_in_front(const struct ns_kvcache *kv, struct ns_kv_hold *hold, uint32_t n)
{
    hold->keep_to = hold->cut[n];
    hold->keep_from = window_page(kv, hold->keep_to * NS_PAGE);
    if (hold->keep_to == 0)
        hold->keep_from = 0;
}

static void
unkeep(struct ns_kv_hold *hold)
{
    for (uint32_t i = hold->keep_from; i < hold->keep_to; i++)
        hold->path[i]->keep--;
    hold->keep_from = hold->keep_to = 0;
}

enum ns_status
ns_kvcache_declare(struct ns_kvcache *kv, const int32_t *ids, uint32_t n,
                   const struct ns_whole *whole, uint32_t n_whole,
                   struct ns_kv_hold **out, struct ns_error *err)
{
    struct ns_kv_hold *hold = calloc(1, sizeof(*hold));
    uint32_t n_pages = kv->options.no_sharing || n == 0 ? 0
                                                        : (n - 1) / NS_PAGE;
    struct node *parent = NULL;
    bool known = true;

    if (!hold)
        goto oom;
    hold->slot = NONE;
    hold->path = calloc(n_pages ? n_pages : 1, sizeof(struct node *));
    hold->cut = calloc((size_t)n_pages + 1, sizeof(*hold->cut));
    if (!hold->path || !hold->cut)
        goto oom;
    find_cuts(hold, n_pages, whole, n_whole);
    hold->chunk = kv->options.chunk;
    for (uint32_t i = 0; i < n_whole; i++)
        if (whole[i].end - whole[i].first > hold->chunk)
            hold->chunk = whole[i].end - whole[i].first;
    for (uint32_t i = 0; i < n_pages; i++) {
        const int32_t *tokens = ids + (size_t)i * NS_PAGE;
        uint64_t hash = page_hash(parent, tokens);
        struct node *node = find_node(kv, parent, hash, tokens);

        if (!node) {
            node = add_node(kv, parent, hash, tokens);
            if (!node)
                goto oom;
            if (known && i > 0)
                keep_in_front(kv, hold, i);
            known = false;
        }
        node->users++;
        hold->path[hold->n_path++] = node;
        parent = node;
    }
    if (known && n_pages > 0)
        keep_in_front(kv, hold, n_pages);
    for (uint32_t i = hold->keep_from; i < hold->keep_to; i++)
        hold->path[i]->keep++;
    *out = hold;
    return NS_OK;
oom:
    if (hold)
        hold->keep_from = hold->keep_to = 0; /* none was counted yet */
    ns_kvcache_drop(kv, hold);
    return ns_fail(err, NS_FATAL, "out of memory declaring a prompt");
}

void
ns_kvcache_drop(struct ns_kvcache *kv, struct ns_kv_hold *hold)
{
    if (!hold)
        return;
    ns_kvcache_release(kv, hold);
    if (hold->path)
        unkeep(hold);
    while (hold->n_path > 0) {
        struct node *node = hold->path[--hold->n_path];

        node->users--;
        prune(kv, node);
    }
    free(hold->path);
    free(hold->cut);
    free(hold);
}

void
ns_kvcache_release(struct ns_kvcache *kv, struct ns_kv_hold *hold)
{
    if (hold->slot == NONE)
        return;
    for (int which = 0; which < N_POOLS; which++) {
        for (uint32_t i = hold->first[which]; i < hold->end[which]; i++)
            unref(&kv->pool[which], mapped(kv, hold, which, i));
        hold->first[which] = hold->end[which] = 0;
        hold->n_private[which] = 0;
    }
    for (uint32_t i = 0; i < hold->n_path; i++)
        if (hold->path[i]->builder == hold)
            hold->path[i]->builder = NULL;
    kv->slots[kv->n_slots_free++] = hold->slot;
    hold->slot = NONE;
    hold->settled = 0;
    reclaim(kv, hold);
}

uint32_t
ns_kvcache_slot(const struct ns_kv_hold *hold)
{
    return hold->slot;
}

/* How many leading pages can be adopted: all are ready, and the sliding pages
 * that a query behind them looks back to are still there. */
static uint32_t
adoptable(const struct ns_kvcache *kv, const struct ns_kv_hold *hold,
          uint32_t *n_ready)
{
    uint32_t best = 0, behind_gap = 0, i;

    for (i = 0; i < hold->n_path && hold->path[i]->ready; i++) {
        if (hold->path[i]->page[SLIDING] == NONE)
            behind_gap = i + 1;
        if (hold->cut[i + 1] == i + 1 &&
            window_page(kv, (i + 1) * NS_PAGE) >= behind_gap)
            best = i + 1;
    }
    *n_ready = i;
    return best;
}

static uint32_t
window_cap(const struct ns_kvcache *kv, uint32_t chunk)
{
    return (kv->window - 1 + chunk + NS_PAGE - 1) / NS_PAGE + 1;
}

static uint32_t
smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

enum ns_admission
ns_kvcache_admit(struct ns_kvcache *kv, struct ns_kv_hold *hold,
                 uint32_t n_positions, uint32_t *cached)
{
    uint32_t n_ready, n_adopted = adoptable(kv, hold, &n_ready);
    uint32_t from;
    bool alone = kv->n_slots_free == kv->options.n_slots;

    if (kv->n_slots_free == 0)
        return NS_ADMIT_LATER;
    if (n_ready < hold->n_path && hold->path[n_ready]->builder)
        return NS_ADMIT_SHARED;

    hold->slot = kv->slots[--kv->n_slots_free];
    hold->cap[FULL] = (n_positions + NS_PAGE - 1) / NS_PAGE;
    hold->cap[SLIDING] = smaller(hold->cap[FULL], window_cap(kv, hold->chunk));
    from = window_page(kv, n_adopted * NS_PAGE);
    for (uint32_t i = n_adopted; i-- > 0;) { /* the root is touched last */
        struct node *node = hold->path[i];

        ref(&kv->pool[FULL], node->page[FULL]);
        map_page(kv, hold, FULL, i, (int32_t)node->page[FULL]);
        touch(kv, node, FULL);
        if (i >= from) {
            ref(&kv->pool[SLIDING], node->page[SLIDING]);
            map_page(kv, hold, SLIDING, i, (int32_t)node->page[SLIDING]);
            touch(kv, node, SLIDING);
        }
    }
    hold->end[FULL] = hold->end[SLIDING] = n_adopted;
    hold->first[SLIDING] = n_adopted ? from : 0;
    hold->settled = n_adopted * NS_PAGE;
    reclaim(kv, hold);
    /* A sequence that would run alone is let in: it was found to fit. */
    for (int i = 0; i < N_POOLS && !alone; i++)
        if ((uint64_t)kv->pool[i].n_pinned + kv->pool[i].n_claimed >
            kv->pool[i].n_pages) {
            ns_kvcache_release(kv, hold);
            return NS_ADMIT_LATER;
        }
    for (uint32_t i = n_ready; i < hold->n_path; i++)
        if (!hold->path[i]->ready && !hold->path[i]->builder)
            hold->path[i]->builder = hold;
    unkeep(hold);
    *cached = hold->settled;
    return NS_ADMITTED;
}

static bool
extend_pool(struct ns_kvcache *kv, struct ns_kv_hold *hold, int which,
            uint32_t n_pages)
{
    while (hold->end[which] < n_pages) {
        uint32_t page = take_page(kv, which);

        if (page == NONE)
            return false;
        map_page(kv, hold, which, hold->end[which], (int32_t)page);
        hold->end[which]++;
        hold->n_private[which]++;
    }
    return true;
}

bool
ns_kvcache_extend(struct ns_kvcache *kv, struct ns_kv_hold *hold, uint32_t n)
{
    uint32_t n_pages = (n + NS_PAGE - 1) / NS_PAGE;
    bool made = extend_pool(kv, hold, FULL, n_pages) &&
                extend_pool(kv, hold, SLIDING, n_pages);

    reclaim(kv, hold);
    return made;
}

void
ns_kvcache_settle(struct ns_kvcache *kv, struct ns_kv_hold *hold, uint32_t n)
{
    uint32_t first = window_page(kv, n);

    for (uint32_t i = hold->settled / NS_PAGE;
         i < hold->n_path && (i + 1) * NS_PAGE <= n; i++) {
        struct node *node = hold->path[i];

        if (node->builder != hold || i < hold->first[SLIDING])
            continue;
        for (int which = 0; which < N_POOLS; which++) {
            join_tree(kv, node, which, mapped(kv, hold, which, i));
            hold->n_private[which]--;
        }
        node->builder = NULL;
        node->ready = true;
        if (node->parent)
            node->parent->n_ready_children++;
    }
    hold->settled = n;
    while (hold->first[SLIDING] < first &&
           hold->first[SLIDING] < hold->end[SLIDING]) {
        uint32_t index = hold->first[SLIDING];
        uint32_t page = mapped(kv, hold, SLIDING, index);

        if (!kv->pool[SLIDING].pages[page].node)
            hold->n_private[SLIDING]--;
        unref(&kv->pool[SLIDING], page);
        map_page(kv, hold, SLIDING, index, -1);
        hold->first[SLIDING]++;
    }
    reclaim(kv, hold);
}

bool
ns_kvcache_fits(const struct ns_kvcache *kv, uint32_t n_positions,
                uint32_t largest_whole, uint32_t *full_needed,
                uint32_t *sliding_needed)
{
    uint32_t chunk = kv->options.chunk > largest_whole ? kv->options.chunk
                                                       : largest_whole;

    *full_needed = (n_positions + NS_PAGE - 1) / NS_PAGE;
    *sliding_needed = smaller(*full_needed, window_cap(kv, chunk));
    return *full_needed <= kv->pool[FULL].n_pages &&
           *sliding_needed <= kv->pool[SLIDING].n_pages;
}

struct ns_kv_counts
ns_kvcache_counts(const struct ns_kvcache *kv)
{
    struct ns_kv_counts counts = {
        .full_free = kv->pool[FULL].n_free + kv->pool[FULL].n_idle,
        .sliding_free = kv->pool[SLIDING].n_free + kv->pool[SLIDING].n_idle,
        .full_pages = kv->pool[FULL].n_pages,
        .sliding_pages = kv->pool[SLIDING].n_pages,
        .slots_free = kv->n_slots_free,
        .evicted = kv->evicted,
    };

    return counts;
}

static bool
check_pool(const struct ns_kvcache *kv, int which)
{
    const struct pool *pool = &kv->pool[which];
    uint32_t n_free = 0, n_idle = 0, n_pinned = 0, n_listed = 0;

    for (uint32_t i = 0; i < pool->n_pages; i++) {
        const struct page *page = &pool->pages[i];

        if (page->refs == 0)
            n_free++;
        else if (page->node && page->refs == 1)
            n_idle++;
        else if (page->node)
            n_pinned++;
        if (page->node && page->node->page[which] != i)
            return false;
    }
    for (const struct node *node = pool->oldest; node;
         node = node->newer[which])
        n_listed++;
    return n_free == pool->n_free && n_idle == pool->n_idle &&
           n_pinned == pool->n_pinned && n_listed == n_idle + n_pinned;
}

bool
ns_kvcache_check(const struct ns_kvcache *kv)
{
    return check_pool(kv, FULL) && check_pool(kv, SLIDING);
}
