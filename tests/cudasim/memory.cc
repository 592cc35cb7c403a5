/* memory.cc - what every access of kernel code is checked against.
 *
 * Shared memory has a cell a byte: who wrote it last, who read it last, and
 * when. Time ticks at every barrier. Something at time `then` lies in front of
 * what thread t does now if it was t's own, if then is before the block's last
 * barrier, or before the last barrier of the warp that both belong to.
 * Anything else at the same byte, with a write among the two, is a race: on a
 * card the two threads run in either order.
 */
#include <dlfcn.h>
#include <stdio.h>

#include "sim.h"

enum state : uint8_t { UNWRITTEN, LANDING, WRITTEN };
enum { SEVERAL = 0xfffe, NOBODY = 0xffff, ATOMIC = 0xfffd };

struct cell {
    uint64_t block; /* that the rest is of; of an earlier one: unwritten */
    uint64_t write_time, read_time;
    uint16_t writer;
    uint16_t reader, reader_warp; /* or SEVERAL */
    enum state state;
};

static unsigned char shared_with_guards[GUARD + SHARED_MAX + GUARD]
    __attribute__((aligned(4096)));
unsigned char *sim_shared_memory = shared_with_guards + GUARD;
static struct cell cells[SHARED_MAX];
/* When all of a word's bytes had last been read by several threads of a warp,
 * or of SEVERAL, and written in front of the last barrier: until time ticks or
 * someone writes there, one more read by one of them changes nothing. */
static uint64_t settled[SHARED_MAX / 4];
static uint16_t settled_warp[SHARED_MAX / 4];
static size_t shared_bytes;
static uint64_t block;
static bool tracked; /* this block's cells are kept */
uint64_t sim_track_every = 1;

void
sim_fresh_shared(size_t bytes)
{
    /* A signalling NaN of both kinds of float, and a far index. */
    memset(sim_shared_memory, 0xff, bytes);
    shared_bytes = bytes;
    tracked = ++block % sim_track_every == 0;
}

static inline struct cell *
cell_at(size_t byte)
{
    struct cell *cell = &cells[byte];

    if (cell->block != block)
        *cell = { block, 0, 0, NOBODY, NOBODY, NOBODY, UNWRITTEN };
    return cell;
}

/* Whether what thread `who` did at `then` lies behind a barrier by now. */
static inline bool
ordered(uint32_t who, uint64_t then)
{
    uint32_t warp = sim.thread / 32;

    return then < sim.block_time || who == sim.thread ||
           (who / 32 == warp && then < sim.warp_time[warp]);
}

static inline bool
reads_ordered(const struct cell *cell)
{
    uint32_t warp = sim.thread / 32;

    if (cell->reader == NOBODY || cell->read_time < sim.block_time)
        return true;
    if (cell->reader != SEVERAL)
        return ordered(cell->reader, cell->read_time);
    return cell->reader_warp == warp && cell->read_time < sim.warp_time[warp];
}

[[noreturn]] static void
race(size_t byte, const char *first, uint32_t who, const char *then)
{
    char name[32];

    if (who >= ATOMIC)
        snprintf(name, sizeof(name), "several threads");
    else
        snprintf(name, sizeof(name), "thread %u", who);
    sim_end(cudaErrorLaunchFailure,
            "shared memory byte %zu: %s by %s, then %s with no barrier between",
            byte, first, name, then);
}

static inline void
check_write(size_t byte, uint16_t as)
{
    struct cell *cell = cell_at(byte);

    if (cell->state == LANDING)
        sim_end(cudaErrorLaunchFailure,
                "shared memory byte %zu: written while a cp.async of thread %u "
                "is under way",
                byte, cell->writer);
    if (cell->writer == ATOMIC
            ? as != ATOMIC && cell->write_time >= sim.block_time
            : cell->writer != NOBODY && !ordered(cell->writer,
                                                 cell->write_time))
        race(byte, "written", cell->writer, "written");
    if (!reads_ordered(cell))
        race(byte, "read", cell->reader, "written");
    settled[byte / 4] = 0;
    cell->writer = as;
    cell->write_time = sim.time;
    cell->state = WRITTEN;
    cell->reader = NOBODY;
}

static inline void
check_read(size_t byte)
{
    struct cell *cell = cell_at(byte);

    if (cell->state != WRITTEN)
        sim_end(cudaErrorLaunchFailure,
                cell->state == LANDING
                    ? "shared memory byte %zu: read before cp.async.wait_group"
                    : "shared memory byte %zu: read before it was written",
                byte);
    if (cell->writer == ATOMIC ? cell->write_time >= sim.block_time
                               : !ordered(cell->writer, cell->write_time))
        race(byte, "written", cell->writer, "read");
    if (cell->read_time == sim.time && cell->reader == sim.thread)
        return;
    if (reads_ordered(cell)) {
        cell->reader = (uint16_t)sim.thread;
        cell->reader_warp = (uint16_t)(sim.thread / 32);
    } else {
        cell->reader = SEVERAL;
        if (cell->reader_warp != sim.thread / 32)
            cell->reader_warp = SEVERAL;
    }
    cell->read_time = sim.time;
}

static inline void
settle(size_t word)
{
    uint16_t warp = cells[word * 4].reader_warp;

    for (size_t i = word * 4; i < word * 4 + 4; i++) {
        const struct cell *cell = &cells[i];

        if (cell->block != block || cell->write_time >= sim.block_time ||
            cell->reader != SEVERAL || cell->reader_warp != warp ||
            cell->read_time != sim.time)
            return;
    }
    settled_warp[word] = warp;
    settled[word] = sim.time;
}

static inline void
check_reads(size_t byte, size_t bytes)
{
    for (size_t i = byte; i < byte + bytes;) {
        size_t end = (i / 4 + 1) * 4;

        if (end > byte + bytes)
            end = byte + bytes;
        if (settled[i / 4] != sim.time ||
            (settled_warp[i / 4] != SEVERAL &&
             settled_warp[i / 4] != sim.thread / 32)) {
            for (size_t j = i; j < end; j++)
                check_read(j);
            settle(i / 4);
        }
        i = end;
    }
}

static inline size_t
shared_byte(const void *at, size_t bytes, const char *what)
{
    ptrdiff_t byte = (const unsigned char *)at - sim_shared_memory;

    if (byte < 0 || (size_t)byte + bytes > shared_bytes)
        sim_end(cudaErrorIllegalAddress,
                "%s of %zu bytes at byte %td of %zu bytes of shared memory",
                what, bytes, byte, shared_bytes);
    return (size_t)byte;
}

static inline bool
in_shared(const void *at)
{
    return (size_t)((const unsigned char *)at - shared_with_guards) <
           sizeof(shared_with_guards);
}

void
sim_landing(const void *at, size_t bytes)
{
    size_t byte;

    if (!in_shared(at))
        sim_end(cudaErrorIllegalAddress, "cp.async to %p, not shared memory",
                at);
    byte = shared_byte(at, bytes, "cp.async");
    memset(sim_shared_memory + byte, 0xff, bytes);
    for (size_t i = byte; tracked && i < byte + bytes; i++) {
        check_write(i, (uint16_t)sim.thread);
        cells[i].state = LANDING;
    }
}

void
sim_landed(const void *at, size_t bytes)
{
    size_t byte = (size_t)((const unsigned char *)at - sim_shared_memory);

    for (size_t i = byte; tracked && i < byte + bytes; i++) {
        cells[i].state = WRITTEN;
        cells[i].write_time = sim.time;
    }
}

/* Whether a device's bytes are alive. */
static bool
alive(const struct sim_arena *arena, const void *at, size_t bytes)
{
    size_t from = (size_t)((const unsigned char *)at - arena->base);

    for (size_t i = from; i < from + bytes;) {
        size_t end = (i / GRANULE + 1) * GRANULE;

        if (end > from + bytes)
            end = from + bytes;
        if (end - i / GRANULE * GRANULE > arena->alive[i / GRANULE])
            return false;
        i = end;
    }
    return true;
}

static void
check_global(const void *at, size_t bytes, const char *what)
{
    Dl_info info;

    for (int device = 0; device < sim_n_devices; device++) {
        const struct sim_arena *arena = &sim_arena[device];

        if ((size_t)((const unsigned char *)at - arena->base) >= arena->span)
            continue;
        if (device != sim.launch->device)
            sim_end(cudaErrorIllegalAddress,
                    "%s of %zu bytes at %p: memory of device %d on device %d",
                    what, bytes, at, device, sim.launch->device);
        if (!alive(arena, at, bytes))
            sim_end(cudaErrorIllegalAddress,
                    "%s of %zu bytes at %p: outside what was allocated", what,
                    bytes, at);
        return;
    }
    if ((size_t)((const unsigned char *)at -
                 (const unsigned char *)sim.launch->call) <
        sim.launch->call->bytes)
        return;
    if (sim_pinned(at, bytes) || dladdr(at, &info)) /* pinned; a constant */
        return;
    sim_end(cudaErrorIllegalAddress,
            "%s of %zu bytes at %p: no memory of the device", what, bytes, at);
}

static inline bool
in_stacks(const void *at)
{
    return (size_t)((const unsigned char *)at - sim.stacks) <
           (size_t)THREADS_MAX * STACK;
}

static void
access_as(const void *at, size_t bytes, bool write, size_t aligned_to,
          uint16_t as)
{
    const char *what = write ? "a write" : "a read";

    if (in_stacks(at) || (size_t)((const char *)at -
                                  (const char *)&sim_place) < sizeof(sim_place))
        return;
    if ((uintptr_t)at % aligned_to != 0)
        sim_end(cudaErrorMisalignedAddress,
                "%s of %zu bytes at %p: not aligned", what, bytes, at);
    if (!in_shared(at)) {
        check_global(at, bytes, what);
        return;
    }
    size_t byte = shared_byte(at, bytes, what);

    if (!tracked)
        return;
    if (write)
        for (size_t i = byte; i < byte + bytes; i++)
            check_write(i, as);
    else
        check_reads(byte, bytes);
}

void
sim_access(const void *at, size_t bytes, bool write, size_t aligned_to)
{
    access_as(at, bytes, write, aligned_to, (uint16_t)sim.thread);
}

void
sim_check_atomic(const void *at, size_t bytes)
{
    if (sim.active)
        access_as(at, bytes, true, bytes, ATOMIC);
}

/* ---- what gcc calls in front of each access ------------------------------- */

/* Host code of a .cu file comes here too: it does not run on a fibre. */
static inline bool
on_fibre(void)
{
    return sim.active && in_stacks(__builtin_frame_address(0));
}

#define HOOK(name, bytes, write, align)                                       \
    void __tsan_##name(void *at)                                              \
    {                                                                         \
        if (on_fibre())                                                       \
            sim_access(at, bytes, write, align);                              \
    }

extern "C" {
void
__tsan_init(void)
{
}

void
__tsan_func_entry(void *)
{
}

void
__tsan_func_exit(void)
{
}

HOOK(read1, 1, false, 1)
HOOK(read2, 2, false, 2)
HOOK(read4, 4, false, 4)
HOOK(read8, 8, false, 8)
HOOK(read16, 16, false, 16)
HOOK(write1, 1, true, 1)
HOOK(write2, 2, true, 2)
HOOK(write4, 4, true, 4)
HOOK(write8, 8, true, 8)
HOOK(write16, 16, true, 16)
HOOK(unaligned_read2, 2, false, 1)
HOOK(unaligned_read4, 4, false, 1)
HOOK(unaligned_read8, 8, false, 1)
HOOK(unaligned_read16, 16, false, 1)
HOOK(unaligned_write2, 2, true, 1)
HOOK(unaligned_write4, 4, true, 1)
HOOK(unaligned_write8, 8, true, 1)
HOOK(unaligned_write16, 16, true, 1)
HOOK(volatile_read1, 1, false, 1)
HOOK(volatile_read2, 2, false, 2)
HOOK(volatile_read4, 4, false, 4)
HOOK(volatile_read8, 8, false, 8)
HOOK(volatile_write1, 1, true, 1)
HOOK(volatile_write2, 2, true, 2)
HOOK(volatile_write4, 4, true, 4)
HOOK(volatile_write8, 8, true, 8)

void
__tsan_vptr_update(void *, void *)
{
}

void
__tsan_read_range(void *at, size_t bytes)
{
    if (on_fibre())
        sim_access(at, bytes, false, 1);
}

void
__tsan_write_range(void *at, size_t bytes)
{
    if (on_fibre())
        sim_access(at, bytes, true, 1);
}
}
