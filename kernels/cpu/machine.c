#include "kernels/cpu/machine.h"

#include <cpuid.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From the kernel's x86 ABI; its header is newer than some we build on. */
enum { REQUEST_XSTATE_PERMISSION = 0x1023, XSTATE_TILE_DATA = 18 };

static const char *const names[N_ISA] = { "ref", "avx2", "avx512",
                                          "avx512bf16", "amx" };

const char *
isa_name(enum isa isa)
{
    return names[isa];
}

enum isa
isa_of_name(const char *name)
{
    enum isa isa = ISA_REF;

    while (isa < N_ISA && strcmp(name, names[isa]) != 0)
        isa++;
    return isa;
}

bool
isa_is_bf16(enum isa isa)
{
    return isa >= ISA_AVX512BF16;
}

/* By number what clang 14 has no name for. */
static bool
has_f16c(void)
{
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}

static bool
has_amx(void)
{
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    unsigned a, b, c, d;

    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) && (d & tile);
}

bool
machine_has(enum isa isa)
{
    __builtin_cpu_init();
    switch (isa) {
    case ISA_REF:
        return true;
    case ISA_AVX2:
        return __builtin_cpu_supports("avx2") &&
               __builtin_cpu_supports("fma") && has_f16c();
    case ISA_AVX512:
        return machine_has(ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
    case ISA_AVX512BF16:
        return machine_has(ISA_AVX512) && __builtin_cpu_supports("avx512bf16");
    case ISA_AMX:
        return machine_has(ISA_AVX512BF16) && has_amx() &&
               syscall(SYS_arch_prctl, REQUEST_XSTATE_PERMISSION,
                       XSTATE_TILE_DATA) == 0;
    case N_ISA:
        break;
    }
    return false;
}

const char *
machine_list(char *out, size_t size)
{
    size_t used = 0;

    out[0] = '\0';
    for (enum isa isa = ISA_REF; isa < N_ISA && used < size; isa++)
        if (machine_has(isa))
            used += (size_t)snprintf(out + used, size - used, "%s%s",
                                     used ? ", " : "", names[isa]);
    return out;
}

/* Reads a small file of the kernel's as text. */
static bool
read_text(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    size_t n;

    if (!file)
        return false;
    n = fread(out, 1, size - 1, file);
    out[n] = '\0';
    fclose(file);
    return n > 0;
}

static uint32_t
quota_of_group(const char *root, const char *group)
{
    unsigned long long quota, period;
    char path[4096 + 256], text[128];

    snprintf(path, sizeof(path), "%s%s/cpu.max", root, group);
    if (!read_text(path, text, sizeof(text)) ||
        sscanf(text, "%llu %llu", &quota, &period) != 2 || period == 0 ||
        quota == 0)
        return UINT32_MAX; /* no such file, or "max" */
    quota = (quota + period - 1) / period;
    return quota < UINT32_MAX ? (uint32_t)quota : UINT32_MAX;
}

uint32_t
machine_quota(const char *self, const char *root)
{
    uint32_t least = UINT32_MAX;
    char text[4096];
    char *group, *end;

    if (!read_text(self, text, sizeof(text)))
        return least;
    group = strncmp(text, "0::", 3) == 0 ? text : strstr(text, "\n0::");
    if (!group)
        return least; /* the first version of control groups alone */
    group = strstr(group, "::") + 2;
    end = strchr(group, '\n');
    if (end)
        *end = '\0';

    for (;;) { /* a parent's quota binds its children */
        uint32_t quota = quota_of_group(root, group);

        if (quota < least)
            least = quota;
        end = strrchr(group, '/');
        if (!end)
            return least;
        *end = '\0';
    }
}

uint32_t
machine_threads(void)
{
    uint32_t n = 0, quota;
    cpu_set_t *set;
    size_t size;

    /* The kernel refuses a set that is too small for it: grow until it fits. */
    for (int n_cpus = 1024; n == 0 && n_cpus <= 1 << 20; n_cpus *= 2) {
        set = CPU_ALLOC((size_t)n_cpus);
        if (!set)
            break;
        size = CPU_ALLOC_SIZE((size_t)n_cpus);
        if (sched_getaffinity(0, size, set) == 0)
            n = (uint32_t)CPU_COUNT_S(size, set);
        CPU_FREE(set);
    }
    quota = machine_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    if (n > quota)
        n = quota;
    return n > 0 ? n : 1;
}

uint64_t
machine_available_bytes(void)
{
    static const char key[] = "MemAvailable:";
    unsigned long long kib;
    char text[4096];
    const char *at;

    if (!read_text("/proc/meminfo", text, sizeof(text)))
        return UINT64_MAX;
    at = strstr(text, key);
    if (!at || sscanf(at + sizeof(key) - 1, "%llu", &kib) != 1)
        return UINT64_MAX;
    return (uint64_t)kib * 1024;
}
