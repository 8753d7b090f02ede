// Activation functions, and loops over the vectors of a matrix. Arithmetic is float32 whatever the storage.

#pragma once

#include "simd.h"
#include "work_split.h"

namespace {

// silu(x) = x / (1 + exp(-x)); gelu's tanh form (Hendrycks and Gimpel, 1606.08415).
INLINE vf silu(vf x) { return x / (1.0f + exp_of(-x)); }
INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }

// x times the normal CDF of x. Its tail above |z| = |x| / sqrt(2) is half a polynomial in
// 1 / (1 + c|z|) times exp(-z^2) (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: to 1.5e-7).
INLINE vf gelu(vf x) {
    const vf z = magnitude_of(x) * 0.7071067812f, t = 1.0f / (1.0f + 0.3275911f * z);
    vf p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf beyond = 0.5f * p * t * exp_of(-z * z);
    return x < splat(0.0f) ? x * beyond : x * (1.0f - beyond);
}
INLINE vf relu2(vf x) { return x > splat(0.0f) ? x * x : x - x; }  // NaN stays

// Calls f(activation) with the one of this number.
template <class F> INLINE int with_activation(int number, F f) {
    switch (number) {
        case 0: return f([](vf x) { return silu(x); });
        case 1: return f([](vf x) { return gelu_tanh(x); });
        case 2: return f([](vf x) { return gelu(x); });
        default: return f([](vf x) { return relu2(x); });
    }
}

// f(j, n) with f = row(r) for vectors of n <= W numbers, from number j of row r on. f holds copies: what it refers to would be
// loaded again after each store (measured: up to 2.6 times as slow). work: of one number, relative to an addition.
template <class R> INLINE void each_vector(long rows, long dim, const R &row, long piece = 4096, long work = 1) {
    const long pieces = ceil_div(dim, piece);  // so that a single wide row is spread over the threads
    for_units(rows * pieces, threads_for(rows * dim * work, rows * pieces), [&](long unit) {
        const long r = unit / pieces, begin = unit % pieces * piece, end = min_of(begin + piece, dim);
        const auto f = row(r);
        for (long j = begin; j < end; j += W) f(j, min_of(W, end - j));
    });
}

// out[r, j] = f(x[r, j], r), vector by vector; out may be x.
template <class F>
INLINE int each_number(const void *x, long row, int type, void *out, long out_row, long rows, long dim, F f) {
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        each_vector(rows, dim, [&](long r) {
            return [=, source = (T)x + r * row, target = (T)out + r * out_row](long j, long n) {
                store_part(target + j, f(load_part(source + j, n), r), n);
            };
        });
    });
    return 0;
}

}  // namespace
