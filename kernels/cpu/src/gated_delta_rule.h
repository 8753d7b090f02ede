// The gated delta rule (2412.06464): a matrix per head that each token lets fade, corrects and reads, in float32.
//
// Columns of such a matrix M are independent, given a token's query q, key k and gates g and b. So a unit of work is a panel of
// columns that stays in L1 over many tokens, with one pass per token. The pass first applies the pending update of the previous
// token, M = g' M + k' d', and sums M^T k and M^T q of the result. Then d = b (v - g M^T k), and the token reads
// (g M + k d^T)^T q = g M^T q + (k q) d.
// Every number is computed by the same operations however a sequence is chunked, so its bits are the same.

#pragma once

#include "recordable.h"
#include "recurrent_state.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace delta_rule {

constexpr int NV = W >= 8 ? 2 : 4;  // vectors of a panel: two sums for each and what the last token left fit into the registers
constexpr long PANEL = NV * W;      // columns
constexpr long LINE = 16;           // numbers
constexpr float LENGTH_EPS = 1e-6f;

// Arguments of gated_delta_rule.
template <class T> struct Operands {
    const T *qkv; long qkv_row;
    const T *decay; long decay_row;
    const T *strength; long strength_row;
    const float *rate, *bias;
    float *memory;
    T *out;
    StateRows rows;
    long key_heads, heads, key_dim, value_dim;
    bool tiled_heads;
    INLINE_MEMBER const T *keys(long token) const { return qkv + token * qkv_row + key_heads * key_dim; }
    INLINE_MEMBER const T *values(long token) const { return qkv + token * qkv_row + 2 * key_heads * key_dim; }
    INLINE_MEMBER float *of_head(int64_t block, long head) const { return memory + (block * heads + head) * key_dim * value_dim; }
};

// Derived inputs of the tokens of a slice, except values.
struct Slice {
    float *keys, *queries;  // [SLICE][key_heads][key_dim], of length 1, queries times key_dim^-1/2
    float *key_by_query;     // [SLICE][key_heads], the key times the query
    float *decay, *share;    // [SLICE][heads], g and b
};

// The pending update of a token.
struct Change {
    float decay;
    const float *key;
    vf delta[NV];
};

struct Sums {
    vf of_key[NV] = {}, of_query[NV] = {};
    INLINE_MEMBER void add(const vf (&m)[NV], float key, float query) {
        for (int v = 0; v < NV; v++) {
            of_key[v] = add_product(of_key[v], m[v], splat(key));
            of_query[v] = add_product(of_query[v], m[v], splat(query));
        }
    }
};

// Loads n columns of a memory [dim], row stride `row`, into the panel and prefetches as many numbers of the next one.
static NOINLINE Sums enter(const float *memory, long row, long n, const float *next, const float *key, const float *query,
                           long dim, float *panel) {
    Sums sums;
    for (long i = 0; i < dim; i++, memory += row, panel += PANEL, next += PANEL) {
        for (long j = 0; j < PANEL; j += LINE) __builtin_prefetch(next + j, 1, 2);
        vf m[NV];
        load_columns(memory, n, m);
        store_columns(panel, PANEL, m);
        sums.add(m, key[i], query[i]);
    }
    return sums;
}

static NOINLINE Sums pass(float *panel, const Change &last, const float *key, const float *query, long dim) {
    const Change change = last;  // a local copy, or it would be reloaded after each store
    Sums sums;
    for (long i = 0; i < dim; i++, panel += PANEL) {
        vf m[NV];
        for (int v = 0; v < NV; v++) {
            m[v] = decay_and_add(load(panel + v * W), change.decay, change.delta[v], splat(change.key[i]));
            store(panel + v * W, m[v]);
        }
        sums.add(m, key[i], query[i]);
    }
    return sums;
}

static NOINLINE void leave(const float *panel, const Change &last, long dim, float *memory, long row, long n) {
    const Change change = last;
    for (long i = 0; i < dim; i++, memory += row, panel += PANEL) {
        vf m[NV];
        for (int v = 0; v < NV; v++) m[v] = decay_and_add(load(panel + v * W), change.decay, change.delta[v], splat(change.key[i]));
        store_columns(memory, n, m);
    }
}

// The panel of a head from this column on, over a run. slice: of tokens from `begin` on. next: what the thread processes next.
template <class T>
static NOINLINE void walk(const Operands<T> &p, const Slice &slice, long begin, const Run &run, long head, long column,
                          const float *next, float *panel) {
    const long dim = p.key_dim, n = min_of(PANEL, p.value_dim - column);
    const long key_head = p.tiled_heads ? head % p.key_heads : head / (p.heads / p.key_heads);
    float *const memory = p.of_head(run.block, head) + column;
    Change change;
    for (long t = run.first; t < run.end; t++) {
        const long own = (t - begin) * p.heads + head, at = (t - begin) * p.key_heads + key_head;
        const float *key = slice.keys + at * dim, *query = slice.queries + at * dim;
        Sums sums;
        if (t > run.first) sums = pass(panel, change, key, query, dim);
        else if (!run.starts_from_zero) sums = enter(memory, p.value_dim, n, next + column * dim, key, query, dim, panel);
        else
            for (long i = 0; i < dim * PANEL; i += W) store(panel + i, vf{});
        vf value[NV], read[NV];
        load_columns(p.values(t) + head * p.value_dim + column, n, value);
        change.decay = slice.decay[own], change.key = key;
        for (int v = 0; v < NV; v++) {
            change.delta[v] = add_product(value[v], sums.of_key[v], splat(-change.decay)) * slice.share[own];
            read[v] = add_product(sums.of_query[v] * change.decay, change.delta[v], splat(slice.key_by_query[at]));
        }
        store_columns(p.out + (t * p.heads + head) * p.value_dim + column, n, read);
        if (const int64_t block = p.rows.snapshot_after(t); block >= 0)
            leave(panel, change, dim, p.of_head(block, head) + column, p.value_dim, n);
    }
    leave(panel, change, dim, memory, p.value_dim, n);
}

// to = from times `scale`, of length 1 before it.
template <class T> INLINE void unit(const T *from, long dim, float scale, float *to) {
    const float by = 1.0f / __builtin_sqrtf(dot(from, from, dim) + LENGTH_EPS);
    long i = 0;
    for (; i + W <= dim; i += W) store(to + i, load(from + i) * by * scale);
    for (; i < dim; i++) to[i] = widen(from[i]) * by * scale;
}

// Derived inputs of one token, stored in the slice.
template <class T> static NOINLINE void prepare(const Operands<T> &p, const Slice &slice, long token, long place) {
    const long dim = p.key_dim;
    const float scale = 1.0f / __builtin_sqrtf(float(dim));
    for (long h = 0; h < p.key_heads; h++) {
        const long at = place * p.key_heads + h;
        float *query = slice.queries + at * dim, *key = slice.keys + at * dim;
        unit(p.qkv + token * p.qkv_row + h * dim, dim, scale, query);
        unit(p.keys(token) + h * dim, dim, 1.0f, key);
        slice.key_by_query[at] = dot(key, query, dim);
    }
    for (long h = 0; h < p.heads; h++) {
        const long at = place * p.heads + h;
        slice.decay[at] = std::exp(-p.rate[h] * softplus(widen(p.decay[token * p.decay_row + h]) + p.bias[h]));
        slice.share[at] = 1.0f / (1.0f + std::exp(-widen(p.strength[token * p.strength_row + h])));
    }
}

template <class T> static void all_tokens(const Operands<T> &p, const Slice &slice, long tokens, float *panels_of_threads) {
    const long panels = ceil_div(p.value_dim, PANEL), of_run = p.heads * panels;
    for_slices(
        p.rows, tokens, p.key_heads * p.key_dim, of_run, p.heads * p.key_dim * p.value_dim,
        [&](long token, long place) { prepare(p, slice, token, place); },
        [&](const Run *runs, long count, long begin, long unit, long thread) {
            const long r = unit / of_run, head = unit / panels % p.heads, column = unit % panels * PANEL;
            // May be past the last memory: a prefetch does not read.
            const bool same = head + 1 < p.heads || r + 1 == count;
            const float *next = same ? p.of_head(runs[r].block, head + 1) : p.of_head(runs[r + 1].block, 0);
            walk(p, slice, begin, runs[r], head, column, next, panels_of_threads + thread * p.key_dim * PANEL);
        });
}

// qkv: [T][2 key_heads key_dim + heads value_dim], decay, strength: [T][heads], all of the type, rows so far apart. rate, bias:
// [heads]. memory: [num_blocks][heads][key_dim][value_dim], changed in place. snapshots: see StateRows. tiled_heads: see
// Backend.gated_delta_rule. out: [T][heads value_dim] of the type. Returns 1 when out of memory or a code of StateRows::error_code;
// it has written nothing then.
EXPORT int WINDLASS_NAME(gated_delta_rule)(const void *qkv, long qkv_row, int type, const void *decay, long decay_row,
                                           const void *strength, long strength_row, const float *rate, const float *bias,
                                           float *memory, long num_blocks, long key_heads, long heads, long key_dim,
                                           long value_dim, long tiled_heads, const int64_t *blocks, const int64_t *starts,
                                           const int64_t *lengths, long sequences, const int64_t *snapshots, void *out, long tokens) {
    const StateRows rows = {blocks, starts, lengths, sequences, snapshots};
    if (const int code = rows.error_code(tokens, num_blocks)) return code;
    const long at_once = min_of(SLICE, tokens), keys = at_once * key_heads * key_dim, gates = at_once * heads;
    const long panels = most_threads() * key_dim * PANEL;  // each of whole lines
    void *space;
    if (posix_memalign(&space, 64, (panels + 2 * keys + at_once * key_heads + 2 * gates) * sizeof(float))) return 1;
    Slice slice;
    slice.keys = (float *)space + panels;
    slice.queries = slice.keys + keys;
    slice.decay = slice.queries + keys;
    slice.share = slice.decay + gates;
    slice.key_by_query = slice.share + gates;
    with_type(type, [&](auto *element) {
        typedef __typeof__(*element) T;
        const Operands<T> p = {(const T *)qkv, qkv_row, (const T *)decay, decay_row, (const T *)strength, strength_row, rate, bias,
                               memory, (T *)out, rows, key_heads, heads, key_dim, value_dim, tiled_heads != 0};
        all_tokens(p, slice, tokens, (float *)space);
    });
    free(space);
    return 0;
}
RECORDABLE(gated_delta_rule)

}  // namespace delta_rule
}  // namespace
