// One block of attention_prefill_int8.h: addresses of its codes, and the rows of a unit tile by tile: scores, softmax, weighted
// values.

#pragma once

#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_prefill_int8_tiles.h"
#include "int8_pages.h"
#include "simd.h"

namespace {

#if WINDLASS_INT8_PREFILL
namespace prefill_codes {

constexpr long PANELS = BLOCK / PANEL_TOKENS;
constexpr long MOST_DIM = 512;               // 127 * 32639 * 512 is below 2^31
constexpr float QUERY_STEPS = 32639.0f;      // 127 * 256 + 127: the largest number of two signed planes
constexpr float WEIGHT_STEPS = 65535.0f;
constexpr long UNIT_BYTES = 256 << 10;       // queries and results of a unit: a share of an L2
constexpr long FEWEST_UNIT_ROWS = 2 * TILE_ROWS;  // smaller units would wait for their codes
constexpr long STEP_ROWS = TILE_ROWS / 3;    // tiles are one, two or three times as high

INLINE bool fit(const Prefill &p) {
    return p.value_dim % W == 0 && p.dim <= MOST_DIM;
}

INLINE long quads_of(const Prefill &p) { return ceil_div(p.dim, QUAD); }

// Rows whose queries and results fit.
INLINE long fitting_rows(const Prefill &p) { return UNIT_BYTES / (2 * QUAD * quads_of(p) + 8 * p.value_dim); }

// Accumulated state of rows: weighted values, the largest score in base 2, the sum of weights.
struct Gathered {
    float *acc;            // [row][value_dim]
    float *top, *total;    // [row]; a vector may be loaded at any row
    void start(long rows, long value_dim) const {
        for (long r = 0; r < rows; r++) top[r] = -__builtin_inff(), total[r] = 0.0f;
        for (long i = 0; i < rows * value_dim; i++) acc[i] = 0.0f;
    }
};

// Working memory of a thread; rows are rounded up to whole tiles.
struct Workspace {
    int8_t *query;          // [tile][plane: upper, lower][quad of dims][TILE_ROWS][4]
    int32_t *bias;          // [row]: what the keys' offset adds to a sum, negated
    float *factor;          // [row]: of the integer sums
    Gathered cut, whole;
    float *scores;          // [TILE_ROWS][BLOCK]: scores, then weights
    uint8_t *weights;       // [TILE_ROWS][plane: upper, lower][BLOCK], in the order of `quad_place`

    // Places the parts in `memory` (null: only count); returns the bytes.
    long place(const Prefill &p, long most_rows, void *memory) {
        long used = 0;
        const auto take = [&](long bytes) {
            char *part = (char *)memory + used;
            used += round_up(bytes, 64);
            return (void *)part;
        };
        const long rows = round_up(most_rows, TILE_ROWS);
        const auto gathered = [&] {
            return Gathered{(float *)take(rows * p.value_dim * 4), (float *)take((rows + W) * 4), (float *)take((rows + W) * 4)};
        };
        scores = (float *)take(TILE_ROWS * BLOCK * 4);
        weights = (uint8_t *)take(TILE_ROWS * BLOCK * 2);
        query = (int8_t *)take(rows * quads_of(p) * QUAD * 2);
        bias = (int32_t *)take(rows * 4);
        factor = (float *)take((rows + W) * 4);
        cut = gathered();
        whole = gathered();
        return used;
    }
};

struct Places : CodePanels<PANELS> {
    // Of keys [begin, end); other panels get the place of the first, so that they may be loaded too.
    void find(const Prefill &p, const int32_t *table, long head, long begin, long end) {
        const long first = begin % BLOCK / PANEL_TOKENS, start = begin / BLOCK * BLOCK;
        for (long n = 0; n < PANELS; n++) {
            const bool inside = n >= first && start + n * PANEL_TOKENS < end;
            find_panel(n, p.codes(), table, head, start + (inside ? n : first) * PANEL_TOKENS);
        }
    }
};

struct CodeBlock {
    Places here, next;                 // next is prefetched while `here` is processed
    float key_scales[BLOCK], value_scales[BLOCK];  // zeros for keys that no row of the unit sees

    void take_scales(long skip, long there) {
        for (long n = 0; n < PANELS; n++) {
            __builtin_memcpy(key_scales + n * PANEL_TOKENS, here.key_scales[n], PANEL_TOKENS * sizeof(float));
            __builtin_memcpy(value_scales + n * PANEL_TOKENS, here.value_scales[n], PANEL_TOKENS * sizeof(float));
        }
        for (long j = 0; j < skip; j++) key_scales[j] = value_scales[j] = 0.0f;
        for (long j = there; j < BLOCK; j++) key_scales[j] = value_scales[j] = 0.0f;
        for (long n = 0; n < PANELS; n++) __builtin_prefetch(next.key_scales[n], 0, 2), __builtin_prefetch(next.value_scales[n], 0, 2);
    }
};

// Keys that a row sees, of a block.
struct Sight { long begin, end; };

INLINE vi seen_from(long j, Sight sight) {
    return (lane_numbers() >= int32_t(sight.begin - j)) & (lane_numbers() < int32_t(sight.end - j));
}
template <bool SOME> INLINE vf only_seen(vf x, vf other, long j, Sight sight) {
    if constexpr (SOME) return seen_from(j, sight) ? x : other;
    else return x;
}

// The largest of a row's scores in [first, last), lane by lane. With a soft cap scores are brought to their final form first.
template <bool SOME> INLINE vf largest_lanes(const Prefill &p, float *scores, long first, long last, Sight sight, float factor) {
    const vf nothing = splat(-__builtin_inff());
    vf most = nothing;
    for (long j = first; j < last; j += W) {
        vf score = load(scores + j);
        if (p.soft_cap != 0.0f) {
            score = tanh_of(score * factor / p.soft_cap) * (p.soft_cap * LOG2_E);
            store(scores + j, score);
        }
        most = larger(only_seen<SOME>(score, nothing, j, sight), most);
    }
    return most;
}

// A row's scores become weights times scales; adds the weights into `total` and finds the largest product, lane by lane.
template <bool SOME>
INLINE void weigh(float *scores, long first, long last, Sight sight, float factor, float base, const float *value_scales,
                  vf &total, vu &most) {
    const vf by = splat(factor), less = splat(-base);
    for (long j = first; j < last; j += W) {
        const vf weight = only_seen<SOME>(exp2_of(add_product(less, load(scores + j), by)), vf{}, j, sight);
        const vf product = only_seen<SOME>(weight * load(value_scales + j), vf{}, j, sight);
        total += weight;
        most = larger_bits((vu)product, most);
        store(scores + j, product);
    }
}

// Steps of a tile between its two products: softmax and rounding. Leaves planes of weights, and per row the factor of its
// integer products and the factor for its previous values.
static NOINLINE void soften_tile(const Prefill &p, const Workspace &w, const CodeBlock &block, long row, long rows, long first, long last,
                                 const Sight *sight, float *worth, float *shrink) {
    const auto sees_all = [&](long i) { return sight[i].begin <= first && sight[i].end >= last; };
    vf lanes[W] = {};
    for (long i = 0; i < rows; i++) {
        float *scores = w.scores + i * BLOCK;
        const float factor = w.factor[row + i];
        lanes[i] = sees_all(i) ? largest_lanes<false>(p, scores, first, last, sight[i], factor)
                               : largest_lanes<true>(p, scores, first, last, sight[i], factor);
    }
    const vf factor = p.soft_cap != 0.0f ? splat(1.0f) : load(w.factor + row);
    const vf old = load(w.cut.top + row), top = larger(fold_rows(lanes, [](vf a, vf b) { return larger(a, b); }) * factor, old);
    const vf base = top == -__builtin_inff() ? vf{} : top;
    const vf shrinking = exp2_of(old - base);
    float factors[W], bases[W];
    store(factors, factor), store(bases, base);

    vu products[W] = {};
    for (long i = 0; i < rows; i++) {
        float *scores = w.scores + i * BLOCK;
        lanes[i] = vf{};
        if (sees_all(i)) weigh<false>(scores, first, last, sight[i], factors[i], bases[i], block.value_scales, lanes[i], products[i]);
        else weigh<true>(scores, first, last, sight[i], factors[i], bases[i], block.value_scales, lanes[i], products[i]);
    }
    const vf total = load(w.cut.total + row) * shrinking + fold_rows(lanes, [](vf a, vf b) { return a + b; });
    const vf most = (vf)fold_rows(products, [](vu a, vu b) { return larger_bits(a, b); });
    const vf steps = most > 0x1p-100f ? WEIGHT_STEPS / most : vf{};
    float kept[4][W], by[W];
    store(kept[0], top), store(kept[1], total), store(kept[2], most / WEIGHT_STEPS), store(kept[3], shrinking), store(by, steps);
    __builtin_memcpy(w.cut.top + row, kept[0], TILE_ROWS * sizeof(float));
    __builtin_memcpy(w.cut.total + row, kept[1], TILE_ROWS * sizeof(float));
    __builtin_memcpy(worth, kept[2], TILE_ROWS * sizeof(float));
    __builtin_memcpy(shrink, kept[3], TILE_ROWS * sizeof(float));

    const vf magic = splat(ROUNDER);
    for (long i = 0; i < rows; i++)
        for (long j = first / (4 * W) * (4 * W); j < last; j += 4 * W) {
            vi codes[4];
            for (int v = 0; v < 4; v++)
                codes[v] = (vi)add_product(magic, load(w.scores + i * BLOCK + j + v * W), splat(by[i])) - (vi)magic;
            uint8_t *planes = w.weights + i * 2 * BLOCK + j;
            split_planes(codes, planes, planes + BLOCK);
        }
}

// NR rows from `row` on over the keys [first, last) of a block, whole panels.
template <int NR>
static void pass_tile(const Prefill &p, const Workspace &w, const CodeBlock &block, long row, long first, long last, const Sight *sight) {
    const int8_t *keys[2], *next[2];
    const auto score = [&](long j, auto *count) {
        constexpr int NV = sizeof(*count);
        for (int n = 0; n < NV; n++) {
            const long at = j + n * W, inside = at % PANEL_TOKENS * 4;
            keys[n] = block.here.keys[at / PANEL_TOKENS] + inside;
            next[n] = block.next.keys[at / PANEL_TOKENS] + inside;
        }
        const int8_t *query = w.query + row * 2 * QUAD * quads_of(p);
        score_keys<NR, NV>(query, w.bias + row, quads_of(p), keys, next, block.key_scales + j, w.scores + j);
    };
    long j = first;
    for (; j + 2 * W <= last; j += 2 * W) score(j, (char(*)[2])nullptr);
    if (j < last) score(j, (char(*)[1])nullptr);
    float worth[TILE_ROWS], shrink[TILE_ROWS];
    soften_tile(p, w, block, row, NR, first, last, sight, worth, shrink);
    const int8_t *values[PANELS], *next_values[PANELS];
    const auto add = [&](long d, auto *count) {
        constexpr int NV = sizeof(*count);
        for (long n = 0; n < PANELS; n++) values[n] = block.here.values[n] + 4 * d, next_values[n] = block.next.values[n] + 4 * d;
        add_values<NR, NV>(w.weights, values, next_values, first, last, p.value_dim, worth, shrink, w.cut.acc + row * p.value_dim + d);
    };
    long d = 0;
    for (; d + 2 * W <= p.value_dim; d += 2 * W) add(d, (char(*)[2])nullptr);
    if (d < p.value_dim) add(d, (char(*)[1])nullptr);
}

// All rows of a unit over a block that begins at key `start` and of which they see [skip, there).
static NOINLINE void pass_block(const Prefill &p, const Workspace &w, const Unit &unit, const CodeBlock &block, long start, long skip,
                                long there) {
    const long group = p.group(), rows = unit.count * group;
    for (long row = 0; row < rows; row += TILE_ROWS) {
        const long high = min_of(TILE_ROWS, round_up(rows - row, STEP_ROWS));
        Sight sight[TILE_ROWS];
        long begin = BLOCK, end = 0;
        for (long i = 0; i < high; i++) {
            const long at = unit.position + min_of(row + i, rows - 1) / group - start;
            sight[i] = {max_of(skip, p.first_seen(at + start) - start), min_of(there, at + 1)};
            begin = min_of(begin, sight[i].begin), end = max_of(end, sight[i].end);
        }
        if (begin >= end) continue;
        const long first = begin / PANEL_TOKENS * PANEL_TOKENS, last = round_up(end, PANEL_TOKENS);
        if (high == TILE_ROWS) pass_tile<TILE_ROWS>(p, w, block, row, first, last, sight);
        else if (high == 2 * STEP_ROWS) pass_tile<2 * STEP_ROWS>(p, w, block, row, first, last, sight);
        else pass_tile<STEP_ROWS>(p, w, block, row, first, last, sight);
    }
}

}  // namespace prefill_codes
#endif
}  // namespace
