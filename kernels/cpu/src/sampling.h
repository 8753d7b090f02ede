// Drawing a token per row of logits: changes of a request, temperature, min-p, top-k, top-p, typical-p, inverse CDF.
//
// Nothing is sorted, and every number that decides is exact: weights are multiples of 2^-34, so that their sums in float64
// are right to the last bit in any order. Which token a row yields therefore follows from its own numbers alone, whatever
// the instruction set, and engine/sampling/draw.py comes to the same one with other means.

constexpr long SPAN = 128;   // elements whose largest is kept, so that whole spans can be passed over
constexpr long FEW = 48;     // so many keys are sorted rather than poured into bins
constexpr int BINS = 2048;

// One row to draw. The same in kernels/cpu/sampling.py.
struct Draw {
    int64_t row;                                       // of the logits
    const int64_t *allowed; int64_t num_allowed;       // null: all tokens
    const int64_t *forbidden; int64_t num_forbidden;
    const int64_t *biased; const float *bias; int64_t num_biased;
    const int64_t *counted; const float *in_output; int64_t num_counted;  // tokens of the text, and their number in its output
    float repetition, frequency, presence;
    float temperature;                                 // 0 or less: the first of the largest
    float floor;                                       // log(min_p), or below everything
    int32_t status;                                    // set: 0 drawn, 1 bad logits, 2 nothing left, 3 an id is no token
    int64_t top_k;                                     // 0: off
    double top_p, typical_p;                           // 1: off
    double uniform;                                    // [0, 1)
    int64_t token;                                     // set
};
static_assert(sizeof(void *) != 8 || sizeof(Draw) == 152, "no padding but what ctypes expects");

// A product that is rounded before something is added to it: fused, it would be another number where there is FMA.
INLINE vf rounded(vf x) {
#if defined(WINDLASS_FMA)
    asm("" : "+v"(x));
#elif defined(__x86_64__) && WINDLASS_LANES == 4
    asm("" : "+x"(x));
#elif defined(__aarch64__) && WINDLASS_LANES == 4
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}
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
    const vf low = splat(-30.0f), magic = splat(12582912.0f), coarse = splat(0x1p-11f);
    const vf clamped = x < low ? low : x;
    const vf shifted = rounded(clamped * 1.44269504f) + magic;
    const vf n = shifted - magic;
    const vf r = (clamped - rounded(n * 0.693359375f)) + rounded(n * 2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = rounded(p * r) + 1.3981999507e-3f;
    p = rounded(p * r) + 8.3334519073e-3f;
    p = rounded(p * r) + 4.1665795894e-2f;
    p = rounded(p * r) + 1.6666665459e-1f;
    p = rounded(p * r) + 5.0000001201e-1f;
    p = rounded(rounded(p * r) * r) + r + 1.0f;
    const vf y = p * (vf)(((vi)shifted - (vi)magic + 127) << 23);
    return y < coarse ? rounded(y + coarse) - coarse : y;
}

INLINE bool any(vi mask) {
#if defined(WINDLASS_FMA) && WINDLASS_LANES == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(WINDLASS_FMA)
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
#if defined(WINDLASS_FMA) && WINDLASS_LANES == 16
    __m512d a, b;
    INLINE_MEMBER void add(vf x) {
        a = _mm512_add_pd(a, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)));
        b = _mm512_add_pd(b, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)));
    }
    INLINE_MEMBER double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(a, b)); }
#elif defined(WINDLASS_FMA)
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

// W logits from p on, of which there are n; minus infinity stands past them.
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

// The largest of each span and of the row, which is NaN if any is; and the first place where it stands.
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
// 0 or more; both arrays are overwritten. By bins of keys and then of their bits, so that the work is a few looks at each.
NOINLINE double reach(double *keys, float *weights, long count, double target) {
    double before = 0;
    double filled[BINS];
    bool linear = true;  // first in bins 1/64 wide, for logits lie evenly; what falls into one is told apart by bits, 11 at a time
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
        shift = next;  // 63 again after the linear bins: a sign there is not
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

// The tokens a row may still yield, in the order of their ids.
struct Candidates {
    float *scaled, *weights;
    int32_t *ids;
    long count;
    // Keeps those for which keep(i) holds, and returns what they weigh.
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
struct DrawMemory {
    float *changed;   // [vocab]
    float *spans;     // [spans]
    double *sums;     // [spans]
    double *keys;     // [vocab]
    float *key_weights;
    Candidates found;
    static INLINE_MEMBER long tokens(long vocab) { return round_up(vocab + 1, SPAN); }
    static INLINE_MEMBER long bytes(long vocab) { return tokens(vocab) * 32 + (tokens(vocab) / SPAN + 1) * 16; }
    INLINE_MEMBER DrawMemory(char *block, long vocab) {
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

// Applies masks, biases and penalties in this order (see engine/sampling/penalties.py); false where an id is no token.
INLINE bool change(const Draw &d, const float *source, float *row, long vocab) {
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
    return each(d.forbidden, d.num_forbidden, [&](int64_t id, int64_t) { row[id] = -__builtin_inff(); }) &&
           each(d.biased, d.num_biased, [&](int64_t id, int64_t i) { row[id] += d.bias[i]; }) &&
           each(d.counted, d.num_counted, [&](int64_t id, int64_t i) {
               float x = row[id];
               if (d.repetition != 1.0f) x = x < 0 ? rounded(x * d.repetition) : x / d.repetition;
               x -= rounded(d.frequency * d.in_output[i]);
               x -= d.in_output[i] > 0 ? d.presence : 0.0f;
               row[id] = x;
           });
}

INLINE long draw_from_all(const Draw &d, const ScaledRow &row, DrawMemory &scratch) {
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

// Gathers the tokens of a scaled logit of at least `floor` and a weight above 0 and of at least `least`.
INLINE void gather(const ScaledRow &row, float floor, float least, DrawMemory &scratch) {
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

// A bound below the k-th largest: the k-th largest of the spans' largest, as each stands for another token.
INLINE float top_k_bound(const ScaledRow &row, long k, float floor, DrawMemory &scratch) {
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

INLINE long draw_narrowed(const Draw &d, const ScaledRow &row, DrawMemory &scratch) {
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
        // Tokens of probability below (1 - p) / vocabulary together weigh less than 1 - p, so the nucleus lies above them.
        // Half of it leaves room for the rounding of weights.
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
        // A token's surprise less the entropy is the mean scaled logit less its own. Products are rounded to 2^-34 too.
        double moment = 0;
        for (long i = 0; i < found.count; i++)
            moment += (double(found.weights[i]) * double(found.scaled[i]) + 0x1.8p18) - 0x1.8p18;
        const double mean = moment / total;
        auto distance = [&](long i) { return __builtin_fabs(double(found.scaled[i]) - mean); };
        const double last = reached(distance, d.typical_p * total);
        total = found.narrow_to([&](long i) { return distance(i) <= last; });
    }
    const double target = target_of(d.uniform, total);
    double before = 0;
    long at = 0;
    while ((before += double(found.weights[at])) <= target) at++;
    return found.ids[at];
}

INLINE void draw_row(Draw &d, const float *logits, long vocab, char *block) {
    DrawMemory scratch(block, vocab);
    long first = 0;
    d.token = -1;
    float top = row_largest(logits, vocab, scratch.spans, &first);
    d.status = finite(top) ? 0 : 1;
    if (d.status) return;
    if (d.allowed || d.num_forbidden || d.num_biased || d.num_counted) {
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
    const bool everything = d.floor <= -__FLT_MAX__ && d.top_k <= 0 && d.top_p >= 1 && d.typical_p >= 1;
    d.token = d.temperature <= 0 ? first : everything ? draw_from_all(d, row, scratch) : draw_narrowed(d, row, scratch);
}

// Fills token and status of each draw. logits: rows of `vocab` float32, `stride` apart. scratch: memory for as many threads
// as it has room for. Returns 1 where that is none, 2 where a draw's row lies outside.
EXPORT int WINDLASS_NAME(draw_tokens)(const float *logits, long stride, long rows, long vocab, void *const *draws,
                                      long count, void *scratch, long scratch_bytes) {
    const long each = DrawMemory::bytes(vocab);
    const long room = min_of(scratch_bytes / each, count);
    if (count && !room) return 1;
    for (long i = 0; i < count; i++) {
        const Draw &d = *(const Draw *)draws[i];
        if (d.row < 0 || d.row >= rows) return 2;
    }
#pragma omp parallel for num_threads(min_of(room, threads_for(count * vocab, count))) schedule(static)
    for (long i = 0; i < count; i++) {
        Draw &d = *(Draw *)draws[i];
        draw_row(d, logits + d.row * stride, vocab, (char *)scratch + each * omp_get_thread_num());
    }
    return 0;
}
