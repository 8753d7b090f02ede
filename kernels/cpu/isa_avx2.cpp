// Kernels for x86-64 with AVX2, FMA and F16C (Haswell, Zen and later). Empty on other processors.

#if defined(__x86_64__)
#include <cstdint>
#include <cstdlib>

#include <immintrin.h>
#include <omp.h>

#pragma GCC target("avx2,fma,f16c")
#define WINDLASS_ISA avx2
#define WINDLASS_LANES 8
#define WINDLASS_REGISTERS 16
#define WINDLASS_F16C
#define WINDLASS_FMA
#include "kernels.h"
#endif
