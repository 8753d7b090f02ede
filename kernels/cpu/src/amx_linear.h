// out[M, N] = x[M, K] * weight[N, K]^T + bias for many rows, by AMX; or, if its halves are gate and up, out[M, N / 2] =
// activation(gate) * up.
//
// x and the weight, however it is stored, are rounded to bfloat16. A thread converts some panels at a time, a piece of K of each,
// which stay in L2, and multiplies them by two tiles of x, which stay in L1. Products are exact and sums float32. The rounding error
// is smaller than that of 8 bits in block_linear.h (docs/internals/benchmarks.md).

#pragma once

#include "activations.h"
#include "amx.h"
#include "block_codes.h"
#include "recordable.h"
#include "work_split.h"

namespace {
namespace matrix {

constexpr long MOST_ROWS = 512;         // of x in a pass
constexpr long MOST_K = 640;            // elements of K: two tiles of x of them stay in L1 while weights stream past
constexpr long NEAR_BYTES = 1 << 20;    // of widened weights and of sums that stay in L2
constexpr long CHUNKS_OF_THREAD = 4;    // of a weight, for an even load
constexpr int AT_ONCE = 2;              // tiles of x and panels multiplied together
constexpr long OF_SUMS = ROWS * ROWS, OF_MEETING = AT_ONCE * AT_ONCE * OF_SUMS;

struct Product {
    const void *x; long x_stride; int x_type;
    const float *bias;
    void *out; long out_stride;  // of x's type
    long M, N, K;
    int activation;  // as with_activation numbers them, of a gate; NONE for plain results

    static constexpr int NONE = -1;
    INLINE_MEMBER bool gated() const { return activation != NONE; }
    INLINE_MEMBER long steps() const { return ceil_div(K, STEP); }
    INLINE_MEMBER long tiles() const { return ceil_div(M, ROWS); }
    INLINE_MEMBER long panels() const { return ceil_div(N, blocks::PANEL); }
};

// Panels are processed in pairs: adjacent ones, or one of gates and the matching one of ups.
struct Pairing {
    long panels, ups;  // ups: distance from gates; 0 for adjacent panels

    explicit Pairing(const Product &p) : panels(p.panels()), ups(p.gated() ? panels / 2 : 0) {}
    INLINE_MEMBER long count() const { return ceil_div(panels, 2); }
    INLINE_MEMBER long panel(long both, long i) const { return ups ? both + i * ups : 2 * both + i; }
    INLINE_MEMBER long in(long both) const { return panel(both, 1) < panels ? 2 : 1; }
};

// The share of a weight per thread. Pieces of K depend on K alone, so that a row has the same bits in any batch.
struct Plan {
    long k_block;  // elements of K
    long chunk;    // pairs of panels

    Plan(const Product &p, long pairs, long threads) {
        k_block = round_up(ceil_div(p.K, max_of(1, ceil_div(p.K, MOST_K))), STEP);
        const long sums = one_piece(p) ? 0 : ceil_div(p.tiles(), AT_ONCE) * OF_MEETING * 4;
        const long near = max_of(1, NEAR_BYTES / (AT_ONCE * panel_bytes() + sums));
        chunk = min_of(near, max_of(1, ceil_div(pairs, threads * CHUNKS_OF_THREAD)));
    }
    INLINE_MEMBER bool one_piece(const Product &p) const { return k_block >= p.K; }
    INLINE_MEMBER long panel_bytes() const { return k_block * blocks::PANEL * 2; }
    INLINE_MEMBER long ready_bytes() const { return chunk * AT_ONCE * panel_bytes(); }
    // Sums of a chunk are stored between pieces of K.
    INLINE_MEMBER long sum_bytes(const Product &p) const {
        return (one_piece(p) ? 1 : chunk * ceil_div(p.tiles(), AT_ONCE)) * OF_MEETING * 4;
    }
};

// Tile t of x, bfloat16 [step][row][STEP], padded with zeros.
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
    const vf bias = !p.bias ? vf{} : load_part(p.bias + n, valid);
    TX *out = (TX *)p.out + t * ROWS * p.out_stride + n;
    for (long m = 0; m < rows; m++, sums += ROWS, out += p.out_stride) {
        const vf y = load(sums) + bias;
        store_part(out, y, valid);
    }
}

// activation(gate) * up of a tile of x, of columns n .. of the result.
template <class TX> static void write_gated_tile(const Product &p, const float *gate, const float *up, long t, long n) {
    const long rows = min_of(ROWS, p.M - t * ROWS);
    const vf gate_bias = p.bias ? load(p.bias + n) : vf{}, up_bias = p.bias ? load(p.bias + p.N / 2 + n) : vf{};
    with_activation(p.activation, [&](auto activation) {
        TX *out = (TX *)p.out + t * ROWS * p.out_stride + n;
        for (long m = 0; m < rows; m++, gate += ROWS, up += ROWS, out += p.out_stride)
            store(out, activation(load(gate) + gate_bias) * (load(up) + up_bias));
        return 0;
    });
}

// Calls f with one or two as a constant.
template <class F> INLINE void with_count(long count, const F &f) {
    if (count > 1) f(Number<2>{});
    else f(Number<1>{});
}

// Pairs first .. end times all of x. widen(panel, k, end, to): elements k .. end of K of a panel as bfloat16 pairs, zeros up to a
// full step. packed: tiles of pack_tile; ready, sums: sizes as in the plan.
template <class TX, class WIDEN>
static void multiply_chunk(const Product &p, const Plan &plan, const Pairing &pairing, const pair *packed, long first, long end,
                           pair *ready, float *sums, const WIDEN &widen) {
    const long tiles = p.tiles(), x_step = p.steps() * PAIRS_OF_TILE, of_panel = plan.panel_bytes() / (long)sizeof(pair);
    // Sums that need no further step are written to their final place.
    const bool in_place = p.x_type == 0 && !p.bias && !p.gated();
    for (long k = 0; k < p.K; k += plan.k_block) {
        const long stop = min_of(k + plan.k_block, p.K), steps = ceil_div(stop - k, STEP);
        for (long both = first; both < end; both++)
            for (long i = 0; i < pairing.in(both); i++)
                widen(pairing.panel(both, i), k, stop, ready + (AT_ONCE * (both - first) + i) * of_panel);
        for (long t = 0; t < tiles; t += AT_ONCE) {
            const long count = min_of(AT_ONCE, tiles - t);
            const Tiled<const pair> x = {packed + t * x_step + k / STEP * PAIRS_OF_TILE, x_step, PAIRS_OF_TILE, ROWS};
            for (long both = first; both < end; both++) {
                const long panels = pairing.in(both), n = pairing.panel(both, 0) * blocks::PANEL;
                const Tiled<const pair> weight = {ready + AT_ONCE * (both - first) * of_panel, of_panel, PAIRS_OF_TILE, ROWS};
                const bool there = in_place && stop == p.K && (t + count) * ROWS <= p.M && n + panels * blocks::PANEL <= p.N;
                const long place = plan.one_piece(p) ? 0 : (both - first) * ceil_div(tiles, AT_ONCE) + t / AT_ONCE;
                const Tiled<float> own = {sums + place * OF_MEETING, AT_ONCE * OF_SUMS, OF_SUMS, ROWS};
                Tiled<float> to = own;
                if (there) to = {(float *)p.out + t * ROWS * p.out_stride + n, ROWS * p.out_stride, blocks::PANEL, p.out_stride};
                with_count(panels, [&](auto panels_constant) {
                    with_count(count, [&](auto tiles_constant) {
                        multiply_tiles<decltype(tiles_constant)::value, decltype(panels_constant)::value>(x, weight, steps, own, to, k == 0);
                    });
                });
                if (stop < p.K || there) continue;
                for (long i = 0; i < count; i++) {
                    const float *of_tile = own.first + i * own.tile;
                    if (p.gated()) write_gated_tile<TX>(p, of_tile, of_tile + own.step, t + i, n);
                    else for (long j = 0; j < panels; j++) write_tile<TX>(p, of_tile + j * own.step, t + i, n + j * blocks::PANEL);
                }
            }
        }
    }
}

// widen: as in multiply_chunk, with a thread-local buffer of `widen_bytes` per step of K as last argument.
template <class TX, class WIDEN> static int multiply_pass(const Product &p, long widen_bytes, const WIDEN &widen) {
    const Pairing pairing(p);
    const long pairs = pairing.count(), tiles = p.tiles(), x_bytes = tiles * p.steps() * PAIRS_OF_TILE * 4;
    const Plan plan(p, pairs, most_threads());
    const long chunks = ceil_div(pairs, plan.chunk), threads = min_of(chunks, most_threads());
    const long ready_bytes = plan.ready_bytes(), sum_bytes = plan.sum_bytes(p);
    const long own_bytes = ready_bytes + sum_bytes + round_up(plan.k_block / STEP * widen_bytes, 64);
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, x_bytes + threads * own_bytes)) return 1;
    pair *packed = (pair *)memory;
    for_units(tiles, threads, [&](long t) { pack_tile<TX>(p, t, packed + t * p.steps() * PAIRS_OF_TILE); });
    Shares shares(chunks, threads);
    on_threads(threads, [&](long thread) {
        char *own = (char *)memory + x_bytes + thread * own_bytes;
        const Use use;
        shares.take(thread, [&](long c) {
            multiply_chunk<TX>(p, plan, pairing, packed, c * plan.chunk, min_of((c + 1) * plan.chunk, pairs), (pair *)own,
                               (float *)(own + ready_bytes),
                               [&](long panel, long k, long end, pair *to) { widen(panel, k, end, to, own + ready_bytes + sum_bytes); });
        });
    });
    free(memory);
    return 0;
}

template <class TX, class WIDEN> static int multiply_all(const Product &p, long widen_bytes, const WIDEN &widen) {
    const long passes = ceil_div(p.M, MOST_ROWS), step = passes ? round_up(ceil_div(p.M, passes), AT_ONCE * ROWS) : 1;
    return in_passes<TX>(p, step, [&](const Product &pass) { return multiply_pass<TX>(pass, widen_bytes, widen); });
}

// Groups g .. end of a panel as pairs of adjacent elements of K.
//
// A code without a sign becomes a float32 without a conversion: as the upper bits of the mantissa of BASE = 2^bits it is BASE + code,
// and the minimum is moved by BASE * scale, which rounding changes by 2^-15 of a code at most.
template <class F>
static NOINLINE void widen_pairs(const blocks::BlockWeight &w, long panel, long g, long end, float *scales, pair *to) {
    static_assert(W == blocks::PANEL);
    constexpr int LOWEST = 23 - F::BITS;  // bit of the mantissa
    constexpr uint32_t MASK = ((1u << F::BITS) - 1) << LOWEST, BASE = (127u + F::BITS) << 23;
    const float zero = (1 << F::BITS) + (F::BITS == 8 ? 128 : w.offset);
    const uint8_t *codes = w.codes + (panel * w.groups() + g) * F::STORED_BYTES;
    blocks::widen_scales(w, panel, g, end, scales);
    for (; g < end; g++, codes += F::STORED_BYTES, scales += F::PARTS * W) {
        const vf scale = load(scales), from = add_product(F::MINIMUM ? load(scales + (F::PARTS - 1) * W) : vf{}, scale, splat(-zero));
        WINDLASS_UNROLL
        for (int q = 0; q < F::QUADS; q++, to += 2 * W) {
            vu quad = (vu)blocks::unpack_codes<F>(codes, q);
            if (F::BITS == 8) quad ^= 0x80808080u;
            vf y[4];
            for (int i = 0; i < 4; i++) {
                const vu placed = 8 * i < LOWEST ? quad << (LOWEST - 8 * i) : quad >> (8 * i - LOWEST);
                y[i] = add_product(from, (vf)((placed & MASK) | BASE), scale);
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
    const long scale_bytes = STEP / F::GROUP * F::PARTS * W * 4;
    return p.x_type == 0 ? multiply_all<float>(p, scale_bytes, widen) : multiply_all<bf16>(p, scale_bytes, widen);
}

// x and out are float32 (0) or bfloat16 (1), bias [N] float32 or null, the weight as in linear_blocks. activation: that of gates,
// which are the first half of the weight's rows (full panels), followed by ups; or Product::NONE. Returns 1 when out of memory, 2 for
// an unsupported form.
EXPORT int WINDLASS_NAME(linear_blocks_amx)(const void *x, long x_stride, int x_type, const uint8_t *codes, const void *scales,
                                                const void *supers, int bits, int group, int super_groups, int minimum, int offset,
                                                const float *bias, int activation, void *out, long out_stride, long M, long N,
                                                long K) {
    const blocks::BlockWeight weight = {codes, scales, (const f16 *)supers, bits, group, super_groups, minimum, offset, N, K};
    const Product p = {x, x_stride, x_type, bias, out, out_stride, M, N, K, activation};
    return blocks::with_form(weight, [&](auto form) { return multiply_blocks<decltype(form)>(p, weight); });
}
RECORDABLE(linear_blocks_amx)

// The same for a bfloat16 panel weight, without rounding; x and out are bfloat16.
EXPORT int WINDLASS_NAME(linear_panels_amx)(const void *x, long x_stride, const void *weight, const float *bias, int activation,
                                                void *out, long out_stride, long M, long N, long K) {
    const Product p = {x, x_stride, 1, bias, out, out_stride, M, N, K, activation};
    const long lines = ceil_div(K, 2);
    return multiply_all<bf16>(p, 0, [&](long panel, long k, long end, pair *to, void *) {
        const long count = ceil_div(end, 2) - k / 2;
        __builtin_memcpy(to, (const pair *)weight + (panel * lines + k / 2) * W, count * W * sizeof(pair));
        __builtin_memset(to + count * W, 0, (round_up(end - k, STEP) / 2 - count) * W * sizeof(pair));
    });
}
RECORDABLE(linear_panels_amx)

}  // namespace matrix
}  // namespace
