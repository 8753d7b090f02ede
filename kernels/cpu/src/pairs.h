// Pairs of neighbouring bfloat16 numbers in the lanes of a vector, and the sum of their two products with another such vector.
//
// Where the processor has an instruction for it (WINDLASS_BF16) it does twice the multiplications of float32; products are exact
// and sums are float32. Subnormal numbers count as zero there.

#pragma once

#include "simd.h"

namespace {

struct pair { uint32_t bits; };  // the first number in the lower half

INLINE vu load(const pair *p) { return *(const vu_any *)p; }
INLINE vu splat(pair x) { return splat_bits(x.bits); }

// acc + a's first numbers * b's first + a's second * b's second.
INLINE vf add_product(vf acc, vu a, vu b) {
#if defined(WINDLASS_BF16) && !defined(WINDLASS_PORTABLE)
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#else
    acc = add_product(acc, (vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u));
    return add_product(acc, (vf)(a << 16), (vf)(b << 16));
#endif
}

// Rounded to nearest even, in the lower half of each lane.
INLINE vu rounded_halves(vf x) {
#if defined(WINDLASS_BF16) && !defined(WINDLASS_PORTABLE)
    return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    bf16 narrow[W];
    store(narrow, x);
    return load_halves(narrow);
#endif
}
// 2 * W neighbours, rounded, as W pairs.
INLINE void store_neighbours(pair *p, vf first, vf second) {
#if defined(WINDLASS_BF16) && !defined(WINDLASS_PORTABLE)
    *(vu_any *)p = (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    store((bf16 *)p, first), store((bf16 *)p + W, second);
#endif
}
// Lane by lane, the first number from one vector and the second from the other.
INLINE vu paired(vf first, vf second) { return rounded_halves(first) | rounded_halves(second) << 16; }
INLINE pair paired(float first, float second) {
    bf16 low, high;
    narrow(first, low), narrow(second, high);
    return {uint32_t(low.bits) | uint32_t(high.bits) << 16};
}

// What a product takes at once, one number or a pair of them.
template <class N> constexpr int NUMBERS = 1;
template <> constexpr int NUMBERS<pair> = 2;

}  // namespace
