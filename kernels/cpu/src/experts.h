// Mixture of experts: routing, products of rows with their experts, and the weighted sum of the results.
//
// Rows are sorted by expert, so that a weight is read once for all of its rows, and only if there are any. The products are those
// of linear.h, panels.h and block_linear.h, or of amx_linear.h for many rows per expert; rows do not depend on each other.

#pragma once

#include "activations.h"
#include "recordable.h"
#include "shared_structs.h"
#include "simd.h"
#include "work_split.h"

namespace {

namespace experts {

constexpr long MOST = 4096;
constexpr int NO_SUCH_EXPERT = 2;
constexpr long MANY_ROWS = 16;  // of an expert, on average, from which one thread computes it alone
constexpr long RUN = 192;       // of them at a time, as one pass of block_linear.h has
constexpr long PANEL = 16;      // adjacent columns of a weight in every layout; see panels.h and block_codes.h
constexpr long MOST_RUN = 64, LEAST_RUN = 4;  // panels that a thread takes at a time
constexpr long LEAST_SHARED = 32;  // if experts have several rows, which are rounded again for each run

struct Choice {
    const float *bias;
    long count, top_k, groups, top_groups;
    int scores;  // 0 softmax, 1 sigmoid, 2 sparsemixer
    bool two_largest, normalized;
    float scale, least_sum, sum_eps, jitter;
};

// The first of the largest that are not taken yet; NaN counts as the smallest.
INLINE long best_of(const float *scores, const bool *taken, long count) {
    long best = -1;
    for (long i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

// exp(x - most), or 0 for excluded elements; returns the sum.
static float exponentials(const float *x, const bool *left_out, long count, float most, float *out) {
    float total = 0.0f;
    for (long i = 0; i < count; i += W) {
        const long n = min_of(W, count - i);
        const vf y = exp_of((load_part(x + i, n)) - most);
        for (long j = 0; j < n; j++) {
            out[i + j] = left_out && left_out[i + j] ? 0.0f : y[j];
            total += out[i + j];
        }
    }
    return total;
}

// Marks the experts of all but the best groups as taken.
static void take_groups(const Choice &p, const float *ranked, bool *taken) {
    float best[MOST];
    bool chosen[MOST] = {};
    const long size = p.count / p.groups;
    for (long g = 0; g < p.groups; g++) {
        float first = -__builtin_inff(), second = first;
        for (long i = g * size; i < (g + 1) * size; i++) {
            if (ranked[i] > first) second = first, first = ranked[i];
            else if (ranked[i] > second) second = ranked[i];
        }
        best[g] = p.two_largest ? first + second : first;
    }
    for (long g = 0; g < p.top_groups; g++) chosen[best_of(best, chosen, p.groups)] = true;
    for (long i = 0; i < p.count; i++) taken[i] = !chosen[i / size];
}

static void choose(const Choice &p, const float *logits, int64_t *chosen, float *weights) {
    float scores[MOST], ranked[MOST];
    bool taken[MOST] = {};
    if (p.scores == 2) {
        for (long k = 0; k < p.top_k; k++) {
            const long best = best_of(logits, taken, p.count);
            const float most = logits[best];
            bool out[MOST];
            for (long i = 0; i < p.count; i++) {
                const float size = logits[i] < 0 ? -logits[i] : logits[i];
                out[i] = taken[i] || (most - logits[i]) / (size > most ? size : most) > 2 * p.jitter;
            }
            const float total = exponentials(logits, out, p.count, most, scores);
            chosen[k] = best, weights[k] = scores[best] / total * p.scale, taken[best] = true;
        }
        return;
    }
    if (p.scores == 0) {
        float most = logits[0];
        for (long i = 1; i < p.count; i++) most = logits[i] > most ? logits[i] : most;
        const float total = exponentials(logits, nullptr, p.count, most, scores);
        for (long i = 0; i < p.count; i++) scores[i] /= total;
    } else {
        for (long i = 0; i < p.count; i += W) {
            const long n = min_of(W, p.count - i);
            const vf y = 1.0f / (1.0f + exp_of(-load_part(logits + i, n)));
            store_part(scores + i, y, n);
        }
    }
    for (long i = 0; i < p.count; i++) ranked[i] = p.bias ? scores[i] + p.bias[i] : scores[i];
    if (p.groups > 1) take_groups(p, ranked, taken);
    float total = 0.0f;
    for (long k = 0; k < p.top_k; k++) {
        const long best = best_of(ranked, taken, p.count);
        chosen[k] = best, weights[k] = scores[best], taken[best] = true;
        total += scores[best];
    }
    total += p.sum_eps;
    if (total < p.least_sum) total = p.least_sum;
    for (long k = 0; k < p.top_k; k++) weights[k] = (p.normalized ? weights[k] / total : weights[k]) * p.scale;
}

// Columns begin .. begin + columns of a part, from a whole panel on.
static ExpertPart some_of(ExpertPart p, long begin, long columns, long K) {
    p.first += begin, p.columns = columns;
    if (p.bias) p.bias = (const char *)p.bias + begin * (p.bias_type == 0 ? 4 : 2);
    const long panel = begin / PANEL;
    if (p.kind == 0) p.data = (const char *)p.data + begin * p.stride * (p.type == 0 ? 4 : 2);
    else if (p.kind == 1) p.data = (const char *)p.data + panel * ceil_div(K, 2) * 2 * PANEL * 2;
    else {
        const long groups = panel * ceil_div(K, p.group), each = (p.minimum ? 2 : 1) * PANEL;
        p.data = (const char *)p.data + groups * p.group * p.bits * PANEL / 8;
        p.scales = (const char *)p.scales + groups * each * (p.super_groups ? 1 : 2);
        if (p.super_groups) p.supers = (const char *)p.supers + panel * ceil_div(ceil_div(K, p.group), p.super_groups) * each * 2;
    }
    return p;
}

// logits: [rows][count] float32, bias and scales: [count] or null. chosen, weights: [rows][top_k].
EXPORT int WINDLASS_NAME(route_experts)(const float *logits, long logits_row, const float *bias, const float *scales, long count,
                                        long top_k, long groups, long top_groups, int scores, int two_largest, int normalized,
                                        float scale, float least_sum, float sum_eps, float jitter, int64_t *chosen,
                                        float *weights, long rows) {
    const Choice choice = {bias,          count,           top_k, groups,    top_groups, scores,
                           !!two_largest, !!normalized, scale, least_sum, sum_eps, jitter};
    for_units(rows, threads_for(rows * count * 8, rows), [&](long r) {
        int64_t *own = chosen + r * top_k;
        float *weight = weights + r * top_k;
        choose(choice, logits + r * logits_row, own, weight);
        for (long k = 0; scales && k < top_k; k++) weight[k] *= scales[own[k]];
    });
    return 0;
}
RECORDABLE(route_experts)

// The operands of linear_of_experts. order: rows by their experts; ends: where those of each end.
struct Routed {
    const char *x;
    long x_row;
    int type;
    const ExpertPart *table;
    long count, parts;
    const ExpertProducts *products;
    const long *order, *ends;
    long rows, per_row;
    char *out;
    long columns, K;

    INLINE_MEMBER long size() const { return type == 0 ? 4 : 2; }
    INLINE_MEMBER const char *x_of(long r) const { return x + r / per_row * x_row * size(); }
    INLINE_MEMBER char *out_of(long r) const { return out + r * columns * size(); }
    INLINE_MEMBER long begin_of(long e) const { return e ? ends[e - 1] : 0; }
    INLINE_MEMBER long rows_of(long e) const { return ends[e] - begin_of(e); }
};

// The columns of a part, of out[rows, columns], of some rows of x. Returns what its product returns.
static int multiply(const Routed &all, const ExpertPart &p, const void *x, long x_row, void *out, long rows) {
    const ExpertProducts &products = *all.products;
    const int type = all.type, p_type = int(p.type), bias_type = int(p.bias_type);
    void *to = (char *)out + p.first * all.size();
    if (p.kind == 0)
        return products.linear(x, x_row, type, p.data, p.stride, p_type, p.bias, bias_type, to, all.columns, rows, p.columns, all.K);
    if (p.kind == 1 && products.linear_panels_amx && rows >= products.amx_min_rows_panels && type == 1 && p_type == 1 &&
        (!p.bias || bias_type == 0))
        return products.linear_panels_amx(x, x_row, p.data, (const float *)p.bias, -1, to, all.columns, rows, p.columns, all.K);
    if (p.kind == 1)
        return products.linear_panels(x, x_row, type, p.data, p_type, p.bias, bias_type, to, all.columns, rows, p.columns, all.K);
    const uint8_t *codes = (const uint8_t *)p.data;
    const int bits = int(p.bits), group = int(p.group), super_groups = int(p.super_groups);
    const int minimum = int(p.minimum), offset = int(p.offset);
    if (products.linear_blocks_amx && rows >= products.amx_min_rows_blocks)
        return products.linear_blocks_amx(x, x_row, type, codes, p.scales, p.supers, bits, group, super_groups, minimum, offset,
                                          (const float *)p.bias, -1, to, all.columns, rows, p.columns, all.K);
    return products.linear_blocks((const float *)x, x_row, codes, p.scales, p.supers, bits, group, super_groups, minimum, offset,
                                  (const float *)p.bias, -1, (float *)to, all.columns, rows, p.columns, all.K);
}

// Many rows: threads take runs of rows of an expert, gather them, and multiply them by the entire weight while they are cached.
static int multiply_runs(const Routed &p) {
    long count = 0;
    for (long e = 0; e < p.count; e++) count += ceil_div(p.rows_of(e), RUN);
    const long threads = min_of(count, most_threads()), bytes = RUN * (p.K + p.columns) * p.size();
    struct Run { long expert, begin, rows; };
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, threads * bytes + count * sizeof(Run))) return 1;
    Run *runs = (Run *)((char *)memory + threads * bytes);
    for (long e = 0, i = 0; e < p.count; e++) {
        const long begin = p.begin_of(e), n = p.rows_of(e), pieces = ceil_div(n, RUN);
        for (long j = 0; j < pieces; j++) runs[i++] = {e, begin + n * j / pieces, n * (j + 1) / pieces - n * j / pieces};
    }
    int code = 0;
    Units units(count);
    on_threads(threads, [&](long thread) {
        char *const gathered = (char *)memory + thread * bytes, *const made = gathered + RUN * p.K * p.size();
        alone([&] {
            units.take([&](long unit) {
                const Run &run = runs[unit];
                const long x_bytes = p.K * p.size(), out_bytes = p.columns * p.size();
                for (long i = 0; i < run.rows; i++)
                    std::memcpy(gathered + i * x_bytes, p.x_of(p.order[run.begin + i]), x_bytes);
                for (long i = 0; i < p.parts; i++) {
                    const ExpertPart &part = p.table[run.expert * p.parts + i];
                    if (multiply(p, part, gathered, p.K, made, run.rows))
                        __atomic_store_n(&code, 1, __ATOMIC_RELAXED);
                }
                for (long i = 0; i < run.rows; i++)
                    std::memcpy(p.out_of(p.order[run.begin + i]), made + i * out_bytes, out_bytes);
            });
        });
    });
    free(memory);
    return code;
}

// Part `part` of expert `expert`; its panels are numbered from `begin` on.
struct Span { long part, expert, begin; };

// Panels 0 .. count, taken by threads in ever shorter runs: long ones first, so that each reads contiguous memory and rounds its rows
// once, and short ones at the end for an even load.
struct Runs {
    long count, threads, least;
    alignas(64) long next = 0;
    Runs(long count, long threads, long least) : count(count), threads(threads), least(least) {}
    // The next run, or false.
    INLINE_MEMBER bool take(long &begin, long &end) {
        begin = __atomic_load_n(&next, __ATOMIC_RELAXED);
        do {
            if (begin >= count) return false;
            const long run = max_of(least, min_of(MOST_RUN, (count - begin) / (2 * threads)));
            end = min_of(count, begin + run);
        } while (!__atomic_compare_exchange_n(&next, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return true;
    }
};

// out[r] = x[r / per_row] * weight of expert chosen[r], for r < rows. table: [count][parts]. type: of x and out, 0 float32 or
// 1 bfloat16. Returns 1 when out of memory, 2 for an expert number out of range.
EXPORT int WINDLASS_NAME(linear_of_experts)(const void *x, long x_row, int type, const void *table, long count, long parts,
                                            const void *products, const int64_t *chosen, long rows, long per_row, void *out,
                                            long columns, long K) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, (count + 1 + rows) * sizeof(long) + (min_of(rows, count) * parts + 1) * sizeof(Span))) return 1;
    long *starts = (long *)memory, *order = starts + count + 1;
    Span *spans = (Span *)(order + rows);
    std::memset(starts, 0, (count + 1) * sizeof(long));
    long most = 0, code = 0;
    for (long r = 0; r < rows; r++) {
        if (chosen[r] < 0 || chosen[r] >= count) {
            free(memory);
            return NO_SUCH_EXPERT;
        }
        most = max_of(most, ++starts[chosen[r] + 1]);
    }
    for (long e = 0; e < count; e++) starts[e + 1] += starts[e];
    for (long r = 0; r < rows; r++) order[starts[chosen[r]]++] = r;
    // Now starts[e] is where expert e ends.
    const Routed all = {(const char *)x, x_row, type, (const ExpertPart *)table, count, parts, (const ExpertProducts *)products,
                        order, starts, rows, per_row, (char *)out, columns, K};
    if (rows > MANY_ROWS * count) {
        as_team([&] { code = multiply_runs(all); });
        free(memory);
        return (int)code;
    }
    // Rows of one expert are gathered; a single row is read and written in place.
    const long x_bytes = K * all.size(), out_bytes = columns * all.size();
    char *gathered = nullptr;
    if (most > 1 && posix_memalign((void **)&gathered, 64, rows * (x_bytes + out_bytes))) {
        free(memory);
        return 1;
    }
    char *made = gathered + rows * x_bytes;
    const auto is_single = [&](long e) { return all.rows_of(e) == 1; };
    const long threads = rows * columns * K < SERIAL_WORK ? 1 : most_threads();
    long panels = 0, used = 0;  // of all experts that have rows, and their number of parts
    for (long e = 0; e < count; e++)
        for (long i = 0; i < parts && all.rows_of(e); i++) {
            spans[used++] = {e * parts + i, e, panels};
            panels += ceil_div(all.table[e * parts + i].columns, PANEL);
        }
    spans[used] = {0, 0, panels};
    as_team([&] {
        if (most > 1) {
            for_units(rows, threads_for(rows * K, rows), [&](long i) {
                if (!is_single(chosen[order[i]])) std::memcpy(gathered + i * x_bytes, all.x_of(order[i]), x_bytes);
            });
        }
        Runs runs(panels, threads, most > 1 ? LEAST_SHARED : LEAST_RUN);
        on_threads(threads, [&](long) {
            alone([&] {
                const Span *span = spans;
                for (long begin, end; runs.take(begin, end);) {
                    while (begin < end) {
                        while (begin >= span[1].begin) span++;
                        const long own_end = min_of(end, span[1].begin), first = all.begin_of(span->expert), r = order[first];
                        const ExpertPart &whole = all.table[span->part];
                        const long column = (begin - span->begin) * PANEL;
                        const ExpertPart part =
                            some_of(whole, column, min_of(whole.columns, (own_end - span->begin) * PANEL) - column, K);
                        const long n = all.rows_of(span->expert);
                        const int found = n == 1 ? multiply(all, part, all.x_of(r), x_row, all.out_of(r), 1)
                                                 : multiply(all, part, gathered + first * x_bytes, K, made + first * out_bytes, n);
                        if (found) __atomic_store_n(&code, 1, __ATOMIC_RELAXED);
                        begin = own_end;
                    }
                }
            });
        });
        if (most > 1) {
            for_units(rows, threads_for(rows * columns, rows), [&](long i) {
                if (!is_single(chosen[order[i]])) std::memcpy(all.out_of(order[i]), made + i * out_bytes, out_bytes);
            });
        }
    });
    free(gathered);
    free(memory);
    return (int)code;
}
RECORDABLE(linear_of_experts)

// out[t] = sum over j of x[t * top_k + j] * weights[t, j], in this order.
EXPORT int WINDLASS_NAME(sum_of_experts)(const void *x, int type, const float *weights, long top_k, void *out, long rows,
                                         long dim) {
    constexpr long PIECE = 512;
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        const auto add = [&](long r) {
            return [=, from = (T)x + r * top_k * dim, target = (T)out + r * dim, own = weights + r * top_k](long j, long n) {
                vf total = {};
                const auto *at = from + j;
                for (long k = 0; k < top_k; k++, at += dim) total = add_product(total, load_part(at, n), splat(own[k]));
                store_part(target + j, total, n);
            };
        };
        each_vector(rows, dim, add, PIECE, top_k);
    });
    return 0;
}
RECORDABLE(sum_of_experts)

}  // namespace experts
}  // namespace
