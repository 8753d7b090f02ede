// Rows of int8 codes with a float32 scale for every 32 numbers, as latent attention's pages hold them: kernels/layouts/kv_pages.py.
//
// [slot][kv head] both. A row is key and value at once, and is turned into floats once for all heads that meet it.

#pragma once

#include <cstdint>

#include "simd.h"

namespace {

struct row_code { int8_t code; };  // what names such pages where others are named by their elements

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

// All numbers of a row.
INLINE void widen_row(const CodeRow &row, long dim, float *to) {
    long d = 0;
    for (; d + W <= dim; d += W) store(to + d, load(row + d));
    for (; d < dim; d++) to[d] = row[d];
}

}  // namespace
