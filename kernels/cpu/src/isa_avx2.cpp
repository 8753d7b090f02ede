// Kernels for x86-64 with AVX2, FMA and F16C (Haswell, Zen and later). Empty on other processors.
// WINDLASS_PORTABLE builds the same 8-lane code without the instructions, so that any processor can test it.

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#include <cstdint>
#include <cstdlib>

#include <omp.h>
#include <sched.h>

#if !defined(WINDLASS_PORTABLE)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#define WINDLASS_F16C
#define WINDLASS_FMA
#endif
#define WINDLASS_ISA avx2
#define WINDLASS_LANES 8
#define WINDLASS_REGISTERS 16
#include "kernels.h"
#endif
