// Rounding to 8 bits: scales, ties, NaN and infinity, and reductions over lanes.

#pragma once

#include "byte_products.h"
#include "simd.h"

namespace {

namespace bytes {

constexpr float TINY = 0x1p-100f;  // smaller values count as zero

// 127 / |largest| and the scale that goes with it. A row that holds NaN or infinity gets the scale NaN and zeros, so that
// all of its outputs are NaN and no others.
INLINE float inverse_scale(float largest, bool finite, float &scale) {
    scale = finite ? (largest < TINY ? 0.0f : largest * (1.0f / 127.0f)) : __builtin_nanf("");
    return finite && largest >= TINY ? 127.0f / largest : 0.0f;
}

// The nearest integers of x * by (even on a tie) for |x * by| < 2^22; zeros where by is 0, whatever x.
INLINE vi round_scaled(vf x, float by) {
    const vf magic = splat(12582912.0f);
    vu product = (vu)(x * by);
    hide(product);  // or it is fused with the addition where possible, and ties would differ between instruction sets
    const vi rounded = (vi)((vf)product + magic) - (vi)magic;
    return by == 0.0f ? vi{} : rounded;
}

// Lane i gets lane i + by, around the end.
template <int by> INLINE vi rotated_lanes() {
    vi from = {};
    for (int i = 0; i < W; i++) from[i] = (i + by) % W;
    return from;
}
template <int by = W / 2> INLINE uint32_t most_of(vu x) {
    const vu other = __builtin_shuffle(x, (vu)rotated_lanes<by>()), both = x > other ? x : other;
    if constexpr (by == 1) return both[0];
    else return most_of<by / 2>(both);
}
template <int by = W / 2> INLINE int32_t total_of(vi x) {
    const vi both = x + __builtin_shuffle(x, rotated_lanes<by>());
    if constexpr (by == 1) return both[0];
    else return total_of<by / 2>(both);
}

}  // namespace bytes

}  // namespace
