// out[M, N] = x[M, K] * weight[N, K]^T + bias for weights of 8 or 4 bits, with x rounded to 8 bits on the way.
//
// Weights lie in panels of 16 rows, four elements of K (a quad) of each row side by side: 64 bytes, so that one vector
// holds a quad of WINDLASS_LANES rows and meets a quad of x in every lane. No sum crosses lanes, and every instruction
// set reads the same bytes. With 4 bits a byte holds quad 2j in its lower half and quad 2j + 1 in its upper half, plus 8.
//
// Sums of products are int32 (int16 where they provably fit) and exact: over all of K with 8 bits, over a group of 32
// with 4. What follows in float32 happens in one order for every output. So a row's bits do not depend on other rows,
// on tiles or on threads.

#pragma once

#include <cstdlib>
#include <omp.h>

#include "byte_products.h"
#include "names.h"
#include "rounding.h"
#include "simd.h"
#include "tiles.h"

namespace {

namespace packed {

constexpr int PACKED_MT = WINDLASS_LANES == 16 ? 8 : WINDLASS_LANES == 8 ? 6 : WINDLASS_REGISTERS >= 32 ? 4 : 2;  // rows of x in a tile
constexpr long READY_QUADS = 128;     // of one panel, taken through all tiles: they stay in L1 beside a tile of x
constexpr bool UNPACKS = !WINDLASS_QUADS;  // once for many tiles: quads are quicker as they lie (measured: by half for 24 rows)
constexpr long SHARED_ROWS = 8;       // from here on threads share the rounding of x, at the price of a barrier
constexpr long X_BYTES = 256 << 10;   // of rounded x per pass, if that leaves enough rows
constexpr long LEAST_PASS = 128, MOST_PASS = 192;
constexpr long AHEAD = 3072;          // bytes of weight asked for in advance

// ---- unpacking weights ----

INLINE vs even_bytes(vub w, bool is_signed) { return is_signed ? ((vs)w << 8) >> 8 : (vs)((vus)w & 0xff); }
INLINE vs odd_bytes(vub w, bool is_signed) { return is_signed ? (vs)w >> 8 : (vs)((vus)w >> 8); }
INLINE vub lower_halves(vub w) { return w & 0x0f; }
INLINE vub upper_halves(vub w) { return (vub)((vus)w >> 4) & 0x0f; }

// `units` of a panel as the product wants them.
template <int BITS> static void make_ready(const uint8_t *stored, long units, uint8_t *ready) {
    if constexpr (BITS == 8) {
        for (long q = 0; q < units * V; q++, stored += 4 * W) {
            const vub w = load_bytes(stored);
            *(vub_any *)ready = (vub)even_bytes(w, true);
            *(vub_any *)(ready + 4 * W) = (vub)odd_bytes(w, true);
            ready += 8 * W;
        }
    } else {
        for (long pair = 0; pair < units * GROUP / 8; pair++, ready += QUAD_BYTES) {
            for (int v = 0; v < V; v++, stored += 4 * W, ready += 4 * W) {
                const vub w = load_bytes(stored);
                *(vub_any *)ready = lower_halves(w);
                *(vub_any *)(ready + QUAD_BYTES) = upper_halves(w);
            }
        }
    }
}

// ---- products of one panel and one tile; sums is [MT][16] ----

// Asks for weights ahead, where there is so much to do with a line that the processor does not come far enough by itself.
// With one or two rows of 8 bits it does, and what is asked for would be in its way (measured on Zen 4 over huge pages: a
// quarter less).
template <bool NEEDED> INLINE void ask_ahead(const uint8_t *w) {
    if constexpr (NEEDED) __builtin_prefetch(w + AHEAD);
}

template <bool READY, int MT> static NOINLINE void dot_eight(const uint8_t *w, const uint8_t *x, long quads, int32_t *sums,
                                                             bool fresh) {
    vi acc[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) acc[v][m] = fresh ? vi{} : *(const vi_any *)(sums + m * PANEL + v * W);
    for (long q = 0; q < quads; q++) {
        ask_ahead<!READY && (MT > 2)>(w);
#if WINDLASS_QUADS
        for (int v = 0; v < V; v++) {
            const vub weight = load_bytes(w + v * 4 * W) ^ BIAS;
            add_rows<MT>(acc[v], weight, x);
        }
        w += QUAD_BYTES, x += 4 * MT;
#else
        // Even bytes of all vectors, then odd ones: half the registers. The hidden pointer makes the bytes load again.
        for (int odd = 0; odd < 2; odd++) {
            vs weight[V];
            const uint8_t *from = w;
            if (!READY && odd) asm("" : "+r"(from));
            for (int v = 0; v < V; v++) {
                if (READY) weight[v] = (vs)load_bytes(from + (2 * v + odd) * 4 * W);
                else weight[v] = odd ? odd_bytes(load_bytes(from + v * 4 * W), true)
                                     : even_bytes(load_bytes(from + v * 4 * W), true);
            }
            for (int m = 0; m < MT; m++) {
                const vs xm = (vs)spread(x + 8 * m + 4 * odd);
                for (int v = 0; v < V; v++) acc[v][m] = add_pairs(acc[v][m], weight[v], xm);
            }
        }
        w += READY ? 2 * QUAD_BYTES : QUAD_BYTES, x += 8 * MT;
#endif
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) *(vi_any *)(sums + m * PANEL + v * W) = acc[v][m];
}

template <bool READY, int MT>
static NOINLINE void dot_four(const uint8_t *w, const bf16 *w_scale, const uint8_t *x, const float *x_scale,
                              const int32_t *correction, long groups, float *sums, bool fresh) {
    constexpr long X = Packing<4>::X, STEP_BYTES = 4 * X * MT;
    vf acc[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) acc[v][m] = fresh ? vf{} : load(sums + m * PANEL + v * W);
    for (long g = 0; g < groups; g++) {
        for (int v = 0; v < V; v++) {
            const uint8_t *xg = x;
            asm("" : "+r"(xg));  // or the spread values are kept from one vector to the next, on the stack
#if WINDLASS_BYTES
            BytesSum part[MT] = {};
#else
            vi part[MT] = {};
#endif
            for (int pair = 0; pair < GROUP / 8; pair++) {
                if (v == 0) ask_ahead<!READY>(w + pair * QUAD_BYTES);
                vub weight[2];
                if (READY) {
                    weight[0] = load_bytes(w + 2 * pair * QUAD_BYTES + v * 4 * W);
                    weight[1] = load_bytes(w + (2 * pair + 1) * QUAD_BYTES + v * 4 * W);
                } else {
                    const vub both = load_bytes(w + pair * QUAD_BYTES + v * 4 * W);
                    weight[0] = lower_halves(both), weight[1] = upper_halves(both);
                }
                for (int i = 0; i < 2; i++, xg += STEP_BYTES) {
#if WINDLASS_QUADS && !WINDLASS_BYTES
                    add_rows<MT>(part, weight[i], xg);
#else
                    for (int m = 0; m < MT; m++) {
#if WINDLASS_BYTES
                        part[m] = add_bytes(part[m], weight[i], spread(xg + 4 * m));
#else
                        part[m] = add_pairs(part[m], even_bytes(weight[i], false), (vs)spread(xg + 8 * m));
                        part[m] = add_pairs(part[m], odd_bytes(weight[i], false), (vs)spread(xg + 8 * m + 4));
#endif
                    }
#endif
                }
            }
            const vf scale = load(w_scale + v * W);
            for (int m = 0; m < MT; m++) {
#if WINDLASS_BYTES
                const vi products = total_bytes(part[m]);
#else
                const vi products = part[m];
#endif
                const vf sum_of = __builtin_convertvector(products + correction[m], vf);
                acc[v][m] = add_product(acc[v][m], sum_of, scale * x_scale[m]);
            }
        }
        w += READY ? 2 * Packing<4>::STORED_BYTES : Packing<4>::STORED_BYTES;
        w_scale += PANEL, x += GROUP / 4 * STEP_BYTES, x_scale += MT, correction += MT;
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) store(sums + m * PANEL + v * W, acc[v][m]);
}

// Calls f with the row count as a constant.
template <int N> struct Count { static constexpr int value = N; };
template <int MT = 1, class F> INLINE void with_rows(long rows, const F &f) {
    if constexpr (MT < PACKED_MT) {
        if (rows > MT) return with_rows<MT + 1>(rows, f);
    }
    f(Count<MT>{});
}

// ---- all tiles against a chunk of panels ----

static NOINLINE void finish_eight(const PackedLinear &p, const int32_t *sums, float x_scale, int32_t correction, long n,
                                  float *out) {
    for (long i = 0; i < PANEL && n + i < p.N; i += W) {
        const long valid = min_of(W, p.N - n - i);
        const float *w_scale = (const float *)p.scales + n + i;
        const vf scale = (valid == W ? load(w_scale) : load_some(w_scale, valid)) * x_scale;
        vf y = __builtin_convertvector(*(const vi_any *)(sums + i) + correction, vf) * scale;
        if (p.bias) y += valid == W ? load(p.bias + n + i) : load_some(p.bias + n + i, valid);
        if (valid == W) store(out + i, y);
        else store_some(out + i, y, valid);
    }
}

static NOINLINE void finish_four(const PackedLinear &p, const float *sums, long n, float *out) {
    for (long i = 0; i < PANEL && n + i < p.N; i++) out[i] = p.bias ? sums[i] + p.bias[n + i] : sums[i];
}

template <int BITS, bool READY>
static void multiply_panel(const PackedLinear &p, Tiles tiles, const Rounded &x, long panel, int32_t *sums, uint8_t *ready) {
    typedef Packing<BITS> P;
    const uint8_t *stored = p.data + panel * p.units * P::STORED_BYTES;
    const bf16 *w_scale = BITS == 4 ? (const bf16 *)p.scales + panel * p.units * PANEL : nullptr;
    const long block = tiles.count == 1 ? p.units : READY_QUADS / P::QUADS, quads = p.units * P::QUADS;
    for (long u = 0; u < p.units; u += block) {
        const long units = min_of(block, p.units - u);
        const uint8_t *w = stored + u * P::STORED_BYTES;
        if (READY) {
            make_ready<BITS>(w, units, ready);
            w = ready;
        }
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t);
            if (READY) {  // fetch the next block meanwhile
                const long bytes = units * P::STORED_BYTES, end = bytes * (t + 1) / tiles.count;
                const uint8_t *next = stored + u * P::STORED_BYTES + bytes;
                for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64) __builtin_prefetch(next + i);
            }
            const uint8_t *values = x.values + (begin * quads + u * P::QUADS * rows) * 4 * P::X;
            int32_t *to = sums + begin * PANEL;
            with_rows(rows, [&](auto count) {
                constexpr int MT = decltype(count)::value;
                if constexpr (BITS == 8) dot_eight<READY, MT>(w, values, units, to, u == 0);
                else {
                    const long at = begin * p.units + u * rows;
                    dot_four<READY, MT>(w, w_scale + u * PANEL, values, x.scale + at, x.correction + at, units, (float *)to,
                                        u == 0);
                }
            });
        }
    }
    for (long m = 0; m < p.M; m++) {
        float *out = p.out + m * p.out_stride + panel * PANEL;
        if (BITS == 8) finish_eight(p, sums + m * PANEL, x.scale[m], x.correction[m], panel * PANEL, out);
        else finish_four(p, (const float *)sums + m * PANEL, panel * PANEL, out);
    }
}

template <int BITS> static int packed_pass(const PackedLinear &p) {
    typedef Packing<BITS> P;
    const Tiles tiles = {p.M, ceil_div(p.M, PACKED_MT)};
    const long panels = ceil_div(p.N, PANEL), panel_bytes = p.units * P::STORED_BYTES;
    const long chunk = max_of(1, CHUNK_BYTES / panel_bytes), chunks = ceil_div(panels, chunk);
    const long threads = p.M * p.N * p.K < SERIAL_WORK ? 1 : min_of(chunks, omp_get_max_threads());
    Shares shares(chunks, threads);
    const bool shared = p.M >= SHARED_ROWS && threads > 1;
    const long scales = p.M * (BITS == 8 ? 1 : p.units);
    const long value_bytes = round_up(p.M * p.units * P::QUADS * 4 * P::X, 64), scale_bytes = round_up(4 * scales, 64);
    const long x_bytes = value_bytes + 2 * scale_bytes;
    const long ready_bytes = UNPACKS ? READY_QUADS * P::READY_BYTES : 0, own_bytes = 4 * p.M * PANEL + ready_bytes + 64;
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, (shared ? 1 : threads) * x_bytes + threads * round_up(own_bytes, 64))) return 1;
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num();
        uint8_t *base = (uint8_t *)memory + (shared ? 0 : thread * x_bytes);
        const Rounded x = {base, (float *)(base + value_bytes), (int32_t *)(base + value_bytes + scale_bytes)};
        uint8_t *own = (uint8_t *)memory + (shared ? 1 : threads) * x_bytes + thread * round_up(own_bytes, 64);
        int32_t *sums = (int32_t *)(own + ready_bytes);
        if (shared) {
#pragma omp for schedule(static)
            for (long t = 0; t < tiles.count; t++) round_tile<BITS>(p, tiles, t, x);
        } else {  // each thread for itself: cheaper than a barrier when another process holds a core
            for (long t = 0; t < tiles.count; t++) round_tile<BITS>(p, tiles, t, x);
        }
        shares.take(thread, [&](long c) {
            for (long panel = c * chunk; panel < min_of((c + 1) * chunk, panels); panel++) {
                if (UNPACKS && tiles.count > 2) multiply_panel<BITS, UNPACKS>(p, tiles, x, panel, sums, own);
                else multiply_panel<BITS, false>(p, tiles, x, panel, sums, own);
            }
        });
    }
    free(memory);
    return 0;
}

template <int BITS> static int packed_all(PackedLinear p) {
    p.units = ceil_div(p.K, BITS == 8 ? 4 : GROUP);
    const long fitting = X_BYTES / (p.units * Packing<BITS>::QUADS * 4 * Packing<BITS>::X);
    const long most = max_of(LEAST_PASS, min_of(MOST_PASS, fitting));
    const long passes = ceil_div(p.M, most), step = passes ? round_up(ceil_div(p.M, passes), PACKED_MT) : 1;
    for (long m = 0; m < p.M; m += step) {
        PackedLinear pass = p;
        pass.M = min_of(step, p.M - m);
        pass.x = p.x + m * p.x_stride;
        pass.out = p.out + m * p.out_stride;
        if (packed_pass<BITS>(pass)) return 1;
    }
    return 0;
}

// bits: 8 or 4. x, bias and out are float32, strides in elements; bias may be null. Returns 1 when out of memory.
EXPORT int WINDLASS_NAME(linear_packed)(const float *x, long x_stride, const uint8_t *data, const void *scales, int bits,
                                        const float *bias, float *out, long out_stride, long M, long N, long K) {
    const PackedLinear p = {x, x_stride, data, scales, bias, out, out_stride, M, N, K, 0};
    return bits == 8 ? packed_all<8>(p) : packed_all<4>(p);
}

}  // namespace packed

}  // namespace
