// Sampling of one token per row of logits: logits changes of a request, temperature, min-p, top-k, top-p, typical-p, exclusion of
// top choices, inverse CDF.
//
// Nothing is sorted, and every number that decides is exact: weights are multiples of 2^-34, so that their float64 sums are exact
// in any order. So the token depends only on the row's own numbers, not on the instruction set, and equals that of
// kernels/torch/torch_sampler.py.

#pragma once

#include "logits.h"
#include "shared_structs.h"
#include "simd.h"
#include "work_split.h"

namespace {

// Applies masks, biases, penalties and decreases in this order (see kernels/token_sampling.py); false for an id out of range.
INLINE bool change(const SamplingRow &d, const float *source, float *row, long vocab) {
    auto each = [&](const int64_t *ids, int64_t count, auto f) {
        for (int64_t i = 0; i < count; i++) {
            if (ids[i] < 0 || ids[i] >= vocab) return false;
            f(ids[i], i);
        }
        return true;
    };
    if (d.allowed) {
        for (long i = 0; i < vocab; i++) row[i] = -__builtin_inff();
        if (!each(d.allowed, d.num_allowed, [&](int64_t id, int64_t) { row[id] = source[id]; })) return false;
    } else {
        __builtin_memcpy(row, source, 4 * vocab);
    }
    if (d.mask) {
        for (long begin = 0; begin < vocab; begin += 32) {
            uint32_t out = ~d.mask[begin / 32];  // most words are all in or all out
            if (vocab - begin < 32) out &= (1u << (vocab - begin)) - 1;
            if (out == ~0u) {
                for (long i = begin; i < begin + 32; i++) row[i] = -__builtin_inff();
                continue;
            }
            for (; out; out &= out - 1) row[begin + __builtin_ctz(out)] = -__builtin_inff();
        }
    }
    return each(d.forbidden, d.num_forbidden, [&](int64_t id, int64_t) { row[id] = -__builtin_inff(); }) &&
           each(d.biased, d.num_biased, [&](int64_t id, int64_t i) { row[id] += d.bias[i]; }) &&
           each(d.counted, d.num_counted, [&](int64_t id, int64_t i) {
               float x = row[id];
               if (d.repetition != 1.0f) x = x < 0 ? rounded(x * d.repetition) : x / d.repetition;
               x -= rounded(d.frequency * d.in_output[i]);
               x -= d.in_output[i] > 0 ? d.presence : 0.0f;
               row[id] = x;
           }) &&
           each(d.decreased, d.num_decreased, [&](int64_t id, int64_t i) { row[id] -= d.decrease[i]; });
}

INLINE long sample_unfiltered(const SamplingRow &d, const ScaledRow &row, SamplingScratch &scratch) {
    double total = 0;
    for (long begin = 0, s = 0; begin < row.vocab; begin += SPAN, s++) {
        WideSum sum{};
        for (long j = begin; j < min_of(begin + SPAN, row.vocab); j += W) sum.add(weight_of(row.scaled(j)));
        total += scratch.sums[s] = sum.total();
    }
    const double target = target_of(d.uniform, total);
    double before = 0;
    long s = 0;
    while (before + scratch.sums[s] <= target) before += scratch.sums[s++];
    for (long j = s * SPAN;; j += W) {
        float weights[W];
        store(weights, weight_of(row.scaled(j)));
        for (int i = 0; i < W; i++)
            if ((before += double(weights[i])) > target) return j + i;
    }
}

// Collects tokens with a scaled logit of at least `floor` and a positive weight of at least `least`.
INLINE void gather(const ScaledRow &row, float floor, float least, SamplingScratch &scratch) {
    Candidates &found = scratch.found;
    found.count = 0;
    for (long begin = 0, s = 0; begin < row.vocab; begin += SPAN, s++) {
        const float top = row.scaled(scratch.spans[s]);
        if (!(top >= floor) || weight_of(splat(top))[0] < least) continue;
        for (long j = begin; j < min_of(begin + SPAN, row.vocab); j += W) {
            const vf x = row.scaled(j);
            if (!any((vi)(x >= splat(floor)))) continue;
            float scaled[W], weights[W];
            store(scaled, x);
            store(weights, weight_of(x));
            for (long i = 0; i < W; i++) {  // lanes past the row are minus infinity
                found.scaled[found.count] = scaled[i];
                found.weights[found.count] = weights[i];
                found.ids[found.count] = int32_t(j + i);
                found.count += (scaled[i] >= floor) & (weights[i] > 0) & (weights[i] >= least);
            }
        }
    }
}

// A lower bound of the k-th largest: the k-th largest of the span maxima, each of a different token.
INLINE float top_k_bound(const ScaledRow &row, long k, float floor, SamplingScratch &scratch) {
    long count = 0;
    for (long s = 0; s < ceil_div(row.vocab, SPAN); s++) {
        const float top = row.scaled(scratch.spans[s]);
        scratch.keys[count] = -double(top), scratch.key_weights[count] = 1.0f;
        count += finite(top);
    }
    if (count < k) return floor;
    const float bound = float(-reach(scratch.keys, scratch.key_weights, count, double(k)));
    return bound > floor ? bound : floor;
}

INLINE long sample_filtered(const SamplingRow &d, const ScaledRow &row, SamplingScratch &scratch) {
    Candidates &found = scratch.found;
    const bool limited = d.top_k > 0 && d.top_k < row.vocab, bounded = d.floor > -__FLT_MAX__;
    auto reached = [&](auto key, double target) {
        for (long i = 0; i < found.count; i++)
            scratch.keys[i] = key(i), scratch.key_weights[i] = found.weights[i];
        return reach(scratch.keys, scratch.key_weights, found.count, target);
    };
    auto fall = [&](long i) { return -double(found.scaled[i]); };
    double total = 0, whole;
    if (!limited && !bounded && d.top_p < 1) {
        // Tokens of probability below (1 - p) / vocabulary weigh less than 1 - p together, so the nucleus is above them. Half of
        // that is a margin for the rounding of weights.
        WideSum sum{};
        for (long j = 0; j < row.vocab; j += W) sum.add(weight_of(row.scaled(j)));
        whole = sum.total();
        gather(row, -__FLT_MAX__, float(0.5 * (1.0 - d.top_p) * whole / double(row.vocab)), scratch);
        total = found.narrow_to([](long) { return true; });
    } else {
        gather(row, limited ? top_k_bound(row, d.top_k, d.floor, scratch) : d.floor, 0.0f, scratch);
        float kept = -__FLT_MAX__;
        if (limited && found.count > d.top_k) {
            for (long i = 0; i < found.count; i++) scratch.keys[i] = fall(i), scratch.key_weights[i] = 1.0f;
            kept = float(-reach(scratch.keys, scratch.key_weights, found.count, double(d.top_k)));
        }
        whole = total = found.narrow_to([&](long i) { return found.scaled[i] >= kept; });
    }
    if (d.top_p < 1) {
        const double wanted = d.top_p * whole;
        const double last = reached(fall, wanted < total ? wanted : total);
        total = found.narrow_to([&](long i) { return fall(i) <= last; });
    }
    if (d.typical_p < 1) {
        // A token's surprisal minus the entropy is the mean scaled logit minus its own. Products are rounded to 2^-34 too.
        double moment = 0;
        for (long i = 0; i < found.count; i++)
            moment += (double(found.weights[i]) * double(found.scaled[i]) + 0x1.8p18) - 0x1.8p18;
        const double mean = moment / total;
        auto distance = [&](long i) { return __builtin_fabs(double(found.scaled[i]) - mean); };
        const double last = reached(distance, d.typical_p * total);
        total = found.narrow_to([&](long i) { return distance(i) <= last; });
    }
    if (d.exclude_from < 1) {  // of the top choices the least likely stays
        const double share = d.exclude_from * total;
        float least = __builtin_inff();
        for (long i = 0; i < found.count; i++)
            if (double(found.weights[i]) >= share && found.scaled[i] < least) least = found.scaled[i];
        total = found.narrow_to([&](long i) { return found.scaled[i] <= least; });
    }
    const double target = target_of(d.uniform, total);
    double before = 0;
    long at = 0;
    while ((before += double(found.weights[at])) <= target) at++;
    return found.ids[at];
}

INLINE void sample_row(SamplingRow &d, const float *logits, long vocab, char *block) {
    SamplingScratch scratch(block, vocab);
    long first = 0;
    d.token = -1;
    float top = row_largest(logits, vocab, scratch.spans, &first);
    d.status = finite(top) ? 0 : 1;
    if (d.status) return;
    if (d.allowed || d.num_forbidden || d.num_biased || d.num_counted || d.num_decreased || d.mask) {
        if (!change(d, logits, scratch.changed, vocab)) {
            d.status = 3;
            return;
        }
        logits = scratch.changed;
        top = row_largest(logits, vocab, scratch.spans, &first);
        d.status = finite(top) ? 0 : 2;
        if (d.status) return;
    }
    const ScaledRow row{logits, vocab, top, d.temperature};
    const bool everything = d.floor <= -__FLT_MAX__ && d.top_k <= 0 && d.top_p >= 1 && d.typical_p >= 1 &&
                            d.exclude_from >= 1;
    d.token = d.temperature <= 0 ? first : everything ? sample_unfiltered(d, row, scratch) : sample_filtered(d, row, scratch);
}

// Fills token and status of each row to sample. logits: rows of `vocab` float32, row stride `stride`. scratch: its size limits the
// number of threads. Returns 1 if it is too small for one, 2 for a row out of range.
EXPORT int WINDLASS_NAME(sample_tokens)(const float *logits, long stride, long rows, long vocab, void *const *draws,
                                      long count, void *scratch, long scratch_bytes) {
    const long each = SamplingScratch::bytes(vocab);
    const long room = min_of(scratch_bytes / each, count);
    if (count && !room) return 1;
    for (long i = 0; i < count; i++) {
        const SamplingRow &d = *(const SamplingRow *)draws[i];
        if (d.row < 0 || d.row >= rows) return 2;
    }
#pragma omp parallel for num_threads(min_of(room, threads_for(count * vocab, count))) schedule(static)
    for (long i = 0; i < count; i++) {
        SamplingRow &d = *(SamplingRow *)draws[i];
        sample_row(d, logits + d.row * stride, vocab, (char *)scratch + each * omp_get_thread_num());
    }
    return 0;
}

}  // namespace
