// The instruction set of a unit, from -DWINDLASS_ISA=<name>: number of lanes, instructions, and the compiler's target.
//
// kernels/cpu/build.py compiles each unit_*.cpp once for each set that it builds.

#pragma once

#include "system_headers.h"

#define WINDLASS_LEVEL_generic 0
#define WINDLASS_LEVEL_avx2 1         // with FMA and F16C: Haswell, Zen and later
#define WINDLASS_LEVEL_avx2_vnni 2    // Alder Lake and later
#define WINDLASS_LEVEL_avx512 3       // Skylake-X and later
#define WINDLASS_LEVEL_avx512_vnni 4  // Cascade Lake, Zen 4 and later
#define WINDLASS_LEVEL_avx512_bf16 5  // Cooper Lake, Zen 4 and later
#define WINDLASS_LEVEL_avx512_amx 6   // Sapphire Rapids and later
#define WINDLASS_LEVEL_neon 7         // 64-bit ARM
#define WINDLASS_LEVEL_neon_dot 8     // with sdot: optional from ARMv8.2, so Neoverse N1, Apple M1 and later
#define WINDLASS_LEVEL_OF_(isa) WINDLASS_LEVEL_##isa
#define WINDLASS_LEVEL_OF(isa) WINDLASS_LEVEL_OF_(isa)
#define WINDLASS_LEVEL WINDLASS_LEVEL_OF(WINDLASS_ISA)

#if WINDLASS_LEVEL == 0
#define WINDLASS_LANES 4  // the compiler lowers the vectors to the base instruction set
#elif WINDLASS_LEVEL <= 2
#define WINDLASS_LANES 8
#elif WINDLASS_LEVEL <= 6
#define WINDLASS_LANES 16
#else
#define WINDLASS_LANES 4
#define WINDLASS_NEON
#endif

#if WINDLASS_LEVEL == 2 || (WINDLASS_LEVEL >= 4 && WINDLASS_LEVEL <= 6)
#define WINDLASS_VNNI
#endif
#if WINDLASS_LEVEL == 5 || WINDLASS_LEVEL == 6
#define WINDLASS_BF16
#endif
#if WINDLASS_LEVEL == 6
#define WINDLASS_AMX
#endif
#if WINDLASS_LEVEL == 8
#define WINDLASS_DOT
#endif

#if defined(WINDLASS_PORTABLE)
#elif WINDLASS_LEVEL == 1
#pragma GCC target("avx2,fma,f16c")
#elif WINDLASS_LEVEL == 2
#pragma GCC target("avx2,fma,f16c,avxvnni")
#elif WINDLASS_LEVEL == 3
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#elif WINDLASS_LEVEL == 4
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#elif WINDLASS_LEVEL == 5 || WINDLASS_LEVEL == 6
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#elif WINDLASS_LEVEL == 8
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
