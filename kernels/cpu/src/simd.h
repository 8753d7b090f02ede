// Vectors of WINDLASS_LANES floats, element conversions and elementary functions.
//
// Written with the compiler's vector extensions, so the same text serves every instruction set: each isa_*.cpp defines
// WINDLASS_LANES and the compiler's target, then includes the kernels inside an anonymous namespace. Intrinsics appear
// only where the extensions have no form (float16) or a slow one.

#pragma once

#include "system_headers.h"

// Exported functions are named windlass_<function>_<instruction set>.
#define WINDLASS_JOIN_(name, isa) windlass_##name##_##isa
#define WINDLASS_JOIN(name, isa) WINDLASS_JOIN_(name, isa)
#define WINDLASS_NAME(name) WINDLASS_JOIN(name, WINDLASS_ISA)
#define EXPORT extern "C" __attribute__((visibility("default")))
#define NOINLINE __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

#if defined(__x86_64__) && WINDLASS_LANES >= 8 && !defined(WINDLASS_PORTABLE)
#define WINDLASS_AVX  // instructions of AVX2, FMA and F16C; with 16 lanes of AVX-512
#endif
#if WINDLASS_LANES == 16 || (WINDLASS_LANES == 4 && defined(__aarch64__))
#define WINDLASS_REGISTERS 32  // of vectors
#else
#define WINDLASS_REGISTERS 16
#endif

namespace {

constexpr int W = WINDLASS_LANES;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vu vu_any __attribute__((aligned(2), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint8_t vbu __attribute__((vector_size(W)));
typedef vb vb_any __attribute__((aligned(1), may_alias));
typedef vbu vbu_any __attribute__((aligned(1), may_alias));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// acc + a * b. The instruction, if there is one, is written explicitly: the compiler prefers forms that overwrite a factor and
// then spills the accumulators of a tile that fills all registers (measured: a third slower).
INLINE vf add_product(vf acc, vf a, vf b) {
#if defined(WINDLASS_AVX)
    asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#elif defined(WINDLASS_NEON)
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(acc) : "w"(a), "w"(b));
    return acc;
#else
    return acc + a * b;
#endif
}

// Keeps the compiler from seeing through a value.
INLINE void hide(vu &x) {
#if defined(WINDLASS_AVX)
    asm("" : "+v"(x));
#elif defined(__x86_64__) && WINDLASS_LANES == 4
    asm("" : "+x"(x));
#elif defined(__aarch64__) && WINDLASS_LANES == 4  // has fused instructions in the portable form too
    asm("" : "+w"(x));
#elif defined(__aarch64__)
    asm("" : "+m"(x));
#else
    (void)x;
#endif
}

// A product that is rounded before an addition: fused with it, the sum would be another number.
INLINE vf rounded(vf x) {
    vu bits = (vu)x;
    hide(bits);
    return (vf)bits;
}
INLINE vf magnitude_of(vf x) { return (vf)((vu)x & 0x7fffffffu); }
// Bits of numbers that are never negative rise with the number, and those of NaN are above all.
INLINE vu larger_bits(vu a, vu b) { return a > b ? a : b; }

INLINE vf splat(float x) { return x - vf{}; }  // not plus: -0 + 0 is not the identity
INLINE vu splat_bits(uint32_t x) { return x - vu{}; }

// The nearest integer (even on a tie) of a magnitude below 2^22.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
INLINE vf nearest(vf x) { return (x + ROUNDER) - ROUNDER; }
INLINE vi nearest_int(vf x) { return (vi)(x + ROUNDER) - (vi)splat(ROUNDER); }

INLINE constexpr long min_of(long a, long b) { return a < b ? a : b; }
INLINE long max_of(long a, long b) { return a > b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long round_up(long a, long b) { return ceil_div(a, b) * b; }

INLINE uint32_t bits_of(float x) { uint32_t u; __builtin_memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; __builtin_memcpy(&x, &u, 4); return x; }

// ---- float16 and bfloat16 <-> float32; stores round to nearest even and keep NaN a NaN ----

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
INLINE float widen(f16 x) {
    // Shifted into place, the exponent is 112 too small; the product is exact for subnormals too.
    const uint32_t magnitude = x.bits & 0x7fffu;
    uint32_t u = bits_of(float_of(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00u) u |= 0x7f800000u;
    return float_of(u | (uint32_t(x.bits & 0x8000u) << 16));
}

INLINE float widen(int8_t x) { return float(x); }

INLINE void narrow(float x, float &y) { y = x; }
INLINE void narrow(float x, bf16 &y) {
    const uint32_t u = bits_of(x);
    y.bits = (u & 0x7fffffffu) > 0x7f800000u ? uint16_t((u >> 16) | 0x40u) : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
INLINE void narrow(float x, f16 &y) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    uint32_t h;
    if (magnitude > 0x7f800000u) h = 0x7e00u;
    else if (magnitude >= 0x477ff000u) h = 0x7c00u;  // 65520 and above round to infinity
    else if (magnitude < 0x38800000u) h = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // subnormal: the adder rounds
    else h = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    y.bits = uint16_t(sign | h);
}

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE vu load_halves(const void *p) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 8  // GCC 12 makes three instructions of the conversion below
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(WINDLASS_NEON)
    return (vu)vmovl_u16((uint16x4_t)*(const vh_any *)p);
#else
    return __builtin_convertvector(*(const vh_any *)p, vu);
#endif
}
INLINE vf load(const bf16 *p) { return (vf)(load_halves(p) << 16); }
INLINE vf load(const f16 *p) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(WINDLASS_NEON)
    return (vf)vcvt_f32_f16((float16x4_t)*(const vh_any *)p);
#else
    const vu h = load_halves(p);
    const vu magnitude = h & 0x7fffu;
    vu u = (vu)((vf)(magnitude << 13) * 0x1p112f);
    u |= (vu)(magnitude >= splat_bits(0x7c00u)) & 0x7f800000u;
    return (vf)(u | ((h & 0x8000u) << 16));
#endif
}
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 8
INLINE vf load(const int8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf load(const uint8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
#elif defined(WINDLASS_AVX)
INLINE vf load(const int8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE vf load(const uint8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
#else
INLINE vf load(const int8_t *p) { return __builtin_convertvector(*(const vb_any *)p, vf); }
INLINE vf load(const uint8_t *p) { return __builtin_convertvector(*(const vbu_any *)p, vf); }
#endif
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE void store(bf16 *p, vf x) {
    const vu u = (vu)x;
    const vu nan = (vu)((u & 0x7fffffffu) > splat_bits(0x7f800000u));
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    *(vh_any *)p = __builtin_convertvector((nan & ((u >> 16) | 0x40u)) | (~nan & rounded), vh);
}
INLINE void store(f16 *p, vf x) {
#if defined(WINDLASS_NEON)
    *(vh_any *)p = (vh)vcvt_f16_f32((float32x4_t)x);
#else
    for (int i = 0; i < W; i++) narrow(x[i], p[i]);
#endif
}

// A constant as an argument.
template <int n> struct Number { static constexpr int value = n; };

// Calls f(pointer of the type) with the type that the code names: 0 float32, 1 bfloat16, 2 float16.
template <class F> INLINE void with_type(int type, F f) {
    if (type == 0) f((float *)nullptr);
    else if (type == 1) f((bf16 *)nullptr);
    else f((f16 *)nullptr);
}

INLINE float element(const void *p, int type, long i) {
    return type == 0 ? ((const float *)p)[i] : type == 1 ? widen(((const bf16 *)p)[i]) : widen(((const f16 *)p)[i]);
}

// The first n < W elements at p, zeros after them; never reads past them.
template <class T> INLINE vf load_some(const T *p, long n) {
    float lanes[W] = {};
    for (long i = 0; i < n; i++) lanes[i] = widen(p[i]);
    return load(lanes);
}
template <class T> INLINE void store_some(T *p, vf x, long n) {
    for (long i = 0; i < n; i++) narrow(x[i], p[i]);
}
// The same for any n > 0: at most W elements.
template <class T> INLINE vf load_part(T p, long n) { return n >= W ? load(p) : load_some(p, n); }
template <class T> INLINE void store_part(T *p, vf x, long n) {
    if (n >= W) store(p, x);
    else store_some(p, x, n);
}

// target = n elements of source, converted.
template <class S, class T> INLINE void copy_converted(S source, T *target, long n) {
    long j = 0;
    for (; j + W <= n; j += W) store(target + j, load(source + j));
    for (; j < n; j++) narrow(widen(source[j]), target[j]);
}

// ---- reductions: a fixed tree, the same for every lane of the result ----

#if WINDLASS_LANES == 4
#define WINDLASS_PAIRS(first, second) {first, first + 2, second, second + 2}
#elif WINDLASS_LANES == 8
#define WINDLASS_PAIRS(first, second) {first, first + 2, second, second + 2, first + 4, first + 6, second + 4, second + 6}
#else
#define WINDLASS_PAIRS(first, second)                                                                  \
    {first, first + 2, second, second + 2, first + 4, first + 6, second + 4, second + 6, first + 8,    \
     first + 10, second + 8, second + 10, first + 12, first + 14, second + 12, second + 14}
#endif

// Sums of neighbours within each quarter of four lanes: (a0+a1, a2+a3, b0+b1, b2+b3), and so on.
INLINE vf add_neighbours(vf a, vf b) {
    const vi even = WINDLASS_PAIRS(0, W), odd = WINDLASS_PAIRS(1, W + 1);
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// The four sums of the lanes of a, b, c and d.
INLINE void sum_four(vf a, vf b, vf c, vf d, float *sums) {
    vf x = add_neighbours(add_neighbours(a, b), add_neighbours(c, d));
#if WINDLASS_LANES >= 16
    x += __builtin_shuffle(x, vi{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, vi{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
#elif WINDLASS_LANES == 8
    x += __builtin_shuffle(x, vi{4, 5, 6, 7, 0, 1, 2, 3});
#endif
    __builtin_memcpy(sums, &x, 16);
}
INLINE float sum(vf x) {
    float sums[4];
    sum_four(x, x, x, x, sums);
    return sums[0];
}
// The sum of a[i] * b[i].
template <class T> INLINE float dot(const T *a, const T *b, long n) {
    vf sums = {};
    long i = 0;
    for (; i + W <= n; i += W) sums = add_product(sums, load(a + i), load(b + i));
    float total = sum(sums);
    for (; i < n; i++) total += widen(a[i]) * widen(b[i]);
    return total;
}

// The larger and the smaller one lane by lane; b where a or b is NaN.
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16  // GCC 12 compares and blends
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(WINDLASS_AVX)
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
#endif
// Whether a lane is above, or NaN.
INLINE bool any_above(vf x, float most) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(most), _CMP_NLE_UQ);
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(most), _CMP_NLE_UQ));
#else
    bool any = false;
    for (int i = 0; i < W; i++) any |= !(x[i] <= most);
    return any;
#endif
}

// All lanes joined, in an order that suits joins whose order is free.
template <int by = W / 2, class V, class F> INLINE auto fold_lanes(V x, const F &join) {
    vi from = {};
    for (int i = 0; i < W; i++) from[i] = (i + by) % W;
    const V both = join(x, __builtin_shuffle(x, from));
    if constexpr (by == 1) return both[0];
    else return fold_lanes<by / 2>(both, join);
}
INLINE float largest(vf x) {
    return fold_lanes(x, [](vf a, vf b) { return larger(a, b); });
}
INLINE uint32_t largest(vu x) {
    return fold_lanes(x, [](vu a, vu b) { return larger_bits(a, b); });
}
INLINE int32_t total_of(vi x) {
    return fold_lanes(x, [](vi a, vi b) { return a + b; });
}

// Exchanges rows[i][j] and rows[j][i].
INLINE void transpose(vf (&rows)[W]) {
    const auto exchange = [&](int step, vi low, vi high) {
        for (int i = 0; i < W; i++) {
            if (i & step) continue;
            const vf a = rows[i], b = rows[i + step];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + step] = __builtin_shuffle(a, b, high);
        }
    };
#if WINDLASS_LANES == 4
    exchange(1, vi{0, 4, 2, 6}, vi{1, 5, 3, 7});
    exchange(2, vi{0, 1, 4, 5}, vi{2, 3, 6, 7});
#elif WINDLASS_LANES == 8
    exchange(1, vi{0, 8, 2, 10, 4, 12, 6, 14}, vi{1, 9, 3, 11, 5, 13, 7, 15});
    exchange(2, vi{0, 1, 8, 9, 4, 5, 12, 13}, vi{2, 3, 10, 11, 6, 7, 14, 15});
    exchange(4, vi{0, 1, 2, 3, 8, 9, 10, 11}, vi{4, 5, 6, 7, 12, 13, 14, 15});
#else
    exchange(1, vi{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
             vi{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
    exchange(2, vi{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
             vi{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    exchange(4, vi{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
             vi{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
    exchange(8, vi{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
             vi{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
#endif
}

// ---- elementary functions, within 2 units in the last place ----

// Cody and Waite's reduction with the polynomial of Cephes' expf. exp(-inf) is 0, NaN stays NaN.
INLINE vf exp_of(vf x) {
    const vf low = splat(-87.33654f), high = splat(88.72283f);
    const vf clamped = x < low ? low : (x > high ? high : x);
    const vf shifted = clamped * 1.44269504f + ROUNDER;
    const vf n = shifted - ROUNDER;
    const vf r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // Two factors, so that 2^128 near the upper end does not overflow on its way.
    const vi exponent = (vi)shifted - (vi)splat(ROUNDER);
    const vi half = exponent >> 1;
    vf y = p * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
    y = x > high ? splat(__builtin_inff()) : y;
    return x < low ? vf{} : y;
}
INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

// 2^x for x <= 0, to 1e-7 relative: a polynomial (minimax, exact at 0) about the nearest integer. 0 below -127; NaN stays NaN.
INLINE vf exp2_of(vf x) {
    const vf low = splat(-127.0f);
    const vf magic = splat(ROUNDER + 127.0f);  // and the exponent's bias
    const vf clamped = larger(low, x);  // NaN stays
    const vf shifted = clamped + magic;
    const vf f = clamped - (shifted - magic);
    vf p = splat(1.326472731e-3f);
    p = p * f + 9.671512991e-3f;
    p = p * f + 5.550733581e-2f;
    p = p * f + 2.402224243e-1f;
    p = p * f + 6.931470037e-1f;
    p = p * f + 1.0f;
    return p * (vf)((vi)shifted << 23);
}

// 2^x for x <= 0, to 4e-6 relative and exact at 0: a polynomial (minimax) from the next lower integer on, where the processor has
// instructions for both parts. exp2_of elsewhere.
INLINE vf rough_exp2_of(vf x) {
#if defined(WINDLASS_BF16) && !defined(WINDLASS_PORTABLE)
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p = splat(1.342668427e-2f);
    p = p * f + 5.224247422e-2f;
    p = p * f + 2.412802048e-1f;
    p = p * f + 6.930448449e-1f;
    p = p * f + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // by the next lower integer, as it reads x
#else
    return exp2_of(x);
#endif
}

// Cephes' tanhf: an odd polynomial near zero, else through exp.
INLINE vf tanh_of(vf x) {
    const vf magnitude = magnitude_of(x);
    const vf z = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const vf near_zero = p * z * x + x;
    const vf away = 1.0f - 2.0f / (exp_of(magnitude + magnitude) + 1.0f);
    const vf signed_away = (vf)((vu)away | ((vu)x & 0x80000000u));
    return magnitude < splat(0.625f) ? near_zero : signed_away;
}

}  // namespace
