// Pairs of adjacent bfloat16 numbers in the lanes of a vector, and the sum of their two products with another such vector.
//
// The native instruction (WINDLASS_BF16) does twice the multiplications of float32. Products are exact, sums are float32, and
// subnormal numbers count as zero.

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
    bf16 narrow[W];
    store(narrow, x);
    return load_halves(narrow);
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
INLINE vu paired(vf first, vf second) {
#if defined(WINDLASS_BF16) && !defined(WINDLASS_PORTABLE)
    typedef uint16_t halves __attribute__((vector_size(4 * W)));
    constexpr halves TURNS = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vu)_mm512_permutexvar_epi16((__m512i)TURNS, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    return rounded_halves(first) | rounded_halves(second) << 16;
#endif
}
INLINE pair paired(float first, float second) {
    bf16 low, high;
    narrow(first, low), narrow(second, high);
    return {uint32_t(low.bits) | uint32_t(high.bits) << 16};
}

// Numbers per element of a product: one, or a pair.
template <class N> constexpr int NUMBERS = 1;
template <> constexpr int NUMBERS<pair> = 2;

}  // namespace
