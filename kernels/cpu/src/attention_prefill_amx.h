// Prefill attention in bfloat16 by AMX: scores and weighted values of 16 rows and 32 keys or dims at a time.
//
// Units, packed blocks of keys and values, and the softmax are those of attention_prefill.h; tiles are read in place.

#pragma once

#include "amx.h"
#include "attention_prefill.h"

namespace {

namespace prefill_matrix {

using matrix::Tiled;
constexpr long ROWS = matrix::ROWS, STEP = matrix::STEP, OF_TILE = matrix::PAIRS_OF_TILE;
constexpr long PASS = 2 * ROWS;  // rows whose scores are held
static_assert(PASS <= MOST_PASS_ROWS && PANEL == 2 * ROWS && BLOCK_KEYS % STEP == 0);

// Whether keys fill whole steps.
INLINE bool fits(const Prefill &p) { return p.dim % STEP == 0; }

// The queries of a unit as tiles [row tile][step][row][STEP], the first of them in row `query` of q.
static NOINLINE void load_unit(const Prefill &p, const Workspace &w, const Unit &unit, long head, long query) {
    const long group = p.group(), rows = unit.count * group, steps = p.dim / STEP;
    for (long r = 0; r < round_up(rows, ROWS); r++) {
        pair *target = (pair *)w.query + r / ROWS * steps * OF_TILE + r % ROWS * ROWS;
        if (r < rows) load_query(p, unit.token + r / group, query + r / group, head * group + r % group, w.scores, 1);
        for (long s = 0; s < steps; s++, target += OF_TILE) {
            if (r < rows) store_neighbours(target, load(w.scores + s * STEP), load(w.scores + s * STEP + W));
            else __builtin_memset(target, 0, STEP * sizeof(bf16));
        }
    }
}

// Keys of the block that some row of a tile sees, in whole panels; none where begin is end.
struct Seen {
    long begin, end;
    INLINE_MEMBER bool any() const { return begin < end; }
    INLINE_MEMBER bool has(long key) const { return key >= begin && key < end; }
    INLINE_MEMBER bool operator==(const Seen &other) const { return begin == other.begin && end == other.end; }
};

// f(tile, number of tiles as a constant) for one or both of two tiles.
template <class F> INLINE void each_tile(bool first, bool second, const F &f) {
    if (first && second) return f(0, matrix::Count<2>{});
    if (first) f(0, matrix::Count<1>{});
    if (second) f(1, matrix::Count<1>{});
}

// As attention_prefill.h has it.
static NOINLINE void pass_block(const Prefill &p, const Workspace &w, const Unit &unit, long head, long start, long skip, long there,
                                const Range &range) {
    const long group = p.group(), rows = unit.count * group, steps = p.dim / STEP, depth = p.dim / 2;
    for (long r0 = 0; r0 < rows; r0 += PASS) {
        Seen seen[2] = {};
        for (long t = 0; t < 2 && r0 + t * ROWS < rows; t++) {
            const long early = unit.position + (r0 + t * ROWS) / group;
            const long late = unit.position + min_of(r0 + (t + 1) * ROWS - 1, rows - 1) / group;
            const long begin = max_of(skip, range.first_seen(early) - start), end = min_of(there, range.end_seen(late) - start);
            if (begin < end) seen[t] = {begin / PANEL * PANEL, round_up(end, PANEL)};
        }
        for (long j = 0; j < BLOCK_KEYS; j += PANEL)
            each_tile(seen[0].has(j), seen[1].has(j), [&](long t, auto tiles) {
                const pair *query = (const pair *)w.query + (r0 / ROWS + t) * steps * OF_TILE;
                matrix::multiply_tiles<decltype(tiles)::value, 2>(
                    {query, steps * OF_TILE, OF_TILE, ROWS}, {(const pair *)w.keys + j * depth, ROWS, ROWS * PANEL, PANEL}, steps,
                    {w.scores + t * ROWS * BLOCK_KEYS + j, ROWS * BLOCK_KEYS, ROWS, BLOCK_KEYS}, true);
            });
        for (long i = 0; i < PASS; i++) {
            const Seen &of = seen[i / ROWS];
            const long r = r0 + i;
            if (!of.any()) continue;
            const long at = unit.position + min_of(r, rows - 1) / group;
            const long begin = min_of(of.end, max_of(skip, range.first_seen(at) - start)), end = min_of(there, range.end_seen(at) - start);
            const float shrink = soften_row<pair>(w.scores + i * BLOCK_KEYS, of.begin, of.end, begin, end, p.soft_cap, slope_of(p, head, r),
                                                  at - start + range.gap, w.top[r], w.total + r * W);
            if (shrink == 1.0f) continue;
            float *acc = w.acc + r * w.padded_values;
            for (long d = 0; d < w.padded_values; d += W) store(acc + d, load(acc + d) * shrink);
        }
        const auto weigh = [&](long t, auto tiles) {
            const Seen &of = seen[t];
            for (long d = 0; d < w.padded_values; d += PANEL)
                matrix::multiply_tiles<decltype(tiles)::value, 2>(
                    {(const pair *)(w.scores + t * ROWS * BLOCK_KEYS) + of.begin / 2, ROWS * BLOCK_KEYS, ROWS, BLOCK_KEYS},
                    {(const pair *)w.values + (d * BLOCK_KEYS + of.begin * PANEL) / 2, ROWS, ROWS * PANEL, PANEL},
                    (of.end - of.begin) / STEP,
                    {w.acc + (r0 + t * ROWS) * w.padded_values + d, ROWS * w.padded_values, ROWS, w.padded_values}, false);
        };
        if (seen[0] == seen[1] && seen[0].any()) weigh(0, matrix::Count<2>{});
        else {
            if (seen[0].any()) weigh(0, matrix::Count<1>{});
            if (seen[1].any()) weigh(1, matrix::Count<1>{});
        }
    }
}

// Replaces `Vectors`.
struct Way {
    typedef pair number;
    static void load(const Prefill &p, const Workspace &w, const Unit &unit, long head, long query) {
        load_unit(p, w, unit, head, query);
    }
    static void pass(const Prefill &p, const Workspace &w, const Unit &unit, long head, long start, long skip, long there, const Range &range) {
        pass_block(p, w, unit, head, start, skip, there, range);
    }
};

}  // namespace prefill_matrix

}  // namespace
