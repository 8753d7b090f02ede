// State space layers whose matrices decay by one number per head (Mamba 2, 2405.21060), in float32.
//
// Columns of such a matrix M are independent. A unit of work is some columns of a head over a run of tokens. A pass over a panel of
// them computes M = g M + k (d v)^T for a token and sums M^T q. Over many tokens a panel stays in L1. The pass of a single token reads
// and writes the memory itself and is bound by that: its panel is as wide as possible, since memory is prefetched in one direction.
// Every number is computed by the same operations however a sequence is chunked, so its bits are the same.

#pragma once

#include "recordable.h"
#include "recurrent_state.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace state_space {

constexpr long COLUMNS = 64;  // of a unit
// Vectors of a panel: for a single token, whose sums take at most half the registers, and for several, which find it in L1.
constexpr int WIDE = min_of(COLUMNS / W, WINDLASS_REGISTERS / 2), NARROW = min_of(COLUMNS / 2 / W, WINDLASS_REGISTERS / 4);
constexpr long PANEL = WIDE * W;  // columns

// Arguments of state_space.
template <class T> struct Operands {
    const T *mixed; long mixed_row;
    const T *step; long step_row;
    const float *rate, *bias, *skip;
    float *memory;
    T *out;
    StateRows rows;
    long key_heads, heads, key_dim, value_dim;
    float least, most;
    INLINE_MEMBER const T *values(long token) const { return mixed + token * mixed_row; }
    INLINE_MEMBER const T *keys(long token) const { return mixed + token * mixed_row + heads * value_dim; }
    INLINE_MEMBER float *of_head(int64_t block, long head) const { return memory + (block * heads + head) * key_dim * value_dim; }
};

// Derived inputs of the tokens of a slice, except values.
struct Slice {
    float *keys;         // [SLICE][2 key_heads][key_dim], the keys, then the queries
    float *decay, *step;  // [SLICE][heads], g and d
};

// A matrix or a panel of it, with its row stride.
template <class F> struct Matrix {
    F *at;
    long row;
};

// Rows of V vectors by one token. added: for each unit of its key. read: the sums.
template <int V>
static NOINLINE void pass(Matrix<const float> from, Matrix<float> to, long rows, float decay, const float *key, const float *query,
                          const vf *added, vf *read) {
    vf own[V], sums[V] = {};  // local copies, or they would be reloaded after each store
    for (int v = 0; v < V; v++) own[v] = added[v];
    for (long i = 0; i < rows; i++, from.at += from.row, to.at += to.row) {
        const vf of_key = splat(key[i]), of_query = splat(query[i]);
        for (int v = 0; v < V; v++) {
            const vf m = decay_and_add(load(from.at + v * W), decay, own[v], of_key);
            store(to.at + v * W, m);
            sums[v] = add_product(sums[v], m, of_query);
        }
    }
    for (int v = 0; v < V; v++) read[v] = sums[v];
}

static NOINLINE void copy(Matrix<const float> from, Matrix<float> to, long rows, long n) {
    for (; rows; rows--, from.at += from.row, to.at += to.row)
        for (long j = 0; j < n; j++) to.at[j] = from.at[j];
}

// Columns first .. first + n of a head over a run. slice: of tokens `begin` on. panel: [key_dim][PANEL].
template <class T> struct HeadColumns {
    const Operands<T> &p;
    const Slice &slice;
    const Run &run;
    long begin, head, first, n;
    float *panel;

    // Columns c .. c + V W, or fewer at the end of the head.
    template <int V> INLINE_MEMBER void panel_of(long c) const {
        alignas(64) static const float zeros[V * W] = {};
        const long columns = min_of(V * W, n - c), of_head = head * p.value_dim + first + c;
        const bool whole = columns == V * W;
        const Matrix<float> memory = {p.of_head(run.block, head) + first + c, p.value_dim}, own = {panel, V * W};
        Matrix<const float> from = {memory.at, memory.row};
        if (run.starts_from_zero) from = {zeros, 0};
        else if (!whole) {
            copy(from, own, p.key_dim, columns);
            from = {panel, V * W};
        }
        for (long t = run.first; t < run.end; t++) {
            const long place = t - begin, at = place * p.heads + head;
            const float *key = slice.keys + (2 * place * p.key_heads + head / (p.heads / p.key_heads)) * p.key_dim;
            vf value[V], added[V], read[V];
            load_columns(p.values(t) + of_head, columns, value);
            for (int v = 0; v < V; v++) added[v] = value[v] * slice.step[at];
            const Matrix<float> to = whole && t + 1 == run.end ? memory : own;
            pass<V>(from, to, p.key_dim, slice.decay[at], key, key + p.key_heads * p.key_dim, added, read);
            if (const int64_t block = p.rows.snapshot_after(t); block >= 0)
                copy({to.at, to.row}, {p.of_head(block, head) + first + c, p.value_dim}, p.key_dim, columns);
            for (int v = 0; v < V; v++) read[v] = add_product(read[v], value[v], splat(p.skip[head]));
            store_columns(p.out + t * p.heads * p.value_dim + of_head, columns, read);
            from = {panel, V * W};
        }
        if (!whole) copy({panel, V * W}, memory, p.key_dim, columns);
    }

    // In panels of at most V vectors.
    template <int V> INLINE_MEMBER void from_column(long c) const {
        for (; n - c >= V * W; c += V * W) panel_of<V>(c);
        if constexpr (V > 1) from_column<V / 2>(c);
        else if (c < n) panel_of<1>(c);
    }
};

template <class T> static NOINLINE void walk(const HeadColumns<T> &own) {
    if (own.run.end - own.run.first == 1) own.template from_column<WIDE>(0);
    else own.template from_column<NARROW>(0);
}

// Derived inputs of one token, stored in the slice.
template <class T> static NOINLINE void prepare(const Operands<T> &p, const Slice &slice, long token, long place) {
    const long count = 2 * p.key_heads * p.key_dim;
    float *to = slice.keys + place * count;
    const T *from = p.keys(token);
    copy_converted(from, to, count);
    for (long h = 0; h < p.heads; h++) {
        const float d = softplus(widen(p.step[token * p.step_row + h]) + p.bias[h]);
        const float step = d < p.least ? p.least : d > p.most ? p.most : d;  // NaN stays
        slice.step[place * p.heads + h] = step;
        slice.decay[place * p.heads + h] = std::exp(-p.rate[h] * step);
    }
}

template <class T> static void all_tokens(const Operands<T> &p, const Slice &slice, long tokens, float *panels_of_threads) {
    const long parts = ceil_div(p.value_dim, COLUMNS), of_run = p.heads * parts;
    for_slices(
        p.rows, tokens, p.heads + 2 * p.key_heads * p.key_dim, of_run, p.heads * p.key_dim * p.value_dim,
        [&](long token, long place) { prepare(p, slice, token, place); },
        [&](const Run *runs, long, long begin, long unit, long thread) {
            const long first = unit % parts * COLUMNS, n = min_of(COLUMNS, p.value_dim - first);
            float *const panel = panels_of_threads + thread * p.key_dim * PANEL;
            walk(HeadColumns<T>{p, slice, runs[unit / of_run], begin, unit / parts % p.heads, first, n, panel});
        });
}

// mixed: [T][heads value_dim + 2 key_heads key_dim], step: [T][heads], both of the type, rows so far apart. rate, bias, skip:
// [heads]. memory: [num_blocks][heads][key_dim][value_dim], changed in place. snapshots: see StateRows. least, most: limits of the
// steps. out: [T][heads value_dim] of the type. Returns 1 when out of memory or a code of StateRows::error_code; it has written
// nothing then.
EXPORT int WINDLASS_NAME(state_space)(const void *mixed, long mixed_row, int type, const void *step, long step_row, const float *rate,
                                      const float *bias, const float *skip, float *memory, long num_blocks, long key_heads,
                                      long heads, long key_dim, long value_dim, float least, float most, const int64_t *blocks,
                                      const int64_t *starts, const int64_t *lengths, long sequences, const int64_t *snapshots, void *out,
                                      long tokens) {
    const StateRows rows = {blocks, starts, lengths, sequences, snapshots};
    if (const int code = rows.error_code(tokens, num_blocks)) return code;
    const long at_once = min_of(SLICE, tokens), keys = at_once * 2 * key_heads * key_dim, gates = at_once * heads;
    const long panels = most_threads() * key_dim * PANEL;  // each of whole lines
    void *space;
    if (posix_memalign(&space, 64, (panels + keys + 2 * gates) * sizeof(float))) return 1;
    Slice slice;
    slice.keys = (float *)space + panels;
    slice.decay = slice.keys + keys;
    slice.step = slice.decay + gates;
    with_type(type, [&](auto *element) {
        typedef __typeof__(*element) T;
        const Operands<T> p = {(const T *)mixed, mixed_row, (const T *)step, step_row, rate, bias, skip, memory, (T *)out, rows,
                               key_heads, heads, key_dim, value_dim, least, most};
        all_tokens(p, slice, tokens, (float *)space);
    });
    free(space);
    return 0;
}
RECORDABLE(state_space)

}  // namespace state_space
}  // namespace
