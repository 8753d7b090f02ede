// Rows of a block weight as float32, for embedding lookups and for products without rounding.

#pragma once

#include "block_codes.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace blocks {

INLINE uint32_t load_word(const uint8_t *p) {
    uint32_t word;
    __builtin_memcpy(&word, p, 4);
    return word;
}

// The codes of a group of one row, in order. group: its lines, from that row on.
static void spread_codes(const uint8_t *group, int bits, int quads, uint8_t *codes) {
    for (int q = 0; q < quads; q++) {
        uint32_t word = load_word(group + (bits == 8 ? q : q / 2) * QUAD_BYTES);
        if (bits < 8) word = (q % 2 ? word >> 4 : word) & 0x0f0f0f0fu;
        if (bits > 4 && bits < 8) {
            const int width = bits - 4, each = 8 / width;
            const uint32_t upper = load_word(group + (quads / 2 + q / each) * QUAD_BYTES) >> q % each * width;
            word |= (upper & (width == 1 ? 0x01010101u : 0x03030303u)) << 4;
        }
        __builtin_memcpy(codes + 4 * q, &word, 4);
    }
}

static void widen_one(const BlockWeight &w, long row, float factor, float *out) {
    const long panel = row / PANEL, lane = row % PANEL, groups = w.groups(), parts = w.parts();
    const long supers = w.super_groups ? ceil_div(groups, w.super_groups) : 0, stored = w.group * w.bits * PANEL / 8;
    const int steps = w.group / W;
    for (long g = 0; g < groups; g++) {
        float scale[2] = {};
        for (long part = 0; part < parts; part++) {
            const long at = ((panel * groups + g) * parts + part) * PANEL + lane;
            if (!w.super_groups) scale[part] = widen(((const f16 *)w.scales)[at]);
            else {
                const float own = w.minimum ? ((const uint8_t *)w.scales)[at] : ((const int8_t *)w.scales)[at];
                const float super = widen(w.supers[((panel * supers + g / w.super_groups) * parts + part) * PANEL + lane]);
                scale[part] = (part ? -super : super) * own;  // exact
            }
        }
        uint8_t codes[64];
        spread_codes(w.codes + (panel * groups + g) * stored + lane * 4, w.bits, w.group / 4, codes);
        for (int i = 0; i < steps; i++) {
            const long k = g * w.group + i * W;
            if (k >= w.K) break;
            const vf code = w.bits == 8 ? load((const int8_t *)codes + i * W) : load(codes + i * W);
            vf y = (code - float(w.offset)) * scale[0];
            if (w.minimum) y = rounded(y) + scale[1];  // every product and sum is rounded separately, as in BlockWeight.dequantize
            y = rounded(y) * factor;
            store_part(out + k, y, w.K - k);
        }
    }
}

// Rows ids[i], or first + i if ids is null, times a factor: out [rows, K], contiguous. The weight as in `linear_blocks`. Returns 1
// for an id outside the table; nothing is written then.
EXPORT int WINDLASS_NAME(dequantize_blocks)(const uint8_t *codes, const void *scales, const void *supers, int bits, int group,
                                       int super_groups, int minimum, int offset, const int64_t *ids, long first, float factor,
                                       float *out, long rows, long N, long K) {
    const BlockWeight weight = {codes, scales, (const f16 *)supers, bits, group, super_groups, minimum, offset, N, K};
    for (long i = 0; i < rows; i++) {
        const long row = ids ? ids[i] : first + i;
        if (row < 0 || row >= N) return 1;
    }
    const long threads = threads_for(rows * K, rows);
    for_units(rows, threads, [&](long i) { widen_one(weight, ids ? ids[i] : first + i, factor, out + i * K); });
    return 0;
}
RECORDABLE(dequantize_blocks)

}  // namespace blocks
}  // namespace
