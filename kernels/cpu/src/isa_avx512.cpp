// Kernels for x86-64 with AVX-512 F, BW, VL and DQ (Skylake-SP, Zen 4 and later).

#include "system_headers.h"

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#if !defined(WINDLASS_PORTABLE)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define WINDLASS_ISA avx512
#define WINDLASS_LANES 16
#include "kernels.h"
#endif
