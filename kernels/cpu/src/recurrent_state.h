// Recurrent states: which states the tokens of a step update (read at every call), and the panels of columns in which kernels
// update state matrices.

#pragma once

#include "simd.h"
#include "work_split.h"

namespace {

// As in Backend.StateRows (kernels/backend.py).
struct StateRows {
    const int64_t *blocks;   // [count]
    const int64_t *starts;   // [count + 1]
    const int64_t *lengths;  // [count], total tokens after this step
    long count;
    const int64_t *snapshots;  // [tokens], block for a copy of the state after a token, -1: none; or NULL

    INLINE_MEMBER int64_t snapshot_after(long token) const { return snapshots ? snapshots[token] : -1; }
    INLINE_MEMBER long tokens(long s) const { return starts[s + 1] - starts[s]; }
    // Whether the state before the tokens of sequence s is zero, whatever its block holds.
    INLINE_MEMBER bool starts_from_zero(long s) const { return lengths[s] == tokens(s); }

    // Validation: 0, 2 for a block out of range, 3 if the rows do not cover all tokens.
    int error_code(long all, long num_blocks) const {
        if (starts[0] != 0 || starts[count] != all) return 3;
        for (long s = 0; s < count; s++)
            if (starts[s + 1] < starts[s]) return 3;
        for (long s = 0; s < count; s++)
            if (tokens(s) && (blocks[s] < 0 || blocks[s] >= num_blocks)) return 2;
        for (long t = 0; t < all; t++)
            if (snapshot_after(t) < -1 || snapshot_after(t) >= num_blocks) return 2;
        return 0;
    }
};

constexpr long SLICE = 64;  // tokens whose keys and gates are prepared together

// Tokens first .. end of one sequence within one slice.
struct Run {
    long first, end;
    int64_t block;
    bool starts_from_zero;
};

// The runs of tokens begin .. end. s: sequence of the last token of the previous slice, updated to that of this one.
static long find_runs(const StateRows &rows, long begin, long end, long &s, Run (&runs)[SLICE]) {
    long count = 0;
    for (; s < rows.count && rows.starts[s] < end; s++) {
        const long first = max_of(rows.starts[s], begin), last = min_of(rows.starts[s + 1], end);
        if (first < last) runs[count++] = {first, last, rows.blocks[s], first == rows.starts[s] && rows.starts_from_zero(s)};
        if (rows.starts[s + 1] > end) break;
    }
    return count;
}

// Slice after slice: prepare(token, place in the slice) for its tokens, then update(runs, their count, first token of the slice,
// unit, thread) for `of_run` units of each of its runs. prepared, work: what the two cost by token, in elements.
template <class P, class U>
INLINE void for_slices(const StateRows &rows, long tokens, long prepared, long of_run, long work, const P &prepare, const U &update) {
    long s = 0;
    for (long begin = 0; begin < tokens; begin += SLICE) {
        const long end = min_of(begin + SLICE, tokens), size = end - begin;
        for_units(size, threads_for(size * prepared, size), [&](long t) { prepare(begin + t, t); });
        Run runs[SLICE];
        const long count = find_runs(rows, begin, end, s, runs), units = count * of_run, threads = threads_for(size * work, units);
        Shares shares(units, threads);
        on_threads(threads, [&](long thread) {
            shares.take(thread, [&](long unit) { update(runs, count, begin, unit, thread); });
        });
    }
}

// n columns from here on, zeros after them.
template <class T, int V> INLINE void load_columns(const T *from, long n, vf (&to)[V]) {
    for (int v = 0; v < V; v++, n -= W) to[v] = n > 0 ? load_part(from + v * W, n) : vf{};
}
template <class T, int V> INLINE void store_columns(T *to, long n, const vf (&from)[V]) {
    for (int v = 0; v < V && n > 0; v++, n -= W) store_part(to + v * W, from[v], n);
}

// decay * m + added * key. Without `rounded` the first product would be fused with the addition in one place and not in the other.
INLINE vf decay_and_add(vf m, float decay, vf added, vf key) { return add_product(rounded(m * decay), added, key); }

INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
