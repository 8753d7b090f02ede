// Products of some groups of a panel, or of two, with a tile of x: the innermost loops of block_linear.h.

#pragma once

#include "block_codes.h"
#include "byte_products.h"
#include "simd.h"

namespace {
namespace blocks {

constexpr int TILE_ROWS = WINDLASS_LANES == 16 ? 8 : WINDLASS_LANES == 8 ? 6 : WINDLASS_REGISTERS >= 32 ? 4 : 2;
// Bytes of codes prefetched into L2: codes and scales alternate, which the hardware prefetcher follows poorly, and L1 supports
// too few outstanding misses (measured on Zen 4 with AVX2, one row by 16,384 x 2,048: 33 GB/s of 34 available; 26 with 3,072 bytes
// prefetched into L1).
constexpr long AHEAD = WINDLASS_LANES >= 8 ? 8192 : 3072;
constexpr int INTO = WINDLASS_LANES >= 8 ? 2 : 3;
// With wide vectors and a single tile, scales are converted when they are used instead of a panel at a time: codes and scales are
// then two even streams (measured on Zen 4 with AVX2, as above, of 57 GB/s: 49 instead of 45 at 8 bits, 45 instead of 38 at 4).
constexpr bool SCALES_IN_PASSING = WINDLASS_LANES >= 8;
// With AVX-512, AMD's processors read those streams best without software prefetch while the product is bound by reading (measured,
// GB/s of two cores: Zen 4 59, as a plain sum; 43 with a panel's scales first and codes prefetched. A Xeon with AMX 31 without and 33
// with prefetch; a plain sum reads 35). With more rows the loads of one group hide the next ones from the hardware, and prefetching
// pays (measured on Zen 4, 8 rows by 16,384 x 2,048: 8 bits 500 Gop/s instead of 369, 4 bits 526 instead of 360).
template <class F> INLINE bool reads_best_without_prefetch(long rows) {
#if defined(__x86_64__)
    return WINDLASS_LANES == 16 && rows <= (F::BITS == 8 ? 3 : 2) && __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// Vectors of a panel that process a group together and share the broadcasts of x, as far as registers allow.
template <class F, bool READY> constexpr int vectors_at_once() {
    if (W == 4) return F::BYTES ? 1 : WINDLASS_REGISTERS >= 32 ? 2 : V;
    return F::BYTES && F::UPPER > 0 ? 1 : V;
}
// Whether the results of a panel stay in registers from group to group. With 16 registers the results of several rows would
// evict the byte sums, which are used far more often (measured on an EPYC with AVX2: four rows and 4 bits a seventh slower).
template <class F, int MT> constexpr bool stays_in_registers() { return W != 8 || !F::BYTES || MT <= 2; }

// Exact sums over one group of products of a panel's rows, from the vector at w and x on, with MT rows of x.
template <class F, bool READY, int VS, int MT>
INLINE void group_sums(const uint8_t *w, const uint8_t *x, vi (&sums)[VS][MT]) {
    constexpr long STEP = 4 * F::X * MT, LINE = QUAD_BYTES * F::X;
    if constexpr (F::BYTES) {
#if WINDLASS_BYTES
        BytesSum part[VS][MT];
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++) {
            vub weight[VS];
            for (int v = 0; v < VS; v++)
                weight[v] = READY ? load_bytes(w + q * LINE + v * 4 * W) : unpack_codes<F>(w + v * 4 * W, q);
            for (int m = 0; m < MT; m++) {
                const vi xm = spread(x + q * STEP + 4 * m);
                for (int v = 0; v < VS; v++)
                    part[v][m] = q % F::RUN ? add_bytes(part[v][m], weight[v], xm) : first_bytes(weight[v], xm);
            }
            if (q % F::RUN == F::RUN - 1)
                for (int v = 0; v < VS; v++)
                    for (int m = 0; m < MT; m++)
                        sums[v][m] = q < F::RUN ? total_bytes(part[v][m]) : sums[v][m] + total_bytes(part[v][m]);
        }
#endif
    } else if constexpr (F::PAIRS) {
        // Even bytes of all vectors, then odd ones: half the registers. The hidden pointer makes the bytes load again.
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++) {
            for (int odd = 0; odd < 2; odd++) {
                const uint8_t *from = w;
                if (!READY && odd) asm("" : "+r"(from));
                vs weight[VS];
                for (int v = 0; v < VS; v++) {
                    if (READY) weight[v] = (vs)load_bytes(from + q * LINE + (2 * v + odd) * 4 * W);
                    else {
                        const vub codes = unpack_codes<F>(from + v * 4 * W, q);
                        weight[v] = odd ? odd_bytes(codes, F::BITS == 8) : even_bytes(codes, F::BITS == 8);
                    }
                }
                for (int m = 0; m < MT; m++) {
                    const vs xm = (vs)spread(x + q * STEP + 8 * m + 4 * odd);
                    for (int v = 0; v < VS; v++)
                        sums[v][m] = q || odd ? add_pairs(sums[v][m], weight[v], xm) : madd_pairs(weight[v], xm);
                }
            }
        }
    } else {
#if WINDLASS_QUADS
        for (int v = 0; v < VS; v++)
            for (int m = 0; m < MT; m++) sums[v][m] = vi{};
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++)
            for (int v = 0; v < VS; v++) {
                const vub codes = READY ? load_bytes(w + q * LINE + v * 4 * W) : unpack_codes<F>(w + v * 4 * W, q);
                add_rows<MT>(sums[v], F::CARRIED ? codes ^ uint8_t(F::CARRIED) : codes, x + q * STEP);
            }
#endif
    }
}

// Prefetched while groups are multiplied: scales of the following groups, and codes AHEAD of them; nothing without scales.
struct GroupPrefetch {
    const char *scales;
    long step;  // bytes of a group
};

// Scales of a panel's groups in order: `of(i)` is the scale of rows i * W and on; from V on, their minimum. Here final values,
// [groups][parts][16] of float32 or float16.
template <class F, class T> struct PlainScales {
    const T *at;
    INLINE_MEMBER void begin() {}
    INLINE_MEMBER vf of(long i) const { return load(at + i * W); }
    INLINE_MEMBER void end() { at += F::PARTS * PANEL; }
};
// Here bytes under super scales, one for each run of groups; products are those of widen_bytes.
template <class F> struct SuperScales {
    typedef typename ByteOf<F::MINIMUM>::type T;
    const T *at;
    const f16 *super;
    long run, left = 0;
    vf by[F::PARTS * V];
    INLINE_MEMBER void begin() {
        if (left-- > 0) return;
        for (int i = 0; i < F::PARTS * V; i++) by[i] = i < V ? load(super + i * W) : -load(super + i * W);
        super += F::PARTS * PANEL, left = run - 1;
    }
    INLINE_MEMBER vf of(long i) const { return load(at + i * W) * by[i]; }
    INLINE_MEMBER void end() { at += F::PARTS * PANEL; }
};

// acc plus a group's sums of products times scale * x_scale; correction: of RoundedRows. minimum(): of the weight's rows.
template <class F, class M>
INLINE vf add_group(vf acc, vi products, vf scale, float x_scale, const float &correction, const M &minimum) {
    if (!F::MINIMUM && (F::BITS < 8 || F::CARRIED)) {
        int32_t more;
        __builtin_memcpy(&more, &correction, 4);
        products += more;
    }
    acc = add_product(acc, __builtin_convertvector(products, vf), scale * x_scale);
    if constexpr (F::MINIMUM) acc = add_product(acc, minimum(), splat(correction));
    return acc;
}

// Adds the products of some groups of a panel and a tile of x to sums [MT][16].
template <class F, bool READY, int MT, class S>
static NOINLINE void multiply_groups(const uint8_t *w, S w_scale, const uint8_t *x, const float *x_scale,
                                     const float *correction, long groups, GroupPrefetch following, float *sums, bool fresh) {
    constexpr int VS = vectors_at_once<F, READY>();
    constexpr long WEIGHT_BYTES = READY ? F::READY_BYTES : F::STORED_BYTES;
    constexpr bool KEPT = stays_in_registers<F, MT>();
    vf kept[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) {
            float *at = sums + m * PANEL + v * W;
            if (KEPT) kept[v][m] = fresh ? vf{} : load(at);
            else if (fresh) store(at, vf{});
        }
    for (long g = 0; g < groups; g++) {
        if (following.scales) {
            __builtin_prefetch(following.scales + g * following.step);
            for (long i = 0; i < WEIGHT_BYTES; i += 64) __builtin_prefetch(w + AHEAD + i, 0, INTO);
        }
        w_scale.begin();
        for (int v = 0; v < V; v += VS) {
            const uint8_t *xg = x;
            if (VS < V) asm("" : "+r"(xg));  // prevents the compiler from keeping broadcast values on the stack between vectors
            vi part[VS][MT];
            group_sums<F, READY, VS, MT>(w + v * (READY ? F::X : 1) * 4 * W, xg, part);
            for (int i = 0; i < VS; i++) {
                const vf scale = w_scale.of(v + i);
                for (int m = 0; m < MT; m++) {
                    float *at = sums + m * PANEL + (v + i) * W;
                    const vf acc = add_group<F>(KEPT ? kept[v + i][m] : load(at), part[i][m], scale, x_scale[m], correction[m],
                                                [&] { return w_scale.of(V + v + i); });
                    if (KEPT) kept[v + i][m] = acc;
                    else store(at, acc);
                }
            }
        }
        w_scale.end(), w += WEIGHT_BYTES, x += F::QUADS * 4 * F::X * MT, x_scale += MT, correction += MT;
    }
    for (int v = 0; v < V && KEPT; v++)
        for (int m = 0; m < MT; m++) store(sums + m * PANEL + v * W, kept[v][m]);
}

// Operands of one panel of a pair for some groups.
struct PanelGroups {
    const uint8_t *codes;
    const float *scales;  // [groups][parts][16]
};

// As multiply_groups, for two panels whose vectors are whole: sums [MT][2][16].
template <class F, bool READY, int MT>
static NOINLINE void multiply_pair(PanelGroups a, PanelGroups b, const uint8_t *x, const float *x_scale,
                                   const float *correction, long groups, float *sums, bool fresh) {
#if WINDLASS_QUADS
    constexpr long WEIGHT_BYTES = READY ? F::READY_BYTES : F::STORED_BYTES;
    vf kept[2][MT];
    for (int m = 0; m < MT; m++)
        for (int n = 0; n < 2; n++) kept[n][m] = fresh ? vf{} : load(sums + (2 * m + n) * PANEL);
    for (long g = 0; g < groups; g++) {
        vi part[2][MT] = {};
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++) {
            vub codes[2];
            for (int n = 0; n < 2; n++) {
                const uint8_t *w = n ? b.codes : a.codes;
                codes[n] = READY ? load_bytes(w + q * QUAD_BYTES) : unpack_codes<F>(w, q);
                if (F::CARRIED) codes[n] ^= uint8_t(F::CARRIED);
            }
            for (int m = 0; m < MT; m++) {
                const vi xm = spread(x + (q * MT + m) * 4);
                for (int n = 0; n < 2; n++) part[n][m] = add_quads(part[n][m], codes[n], xm);
            }
        }
        for (int n = 0; n < 2; n++) {
            const float *w_scale = n ? b.scales : a.scales;
            const vf scale = load(w_scale);
            for (int m = 0; m < MT; m++)
                kept[n][m] = add_group<F>(kept[n][m], part[n][m], scale, x_scale[m], correction[m],
                                          [&] { return load(w_scale + PANEL); });
        }
        a.codes += WEIGHT_BYTES, a.scales += F::PARTS * PANEL, b.codes += WEIGHT_BYTES, b.scales += F::PARTS * PANEL;
        x += F::QUADS * 4 * MT, x_scale += MT, correction += MT;
    }
    for (int m = 0; m < MT; m++)
        for (int n = 0; n < 2; n++) store(sums + (2 * m + n) * PANEL, kept[n][m]);
#endif
}

// Calls f with the row count as a constant.
template <int MT = 1, class F> INLINE void with_rows(long rows, const F &f) {
    if constexpr (MT < TILE_ROWS) {
        if (rows > MT) return with_rows<MT + 1>(rows, f);
    }
    f(Number<MT>{});
}

}  // namespace blocks
}  // namespace
