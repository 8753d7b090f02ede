// Log-probabilities of one token per row of logits and of the row's most likely tokens, in two passes over the row.

#pragma once

#include "logits.h"
#include "simd.h"
#include "work_split.h"

namespace {

// An integer that increases as x decreases, as a key for `reach`. Not for NaN.
INLINE double fall_of(float x) {
    const uint32_t bits = bits_of(x == 0 ? 0.0f : x);  // -0 is 0
    return double(bits & 0x80000000u ? bits : 0x7fffffffu - bits);
}

// The k largest logits in the order of their ids; of equal ones, the first. k <= vocab.
INLINE void most_likely(const float *logits, long vocab, long k, SamplingScratch &memory, int64_t *ids, float *values) {
    const long spans = ceil_div(vocab, SPAN);
    auto kth = [&](long count) { return reach(memory.keys, memory.key_weights, count, double(k)); };
    double bound = 0x1p33;  // beyond every key
    if (spans >= k) {
        for (long s = 0; s < spans; s++) memory.keys[s] = fall_of(memory.spans[s]), memory.key_weights[s] = 1.0f;
        bound = kth(spans);
    }
    long count = 0;
    for (long s = 0; s < spans; s++) {
        if (fall_of(memory.spans[s]) > bound) continue;
        for (long j = s * SPAN; j < min_of((s + 1) * SPAN, vocab); j++) {
            const double key = fall_of(logits[j]);
            memory.keys[count] = key, memory.key_weights[count] = 1.0f, memory.found.ids[count] = int32_t(j);
            count += key <= bound;
        }
    }
    const double last = kth(count);
    long spare = k;  // places left for logits equal to the last one
    for (long i = 0; i < count; i++) spare -= fall_of(logits[memory.found.ids[i]]) < last;
    for (long i = 0, at = 0; i < count && at < k; i++) {
        const long id = memory.found.ids[i];
        const double key = fall_of(logits[id]);
        if (key > last || (key == last && !spare)) continue;
        spare -= key == last;
        ids[at] = id, values[at++] = logits[id];
    }
}

// chosen: natural logarithms of probabilities, the targets' logits less the rows' normalisers. ranks: 1 and the number of
// larger logits, 0 where the row holds NaN or infinity or nothing. rows, targets: [count]; top_ids, top_values: [count, k] and
// logits, by id. scratch: as in sample_tokens. Returns 1 if it is too small, 2 for a row or target out of range.
EXPORT int WINDLASS_NAME(token_logprobs)(const float *logits, long stride, long num_rows, long vocab, const int64_t *rows,
                                         const int64_t *targets, long count, long k, float *chosen, int64_t *ranks,
                                         int64_t *top_ids, float *top_values, double *normalisers, void *scratch,
                                         long scratch_bytes) {
    const long each = SamplingScratch::bytes(vocab);
    const long room = min_of(scratch_bytes / each, count);
    if (count && !room) return 1;
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= num_rows || targets[i] < 0 || targets[i] >= vocab) return 2;
#pragma omp parallel for num_threads(min_of(room, threads_for(count * vocab, count))) schedule(static)
    for (long i = 0; i < count; i++) {
        const float *row = logits + rows[i] * stride;
        SamplingScratch memory((char *)scratch + each * omp_get_thread_num(), vocab);
        long first = 0;
        const float top = row_largest(row, vocab, memory.spans, &first), target = row[targets[i]];
        ranks[i] = 0;
        if (!finite(top)) continue;
        WideSum sum{};
        vi larger_ones = {};
        for (long j = 0; j < vocab; j += W) {
            const vf x = load_logits(row + j, vocab - j);
            sum.add(exp_of(x - top));
            larger_ones -= (vi)(x > splat(target));
        }
        ranks[i] = 1;
        for (int lane = 0; lane < W; lane++) ranks[i] += larger_ones[lane];
        normalisers[i] = double(top) + __builtin_log(sum.total());
        chosen[i] = float(double(target) - normalisers[i]);
        if (k) most_likely(row, vocab, k, memory, top_ids + i * k, top_values + i * k);
    }
    return 0;
}

}  // namespace
