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

// f(tile, number of tiles as a constant) for one or both of two tiles; both at once if they may go together.
template <class F> INLINE void each_tile(bool first, bool second, bool together, const F &f) {
    if (first && second && together) return f(0, Number<2>{});
    if (first) f(0, Number<1>{});
    if (second) f(1, Number<1>{});
}

// Replaces `Vectors`.
struct MatrixUnit {
    typedef pair number;

    // The queries of a unit as tiles [row tile][step][row][STEP], the first of them in row `query` of q.
    static NOINLINE void load(const Prefill &p, const Workspace &w, const Unit &unit, long query) {
        const long group = p.group(), rows = unit.count * group, steps = p.dim / STEP;
        for (long r = 0; r < round_up(rows, ROWS); r++) {
            pair *target = (pair *)w.query + r / ROWS * steps * OF_TILE + r % ROWS * ROWS;
            if (r < rows) load_query(p, unit.token + r / group, query + r / group, unit.head * group + r % group, w.scores, 1);
            for (long s = 0; s < steps; s++, target += OF_TILE) {
                if (r < rows) store_neighbours(target, ::load(w.scores + s * STEP), ::load(w.scores + s * STEP + W));
                else __builtin_memset(target, 0, STEP * sizeof(bf16));
            }
        }
    }

    static NOINLINE void pass(const Prefill &p, const Workspace &w, const Unit &unit, const PackedBlock &block, const Range &range) {
        const long rows = unit.count * p.group(), steps = p.dim / STEP, depth = p.dim / 2;
        for (long r0 = 0; r0 < rows; r0 += PASS) {
            Seen seen[2] = {};
            for (long t = 0; t < 2 && r0 + t * ROWS < rows; t++) seen[t] = seen_by_tile(p, unit, block, range, r0 + t * ROWS, ROWS);
            for (long j = 0; j < BLOCK_KEYS; j += PANEL)
                each_tile(seen[0].has(j), seen[1].has(j), true, [&](long t, auto tiles) {
                    const pair *query = (const pair *)w.query + (r0 / ROWS + t) * steps * OF_TILE;
                    matrix::multiply_tiles<decltype(tiles)::value, 2>(
                        {query, steps * OF_TILE, OF_TILE, ROWS}, {(const pair *)w.keys + j * depth, ROWS, ROWS * PANEL, PANEL}, steps,
                        {w.scores + t * ROWS * BLOCK_KEYS + j, ROWS * BLOCK_KEYS, ROWS, BLOCK_KEYS}, true);
                });
            for (long i = 0; i < PASS; i++) {
                const Seen &own = seen[i / ROWS];
                if (!own.any()) continue;
                const float shrink = soften_row<pair>(p, w, unit, block, range, own, r0 + i, w.scores + i * BLOCK_KEYS);
                if (shrink == 1.0f) continue;
                float *acc = w.acc + (r0 + i) * w.padded_values;
                for (long d = 0; d < w.padded_values; d += W) store(acc + d, ::load(acc + d) * shrink);
            }
            each_tile(seen[0].any(), seen[1].any(), seen[0] == seen[1], [&](long t, auto tiles) {
                const Seen &own = seen[t];
                for (long d = 0; d < w.padded_values; d += PANEL)
                    matrix::multiply_tiles<decltype(tiles)::value, 2>(
                        {(const pair *)(w.scores + t * ROWS * BLOCK_KEYS) + own.begin / 2, ROWS * BLOCK_KEYS, ROWS, BLOCK_KEYS},
                        {(const pair *)w.values + (d * BLOCK_KEYS + own.begin * PANEL) / 2, ROWS, ROWS * PANEL, PANEL},
                        (own.end - own.begin) / STEP,
                        {w.acc + (r0 + t * ROWS) * w.padded_values + d, ROWS * w.padded_values, ROWS, w.padded_values}, false);
            });
        }
    }
};

}  // namespace prefill_matrix
}  // namespace
