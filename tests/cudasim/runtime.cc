/* runtime.cc - devices, memory, streams, events, graphs, injected faults. */
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <vector>

#include "sim.h"

enum { ALIGN = 256, REDZONE = 256 };

typedef std::function<cudaError_t()> operation;

struct sim_event {
    sim_stream *stream; /* of the last record */
    uint64_t recorded, reached;
    uint64_t reached_ns;
};

struct sim_graph {
    std::vector<operation> operations;
};

struct sim_stream {
    int device;
    std::deque<operation> waiting;
    sim_graph *capture; /* owned; NULL: none */
    bool capture_broken;
};

struct device {
    int number; /* of those in the machine */
    size_t capacity, used, top; /* top: of the addresses handed out */
    std::map<size_t, size_t> pieces; /* offset to bytes */
    std::multimap<size_t, size_t> holes; /* span to offset */
    std::vector<sim_stream *> streams;
    sim_stream own; /* the null stream */
    cudaError_t sticky;
    uint64_t n_operations;
};

struct sim_arena sim_arena[DEVICES_MAX];
int sim_n_devices;
static struct device devices[DEVICES_MAX];
static std::recursive_mutex lock;

struct host_piece {
    size_t bytes;
    bool owned; /* else registered: the caller's */
};
static std::map<uintptr_t, struct host_piece> pinned;
static bool started, frozen;
static uint64_t seed, n_launches;
static uint64_t fault_after;
static cudaError_t fault; /* cudaSuccess: none */
static char last_report[1024];
static thread_local int current_device;
static thread_local cudaError_t last_error;

#define ENTER std::lock_guard<std::recursive_mutex> guard(lock)

static cudaError_t
failed(cudaError_t error)
{
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

void
sim_report(const char *text)
{
    snprintf(last_report, sizeof(last_report), "%s", text);
    fprintf(stderr, "cudasim: %s\n", text);
}

/* ---- the environment -------------------------------------------------------- */

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation",
      "out of memory" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
      "invalid configuration argument" },
    { cudaErrorNoDevice, "cudaErrorNoDevice",
      "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice",
      "invalid device ordinal" },
    { cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable",
      "uncorrectable ECC error encountered" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
      "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
      "an illegal memory access was encountered" },
    { cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress",
      "misaligned address" },
    { cudaErrorLaunchFailure, "cudaErrorLaunchFailure",
      "unspecified launch failure" },
    { cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
      "CUDA-capable device(s) is/are busy or unavailable" },
    { cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
      "operation not permitted when stream is capturing" },
    { cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
      "operation failed due to a previous error during capture" },
    { cudaErrorUnknown, "cudaErrorUnknown", "unknown error" },
};

[[noreturn]] static void
bad_setting(const char *name, const char *value)
{
    fprintf(stderr, "cudasim: %s=%s is not understood\n", name, value);
    abort();
}

static uint64_t
number_of(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);
    char *end;
    uint64_t n;

    if (!value)
        return otherwise;
    n = strtoull(value, &end, 10);
    for (const char *unit = "KMG"; *unit; unit++)
        if (*end == *unit) {
            n <<= 10 * (unit - "KMG" + 1);
            end++;
            break;
        }
    if (end == value || *end)
        bad_setting(name, value);
    return n;
}

static void
read_fault(void)
{
    const char *value = getenv("NS_CUDASIM_FAULT");
    char name[64];

    fault = cudaSuccess;
    if (!value || !*value)
        return;
    if (sscanf(value, "after:%lu:%63s", &fault_after, name) == 2)
        for (const auto &e : errors)
            if (strcmp(e.name, name) == 0)
                fault = e.error;
    if (fault == cudaSuccess)
        bad_setting("NS_CUDASIM_FAULT", value);
}

static unsigned char *
reserve(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (at == MAP_FAILED) {
        perror("cudasim: device memory");
        abort();
    }
    return (unsigned char *)at;
}

/* CUDA_VISIBLE_DEVICES: a list of numbers, cut at the first that is none. */
static int
visible_devices(int n)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int visible = 0;
    char *end;

    if (!list)
        return n;
    for (long i; visible < DEVICES_MAX; list = end + 1) {
        i = strtol(list, &end, 10);
        if (end == list || i < 0 || i >= n)
            break;
        devices[visible++].number = (int)i;
        if (*end != ',')
            break;
    }
    return visible;
}

static void
start(void)
{
    size_t capacity;

    if (started)
        return;
    started = true;
    sim_n_devices = (int)number_of("NS_CUDASIM_DEVICES", 1);
    for (int i = 0; i < DEVICES_MAX; i++)
        devices[i].number = i;
    sim_n_devices = visible_devices(sim_n_devices);
    capacity = number_of("NS_CUDASIM_MEMORY", (size_t)1 << 30);
    seed = number_of("NS_CUDASIM_SEED", 0);
    sim_track_every = number_of("NS_CUDASIM_TRACK", 1);
    if (sim_track_every == 0)
        bad_setting("NS_CUDASIM_TRACK", "0");
    if (sim_n_devices > DEVICES_MAX)
        bad_setting("NS_CUDASIM_DEVICES", getenv("NS_CUDASIM_DEVICES"));
    read_fault();
    for (int i = 0; i < sim_n_devices; i++) {
        struct sim_arena *arena = &sim_arena[i];

        devices[i].capacity = capacity;
        devices[i].own.device = i;
        /* Room for redzones, and for holes that nothing fits. */
        arena->span = 4 * capacity + ((size_t)64 << 20);
        arena->base = reserve(arena->span);
        arena->alive = reserve(arena->span / GRANULE);
    }
}

void
cudasim_reset(void)
{
    ENTER;

    for (int i = 0; i < sim_n_devices; i++) {
        for (sim_stream *stream : devices[i].streams) {
            delete stream->capture;
            delete stream;
        }
        munmap(sim_arena[i].base, sim_arena[i].span);
        munmap(sim_arena[i].alive, sim_arena[i].span / GRANULE);
        devices[i] = device();
    }
    for (const auto &piece : pinned)
        if (piece.second.owned)
            free((void *)piece.first);
    pinned.clear();
    sim_n_devices = 0;
    started = frozen = false;
    last_report[0] = '\0';
    last_error = cudaSuccess;
    current_device = 0;
    n_launches = 0;
    start();
}

void
cudasim_freeze(int yes)
{
    ENTER;

    frozen = yes;
}

const char *
cudasim_report(void)
{
    return last_report;
}

/* ---- devices ------------------------------------------------------------------ */

/* The calling thread's; NULL: there is none. */
static struct device *
here(void)
{
    start();
    return current_device < sim_n_devices ? &devices[current_device] : NULL;
}

cudaError_t
cudaGetDeviceCount(int *n)
{
    ENTER;

    start();
    *n = sim_n_devices;
    return failed(sim_n_devices > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t
cudaSetDevice(int device)
{
    ENTER;

    start();
    if (device < 0 || device >= sim_n_devices)
        return failed(cudaErrorInvalidDevice);
    current_device = device;
    return failed(devices[device].sticky);
}

cudaError_t
cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t
cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    ENTER;

    start();
    if (device < 0 || device >= sim_n_devices)
        return failed(cudaErrorInvalidDevice);
    memset(prop, 0, sizeof(*prop));
    snprintf(prop->name, sizeof(prop->name), "simulated H100 %d",
             devices[device].number);
    prop->totalGlobalMem = devices[device].capacity;
    prop->sharedMemPerBlockOptin = SHARED_MAX;
    prop->major = 9;
    prop->multiProcessorCount = 132;
    prop->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

cudaError_t
cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);

    if (error != cudaSuccess)
        return error;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = prop.multiProcessorCount;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = prop.major;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = prop.minor;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)prop.sharedMemPerBlockOptin;
        return cudaSuccess;
    }
    return failed(cudaErrorInvalidValue);
}

cudaError_t
cudaGetLastError(void)
{
    cudaError_t error = last_error;

    last_error = cudaSuccess;
    return error;
}

cudaError_t
cudaPeekAtLastError(void)
{
    return last_error;
}

const char *
cudaGetErrorString(cudaError_t error)
{
    for (const auto &e : errors)
        if (e.error == error)
            return e.text;
    return "unrecognized error code";
}

const char *
cudaGetErrorName(cudaError_t error)
{
    for (const auto &e : errors)
        if (e.error == error)
            return e.name;
    return "unrecognized error code";
}

/* ---- memory --------------------------------------------------------------------- */

static void
set_alive(struct sim_arena *arena, size_t offset, size_t bytes, bool is)
{
    size_t whole = bytes / GRANULE;
    unsigned char *at = arena->alive + offset / GRANULE;

    memset(at, is ? GRANULE : 0, whole);
    if (bytes % GRANULE)
        at[whole] = is ? (unsigned char)(bytes % GRANULE) : 0;
}

static size_t
span_of(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN + REDZONE;
}

static bool
capturing(const struct device *device)
{
    for (const sim_stream *stream : device->streams)
        if (stream->capture)
            return true;
    return false;
}

cudaError_t
sim_malloc(void **out, size_t bytes)
{
    ENTER;
    struct device *device = here();
    struct sim_arena *arena;
    size_t offset, span = span_of(bytes);

    if (!device)
        return failed(cudaErrorNoDevice);
    if (device->sticky != cudaSuccess)
        return failed(device->sticky);
    if (capturing(device))
        return failed(cudaErrorStreamCaptureUnsupported);
    if (frozen) {
        char text[80];

        snprintf(text, sizeof(text), "cudaMalloc of %zu bytes after the start",
                 bytes);
        sim_report(text);
        return failed(cudaErrorMemoryAllocation);
    }
    if (bytes > device->capacity - device->used)
        return failed(cudaErrorMemoryAllocation);
    arena = &sim_arena[current_device];
    auto hole = device->holes.lower_bound(span);

    if (hole != device->holes.end() && hole->first <= 2 * span) {
        offset = hole->second;
        span = hole->first;
        device->holes.erase(hole);
    } else if (span > arena->span - device->top - REDZONE) {
        return failed(cudaErrorMemoryAllocation);
    } else {
        offset = device->top + REDZONE;
        device->top += span;
    }
    device->used += bytes;
    device->pieces[offset] = bytes;
    set_alive(arena, offset, bytes, true);
    *out = arena->base + offset;
    /* Fresh memory holds what was there: not-a-numbers, far indices. */
    memset(*out, 0xff, bytes);
    return cudaSuccess;
}

static cudaError_t drain_device(int index);

cudaError_t
cudaFree(void *memory)
{
    ENTER;

    if (!memory)
        return cudaSuccess;
    start();
    for (int i = 0; i < sim_n_devices; i++) {
        struct device *device = &devices[i];
        size_t offset = (size_t)((unsigned char *)memory - sim_arena[i].base);
        auto piece = device->pieces.find(offset);

        if (piece == device->pieces.end())
            continue;
        cudaError_t error = drain_device(i);

        set_alive(&sim_arena[i], offset, piece->second, false);
        device->used -= piece->second;
        device->holes.insert({ span_of(piece->second), offset });
        device->pieces.erase(piece);
        return failed(error);
    }
    return failed(cudaErrorInvalidValue);
}

cudaError_t
cudaMemGetInfo(size_t *left, size_t *whole)
{
    ENTER;
    struct device *device = here();

    if (!device)
        return failed(cudaErrorNoDevice);
    if (device->sticky != cudaSuccess)
        return failed(device->sticky);
    *left = device->capacity - device->used;
    *whole = device->capacity;
    return cudaSuccess;
}

cudaError_t
sim_malloc_host(void **out, size_t bytes)
{
    ENTER;

    start();
    if (posix_memalign(out, 4096, bytes ? bytes : 1) != 0)
        return failed(cudaErrorMemoryAllocation);
    memset(*out, 0xff, bytes);
    pinned[(uintptr_t)*out] = { bytes, true };
    return cudaSuccess;
}

static cudaError_t
unpin(void *memory, bool owned)
{
    auto piece = pinned.find((uintptr_t)memory);

    if (piece == pinned.end() || piece->second.owned != owned)
        return failed(cudaErrorInvalidValue);
    /* What is under way may still read it. */
    for (int i = 0; i < sim_n_devices; i++)
        drain_device(i);
    pinned.erase(piece);
    if (owned)
        free(memory);
    return cudaSuccess;
}

cudaError_t
cudaFreeHost(void *memory)
{
    ENTER;

    return memory ? unpin(memory, true) : cudaSuccess;
}

cudaError_t
cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    ENTER;

    start();
    if (!memory || bytes == 0 || sim_pinned(memory, 1))
        return failed(cudaErrorInvalidValue);
    pinned[(uintptr_t)memory] = { bytes, false };
    return cudaSuccess;
}

cudaError_t
cudaHostUnregister(void *memory)
{
    ENTER;

    return unpin(memory, false);
}

bool
sim_pinned(const void *at, size_t bytes)
{
    auto behind = pinned.upper_bound((uintptr_t)at);

    if (behind == pinned.begin())
        return false;
    --behind;
    return (uintptr_t)at + bytes <= behind->first + behind->second.bytes;
}

/* ---- queues ---------------------------------------------------------------------- */

static sim_stream *
queue_of(cudaStream_t stream)
{
    struct device *device = here();

    return stream ? stream : device ? &device->own : NULL;
}

static cudaError_t
enqueue(cudaStream_t stream, operation op)
{
    sim_stream *queue = queue_of(stream);

    if (!queue)
        return failed(cudaErrorNoDevice);
    if (queue->capture) {
        queue->capture->operations.push_back(std::move(op));
        return cudaSuccess;
    }
    if (devices[queue->device].sticky != cudaSuccess)
        return failed(devices[queue->device].sticky);
    queue->waiting.push_back(std::move(op));
    return cudaSuccess;
}

/* Does what has waited longest. An error stays with the device for ever. */
static cudaError_t
do_one(sim_stream *queue)
{
    struct device *device = &devices[queue->device];
    operation op = std::move(queue->waiting.front());

    queue->waiting.pop_front();
    if (device->sticky != cudaSuccess)
        return device->sticky;
    if (fault != cudaSuccess && device->n_operations++ >= fault_after)
        device->sticky = fault;
    else
        device->sticky = op();
    return device->sticky;
}

static cudaError_t
drain(sim_stream *queue)
{
    while (!queue->waiting.empty())
        do_one(queue);
    return devices[queue->device].sticky;
}

static cudaError_t
drain_device(int index)
{
    struct device *device = &devices[index];

    drain(&device->own);
    for (sim_stream *stream : device->streams)
        drain(stream);
    return device->sticky;
}

cudaError_t
cudaDeviceSynchronize(void)
{
    ENTER;
    struct device *device = here();

    if (!device)
        return failed(cudaErrorNoDevice);
    if (capturing(device))
        return failed(cudaErrorStreamCaptureUnsupported);
    return failed(drain_device(current_device));
}

/* What a copy engine may touch: host memory, or live memory of a device. */
static bool
may_copy(const void *at, size_t bytes)
{
    for (int i = 0; i < sim_n_devices; i++) {
        size_t offset = (size_t)((const unsigned char *)at -
                                 sim_arena[i].base);

        if (offset >= sim_arena[i].span)
            continue;
        auto piece = devices[i].pieces.upper_bound(offset);

        if (piece == devices[i].pieces.begin())
            return false;
        --piece;
        return offset + bytes <= piece->first + piece->second;
    }
    return true;
}

static bool
on_device(const void *at)
{
    for (int i = 0; i < sim_n_devices; i++)
        if ((size_t)((const unsigned char *)at - sim_arena[i].base) <
            sim_arena[i].span)
            return true;
    return false;
}

static cudaError_t
copy_now(void *to, const void *from, size_t bytes)
{
    if (!may_copy(to, bytes) || !may_copy(from, bytes)) {
        char text[120];

        snprintf(text, sizeof(text),
                 "a copy of %zu bytes from %p to %p: outside what was "
                 "allocated",
                 bytes, from, to);
        sim_report(text);
        return cudaErrorIllegalAddress;
    }
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                enum cudaMemcpyKind kind, cudaStream_t stream)
{
    ENTER;
    sim_stream *queue = queue_of(stream);
    bool to_device, from_device;
    cudaError_t error;

    if (!queue)
        return failed(cudaErrorNoDevice);
    if (bytes == 0)
        return cudaSuccess;
    to_device = on_device(to);
    from_device = on_device(from);
    if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
        (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
        (kind == cudaMemcpyDeviceToDevice && !(to_device && from_device)))
        return failed(cudaErrorInvalidValue);
    if (!from_device && !sim_pinned(from, bytes) && !queue->capture) {
        auto copy = std::make_shared<std::vector<char>>(
            (const char *)from, (const char *)from + bytes);

        return enqueue(stream, [to, copy, bytes] {
            return copy_now(to, copy->data(), bytes);
        });
    }
    error = enqueue(stream,
                    [to, from, bytes] { return copy_now(to, from, bytes); });
    if (error == cudaSuccess && !to_device && !sim_pinned(to, bytes) &&
        !queue->capture)
        return failed(drain(queue));
    return error;
}

cudaError_t
cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, NULL);

    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

static cudaError_t
fill_now(void *at, int value, size_t bytes)
{
    if (!may_copy(at, bytes)) {
        char text[120];

        snprintf(text, sizeof(text),
                 "a memset of %zu bytes at %p: outside what was allocated",
                 bytes, at);
        sim_report(text);
        return cudaErrorIllegalAddress;
    }
    memset(at, value, bytes);
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream)
{
    ENTER;

    return enqueue(stream,
                   [at, value, bytes] { return fill_now(at, value, bytes); });
}

cudaError_t
cudaMemset(void *at, int value, size_t bytes)
{
    return cudaMemsetAsync(at, value, bytes, NULL);
}

cudaError_t
sim_enqueue_launch(cudaStream_t stream, dim3 grid, dim3 block,
                   size_t shared_bytes, const void *kernel, sim_call *call)
{
    ENTER;
    std::shared_ptr<sim_call> owned(call);
    sim_stream *queue = queue_of(stream);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;

    if (!queue)
        return failed(cudaErrorNoDevice);
    if (threads == 0 || threads > THREADS_MAX || block.z > 64 ||
        grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX ||
        grid.y > UINT16_MAX || grid.z > UINT16_MAX)
        return failed(cudaErrorInvalidConfiguration);
    if (shared_bytes > SHARED_MAX || threads % 32 != 0)
        return failed(cudaErrorInvalidValue);
    int device = queue->device;

    return enqueue(stream, [=] {
        struct sim_launch launch = { grid,   block,       shared_bytes,
                                     kernel, owned.get(), device,
                                     0 };

        if (seed != 0)
            launch.seed = seed + 0x1000003 * ++n_launches;
        return sim_run(&launch);
    });
}

/* ---- streams and events -------------------------------------------------------- */

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    ENTER;
    struct device *device = here();

    if (!device)
        return failed(cudaErrorNoDevice);
    if (device->sticky != cudaSuccess)
        return failed(device->sticky);
    *out = new sim_stream();
    (*out)->device = current_device;
    device->streams.push_back(*out);
    return cudaSuccess;
}

cudaError_t
cudaStreamCreate(cudaStream_t *out)
{
    return cudaStreamCreateWithFlags(out, cudaStreamDefault);
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    ENTER;
    cudaError_t error = drain(stream);
    std::vector<sim_stream *> &all = devices[stream->device].streams;

    for (size_t i = 0; i < all.size(); i++)
        if (all[i] == stream) {
            all.erase(all.begin() + (ptrdiff_t)i);
            break;
        }
    delete stream->capture;
    delete stream;
    return failed(error);
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    ENTER;
    sim_stream *queue = queue_of(stream);

    if (!queue)
        return failed(cudaErrorNoDevice);
    if (queue->capture) {
        queue->capture_broken = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return failed(drain(queue));
}

/* Each query sees one operation more done. */
cudaError_t
cudaStreamQuery(cudaStream_t stream)
{
    ENTER;
    sim_stream *queue = queue_of(stream);

    if (!queue)
        return failed(cudaErrorNoDevice);
    if (queue->waiting.empty())
        return failed(devices[queue->device].sticky);
    cudaError_t error = do_one(queue);

    return error == cudaSuccess ? cudaErrorNotReady : failed(error);
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new sim_event();
    return cudaSuccess;
}

cudaError_t
cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

/* None of its records may still be waiting; the backend waits for its streams
 * in front of this. */
cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    ENTER;

    if (event->stream && event->reached < event->recorded)
        drain(event->stream);
    delete event;
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    ENTER;
    uint64_t n = ++event->recorded;

    event->stream = queue_of(stream);
    return enqueue(stream, [event, n] {
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        event->reached = n;
        event->reached_ns = (uint64_t)now.tv_sec * 1000000000u +
                            (uint64_t)now.tv_nsec;
        return cudaSuccess;
    });
}

static cudaError_t
reach(cudaEvent_t event, uint64_t n)
{
    while (event->stream && event->reached < n &&
           !event->stream->waiting.empty())
        if (do_one(event->stream) != cudaSuccess)
            break;
    return event->stream ? devices[event->stream->device].sticky
                         : cudaSuccess;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    ENTER;

    return failed(reach(event, event->recorded));
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    ENTER;

    if (!event->stream || event->reached == event->recorded)
        return cudaSuccess;
    cudaError_t error = cudaStreamQuery(event->stream);

    if (error != cudaSuccess && error != cudaErrorNotReady)
        return error;
    return event->reached == event->recorded ? cudaSuccess
                                             : cudaErrorNotReady;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    ENTER;
    uint64_t n = event->recorded;

    return enqueue(stream, [event, n] { return reach(event, n); });
}

cudaError_t
cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    ENTER;

    if (from->reached < from->recorded || to->reached < to->recorded)
        return cudaErrorNotReady;
    *ms = (float)((double)(int64_t)(to->reached_ns - from->reached_ns) / 1e6);
    return cudaSuccess;
}

/* ---- graphs ------------------------------------------------------------------------- */

cudaError_t
cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode)
{
    ENTER;

    if (!stream || stream->capture)
        return failed(cudaErrorInvalidValue);
    stream->capture = new sim_graph();
    stream->capture_broken = false;
    return cudaSuccess;
}

cudaError_t
cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    ENTER;

    if (!stream || !stream->capture)
        return failed(cudaErrorInvalidValue);
    *out = stream->capture;
    stream->capture = NULL;
    if (stream->capture_broken) {
        delete *out;
        *out = NULL;
        return failed(cudaErrorStreamCaptureInvalidated);
    }
    return cudaSuccess;
}

cudaError_t
cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                     unsigned long long)
{
    ENTER;

    *out = new sim_graph(*graph);
    return cudaSuccess;
}

cudaError_t
cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    ENTER;
    cudaError_t error = cudaSuccess;

    for (const operation &op : graph->operations)
        if (error == cudaSuccess)
            error = enqueue(stream, op);
    return error;
}

cudaError_t
cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t
cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    delete graph;
    return cudaSuccess;
}
