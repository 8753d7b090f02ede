// Short causal convolutions per channel with a state of the last inputs, and an optional silu.

#pragma once

#include "activations.h"
#include "recordable.h"
#include "recurrent_state.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace convolution {

constexpr long PIECE = 256;  // channels of a unit: their weights and the inputs of a few tokens stay in L1
constexpr long MOST_WIDTH = 8;

template <class T> struct Piece {
    const T *x; long x_row;  // of the sequence's first token in this step
    float *window; long window_row;
    T *out; long out_row;
    long tokens, channels;
    bool starts_from_zero;
    const float *bias;  // NULL: none
    bool activated;
    const StateRows &rows;
    long first, block;  // the sequence's first token of the step, and its block
    INLINE_MEMBER float *window_of(int64_t other, long past) const { return window + (other - block) * past * window_row; }
};

// taps[i][c] of weight[c][i].
template <int WIDTH> INLINE void by_tap(const float *weight, long width, long channels, float (*taps)[PIECE]) {
    long c = 0;
    if constexpr (WIDTH == 4) {
        vi even = {};
        for (int i = 0; i < W; i++) even[i] = 2 * i;
        const vi odd = even + 1;
        for (; c + W <= channels; c += W) {
            const float *from = weight + 4 * c;
            const vf a = load(from), b = load(from + W), d = load(from + 2 * W), e = load(from + 3 * W);
            const vf evens[2] = {__builtin_shuffle(a, b, even), __builtin_shuffle(d, e, even)};
            const vf odds[2] = {__builtin_shuffle(a, b, odd), __builtin_shuffle(d, e, odd)};
            store(taps[0] + c, __builtin_shuffle(evens[0], evens[1], even));
            store(taps[1] + c, __builtin_shuffle(odds[0], odds[1], even));
            store(taps[2] + c, __builtin_shuffle(evens[0], evens[1], odd));
            store(taps[3] + c, __builtin_shuffle(odds[0], odds[1], odd));
        }
    }
    for (; c < channels; c++)
        for (long i = 0; i < width; i++) taps[i][c] = weight[c * width + i];
}

// n <= W numbers from channel c on, at `row` of the window followed by the step's tokens, oldest first.
template <class T> INLINE vf input(const Piece<T> &p, long row, long past, long c, long n) {
    if (row >= past) {
        const T *from = p.x + (row - past) * p.x_row + c;
        return load_part(from, n);
    }
    if (p.starts_from_zero) return vf{};
    const float *from = p.window + row * p.window_row + c;
    return load_part(from, n);
}

// Stores the last inputs after `tokens` tokens of the step. Rows move towards the front: none is written before it is read.
template <class T> INLINE void leave(const Piece<T> &p, long tokens, long past, float *window) {
    for (long i = 0; i < past; i++) {
        for (long c = 0; c < p.channels; c += W) {
            const long n = min_of(W, p.channels - c);
            const vf kept = input(p, tokens + i, past, c, n);
            float *target = window + i * p.window_row + c;
            store_part(target, kept, n);
        }
    }
}

// WIDTH: 0 for any.
template <class T, int WIDTH> static NOINLINE void convolve(const Piece<T> &p, const float *weight, long of) {
    const long width = WIDTH ? WIDTH : of, past = width - 1;
    float taps[MOST_WIDTH][PIECE];
    by_tap<WIDTH>(weight, width, p.channels, taps);
    for (long t = 0; t < p.tokens; t++) {
        for (long c = 0; c < p.channels; c += W) {
            const long n = min_of(W, p.channels - c);
            vf total = {};
            if (p.bias) total = load_part(p.bias + c, n);
            for (long i = 0; i < width; i++)
                total = add_product(total, input(p, t + i, past, c, n), load_part(taps[i] + c, n));
            if (p.activated) total = silu(total);
            T *target = p.out + t * p.out_row + c;
            store_part(target, total, n);
        }
        if (const int64_t block = p.rows.snapshot_after(p.first + t); block >= 0) leave(p, t + 1, past, p.window_of(block, past));
    }
    leave(p, p.tokens, past, p.window);
}

// x: [T][C] of the type, rows x_row apart. weight: [C][width], width 2 .. 8. bias: [C], or NULL. activation: 0 none, 1 silu.
// window: [num_blocks][width - 1][C], changed in place. snapshots: see StateRows. out: [T][C] of the type. Returns 0, or a code of
// StateRows::error_code and has written nothing.
EXPORT int WINDLASS_NAME(short_convolution)(const void *x, long x_row, int type, const float *weight, long width, const float *bias,
                                            int activation, float *window, long num_blocks, const int64_t *blocks, const int64_t *starts,
                                            const int64_t *lengths, long sequences, const int64_t *snapshots, void *out, long tokens,
                                            long channels) {
    const StateRows rows = {blocks, starts, lengths, sequences, snapshots};
    if (const int code = rows.error_code(tokens, num_blocks)) return code;
    const long pieces = ceil_div(channels, PIECE), units = sequences * pieces;
    with_type(type, [&](auto *element) {
        typedef __typeof__(*element) T;
        for_units(units, threads_for(tokens * channels, units), [&](long unit) {
            const long s = unit / pieces, c = unit % pieces * PIECE;
            if (!rows.tokens(s)) return;
            const long first = rows.starts[s];
            const Piece<T> p = {
                (const T *)x + first * x_row + c, x_row, window + rows.blocks[s] * (width - 1) * channels + c, channels,
                (T *)out + first * channels + c, channels, rows.tokens(s), min_of(PIECE, channels - c), rows.starts_from_zero(s),
                bias ? bias + c : bias, activation != 0, rows, first, rows.blocks[s]};
            (width == 4 ? convolve<T, 4> : convolve<T, 0>)(p, weight + c * width, width);
        });
    });
    return 0;
}
RECORDABLE(short_convolution)

}  // namespace convolution
}  // namespace
