#include "connectors/ledger.h"

#include <stdlib.h>

#include "base/size.h"

struct entry {
    uint64_t offset;
    bool done;
};

struct ns_ledger {
    uint64_t next; /* one past the newest received */
    uint32_t span, head, n, in_flight;
    struct entry ring[];
};

enum ns_status
ns_ledger_create(uint32_t span, uint64_t next, struct ns_ledger **out,
                 struct ns_error *err)
{
    struct ns_ledger *ledger;
    size_t bytes;

    if (!ns_size_mul(span, sizeof(ledger->ring[0]), &bytes) ||
        !ns_size_add(bytes, sizeof(*ledger), &bytes))
        return ns_fail(err, NS_REJECT, "a span of %u does not fit", span);
    ledger = calloc(1, bytes);
    if (!ledger)
        return ns_fail(err, NS_FATAL, "out of memory for a ledger of %u", span);
    ledger->span = span;
    ledger->next = next;
    *out = ledger;
    return NS_OK;
}

void
ns_ledger_destroy(struct ns_ledger *ledger)
{
    free(ledger);
}

static struct entry *
at(struct ns_ledger *ledger, uint32_t index)
{
    return &ledger->ring[(ledger->head + (uint64_t)index) % ledger->span];
}

bool
ns_ledger_has_room(const struct ns_ledger *ledger)
{
    return ledger->n < ledger->span;
}

bool
ns_ledger_receive(struct ns_ledger *ledger, uint64_t offset)
{
    if (ledger->n == ledger->span || offset < ledger->next)
        return false;
    *at(ledger, ledger->n++) = (struct entry){ .offset = offset };
    ledger->next = offset + 1;
    ledger->in_flight++;
    return true;
}

bool
ns_ledger_done(struct ns_ledger *ledger, uint64_t offset)
{
    uint32_t low = 0, high = ledger->n;
    struct entry *entry;

    while (low < high) { /* the ring rises from its head */
        uint32_t middle = low + (high - low) / 2;

        if (at(ledger, middle)->offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == ledger->n)
        return false;
    entry = at(ledger, low);
    if (entry->offset != offset || entry->done)
        return false;
    entry->done = true;
    ledger->in_flight--;
    while (ledger->n && at(ledger, 0)->done) {
        ledger->head = (ledger->head + 1) % ledger->span;
        ledger->n--;
    }
    return true;
}

uint64_t
ns_ledger_watermark(const struct ns_ledger *ledger)
{
    return ledger->n ? ledger->ring[ledger->head].offset : ledger->next;
}

uint32_t
ns_ledger_in_flight(const struct ns_ledger *ledger)
{
    return ledger->in_flight;
}
