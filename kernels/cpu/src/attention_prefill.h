// Attention of the queries of prompts over their paged keys, in blocks: "FlashAttention" (2205.14135).
//
// A unit of work is a run of one sequence's queries for one kv head: its rows are (token, head of the group) pairs, so
// heads that share keys share their packing. Keys are processed in blocks at absolute multiples of BLOCK_KEYS. A block's keys are
// packed transposed, its values unchanged, both as float32 in panels as wide as a register tile. Then all rows process it:
// scores, running softmax in base 2, weighted values. Panels that no row of a tile sees are skipped.
//
// Blocks begin at absolute positions and a row's sums have one order, so its bits depend neither on how the prompt was chunked
// nor on other rows. Key ranges (attention_key_ranges.h) are processed in order, each with its own rotated copy of the unit's
// queries; weighted values, maxima and sums carry over. The bits differ from those of the decode kernel, which sums in another
// order.

#pragma once

#include "attention_decode.h"
#include "attention_key_ranges.h"
#include "attention_prefill_pack.h"
#include "bf16_dot.h"
#include "simd.h"

namespace {

#if WINDLASS_REGISTERS >= 32
constexpr int TILE_ROWS = 12;  // 24 accumulators, 2 vectors of a panel, 1 broadcast
#else
constexpr int TILE_ROWS = 6;   // 12 accumulators, 2 vectors of a panel, 1 broadcast
#endif
constexpr long PASS_ROWS = 24;        // rows whose scores are held; a multiple of TILE_ROWS
constexpr long MOST_PASS_ROWS = 32;   // the largest PASS_ROWS of all product types
constexpr long WHOLE_ROWS = 96;       // a multiple of the rows of all passes
constexpr long UNIT_FLOATS = 80 << 10;  // queries and results of the rows that share the packing of a block: most of an L2
constexpr long FEWEST_ROWS = 48;      // smaller units would spend more on packing than on products
constexpr long UNITS_PER_THREAD = 4;  // about
constexpr long MIN_BF16_QUERIES = 16;   // queries of a sequence; speculative tokens (fewer) are scored in the arithmetic of decode

// Queries [token, token + count) of sequence b for one kv head, the first of them at this position in the cache.
struct Unit { long b, token, count, position, head; };

// A packed block that begins at key `start` and of which keys [skip, there) of a range are packed.
struct PackedBlock { long start, skip, there; };

// Keys of a block that some row of a tile sees, in whole panels; none where begin is end.
struct Seen {
    long begin, end;
    INLINE_MEMBER bool any() const { return begin < end; }
    INLINE_MEMBER bool has(long key) const { return key >= begin && key < end; }
    INLINE_MEMBER bool operator==(const Seen &other) const { return begin == other.begin && end == other.end; }
};

// Working memory of a thread, rows rounded up to full tiles. Queries, keys, weights and values may be bfloat16 pairs (of adjacent
// dims or keys), which take half of it.
struct Workspace {
    long rows, padded_values;
    float *query;    // [row tile][dim][TILE_ROWS], scaled
    float *acc;      // [row][padded_values]
    float *top, *shrink;  // [row]
    float *total;    // [row][W]: the sum is that of all lanes
    float *scores;   // [MOST_PASS_ROWS][BLOCK_KEYS]
    float *keys;     // [panel of keys][dim][PANEL]
    float *values;   // [panel of dims][BLOCK_KEYS][PANEL]

    static long floats(const Prefill &p, long rows) {
        const long values = round_up(p.value_dim, PANEL);
        return rows * (p.dim + values + 2 + W) + MOST_PASS_ROWS * BLOCK_KEYS + BLOCK_KEYS * (p.dim + values) + 8 * 16;
    }
    void place(const Prefill &p, long most_rows, float *memory) {
        const auto take = [&](long count) {
            float *part = memory;
            memory += round_up(count, 16);  // whole cache lines
            return part;
        };
        rows = most_rows, padded_values = round_up(p.value_dim, PANEL);
        scores = take(MOST_PASS_ROWS * BLOCK_KEYS);
        keys = take(BLOCK_KEYS * p.dim);
        values = take(BLOCK_KEYS * padded_values);
        query = take(rows * p.dim);
        acc = take(rows * padded_values);
        top = take(rows), shrink = take(rows), total = take(rows * W);
    }
};

// c[i][:] = shrink[i] * c[i][:] + sum over k of a[i][k] * b[k][:] for a tile of rows and one panel; a[i][k] is at
// a[i * row_step + k * depth_step], b[k] at b[k * PANEL]. fresh: c starts from zero. N: float, or pair.
template <bool fresh, long row_step, long depth_step, class N>
static NOINLINE void multiply_panel(const N *a, const N *b, long depth, float *c, long c_row, const float *shrink) {
    vf sums[TILE_ROWS][2];
    for (int i = 0; i < TILE_ROWS; i++) {
        if constexpr (fresh) {
            sums[i][0] = sums[i][1] = vf{};
        } else {
            sums[i][0] = load(c + i * c_row) * shrink[i];
            sums[i][1] = load(c + i * c_row + W) * shrink[i];
        }
    }
    for (long k = 0; k < depth; k++, a += depth_step, b += PANEL) {
        const auto first = load(b), second = load(b + W);
        for (int i = 0; i < TILE_ROWS; i++) {
            const auto x = splat(a[i * row_step]);
            sums[i][0] = add_product(sums[i][0], first, x);
            sums[i][1] = add_product(sums[i][1], second, x);
        }
    }
    for (int i = 0; i < TILE_ROWS; i++) store(c + i * c_row, sums[i][0]), store(c + i * c_row + W, sums[i][1]);
}

INLINE void store_weights(float *scores, long j, vf x, vf y, float *) { store(scores + j, x), store(scores + j + W, y); }
INLINE void store_weights(float *scores, long j, vf x, vf y, pair *) { store_neighbours((pair *)scores + j / 2, x, y); }
INLINE vf weight_of(vf x, float *) { return exp2_of(x); }
INLINE vf weight_of(vf x, pair *) { return rough_exp2_of(x); }  // eight bits suffice: it is rounded to bfloat16

// Keys that rows r .. r + height of a unit see.
INLINE Seen seen_by_tile(const Prefill &p, const Unit &unit, const PackedBlock &block, const Range &range, long r, long height) {
    const long early = unit.position + r / p.group();
    const long late = unit.position + min_of(r + height - 1, unit.count * p.group() - 1) / p.group();
    const long begin = max_of(block.skip, range.first_seen(early) - block.start);
    const long end = min_of(block.there, range.end_seen(late) - block.start);
    return begin < end ? Seen{begin / PANEL * PANEL, round_up(end, PANEL)} : Seen{0, 0};
}

// Replaces the scores of row r of a unit, over the keys that its tile sees, by weights 2^(score - top), pairs from pair
// seen.begin / 2 on. Updates the row's top and total (per lane) and returns the factor for its previous weighted values.
template <class N>
INLINE float soften_row(const Prefill &p, const Workspace &w, const Unit &unit, const PackedBlock &block, const Range &range, Seen seen,
                        long r, float *scores) {
    const long group = p.group(), first = seen.begin, last = seen.end;
    const long at = unit.position + min_of(r, unit.count * group - 1) / group;
    // A row that no longer sees the range, while other rows of its tile do, begins at the end of the tile.
    const long begin = min_of(last, max_of(block.skip, range.first_seen(at) - block.start));
    const long end = min_of(block.there, range.end_seen(at) - block.start);
    const float slope = p.slopes ? p.slopes[unit.head * group + r % group] : 0.0f, soft_cap = p.soft_cap;
    const long distance = at - block.start + range.gap;  // of key 0 of the block
    float &top = w.top[r], *total = w.total + r * W;
    const vf nothing = splat(-__builtin_inff());
    if (soft_cap != 0.0f)
        for (long j = first; j < last; j += W) store(scores + j, tanh_of(load(scores + j) / soft_cap) * (soft_cap * LOG2_E));
    if (slope != 0.0f)
        for (long j = first; j < last; j += W)
            store(scores + j, load(scores + j) + bias_of(slope, distance - j));
    for (long j = first; j < begin; j++) scores[j] = -__builtin_inff();
    for (long j = max_of(first, end); j < last; j++) scores[j] = -__builtin_inff();
    vf most[2] = {nothing, nothing};
    for (long j = first; j < last; j += 2 * W) {
        most[0] = larger(load(scores + j), most[0]);
        most[1] = larger(load(scores + j + W), most[1]);
    }
    const float old = top;
    if (any_above(larger(most[0], most[1]), old)) {  // rare after the first blocks of a row
        const float here = largest(larger(most[0], most[1]));
        top = here > old ? here : old;
    }
    const float base = top == -__builtin_inff() ? 0.0f : top;
    vf sums[2] = {};
    for (long j = first; j < last; j += 2 * W) {
        const vf x = weight_of(load(scores + j) - base, (N *)nullptr), y = weight_of(load(scores + j + W) - base, (N *)nullptr);
        store_weights(scores, j, x, y, (N *)nullptr);
        sums[0] += x, sums[1] += y;
    }
    const float shrink = top == old ? 1.0f : exp2_of(splat(old - base))[0];
    store(total, load(total) * shrink + (sums[0] + sums[1]));
    return shrink;
}

// The query of a token and head from row `row` of q, scaled (for scores in base 2, unless there is a soft cap); element d is
// stored at x[d * step].
INLINE void load_query(const Prefill &p, long token, long row, long head, float *x, long step) {
    const float scale = (p.soft_cap != 0.0f ? p.scale : p.scale * LOG2_E) * p.score_scale[token];
    with_type(p.q_type, [&](auto *type) {
        const auto *q = (decltype(type))p.q + row * p.q_row + head * p.q_head;
        for (long d = 0; d < p.dim; d++) x[d * step] = widen(q[d]) * scale;
    });
}

// Reset to no keys seen.
static NOINLINE void clear_unit(const Prefill &p, const Workspace &w, const Unit &unit) {
    const long padded = round_up(unit.count * p.group(), MOST_PASS_ROWS);
    for (long r = 0; r < padded; r++) w.top[r] = -__builtin_inff(), store(w.total + r * W, vf{});
    for (long i = 0; i < padded * w.padded_values; i += W) store(w.acc + i, vf{});
}

// Results of a unit's rows from their weighted values acc[row * acc_row], largest scores and sums of weights.
static void finish_unit(const Prefill &p, const Unit &unit, const float *acc, long acc_row, const float *tops,
                        const float *totals) {
    const long group = p.group();
    for (long r = 0; r < unit.count * group; r++, acc += acc_row) {
        const long h = unit.head * group + r % group, at = ((unit.token + r / group) * p.heads + h) * p.value_dim;
        float total = totals[r], shrink = 1.0f;
        if (p.sinks) {
            const float sink = p.sinks[h] * LOG2_E, top = sink > tops[r] ? sink : tops[r];
            shrink = exp2_of(splat(tops[r] - top))[0];
            total = total * shrink + exp2_of(splat(sink - top))[0];
        }
        with_type(p.q_type, [&](auto *type) {
            auto *target = (decltype(type))p.out + at;
            for (long d = 0; d < p.value_dim; d += W) store_part(target + d, load(acc + d) * shrink / total, p.value_dim - d);
        });
    }
}

// Products of a unit in vectors of N. Alternatives (attention_prefill_amx.h) use the same packing of keys and values.
template <class N> struct Vectors {
    typedef N number;
    static constexpr long STEP = NUMBERS<N>;

    // The queries of a unit, from row `query` of q on.
    static NOINLINE void load(const Prefill &p, const Workspace &w, const Unit &unit, long query) {
        const long group = p.group(), rows = unit.count * group, padded = round_up(rows, TILE_ROWS), depth = ceil_div(p.dim, STEP);
        for (long r = 0; r < padded; r++) {
            N *target = (N *)w.query + r / TILE_ROWS * TILE_ROWS * depth + r % TILE_ROWS;
            const auto load_to = [&](float *x, long step) {
                load_query(p, unit.token + r / group, query + r / group, unit.head * group + r % group, x, step);
            };
            if (r >= rows) {
                for (long d = 0; d < depth; d++) target[d * TILE_ROWS] = N{};
            } else if constexpr (STEP == 1) {
                load_to(target, TILE_ROWS);
            } else {
                load_to(w.scores, 1);
                w.scores[p.dim] = 0.0f;
                for (long d = 0; d < depth; d++) target[d * TILE_ROWS] = paired(w.scores[2 * d], w.scores[2 * d + 1]);
            }
        }
    }

    // All rows of a unit over a packed block.
    static NOINLINE void pass(const Prefill &p, const Workspace &w, const Unit &unit, const PackedBlock &block, const Range &range) {
        const long rows = unit.count * p.group(), depth = ceil_div(p.dim, STEP);
        for (long r0 = 0; r0 < rows; r0 += PASS_ROWS) {
            const long tiles = ceil_div(min_of(PASS_ROWS, rows - r0), TILE_ROWS);
            Seen seen[PASS_ROWS / TILE_ROWS];
            long lowest = BLOCK_KEYS, highest = 0;
            for (long t = 0; t < tiles; t++) {
                seen[t] = seen_by_tile(p, unit, block, range, r0 + t * TILE_ROWS, TILE_ROWS);
                if (seen[t].any()) lowest = min_of(lowest, seen[t].begin), highest = max_of(highest, seen[t].end);
            }
            for (long j = lowest; j < highest; j += PANEL)
                for (long t = 0; t < tiles; t++)
                    if (seen[t].has(j))
                        multiply_panel<true, 1, TILE_ROWS>((const N *)w.query + (r0 + t * TILE_ROWS) * depth,
                                                           (const N *)w.keys + j * depth, depth,
                                                           w.scores + t * TILE_ROWS * BLOCK_KEYS + j, BLOCK_KEYS, nullptr);
            for (long i = 0; i < tiles * TILE_ROWS; i++) {
                const Seen &own = seen[i / TILE_ROWS];
                const long r = r0 + i;
                if (own.any()) w.shrink[r] = soften_row<N>(p, w, unit, block, range, own, r, w.scores + i * BLOCK_KEYS);
            }
            for (long d = 0; d < w.padded_values; d += PANEL)
                for (long t = 0; t < tiles; t++) {
                    const long r = r0 + t * TILE_ROWS, first = seen[t].begin, last = seen[t].end;
                    if (first == last) continue;
                    multiply_panel<false, BLOCK_KEYS, 1>((const N *)(w.scores + t * TILE_ROWS * BLOCK_KEYS) + first / STEP,
                                                         (const N *)w.values + (d * BLOCK_KEYS + first * PANEL) / STEP,
                                                         (last - first) / STEP, w.acc + r * w.padded_values + d, w.padded_values,
                                                         w.shrink + r);
                }
        }
    }
};

// A unit over one range, continuing from the accumulated state. WAY: Vectors or an alternative.
template <class WAY, class T> static void pass_range(const Prefill &p, const Workspace &w, const Unit &unit, const Range &range) {
    const int32_t *table = p.tables + unit.b * p.table_row;
    const long first_key = range.first_seen(unit.position), end_key = range.end_seen(unit.position + unit.count - 1);
    if (first_key >= end_key) return;
    typedef typename WAY::number N;
    WAY::load(p, w, unit, range.query + unit.token - p.query_start[unit.b]);
    for (long start = first_key / BLOCK_KEYS * BLOCK_KEYS; start < end_key; start += BLOCK_KEYS) {
        const PackedBlock packed = {start, max_of(0, first_key - start), min_of(BLOCK_KEYS, end_key - start)};
        Block<T> block;
        block.find(p, table, unit.head, start, packed.skip, packed.there);
        pack_keys(block, packed.skip, packed.there, p.dim, (N *)w.keys);
        pack_values(block, packed.skip, packed.there, p.value_dim, (N *)w.values);
        WAY::pass(p, w, unit, packed, range);
    }
}

template <class WAY, class T> static void run_unit(const Prefill &p, const Workspace &w, const Unit &unit) {
    clear_unit(p, w, unit);
    for_each_range(p, unit.b, p.query_start[unit.b], [&](const Range &range) { pass_range<WAY, T>(p, w, unit, range); });
    for (long r = 0; r < unit.count * p.group(); r++) w.total[r] = sum(load(w.total + r * W));
    finish_unit(p, unit, w.acc, w.padded_values, w.top, w.total);
}

}  // namespace
