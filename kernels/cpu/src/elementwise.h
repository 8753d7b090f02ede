// Elementwise and row-wise operations: activations without a gate, layer norm, clipping, row and column factors.

#pragma once

#include "activations.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

// out = activation(x), contiguous. activation: 0 silu, 1 gelu_tanh, 2 gelu, 3 relu2.
EXPORT int WINDLASS_NAME(activate)(const void *x, long row, int type, int activation, void *out, long rows, long dim) {
    return with_activation(activation, [&](auto f) {
        return each_number(x, row, type, out, dim, rows, dim, [&](vf one, long) { return f(one); });
    });
}
RECORDABLE(activate)

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
RECORDABLE(xielu)

// Every number of x into -limit .. limit.
EXPORT int WINDLASS_NAME(clip)(void *x, long row, int type, float limit, long rows, long dim) {
    const vf most = splat(limit), least = -most;
    return each_number(x, row, type, x, row, rows, dim,
                       [&](vf one, long) { return one > most ? most : one < least ? least : one; });
}
RECORDABLE(clip)

// x[r, j] *= factors[r].
EXPORT int WINDLASS_NAME(scale_rows)(void *x, long row, int type, const float *factors, long rows, long dim) {
    return each_number(x, row, type, x, row, rows, dim, [&](vf one, long r) { return one * factors[r]; });
}
RECORDABLE(scale_rows)

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
RECORDABLE(multiply)

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
RECORDABLE(scale_columns)

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
RECORDABLE(layer_norm)

}  // namespace
