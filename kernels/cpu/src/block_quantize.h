// Quantizes rows of a weight into blocks (the layout is block_repack.h's): q8_0, and the forms with super groups.
//
// The same operations as in kernels/torch/block_quantization.py, with the same bytes as result. Each lane holds one row of a panel,
// so nothing is summed across lanes. Products must not be fused with additions (see `times`), or instruction sets would differ.
// Only sums of codes and of their squares may be fused: they are integers, which stay exact.

#pragma once

#include "block_repack.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace filling {

constexpr float TINY_GROUP = 0x1p-100f, HUGE_GROUP = 0x1p100f;
constexpr int SHIFTS = 5, REACHES = 11;
constexpr double SHIFT[SHIFTS] = {-0.6, -0.2, 0.2, 0.6, 1.0};
constexpr float LEAST_SPREAD = 1e-5f;
constexpr int MOST_GROUPS = 64;  // of a super group
constexpr int LONGEST = 32;      // elements of a group

struct Form {
    int bits, group, super_groups, parts, offset;
};

INLINE vf times(vf a, vf b) { return rounded(a * b); }
INLINE vf bounded(vf x, vf low, vf high) { return smaller(larger(x, low), high); }
INLINE bool any_finite(f16 x) { return (x.bits & 0x7fffu) < 0x7c00u; }

// Rows first .. end of the W rows of a panel part, read from a matrix at `source`.
template <class T> struct Lanes {
    const T *source;  // of lane `first`
    long stride, first, end;

    // Elements k .. k + W of one row, zeros past the row's end and for lanes without a row.
    vf part(long lane, long k, long K) const {
        if (lane < first || lane >= end || k >= K) return vf{};
        const T *from = source + (lane - first) * stride + k;
        return load_part(from, K - k);
    }
    // Elements k .. k + count, a row a lane.
    void group(long k, int count, long K, vf *x) const {
        for (int j = 0; j < count; j += W) {
            vf square[W];
            for (int i = 0; i < W; i++) square[i] = part(i, k + j, K);
            transpose(square);
            for (int i = 0; i < W; i++) x[j + i] = square[i];
        }
    }
    // Stores the words, bytes or float16 numbers of lanes that have a row.
    void store_words(uint8_t *line, vu words) const {
        if (end - first == W) *(vu_any *)line = words;
        else for (long i = first; i < end; i++) __builtin_memcpy(line + 4 * i, (const char *)&words + 4 * i, 4);
    }
    void store_bytes(uint8_t *to, vi bytes) const {
        for (long i = first; i < end; i++) to[i] = uint8_t(bytes[i]);
    }
    void store_halves(uint16_t *to, const f16 (&halves)[W]) const {
        for (long i = first; i < end; i++) to[i] = halves[i].bits;
    }
};

// ---- the fit of one group a lane ----

// Weights of elements. Without weights: 1 each, and 0 past the row's end.
template <bool WEIGHTED> struct Sums {
    const vf *y, *weights;
    int count;  // elements with a nonzero weight
    vf wy[WEIGHTED ? LONGEST : 1];
    vf total, total_y;

    INLINE_MEMBER void start(const vf *values, const vf *w, int group, int filled) {
        y = values, weights = w, count = WEIGHTED ? group : filled;
        total = total_y = vf{};
        for (int k = 0; k < count; k++) {
            if constexpr (WEIGHTED) wy[k] = times(w[k], y[k]);
            total += WEIGHTED ? w[k] : splat(1.0f);
            total_y += WEIGHTED ? wy[k] : y[k];
        }
    }
    // The sums of w q, w q q and w y q.
    template <class Code> INLINE_MEMBER void of_codes(const Code &code, vf &q1, vf &qq, vf &yq) const {
        q1 = qq = yq = vf{};
        for (int k = 0; k < count; k++) {
            const vf q = code(k);
            if constexpr (WEIGHTED) {
                const vf wq = times(weights[k], q);
                q1 += wq;
                qq += times(wq, q);
                yq += times(wy[k], q);
            } else {
                q1 += q;
                qq = add_product(qq, q, q);
                yq += times(y[k], q);
            }
        }
    }
};

template <bool WEIGHTED> struct MinimumFit {
    const Sums<WEIGHTED> &sums;
    vf scale, minimum, gain;  // gain: reduction of the squared error by the fit

    template <class Code> INLINE_MEMBER void take_if_better(const Code &code) {
        vf q1, qq, yq;
        sums.of_codes(code, q1, qq, yq);
        const vf all = times(sums.total, qq), spread = all - times(q1, q1);
        const vi determined = spread > times(splat(LEAST_SPREAD), all);
        const vf divisor = determined ? spread : splat(1.0f);
        vf new_scale = (times(sums.total, yq) - times(sums.total_y, q1)) / divisor;
        vf new_minimum = (times(qq, sums.total_y) - times(q1, yq)) / divisor;
        const vi above = new_minimum > vf{};
        const vf alone = yq / (qq > vf{} ? qq : splat(1.0f));
        new_scale = above ? alone : new_scale;
        new_minimum = above ? vf{} : new_minimum;
        const vf new_gain = times(new_scale, yq) + times(new_minimum, sums.total_y);
        const vi better = determined & (new_scale > vf{}) & (new_gain > gain);
        scale = better ? new_scale : scale;
        minimum = better ? new_minimum : minimum;
        gain = better ? new_gain : gain;
    }
};

// y is near scale * code - minimum.
template <bool WEIGHTED>
static NOINLINE void fit_with_minimum(const vf *y, const vf *weights, int group, int filled, float codes, vf &scale,
                                      vf &minimum) {
    const vf top = splat(codes), one = splat(1.0f);
    Sums<WEIGHTED> sums;
    sums.start(y, weights, group, filled);
    vf low = y[0], high = y[0];
    for (int k = 1; k < group; k++) low = smaller(y[k], low), high = larger(y[k], high);
    low = smaller(low, vf{});
    const vf span = high - low;
    const vi spans = span > vf{};
    const vf per_span = one / (spans ? span : one), by_span = spans ? per_span : vf{};
    vf z[LONGEST];
    for (int k = 0; k < group; k++) z[k] = times(y[k] - low, by_span);
    MinimumFit<WEIGHTED> fit = {sums, span / top, low, vf{}};
    vf q1, qq, yq;
    sums.of_codes([&](int k) { return nearest(times(z[k], top)); }, q1, qq, yq);
    const vf two = splat(2.0f);
    const vf linear = times(two, times(fit.scale, yq) + times(fit.minimum, sums.total_y));
    const vf scales = times(times(fit.scale, fit.scale), qq), both = times(times(two, times(fit.scale, fit.minimum)), q1);
    fit.gain = linear - (scales + both + times(times(fit.minimum, fit.minimum), sums.total));
    for (int b = 0; b < SHIFTS; b++) {
        for (int o = 0; o < SHIFTS; o++) {
            const vf by = splat(float(double(codes) + (SHIFT[b] + SHIFT[o]))), below = splat(float(SHIFT[b]));
            fit.take_if_better([&](int k) { return nearest(bounded(times(z[k], by) - below, vf{}, top)); });
        }
    }
    const vi usable = fit.scale > vf{};
    const vf inverse = one / (usable ? fit.scale : one), by = usable ? inverse : vf{}, from = fit.minimum;
    fit.take_if_better([&](int k) { return nearest(bounded(times(y[k] - from, by), vf{}, top)); });
    scale = fit.scale;
    minimum = -fit.minimum;
}

// y is near scale * (code - offset).
template <bool WEIGHTED>
static NOINLINE void fit_symmetric(const vf *y, const vf *weights, int group, int filled, int offset, vf &scale) {
    const vf low = splat(float(-offset)), high = splat(float(offset - 1)), one = splat(1.0f);
    Sums<WEIGHTED> sums;
    sums.start(y, weights, group, filled);
    vf least = y[0], most = y[0];
    for (int k = 1; k < group; k++) least = smaller(y[k], least), most = larger(y[k], most);
    const vf extreme = most >= -least ? most : least;
    const vi usable = extreme != vf{};
    const vf inverse = one / (usable ? extreme : one), by = usable ? inverse : vf{};
    vf z[LONGEST];
    for (int k = 0; k < group; k++) z[k] = times(y[k], by);
    vf square = {}, norm = one, product = {};
    for (int r = 0; r < 2 * REACHES; r++) {
        const float past = 0.5f * float(r % REACHES - 8);
        const vf reach = splat(r < REACHES ? float(-offset) - past : float(offset - 1) + past);
        vf q1, qq, yq;
        sums.of_codes([&](int k) { return nearest(bounded(times(z[k], reach), low, high)); }, q1, qq, yq);
        const vf new_square = times(yq, yq);
        const vi better = times(new_square, norm) > times(square, qq);
        square = better ? new_square : square;
        norm = better ? qq : norm;
        product = better ? yq : product;
    }
    scale = product / norm;
}

// ---- groups, super groups, panels ----

// A float16 of at least x, and its value.
INLINE vf round_up(vf x, f16 (&stored)[W]) {
    vf worth = {};
    for (int i = 0; i < W; i++) {
        narrow(float(x[i]), stored[i]);
        if (widen(stored[i]) < x[i]) stored[i].bits++;
        worth[i] = widen(stored[i]);
    }
    return worth;
}

// Codes of a group (unsigned or signed bytes) into its lines; zeros past the row's end.
template <class T> static void write_lanes(const vi *codes, const Form &form, int filled, const Lanes<T> &rows, uint8_t *lines) {
    const auto quad = [&](int q) {
        vu word = {};
        for (int i = 0; i < 4; i++)
            if (4 * q + i < filled) word |= ((vu)codes[4 * q + i] & 0xffu) << (8 * i);
        return word;
    };
    const int quads = form.group / 4, width = form.bits - 4;
    if (form.bits == 8) {
        for (int q = 0; q < quads; q++) rows.store_words(lines + q * LINE_BYTES, quad(q));
        return;
    }
    vu upper = {};
    for (int j = 0; j < quads / 2; j++) {
        const vu even = quad(2 * j), odd = quad(2 * j + 1);
        rows.store_words(lines + j * LINE_BYTES, (even & 0x0f0f0f0fu) | (odd & 0x0f0f0f0fu) << 4);
        upper |= (even >> 4 & 0x0f0f0f0fu) << (2 * j * width) | (odd >> 4 & 0x0f0f0f0fu) << ((2 * j + 1) * width);
    }
    if (width) rows.store_words(lines + quads / 2 * LINE_BYTES, upper);
}

// The bits of the largest magnitude; infinity and NaN are on top.
INLINE vu largest_bits(const vf *x, int count) {
    vu top = {};
    for (int i = 0; i < count; i++) top = larger_bits((vu)magnitude_of(x[i]), top);
    return top;
}

// A group of q8_0. llama.cpp rounds ties away from zero.
template <class T> static void pack_eight(const Lanes<T> &rows, const Form &form, long k, long K, uint8_t *lines, uint16_t *scales) {
    vf x[LONGEST];
    rows.group(k, form.group, K, x);
    const vu top = largest_bits(x, form.group);
    const vi tiny = (vi)(top < splat_bits(bits_of(TINY_GROUP)));
    vf scale = (vf)top / splat(127.0f);
    f16 stored[W];
    vi usable = ~tiny;
    for (int i = 0; i < W; i++) {
        narrow(float(scale[i]), stored[i]);
        if (!any_finite(stored[i])) usable[i] = 0;
    }
    for (int i = 0; i < W; i++)
        if (!usable[i]) stored[i].bits = tiny[i] ? 0 : 0x7e00;
    rows.store_halves(scales, stored);
    const vf inverse = splat(1.0f) / (usable ? scale : splat(1.0f));
    vi codes[LONGEST];
    for (int i = 0; i < form.group; i++) {
        const vf size = usable ? magnitude_of(times(x[i], inverse)) : vf{}, even = nearest(size);
        const vi code = nearest_int(even) - (vi)(size - even >= splat(0.5f));
        codes[i] = x[i] < vf{} ? -code : code;
    }
    write_lanes(codes, form, int(min_of(form.group, K - k)), rows, lines);
}

// Groups begin .. end of one super group, with its lines, scales and supers.
template <bool WEIGHTED, class T>
static void pack_super(const Lanes<T> &rows, const Lanes<float> &weights, const Form &form, long begin, long end, long K,
                       uint8_t *lines, uint8_t *scales, uint16_t *supers) {
    const int parts = form.parts, groups = int(end - begin);
    vf x[LONGEST], y[LONGEST], w[WEIGHTED ? LONGEST : 1], wanted[MOST_GROUPS][2], top[2] = {};
    vi all_finite = ~vi{};
    for (int g = 0; g < groups; g++) {
        const long k = (begin + g) * form.group;
        const int filled = int(min_of(form.group, K - k));
        rows.group(k, form.group, K, x);
        if constexpr (WEIGHTED) weights.group(k, form.group, K, w);
        const vu most = largest_bits(x, form.group);
        const vi finite = (vi)(most < splat_bits(bits_of(HUGE_GROUP)));
        const vi usable = finite & (vi)(most >= splat_bits(bits_of(TINY_GROUP)));
        all_finite &= finite;
        // Scaled by powers of two, exactly, so that sums neither overflow nor underflow.
        const vu exponent = (usable ? most : splat_bits(bits_of(1.0f))) & 0x7f800000u;
        const vf down = (vf)(splat_bits(0x7f000000u) - exponent), up = (vf)exponent;
        for (int i = 0; i < form.group; i++) y[i] = usable ? times(x[i], down) : vf{};
        vf scale, minimum = {};
        if (parts == 2) fit_with_minimum<WEIGHTED>(y, w, form.group, filled, float((1 << form.bits) - 1), scale, minimum);
        else fit_symmetric<WEIGHTED>(y, w, form.group, filled, form.offset, scale);
        wanted[g][0] = times(scale, up);
        wanted[g][1] = times(minimum, up);
        for (int p = 0; p < 2; p++) top[p] = larger(magnitude_of(wanted[g][p]), top[p]);
    }
    const vf largest = splat(parts == 2 ? 255.0f : 127.0f);
    f16 stored[2][W];
    vf worth[2];
    for (int p = 0; p < parts; p++) {
        worth[p] = round_up(top[p] / largest, stored[p]);
        for (int i = 0; i < W; i++)
            if (!any_finite(stored[p][i])) all_finite[i] = 0;
    }
    for (int p = 0; p < parts; p++) {
        for (int i = 0; i < W; i++)
            if (!all_finite[i]) stored[p][i].bits = 0x7e00;
        worth[p] = all_finite ? worth[p] : vf{};
        rows.store_halves(supers + p * PANEL_ROWS, stored[p]);
    }
    for (int g = 0; g < groups; g++) {
        const long k = (begin + g) * form.group;
        vf part[2] = {};  // scale and minimum as they are stored
        for (int p = 0; p < parts; p++) {
            const vi counts = worth[p] > vf{};
            const vf exact = wanted[g][p] / (counts ? worth[p] : splat(1.0f));
            const vf byte = bounded(nearest(counts ? exact : vf{}), -largest, largest);
            rows.store_bytes(scales + (g * parts + p) * PANEL_ROWS, nearest_int(byte));
            part[p] = times(byte, worth[p]);
        }
        const vi usable = part[0] != vf{};
        const vf inverse = splat(1.0f) / (usable ? part[0] : splat(1.0f));
        const vf low = splat(float(-form.offset)), high = splat(float((1 << form.bits) - 1 - form.offset));
        rows.group(k, form.group, K, x);
        vi codes[LONGEST];
        for (int i = 0; i < form.group; i++) {
            const vf scaled = usable ? times(x[i] + part[1], inverse) : low;
            codes[i] = nearest_int(nearest(bounded(scaled, low, high)) - low);
        }
        write_lanes(codes, form, int(min_of(form.group, K - k)), rows, lines + g * (form.group * form.bits / 8) * PANEL_ROWS);
    }
}

template <class T>
static void pack_rows_of(const T *source, long stride, const float *weights, long weight_stride, const Form &form, long first,
                         long count, long K, const Blocks &to) {
    const long groups = ceil_div(K, form.group), group_bytes = form.group * form.bits / 8 * PANEL_ROWS;
    const long span = form.super_groups ? form.super_groups : 1, units = ceil_div(groups, span);
    const long begin = first / PANEL_ROWS, end = ceil_div(first + count, PANEL_ROWS);
    // Full panels, so that threads do not write to a common cache line.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_for(count *K, end - begin))
    for (long panel = begin; panel < end; panel++) {
        for (long lane = 0; lane < PANEL_ROWS; lane += W) {
            const long row = panel * PANEL_ROWS + lane, from = max_of(first, row);
            const long stop = min_of(first + count - row, W);
            if (from - row >= stop) continue;
            const Lanes<T> rows = {source + (from - first) * stride, stride, from - row, stop};
            const Lanes<float> counts = {weights ? weights + (from - first) * weight_stride : nullptr, weight_stride, from - row, stop};
            for (long u = 0; u < units; u++) {
                const long g = u * span, last = min_of(g + span, groups);
                uint8_t *lines = to.codes + (panel * groups + g) * group_bytes + 4 * lane;
                if (!form.super_groups) {
                    pack_eight(rows, form, g * form.group, K, lines, (uint16_t *)to.scales + (panel * groups + g) * PANEL_ROWS + lane);
                    continue;
                }
                uint8_t *scales = to.scales + (panel * groups + g) * form.parts * PANEL_ROWS + lane;
                uint16_t *supers = to.supers + (panel * units + u) * form.parts * PANEL_ROWS + lane;
                if (weights) pack_super<true>(rows, counts, form, g, last, K, lines, scales, supers);
                else pack_super<false>(rows, counts, form, g, last, K, lines, scales, supers);
            }
        }
    }
}

// Rows [first, first + count) of a weight from source [count, K] of the given type. weights: float32, how much an element's
// squared error counts, or null. The form: 8 bits without super groups, or at most 64 groups of at most 32 elements.
EXPORT int WINDLASS_NAME(pack_blocks)(const void *source, long stride, int type, const float *weights, long weight_stride,
                                      int bits, int group, int super_groups, int parts, int offset, long first, long count,
                                      long K, uint8_t *codes, uint8_t *scales, uint16_t *supers) {
    const Form form = {bits, group, super_groups, parts, offset};
    const Blocks to = {codes, scales, supers};
    if (super_groups > MOST_GROUPS || group > LONGEST || group % W) return 1;
    with_type(type, [&](auto *of_type) {
        pack_rows_of((decltype(of_type))source, stride, weights, weight_stride, form, first, count, K, to);
    });
    return 0;
}

}  // namespace filling
}  // namespace
