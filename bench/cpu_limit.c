/* cpu_limit.c - prints the machine's limits, one JSON line each, for one thread
 * and for all.
 *
 *     build/bench/cpu_limit [THREADS]
 */
#include <stdio.h>

#include "bench/limit.h"

int
main(int argc, char **argv)
{
    static const struct {
        enum limit limit;
        const char *what, *unit;
    } lines[] = {
        { LIMIT_AVX2, "avx2_fp32", "gflops" },
        { LIMIT_AVX512, "avx512_fp32", "gflops" },
        { LIMIT_BF16, "avx512_bf16", "gflops" },
        { LIMIT_AMX, "amx_bf16", "gflops" },
        { LIMIT_READ, "read", "gbs" },
    };
    uint32_t all = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10)
                            : machine_threads();

    for (uint32_t n = 1; n <= all; n = n < all ? all : n + 1)
        for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
            double rate = cpu_limit(lines[i].limit, n);

            if (rate > 0)
                printf("{\"kind\":\"limit\",\"what\":\"%s\","
                       "\"threads\":%u,\"%s\":%.1f}\n",
                       lines[i].what, n, lines[i].unit, rate);
        }
    return 0;
}
