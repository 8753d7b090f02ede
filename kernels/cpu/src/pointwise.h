// RMS norm, gated activations, soft caps, and rows of a table. float32 arithmetic whatever the storage.

#pragma once

#include "activations.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

// out = x / sqrt(mean(x^2) + eps) * weight. With a residual: residual += x first, rounded to its type, then normed.
// Rows of x form groups of `group`; x_row is the stride within a group, x_group that of groups. out and residual have plain rows.
EXPORT int WINDLASS_NAME(rms_norm)(const void *x, long x_row, long group, long x_group, void *residual, long residual_row,
                                   int type, const float *weight, float eps, void *out, long rows, long dim) {
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        for_units(rows, threads_for(rows * dim, rows), [&](long r) {
            const auto *source = (T)x + r / group * x_group + r % group * x_row;
            auto *target = (T)out + r * dim;
            if (residual) {
                auto *carried = (T)residual + r * residual_row;
                long j = 0;
                for (; j + W <= dim; j += W) store(carried + j, load(carried + j) + load(source + j));
                for (; j < dim; j++) narrow(widen(carried[j]) + widen(source[j]), carried[j]);
                source = carried;
            }
            vf squares[2] = {};
            long j = 0;
            for (; j + 2 * W <= dim; j += 2 * W) {
                const vf a = load(source + j), b = load(source + j + W);
                squares[0] += a * a;
                squares[1] += b * b;
            }
            float total = sum(squares[0] + squares[1]);
            for (; j < dim; j++) total += widen(source[j]) * widen(source[j]);
            const float scale = 1.0f / __builtin_sqrtf(total / float(dim) + eps);
            for (j = 0; j + W <= dim; j += W) store(target + j, load(source + j) * scale * load(weight + j));
            for (; j < dim; j++) narrow(widen(source[j]) * scale * weight[j], target[j]);
        });
    });
    return 0;
}
RECORDABLE(rms_norm)

// out[r, j] = combine(gate_up[r, j], gate_up[r, dim + j]), vector by vector.
template <class F>
INLINE int combine_halves(const void *gate_up, long row, int type, void *out, long rows, long dim, F combine) {
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        each_vector(rows, dim, [&](long r) {
            return [=, gate = (T)gate_up + r * row, target = (T)out + r * dim](long j, long n) {
                store_part(target + j, combine(load_part(gate + j, n), load_part(gate + dim + j, n)), n);
            };
        });
    });
    return 0;
}

// out[r, j] = activation(gate_up[r, j]) * gate_up[r, dim + j]. activation: see activate.
EXPORT int WINDLASS_NAME(gated_activation)(const void *gate_up, long row, int type, int activation, void *out, long rows,
                                           long dim) {
    return with_activation(activation, [&](auto f) {
        return combine_halves(gate_up, row, type, out, rows, dim, [&](vf g, vf u) { return f(g) * u; });
    });
}
RECORDABLE(gated_activation)

// out[r, j] = gate * sigmoid(alpha * gate) * (up + 1), of gate_up[r, j] up to `limit` and gate_up[r, dim + j] within it (gpt-oss).
EXPORT int WINDLASS_NAME(clamped_glu)(const void *gate_up, long row, int type, float alpha, float limit, void *out, long rows,
                                      long dim) {
    const vf most = splat(limit), least = -most;
    return combine_halves(gate_up, row, type, out, rows, dim, [&](vf g, vf u) {
        g = g > most ? most : g;
        u = u > most ? most : u < least ? least : u;
        return g / (1.0f + exp_of(-alpha * g)) * (u + 1.0f);
    });
}
RECORDABLE(clamped_glu)

// x[r, j] *= sigmoid(gate[r, j]), or of gate[r, 0] where the gate has one column. gate_type: that of x, or float32.
EXPORT int WINDLASS_NAME(gate_by_sigmoid)(void *x, long row, int type, const void *gate, long gate_row, int gate_type,
                                          long gate_columns, long rows, long dim) {
    const auto sigmoid = [](vf g) { return 1.0f / (1.0f + exp_of(-g)); };
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        for_units(rows, threads_for(rows * dim, rows), [&](long r) {
            auto *target = (T)x + r * row;
            vf one = {};
            if (gate_columns == 1) one = sigmoid(splat(::element(gate, gate_type, r * gate_row)));
            for (long j = 0; j < dim; j += W) {
                const long n = min_of(W, dim - j);
                vf by = one;
                if (gate_columns != 1)
                    with_type(gate_type, [&](auto *of) { by = sigmoid(load_part((decltype(of))gate + r * gate_row + j, n)); });
                store_part(target + j, load_part(target + j, n) * by, n);
            }
        });
    });
    return 0;
}
RECORDABLE(gate_by_sigmoid)

// out = cap * tanh(x / cap), float32.
EXPORT int WINDLASS_NAME(soft_cap)(const float *x, long row, float cap, float *out, long rows, long dim) {
    return each_number(x, row, 0, out, dim, rows, dim, [&](vf one, long) { return tanh_of(one / cap) * cap; });
}
RECORDABLE(soft_cap)

// out = table[ids] * scale, of type out_type. Returns 1 for an id out of range; nothing is written then.
EXPORT int WINDLASS_NAME(embed_rows)(const void *table, long table_row, int type, long table_rows, const int64_t *ids,
                                     float scale, void *out, int out_type, long rows, long dim) {
    for (long r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= table_rows) return 1;
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        with_type(out_type, [&](auto *element) {
            typedef decltype(element) O;
            for_units(rows, threads_for(rows * dim, rows), [&](long r) {
                const auto *source = (T)table + ids[r] * table_row;
                auto *target = (O)out + r * dim;
                long j = 0;
                for (; j + W <= dim; j += W) store(target + j, load(source + j) * scale);
                for (; j < dim; j++) narrow(widen(source[j]) * scale, target[j]);
            });
        });
    });
    return 0;
}
RECORDABLE(embed_rows)

}  // namespace
