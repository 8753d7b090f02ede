// Products with weights of 8 and 4 bits for x86-64 with AVX-VNNI (Alder Lake and later): the rest is isa_avx2.cpp's.

#if defined(__x86_64__)
#include <cstdint>
#include <cstdlib>

#include <omp.h>

#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define WINDLASS_F16C
#define WINDLASS_FMA
#define WINDLASS_ISA avx2_vnni
#define WINDLASS_LANES 8
#define WINDLASS_REGISTERS 16
#define WINDLASS_VNNI
#include "names.h"

namespace {
#include "simd.h"
#include "tiles.h"
#include "quantized.h"
}  // namespace
#endif
