#include "engine/backlog.h"

#include <stdbool.h>
#include <stdlib.h>

#include <xxhash.h>

enum heap { EVERYONE, GROUP, N_HEAPS };

/* A job, in the heap of all and in that of its group. Taken out of one, it
 * stays in the other until it comes up there. */
struct node {
    int64_t step;     /* of aging: lower goes first */
    int64_t deadline; /* INT64_MAX: none */
    uint64_t number;
    uint32_t length;
    bool gone;
    uint8_t n_heaps; /* that it is in */
    struct node *child[N_HEAPS], *sibling[N_HEAPS];
    struct group *group; /* NULL: shares nothing */
    void *item;
};

struct group {
    uint64_t id;
    struct node *top;
    struct group *next; /* in its bucket */
};

struct ns_backlog {
    uint32_t age_step_ms, riders;
    struct node *top;
    size_t length;
    uint64_t next_number;
    struct group **bucket; /* [n_buckets], a power of two */
    size_t n_buckets, n_groups;
    struct group *ridden; /* others of it go next */
    uint32_t riders_left;
};

enum ns_status
ns_backlog_create(uint32_t age_step_ms, uint32_t riders,
                  struct ns_backlog **out, struct ns_error *err)
{
    struct ns_backlog *backlog = calloc(1, sizeof(*backlog));

    if (backlog) {
        backlog->n_buckets = 64;
        backlog->bucket = calloc(backlog->n_buckets,
                                 sizeof(*backlog->bucket));
    }
    if (!backlog || !backlog->bucket) {
        free(backlog);
        return ns_fail(err, NS_FATAL, "out of memory for the backlog");
    }
    backlog->age_step_ms = age_step_ms;
    backlog->riders = riders;
    *out = backlog;
    return NS_OK;
}

/* ---- pairing heaps ----------------------------------------------------- */

static bool
goes_before(const struct node *a, const struct node *b)
{
    if (a->step != b->step)
        return a->step < b->step;
    if (a->deadline != b->deadline)
        return a->deadline < b->deadline;
    if (a->length != b->length)
        return a->length > b->length;
    return a->number < b->number;
}

static struct node *
meld(struct node *a, struct node *b, enum heap heap)
{
    if (!a || !b)
        return a ? a : b;
    if (goes_before(b, a)) {
        struct node *held = a;

        a = b;
        b = held;
    }
    b->sibling[heap] = a->child[heap];
    a->child[heap] = b;
    return a;
}

/* The heap without its top: its children melded in pairs, then in one. */
static struct node *
without_top(struct node *top, enum heap heap)
{
    struct node *at = top->child[heap], *pairs = NULL, *all = NULL;

    while (at) {
        struct node *a = at, *b = at->sibling[heap];

        at = b ? b->sibling[heap] : NULL;
        a->sibling[heap] = NULL;
        if (b)
            b->sibling[heap] = NULL;
        a = meld(a, b, heap);
        a->sibling[heap] = pairs;
        pairs = a;
    }
    while (pairs) {
        struct node *next = pairs->sibling[heap];

        pairs->sibling[heap] = NULL;
        all = meld(all, pairs, heap);
        pairs = next;
    }
    return all;
}

static void
left_heap(struct node *node)
{
    if (--node->n_heaps == 0)
        free(node);
}

/* ---- groups ------------------------------------------------------------ */

static struct group **
place_of(const struct ns_backlog *backlog, uint64_t id)
{
    uint64_t mixed = id * 0x9e3779b97f4a7c15u;
    struct group **at = &backlog->bucket[mixed >> 20 &
                                         (backlog->n_buckets - 1)];

    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

/* Longer chains are slower, not wrong: a growth that fails is no error. */
static void
grow(struct ns_backlog *backlog)
{
    struct group **old = backlog->bucket;
    size_t n = backlog->n_buckets;
    struct group **bucket = calloc(2 * n, sizeof(*bucket));

    if (!bucket)
        return;
    backlog->bucket = bucket;
    backlog->n_buckets = 2 * n;
    for (size_t i = 0; i < n; i++)
        while (old[i]) {
            struct group *group = old[i], **at;

            old[i] = group->next;
            at = place_of(backlog, group->id);
            group->next = *at;
            *at = group;
        }
    free(old);
}

static struct group *
group_of(struct ns_backlog *backlog, uint64_t id)
{
    struct group **at;

    if (backlog->n_groups >= backlog->n_buckets)
        grow(backlog);
    at = place_of(backlog, id);
    if (!*at) {
        *at = calloc(1, sizeof(**at));
        if (*at) {
            (*at)->id = id;
            backlog->n_groups++;
        }
    }
    return *at;
}

/* Takes those that are gone off the top; a group without nodes goes too. */
static void
tidy_group(struct ns_backlog *backlog, struct group *group)
{
    while (group->top && group->top->gone) {
        struct node *node = group->top;

        group->top = without_top(node, GROUP);
        left_heap(node);
    }
    if (!group->top) {
        struct group **at = place_of(backlog, group->id);

        *at = group->next;
        backlog->n_groups--;
        if (backlog->ridden == group)
            backlog->ridden = NULL;
        free(group);
    }
}

static void
tidy(struct ns_backlog *backlog)
{
    while (backlog->top && backlog->top->gone) {
        struct node *node = backlog->top;

        backlog->top = without_top(node, EVERYONE);
        left_heap(node);
    }
}

uint64_t
ns_backlog_group(const int32_t *prompt, uint32_t n)
{
    uint64_t hash;

    if (n < NS_GROUP_TOKENS)
        return 0;
    hash = XXH3_64bits(prompt, NS_GROUP_TOKENS * sizeof(*prompt));
    return hash ? hash : 1;
}

/* ---- in and out -------------------------------------------------------- */

static int64_t
aging_step(const struct ns_backlog *backlog, const struct ns_backlog_key *key)
{
    int64_t step = backlog->age_step_ms;
    int64_t arrived = 0;

    if (step > 0) /* rounded down, before the start of the clock too */
        arrived = key->arrived_ms / step - (key->arrived_ms % step < 0);
    return arrived - key->priority;
}

enum ns_status
ns_backlog_push(struct ns_backlog *backlog, const struct ns_backlog_key *key,
                void *item, struct ns_error *err)
{
    struct node *node = calloc(1, sizeof(*node));

    if (node && key->group != 0 && backlog->riders > 0)
        node->group = group_of(backlog, key->group);
    if (!node || (key->group != 0 && backlog->riders > 0 && !node->group)) {
        free(node);
        return ns_fail(err, NS_FATAL, "out of memory for the backlog");
    }
    node->step = aging_step(backlog, key);
    node->deadline = key->deadline_ms ? key->deadline_ms : INT64_MAX;
    node->length = key->length;
    node->number = backlog->next_number++;
    node->item = item;
    node->n_heaps = 1;
    backlog->top = meld(backlog->top, node, EVERYONE);
    if (node->group) {
        node->n_heaps = 2;
        node->group->top = meld(node->group->top, node, GROUP);
    }
    backlog->length++;
    return NS_OK;
}

static struct node *
next_node(struct ns_backlog *backlog)
{
    struct node *rider;

    tidy(backlog);
    if (backlog->riders_left == 0 || !backlog->ridden)
        return backlog->top;
    rider = backlog->ridden->top;
    return rider->step <= backlog->top->step ? rider : backlog->top;
}

void *
ns_backlog_first(struct ns_backlog *backlog)
{
    struct node *node = next_node(backlog);

    return node ? node->item : NULL;
}

void *
ns_backlog_pop(struct ns_backlog *backlog)
{
    struct node *node = next_node(backlog);
    struct group *group;
    void *item;

    if (!node)
        return NULL;
    item = node->item;
    group = node->group;
    if (!group || group != backlog->ridden)
        backlog->riders_left = group ? backlog->riders : 0;
    else if (backlog->riders_left > 0)
        backlog->riders_left--;
    backlog->ridden = group;
    backlog->length--;
    node->gone = true;
    tidy(backlog);
    if (group)
        tidy_group(backlog, group);
    return item;
}

size_t
ns_backlog_length(const struct ns_backlog *backlog)
{
    return backlog->length;
}

void
ns_backlog_destroy(struct ns_backlog *backlog)
{
    if (!backlog)
        return;
    while (ns_backlog_pop(backlog))
        ;
    free(backlog->bucket);
    free(backlog);
}
