// Kernels for x86-64 with AVX-512 F, BW, VL and DQ (Skylake-SP, Zen 4 and later). Empty on other processors.
// WINDLASS_PORTABLE builds the same 16-lane code without the instructions, so that any processor can test it.

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#include <cstdint>
#include <cstdlib>

#include <omp.h>
#include <sched.h>

#if !defined(WINDLASS_PORTABLE)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define WINDLASS_F16C
#define WINDLASS_FMA
#endif
#define WINDLASS_ISA avx512
#define WINDLASS_LANES 16
#define WINDLASS_REGISTERS 32
#include "kernels.h"
#endif
