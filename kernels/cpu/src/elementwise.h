// Elementwise and row-wise operations: activations without a gate, layer norm, clipping, row and column factors. Arithmetic is
// float32 whatever the storage.

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

// out = activation(x), contiguous. activation: 0 silu, 1 gelu_tanh, 2 gelu, 3 relu2.
EXPORT int WINDLASS_NAME(activate)(const void *x, long row, int type, int activation, void *out, long rows, long dim) {
    return with_activation(activation, [&](auto f) {
        return each_number(x, row, type, out, dim, rows, dim, [&](vf one, long) { return f(one); });
    });
}

// xIELU (2411.13010), out contiguous: with a = softplus(alpha_p) and c = beta + softplus(alpha_n), a x^2 + beta x where x is
// positive, and c (e^min(x, eps) - 1 - x) + beta x elsewhere.
EXPORT int WINDLASS_NAME(xielu)(const void *x, long row, int type, const float *alpha_p, const float *alpha_n, const float *beta,
                                const float *eps, void *out, long rows, long dim) {
    const auto softplus = [](float a) { return a > 20.0f ? a : std::log1p(std::exp(a)); };
    const vf a = splat(softplus(*alpha_p)), b = splat(*beta), c = splat(*beta + softplus(*alpha_n)), most = splat(*eps);
    return each_number(x, row, type, out, dim, rows, dim, [&](vf one, long) {
        const vf m = one < most ? one : most;
        // e^m - 1 - m: by its series near zero, where the difference would have no digits left.
        vf p = splat(1.9875691500e-4f);
        p = p * m + 1.3981999507e-3f;
        p = p * m + 8.3334519073e-3f;
        p = p * m + 4.1665795894e-2f;
        p = p * m + 1.6666665459e-1f;
        p = p * m + 5.0000001201e-1f;
        const vf rest = m > splat(-0.34f) ? p * m * m : exp_of(m) - 1.0f - m;
        const vf below = c * (rest + (m - one)) + b * one;
        return one > splat(0.0f) ? a * one * one + b * one : below;
    });
}

// Every number of x into -limit .. limit.
EXPORT int WINDLASS_NAME(clip)(void *x, long row, int type, float limit, long rows, long dim) {
    const vf most = splat(limit), least = -most;
    return each_number(x, row, type, x, row, rows, dim,
                       [&](vf one, long) { return one > most ? most : one < least ? least : one; });
}

// x[r, j] *= factors[r].
EXPORT int WINDLASS_NAME(scale_rows)(void *x, long row, int type, const float *factors, long rows, long dim) {
    return each_number(x, row, type, x, row, rows, dim, [&](vf one, long r) { return one * factors[r]; });
}

// x[r, j] *= by[r, j], of x's type; where by is null, the one factor.
EXPORT int WINDLASS_NAME(multiply)(void *x, long row, int type, const void *by, long by_row, const float *factor, long rows, long dim) {
    if (!by) return each_number(x, row, type, x, row, rows, dim, [&](vf one, long) { return one * *factor; });
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        each_vector(rows, dim, [&](long r) {
            return [own = (T)x + r * row, other = (T)by + r * by_row](long j, long n) {
                store_part(own + j, load_part(own + j, n) * load_part(other + j, n), n);
            };
        });
    });
    return 0;
}

// x[r, j] *= first[j] * second[j].
EXPORT int WINDLASS_NAME(scale_columns)(void *x, long row, int type, const float *first, const float *second, long rows, long dim) {
    with_type(type, [&](auto *element) {
        each_vector(rows, dim, [&](long r) {
            return [=, own = (decltype(element))x + r * row](long j, long n) {
                store_part(own + j, load_part(own + j, n) * (load_part(first + j, n) * load_part(second + j, n)), n);
            };
        });
    });
    return 0;
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, contiguous. Rows of x form groups of `group`; x_row is the stride
// within a group, x_group that of groups. bias: may be null.
EXPORT int WINDLASS_NAME(layer_norm)(const void *x, long x_row, long group, long x_group, int type, const float *weight,
                                     const float *bias, float eps, void *out, long rows, long dim) {
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        for_units(rows, threads_for(rows * dim, rows), [&](long r) {
            const auto *source = (T)x + r / group * x_group + r % group * x_row;
            auto *target = (T)out + r * dim;
            vf sums = {};
            long j = 0;
            for (; j + W <= dim; j += W) sums += load(source + j);
            float total = sum(sums);
            for (; j < dim; j++) total += widen(source[j]);
            const float mean = total / float(dim);
            vf squares = {};
            for (j = 0; j + W <= dim; j += W) {
                const vf a = load(source + j) - mean;
                squares += a * a;
            }
            float spread = sum(squares);
            for (; j < dim; j++) spread += (widen(source[j]) - mean) * (widen(source[j]) - mean);
            const float scale = 1.0f / __builtin_sqrtf(spread / float(dim) + eps);
            for (j = 0; j + W <= dim; j += W) {
                vf y = (load(source + j) - mean) * scale * load(weight + j);
                if (bias) y += load(bias + j);
                store(target + j, y);
            }
            for (; j < dim; j++) narrow((widen(source[j]) - mean) * scale * weight[j] + (bias ? bias[j] : 0.0f), target[j]);
        });
    });
    return 0;
}

}  // namespace
