// out[M, N] = x[M, K] * weight[N, K]^T + bias for weights in blocks, with x rounded to 8 bits group by group on the way.
//
// One vector holds a quad of WINDLASS_LANES rows of the weight and meets a quad of x in every lane: no sum crosses lanes, and
// every instruction set reads the same bytes. The sum of a group is int32 (int16 where it provably fits) and exact. Then, in
// float32 and in this order for every output: acc += sum * (weight's scale * x's scale), and with a minimum
// acc += minimum * (x's scale * sum of x), group after group. So a row's bits do not depend on other rows, tiles or threads.

#pragma once

#include <cstdlib>

#include "block_codes.h"
#include "block_rows.h"
#include "byte_products.h"
#include "names.h"
#include "simd.h"
#include "tiles.h"

namespace {

namespace blocks {

constexpr int TILE_ROWS = WINDLASS_LANES == 16 ? 8 : WINDLASS_LANES == 8 ? 6 : WINDLASS_REGISTERS >= 32 ? 4 : 2;
// Rows of a tile that meets two panels at once, where there are registers for that: of many tiles each byte of x is spread over a
// vector for both (measured on Zen 5: up to a sixth less time than one panel and eight rows, which load nearly twice as much).
constexpr bool PAIRED_PANELS = WINDLASS_QUADS && V == 1;
constexpr int PAIRED_ROWS = 6;
constexpr long PAIRED_FROM = 2 * TILE_ROWS + 1;  // rows of x
constexpr long READY_QUADS = 128;   // of one panel, taken through all tiles: they stay in L1 beside a tile of x
constexpr long SINGLE_QUADS = 512;  // of one panel against a single tile, whose scales are widened at a time
constexpr long SHARED_ROWS = 8;     // from here on threads share the rounding of x, at the price of waiting for one another
constexpr long X_BYTES = 256 << 10; // of rounded x per pass, if that leaves enough rows
constexpr long LEAST_PASS = 128, MOST_PASS = 192;
// Bytes of codes asked for in advance. Codes and scales take turns, which the processor's own prefetching follows poorly
// (measured on an EPYC with AVX2: a fifth more for one row and 8 bits). With AVX-512 into L2: there L1 has too few misses at a time
// (measured on Zen 4: a tenth more for one row of a 135M model's matrices, 3 % of a 1B model's).
constexpr long AHEAD = WINDLASS_LANES == 16 ? 4096 : 3072;
constexpr int INTO = WINDLASS_LANES == 16 ? 2 : 3;

struct BlockLinear {
    BlockWeight weight;
    const float *x; long x_stride;
    const float *bias;
    float *out; long out_stride;
    long M;
};

// Vectors of a panel that go through a group together and share what is spread of x, as far as registers allow.
template <class F, bool READY> constexpr int vectors_at_once() {
    if (W == 4) return F::BYTES ? 1 : WINDLASS_REGISTERS >= 32 ? 2 : V;
    return F::BYTES && F::UPPER > 0 ? 1 : V;
}
// Whether the results of a panel stay in registers from group to group. With 16 registers those of several rows would push
// out the sums of bytes, which are used far more often (measured on an EPYC with AVX2: four rows and 4 bits a seventh slower).
template <class F, int MT> constexpr bool kept_in_registers() { return W != 8 || !F::BYTES || MT <= 2; }

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
                weight[v] = READY ? load_bytes(w + q * LINE + v * 4 * W) : codes_of<F>(w + v * 4 * W, q);
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
                        const vub codes = codes_of<F>(from + v * 4 * W, q);
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
                const vub codes = READY ? load_bytes(w + q * LINE + v * 4 * W) : codes_of<F>(w + v * 4 * W, q);
                add_rows<MT>(sums[v], F::CARRIED ? codes ^ uint8_t(F::CARRIED) : codes, x + q * STEP);
            }
#endif
    }
}

// What a panel's groups have besides their codes, to be asked for while the groups before them are multiplied.
struct Following {
    const char *scales;
    long step;  // bytes of a group
};

// Adds the products of some groups of a panel and a tile of x to sums [MT][16]. w_scale: [groups][parts][16].
template <class F, bool READY, int MT>
static NOINLINE void multiply_groups(const uint8_t *w, const float *w_scale, const uint8_t *x, const float *x_scale,
                                     const float *correction, long groups, Following following, float *sums, bool fresh) {
    constexpr int VS = vectors_at_once<F, READY>();
    constexpr long WEIGHT_BYTES = READY ? F::READY_BYTES : F::STORED_BYTES;
    constexpr bool KEPT = kept_in_registers<F, MT>();
    vf kept[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) {
            float *at = sums + m * PANEL + v * W;
            if (KEPT) kept[v][m] = fresh ? vf{} : load(at);
            else if (fresh) store(at, vf{});
        }
    for (long g = 0; g < groups; g++) {
        if (!READY) {
            __builtin_prefetch(following.scales + g * following.step);
            for (long i = 0; i < WEIGHT_BYTES; i += 64) __builtin_prefetch(w + AHEAD + i, 0, INTO);
        }
        for (int v = 0; v < V; v += VS) {
            const uint8_t *xg = x;
            if (VS < V) asm("" : "+r"(xg));  // or the spread values are kept from one vector to the next, on the stack
            vi part[VS][MT];
            group_sums<F, READY, VS, MT>(w + v * (READY ? F::X : 1) * 4 * W, xg, part);
            for (int i = 0; i < VS; i++) {
                const vf scale = load(w_scale + (v + i) * W);
                for (int m = 0; m < MT; m++) {
                    vi products = part[i][m];
                    if (!F::MINIMUM && (F::BITS < 8 || F::CARRIED)) {
                        int32_t more;
                        __builtin_memcpy(&more, correction + m, 4);
                        products += more;
                    }
                    float *at = sums + m * PANEL + (v + i) * W;
                    vf acc = KEPT ? kept[v + i][m] : load(at);
                    acc = add_product(acc, __builtin_convertvector(products, vf), scale * x_scale[m]);
                    if (F::MINIMUM) acc = add_product(acc, load(w_scale + PANEL + (v + i) * W), splat(correction[m]));
                    if (KEPT) kept[v + i][m] = acc;
                    else store(at, acc);
                }
            }
        }
        w += WEIGHT_BYTES, w_scale += F::PARTS * PANEL, x += F::QUADS * 4 * F::X * MT, x_scale += MT, correction += MT;
    }
    for (int v = 0; v < V && KEPT; v++)
        for (int m = 0; m < MT; m++) store(sums + m * PANEL + v * W, kept[v][m]);
}

// What a panel of a pair brings to some groups.
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
                codes[n] = READY ? load_bytes(w + q * QUAD_BYTES) : codes_of<F>(w, q);
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
            for (int m = 0; m < MT; m++) {
                vi products = part[n][m];
                if (!F::MINIMUM && (F::BITS < 8 || F::CARRIED)) {
                    int32_t more;
                    __builtin_memcpy(&more, correction + m, 4);
                    products += more;
                }
                kept[n][m] = add_product(kept[n][m], __builtin_convertvector(products, vf), scale * x_scale[m]);
                if (F::MINIMUM) kept[n][m] = add_product(kept[n][m], load(w_scale + PANEL), splat(correction[m]));
            }
        }
        a.codes += WEIGHT_BYTES, a.scales += F::PARTS * PANEL, b.codes += WEIGHT_BYTES, b.scales += F::PARTS * PANEL;
        x += F::QUADS * 4 * MT, x_scale += MT, correction += MT;
    }
    for (int m = 0; m < MT; m++)
        for (int n = 0; n < 2; n++) store(sums + (2 * m + n) * PANEL, kept[n][m]);
#endif
}

// Calls f with the row count as a constant.
template <int N> struct Count { static constexpr int value = N; };
template <int MT = 1, class F> INLINE void with_rows(long rows, const F &f) {
    if constexpr (MT < TILE_ROWS) {
        if (rows > MT) return with_rows<MT + 1>(rows, f);
    }
    f(Count<MT>{});
}

static NOINLINE void finish(const BlockLinear &p, const float *sums, long n, float *out) {
    for (long i = 0; i < PANEL && n + i < p.weight.N; i += W) {
        const long valid = min_of(W, p.weight.N - n - i);
        vf y = load(sums + i);
        if (p.bias) y += valid == W ? load(p.bias + n + i) : load_some(p.bias + n + i, valid);
        if (valid == W) store(out + i, y);
        else store_some(out + i, y, valid);
    }
}

// What a thread has for itself.
struct Scratch {
    float *sums, *scales;  // [M][16]; of as many quads as are taken at a time
    uint8_t *ready;
};

template <class F, bool READY>
static void multiply_panel(const BlockLinear &p, Tiles tiles, const RoundedRows &x, long panel, const Scratch &own) {
    const long groups = p.weight.groups(), block = (tiles.count == 1 ? SINGLE_QUADS : READY_QUADS) / F::QUADS;
    const long step = F::PARTS * PANEL * (p.weight.super_groups ? 1 : 2);
    const uint8_t *stored = p.weight.codes + panel * groups * F::STORED_BYTES;
    for (long g = 0; g < groups; g += block, stored += block * F::STORED_BYTES) {
        const long count = min_of(block, groups - g), bytes = count * F::STORED_BYTES;
        widen_scales(p.weight, panel, g, g + count, own.scales);
        const Following following = {(const char *)p.weight.scales + (panel * groups + g + block) * step, step};
        if (READY) make_ready<F>(stored, count, own.ready);
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t);
            if (READY) {  // fetch the next block meanwhile
                const long end = bytes * (t + 1) / tiles.count;
                for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64) __builtin_prefetch(stored + bytes + i);
            }
            const long at = begin * groups + g * rows;
            with_rows(rows, [&](auto rows_constant) {
                constexpr int MT = decltype(rows_constant)::value;
                multiply_groups<F, READY, MT>(READY ? own.ready : stored, own.scales, x.values + at * F::GROUP * F::X,
                                              x.scale + at, x.correction + at, count, following, own.sums + begin * PANEL, g == 0);
            });
        }
    }
    for (long m = 0; m < p.M; m++)
        finish(p, own.sums + m * PANEL, panel * PANEL, p.out + m * p.out_stride + panel * PANEL);
}

// Two neighbouring panels against many tiles.
template <class F> static void multiply_panels(const BlockLinear &p, Tiles tiles, const RoundedRows &x, long panel, const Scratch &own) {
    constexpr bool READY = F::UNPACKS;
    const long groups = p.weight.groups(), blocks = ceil_div(groups, READY_QUADS / F::QUADS), block = ceil_div(groups, blocks);
    const long scales = block * F::PARTS * PANEL;
    for (long g = 0; g < groups; g += block) {
        const long count = min_of(block, groups - g), bytes = count * F::STORED_BYTES;
        const uint8_t *stored[2];
        PanelGroups both[2];
        for (int n = 0; n < 2; n++) {
            stored[n] = p.weight.codes + ((panel + n) * groups + g) * F::STORED_BYTES;
            both[n] = {READY ? own.ready + n * block * F::READY_BYTES : stored[n], own.scales + n * scales};
            widen_scales(p.weight, panel + n, g, g + count, own.scales + n * scales);
            if (READY) make_ready<F>(stored[n], count, own.ready + n * block * F::READY_BYTES);
        }
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t), at = begin * groups + g * rows;
            const long end = bytes * (t + 1) / tiles.count;  // of the next block, which is fetched meanwhile
            for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64)
                for (int n = 0; n < 2; n++) __builtin_prefetch(stored[n] + bytes + i);
            if (g + block >= groups)  // rows of out lie far apart: each line would be waited for
                for (long m = begin; m < begin + rows; m++)
                    for (int n = 0; n < 2; n++) __builtin_prefetch(p.out + m * p.out_stride + (panel + n) * PANEL, 1);
            with_rows(rows, [&](auto rows_constant) {
                constexpr int MT = decltype(rows_constant)::value;
                if constexpr (MT <= PAIRED_ROWS)
                    multiply_pair<F, READY, MT>(both[0], both[1], x.values + at * F::GROUP, x.scale + at, x.correction + at, count,
                                                own.sums + begin * 2 * PANEL, g == 0);
            });
        }
    }
    for (long m = 0; m < p.M; m++)
        for (int n = 0; n < 2; n++) {
            const long at = (panel + n) * PANEL;
            finish(p, own.sums + (2 * m + n) * PANEL, at, p.out + m * p.out_stride + at);
        }
}

template <class F> static int linear_pass(const BlockLinear &p) {
    const long groups = p.weight.groups(), K = p.weight.K, N = p.weight.N;
    const bool paired = PAIRED_PANELS && p.M >= PAIRED_FROM;
    const Tiles tiles = {p.M, ceil_div(p.M, paired ? PAIRED_ROWS : TILE_ROWS)};
    const long panels = ceil_div(N, PANEL), panel_bytes = groups * F::STORED_BYTES;
    const long chunk = round_up(chunk_of(panels, panel_bytes), 1 + paired), chunks = ceil_div(panels, chunk);
    const long threads = p.M * N * K < SERIAL_WORK ? 1 : min_of(chunks, most_threads());
    const bool shared = p.M >= SHARED_ROWS && threads > 1;
    const long value_bytes = round_up(p.M * groups * F::GROUP * F::X, 64), scale_bytes = round_up(4 * p.M * groups, 64);
    const long x_bytes = value_bytes + 2 * scale_bytes;
    const long sum_bytes = (1 + paired) * 4 * p.M * PANEL, scales_bytes = 4 * SINGLE_QUADS / F::QUADS * F::PARTS * PANEL;
    const long own_bytes = sum_bytes + scales_bytes + (F::UNPACKS ? (1 + paired) * READY_QUADS / F::QUADS * F::READY_BYTES : 0);
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, (shared ? 1 : threads) * x_bytes + threads * own_bytes)) return 1;
    const auto rounded = [&](long thread) {
        uint8_t *base = (uint8_t *)memory + (shared ? 0 : thread * x_bytes);
        return RoundedRows{base, (float *)(base + value_bytes), (float *)(base + value_bytes + scale_bytes)};
    };
    const auto round = [&](long t, const RoundedRows &x) {
        const long begin = tiles.begin(t);
        round_tile<F>(p.x + begin * p.x_stride, p.x_stride, K, p.weight.offset, begin, tiles.size(t), x);
    };
    if (shared) for_units(tiles.count, threads, [&](long t) { round(t, rounded(0)); });
    Shares shares(chunks, threads);
    on_threads(threads, [&](long thread) {
        const RoundedRows x = rounded(thread);
        uint8_t *mine = (uint8_t *)memory + (shared ? 1 : threads) * x_bytes + thread * own_bytes;
        const Scratch own = {(float *)mine, (float *)(mine + sum_bytes), mine + sum_bytes + scales_bytes};
        if (!shared)  // few rows are rounded by each thread for itself: quicker than waiting for one another
            for (long t = 0; t < tiles.count; t++) round(t, x);
        shares.take(thread, [&](long c) {
            const long end = min_of((c + 1) * chunk, panels);
            long panel = c * chunk;
            if constexpr (PAIRED_PANELS)
                for (; paired && panel + 2 <= end; panel += 2) multiply_panels<F>(p, tiles, x, panel, own);
            for (; panel < end; panel++) {
                if (F::UNPACKS && tiles.count > 2) multiply_panel<F, F::UNPACKS>(p, tiles, x, panel, own);
                else multiply_panel<F, false>(p, tiles, x, panel, own);
            }
        });
    });
    free(memory);
    return 0;
}

template <class F> static int linear_all(const BlockLinear &p) {
    const long fitting = X_BYTES / (p.weight.groups() * F::GROUP * F::X);
    const long most = max_of(LEAST_PASS, min_of(MOST_PASS, fitting));
    const long passes = ceil_div(p.M, most), tile = PAIRED_PANELS && p.M >= PAIRED_FROM ? PAIRED_ROWS : TILE_ROWS;
    const long step = passes ? round_up(ceil_div(p.M, passes), tile) : 1;
    for (long m = 0; m < p.M; m += step) {
        BlockLinear pass = p;
        pass.M = min_of(step, p.M - m);
        pass.x = p.x + m * p.x_stride;
        pass.out = p.out + m * p.out_stride;
        if (linear_pass<F>(pass)) return 1;
    }
    return 0;
}

// x, bias and out are float32, strides in elements; bias may be null, and supers where super_groups is 0. Returns 1 when out of
// memory, 2 for a form that there is no product for.
EXPORT int WINDLASS_NAME(linear_blocks)(const float *x, long x_stride, const uint8_t *codes, const void *scales,
                                        const void *supers, int bits, int group, int super_groups, int minimum, int offset,
                                        const float *bias, float *out, long out_stride, long M, long N, long K) {
    const BlockWeight weight = {codes, scales, (const f16 *)supers, bits, group, super_groups, minimum, offset, N, K};
    const BlockLinear p = {weight, x, x_stride, bias, out, out_stride, M};
    if (bits == 4 && group == 32) return minimum ? linear_all<Form<4, 32, true>>(p) : linear_all<Form<4, 32, false>>(p);
    if (bits == 5 && group == 32) return minimum ? linear_all<Form<5, 32, true>>(p) : linear_all<Form<5, 32, false>>(p);
    if (bits == 6 && group == 16 && !minimum) return linear_all<Form<6, 16, false>>(p);
    if (bits == 8 && group == 32 && !minimum && !offset) return linear_all<Form<8, 32, false>>(p);
    return 2;
}

}  // namespace blocks

}  // namespace
