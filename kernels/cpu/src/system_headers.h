// The headers of the system and the compiler. Every isa_*.cpp includes them before it names its instructions: one of their inline
// functions compiled for AVX could be the copy that the linker keeps for all files. So no other header includes any.
//
// WINDLASS_PORTABLE builds the code of an instruction set without its instructions, so that any processor can test it.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include <omp.h>
#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && !defined(WINDLASS_PORTABLE)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(WINDLASS_PORTABLE)
#include <arm_neon.h>
#endif
