// Packs a block's keys (transposed) and values into panels as wide as a register tile, for products with many rows.

#pragma once

#include "attention_decode.h"
#include "bf16_dot.h"
#include "int8_pages.h"
#include "simd.h"

namespace {

constexpr long PANEL = 2 * W;     // columns of a register tile
#if defined(WINDLASS_AMX)
constexpr long BLOCK_KEYS = 256;  // AMX has a higher cost per block than vector code
#else
constexpr long BLOCK_KEYS = 128;  // a multiple of PANEL
#endif

struct Prefill : Operands {
    using Operands::Operands;

    INLINE_MEMBER long queries(long b) const { return query_start[b + 1] - query_start[b]; }
};

// Keys and values of a block's tokens: addresses, or rows of codes, which are converted to floats while packing.
template <class T> struct Block {
    static constexpr bool LATENT = std::is_same<T, row_code>::value;
    typename std::conditional<LATENT, CodeRow, const T *>::type keys[BLOCK_KEYS], values[BLOCK_KEYS];

    // Tokens [skip, there) of the block that begins at key `start`.
    void find(const Prefill &p, const int32_t *table, long head, long start, long skip, long there) {
        for (long j = skip; j < there; j++) {
            const long at = start + j, slot = (long)table[at / p.block_size] * p.block_size + at % p.block_size;
            const long entry = slot * p.kv_heads + head;
            if constexpr (LATENT) {
                keys[j] = values[j] = p.code_row(entry);
            } else {
                keys[j] = (const T *)p.keys + entry * p.dim;
                values[j] = (const T *)p.values + entry * p.value_dim;
            }
        }
    }
};
template <> struct Block<int8_t> : CodePanels<BLOCK_KEYS / PANEL_TOKENS> {
    void find(const Prefill &p, const int32_t *table, long head, long start, long skip, long there) {
        for (long i = skip / PANEL_TOKENS; i < ceil_div(there, PANEL_TOKENS); i++)
            find_panel(i, p.codes(), table, head, start + i * PANEL_TOKENS);
    }
};

// Zeros where the panels of keys [begin, end) hold whole vectors before or after those that pack_keys fills. depth: of N.
template <class N> static NOINLINE void clear_edges(long begin, long end, long depth, N *packed) {
    static_assert(sizeof(N) == sizeof(float));
    const auto clear = [&](long from) {
        for (long d = 0; d < depth; d++) store((float *)packed + from + d * PANEL, vf{});
    };
    if (end % PANEL && end % PANEL <= W) clear(end / PANEL * PANEL * depth + W);  // the last panel's second half
    if (begin % PANEL >= W) clear(begin / PANEL * PANEL * depth);                 // the first panel's first half
}

// As many neighbouring elements of a row as W lanes of N hold, as bits; and the last ones of a row.
template <class N, class ROW> INLINE vf load_lanes(const ROW &row) {
    if constexpr (NUMBERS<N> == 1) return load(row);
    else {
        pair both[W];
        store_neighbours(both, load(row), load(row + W));
        return (vf)load(both);
    }
}
template <class ROW> INLINE void place_last(const ROW &row, long d, long, float &target) { target = widen(row[d]); }
template <class ROW> INLINE void place_last(const ROW &row, long d, long dim, pair &target) {
    target = paired(widen(row[2 * d]), 2 * d + 1 < dim ? widen(row[2 * d + 1]) : 0.0f);
}

// packed[panel][d][key of the panel] of keys [begin, end) of a block; the other keys of their panels are zeros.
template <class N, class T>
static NOINLINE void pack_keys(const Block<T> &block, long begin, long end, long dim, N *packed) {
    constexpr long STEP = NUMBERS<N>;
    const long depth = ceil_div(dim, STEP);
    for (long j = begin / W * W; j < end; j += W) {
        N *target = packed + j / PANEL * PANEL * depth + j % PANEL;
        long d = 0;
        if (j >= begin && j + W <= end)
            for (; (d + W) * STEP <= dim; d += W) {
                vf rows[W];
                for (int i = 0; i < W; i++) rows[i] = load_lanes<N>(block.keys[j + i] + d * STEP);
                transpose(rows);
                for (int i = 0; i < W; i++) store((float *)target + (d + i) * PANEL, rows[i]);
            }
        for (; d < depth; d++)
            for (long i = 0; i < W; i++) {
                N &last = target[d * PANEL + i];
                if (j + i >= begin && j + i < end) place_last(block.keys[j + i], d, dim, last);
                else last = N{};
            }
    }
    clear_edges(begin, end, depth, packed);
}
static NOINLINE void pack_keys(const Block<int8_t> &block, long begin, long end, long dim, float *packed) {
    for (long j = begin / W * W; j < end; j += W) {
        float *target = packed + j / PANEL * PANEL * dim + j % PANEL;
        const int8_t *codes = block.keys[j / PANEL_TOKENS] + j % PANEL_TOKENS * QUAD;
        vf scale = load(block.key_scales[j / PANEL_TOKENS] + j % PANEL_TOKENS);  // of tokens outside anything, NaN too
        const vi lanes = lane_numbers() + int32_t(j);
        scale = (lanes >= int32_t(begin)) & (lanes < int32_t(end)) ? scale : vf{};
        for (long d = 0; d < dim; d += QUAD, codes += PIECE) {
            const vi quads = load_quads(codes);
            for (int e = 0; e < QUAD && d + e < dim; e++) store(target + (d + e) * PANEL, quad_element(quads, e) * scale);
        }
    }
    clear_edges(begin, end, dim, packed);
}

// packed[panel][key][dim of the panel] of keys [begin, end) of a block and zeros for the other keys of their panels.
template <class N, class T>
static NOINLINE void pack_values(const Block<T> &block, long begin, long end, long dim, N *packed) {
    constexpr long STEP = NUMBERS<N>;
    const long first = begin / PANEL * PANEL, last = round_up(end, PANEL);
    for (long j = first; j < last; j += STEP) {
        N *target = packed + j / STEP * PANEL;
        for (long d = 0; d < dim; d += PANEL, target += BLOCK_KEYS / STEP * PANEL)
            for (long half = 0; half < PANEL; half += W) {
                const long rest = dim - d - half;
                const auto row = [&](long at) {
                    if (at < begin || at >= end || rest <= 0) return vf{};
                    return load_part(block.values[at] + d + half, rest);
                };
                if constexpr (STEP == 1) store(target + half, row(j));
                else store((float *)target + half, (vf)paired(row(j), row(j + 1)));
            }
    }
}
static NOINLINE void pack_values(const Block<int8_t> &block, long begin, long end, long dim, float *packed) {
    const long first = begin / PANEL * PANEL, last = round_up(end, PANEL);
    for (long j = first; j < last; j += QUAD) {
        const bool any = j + QUAD > begin && j < end;
        const int8_t *codes = any ? block.values[j / PANEL_TOKENS] + j % PANEL_TOKENS * dim : nullptr;
        vf scale[QUAD];
        for (int e = 0; e < QUAD; e++)
            scale[e] = j + e >= begin && j + e < end
                           ? splat(block.value_scales[j / PANEL_TOKENS][(j + e) % PANEL_TOKENS]) : vf{};
        float *target = packed + j * PANEL;
        for (long d = 0; d < dim; d += PANEL, target += BLOCK_KEYS * PANEL)
            for (long half = 0; half < PANEL; half += W) {
                const long at = d + half, rest = dim - at;
                const vi quads = !any || rest <= 0 ? vi{} : rest >= W ? load_quads(codes + at * QUAD)
                                                                      : load_some_quads(codes + at * QUAD, rest);
                for (int e = 0; e < QUAD; e++) store(target + e * PANEL + half, quad_element(quads, e) * scale[e]);
            }
    }
}

}  // namespace
