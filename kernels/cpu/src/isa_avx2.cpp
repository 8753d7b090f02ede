// Kernels for x86-64 with AVX2, FMA and F16C (Haswell, Zen and later).

#include "system_headers.h"

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#if !defined(WINDLASS_PORTABLE)
#pragma GCC target("avx2,fma,f16c")
#endif
#define WINDLASS_ISA avx2
#define WINDLASS_LANES 8
#include "kernels.h"
#endif
