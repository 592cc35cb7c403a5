/* machine.h - what this processor has and how much of it we may use. */
#ifndef NS_KERNELS_CPU_MACHINE_H
#define NS_KERNELS_CPU_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum isa { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_AVX512BF16, ISA_AMX, N_ISA };

const char *isa_name(enum isa isa);
/* N_ISA if there is none of that name. */
enum isa isa_of_name(const char *name);
/* Whether bf16 products are what it is for. */
bool isa_is_bf16(enum isa isa);

/* Whether processor and kernel have it. Asks the kernel for the tile state of
 * AMX, which from then on every new thread of the process has. */
bool machine_has(enum isa isa);
/* "ref, avx2, avx512" into `out`. Returns `out`. */
const char *machine_list(char *out, size_t size);

/* Processors that this process may run on, or whole processors of the control
 * group's quota if those are fewer. At least 1. */
uint32_t machine_threads(void);

/* The quota's part, with /proc/self/cgroup and /sys/fs/cgroup given by name so
 * that a test can make its own: the smallest quota on the way up from the
 * process's group, rounded up to processors; UINT32_MAX if there is none. */
uint32_t machine_quota(const char *self, const char *root);

/* Bytes that can be had without swapping; UINT64_MAX if unknown. */
uint64_t machine_available_bytes(void);

#endif
