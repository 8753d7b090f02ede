// Passes over a row of logits: exact weights and their sums, the largest, and those that reach a share of the total.
//
// Nothing is sorted, and every number that decides is exact: weights are multiples of 2^-34, so that their float64 sums are exact
// in any order.

#pragma once

#include "simd.h"

namespace {

constexpr long SPAN = 128;   // elements whose maximum is stored, so that entire spans can be skipped
constexpr long FEW = 48;     // up to this many keys are sorted instead of binned
constexpr int BINS = 2048;

// See simd.h.
INLINE float rounded(float x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}

// exp(x) for x <= 0 as a multiple of 2^-34 (so 0 from about -24.3 on), by float32 operations in the order written here.
INLINE vf weight_of(vf x) {
    const vf low = splat(-30.0f), coarse = splat(0x1p-11f);
    const vf clamped = x < low ? low : x;
    const vf shifted = rounded(clamped * 1.44269504f) + ROUNDER;
    const vf n = shifted - ROUNDER;
    const vf r = (clamped - rounded(n * 0.693359375f)) + rounded(n * 2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = rounded(p * r) + 1.3981999507e-3f;
    p = rounded(p * r) + 8.3334519073e-3f;
    p = rounded(p * r) + 4.1665795894e-2f;
    p = rounded(p * r) + 1.6666665459e-1f;
    p = rounded(p * r) + 5.0000001201e-1f;
    p = rounded(rounded(p * r) * r) + r + 1.0f;
    const vf y = p * (vf)(((vi)shifted - (vi)splat(ROUNDER) + 127) << 23);
    return y < coarse ? rounded(y + coarse) - coarse : y;
}

INLINE bool any(vi mask) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(WINDLASS_AVX)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(WINDLASS_NEON)
    return vmaxvq_u32((uint32x4_t)mask);
#else
    int32_t all = 0;
    for (int i = 0; i < W; i++) all |= mask[i];
    return all;
#endif
}

// Sums in float64. Where nothing is lost, the order is free.
struct WideSum {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    __m512d a, b;
    INLINE_MEMBER void add(vf x) {
        a = _mm512_add_pd(a, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)));
        b = _mm512_add_pd(b, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)));
    }
    INLINE_MEMBER double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(a, b)); }
#elif defined(WINDLASS_AVX)
    __m256d a, b;
    INLINE_MEMBER void add(vf x) {
        a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)));
        b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)));
    }
    INLINE_MEMBER double total() const {
        double lanes[4];
        _mm256_storeu_pd(lanes, _mm256_add_pd(a, b));
        return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
#elif defined(WINDLASS_NEON)
    float64x2_t a, b;
    INLINE_MEMBER void add(vf x) {
        a = vaddq_f64(a, vcvt_f64_f32(vget_low_f32((float32x4_t)x)));
        b = vaddq_f64(b, vcvt_high_f64_f32((float32x4_t)x));
    }
    INLINE_MEMBER double total() const { return vaddvq_f64(vaddq_f64(a, b)); }
#else
    double lanes[W];
    INLINE_MEMBER void add(vf x) {
        for (int i = 0; i < W; i++) lanes[i] += double(x[i]);
    }
    INLINE_MEMBER double total() const {
        double all = 0;
        for (int i = 0; i < W; i++) all += lanes[i];
        return all;
    }
#endif
};

// W logits from p on, of which n exist; minus infinity past them.
INLINE vf load_logits(const float *p, long n) {
    if (n >= W) return load(p);
    float lanes[W];
    for (long i = 0; i < W; i++) lanes[i] = i < n ? p[i] : -__builtin_inff();
    return load(lanes);
}

// A row after temperature: (logit - largest) / temperature, 0 at most.
struct ScaledRow {
    const float *logits;
    long vocab;
    float largest, temperature;
    INLINE_MEMBER vf scaled(long at) const { return scaled(load_logits(logits + at, vocab - at)); }
    INLINE_MEMBER vf scaled(vf x) const {
        x -= largest;
        return temperature == 1.0f ? x : x / temperature;
    }
    INLINE_MEMBER float scaled(float x) const { return (x - largest) / temperature; }
};

// The maximum of each span and of the row (NaN if any is), and its first index.
INLINE float row_largest(const float *logits, long vocab, float *spans, long *first) {
    float best = -__builtin_inff();
    long best_span = 0;
    vi broken = {};
    for (long begin = 0, s = 0; begin < vocab; begin += SPAN, s++) {
        const long end = min_of(begin + SPAN, vocab);
        vf top = splat(-__builtin_inff());
        for (long j = begin; j < end; j += W) {
            const vf x = load_logits(logits + j, end - j);
            broken |= (vi)(x != x);
            top = larger(x, top);
        }
        spans[s] = largest(top);
        if (spans[s] > best) best = spans[s], best_span = s;
    }
    if (any(broken)) return __builtin_nanf("");
    long at = best_span * SPAN;
    while (at < vocab && logits[at] != best) at++;
    *first = at;
    return best;
}

INLINE bool finite(float x) { return x - x == 0.0f; }

// The smallest key at which the weights of it and of all smaller ones reach the target, the largest if none does. Keys are
// 0 or more; both arrays are overwritten. Bins by key, then by bits of the key, so that each key is visited a few times only.
NOINLINE double reach(double *keys, float *weights, long count, double target) {
    double before = 0;
    double filled[BINS];
    bool linear = true;  // first in bins 1/64 wide, since logits are evenly spread; within a bin by bits, 11 at a time
    for (int shift = 63; count > FEW && shift > 0;) {
        const int next = linear ? shift : int(max_of(shift - 11, 0));
        const uint64_t mask = (uint64_t(1) << (shift - next)) - 1;
        auto bin_of = [&](double key) -> long {
            if (linear) return key < double(BINS - 1) / 64 ? long(key * 64) : BINS - 1;
            uint64_t bits;
            __builtin_memcpy(&bits, &key, 8);
            return long((bits >> next) & mask);
        };
        for (double &x : filled) x = 0;
        for (long i = 0; i < count; i++) filled[bin_of(keys[i])] += double(weights[i]);
        long bin = 0, last = 0;
        for (long b = 0; b < BINS; b++) last = filled[b] > 0 ? b : last;
        while (bin < last && before + filled[bin] < target) before += filled[bin++];
        while (bin < last && !(filled[bin] > 0)) bin++;  // a target of 0 is reached by the first key there is
        long kept = 0;
        for (long i = 0; i < count; i++) {
            const bool mine = bin_of(keys[i]) == bin;
            keys[kept] = keys[i], weights[kept] = weights[i];
            kept += mine;
        }
        count = kept;
        shift = next;  // 63 again after the linear bins: keys have no sign
        linear = false;
    }
    if (count > FEW) return keys[0];  // equal in every bit
    for (long i = 1; i < count; i++) {
        const double key = keys[i];
        const float weight = weights[i];
        long j = i;
        for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1], weights[j] = weights[j - 1];
        keys[j] = key, weights[j] = weight;
    }
    long at = 0;
    while (at < count - 1 && (before += double(weights[at])) < target) at++;
    return keys[at];
}

// Below u * total, which rounding could otherwise reach.
INLINE double target_of(double u, double total) {
    uint64_t bits;
    __builtin_memcpy(&bits, &total, 8);
    bits--;
    double below;
    __builtin_memcpy(&below, &bits, 8);
    const double wanted = u * total;
    return wanted < below ? wanted : below;
}

// The remaining candidate tokens of a row, in the order of their ids.
struct Candidates {
    float *scaled, *weights;
    int32_t *ids;
    long count;
    // Retains the candidates for which keep(i) holds and returns the sum of their weights.
    template <class F> INLINE_MEMBER double narrow_to(F keep) {
        long kept = 0;
        double total = 0;
        for (long i = 0; i < count; i++) {
            const bool mine = keep(i);
            const float weight = weights[i];
            scaled[kept] = scaled[i], weights[kept] = weight, ids[kept] = ids[i];
            kept += mine;
            total += mine ? double(weight) : 0.0;
        }
        count = kept;
        return total;
    }
};

// Memory of one thread for one row, in a block that the caller gives: 32 bytes per token and some for the spans.
struct SamplingScratch {
    float *changed;   // [vocab]
    float *spans;     // [spans]
    double *sums;     // [spans]
    double *keys;     // [vocab]
    float *key_weights;
    Candidates found;
    static INLINE_MEMBER long tokens(long vocab) { return round_up(vocab + 1, SPAN); }
    static INLINE_MEMBER long bytes(long vocab) { return tokens(vocab) * 32 + (tokens(vocab) / SPAN + 1) * 16; }
    INLINE_MEMBER SamplingScratch(char *block, long vocab) {
        const long n = tokens(vocab), s = n / SPAN + 1;
        keys = (double *)block, block += 8 * n;
        sums = (double *)block, block += 8 * s;
        changed = (float *)block, block += 4 * n;
        key_weights = (float *)block, block += 4 * n;
        found.scaled = (float *)block, block += 4 * n;
        found.weights = (float *)block, block += 4 * n;
        found.ids = (int32_t *)block, block += 4 * n;
        spans = (float *)block;
        found.count = 0;
    }
};

}  // namespace
