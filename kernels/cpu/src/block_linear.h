// out[M, N] = x[M, K] * weight[N, K]^T + bias for block weights, with x rounded to 8 bits group by group.
//
// One vector holds a quad of WINDLASS_LANES rows of the weight and is multiplied by a broadcast quad of x: no sum crosses lanes, and
// every instruction set reads the same bytes. The sum of a group is int32 (int16 where it provably fits) and exact. Then, in
// float32 and in this order for every output: acc += sum * (weight's scale * x's scale), and with a minimum
// acc += minimum * (x's scale * sum of x), group after group. So a row's bits do not depend on other rows, tiles or threads.
//
// For a weight whose first half of rows are gates, out[M, N / 2] = activation(gate) * up, one panel of each at a time.

#pragma once

#include "activations.h"
#include "block_codes.h"
#include "block_groups.h"
#include "byte_products.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace blocks {

constexpr float TINY = 0x1p-100f;  // smaller values count as zero

// 127 / |largest| and the scale that goes with it. A row that holds NaN or infinity gets the scale NaN and zeros, so that
// all of its outputs are NaN and no others.
INLINE float inverse_scale(float largest, bool finite, float &scale) {
    scale = finite ? (largest < TINY ? 0.0f : largest * (1.0f / 127.0f)) : __builtin_nanf("");
    return finite && largest >= TINY ? 127.0f / largest : 0.0f;
}

// The nearest integers of x * by (even on a tie) for |x * by| < 2^22; zeros where by is 0, whatever x. The product is rounded first:
// fused with the addition, ties would differ between instruction sets.
INLINE vi round_scaled(vf x, float by) { return by == 0.0f ? vi{} : nearest_int(rounded(x * by)); }

// x of one pass: values [tile][quad][row of the tile][4], scale and correction [tile][group][row of the tile]. correction, per
// group: an int32 added to the sum of products, or, in a form with minima, the float32 scale * (sum of rounded x) that the minimum
// multiplies. A group's values depend on that group alone.
struct RoundedRows {
    uint8_t *values;
    float *scale, *correction;
};

// One group of one row of x with `valid` elements; the rest are zeros. rows: of the tile. total: sum of rounded x.
template <class F>
INLINE void round_group(const float *x, long valid, long rows, uint8_t *values, float &scale, int32_t &total) {
    constexpr int VECTORS = F::GROUP / W;
    vf part[VECTORS];
    vu top = {};
    for (int i = 0; i < VECTORS; i++) {
        if (valid >= F::GROUP) part[i] = load(x + i * W);
        else part[i] = i * W < valid ? load_some(x + i * W, min_of(W, valid - i * W)) : vf{};
        top = larger_bits((vu)magnitude_of(part[i]), top);
    }
    const uint32_t most = largest(top);
    const float by = inverse_scale(float_of(most), most < 0x7f800000u, scale);
    vi sum = {};
    for (int i = 0; i < VECTORS; i++) {
        const vi q = round_scaled(part[i], by);
        sum += q;
        uint8_t *to = values + i * W * F::X * rows;
        if constexpr (F::PAIRS) {
            typedef int16_t half __attribute__((vector_size(2 * W)));
            const half narrow_q = __builtin_convertvector(q, half);
            for (int k = 0; k < W; k += 4) {
                const int16_t four[4] = {narrow_q[k], narrow_q[k + 2], narrow_q[k + 1], narrow_q[k + 3]};
                __builtin_memcpy(to + k * 2 * rows, four, 8);
            }
        } else {
            typedef int8_t quarter __attribute__((vector_size(W)));
            const quarter narrow_q = __builtin_convertvector(q, quarter);
            for (int k = 0; k < W; k += 4) __builtin_memcpy(to + k * rows, (const char *)&narrow_q + k, 4);
        }
    }
    total = total_of(sum);
}

// One tile of x. x: its first row; to: buffers of the entire pass.
template <class F>
static NOINLINE void round_tile(const float *x, long x_stride, long K, int offset, long begin, long rows, const RoundedRows &to) {
    const long groups = ceil_div(K, F::GROUP);
    uint8_t *values = to.values + begin * groups * F::GROUP * F::X;
    for (long m = 0; m < rows; m++) {
        for (long g = 0; g < groups; g++) {
            const long at = begin * groups + g * rows + m, k = g * F::GROUP;
            int32_t total;
            round_group<F>(x + m * x_stride + k, K - k, rows, values + (k * rows + 4 * m) * F::X, to.scale[at], total);
            if (F::MINIMUM) to.correction[at] = to.scale[at] * float(total);
            else {
                total *= -(offset + F::CARRIED);
                __builtin_memcpy(to.correction + at, &total, 4);
            }
        }
    }
}

// Rows of a tile that is multiplied by two panels at once, if there are enough registers: with many tiles, each broadcast of x serves
// both (measured on Zen 5: up to a sixth less time than one panel and eight rows, which load nearly twice as much). With few tiles,
// one panel's codes arrive sooner (measured on Zen 4, 8 bits: 18 rows in 0.72 to 0.81 of the time, 32 in 0.77 to 0.92).
constexpr bool PAIRED_PANELS = WINDLASS_QUADS && V == 1;
constexpr int PAIRED_ROWS = 6;
constexpr long PAIRED_FROM = 8 * TILE_ROWS + 1;  // rows of x
constexpr long READY_QUADS = 128;   // of one panel for all tiles; they stay in L1 together with a tile of x
constexpr long SINGLE_QUADS = 512;  // of one panel for a single tile, whose scales are converted together
constexpr long SHARED_ROWS = 8;     // from here on threads share the rounding of x, at the cost of a barrier
constexpr long X_BYTES = 256 << 10; // of rounded x per pass, if that leaves enough rows
constexpr long LEAST_PASS = 128, MOST_PASS = 192;
struct BlockLinear {
    BlockWeight weight;
    const float *x; long x_stride;
    const float *bias;
    int activation;  // as with_activation numbers them, of a gate; NONE for plain results
    float *out; long out_stride;
    long M;

    static constexpr int NONE = -1;
    INLINE_MEMBER bool gated() const { return activation != NONE; }
    // Distance in panels from gates to ups.
    INLINE_MEMBER long ups_behind() const { return weight.N / 2 / PANEL; }
};

// Of the last panel, which may be partial.
static NOINLINE void finish_last(const BlockLinear &p, const float *sums, long n, float *out) {
    for (long i = 0; i < PANEL && n + i < p.weight.N; i += W) {
        const long valid = min_of(W, p.weight.N - n - i);
        vf y = load(sums + i);
        if (p.bias) y += load_part(p.bias + n + i, valid);
        store_part(out + i, y, valid);
    }
}
INLINE void finish(const BlockLinear &p, const float *sums, long n, float *out) {
    if (n + PANEL > p.weight.N) return finish_last(p, sums, n, out);
    for (long i = 0; i < PANEL; i += W) store(out + i, p.bias ? load(sums + i) + load(p.bias + n + i) : load(sums + i));
}

// activation(gate) * up of full panels; sums have a row stride of `step`.
static NOINLINE void finish_gates(const BlockLinear &p, const float *gates, const float *ups, long step, long panel) {
    const long n = panel * PANEL;
    with_activation(p.activation, [&](auto activation) {
        for (long i = 0; i < PANEL; i += W) {
            const vf gate_bias = p.bias ? load(p.bias + n + i) : vf{}, up_bias = p.bias ? load(p.bias + p.weight.N / 2 + n + i) : vf{};
            for (long m = 0; m < p.M; m++) {
                vf gate = load(gates + m * step + i), up = load(ups + m * step + i);
                if (p.bias) gate += gate_bias, up += up_bias;
                store(p.out + m * p.out_stride + n + i, activation(gate) * up);
            }
        }
        return 0;
    });
}

// Buffers of one thread.
struct Scratch {
    float *sums, *scales;  // [M][16] or twice that; of the quads taken at a time
    uint8_t *ready;
};

INLINE void finish_panel(const BlockLinear &p, const Scratch &own, long panel) {
    for (long m = 0; m < p.M; m++)
        finish(p, own.sums + m * PANEL, panel * PANEL, p.out + m * p.out_stride + panel * PANEL);
}

template <class F, bool READY>
static void multiply_panel(const BlockLinear &p, Tiles tiles, const RoundedRows &x, long panel, const Scratch &own) {
    const long groups = p.weight.groups(), block = (tiles.count == 1 ? SINGLE_QUADS : READY_QUADS) / F::QUADS;
    const long step = F::PARTS * PANEL * (p.weight.super_groups ? 1 : 2);
    const uint8_t *stored = p.weight.codes + panel * groups * F::STORED_BYTES;
    for (long g = 0; g < groups; g += block, stored += block * F::STORED_BYTES) {
        const long count = min_of(block, groups - g), bytes = count * F::STORED_BYTES;
        widen_scales(p.weight, panel, g, g + count, own.scales);
        const GroupPrefetch following = {READY ? nullptr : (const char *)p.weight.scales + (panel * groups + g + block) * step, step};
        if (READY) make_ready<F>(stored, count, own.ready);
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t);
            if (READY) {  // prefetch the next block
                const long end = bytes * (t + 1) / tiles.count;
                for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64) __builtin_prefetch(stored + bytes + i);
            }
            const long at = begin * groups + g * rows;
            const PlainScales<F, float> scales = {own.scales};
            with_rows(rows, [&](auto rows_constant) {
                constexpr int MT = decltype(rows_constant)::value;
                multiply_groups<F, READY, MT>(READY ? own.ready : stored, scales, x.values + at * F::GROUP * F::X,
                                              x.scale + at, x.correction + at, count, following, own.sums + begin * PANEL, g == 0);
            });
        }
    }
}

// A panel and a single tile, scales converted when used.
template <class F> static void multiply_at_once(const BlockLinear &p, const RoundedRows &x, long panel, const Scratch &own) {
    const long groups = p.weight.groups(), at = panel * groups, each = F::PARTS * PANEL, size = p.weight.super_groups ? 1 : 2;
    const char *scales = (const char *)p.weight.scales + at * each * size;
    const GroupPrefetch following = {reads_best_without_prefetch<F>(p.M) ? nullptr : scales + groups * each * size, each * size};
    const auto multiply = [&](auto w_scale) {
        with_rows(p.M, [&](auto rows_constant) {
            constexpr int MT = decltype(rows_constant)::value;
            multiply_groups<F, false, MT>(p.weight.codes + at * F::STORED_BYTES, w_scale, x.values, x.scale, x.correction, groups,
                                          following, own.sums, true);
        });
    };
    if (!p.weight.super_groups) multiply(PlainScales<F, f16>{(const f16 *)scales});
    else {
        typedef typename SuperScales<F>::T T;
        const long supers = ceil_div(groups, p.weight.super_groups) * each;
        multiply(SuperScales<F>{(const T *)scales, p.weight.supers + panel * supers, p.weight.super_groups});
    }
}

// One panel and all tiles; results in own.sums.
template <class F> INLINE void multiply_one(const BlockLinear &p, Tiles tiles, const RoundedRows &x, long panel, const Scratch &own) {
    if constexpr (SCALES_IN_PASSING)
        if (tiles.count == 1) return multiply_at_once<F>(p, x, panel, own);
    if (F::UNPACKS && tiles.count > 2) multiply_panel<F, F::UNPACKS>(p, tiles, x, panel, own);
    else multiply_panel<F, false>(p, tiles, x, panel, own);
}

// Two panels (adjacent, or gates and ups) and many tiles.
template <class F> static void multiply_panels(const BlockLinear &p, Tiles tiles, const RoundedRows &x, long panel, const Scratch &own) {
    const long second = p.gated() ? p.ups_behind() : 1;
    constexpr bool READY = F::UNPACKS;
    const long groups = p.weight.groups(), blocks = ceil_div(groups, READY_QUADS / F::QUADS), block = ceil_div(groups, blocks);
    const long scales = block * F::PARTS * PANEL;
    for (long g = 0; g < groups; g += block) {
        const long count = min_of(block, groups - g), bytes = count * F::STORED_BYTES;
        const uint8_t *stored[2];
        PanelGroups both[2];
        for (int n = 0; n < 2; n++) {
            stored[n] = p.weight.codes + ((panel + n * second) * groups + g) * F::STORED_BYTES;
            both[n] = {READY ? own.ready + n * block * F::READY_BYTES : stored[n], own.scales + n * scales};
            widen_scales(p.weight, panel + n * second, g, g + count, own.scales + n * scales);
            if (READY) make_ready<F>(stored[n], count, own.ready + n * block * F::READY_BYTES);
        }
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t), at = begin * groups + g * rows;
            const long end = bytes * (t + 1) / tiles.count;  // of the next block, prefetched here
            for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64)
                for (int n = 0; n < 2; n++) __builtin_prefetch(stored[n] + bytes + i);
            if (g + block >= groups)  // rows of out are far apart: each line would be a miss
                for (long m = begin; m < begin + rows; m++)
                    for (int n = 0; n < 2 - p.gated(); n++) __builtin_prefetch(p.out + m * p.out_stride + (panel + n) * PANEL, 1);
            with_rows(rows, [&](auto rows_constant) {
                constexpr int MT = decltype(rows_constant)::value;
                if constexpr (MT <= PAIRED_ROWS)
                    multiply_pair<F, READY, MT>(both[0], both[1], x.values + at * F::GROUP, x.scale + at, x.correction + at, count,
                                                own.sums + begin * 2 * PANEL, g == 0);
            });
        }
    }
    if (p.gated()) return finish_gates(p, own.sums, own.sums + PANEL, 2 * PANEL, panel);
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
    // Panels of out, each with the bytes of its panels of the weight.
    const long panels = p.gated() ? p.ups_behind() : ceil_div(N, PANEL), panel_bytes = (1 + p.gated()) * groups * F::STORED_BYTES;
    const long step = paired && !p.gated() ? 2 : 1;
    const long chunk = max_of(step, chunk_of(panels, panel_bytes) / step * step), chunks = ceil_div(panels, chunk);
    const long threads = p.M * N * K < SERIAL_WORK ? 1 : min_of(chunks, most_threads());
    const bool shared = p.M >= SHARED_ROWS && threads > 1;
    const long value_bytes = round_up(p.M * groups * F::GROUP * F::X, 64), scale_bytes = round_up(4 * p.M * groups, 64);
    const long x_bytes = value_bytes + 2 * scale_bytes;
    const long sum_bytes = (1 + (paired || p.gated())) * 4 * p.M * PANEL, scales_bytes = 4 * SINGLE_QUADS / F::QUADS * F::PARTS * PANEL;
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
        if (!shared)  // every thread rounds few rows for itself, which is faster than a barrier
            for (long t = 0; t < tiles.count; t++) round(t, x);
        shares.take(thread, [&](long c) {
            const long end = min_of((c + 1) * chunk, panels);
            long panel = c * chunk;
            if constexpr (PAIRED_PANELS)
                for (; paired && panel + step <= end; panel += step) multiply_panels<F>(p, tiles, x, panel, own);
            for (; panel < end; panel++) {
                multiply_one<F>(p, tiles, x, panel, own);
                if (!p.gated()) {
                    finish_panel(p, own, panel);
                    continue;
                }
                Scratch up = own;
                up.sums += p.M * PANEL;
                multiply_one<F>(p, tiles, x, panel + p.ups_behind(), up);
                finish_gates(p, own.sums, up.sums, PANEL, panel);
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
    return in_passes<float>(p, passes ? round_up(ceil_div(p.M, passes), tile) : 1, linear_pass<F>);
}

// x, bias and out are float32, strides in elements; bias may be null, and supers where super_groups is 0. activation: that of gates,
// which fill entire panels, or -1. Returns 1 when out of memory, 2 for an unsupported form.
EXPORT int WINDLASS_NAME(linear_blocks)(const float *x, long x_stride, const uint8_t *codes, const void *scales,
                                        const void *supers, int bits, int group, int super_groups, int minimum, int offset,
                                        const float *bias, int activation, float *out, long out_stride, long M, long N,
                                        long K) {
    const BlockWeight weight = {codes, scales, (const f16 *)supers, bits, group, super_groups, minimum, offset, N, K};
    const BlockLinear p = {weight, x, x_stride, bias, activation, out, out_stride, M};
    return with_form(weight, [&](auto form) { return linear_all<decltype(form)>(p); });
}
RECORDABLE(linear_blocks)

}  // namespace blocks
}  // namespace
