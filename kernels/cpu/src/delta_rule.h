// The gated delta rule (2412.06464): a matrix per head that each token lets fade, corrects and reads, in float32.
//
// Columns of such a matrix M have nothing to do with each other, given a token's query q, key k and gates g and b. So a unit of work
// is a panel of columns that stays in the first cache over many tokens; and one pass over it is enough for a token: it makes
// M = g' M + k' d', what the token before has left to do, on its way, and sums M^T k and M^T q of what it made. Then
// d = b (v - g M^T k), and the token reads (g M + k d^T)^T q = g M^T q + (k q) d.
// Every number takes the same steps however a sequence is cut, so its bits are the same.

#pragma once

#include <cstdint>
#include <cstdlib>

#include <cmath>

#include "names.h"
#include "simd.h"
#include "state_rows.h"
#include "tiles.h"

namespace {
namespace delta_rule {

constexpr int NV = W >= 8 ? 2 : 4;  // vectors of a panel: two sums for each and what the last token left fit into the registers
constexpr long PANEL = NV * W;      // columns
constexpr long SLICE = 64;          // tokens whose keys and gates lie ready at once
constexpr long ROWS_AHEAD = 8;      // that are fetched before they are read
constexpr float LENGTH_EPS = 1e-6f;

struct Sizes {
    long heads, key_heads, key_dim, value_dim;
    INLINE_MEMBER long panels() const { return ceil_div(value_dim, PANEL); }
};

// What the tokens of a slice bring, but for their values.
struct Slice {
    float *keys, *queries;  // [SLICE][key_heads][key_dim], of length 1, queries times key_dim^-1/2
    float *meets;           // [SLICE][key_heads], the key times the query
    float *kept, *share;    // [SLICE][heads], g and b
};

// Tokens first .. end of the slice, of one sequence.
struct Run {
    long first, end;
    int64_t block;
    bool begins;
};

// What a token still has to do to the memory.
struct Change {
    float kept;
    const float *key;
    vf delta[NV];
};

template <class T> INLINE void load_columns(const T *from, long n, vf (&to)[NV]) {
    for (int v = 0; v < NV; v++, n -= W) to[v] = n >= W ? load(from + v * W) : n > 0 ? load_some(from + v * W, n) : vf{};
}
template <class T> INLINE void store_columns(T *to, long n, const vf (&from)[NV]) {
    for (int v = 0; v < NV; v++, n -= W) {
        if (n >= W) store(to + v * W, from[v]);
        else if (n > 0) store_some(to + v * W, from[v], n);
    }
}

INLINE vf changed(vf m, const Change &change, long i, int v) {
    vu faded = (vu)(m * change.kept);
    hide(faded);  // or it joins the addition in one place and not in the other
    return add_product((vf)faded, change.delta[v], splat(change.key[i]));
}

struct Sums {
    vf of_key[NV] = {}, of_query[NV] = {};
    INLINE_MEMBER void add(const vf (&m)[NV], float key, float query) {
        for (int v = 0; v < NV; v++) {
            of_key[v] = add_product(of_key[v], m[v], splat(key));
            of_query[v] = add_product(of_query[v], m[v], splat(query));
        }
    }
};

// Takes n columns of a memory [dim] with rows `row` apart into the panel. Its first panel fetches whole rows, as memory likes it.
static NOINLINE Sums enter(const float *memory, long row, long n, bool whole_rows, const float *key, const float *query, long dim,
                           float *panel) {
    Sums sums;
    for (long i = 0; i < dim; i++, memory += row, panel += PANEL) {
        if (whole_rows && i + ROWS_AHEAD < dim)
            for (long j = 0; j < row; j += 16) __builtin_prefetch(memory + ROWS_AHEAD * row + j, 1);
        vf m[NV];
        load_columns(memory, n, m);
        store_columns(panel, PANEL, m);
        sums.add(m, key[i], query[i]);
    }
    return sums;
}

static NOINLINE Sums pass(float *panel, const Change &change, const float *key, const float *query, long dim) {
    Sums sums;
    for (long i = 0; i < dim; i++, panel += PANEL) {
        vf m[NV];
        for (int v = 0; v < NV; v++) {
            m[v] = changed(load(panel + v * W), change, i, v);
            store(panel + v * W, m[v]);
        }
        sums.add(m, key[i], query[i]);
    }
    return sums;
}

static NOINLINE void leave(const float *panel, const Change &change, long dim, float *memory, long row, long n) {
    for (long i = 0; i < dim; i++, memory += row, panel += PANEL) {
        vf m[NV];
        for (int v = 0; v < NV; v++) m[v] = changed(load(panel + v * W), change, i, v);
        store_columns(memory, n, m);
    }
}

// One panel of a head over a run. values, out: of the slice's first token, at the panel; rows of them so far apart.
template <class T>
static NOINLINE void walk(const Slice &slice, const Sizes &sizes, const Run &run, long head, bool first_panel, long n, float *memory,
                          const T *values, long value_row, T *out, float *panel) {
    const long dim = sizes.key_dim, out_row = sizes.heads * sizes.value_dim;
    const long key_head = head / (sizes.heads / sizes.key_heads);
    Change change;
    for (long t = run.first; t < run.end; t++) {
        const long at = t * sizes.key_heads + key_head;
        const float *key = slice.keys + at * dim, *query = slice.queries + at * dim;
        Sums sums;
        if (t > run.first) sums = pass(panel, change, key, query, dim);
        else if (!run.begins) sums = enter(memory, sizes.value_dim, n, first_panel, key, query, dim, panel);
        else
            for (long i = 0; i < dim * PANEL; i += W) store(panel + i, vf{});
        const float kept = slice.kept[t * sizes.heads + head], share = slice.share[t * sizes.heads + head];
        vf value[NV], read[NV];
        load_columns(values + t * value_row, n, value);
        change.kept = kept, change.key = key;
        for (int v = 0; v < NV; v++) {
            change.delta[v] = add_product(value[v], sums.of_key[v], splat(-kept)) * share;
            read[v] = add_product(sums.of_query[v] * kept, change.delta[v], splat(slice.meets[at]));
        }
        store_columns(out + t * out_row, n, read);
    }
    leave(panel, change, dim, memory, sizes.value_dim, n);
}

// to = from times `scale`, of length 1 before it.
template <class T> INLINE void unit(const T *from, long dim, float scale, float *to) {
    vf squares = {};
    long i = 0;
    for (; i + W <= dim; i += W) squares = add_product(squares, load(from + i), load(from + i));
    float total = sum(squares);
    for (; i < dim; i++) total += widen(from[i]) * widen(from[i]);
    const float by = 1.0f / __builtin_sqrtf(total + LENGTH_EPS);
    for (i = 0; i + W <= dim; i += W) store(to + i, load(from + i) * by * scale);
    for (; i < dim; i++) to[i] = widen(from[i]) * by * scale;
}

INLINE float product(const float *a, const float *b, long dim) {
    vf sums = {};
    long i = 0;
    for (; i + W <= dim; i += W) sums = add_product(sums, load(a + i), load(b + i));
    float total = sum(sums);
    for (; i < dim; i++) total += a[i] * b[i];
    return total;
}

INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// What token t of a slice brings; qkv: its row.
template <class T> static NOINLINE void prepare(const Slice &slice, const Sizes &sizes, long t, const T *qkv) {
    const long dim = sizes.key_dim;
    const float scale = 1.0f / __builtin_sqrtf(float(dim));
    for (long h = 0; h < sizes.key_heads; h++) {
        const long at = t * sizes.key_heads + h;
        float *query = slice.queries + at * dim, *key = slice.keys + at * dim;
        unit(qkv + h * dim, dim, scale, query);
        unit(qkv + (sizes.key_heads + h) * dim, dim, 1.0f, key);
        slice.meets[at] = product(key, query, dim);
    }
}

// qkv: [T][2 key_heads key_dim + heads value_dim], decay, strength: [T][heads], all of the type, rows so far apart. rate, bias:
// [heads]. memory: [num_blocks][heads][key_dim][value_dim], changed in place. out: [T][heads value_dim] of the type. Returns 1 when
// out of memory or a code of StateRows::refusal; it has written nothing then.
EXPORT int WINDLASS_NAME(gated_delta_rule)(const void *qkv, long qkv_row, int type, const void *decay, long decay_row,
                                           const void *strength, long strength_row, const float *rate, const float *bias,
                                           float *memory, long num_blocks, long key_heads, long heads, long key_dim,
                                           long value_dim, const int64_t *blocks, const int64_t *starts, const int64_t *lengths,
                                           long sequences, void *out, long tokens) {
    const StateRows rows = {blocks, starts, lengths, sequences};
    if (const int code = rows.refusal(tokens, num_blocks)) return code;
    if (!tokens) return 0;
    const Sizes sizes = {heads, key_heads, key_dim, value_dim};
    const long panels = sizes.panels(), most = min_of(SLICE, tokens), threads = most_threads();
    const long own = key_dim * PANEL;  // numbers of a thread's panel, whole lines
    const long count = threads * own + most * (key_heads * (2 * key_dim + 1) + 2 * heads);
    void *memory_of_all;
    if (posix_memalign(&memory_of_all, 64, count * sizeof(float))) return 1;
    float *const space = (float *)memory_of_all;
    Slice slice;
    slice.keys = space + threads * own;
    slice.queries = slice.keys + most * key_heads * key_dim;
    slice.meets = slice.queries + most * key_heads * key_dim;
    slice.kept = slice.meets + most * key_heads;
    slice.share = slice.kept + most * heads;
    with_type(type, [&](auto *element) {
        typedef __typeof__(*element) T;
        long s = 0;  // the sequence of the slice's first token
        for (long begin = 0; begin < tokens; begin += SLICE) {
            const long size = min_of(SLICE, tokens - begin);
            for_units(size, threads_for(size * key_heads * key_dim, size), [&](long t) {
                prepare(slice, sizes, t, (const T *)qkv + (begin + t) * qkv_row);
                for (long h = 0; h < heads; h++) {
                    const float fades = rate[h] * softplus(::element(decay, type, (begin + t) * decay_row + h) + bias[h]);
                    slice.kept[t * heads + h] = std::exp(-fades);
                    slice.share[t * heads + h] =
                        1.0f / (1.0f + std::exp(-::element(strength, type, (begin + t) * strength_row + h)));
                }
            });
            Run runs[SLICE];
            long num_runs = 0;
            while (rows.starts[s + 1] <= begin) s++;
            for (long next = s; next < sequences && rows.starts[next] < begin + size; next++) {
                const long first = max_of(rows.starts[next], begin), end = min_of(rows.starts[next + 1], begin + size);
                if (first == end) continue;
                runs[num_runs++] = {first - begin, end - begin, rows.blocks[next], first == rows.starts[next] && rows.begins(next)};
            }
            const long units = num_runs * heads * panels;
            const long together = threads_for(size * heads * key_dim * value_dim, units);
            Shares shares(units, together);
            on_threads(together, [&](long thread) {
                shares.take(thread, [&](long unit) {
                    const Run &run = runs[unit / (heads * panels)];
                    const long head = unit / panels % heads, column = unit % panels * PANEL;
                    float *own_memory = memory + (run.block * heads + head) * key_dim * value_dim + column;
                    const auto *values = (const T *)qkv + begin * qkv_row + 2 * key_heads * key_dim + head * value_dim + column;
                    walk(slice, sizes, run, head, column == 0, min_of(PANEL, value_dim - column), own_memory, values, qkv_row,
                         (T *)out + (begin * heads + head) * value_dim + column, space + thread * own);
                });
            });
        }
    });
    free(space);
    return 0;
}

}  // namespace delta_rule
}  // namespace
