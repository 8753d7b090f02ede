// Packs rows of 16-bit weights into panels (see panels.h), and converts panels to float32 for products of many rows.

#pragma once

#include "panels.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace panels {

// Index of element k of row r in a panel.
INLINE long place_of(const bf16 *, long r, long k) { return k / 2 * LINE_ELEMENTS + 2 * r + k % 2; }
INLINE long place_of(const f16 *, long r, long k) { return k / 2 * LINE_ELEMENTS + k % 2 * PANEL_ROWS + r; }

// A line's part of W rows, the two elements of each in one lane of `pairs`.
INLINE void store_pairs(bf16 *line, vu pairs) { *(vu_any *)line = pairs; }
INLINE void store_pairs(f16 *line, vu pairs) {
    *(vh_any *)line = __builtin_convertvector(pairs & 0xffffu, vh);
    *(vh_any *)(line + PANEL_ROWS) = __builtin_convertvector(pairs >> 16, vh);
}

// Rows [begin, end) of one panel from source [end - begin, K].
template <class T> static void pack_panel(const T *source, long stride, long begin, long end, long K, T *panel) {
    long k = 0;
    if (end - begin == PANEL_ROWS) {
        for (; k + 2 * W <= K; k += 2 * W) {
            for (long r = 0; r < PANEL_ROWS; r += W) {
                vf square[W];  // two elements of K in each lane
                for (int i = 0; i < W; i++) square[i] = (vf)*(const vu_any *)(source + (r + i) * stride + k);
                transpose(square);
                for (int i = 0; i < W; i++)
                    store_pairs((T *)rows_from(panel + (k / 2 + i) * LINE_ELEMENTS, r), (vu)square[i]);
            }
        }
    }
    for (long r = begin; r < end; r++)
        for (long i = k; i < K; i++) panel[place_of(panel, r, i)] = source[(r - begin) * stride + i];
}

template <class T> static void pack_rows_of(const T *source, long stride, long first, long count, long K, T *data) {
    const long panel_elements = ceil_div(K, 2) * LINE_ELEMENTS, last = ceil_div(first + count, PANEL_ROWS);
    // On one thread: it reaches memory bandwidth, and during loading other threads read the next rows.
    for (long panel = first / PANEL_ROWS; panel < last; panel++) {
        const long start = panel * PANEL_ROWS, begin = max_of(first, start), end = min_of(first + count, start + PANEL_ROWS);
        pack_panel(source + (begin - first) * stride, stride, begin - start, end - start, K, data + panel * panel_elements);
    }
}

// Rows [first, first + count) of a weight in panels from source [count, K] of its type. Types: 1 bfloat16, 2 float16.
EXPORT int WINDLASS_NAME(pack_panels)(const void *source, long stride, int type, long first, long count, long K, void *data) {
    if (type == 1) pack_rows_of((const bf16 *)source, stride, first, count, K, (bf16 *)data);
    else pack_rows_of((const f16 *)source, stride, first, count, K, (f16 *)data);
    return 0;
}

template <class T> static void widen_to(const T *data, long first, long count, long K, float *out) {
    constexpr long LINES = 16;  // of a panel at a time: threads share the lines, and every page of `out` is visited once
    const long lines = ceil_div(K, 2), width = count * PANEL_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads_for(K *width, ceil_div(lines, LINES)))
    for (long block = 0; block < lines; block += LINES) {
        for (long panel = 0; panel < count; panel++) {
            const T *line = data + ((first + panel) * lines + block) * LINE_ELEMENTS;
            const long end = min_of(block + LINES, lines);
            for (long l = block; l < end; l++, line += LINE_ELEMENTS) {
                float *to = out + 2 * l * width + panel * PANEL_ROWS;
                for (long r = 0; r < PANEL_ROWS; r += W) {
                    const T *rows = rows_from(line, r);
                    store(to + r, load_element<0>(rows));
                    if (2 * l + 1 < K) store(to + width + r, load_element<1>(rows));
                }
            }
        }
    }
}

// out[K, 16 * count], float32: the rows of panels [first, first + count) as columns.
EXPORT int WINDLASS_NAME(widen_panels)(const void *data, int type, long first, long count, long K, float *out) {
    if (type == 1) widen_to((const bf16 *)data, first, count, K, out);
    else widen_to((const f16 *)data, first, count, K, out);
    return 0;
}

}  // namespace panels
}  // namespace
