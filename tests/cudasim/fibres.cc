/* fibres.cc - a launch: its blocks one by one, a fibre a thread.
 *
 * A fibre runs until it waits at a barrier or a collective; the last lane of a
 * warp to come does the work for all 32, with the operands that each of them
 * left. Then the next fibre that is ready goes on: the one that has waited
 * longest, or with a seed any one. When nobody is ready and not all are done,
 * those who wait will wait for ever, and the launch ends with who waits where.
 */
#include <cxxabi.h>
#include <deque>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

#include "sim.h"

struct sim_place sim_place;
struct sim_running sim;

/* ---- switching -------------------------------------------------------------- */

/* Keeps what a call must keep, leaves the old stack in *from. */
extern "C" void sim_switch(void **from, void *to);
__asm__(".text\n"
        ".hidden sim_switch\n"
        ".globl sim_switch\n"
        ".type sim_switch, @function\n"
        "sim_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size sim_switch, .-sim_switch\n");

/* ---- threads ------------------------------------------------------------------ */

enum wait { READY, AT_BARRIER, AT_COLLECTIVE, DONE };

struct copy {
    void *to;
    const void *from; /* NULL: zeros */
};

struct fibre {
    void *sp;
    enum wait wait;
    const char *what; /* it waits for */
    int line;
    void *operands;   /* of the collective, on its own stack */
    std::vector<struct copy> open;
    std::deque<std::vector<struct copy>> groups; /* the oldest first */
};

struct warp {
    uint32_t n_waiting;
};

static struct fibre fibres[THREADS_MAX];
static struct warp warps[THREADS_MAX / 32];
static uint32_t ready[THREADS_MAX]; /* a ring, or with a seed a bag */
static uint32_t ready_at, n_ready, n_threads, n_done, n_at_barrier;
static void *scheduler_sp;
static uint64_t random_state;
static cudaError_t ending;

static uint64_t
random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void
make_ready(uint32_t thread)
{
    fibres[thread].wait = READY;
    ready[(ready_at + n_ready++) % THREADS_MAX] = thread;
}

static uint32_t
take_ready(void)
{
    uint32_t thread;

    if (sim.launch->seed != 0) {
        uint32_t *one = &ready[(ready_at + random_next() % n_ready) %
                               THREADS_MAX];

        thread = *one;
        *one = ready[ready_at];
        ready[ready_at] = thread;
    }
    thread = ready[ready_at];
    ready_at = (ready_at + 1) % THREADS_MAX;
    n_ready--;
    return thread;
}

static void
set_current(uint32_t thread)
{
    uint32_t x = blockDim.x, y = blockDim.y;

    sim.thread = thread;
    threadIdx = { thread % x, thread / x % y, thread / x / y };
}

/* Lets another fibre go on; comes back when this one is made ready. */
static void
yield(void)
{
    struct fibre *self = &fibres[sim.thread];

    if (n_ready == 0) {
        sim_switch(&self->sp, scheduler_sp);
        return;
    }
    uint32_t next = take_ready();

    if (next == sim.thread)
        return;
    set_current(next);
    sim_switch(&self->sp, fibres[next].sp);
}

[[noreturn]] static void
leave(void)
{
    void *dead;

    sim_switch(&dead, scheduler_sp);
    __builtin_unreachable();
}

static void
land(struct fibre *self, size_t keep)
{
    while (self->groups.size() > keep) {
        for (const struct copy &copy : self->groups.front()) {
            if (copy.from)
                memcpy(copy.to, copy.from, 16);
            else
                memset(copy.to, 0, 16);
            sim_landed(copy.to, 16);
        }
        self->groups.pop_front();
    }
}

static void
fibre_main(void)
{
    struct fibre *self;

    sim.launch->call->run();
    self = &fibres[sim.thread];
    self->wait = DONE;
    n_done++;
    yield();
    __builtin_unreachable();
}

/* ---- reports -------------------------------------------------------------------- */

static void
kernel_name(char *to, size_t size)
{
    Dl_info info;
    char *plain = NULL;
    int status;

    if (!dladdr(sim.launch->kernel, &info) || !info.dli_sname) {
        snprintf(to, size, "at %p", sim.launch->kernel);
        return;
    }
    plain = abi::__cxa_demangle(info.dli_sname, NULL, NULL, &status);
    snprintf(to, size, "%s", plain ? plain : info.dli_sname);
    to[strcspn(to, "(")] = '\0';
    free(plain);
}

static void __attribute__((format(printf, 1, 0)))
report(const char *format, va_list ap)
{
    char text[1024], kernel[256];
    int n;

    kernel_name(kernel, sizeof(kernel));
    n = snprintf(text, sizeof(text),
                 "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", kernel,
                 blockIdx.x, blockIdx.y, blockIdx.z,
                 threadIdx.x, threadIdx.y, threadIdx.z);
    vsnprintf(text + n, sizeof(text) - (size_t)n, format, ap);
    sim_report(text);
}

void
sim_end(cudaError_t error, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    report(format, ap);
    va_end(ap);
    ending = error;
    leave();
}

static void __attribute__((format(printf, 1, 2)))
report_stuck(const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    report(format, ap);
    va_end(ap);
}

/* Nobody is ready: names the first that waits, and one that keeps it so. */
static void
stuck(void)
{
    uint32_t one = 0, other = 0;

    while (fibres[one].wait == DONE)
        one++;
    /* Whom it waits for: in its warp, if a warp is what it waits with. */
    if (fibres[one].wait == AT_COLLECTIVE)
        other = one / 32 * 32;
    while (fibres[other].wait == fibres[one].wait &&
           fibres[other].line == fibres[one].line &&
           fibres[other].what == fibres[one].what && other + 1 < n_threads)
        other++;
    set_current(one);
    if (fibres[other].wait == DONE)
        report_stuck("waits at %s (line %d), but thread %u has ended",
                     fibres[one].what, fibres[one].line, other);
    else
        report_stuck("waits at %s (line %d), thread %u at %s (line %d)",
                     fibres[one].what, fibres[one].line, other,
                     fibres[other].what, fibres[other].line);
    ending = cudaErrorLaunchFailure;
}

/* ---- a launch --------------------------------------------------------------------- */

static void
make_stacks(void)
{
    void *stacks;

    if (sim.stacks)
        return;
    stacks = mmap(NULL, (size_t)THREADS_MAX * STACK, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        perror("cudasim: stacks");
        abort();
    }
    sim.stacks = (unsigned char *)stacks;
    /* The lowest page of each: running over is a fault, not a surprise. */
    for (size_t i = 0; i < THREADS_MAX; i++)
        mprotect(sim.stacks + i * STACK, 4096, PROT_NONE);
}

static void
start_fibre(uint32_t thread)
{
    struct fibre *fibre = &fibres[thread];
    void **sp = (void **)(void *)(sim.stacks + (size_t)(thread + 1) * STACK);

    *--sp = NULL; /* where a return address of fibre_main would lie */
    *--sp = (void *)fibre_main;
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    fibre->sp = sp;
    fibre->open.clear();
    fibre->groups.clear();
    make_ready(thread);
}

static cudaError_t
run_block(void)
{
    ready_at = n_ready = n_done = n_at_barrier = 0;
    memset(warps, 0, sizeof(warps));
    sim_fresh_shared(sim.launch->shared_bytes);
    sim.block_time = ++sim.time;
    for (uint32_t i = 0; i < n_threads; i++)
        start_fibre(i);
    ending = cudaSuccess;
    while (n_ready > 0 && ending == cudaSuccess) {
        uint32_t next = take_ready();

        set_current(next);
        sim_switch(&scheduler_sp, fibres[next].sp);
    }
    if (ending == cudaSuccess && n_done < n_threads)
        stuck();
    return ending;
}

cudaError_t
sim_run(const struct sim_launch *launch)
{
    uint64_t n_blocks = (uint64_t)launch->grid.x * launch->grid.y *
                        launch->grid.z;
    uint64_t first = 0, step = 1;
    cudaError_t error = cudaSuccess;

    make_stacks();
    sim.launch = launch;
    sim.active = true;
    gridDim = launch->grid;
    blockDim = launch->block;
    n_threads = launch->block.x * launch->block.y * launch->block.z;
    if (launch->seed != 0) {
        random_state = launch->seed * 0x9e3779b97f4a7c15u | 1;
        first = random_next() % n_blocks;
        step = n_blocks > 1 ? n_blocks - 1 : 1; /* backwards from anywhere */
    }
    for (uint64_t i = 0; i < n_blocks && error == cudaSuccess; i++) {
        uint64_t b = (first + i * step) % n_blocks;

        blockIdx.x = (unsigned)(b % launch->grid.x);
        blockIdx.y = (unsigned)(b / launch->grid.x % launch->grid.y);
        blockIdx.z = (unsigned)(b / launch->grid.x / launch->grid.y);
        error = run_block();
    }
    sim.active = false;
    sim.launch = NULL;
    return error;
}

/* ---- barriers and collectives ---------------------------------------------------- */

void *
sim_shared(size_t byte_offset)
{
    if (byte_offset > sim.launch->shared_bytes)
        sim_end(cudaErrorIllegalAddress,
                "byte %zu of %zu bytes of shared memory", byte_offset,
                sim.launch->shared_bytes);
    return sim_shared_memory + byte_offset;
}

void
sim_barrier(int line)
{
    struct fibre *self = &fibres[sim.thread];

    self->wait = AT_BARRIER;
    self->what = "__syncthreads";
    self->line = line;
    if (++n_at_barrier < n_threads) {
        yield();
        return;
    }
    for (uint32_t i = 0; i < n_threads; i++)
        if (fibres[i].line != line)
            sim_end(cudaErrorLaunchFailure,
                    "at __syncthreads of line %d, thread %u at that of line %d",
                    line, i, fibres[i].line);
    n_at_barrier = 0;
    sim.block_time = ++sim.time;
    self->wait = READY;
    for (uint32_t i = 0; i < n_threads; i++)
        if (i != sim.thread)
            make_ready(i);
    /* With a seed, the last to come need not be the first to go. */
    if (sim.launch->seed != 0) {
        make_ready(sim.thread);
        yield();
    }
}

/* `work` gets the operands of all lanes when the last one is there. */
static void
collective(const char *what, int line, void *operands,
           void (*work)(void *const operands[32]))
{
    uint32_t first = sim.thread / 32 * 32;
    struct fibre *self = &fibres[sim.thread];
    struct warp *warp = &warps[sim.thread / 32];
    void *all[32];

    self->wait = AT_COLLECTIVE;
    self->what = what;
    self->line = line;
    self->operands = operands;
    if (++warp->n_waiting < 32) {
        yield();
        return;
    }
    for (uint32_t i = 0; i < 32; i++) {
        const struct fibre *lane = &fibres[first + i];

        if (lane->what != what || lane->line != line)
            sim_end(cudaErrorLaunchFailure,
                    "at %s of line %d, thread %u at %s of line %d", what,
                    line, first + i, lane->what, lane->line);
        all[i] = lane->operands;
    }
    warp->n_waiting = 0;
    work(all);
    self->wait = READY;
    for (uint32_t i = first; i < first + 32; i++)
        if (i != sim.thread)
            make_ready(i);
}

static const char name_syncwarp[] = "ns_syncwarp", name_shfl[] = "ns_shfl",
                  name_ballot[] = "ns_ballot", name_ldmatrix[] = "ns_ldmatrix",
                  name_mma_bf16[] = "ns_mma_m16n8k16_bf16",
                  name_mma_e4m3[] = "ns_mma_m16n8k32_e4m3";

void
sim_syncwarp(int line)
{
    collective(name_syncwarp, line, NULL, [](void *const *) {
        sim.warp_time[sim.thread / 32] = ++sim.time;
    });
}

struct shuffle {
    enum sim_shuffle kind;
    unsigned by;
    uint32_t in, out;
};

uint32_t
sim_shfl(enum sim_shuffle kind, uint32_t v, unsigned by, int line)
{
    struct shuffle s = { kind, by, v, v };

    collective(name_shfl, line, &s, [](void *const *lanes) {
        for (unsigned i = 0; i < 32; i++) {
            struct shuffle *to = (struct shuffle *)lanes[i];
            unsigned from = i;

            if (to->kind == SIM_INDEX)
                from = to->by % 32;
            else if (to->kind == SIM_XOR)
                from = (i ^ to->by) < 32 ? i ^ to->by : i;
            else if (i >= to->by)
                from = i - to->by;
            to->out = ((const struct shuffle *)lanes[from])->in;
        }
    });
    return s.out;
}

struct vote {
    bool bit;
    unsigned out;
};

unsigned
sim_ballot(bool bit, int line)
{
    struct vote v = { bit, 0 };

    collective(name_ballot, line, &v, [](void *const *lanes) {
        unsigned mask = 0;

        for (unsigned i = 0; i < 32; i++)
            mask |= (unsigned)((const struct vote *)lanes[i])->bit << i;
        for (unsigned i = 0; i < 32; i++)
            ((struct vote *)lanes[i])->out = mask;
    });
    return v.out;
}

/* ---- copies that land later -------------------------------------------------------- */

void
sim_cp_async(void *shared, const void *global, bool valid)
{
    if ((uintptr_t)shared % 16 != 0 || (uintptr_t)global % 16 != 0)
        sim_end(cudaErrorMisalignedAddress, "cp.async of 16 bytes: %p to %p",
                global, shared);
    if (valid)
        sim_access(global, 16, false, 16);
    sim_landing(shared, 16);
    fibres[sim.thread].open.push_back({ shared, valid ? global : NULL });
}

void
sim_cp_commit(void)
{
    struct fibre *self = &fibres[sim.thread];

    self->groups.push_back(std::move(self->open));
    self->open.clear();
}

void
sim_cp_wait(int n)
{
    land(&fibres[sim.thread], (size_t)n);
}

/* ---- matrices ----------------------------------------------------------------------- */

struct load {
    const unsigned char *row;
    uint32_t r[4];
};

static uint32_t
half_at(void *const *lanes, uint32_t matrix, uint32_t row, uint32_t column)
{
    uint16_t half;

    memcpy(&half,
           ((const struct load *)lanes[8 * matrix + row])->row + 2 * column,
           sizeof(half));
    return half;
}

static void
load_plain(void *const *lanes)
{
    for (uint32_t l = 0; l < 32; l++)
        for (uint32_t m = 0; m < 4; m++)
            ((struct load *)lanes[l])->r[m] =
                half_at(lanes, m, l / 4, l % 4 * 2) |
                half_at(lanes, m, l / 4, l % 4 * 2 + 1) << 16;
}

static void
load_trans(void *const *lanes)
{
    for (uint32_t l = 0; l < 32; l++)
        for (uint32_t m = 0; m < 4; m++)
            ((struct load *)lanes[l])->r[m] =
                half_at(lanes, m, l % 4 * 2, l / 4) |
                half_at(lanes, m, l % 4 * 2 + 1, l / 4) << 16;
}

void
sim_ldmatrix(uint32_t *r, const void *row, bool trans, int line)
{
    struct load load = { (const unsigned char *)row, { 0, 0, 0, 0 } };

    if ((size_t)(load.row - sim_shared_memory) >= SHARED_MAX)
        sim_end(cudaErrorIllegalAddress, "ldmatrix of %p, not shared memory",
                row);
    sim_access(row, 16, false, 16);
    collective(name_ldmatrix, line, &load, trans ? load_trans : load_plain);
    memcpy(r, load.r, sizeof(load.r));
}

struct mma {
    float *d;
    const uint32_t *a, *b;
};

/* d[16][8] += a[16][k] . b[8][k]: exact products, summed in double. */
template <int K>
static void
multiply(void *const *lanes, const float (&a)[16][K], const float (&b)[8][K])
{
    for (int l = 0; l < 32; l++)
        for (int c = 0; c < 4; c++) {
            float *d = &((const struct mma *)lanes[l])->d[c];
            const float *row = a[l / 4 + c / 2 * 8];
            const float *column = b[l % 4 * 2 + c % 2];
            double sum = *d;

            for (int k = 0; k < K; k++)
                sum += (double)row[k] * (double)column[k];
            *d = (float)sum;
        }
}

static void
multiply_bf16(void *const *lanes)
{
    float a[16][16], b[8][16];

    for (int l = 0; l < 32; l++) {
        const struct mma *mma = (const struct mma *)lanes[l];
        int g = l / 4, t = l % 4;

        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++)
                a[g + i % 2 * 8][2 * t + e + i / 2 * 8] =
                    ns_bits_float(mma->a[i] >> (16 * e) << 16);
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < 2; e++)
                b[g][2 * t + e + i * 8] =
                    ns_bits_float(mma->b[i] >> (16 * e) << 16);
    }
    multiply<16>(lanes, a, b);
}

static void
multiply_e4m3(void *const *lanes)
{
    float a[16][32], b[8][32];

    for (int l = 0; l < 32; l++) {
        const struct mma *mma = (const struct mma *)lanes[l];
        int g = l / 4, t = l % 4;

        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 4; e++)
                a[g + i % 2 * 8][4 * t + e + i / 2 * 16] =
                    sim_e4m3_to_float((uint8_t)(mma->a[i] >> (8 * e)));
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < 4; e++)
                b[g][4 * t + e + i * 16] =
                    sim_e4m3_to_float((uint8_t)(mma->b[i] >> (8 * e)));
    }
    multiply<32>(lanes, a, b);
}

void
sim_mma_bf16(float *d, const uint32_t *a, const uint32_t *b, int line)
{
    struct mma mma = { d, a, b };

    collective(name_mma_bf16, line, &mma, multiply_bf16);
}

void
sim_mma_e4m3(float *d, const uint32_t *a, const uint32_t *b, int line)
{
    struct mma mma = { d, a, b };

    collective(name_mma_e4m3, line, &mma, multiply_e4m3);
}

/* ---- numbers -------------------------------------------------------------------------- */

float
sim_e4m3_to_float(uint8_t code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    float v = exponent == 0 ? ldexpf((float)fraction, -9)
                            : ldexpf((float)(8 + fraction), exponent - 10);

    if (exponent == 15 && fraction == 7)
        v = NAN;
    return code & 0x80 ? -v : v;
}

uint8_t
sim_e4m3_of(float v)
{
    uint8_t sign = signbit(v) ? 0x80 : 0;
    float magnitude = fabsf(v);
    int exponent;

    if (v != v)
        return 0x7f;
    if (magnitude >= 448.0f)
        return sign | 0x7e;
    if (magnitude < 0x1p-6f) /* steps of 2^-9; may round up to 2^-6 */
        return sign | (uint8_t)nearbyintf(magnitude * 512.0f);
    frexpf(magnitude, &exponent);
    /* Eighths above the power of two; eight of them are the next exponent. */
    int eighths = (int)nearbyintf(ldexpf(magnitude, 4 - exponent)) - 8;
    int code = (exponent + 6) * 8 + eighths;

    return sign | (uint8_t)code;
}
