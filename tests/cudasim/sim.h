/* sim.h - what the simulator's own files share.
 *
 *   runtime.cc  devices, memory, streams, events, graphs, injected faults
 *   fibres.cc   a launch: blocks, threads, barriers and collectives
 *   memory.cc   what every access of kernel code is checked against
 *
 * One lock guards all of it, a launch included: threads that drive different
 * devices take turns.
 */
#ifndef CUDASIM_SIM_H
#define CUDASIM_SIM_H

#include "cuda_runtime.h"
#include "cudasim.h"

enum {
    SHARED_MAX = 227 << 10,
    GUARD = 4096,     /* on either side of shared memory */
    GRANULE = 16,     /* of the map of live device memory */
    STACK = 64 << 10, /* of a fibre */
    THREADS_MAX = 1024,
};

struct sim_launch {
    dim3 grid, block;
    size_t shared_bytes;
    const void *kernel;
    const sim_call *call;
    int device;
    uint64_t seed; /* 0: in order */
};

/* Runs it to its end, or to the first thing that a card would not take or that
 * no kernel may do. */
cudaError_t sim_run(const struct sim_launch *launch);

/* What the running launch is, and where its memory lies; fibres.cc keeps it. */
struct sim_running {
    bool active;
    const struct sim_launch *launch;
    unsigned char *stacks; /* THREADS_MAX of STACK bytes */
    uint32_t thread;       /* in its block */
    uint64_t block_time;   /* of the last __syncthreads */
    uint64_t warp_time[THREADS_MAX / 32]; /* ... or syncwarp */
    uint64_t time;
};
extern struct sim_running sim;
/* Shared memory is watched for races in every so manyth block. */
extern uint64_t sim_track_every;

/* Ends the launch; called on a fibre. */
[[noreturn]] void sim_end(cudaError_t error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- memory.cc ------------------------------------------------------------- */

extern unsigned char *sim_shared_memory; /* SHARED_MAX, guarded */

/* Fresh shared memory for a block: unwritten, its bytes a pattern. */
void sim_fresh_shared(size_t bytes);
/* Checks what the running thread does; may end the launch. */
void sim_access(const void *at, size_t bytes, bool write, size_t aligned_to);
/* A cp.async is under way to these bytes, or has landed. */
void sim_landing(const void *at, size_t bytes);
void sim_landed(const void *at, size_t bytes);

/* ---- runtime.cc -------------------------------------------------------------- */

/* A device's memory: `span` bytes of addresses, each granule with the number
 * of its first bytes that are alive. */
struct sim_arena {
    unsigned char *base, *alive;
    size_t span;
};
enum { DEVICES_MAX = 16 };
extern struct sim_arena sim_arena[DEVICES_MAX];
extern int sim_n_devices;
/* Whether all the bytes are pinned host memory. */
bool sim_pinned(const void *at, size_t bytes);
void sim_report(const char *text);

#endif
