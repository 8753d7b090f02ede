// Repacks blocks of GGUF files into panels: bytes are reordered, nothing is rounded.
//
// Panels (kernels/layouts/weight_layouts.py) have 16 rows and contain the groups of K in order. A group has lines of 64 bytes with
// one byte for each of four adjacent elements (a quad) of each of the 16 rows. The bit layout of files is ggml's (ggml-common.h).

#pragma once

#include "simd.h"
#include "work_split.h"

namespace {
namespace filling {

constexpr long PANEL_ROWS = 16, LINE_BYTES = 64;
constexpr long ALONE = 1 << 21;  // elements repacked by one thread: a few milliseconds, while others read the next weight

// Addresses of the parts of a weight. scales: float16, or bytes if there are supers.
struct Blocks {
    uint8_t *codes, *scales;
    uint16_t *supers;
};

// ---- the kinds of blocks: codes to bytes, and what else a block holds ----

// The lower halves of `count` bytes, then their upper halves.
INLINE void halves_apart(const uint8_t *from, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = from[i] & 0x0f;
    for (int i = 0; i < count; i++) codes[count + i] = from[i] >> 4;
}

// BITS of a code, GROUP elements under a scale, GROUPS in a block, PARTS: a scale, or a scale and a minimum.
template <int bits, int parts> struct SimpleBlock {
    static constexpr int BITS = bits, GROUP = 32, GROUPS = 1, PARTS = parts;
    static constexpr bool SUPERS = false;
    static constexpr int FIRST = 2 * PARTS, BYTES = FIRST + GROUP * BITS / 8;
    static void read_codes(const uint8_t *block, uint8_t *codes) {
        if constexpr (BITS == 8) {
            __builtin_memcpy(codes, block + FIRST, GROUP);
        } else if constexpr (BITS == 4) {
            halves_apart(block + FIRST, 16, codes);
        } else {
            halves_apart(block + FIRST + 4, 16, codes);
            uint32_t upper;  // bit i is the fifth of code i
            __builtin_memcpy(&upper, block + FIRST, 4);
            for (int i = 0; i < GROUP; i++) codes[i] |= (upper >> i & 1) << 4;
        }
    }
    static int scale_byte(const uint8_t *, int, int) { return 0; }
    static const uint8_t *floats(const uint8_t *block) { return block; }
};

template <int bits> struct SuperBlock {
    static constexpr int BITS = bits, GROUP = 32, GROUPS = 8, PARTS = 2;
    static constexpr bool SUPERS = true;
    static constexpr int BYTES = 16 + GROUP * GROUPS * BITS / 8;
    static void read_codes(const uint8_t *block, uint8_t *codes) {
        const uint8_t *upper = block + 16, *lower = upper + (BITS == 5 ? 32 : 0);
        for (int pair = 0; pair < GROUPS / 2; pair++) halves_apart(lower + 32 * pair, 32, codes + 64 * pair);
        if constexpr (BITS == 5)  // bit g of byte i is the fifth of code i of group g
            for (int g = 0; g < GROUPS; g++)
                for (int i = 0; i < GROUP; i++) codes[GROUP * g + i] |= (upper[i] >> g & 1) << 4;
    }
    // Of six bits: the first four scales and minima are the lower bits of eight bytes. The others have their lower four bits
    // in the halves of four more, and their upper two at the top of the first eight.
    static int scale_byte(const uint8_t *block, int group, int part) {
        const uint8_t *packed = block + 4;
        if (group < 4) return packed[4 * part + group] & 0x3f;
        return (packed[4 + group] >> (4 * part) & 0x0f) | packed[4 * part + group - 4] >> 6 << 4;
    }
    static const uint8_t *floats(const uint8_t *block) { return block; }
};

struct SixBitBlock {
    static constexpr int BITS = 6, GROUP = 16, GROUPS = 16, PARTS = 1;
    static constexpr bool SUPERS = true;
    static constexpr int BYTES = 210;
    static void read_codes(const uint8_t *block, uint8_t *codes) {
        for (int half = 0; half < 2; half++, codes += 128) {
            const uint8_t *upper = block + 128 + 32 * half;
            halves_apart(block + 64 * half, 64, codes);
            for (int part = 0; part < 4; part++)  // bits 2p and 2p + 1 of byte i belong to code 32p + i
                for (int i = 0; i < 32; i++) codes[32 * part + i] |= (upper[i] >> (2 * part) & 3) << 4;
        }
    }
    static int scale_byte(const uint8_t *block, int group, int) { return block[192 + group]; }
    static const uint8_t *floats(const uint8_t *block) { return block + 208; }
};

// Codes of one group of one row into its lines.
template <int BITS, int GROUP> INLINE void write_codes(const uint8_t *codes, uint8_t *lines) {
    constexpr int QUADS = GROUP / 4;
    uint32_t quads[QUADS];
    __builtin_memcpy(quads, codes, sizeof quads);
    if constexpr (BITS == 8) {
        for (int q = 0; q < QUADS; q++) __builtin_memcpy(lines + q * LINE_BYTES, &quads[q], 4);
    } else {
        for (int j = 0; j < QUADS / 2; j++) {
            const uint32_t word = (quads[2 * j] & 0x0f0f0f0fu) | (quads[2 * j + 1] & 0x0f0f0f0fu) << 4;
            __builtin_memcpy(lines + j * LINE_BYTES, &word, 4);
        }
        if constexpr (BITS > 4) {  // one line more holds the upper bits of all quads
            constexpr int WIDTH = BITS - 4;
            static_assert(QUADS * WIDTH == 8, "upper bits fill a line");
            uint32_t word = 0;
            for (int q = 0; q < QUADS; q++) word |= (quads[q] >> 4 & (BITS == 5 ? 0x01010101u : 0x03030303u)) << (q * WIDTH);
            __builtin_memcpy(lines + QUADS / 2 * LINE_BYTES, &word, 4);
        }
    }
}

// Rows [begin, end) of one panel; `blocks` is the first of them. A block at a time, whose lines stay in L1 for all rows.
template <class B>
static void repack_panel(const uint8_t *blocks, long stride, long begin, long end, long count, const Blocks &to) {
    constexpr long GROUP_BYTES = B::GROUP * B::BITS / 8 * PANEL_ROWS;
    for (long b = 0; b < count; b++) {
        for (long row = begin; row < end; row++) {
            const uint8_t *block = blocks + (row - begin) * stride + b * B::BYTES;
            uint8_t codes[B::GROUP * B::GROUPS];
            B::read_codes(block, codes);
            for (long g = 0; g < B::GROUPS; g++)
                write_codes<B::BITS, B::GROUP>(codes + g * B::GROUP, to.codes + (b * B::GROUPS + g) * GROUP_BYTES + 4 * row);
            for (long part = 0; part < B::PARTS; part++) {
                const long place = (b * B::PARTS + part) * PANEL_ROWS + row;
                const uint8_t *half = B::floats(block) + 2 * part;
                if constexpr (B::SUPERS) {
                    for (long g = 0; g < B::GROUPS; g++)
                        to.scales[((b * B::GROUPS + g) * B::PARTS + part) * PANEL_ROWS + row] = B::scale_byte(block, g, part);
                    __builtin_memcpy(to.supers + place, half, 2);
                } else {
                    __builtin_memcpy(to.scales + 2 * place, half, 2);
                }
            }
        }
    }
}

template <class B>
static void repack_rows(const uint8_t *blocks, long stride, long first, long count, long K, const Blocks &to) {
    const long row_blocks = K / (B::GROUP * B::GROUPS), groups = row_blocks * B::GROUPS;
    const long begin = first / PANEL_ROWS, end = ceil_div(first + count, PANEL_ROWS);
    const long threads = count * K < ALONE ? 1 : threads_for(count * K, end - begin);
    // Full panels, so that threads do not write to a common cache line.
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (long panel = begin; panel < end; panel++) {
        const long start = panel * PANEL_ROWS, from = max_of(first, start), stop = min_of(first + count, start + PANEL_ROWS);
        const Blocks own = {
            to.codes + panel * groups * (B::GROUP * B::BITS / 8) * PANEL_ROWS,
            to.scales + panel * groups * B::PARTS * PANEL_ROWS * (B::SUPERS ? 1 : 2),
            B::SUPERS ? to.supers + panel * row_blocks * B::PARTS * PANEL_ROWS : nullptr,
        };
        repack_panel<B>(blocks + (from - first) * stride, stride, from - start, stop - start, row_blocks, own);
    }
}

// Rows [first, first + count) of a weight from the blocks of a file, `stride` bytes per row. kind: index of the form's name in FORMS
// (weight_layouts.py). K: a multiple of the block size. Returns 1 for an unknown kind.
EXPORT int WINDLASS_NAME(repack_blocks)(const uint8_t *blocks, long stride, int kind, long first, long count, long K,
                                        uint8_t *codes, uint8_t *scales, uint16_t *supers) {
    const Blocks to = {codes, scales, supers};
    switch (kind) {
    case 0: repack_rows<SimpleBlock<4, 1>>(blocks, stride, first, count, K, to); return 0;
    case 1: repack_rows<SimpleBlock<4, 2>>(blocks, stride, first, count, K, to); return 0;
    case 2: repack_rows<SimpleBlock<5, 1>>(blocks, stride, first, count, K, to); return 0;
    case 3: repack_rows<SimpleBlock<5, 2>>(blocks, stride, first, count, K, to); return 0;
    case 4: repack_rows<SimpleBlock<8, 1>>(blocks, stride, first, count, K, to); return 0;
    case 5: repack_rows<SuperBlock<4>>(blocks, stride, first, count, K, to); return 0;
    case 6: repack_rows<SuperBlock<5>>(blocks, stride, first, count, K, to); return 0;
    case 7: repack_rows<SixBitBlock>(blocks, stride, first, count, K, to); return 0;
    default: return 1;
    }
}

}  // namespace filling
}  // namespace
