// Calls of the kernels above from a list, so that a step that has been recorded takes one call instead of dozens.

#pragma once

#include <cstdint>

#include "attention_rows.h"
#include "block_linear.h"
#include "block_widen.h"
#include "delta_rule.h"
#include "elementwise.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "low_rank.h"
#include "names.h"
#include "panels.h"
#include "pointwise.h"
#include "ranks.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "rotary_rows.h"
#include "short_convolution.h"
#include "simd.h"
#include "state_space.h"
#include "step_rows.h"
#include "team.h"

namespace {

struct Call {
    int64_t kind;        // in the order of the switch below
    void *function;      // of this kind's type: sets with instructions of their own bring other functions
    const char *arguments;  // 8 bytes each: an integer, an address, or a float64 for a float
};

// linear_blocks_rounded and linear_panels_rounded, which not every set of instructions has.
typedef int BlocksRounded(const void *, long, int, const uint8_t *, const void *, const void *, int, int, int, int, int, const float *, int,
                          void *, long, long, long, long);
typedef int PanelsRounded(const void *, long, const void *, const float *, int, void *, long, long, long, long);

template <class T> struct Argument {  // integers and addresses
    static INLINE_MEMBER T from(const char *at) {
        int64_t value;
        __builtin_memcpy(&value, at, 8);
        return (T)value;
    }
};
template <> struct Argument<float> {
    static INLINE_MEMBER float from(const char *at) {
        double value;
        __builtin_memcpy(&value, at, 8);
        return float(value);
    }
};

template <long... I> struct Indices {};
template <long N, long... I> struct IndicesTo : IndicesTo<N - 1, N - 1, I...> {};
template <long... I> struct IndicesTo<0, I...> { typedef Indices<I...> type; };

template <class... A, long... I> INLINE int call_with(int (*function)(A...), const char *arguments, Indices<I...>) {
    return function(Argument<A>::from(arguments + 8 * I)...);
}
// `like` gives the type only.
template <class... A> INLINE int make(const Call &call, int (*like)(A...)) {
    return call_with((decltype(like))call.function, call.arguments, typename IndicesTo<sizeof...(A)>::type());
}

static int make_all(const void *calls, long count) {
    for (long i = 0; i < count; i++) {
        const Call &call = ((const Call *)calls)[i];
        int code = 1;
        switch (call.kind) {
            case 0: code = make(call, WINDLASS_NAME(linear)); break;
            case 1: code = make(call, blocks::WINDLASS_NAME(linear_blocks)); break;
            case 2: code = make(call, WINDLASS_NAME(rms_norm)); break;
            case 3: code = make(call, WINDLASS_NAME(gated_activation)); break;
            case 4: code = make(call, WINDLASS_NAME(soft_cap)); break;
            case 5: code = make(call, WINDLASS_NAME(rotate_and_append)); break;
            case 6: code = make(call, WINDLASS_NAME(rotate_and_append_int8)); break;
            case 7: code = make(call, WINDLASS_NAME(paged_attention_decode)); break;
            case 8: code = make(call, WINDLASS_NAME(embed_rows)); break;
            case 9: code = make(call, panels::WINDLASS_NAME(linear_panels)); break;
            case 10: code = make(call, blocks::WINDLASS_NAME(widen_blocks)); break;
            case 11: code = make(call, WINDLASS_NAME(rotate_queries)); break;
            case 12: code = make(call, WINDLASS_NAME(row_maxima)); break;
            case 13: code = make(call, low_rank::WINDLASS_NAME(add_low_rank)); break;
            case 14: code = make(call, latent::WINDLASS_NAME(latent_queries)); break;
            case 15: code = make(call, latent::WINDLASS_NAME(latent_values)); break;
            case 16: code = make(call, latent::WINDLASS_NAME(rms_norm_in_place)); break;
            case 17: code = make(call, experts::WINDLASS_NAME(route_experts)); break;
            case 18: code = make(call, experts::WINDLASS_NAME(linear_of_experts)); break;
            case 19: code = make(call, experts::WINDLASS_NAME(sum_of_experts)); break;
            case 20: code = make(call, WINDLASS_NAME(clamped_glu)); break;
            case 21: code = make(call, WINDLASS_NAME(gate_by_sigmoid)); break;
            case 22: code = make(call, WINDLASS_NAME(layer_norm)); break;
            case 23: code = make(call, WINDLASS_NAME(activate)); break;
            case 24: code = make(call, WINDLASS_NAME(xielu)); break;
            case 25: code = make(call, WINDLASS_NAME(clip)); break;
            case 26: code = make(call, WINDLASS_NAME(scale_rows)); break;
            case 27: code = make(call, WINDLASS_NAME(sum_over_ranks)); break;
            case 28: code = make(call, WINDLASS_NAME(gather_columns)); break;
            case 29: code = make(call, (BlocksRounded *)nullptr); break;
            case 30: code = make(call, (PanelsRounded *)nullptr); break;
            case 31: code = make(call, WINDLASS_NAME(scale_columns)); break;
            case 32: code = make(call, WINDLASS_NAME(rotate_and_append_rows)); break;
            case 33: code = make(call, WINDLASS_NAME(multiply)); break;
            case 34: code = make(call, convolution::WINDLASS_NAME(short_convolution)); break;
            case 35: code = make(call, delta_rule::WINDLASS_NAME(gated_delta_rule)); break;
            case 36: code = make(call, state_space::WINDLASS_NAME(state_space)); break;
        }
        if (code) return code;
    }
    return 0;
}

// Makes the calls in order, by one team of threads. Returns 0, or the first code that is not.
EXPORT int WINDLASS_NAME(repeat_calls)(const void *calls, long count) {
    int code = 0;
    as_team([&] { code = make_all(calls, count); });
    return code;
}

// Makes the calls up to `passes` times, by one team of threads: what the largest logits of one pass name is what the next one
// computes. ids, values [rows]: those that the calls form. The rest as of `fill_rows` and `rotary_angles`, which put the rows in
// their next places; blocks: columns of the tables that all passes need. It ends behind a pass that draws one of the ids in
// stops[ends[r - 1], ends[r]) for a row r, and before one that fails or has no finite largest logit. drawn: [passes][rows].
// made: how many passes count.
EXPORT int WINDLASS_NAME(draw_passes)(const void *calls, long count, long passes, int64_t *said, long rows,
                                      const int32_t *tables, long group_stride, long row_stride, long groups, long blocks,
                                      long block_size, int64_t *positions, int64_t *lengths, int64_t *slots,
                                      int32_t *own_tables, long own_columns, const double *inv_freq, long rotary_groups,
                                      long table_rows, long half, float *cos, float *sin, const int64_t *ids,
                                      const float *values, const int64_t *stops, const int64_t *ends, int64_t *drawn,
                                      int64_t *made) {
    int64_t *index = said + rows, *rotary = said + 3 * rows;
    *made = 0;
    as_team([&] {
        for (long pass = 0; pass < passes; pass++) {
            if (make_all(calls, count)) return;
            bool ended = false;
            for (long r = 0; r < rows; r++) {
                if (!(values[r] * 0.0f == 0.0f)) return;
                drawn[pass * rows + r] = ids[r];
                for (long s = r ? ends[r - 1] : 0; s < ends[r]; s++) ended |= stops[s] == ids[r];
            }
            *made = pass + 1;
            if (ended || pass + 1 == passes) return;
            for (long r = 0; r < rows; r++) said[r] = ids[r], index[r]++;
            if (WINDLASS_NAME(fill_rows)(said, rows, tables, group_stride, row_stride, groups, blocks, block_size, positions,
                                         lengths, slots, own_tables, own_columns))
                return;
            if (WINDLASS_NAME(rotary_angles)(inv_freq, rotary_groups, table_rows, half, rotary, positions, rows, cos, sin))
                return;
        }
    });
    return 0;
}

}  // namespace
