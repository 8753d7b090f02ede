// Operations around latent attention: products of every head with its own small matrix, and a norm in place.
//
// up: [heads, plain + value_dim, latent], per head the key matrix, then the value matrix of a latent vector. Tokens are processed in
// tiles that share the loads of a matrix. A token's sums have an order that does not depend on the tile, so its bits are the same as
// alone.

#pragma once

#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace latent {

constexpr long TILE = 4;         // tokens
constexpr long COLUMNS = 4;      // vectors of latent dims of a query, or rows of a value's matrix, taken together
constexpr long UNIT_ROWS = 16;   // rows of a value's matrix that a thread takes at a time for a few tokens
constexpr long PROMPT_ROWS = 128, PROMPT = 32;  // and for at least PROMPT tokens, which would read the rows again for each unit
constexpr long VALUE_ROWS = WINDLASS_REGISTERS >= 32 ? 4 : 2;  // rows that share the loads of a tile of tokens

constexpr long WIDE = 512;       // latent dims of a query that a thread takes at a time for fewer tokens than a tile has

struct Shape { long tokens, heads, rotary, plain, value_dim, dim; };  // dim: latent dims

// out[t][c] = sum over n of q[t][n] * up[n][c] for `tile` tokens and dims [c, c + COLUMNS * W), cut at `dim`.
template <long tile, class TQ, class TU, class TO>
INLINE void query_block(const TQ *q, long q_row, const TU *up, long plain, long dim, long c, TO *out, long out_row) {
    vf sums[tile][COLUMNS] = {};
    const long whole = min_of(COLUMNS, (dim - c) / W), rest = whole < COLUMNS ? min_of(W, dim - c - whole * W) : 0;
    for (long n = 0; n < plain; n++, up += dim) {
        vf row[COLUMNS];
        for (long j = 0; j < COLUMNS; j++)
            row[j] = j < whole ? load(up + c + j * W) : j == whole && rest > 0 ? load_some(up + c + j * W, rest) : vf{};
        for (long t = 0; t < tile; t++) {
            const vf x = splat(widen(q[t * q_row + n]));
            for (long j = 0; j < COLUMNS; j++) sums[t][j] = add_product(sums[t][j], row[j], x);
        }
    }
    for (long t = 0; t < tile; t++)
        for (long j = 0; j < COLUMNS; j++) {
            if (j < whole) store(out + t * out_row + c + j * W, sums[t][j]);
            else if (j == whole && rest > 0) store_some(out + t * out_row + c + j * W, sums[t][j], rest);
        }
}

// As query_block, for one token and dims [c, end): reads the matrix in memory order, which is fastest. Sums are held in `sums`
// [WIDE], which stays in L1.
template <class TQ, class TU, class TO>
INLINE void query_rows(const TQ *q, const TU *up, long plain, long dim, long c, long end, float *sums, TO *out) {
    const long whole = (end - c) / W * W, rest = end - c - whole;
    for (long i = 0; i < end - c; i += W) store(sums + i, vf{});
    for (long n = 0; n < plain; n++) {
        const vf x = splat(widen(q[n]));
        const TU *row = up + n * dim + c;
        for (long i = 0; i < whole; i += W) store(sums + i, add_product(load(sums + i), load(row + i), x));
        if (rest) store(sums + whole, add_product(load(sums + whole), load_some(row + whole, rest), x));
    }
    for (long i = 0; i < whole; i += W) store(out + c + i, load(sums + i));
    if (rest) store_some(out + c + whole, load(sums + whole), rest);
}

// out[t][v] = sum over c of up[v][c] * x[t][c] for `tile` tokens and `rows` rows. Every sum runs in one order, whatever the two.
template <long tile, long rows, class TX, class TU, class TO>
INLINE void value_tile(const TX *x, long x_row, const TU *up, long dim, TO *out, long out_row) {
    vf sums[rows][tile] = {};
    const auto add = [&](auto load_at) {
        vf own[tile];
        for (long t = 0; t < tile; t++) own[t] = load_at(x + t * x_row);
        for (long v = 0; v < rows; v++) {
            const vf row = load_at(up + v * dim);
            for (long t = 0; t < tile; t++) sums[v][t] = add_product(sums[v][t], row, own[t]);
        }
    };
    long c = 0;
    for (; c + W <= dim; c += W) add([&](const auto *p) { return load(p + c); });
    if (c < dim) add([&](const auto *p) { return load_some(p + c, dim - c); });
    for (long v = 0; v < rows; v++)
        for (long t = 0; t < tile; t++) narrow(sum(sums[v][t]), out[t * out_row + v]);
}
template <long tile, class TX, class TU, class TO>
INLINE void value_block(const TX *x, long x_row, const TU *up, long rows, long dim, TO *out, long out_row) {
    long v = 0;
    // A single token has nothing to share: rows are read in memory order.
    constexpr long ROWS = tile > 1 || W < 16 ? VALUE_ROWS : 1;
    for (; v + ROWS <= rows; v += ROWS) value_tile<tile, ROWS>(x, x_row, up + v * dim, dim, out + v, out_row);
    for (; v < rows; v++) value_tile<tile, 1>(x, x_row, up + v * dim, dim, out + v, out_row);
}

// Calls f(Number of tokens, first token) for all tokens.
template <class F> INLINE void in_tiles(long tokens, const F &f) {
    long t = 0;
    for (; t + TILE <= tokens; t += TILE) f(Number<TILE>{}, t);
    for (; t < tokens; t++) f(Number<1>{}, t);
}

template <class TQ, class TU>
static void queries(const TQ *q, long q_row, long q_head, const TU *up, TQ *out, const Shape &s) {
    const long columns = s.tokens < TILE ? WIDE : COLUMNS * W;
    const long width = s.rotary + s.dim, pieces = ceil_div(s.dim, columns), matrix = (s.plain + s.value_dim) * s.dim;
    const long units = s.heads * pieces;
    for_units(units, threads_for(s.tokens * s.heads * s.plain * s.dim, units), [&](long unit) {
        const long h = unit / pieces, piece = unit % pieces;
        const TQ *rows = q + h * q_head;
        TQ *target = out + h * width;
        if (piece == 0)
            for (long t = 0; t < s.tokens; t++)
                __builtin_memcpy(target + t * s.heads * width, rows + t * q_row, s.rotary * sizeof(TQ));
        const long c = piece * columns;
        if (s.tokens < TILE) {
            alignas(64) float sums[WIDE];
            for (long t = 0; t < s.tokens; t++)
                query_rows(rows + t * q_row + s.rotary, up + h * matrix, s.plain, s.dim, c, min_of(c + WIDE, s.dim), sums,
                           target + t * s.heads * width + s.rotary);
            return;
        }
        in_tiles(s.tokens, [&](auto tile, long t) {
            query_block<decltype(tile)::value>(rows + t * q_row + s.rotary, q_row, up + h * matrix, s.plain, s.dim, c,
                                               target + t * s.heads * width + s.rotary, s.heads * width);
        });
    });
}

template <class TX, class TU>
static void values(const TX *x, long x_row, long x_head, const TU *up, TX *out, const Shape &s) {
    const long unit_rows = s.tokens < PROMPT ? UNIT_ROWS : PROMPT_ROWS, pieces = ceil_div(s.value_dim, unit_rows);
    const long matrix = (s.plain + s.value_dim) * s.dim;
    const long units = s.heads * pieces, out_row = s.heads * s.value_dim;
    for_units(units, threads_for(s.tokens * s.heads * s.value_dim * s.dim, units), [&](long unit) {
        const long h = unit / pieces, first = unit % pieces * unit_rows, rows = min_of(unit_rows, s.value_dim - first);
        const TU *own = up + h * matrix + (s.plain + first) * s.dim;
        in_tiles(s.tokens, [&](auto tile, long t) {
            value_block<decltype(tile)::value>(x + t * x_row + h * x_head, x_row, own, rows, s.dim,
                                               out + t * out_row + h * s.value_dim + first, out_row);
        });
    });
}

// out [tokens, heads, rotary + dim]: the first dims of q unchanged, then its plain ones times up[h, :plain].
// q: [tokens, heads, rotary + plain], strides in elements; out is contiguous, of its type.
EXPORT int WINDLASS_NAME(latent_queries)(const void *q, long q_row, long q_head, int type, const void *up, int up_type, void *out,
                                         long tokens, long heads, long rotary, long plain, long value_dim, long dim) {
    const Shape shape = {tokens, heads, rotary, plain, value_dim, dim};
    with_type(type, [&](auto *x) {
        with_type(up_type, [&](auto *u) {
            queries((decltype(x))q, q_row, q_head, (decltype(u))up, (__typeof__(*x) *)out, shape);
        });
    });
    return 0;
}
RECORDABLE(latent_queries)

// out [tokens, heads * value_dim]: up[h, plain:] times the latent dims of head h of x [tokens, heads, dim].
EXPORT int WINDLASS_NAME(latent_values)(const void *x, long x_row, long x_head, int type, const void *up, int up_type, void *out,
                                        long tokens, long heads, long plain, long value_dim, long dim) {
    const Shape shape = {tokens, heads, 0, plain, value_dim, dim};
    with_type(type, [&](auto *element) {
        with_type(up_type, [&](auto *u) {
            values((decltype(element))x, x_row, x_head, (decltype(u))up, (__typeof__(*element) *)out, shape);
        });
    });
    return 0;
}
RECORDABLE(latent_values)

// x [rows, dim] / sqrt(mean(x^2) + eps) * weight, over itself.
EXPORT int WINDLASS_NAME(rms_norm_in_place)(void *x, long x_row, int type, const float *weight, float eps, long rows, long dim) {
    with_type(type, [&](auto *element) {
        typedef __typeof__(*element) T;
        for_units(rows, threads_for(rows * dim, rows), [&](long r) {
            T *own = (T *)x + r * x_row;
            const float scale = 1.0f / __builtin_sqrtf(dot(own, own, dim) / float(dim) + eps);
            long j = 0;
            for (; j + W <= dim; j += W) store(own + j, load(own + j) * scale * load(weight + j));
            for (; j < dim; j++) narrow(widen(own[j]) * scale * weight[j], own[j]);
        });
    });
    return 0;
}
RECORDABLE(rms_norm_in_place)

}  // namespace latent
}  // namespace
