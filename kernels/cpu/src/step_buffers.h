// Before and after the layers of a decode step: filling the persistent buffers, and the largest logit of each row.

#pragma once

#include "logits.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

// Rows of single tokens. metadata: [5][rows], per row its token, index of its slot in the sequence, position of the sequence's first
// slot, rotary row, and row of `tables`. tables: [groups][rows] with strides. Writes positions and lengths [rows], slots
// [groups][rows], and the first `blocks` columns of own_tables [groups][rows][own_columns]. Returns 2 if a row's block is missing.
EXPORT int WINDLASS_NAME(fill_step_buffers)(const int64_t *metadata, long rows, const int32_t *tables, long group_stride, long row_stride,
                                    long groups, long blocks, long block_size, int64_t *positions, int64_t *lengths,
                                    int64_t *slots, int32_t *own_tables, long own_columns) {
    const int64_t *index = metadata + rows, *first = metadata + 2 * rows, *place = metadata + 4 * rows;
    for (long r = 0; r < rows; r++) positions[r] = index[r] + first[r], lengths[r] = index[r] + 1;
    for (long g = 0; g < groups; g++) {
        for (long r = 0; r < rows; r++) {
            const int32_t *table = tables + g * group_stride + place[r] * row_stride;
            __builtin_memcpy(own_tables + (g * rows + r) * own_columns, table, blocks * sizeof(int32_t));
            const int32_t block = table[index[r] / block_size];
            if (block < 0) return 2;
            slots[g * rows + r] = block * block_size + index[r] % block_size;
        }
    }
    return 0;
}

constexpr long SEGMENT = 8192;  // logits that a thread takes at a time

struct Largest { float value; int64_t index; };

// The first index of the largest of x[begin, end), a NaN counting as the largest.
INLINE Largest largest_of(const float *x, long begin, long end) {
    vf most = splat(-__builtin_inff()), sums = {};
    long i = begin;
    for (; i + W <= end; i += W) {
        const vf v = load(x + i);
        most = larger(v, most), sums += v * 0.0f;  // NaN from a NaN or an infinity on, else 0
    }
    float best = largest(most);
    bool odd = !(sum(sums) == 0.0f);
    for (; i < end; i++) {
        if (x[i] > best) best = x[i];
        odd |= !(x[i] * 0.0f == 0.0f);
    }
    if (odd)
        for (i = begin; i < end; i++)
            if (x[i] != x[i]) return {x[i], i};
    i = begin;
    while (i + W <= end && !any(load(x + i) == splat(best))) i += W;
    while (i < end - 1 && x[i] != best) i++;
    return {best, i};
}

// The first index of the largest value of each row of logits [rows][vocab], and that value; a NaN counts as the largest. Returns 1
// when out of memory.
EXPORT int WINDLASS_NAME(row_maxima)(const float *logits, long stride, long rows, long vocab, int64_t *ids, float *values) {
    const long segments = ceil_div(vocab, SEGMENT), units = rows * segments;
    Largest *found = (Largest *)malloc(units * sizeof(Largest));
    if (!found) return 1;
    for_units(units, threads_for(rows * vocab, units), [&](long unit) {
        const long begin = unit % segments * SEGMENT;
        found[unit] = largest_of(logits + unit / segments * stride, begin, min_of(begin + SEGMENT, vocab));
    });
    for (long r = 0; r < rows; r++) {
        Largest best = found[r * segments];
        for (long s = 1; s < segments && best.value == best.value; s++) {
            const Largest &other = found[r * segments + s];
            if (!(other.value <= best.value)) best = other;
        }
        ids[r] = best.index, values[r] = best.value;
    }
    free(found);
    return 0;
}
RECORDABLE(row_maxima)

}  // namespace
