// Kernels for any processor: the compiler lowers the vectors to whatever the base instruction set has.
// Also tells which of the other instruction sets this processor can run.

#include <cstdint>
#include <cstdlib>

#include <omp.h>

#define WINDLASS_ISA generic
#define WINDLASS_LANES 4
#if defined(__aarch64__)
#define WINDLASS_REGISTERS 32
#else
#define WINDLASS_REGISTERS 16
#endif
#include "kernels.h"

// level: 0 generic, 1 avx2, 2 avx2_vnni, 3 avx512, 4 avx512_vnni.
EXPORT int windlass_can_run(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (level == 1) return avx2;
    if (level == 2) return avx2 && __builtin_cpu_supports("avxvnni");
    if (level == 3) return avx512;
    if (level == 4) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return level == 0;
}
