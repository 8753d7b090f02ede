// Kernels for 64-bit ARM (ARMv8-A): NEON with fused products and float16 conversions.

#include "system_headers.h"

#if defined(__aarch64__)
#define WINDLASS_ISA neon
#define WINDLASS_LANES 4
#define WINDLASS_NEON
#include "kernels.h"
#endif
