// Layouts of int8 pages, as in kernels/layouts/kv_pages.py.
//
// CodePages: the codes of one head and block are contiguous. Keys: 64 bytes hold four dims (a quad) of 16 tokens. Values: 64 bytes
// hold 16 dims of four tokens. So a vector of W lanes holds a quad of W tokens, or W dims of four tokens, and nothing crosses lanes.
// Scales are stored per token.
//
// Latent rows (CodeRow): int8 codes with a float32 scale for every 32 numbers, [slot][kv head] both, for latent attention. A row is
// key and value at once, and is converted to floats once for all heads that attend it.

#pragma once

#include "simd.h"

namespace {

constexpr long PANEL_TOKENS = 16;  // adjacent in the keys
constexpr long QUAD = 4;
constexpr long PIECE = PANEL_TOKENS * QUAD;  // bytes of one quad of a panel's keys

// Whether pages of these elements have the layout of CodePages.
template <class T> constexpr bool IN_PANELS = false;
template <> constexpr bool IN_PANELS<int8_t> = true;

struct CodePages {
    int8_t *keys, *values;
    float *key_scales, *value_scales;
    long block_size, kv_heads, quads, value_dim;  // quads: of a key

    // Tokens before the first one of a head in a block.
    INLINE_MEMBER long tokens(long block, long head) const { return (block * kv_heads + head) * block_size; }
    // Quad q of panel token / 16 is at this + q * PIECE, token by token.
    INLINE_MEMBER int8_t *key_panel(long block, long head, long token) const {
        return keys + (tokens(block, head) + token / PANEL_TOKENS * PANEL_TOKENS) * quads * QUAD;
    }
    // Dim d of tokens token / 4 * 4 to + 3 is at this + 4 * d, token by token.
    INLINE_MEMBER int8_t *value_quad(long block, long head, long token) const {
        return values + (tokens(block, head) + token / QUAD * QUAD) * value_dim;
    }
    INLINE_MEMBER float *key_scale(long block, long head, long token) const { return key_scales + tokens(block, head) + token; }
    INLINE_MEMBER float *value_scale(long block, long head, long token) const { return value_scales + tokens(block, head) + token; }

    // codes of one token and head, quads * QUAD of them, from or to their places.
    INLINE_MEMBER void put_key(long block, long head, long token, const int8_t *codes) const {
        int8_t *target = key_panel(block, head, token) + token % PANEL_TOKENS * QUAD;
        for (long q = 0; q < quads; q++) __builtin_memcpy(target + q * PIECE, codes + q * QUAD, QUAD);
    }
    INLINE_MEMBER void take_key(long block, long head, long token, int8_t *codes) const {
        const int8_t *source = key_panel(block, head, token) + token % PANEL_TOKENS * QUAD;
        for (long q = 0; q < quads; q++) __builtin_memcpy(codes + q * QUAD, source + q * PIECE, QUAD);
    }
    INLINE_MEMBER void put_value(long block, long head, long token, const int8_t *codes) const {
        int8_t *target = value_quad(block, head, token) + token % QUAD;
        for (long d = 0; d < value_dim; d++) target[d * QUAD] = codes[d];
    }
    INLINE_MEMBER void take_value(long block, long head, long token, int8_t *codes) const {
        const int8_t *source = value_quad(block, head, token) + token % QUAD;
        for (long d = 0; d < value_dim; d++) codes[d] = source[d * QUAD];
    }
};

// Addresses of the codes and scales of N panels of one kv head.
template <long N> struct CodePanels {
    const int8_t *keys[N], *values[N];
    const float *key_scales[N], *value_scales[N];

    // Panel i is that of key `at` of the sequence with this block table.
    INLINE_MEMBER void find_panel(long i, const CodePages &pages, const int32_t *table, long head, long at) {
        const long block = table[at / pages.block_size], token = at % pages.block_size;
        keys[i] = pages.key_panel(block, head, token), values[i] = pages.value_quad(block, head, token);
        key_scales[i] = pages.key_scale(block, head, token), value_scales[i] = pages.value_scale(block, head, token);
    }
};

// W quads of bytes.
typedef vi vi_bytes __attribute__((aligned(1), may_alias));
INLINE vi load_quads(const int8_t *p) { return *(const vi_bytes *)p; }
// The first n < W quads at p, zeros after them.
INLINE vi load_some_quads(const int8_t *p, long n) {
    vi quads = {};
    __builtin_memcpy(&quads, p, n * QUAD);
    return quads;
}
// Number i of every quad as floats.
INLINE vf quad_element(vi quads, int i) { return __builtin_convertvector((quads << (24 - 8 * i)) >> 24, vf); }

INLINE vi lane_numbers() {
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    return lanes;
}

struct row_code { int8_t code; };  // the element type of pages of latent rows

constexpr long ROW_GROUP = 32;  // a multiple of W
INLINE long row_groups(long dim) { return ceil_div(dim, ROW_GROUP); }

// Numbers of a row from `at` on.
struct CodeRow {
    const int8_t *codes;
    const float *scales;
    long at;

    INLINE_MEMBER CodeRow operator+(long n) const { return {codes, scales, at + n}; }
    INLINE_MEMBER float operator[](long n) const { return widen(codes[at + n]) * scales[(at + n) / ROW_GROUP]; }
};

// W numbers, from a multiple of W on, or the first n of them.
INLINE vf load(const CodeRow &row) { return load(row.codes + row.at) * row.scales[row.at / ROW_GROUP]; }
INLINE vf load_some(const CodeRow &row, long n) { return load_some(row.codes + row.at, n) * row.scales[row.at / ROW_GROUP]; }

}  // namespace
