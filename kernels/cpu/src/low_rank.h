// LoRA update of a product: out[M, N] += scale * (x[M, K] A^T) B^T, with matrices chosen per row.
//
// A and B are about a hundredth of the weight, so both must be read once and contiguously: A is stored in panels of rows, B^T in
// panels of columns, each read from start to end. Rows of x with the same adapter share the reads.
// Every number is summed in one order whatever M and the threads: a row has the same bits alone and in a batch.

#pragma once

#include "recordable.h"
#include "shared_structs.h"
#include "simd.h"
#include "work_split.h"

namespace {

namespace low_rank {

constexpr long PANEL = 32;       // columns
constexpr long PANELS = 8;       // that a thread takes at a time
constexpr int RANKS = 4;         // rows of A in a panel, which are read at once
constexpr long STRIP = 16;       // adjacent elements of each
constexpr int DOWN_ROWS = 2, UP_ROWS = 4;
constexpr long MOST_TOGETHER = 16;  // rows of x that share reads
constexpr long K_PART = 2048;    // elements of K that stay cached for all of them
static_assert(K_PART % STRIP == 0 && STRIP % W == 0 && PANEL % (2 * W) == 0, "whole vectors");

// Rows order[first .. first + count] of x, all with this update.
struct Group { const LowRankUpdate *change; long first, count; };

struct Rows {
    const float *x; long x_row;   // [M][K]
    const int64_t *order;
    float *low; long low_row;     // [M], by place in `order`
    long K;
};

// sums += the products of MT rows of x with a part of RANKS rows of A, over n elements.
template <class TW, int MT>
static NOINLINE void multiply(const TW *panel, const float *const *rows, long n, vf *sums) {
    vf acc[MT][RANKS];
    const float *x[MT];
    for (int m = 0; m < MT; m++) {
        x[m] = rows[m];
        for (int i = 0; i < RANKS; i++) acc[m][i] = sums[m * RANKS + i];
    }
    for (long k = 0; k < n; k += STRIP, panel += RANKS * STRIP) {
        for (long j = 0; j < STRIP; j += W) {
            vf weight[RANKS];
            for (int i = 0; i < RANKS; i++) weight[i] = load(panel + i * STRIP + j);
            for (int m = 0; m < MT; m++) {
                const vf own = k + j + W <= n ? load(x[m] + k + j) : load_some(x[m] + k + j, n - k - j);
                for (int i = 0; i < RANKS; i++) acc[m][i] = add_product(acc[m][i], weight[i], own);
            }
        }
    }
    for (int m = 0; m < MT; m++)
        for (int i = 0; i < RANKS; i++) sums[m * RANKS + i] = acc[m][i];
}

// Numbers r .. r + RANKS of x A^T of a group's rows.
template <class TW> static void down(const Rows &p, const Group &group, const TW *panels, long r) {
    vf sums[MOST_TOGETHER * RANKS] = {};
    const TW *panel = panels + r * round_up(p.K, STRIP);
    for (long k = 0; k < p.K; k += K_PART, panel += RANKS * K_PART) {
        const long n = min_of(K_PART, p.K - k);
        for (long m = 0; m < group.count; m += DOWN_ROWS) {
            const float *x[DOWN_ROWS];
            const long together = min_of(DOWN_ROWS, group.count - m);
            for (long i = 0; i < together; i++) x[i] = p.x + p.order[group.first + m + i] * p.x_row + k;
            (together == DOWN_ROWS ? multiply<TW, DOWN_ROWS> : multiply<TW, 1>)(panel, x, n, sums + m * RANKS);
        }
    }
    for (long m = 0; m < group.count; m++) {
        float four[RANKS];
        const vf *of = sums + m * RANKS;
        sum_four(of[0], of[1], of[2], of[3], four);
        float *low = p.low + (group.first + m) * p.low_row + r;
        for (long i = 0; i < min_of(RANKS, group.change->rank - r); i++) low[i] = four[i];
    }
}

// Adds to MT rows of out NV vectors of a panel; `left` columns remain from there on.
template <class TW, class T, int MT, int NV>
INLINE void add_vectors(const TW *panel, long rank, const float *const (&low)[MT], float scale, T *const (&out)[MT], long left) {
    vf acc[MT][NV] = {};
    for (long r = 0; r < rank; r++, panel += PANEL) {
        vf weight[NV];
        for (int v = 0; v < NV; v++) weight[v] = load(panel + v * W);
        for (int m = 0; m < MT; m++)
            for (int v = 0; v < NV; v++) acc[m][v] = add_product(acc[m][v], weight[v], splat(low[m][r]));
    }
    for (int m = 0; m < MT; m++) {
        for (int v = 0; v < NV; v++) {
            T *target = out[m] + v * W;
            const long n = left - v * W;
            if (n >= W) store(target, add_product(load(target), acc[m][v], splat(scale)));
            else if (n > 0) store_some(target, add_product(load_some(target, n), acc[m][v], splat(scale)), n);
        }
    }
}

// Panels p0 .. p1 of a part, added to MT of the group's rows from m on.
template <class TW, class T, int MT>
static NOINLINE void add_panels(const Rows &p, const LowRankPart &part, const TW *panel, long first, long p0, long p1, T *out,
                                long out_row) {
    constexpr int NV = MT == 1 ? PANEL / W : 2;
    const float *low[MT];
    T *rows[MT];
    for (int m = 0; m < MT; m++) {
        low[m] = p.low + (first + m) * p.low_row + part.rank_first;
        rows[m] = out + p.order[first + m] * out_row + part.first + p0 * PANEL;
    }
    panel += p0 * part.rank * PANEL;
    for (long left = part.columns - p0 * PANEL; p0 < p1; p0++, left -= PANEL, panel += part.rank * PANEL) {
        for (long c = 0; c < PANEL && c < left; c += NV * W) {
            T *at[MT];
            for (int m = 0; m < MT; m++) at[m] = rows[m] + c;
            add_vectors<TW, T, MT, NV>(panel + c, part.rank, low, float(part.scale), at, left - c);
        }
        for (int m = 0; m < MT; m++) rows[m] += PANEL;
    }
}

template <class TW, class T>
static void up(const Rows &p, const Group &group, const LowRankPart &part, const TW *panels, long p0, long p1, T *out,
               long out_row) {
    long m = 0;
    for (; m + UP_ROWS <= group.count; m += UP_ROWS)
        add_panels<TW, T, UP_ROWS>(p, part, panels, group.first + m, p0, p1, out, out_row);
    for (; m < group.count; m++) add_panels<TW, T, 1>(p, part, panels, group.first + m, p0, p1, out, out_row);
}

INLINE long pieces_of(const LowRankPart &part) { return ceil_div(ceil_div(part.columns, PANEL), PANELS); }

// f(group, unit) for the units 0 .. units_of(group) of all groups. work: multiply-adds in all.
template <class U, class F>
INLINE void for_groups(const Group *groups, long count, long work, const U &units_of, const F &f) {
    long most = 0;
    for (long g = 0; g < count; g++) most = max_of(most, units_of(groups[g]));
    const long threads = threads_for(work, count * most);
    Shares shares(count * most, threads);
    on_threads(threads, [&](long thread) {
        shares.take(thread, [&](long unit) {
            const Group &group = groups[unit / most];
            if (unit % most < units_of(group)) f(group, unit % most);
        });
    });
}

template <class T>
static void add(Rows p, const T *x, float *wide, T *out, long out_row, const Group *groups, long count, long rows, long work) {
    if (wide) {
        for_units(rows, threads_for(rows * p.K, rows), [&](long place) {
            copy_converted(x + p.order[place] * p.x_row, wide + p.order[place] * p.K, p.K);
        });
        p.x = wide, p.x_row = p.K;
    }
    for_groups(groups, count, work * p.K, [](const Group &group) { return ceil_div(group.change->rank, RANKS); },
               [&](const Group &group, long unit) {
                   with_type(group.change->type, [&](auto *element) {
                       down(p, group, (decltype(element))group.change->down, unit * RANKS);
                   });
               });
    const auto pieces = [](const Group &group) {
        long all = 0;
        for (long i = 0; i < group.change->num_parts; i++) all += pieces_of(group.change->parts[i]);
        return all;
    };
    for_groups(groups, count, work * p.K, pieces, [&](const Group &group, long unit) {
        const LowRankPart *part = group.change->parts;
        for (; unit >= pieces_of(*part); part++) unit -= pieces_of(*part);
        const long p0 = unit * PANELS, p1 = min_of(p0 + PANELS, ceil_div(part->columns, PANEL));
        with_type(part->type, [&](auto *element) {
            up(p, group, *part, (decltype(element))part->up, p0, p1, out, out_row);
        });
    });
}

// slots: [rows], of each row its entry in `changes`, -1 for none. x and out are of one type, strides in elements. Returns 1
// when out of memory, 2 for a slot out of range.
EXPORT int WINDLASS_NAME(add_low_rank)(const void *x, long x_row, void *out, long out_row, int type, const int64_t *slots,
                                       long rows, long K, const LowRankUpdate *changes, long num_slots) {
    long changed = 0, rank = 0, work = 0;
    for (long r = 0; r < rows; r++) {
        if (slots[r] < -1 || slots[r] >= num_slots) return 2;
        const long own = slots[r] < 0 ? 0 : changes[slots[r]].rank;
        changed += own > 0, rank = max_of(rank, own), work += own;
    }
    if (!changed) return 0;
    const long widened = type == 0 ? 0 : rows * K;
    char *memory = (char *)malloc(changed * (sizeof(Group) + sizeof(int64_t)) + (changed * rank + widened) * sizeof(float));
    if (!memory) return 1;
    Group *groups = (Group *)memory;
    int64_t *order = (int64_t *)(groups + changed);
    float *low = (float *)(order + changed);
    long count = 0, placed = 0;
    for (long r = 0; placed < changed; r++) {  // rows of a slot become adjacent, at the position of its first row
        const int64_t slot = slots[r];
        if (slot < 0 || changes[slot].rank == 0) continue;
        bool seen = false;
        for (long g = 0; g < count && !seen; g++) seen = groups[g].change == changes + slot;
        if (seen) continue;
        for (long s = r; s < rows; s++) {
            if (slots[s] != slot) continue;
            if (!count || groups[count - 1].change != changes + slot || groups[count - 1].count == MOST_TOGETHER)
                groups[count++] = {changes + slot, placed, 0};
            groups[count - 1].count++;
            order[placed++] = s;
        }
    }
    const Rows p = {(const float *)x, x_row, order, low, rank, K};
    float *wide = widened ? low + changed * rank : nullptr;
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        add(p, (T)x, wide, (T)out, out_row, groups, count, changed, work);
    });
    free(memory);
    return 0;
}
RECORDABLE(add_low_rank)

}  // namespace low_rank
}  // namespace
