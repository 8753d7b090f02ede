// out[M, N] = x[M, K] * weight[N, K]^T + bias for many rows, by the processor's matrix unit.
//
// x is rounded to bfloat16 and so is the weight, whatever it is stored as: a thread widens two panels at a time, a piece of K that
// stays in L1, and takes all of x through them. Products are exact and sums float32. What rounding costs is less than the 8 bits of
// block_linear.h do (docs/benchmarks.md).

#pragma once

#include <cstdlib>

#include "block_codes.h"
#include "matrix_unit.h"
#include "tiles.h"

namespace {

namespace matrix {

constexpr long K_BLOCK = 256;          // elements of K: two panels of them stay in L1 beside two tiles of x
constexpr long MOST_ROWS = 512;        // of x in a pass
constexpr long NEAR_BYTES = 1 << 20;   // of x that stay in L2 as a whole
constexpr long FEW_PANELS = 2, MANY_PANELS = 8;  // that a thread takes at a time: many where x comes from farther off
constexpr int AT_ONCE = 2;             // tiles of x and panels that meet

struct Product {
    const void *x; long x_stride; int x_type;
    const float *bias;
    void *out; long out_stride;  // of x's type
    long M, N, K;

    INLINE_MEMBER long steps() const { return ceil_div(K, STEP); }
    INLINE_MEMBER long tiles() const { return ceil_div(M, ROWS); }
};

// Tile t of x, bfloat16 [step][row][STEP], zeros where there is nothing.
template <class TX> static NOINLINE void pack_tile(const Product &p, long t, pair *to) {
    const long rows = min_of(ROWS, p.M - t * ROWS);
    for (long s = 0; s < p.steps(); s++)
        for (long m = 0; m < ROWS; m++, to += STEP / 2) {
            const long k = s * STEP, valid = m < rows ? min_of(STEP, p.K - k) : 0;
            const TX *from = (const TX *)p.x + (t * ROWS + m) * p.x_stride + k;
            if (valid == STEP) store_neighbours(to, load(from), load(from + W));
            else {
                bf16 some[STEP] = {};
                for (long i = 0; i < valid; i++) narrow(widen(from[i]), some[i]);
                __builtin_memcpy(to, some, sizeof some);
            }
        }
}

// The sums of a tile of x and a panel, with the bias.
template <class TX> static void write_tile(const Product &p, const float *sums, long t, long n) {
    const long rows = min_of(ROWS, p.M - t * ROWS), valid = min_of(ROWS, p.N - n);
    const vf bias = !p.bias ? vf{} : valid == W ? load(p.bias + n) : load_some(p.bias + n, valid);
    TX *out = (TX *)p.out + t * ROWS * p.out_stride + n;
    for (long m = 0; m < rows; m++, sums += ROWS, out += p.out_stride) {
        const vf y = load(sums) + bias;
        if (valid == W) store(out, y);
        else store_some(out, y, valid);
    }
}

// Calls f with one or two as a constant.
template <class F> INLINE void with_count(long count, const F &f) {
    if (count > 1) f(Count<2>{});
    else f(Count<1>{});
}

// Panels first .. end of a chunk against all of x. widen(panel, k, end, to): elements k .. end of K of a panel as pairs, zeros up to a
// whole step. packed: as pack_tile leaves tiles; ready: for two panels; sums: for the chunk.
template <class TX, class WIDEN>
static void multiply_chunk(const Product &p, const pair *packed, long first, long end, pair *ready, float *sums, const WIDEN &widen) {
    constexpr long OF_PANEL = K_BLOCK / STEP * PAIRS_OF_TILE, OF_SUMS = ROWS * ROWS;
    const long tiles = p.tiles(), x_step = p.steps() * PAIRS_OF_TILE;
    for (long k = 0; k < p.K; k += K_BLOCK) {
        const long stop = min_of(k + K_BLOCK, p.K), steps = ceil_div(stop - k, STEP);
        for (long panel = first; panel < end; panel += AT_ONCE) {
            const long panels = min_of(AT_ONCE, end - panel);
            float *own = sums + (panel - first) * tiles * OF_SUMS;
            for (long i = 0; i < panels; i++) widen(panel + i, k, stop, ready + i * OF_PANEL);
            for (long t = 0; t < tiles; t += AT_ONCE) {
                const long count = min_of(AT_ONCE, tiles - t);
                with_count(panels, [&](auto panels_constant) {
                    with_count(count, [&](auto tiles_constant) {
                        constexpr int PANELS = decltype(panels_constant)::value, TILES = decltype(tiles_constant)::value;
                        const Tiled<const pair> x = {packed + t * x_step + k / STEP * PAIRS_OF_TILE, x_step, PAIRS_OF_TILE, ROWS};
                        multiply_tiles<TILES, PANELS>(x, {ready, OF_PANEL, PAIRS_OF_TILE, ROWS}, steps,
                                                      {own + t * PANELS * OF_SUMS, PANELS * OF_SUMS, OF_SUMS, ROWS}, k == 0);
                    });
                });
                if (stop < p.K) continue;
                for (long i = 0; i < count; i++)
                    for (long n = 0; n < panels; n++)
                        write_tile<TX>(p, own + ((t + i) * panels + n) * OF_SUMS, t + i, (panel + n) * blocks::PANEL);
            }
        }
    }
}

// widen: as multiply_chunk has it, with memory of the thread's own behind its arguments, `widen_bytes` of it.
template <class TX, class WIDEN> static int multiply_pass(const Product &p, long widen_bytes, const WIDEN &widen) {
    const long tiles = p.tiles(), panels = ceil_div(p.N, blocks::PANEL), x_bytes = tiles * p.steps() * PAIRS_OF_TILE * 4;
    const long chunk = x_bytes <= NEAR_BYTES ? FEW_PANELS : MANY_PANELS, chunks = ceil_div(panels, chunk);
    const long threads = min_of(chunks, most_threads());
    const long ready_bytes = AT_ONCE * K_BLOCK * blocks::PANEL * 2, sum_bytes = chunk * tiles * ROWS * ROWS * 4;
    const long own_bytes = ready_bytes + sum_bytes + round_up(widen_bytes, 64);
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, x_bytes + threads * own_bytes)) return 1;
    pair *packed = (pair *)memory;
    for_units(tiles, threads, [&](long t) { pack_tile<TX>(p, t, packed + t * p.steps() * PAIRS_OF_TILE); });
    Shares shares(chunks, threads);
    on_threads(threads, [&](long thread) {
        char *own = (char *)memory + x_bytes + thread * own_bytes;
        const Use use;
        shares.take(thread, [&](long c) {
            multiply_chunk<TX>(p, packed, c * chunk, min_of((c + 1) * chunk, panels), (pair *)own, (float *)(own + ready_bytes),
                               [&](long panel, long k, long end, pair *to) { widen(panel, k, end, to, own + ready_bytes + sum_bytes); });
        });
    });
    free(memory);
    return 0;
}

template <class TX, class WIDEN> static int multiply_all(Product p, long widen_bytes, const WIDEN &widen) {
    const long rows = p.M, passes = ceil_div(rows, MOST_ROWS), step = passes ? round_up(ceil_div(rows, passes), AT_ONCE * ROWS) : 1;
    for (long m = 0; m < rows; m += step) {
        Product pass = p;
        pass.M = min_of(step, rows - m);
        pass.x = (const TX *)p.x + m * p.x_stride;
        pass.out = (TX *)p.out + m * p.out_stride;
        if (multiply_pass<TX>(pass, widen_bytes, widen)) return 1;
    }
    return 0;
}

// Groups g .. end of a panel as pairs of neighbouring elements of K.
template <class F>
static NOINLINE void widen_pairs(const blocks::BlockWeight &w, long panel, long g, long end, float *scales, pair *to) {
    static_assert(W == blocks::PANEL);
    const uint8_t *codes = w.codes + (panel * w.groups() + g) * F::STORED_BYTES;
    blocks::widen_scales(w, panel, g, end, scales);
    for (; g < end; g++, codes += F::STORED_BYTES, scales += F::PARTS * W) {
        const vf scale = load(scales), minimum = F::MINIMUM ? load(scales + (F::PARTS - 1) * W) : vf{};
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++, to += 2 * W) {
            const vu quad = (vu)blocks::codes_of<F>(codes, q);
            vf y[4];
            for (int i = 0; i < 4; i++) {
                const vi code = F::BITS == 8 ? (vi)(quad << (24 - 8 * i)) >> 24 : (vi)(quad >> 8 * i & 0xffu) - w.offset;
                y[i] = __builtin_convertvector(code, vf) * scale;
                if (F::MINIMUM) y[i] += minimum;
            }
            for (int i = 0; i < 2; i++) *(vu_any *)(to + i * W) = paired(y[2 * i], y[2 * i + 1]);
        }
    }
}

template <class F> static int multiply_blocks(const Product &p, const blocks::BlockWeight &weight) {
    const auto widen = [&](long panel, long k, long end, pair *to, void *scales) {
        const long first = k / F::GROUP, last = ceil_div(end, F::GROUP), filled = (last - first) * F::GROUP / 2 * W;
        widen_pairs<F>(weight, panel, first, last, (float *)scales, to);
        __builtin_memset(to + filled, 0, (round_up(end - k, STEP) / 2 * W - filled) * sizeof(pair));
    };
    const long scale_bytes = K_BLOCK / F::GROUP * F::PARTS * W * 4;
    return p.x_type == 0 ? multiply_all<float>(p, scale_bytes, widen) : multiply_all<bf16>(p, scale_bytes, widen);
}

// x and out are float32 (0) or bfloat16 (1), bias float32 or null, the weight as linear_blocks takes it. Returns 1 when out of memory,
// 2 for a form that there is no product for.
EXPORT int WINDLASS_NAME(linear_blocks_rounded)(const void *x, long x_stride, int x_type, const uint8_t *codes, const void *scales,
                                                const void *supers, int bits, int group, int super_groups, int minimum, int offset,
                                                const float *bias, void *out, long out_stride, long M, long N, long K) {
    using blocks::Form;
    const blocks::BlockWeight weight = {codes, scales, (const f16 *)supers, bits, group, super_groups, minimum, offset, N, K};
    const Product p = {x, x_stride, x_type, bias, out, out_stride, M, N, K};
    if (bits == 4 && group == 32) return minimum ? multiply_blocks<Form<4, 32, true>>(p, weight) : multiply_blocks<Form<4, 32, false>>(p, weight);
    if (bits == 5 && group == 32) return minimum ? multiply_blocks<Form<5, 32, true>>(p, weight) : multiply_blocks<Form<5, 32, false>>(p, weight);
    if (bits == 6 && group == 16 && !minimum) return multiply_blocks<Form<6, 16, false>>(p, weight);
    if (bits == 8 && group == 32 && !minimum && !offset) return multiply_blocks<Form<8, 32, false>>(p, weight);
    return 2;
}

// The same for a weight of bfloat16 in panels, of which nothing is rounded; x and out are bfloat16.
EXPORT int WINDLASS_NAME(linear_panels_rounded)(const void *x, long x_stride, const void *weight, const float *bias, void *out,
                                                long out_stride, long M, long N, long K) {
    const Product p = {x, x_stride, 1, bias, out, out_stride, M, N, K};
    const long lines = ceil_div(K, 2);
    return multiply_all<bf16>(p, 0, [&](long panel, long k, long end, pair *to, void *) {
        const long count = ceil_div(end, 2) - k / 2;
        __builtin_memcpy(to, (const pair *)weight + (panel * lines + k / 2) * W, count * W * sizeof(pair));
        __builtin_memset(to + count * W, 0, (round_up(end - k, STEP) / 2 - count) * W * sizeof(pair));
    });
}

}  // namespace matrix

}  // namespace
