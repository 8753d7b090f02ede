// Block weights in memory: unpacking the codes of a quad from a group's lines, and the scales of a panel as float32.
//
// The layout is that of kernels/layouts/weight_layouts.py: panels of 16 rows, groups of K, lines of 64 bytes with one byte for each
// of four adjacent elements (a quad) of each row. 8 bits: a line is a quad, signed. Fewer bits: line j holds quads 2j and 2j + 1 in
// the halves of its bytes, and bits above the fourth are in the following lines.

#pragma once

#include "byte_products.h"
#include "simd.h"

// Unrolls a loop over quads, so that shifts are constants; not in portable test builds, which compile faster without.
#if defined(WINDLASS_PORTABLE)
#define WINDLASS_UNROLL
#else
#define WINDLASS_UNROLL _Pragma("GCC unroll 8")
#endif

namespace {
namespace blocks {

using namespace bytes;

constexpr long PANEL = 16;             // rows of the weight side by side
constexpr int V = PANEL / W;           // vectors per panel
constexpr long QUAD_BYTES = 4 * PANEL;

// Compile-time description of a form.
template <int BITS_, int GROUP_, bool MINIMUM_> struct Form {
    static constexpr int BITS = BITS_;
    static constexpr int GROUP = GROUP_;      // elements of K under one scale
    static constexpr bool MINIMUM = MINIMUM_;
    static constexpr int QUADS = GROUP / 4;
    static constexpr int PARTS = MINIMUM ? 2 : 1;
    static constexpr int UPPER = BITS - 4;    // bits of a code in the later lines
    static constexpr long STORED_BYTES = GROUP * BITS * PANEL / 8;  // of a group
    // How products are formed (byte_products.h), and how many quads int16 sums can take: at most 2 * 8 * 15 * 127, and so on.
    static constexpr bool BYTES = WINDLASS_BYTES && BITS < 8, PAIRS = !BYTES && !WINDLASS_QUADS;
    static constexpr int RUN = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
    static constexpr long X = PAIRS ? 2 : 1;  // bytes of an element of rounded x: int16 pairs in the order 0 2 1 3
    static constexpr int CARRIED = BITS == 8 && !PAIRS ? BIAS : 0;  // offset of a code from its value in the product
    // Unpacked once for many tiles; codes of 4 and 8 bits are faster in place where quads are multiplied.
    static constexpr bool UNPACKS = !WINDLASS_QUADS || UPPER == 1 || UPPER == 2;
    static constexpr long READY_BYTES = GROUP * PANEL * X;
};

// A weight [N, K] and its form as numbers.
struct BlockWeight {
    const uint8_t *codes;  // [panels, groups, lines, 16, 4]
    const void *scales;    // [panels, groups, parts, 16]: float16, or bytes where there are super groups
    const f16 *supers;     // [panels, super groups, parts, 16]
    int bits, group, super_groups, minimum, offset;
    long N, K;

    INLINE_MEMBER long groups() const { return ceil_div(K, group); }
    INLINE_MEMBER int parts() const { return minimum ? 2 : 1; }
};

// f(form) for the form of this weight, which returns 0 or an error code; 2 for an unsupported form.
template <class F> INLINE int with_form(const BlockWeight &w, const F &f) {
    if (w.bits == 4 && w.group == 32) return w.minimum ? f(Form<4, 32, true>()) : f(Form<4, 32, false>());
    if (w.bits == 5 && w.group == 32) return w.minimum ? f(Form<5, 32, true>()) : f(Form<5, 32, false>());
    if (w.bits == 6 && w.group == 16 && !w.minimum) return f(Form<6, 16, false>());
    if (w.bits == 8 && w.group == 32 && !w.minimum && !w.offset) return f(Form<8, 32, false>());
    return 2;
}

// Scales under super scales: with minima both are bytes without a sign.
template <bool MINIMUM> struct ByteOf { typedef int8_t type; };
template <> struct ByteOf<true> { typedef uint8_t type; };

INLINE vs even_bytes(vub w, bool is_signed) { return is_signed ? ((vs)w << 8) >> 8 : (vs)((vus)w & 0xff); }
INLINE vs odd_bytes(vub w, bool is_signed) { return is_signed ? (vs)w >> 8 : (vs)((vus)w >> 8); }

// Codes of quad q of W rows. group: its lines, from those rows on.
template <class F> INLINE vub unpack_codes(const uint8_t *group, int q) {
    if constexpr (F::BITS == 8) return load_bytes(group + q * QUAD_BYTES);
    else {
        const vub both = load_bytes(group + q / 2 * QUAD_BYTES);
        vub code = q % 2 ? (vub)((vus)both >> 4) & 0x0f : both & 0x0f;
        if constexpr (F::UPPER > 0) {
            constexpr int EACH = 8 / F::UPPER;  // quads of a line
            const vus upper = (vus)load_bytes(group + (F::QUADS / 2 + q / EACH) * QUAD_BYTES);
            const int from = q % EACH * F::UPPER;
            const vus moved = from < 4 ? upper << (4 - from) : upper >> (from - 4);  // crosses byte borders, which the mask removes
            code |= (vub)moved & uint8_t(((1 << F::UPPER) - 1) << 4);
        }
        return code;
    }
}

// Groups of a panel, unpacked for products with many tiles: per quad one line of bytes, or two of int16.
template <class F> static void make_ready(const uint8_t *stored, long groups, uint8_t *ready) {
    for (long g = 0; g < groups; g++, stored += F::STORED_BYTES) {
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++, ready += QUAD_BYTES * F::X) {
            for (int v = 0; v < V; v++) {
                const vub w = unpack_codes<F>(stored + v * 4 * W, q);
                if constexpr (F::PAIRS) {
                    *(vub_any *)(ready + 2 * v * 4 * W) = (vub)even_bytes(w, F::BITS == 8);
                    *(vub_any *)(ready + (2 * v + 1) * 4 * W) = (vub)odd_bytes(w, F::BITS == 8);
                } else *(vub_any *)(ready + v * 4 * W) = w;
            }
        }
    }
}

// Groups under super scales, of which only whole runs have one in common; scales are bytes of type T. Products are exact.
template <class T, int PARTS>
INLINE void widen_bytes(const BlockWeight &w, long panel, long first, long end, float *to) {
    const long groups = w.groups(), supers = ceil_div(groups, w.super_groups);
    const T *byte = (const T *)w.scales + (panel * groups + first) * PARTS * PANEL;
    for (long g = first, run = first / w.super_groups; g < end; run++) {
        const f16 *super = w.supers + (panel * supers + run) * PARTS * PANEL;
        vf by[PARTS * V];
        for (int i = 0; i < PARTS * V; i++) by[i] = i < V ? load(super + i * W) : -load(super + i * W);
        for (const long stop = min_of((run + 1) * w.super_groups, end); g < stop; g++)
            for (int i = 0; i < PARTS * V; i++, byte += W, to += W) store(to, load(byte) * by[i]);
    }
}

// Final scales (and minima) of groups first .. end of a panel: to[end - first][parts][16].
static NOINLINE void widen_scales(const BlockWeight &w, long panel, long first, long end, float *to) {
    if (w.super_groups) {
        if (w.minimum) widen_bytes<uint8_t, 2>(w, panel, first, end, to);
        else widen_bytes<int8_t, 1>(w, panel, first, end, to);
        return;
    }
    const long each = w.parts() * PANEL;
    const f16 *from = (const f16 *)w.scales + (panel * w.groups() + first) * each;
    for (long i = 0; i < (end - first) * each; i += W) store(to + i, load(from + i));
}

}  // namespace blocks
}  // namespace
