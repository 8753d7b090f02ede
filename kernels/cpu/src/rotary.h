// Rotary position embedding: angles, rotation with append to the cache, re-rotation of cached keys, rotated query copies.

#pragma once

#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

// ---- cosines and sines of angles formed in float64 ----

constexpr int DW = W / 2;  // doubles per vector
typedef double vd __attribute__((vector_size(4 * W)));
typedef int64_t vl __attribute__((vector_size(4 * W)));
typedef float vf_half __attribute__((vector_size(2 * W), aligned(4), may_alias));
typedef vd vd_any __attribute__((aligned(8), may_alias));

constexpr double PI_PART_1 = 0x1.921fbp+0, PI_PART_2 = 0x1.5110bp-22, PI_PART_3 = 0x1.18469898cc517p-44;  // of pi / 2
constexpr double FAR = 3e9;  // radians; beyond, a quarter turn's count times HALF_PI is no longer exact

// cos and sin of |x| < FAR to a few 1e-16: Cody and Waite's reduction by pi/2 in three parts, whose products with a count
// below 2^31 are exact, and the polynomials of FreeBSD's k_cos.c and k_sin.c.
INLINE void cos_sin_of(vd x, vd &cos, vd &sin) {
    const vd magic = vd{} + 0x1.8p52;  // adding it rounds to an integer in the low bits
    const vd shifted = x * 0x1.45f306dc9c883p-1 + magic;
    const vd n = shifted - magic;
    const vd r = ((x - n * PI_PART_1) - n * PI_PART_2) - n * PI_PART_3;
    const vd z = r * r;
    vd s = vd{} + 1.58969099521155010221e-10;
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z - 1.66666666666666324348e-01;
    s = s * z * r + r;
    vd c = vd{} - 1.13596475577881948265e-11;
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = c * z * z + (1.0 - 0.5 * z);
    const vl quarter = (vl)shifted & 3, odd = -(quarter & 1);
    cos = (vd)(((odd & (vl)s) | (~odd & (vl)c)) ^ (((quarter + 1) & 2) << 62));
    sin = (vd)(((odd & (vl)c) | (~odd & (vl)s)) ^ ((quarter & 2) << 62));
}

// cos[g, t, j] and sin[g, t, j] of inv_freq[g, rows[t], j] * positions[t]. inv_freq: [groups, table_rows, half]. Every
// element is computed by the same instructions at any index. Returns 2 for a row outside the table.
EXPORT int WINDLASS_NAME(rotary_angles)(const double *inv_freq, long groups, long table_rows, long half,
                                        const int64_t *rows, const int64_t *positions, long tokens, float *cos,
                                        float *sin) {
    for (long t = 0; t < tokens; t++)
        if (rows[t] < 0 || rows[t] >= table_rows) return 2;
#pragma omp parallel for num_threads(threads_for(groups * tokens * half * 4, groups * tokens)) schedule(static)
    for (long unit = 0; unit < groups * tokens; unit++) {
        const long g = unit / tokens, t = unit % tokens;
        const double *frequency = inv_freq + (g * table_rows + rows[t]) * half;
        for (long j = 0; j < half; j += DW) {
            const long n = min_of(DW, half - j);
            vd angle = {};
            if (n == DW) angle = *(const vd_any *)(frequency + j);
            else for (long i = 0; i < n; i++) angle[i] = frequency[j + i];
            angle *= (double)positions[t];
            vd c, s;
            cos_sin_of(angle, c, s);
            for (int i = 0; i < DW; i++)
                if (!(angle[i] < FAR && angle[i] > -FAR)) c[i] = __builtin_cos(angle[i]), s[i] = __builtin_sin(angle[i]);
            float *to_cos = cos + unit * half + j, *to_sin = sin + unit * half + j;
            if (n == DW) {
                *(vf_half *)to_cos = __builtin_convertvector(c, vf_half);
                *(vf_half *)to_sin = __builtin_convertvector(s, vf_half);
            } else {
                for (long i = 0; i < n; i++) to_cos[i] = (float)c[i], to_sin[i] = (float)s[i];
            }
        }
    }
    return 0;
}

// ---- rotation ----

// Non-temporal store, for pages too large to stay in the caches. p is aligned to a vector.
INLINE void stream(float *p, vf x) {
#if defined(__x86_64__) && WINDLASS_LANES == 16 && !defined(WINDLASS_PORTABLE)
    _mm512_stream_ps(p, (__m512)x);
#elif defined(__x86_64__) && WINDLASS_LANES == 8 && !defined(WINDLASS_PORTABLE)
    _mm256_stream_ps(p, (__m256)x);
#else
    store(p, x);
#endif
}
template <class T> INLINE void stream(T *p, vf x) { store(p, x); }
INLINE void finish_streams() {
#if defined(__x86_64__) && WINDLASS_LANES >= 8 && !defined(WINDLASS_PORTABLE)
    _mm_sfence();
#endif
}
template <bool past_caches, class T> INLINE void put(T *p, vf x) {
    if constexpr (past_caches) stream(p, x);
    else store(p, x);
}

// target = source rotated by half-split pairs (j, j + half), the pair times `scale`; dims past 2 * half are copied.
template <bool past_caches, class TS, class TT>
INLINE void rotate_head(const TS *source, TT *target, long dim, long half, const float *cos, const float *sin, float scale) {
    long j = 0;
    for (; j + W <= half; j += W) {
        const vf a = load(source + j), b = load(source + half + j), c = load(cos + j), s = load(sin + j);
        put<past_caches>(target + j, (a * c - b * s) * scale);
        put<past_caches>(target + half + j, (b * c + a * s) * scale);
    }
    for (; j < half; j++) {
        const float a = widen(source[j]), b = widen(source[half + j]);
        narrow((a * cos[j] - b * sin[j]) * scale, target[j]);
        narrow((b * cos[j] + a * sin[j]) * scale, target[half + j]);
    }
    if ((const void *)source == (const void *)target) return;
    for (j = 2 * half; j < dim; j++) narrow(widen(source[j]), target[j]);
}

template <bool past_caches, class TS, class TT> INLINE void copy_row(const TS *source, TT *target, long n) {
    long j = 0;
    if constexpr (past_caches)
        for (; j + W <= n; j += W) stream(target + j, load(source + j));
    copy_converted(source + j, target + j, n - j);
}

// Angles of rows: cosines and sines, [rows][half].
struct Angles {
    const float *cos; long cos_row;
    const float *sin; long sin_row;
    long half;

    // target = source rotated by row n.
    template <bool past_caches = false, class TS, class TT>
    INLINE_MEMBER void rotate(long n, const TS *source, TT *target, long dim, float scale = 1.0f) const {
        rotate_head<past_caches>(source, target, dim, half, cos + n * cos_row, sin + n * sin_row, scale);
    }
};

// Tokens whose keys are appended to a cache: q [tokens, heads, dim] with a factor per token, and their slots, negative for padding.
struct Appended {
    void *q; long q_row, q_head;
    const float *q_scale;
    const int64_t *slots;
    long tokens, heads, dim;
    Angles angles;

    INLINE_MEMBER bool fit(long num_slots) const {
        for (long t = 0; t < tokens; t++)
            if (slots[t] >= num_slots) return false;
        return true;
    }
    INLINE_MEMBER long threads(long kv_heads) const { return threads_for(tokens * (heads + kv_heads) * dim, tokens); }
    // Rotates the queries of all tokens, of type T, and calls append(t, thread) for each one with a slot. streams: append stores past
    // the caches.
    template <class T, bool streams = false, class F> void rotate(long threads, const F &append) const {
        Units units(tokens, max_of(1, ceil_div(tokens, threads)));
        on_threads(threads, [&](long thread) {
            units.take([&](long t) {
                for (long h = 0; h < heads; h++) {
                    T *head = (T *)q + t * q_row + h * q_head;
                    angles.rotate(t, head, head, dim, q_scale[t]);
                }
                if (slots[t] >= 0) append(t, thread);
            });
            if constexpr (streams) finish_streams();
        });
    }
};

// Whether cached keys may be moved from and to these slots.
INLINE bool slots_exist(const int64_t *sources, const int64_t *targets, long count, long num_slots) {
    for (long n = 0; n < count; n++)
        if (sources[n] < 0 || sources[n] >= num_slots || targets[n] < 0 || targets[n] >= num_slots) return false;
    return true;
}

INLINE bool aligned(const void *p) { return (uintptr_t)p % (4 * W) == 0; }

// Pages: [slots, kv_heads, dim], contiguous, one type. Negative slots are padding: q is rotated, nothing is written.
// past_caches: write float32 pages around the caches where they are aligned to vectors. Returns 2 for a slot past
// num_slots, with nothing touched.
EXPORT int WINDLASS_NAME(rotate_and_append)(
    void *q, long q_row, long q_head, const void *k, long k_row, long k_head, const void *v, long v_row, long v_head,
    int type, const float *cos, long cos_row, const float *sin, long sin_row, const float *q_scale, void *key_pages,
    void *value_pages, int page_type, long num_slots, const int64_t *slots, long tokens, long q_heads, long kv_heads,
    long dim, long value_dim, long half, int past_caches) {
    const Appended p = {q, q_row, q_head, q_scale, slots, tokens, q_heads, dim, {cos, cos_row, sin, sin_row, half}};
    if (!p.fit(num_slots)) return 2;
    const bool whole = dim % W == 0 && value_dim % W == 0 && half % W == 0 && aligned(key_pages) && aligned(value_pages);
    with_type(type, [&](auto *element) {
        with_type(page_type, [&](auto *page) {
            typedef __typeof__(*element) TS;
            typedef __typeof__(*page) TP;
            const auto rotate_all = [&](auto streams) {
                constexpr bool STREAMS = decltype(streams)::value;
                p.rotate<TS, STREAMS>(p.threads(2 * kv_heads), [&](long t, long) {
                    const TS *key = (const TS *)k + t * k_row, *value = (const TS *)v + t * v_row;
                    TP *keys = (TP *)key_pages + slots[t] * kv_heads * dim;
                    TP *values = (TP *)value_pages + slots[t] * kv_heads * value_dim;
                    for (long h = 0; h < kv_heads; h++) p.angles.rotate<STREAMS>(t, key + h * k_head, keys + h * dim, dim);
                    for (long h = 0; h < kv_heads; h++) copy_row<STREAMS>(value + h * v_head, values + h * value_dim, value_dim);
                });
            };
            if constexpr (sizeof(TP) == 4) {
                if (past_caches && whole) return rotate_all(Number<1>());
            }
            rotate_all(Number<0>());
        });
    });
    return 0;
}
RECORDABLE(rotate_and_append)

// Keys at sources are rotated by the given angles and written to targets together with their values; an entry whose source is its
// target is rotated in place. No target may be another entry's source or target. Pages: [slots, kv_heads, dim], contiguous, one
// type; dims past 2 * half and values are copied bit by bit. Returns 2 for a slot outside the pages, with nothing touched.
EXPORT int WINDLASS_NAME(rerotate_cached_keys)(void *key_pages, void *value_pages, int page_type, long num_slots,
                                               const int64_t *sources, const int64_t *targets, long count, const float *cos,
                                               long cos_row, const float *sin, long sin_row, long kv_heads, long dim,
                                               long value_dim, long half) {
    if (!slots_exist(sources, targets, count, num_slots)) return 2;
    const Angles angles = {cos, cos_row, sin, sin_row, half};
    with_type(page_type, [&](auto *page) {
        typedef __typeof__(*page) T;
#pragma omp parallel for num_threads(threads_for(count * kv_heads * (dim + value_dim), count)) schedule(static)
        for (long n = 0; n < count; n++) {
            const T *source = (const T *)key_pages + sources[n] * kv_heads * dim;
            T *target = (T *)key_pages + targets[n] * kv_heads * dim;
            for (long h = 0; h < kv_heads; h++, source += dim, target += dim) {
                angles.rotate(n, source, target, 2 * half);
                if (source != target)
                    __builtin_memcpy(target + 2 * half, source + 2 * half, (dim - 2 * half) * sizeof(T));
            }
            if (sources[n] == targets[n]) continue;
            const long row = kv_heads * value_dim;
            __builtin_memcpy((T *)value_pages + targets[n] * row, (const T *)value_pages + sources[n] * row, row * sizeof(T));
        }
    });
    return 0;
}

// out = q [tokens, heads, dim] unchanged, then q[rows[m]] for every m, rotated by the m-th of `copies` angles: the rotated query
// copies of attention_key_ranges.h. out is contiguous, of q's type. Returns 2 for a row that q lacks; nothing is written then.
EXPORT int WINDLASS_NAME(rotate_queries)(const void *q, long q_row, long q_head, int q_type, const int64_t *rows, const float *cos,
                                       long cos_row, const float *sin, long sin_row, void *out, long tokens, long copies,
                                       long heads, long dim, long half) {
    for (long m = 0; m < copies; m++)
        if (rows[m] < 0 || rows[m] >= tokens) return 2;
    const Angles angles = {cos, cos_row, sin, sin_row, half};
    with_type(q_type, [&](auto *type) {
        typedef __typeof__(*type) T;
        for_units(tokens + copies, threads_for((tokens + copies) * heads * dim, tokens + copies), [&](long n) {
            const long m = n - tokens;
            const T *source = (const T *)q + (m < 0 ? n : (long)rows[m]) * q_row;
            T *target = (T *)out + n * heads * dim;
            for (long h = 0; h < heads; h++, source += q_head, target += dim) {
                const long rotated = m < 0 ? 0 : 2 * half;
                if (rotated) angles.rotate(m, source, target, rotated);
                __builtin_memcpy(target + rotated, source + rotated, (dim - rotated) * sizeof(T));
            }
        });
    });
    return 0;
}
RECORDABLE(rotate_queries)

}  // namespace
