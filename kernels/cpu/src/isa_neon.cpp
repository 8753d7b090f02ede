// Kernels for 64-bit ARM (ARMv8-A): NEON with fused products and float16 conversions. Empty on other processors.

#if defined(__aarch64__)
#include <cstdint>
#include <cstdlib>

#include <arm_neon.h>
#include <omp.h>
#include <sched.h>

#define WINDLASS_ISA neon
#define WINDLASS_LANES 4
#define WINDLASS_REGISTERS 32
#define WINDLASS_NEON
#include "kernels.h"
#endif
