// Prefill attention over int8 pages with vpdpbusd, directly on the stored codes.
//
// Units, blocks at absolute places and the running softmax are those of attention_prefill.h. Queries, and per row and block
// the weights times the scales of their values, are rounded to 16 bits and split into two planes of bytes. Sums are exact
// integers, so the error is 2^-16 of the largest element, far below that of the codes. The sum over the upper plane is shifted,
// and the lower plane is added in the same accumulators.
//
// Keys are the unsigned side, as code + 128, so that a query's planes may be broadcast as signed bytes; the constant this
// adds is one number per query. A piece of keys holds 4 dims of 16 tokens, a piece of values 16 dims of 4 tokens: no sum
// crosses lanes. The softmax reduces lanes for all rows of a tile at once.
//
// The blocks of a row are accumulated in cuts at absolute positions that are merged in order. So few rows over many keys can be
// spread over threads, with the same bits as a single thread gives.

#pragma once

#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_prefill_int8_blocks.h"
#include "attention_prefill_int8_tiles.h"
#include "simd.h"

namespace {

#if WINDLASS_INT8_PREFILL
namespace prefill_codes {

constexpr long CUT_KEYS = 8 * BLOCK;         // keys gathered before they are merged

// The queries of a unit, scaled and rounded to two planes of signed bytes.
static NOINLINE void round_queries(const Prefill &p, const Workspace &w, const Unit &unit) {
    const long group = p.group(), rows = unit.count * group;
    const long quads = quads_of(p), padded = round_up(p.dim, W);
    for (long r = 0; r < round_up(rows, STEP_ROWS); r++) {
        float x[MOST_DIM] = {};
        if (r < rows) load_query(p, unit.token + r / group, unit.token + r / group, unit.head * group + r % group, x, 1);
        vf most = {}, poison = {};
        for (long d = 0; d < padded; d += W) {
            most = larger(magnitude_of(load(x + d)), most);
            poison += load(x + d) * 0.0f;
        }
        const float peak = largest(most), steps = peak > 0x1p-100f && peak < __builtin_inff() ? QUERY_STEPS / peak : 0.0f;
        w.factor[r] = peak / QUERY_STEPS + sum(poison);
        int8_t *upper = w.query + (r / TILE_ROWS * TILE_ROWS * 2 * quads + r % TILE_ROWS) * QUAD;
        int8_t *lower = upper + TILE_ROWS * quads * QUAD;
        vi sums = {};
        for (long d = 0; d < padded; d += W) {
            const vi code = nearest_int(load(x + d) * steps), low = (code << 24) >> 24, high = (code - low) >> 8;
            sums += code;
            for (long i = 0; i < W && d + i < quads * QUAD; i++) {
                const long at = (d + i) / QUAD * QUAD * TILE_ROWS + (d + i) % QUAD;
                upper[at] = int8_t(high[i]), lower[at] = int8_t(low[i]);
            }
        }
        w.bias[r] = -128 * total_of(sums);
    }
}

// One cut of a unit for one kv head: fills w.cut. The queries are rounded already.
static NOINLINE void gather_cut(const Prefill &p, const Workspace &w, const Unit &unit, long cut) {
    const int32_t *table = p.tables + unit.b * p.table_row;
    const long first_key = p.first_seen(unit.position), end_key = unit.position + unit.count;
    const long begin = max_of(cut * CUT_KEYS, first_key), end = min_of((cut + 1) * CUT_KEYS, end_key);
    w.cut.start(round_up(unit.count * p.group(), TILE_ROWS), p.value_dim);
    CodeBlock block;
    block.next.find(p, table, unit.head, begin, end_key);
    for (long start = begin / BLOCK * BLOCK; start < end; start += BLOCK) {
        block.here = block.next;
        if (start + BLOCK < end_key) block.next.find(p, table, unit.head, start + BLOCK, end_key);
        const long skip = max_of(0, begin - start), there = min_of(BLOCK, end - start);
        block.take_scales(skip, there);
        pass_block(p, w, unit, block, start, skip, there);
    }
}

// Merges a row's sums of a cut into its accumulated ones.
INLINE void merge_row(const Prefill &p, const Gathered &whole, long r, const float *acc, float top, float total) {
    if (total == 0.0f) return;  // it sees no key of the cut
    const float old = whole.top[r], here = top > old ? top : old, base = here == -__builtin_inff() ? 0.0f : here;
    const float before = exp2_of(splat(old - base))[0], by = exp2_of(splat(top - base))[0];
    whole.top[r] = here;
    whole.total[r] = whole.total[r] * before + total * by;
    for (long d = 0; d < p.value_dim; d += W) {
        float *target = whole.acc + r * p.value_dim + d;
        store(target, load(target) * before + load(acc + d) * by);
    }
}

// Cuts of a unit: absolute numbers.
INLINE long first_cut(const Prefill &p, const Unit &unit) { return p.first_seen(unit.position) / CUT_KEYS; }
INLINE long end_cut(const Unit &unit) { return ceil_div(unit.position + unit.count, CUT_KEYS); }

static void finish(const Prefill &p, const Workspace &w, const Unit &unit) {
    finish_unit(p, unit, w.whole.acc, p.value_dim, w.whole.top, w.whole.total);
}

// One unit for one kv head, from its queries to its results.
static void run_unit(const Prefill &p, const Workspace &w, const Unit &unit) {
    const long rows = unit.count * p.group();
    round_queries(p, w, unit);
    w.whole.start(rows, p.value_dim);
    for (long cut = first_cut(p, unit); cut < end_cut(unit); cut++) {
        gather_cut(p, w, unit, cut);
        for (long r = 0; r < rows; r++) merge_row(p, w.whole, r, w.cut.acc + r * p.value_dim, w.cut.top[r], w.cut.total[r]);
    }
    finish(p, w, unit);
}

// The same in two steps, for fewer units than threads: single cuts, stored as [row][value_dim sums, top, total], and their
// merge.
static void keep_cut(const Prefill &p, const Workspace &w, const Unit &unit, long cut, float *part) {
    const long part_row = p.value_dim + 2;
    round_queries(p, w, unit);
    gather_cut(p, w, unit, cut);
    for (long r = 0; r < unit.count * p.group(); r++, part += part_row) {
        __builtin_memcpy(part, w.cut.acc + r * p.value_dim, p.value_dim * sizeof(float));
        part[p.value_dim] = w.cut.top[r], part[p.value_dim + 1] = w.cut.total[r];
    }
}
static void merge_cuts(const Prefill &p, const Workspace &w, const Unit &unit, const float *parts, long cuts, long part_floats) {
    const long rows = unit.count * p.group(), part_row = p.value_dim + 2;
    w.whole.start(rows, p.value_dim);
    for (long c = 0; c < cuts; c++)
        for (long r = 0; r < rows; r++) {
            const float *part = parts + c * part_floats + r * part_row;
            merge_row(p, w.whole, r, part, part[p.value_dim], part[p.value_dim + 1]);
        }
    finish(p, w, unit);
}

// All units, none of more than most_rows rows. Returns 1 when out of memory.
static int run_units(const Prefill &p, const Unit *units, long count, long most_rows, long threads) {
    const long part_floats = most_rows * (p.value_dim + 2);
    long *before = (long *)malloc((count + 1) * sizeof(long));  // cuts before each
    if (!before) return 1;
    before[0] = 0;
    for (long i = 0; i < count; i++) before[i + 1] = before[i] + end_cut(units[i]) - first_cut(p, units[i]);
    const long cuts = before[count];
    const bool split = threads > 1 && count < UNITS_PER_THREAD * threads && cuts > count;
    float *parts = split ? (float *)malloc(cuts * part_floats * sizeof(float)) : nullptr;
    int failed = split && !parts;
    if (!failed) {
#pragma omp parallel num_threads(min_of(threads, cuts)) reduction(| : failed)
        {
            Workspace w;
            void *memory = nullptr;
            failed |= posix_memalign(&memory, 64, w.place(p, most_rows, nullptr)) != 0;
            if (!failed) w.place(p, most_rows, memory);
            if (split) {
#pragma omp for schedule(dynamic, 1)
                for (long number = 0; number < cuts; number++) {
                    long i = 0;
                    while (before[i + 1] <= number) i++;
                    const long cut = first_cut(p, units[i]) + number - before[i];
                    if (!failed) keep_cut(p, w, units[i], cut, parts + number * part_floats);
                }
            }
#pragma omp for schedule(dynamic, 1) nowait
            for (long i = 0; i < count; i++) {
                if (failed) continue;
                if (split) merge_cuts(p, w, units[i], parts + before[i] * part_floats, before[i + 1] - before[i], part_floats);
                else run_unit(p, w, units[i]);
            }
            free(memory);
        }
    }
    free(before), free(parts);
    return failed;
}

}  // namespace prefill_codes
#endif
}  // namespace
