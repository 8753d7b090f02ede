// Sums of products of bytes and of int16, lane by lane, as each instruction set has them.
//
// Three forms. Pairs: bytes widened to int16, two products a lane, exact for all values (vpmaddwd). Bytes: vpmaddubsw, whose
// int16 sums saturate, only for weights of at most 6 bits: eight sums of two products of at most 15 * 127 reach 30,480, four
// of 31 * 127 31,496, two of 63 * 127 32,004. Quads:
// vpdpbusd. The last two need an unsigned factor, so one side has an offset, and the offset times the sum of the other side is
// subtracted. ARM multiplies signed bytes: quads by sdot, or by widening products of which two fit int16, and weights of 8 bits
// stay unchanged; with 4 bits widening products are accumulated in int16 like vpmaddubsw's. On processors
// with vpmaddwd alone 8 bits reach twice the float32 rate and no more: any way to split the bytes for vpmaddubsw costs as
// many instructions.

#pragma once

#include "simd.h"

namespace {
namespace bytes {

#if defined(WINDLASS_VNNI) || defined(WINDLASS_NEON)
#define WINDLASS_QUADS 1
#else
#define WINDLASS_QUADS 0
#endif
#if defined(WINDLASS_NEON) && !defined(WINDLASS_DOT)  // up to 6 bits, quads for 8 bits
#define WINDLASS_BYTES 1
#else
#define WINDLASS_BYTES (!WINDLASS_QUADS && WINDLASS_LANES >= 8)
#endif

typedef int16_t vs __attribute__((vector_size(4 * W)));
typedef uint16_t vus __attribute__((vector_size(4 * W)));
typedef uint8_t vub __attribute__((vector_size(4 * W)));
typedef vi vi_any __attribute__((aligned(4), may_alias));
typedef vub vub_any __attribute__((aligned(1), may_alias));

INLINE vub load_bytes(const void *p) { return *(const vub_any *)p; }
INLINE vi splat_int(int32_t x) { return x - vi{}; }
// Four bytes or two int16 of x in every lane.
INLINE vi spread(const void *p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return splat_int(x);
}

// Sums of two products of int16, lane by lane.
INLINE vi madd_pairs(vs a, vs b) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__SSE2__) && WINDLASS_LANES == 4
    return (vi)__builtin_ia32_pmaddwd128(a, b);
#else
    const vi x = (vi)a, y = (vi)b;
    return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// acc + madd_pairs(a, b). One piece, where there are instructions: apart, the compiler moves all products ahead of the
// additions and runs out of registers (measured: a third slower).
INLINE vi add_pairs(vi acc, vs a, vs b) {
#if defined(WINDLASS_AVX)
    vi products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(a), "v"(b));
    return acc;
#else
    return acc + madd_pairs(a, b);
#endif
}

#if defined(WINDLASS_NEON)
// As below: products of bytes 0 to 7 and of bytes 8 to 15, each on its own.
struct BytesSum { int16x8_t low, high; };
INLINE BytesSum add_bytes(BytesSum acc, vub a, vi b) {
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
    return {vmlal_s8(acc.low, vget_low_s8(x), vget_low_s8(y)), vmlal_high_s8(acc.high, x, y)};
}
INLINE BytesSum first_bytes(vub a, vi b) {
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
    return {vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)};
}
INLINE vi total_bytes(BytesSum x) { return (vi)vpaddlq_s16(vpaddq_s16(x.low, x.high)); }
#elif WINDLASS_BYTES
// acc plus sums of two products of a uint8 and an int8; the callers' values cannot saturate.
typedef vs BytesSum;
INLINE BytesSum add_bytes(BytesSum acc, vub a, vi b) {
#if defined(WINDLASS_AVX)
    vs products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(a), "v"(b));
    return acc;
#else
    const vus u = (vus)a;
    const vs s = (vs)b;
    return acc + (vs)(u & 0xff) * ((s << 8) >> 8) + (vs)(u >> 8) * (s >> 8);
#endif
}
// add_bytes to zero.
INLINE BytesSum first_bytes(vub a, vi b) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    return (vs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return (vs)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return add_bytes(BytesSum{}, a, b);
#endif
}
// The sums of the four bytes of every lane.
INLINE vi total_bytes(BytesSum x) { return madd_pairs(x, vs{} + 1); }
#endif

#if WINDLASS_QUADS
// acc plus the sum of four products, modulo 2^32, of a uint8 (int8 on ARM) and an int8. Two bytes of -128 in one lane of both
// may not meet: their products overflow int16 where there is no sdot.
INLINE vi add_quads(vi acc, vub a, vi b) {
#if defined(WINDLASS_DOT)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
#elif defined(WINDLASS_NEON)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
    return (vi)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, vmull_high_s8((int8x16_t)a, (int8x16_t)b)));
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    const vu u = (vu)a;
    for (int shift = 0; shift < 32; shift += 8) acc += (vi)((u >> shift) & 0xffu) * ((b << (24 - shift)) >> 24);
    return acc;
#endif
}
#endif

#if WINDLASS_QUADS
// Adds the products of a quad of W rows of the weight and of MT adjacent rows of x.
template <int MT> INLINE void add_rows(vi (&acc)[MT], vub weight, const uint8_t *x) {
#if defined(WINDLASS_DOT)
    if constexpr (MT == 4) {  // sdot takes a quad from any lane
        const int8x16_t w = (int8x16_t)weight, rows = vld1q_s8((const int8_t *)x);
        acc[0] = (vi)vdotq_laneq_s32((int32x4_t)acc[0], w, rows, 0);
        acc[1] = (vi)vdotq_laneq_s32((int32x4_t)acc[1], w, rows, 1);
        acc[2] = (vi)vdotq_laneq_s32((int32x4_t)acc[2], w, rows, 2);
        acc[3] = (vi)vdotq_laneq_s32((int32x4_t)acc[3], w, rows, 3);
        return;
    }
#endif
    for (int m = 0; m < MT; m++) acc[m] = add_quads(acc[m], weight, spread(x + 4 * m));
}
#endif

// What a weight of 8 bits carries in the product of quads, whose factor on its side is unsigned on x86.
#if defined(WINDLASS_NEON)
constexpr int BIAS = 0;
#else
constexpr int BIAS = 128;
#endif

}  // namespace bytes
}  // namespace
