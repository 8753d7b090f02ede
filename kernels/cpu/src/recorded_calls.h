// Runs a recorded list of kernel calls, so that a recorded step takes one call instead of dozens.

#pragma once

#include "attention_decode_entry.h"
#include "block_dequantize.h"
#include "block_linear.h"
#include "collectives.h"
#include "elementwise.h"
#include "experts.h"
#include "gated_delta_rule.h"
#include "latent.h"
#include "linear.h"
#include "low_rank.h"
#include "panels.h"
#include "pointwise.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "rotary_latent.h"
#include "short_convolution.h"
#include "simd.h"
#include "state_space.h"
#include "step_buffers.h"
#include "thread_team.h"

namespace {

struct RecordedCall {
    int64_t kind;        // in the order of the switch below
    void *function;      // of the type of this kind; which function depends on the instruction set
    const char *arguments;  // 8 bytes each: an integer, an address, or a float64 for a float
};

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

template <class... A, size_t... I> INLINE int call_with(int (*function)(A...), const char *arguments, std::index_sequence<I...>) {
    return function(Argument<A>::from(arguments + 8 * I)...);
}
// `like` gives the type only.
template <class... A> INLINE int run_call(const RecordedCall &call, int (*like)(A...)) {
    return call_with((decltype(like))call.function, call.arguments, std::index_sequence_for<A...>());
}

static int run_calls(const void *calls, long count) {
    for (long i = 0; i < count; i++) {
        const RecordedCall &call = ((const RecordedCall *)calls)[i];
        constexpr ExpertProducts TYPES = {};  // of functions that not every instruction set has
        int code = 1;
        switch (call.kind) {
            case 0: code = run_call(call, WINDLASS_NAME(linear)); break;
            case 1: code = run_call(call, blocks::WINDLASS_NAME(linear_blocks)); break;
            case 2: code = run_call(call, WINDLASS_NAME(rms_norm)); break;
            case 3: code = run_call(call, WINDLASS_NAME(gated_activation)); break;
            case 4: code = run_call(call, WINDLASS_NAME(soft_cap)); break;
            case 5: code = run_call(call, WINDLASS_NAME(rotate_and_append)); break;
            case 6: code = run_call(call, WINDLASS_NAME(rotate_and_append_int8)); break;
            case 7: code = run_call(call, WINDLASS_NAME(paged_attention_decode)); break;
            case 8: code = run_call(call, WINDLASS_NAME(embed_rows)); break;
            case 9: code = run_call(call, panels::WINDLASS_NAME(linear_panels)); break;
            case 10: code = run_call(call, blocks::WINDLASS_NAME(dequantize_blocks)); break;
            case 11: code = run_call(call, WINDLASS_NAME(rotate_queries)); break;
            case 12: code = run_call(call, WINDLASS_NAME(row_maxima)); break;
            case 13: code = run_call(call, low_rank::WINDLASS_NAME(add_low_rank)); break;
            case 14: code = run_call(call, latent::WINDLASS_NAME(latent_queries)); break;
            case 15: code = run_call(call, latent::WINDLASS_NAME(latent_values)); break;
            case 16: code = run_call(call, latent::WINDLASS_NAME(rms_norm_in_place)); break;
            case 17: code = run_call(call, experts::WINDLASS_NAME(route_experts)); break;
            case 18: code = run_call(call, experts::WINDLASS_NAME(linear_of_experts)); break;
            case 19: code = run_call(call, experts::WINDLASS_NAME(sum_of_experts)); break;
            case 20: code = run_call(call, WINDLASS_NAME(clamped_glu)); break;
            case 21: code = run_call(call, WINDLASS_NAME(gate_by_sigmoid)); break;
            case 22: code = run_call(call, WINDLASS_NAME(layer_norm)); break;
            case 23: code = run_call(call, WINDLASS_NAME(activate)); break;
            case 24: code = run_call(call, WINDLASS_NAME(xielu)); break;
            case 25: code = run_call(call, WINDLASS_NAME(clip)); break;
            case 26: code = run_call(call, WINDLASS_NAME(scale_rows)); break;
            case 27: code = run_call(call, WINDLASS_NAME(all_reduce)); break;
            case 28: code = run_call(call, WINDLASS_NAME(gather_columns)); break;
            case 29: code = run_call(call, TYPES.linear_blocks_amx); break;
            case 30: code = run_call(call, TYPES.linear_panels_amx); break;
            case 31: code = run_call(call, WINDLASS_NAME(scale_columns)); break;
            case 32: code = run_call(call, WINDLASS_NAME(rotate_and_append_rows)); break;
            case 33: code = run_call(call, WINDLASS_NAME(multiply)); break;
            case 34: code = run_call(call, convolution::WINDLASS_NAME(short_convolution)); break;
            case 35: code = run_call(call, delta_rule::WINDLASS_NAME(gated_delta_rule)); break;
            case 36: code = run_call(call, state_space::WINDLASS_NAME(state_space)); break;
        }
        if (code) return code;
    }
    return 0;
}

// Runs the calls in order, by one team of threads. Returns 0, or the first error code.
EXPORT int WINDLASS_NAME(repeat_calls)(const void *calls, long count) {
    int code = 0;
    as_team([&] { code = run_calls(calls, count); });
    return code;
}

// Greedy multi-step decoding: runs the calls up to `passes` times, by one team of threads. The tokens with the largest logits of one
// pass are the input of the next. ids, values [rows]: written by the calls. Other arguments as in `fill_step_buffers` and
// `rotary_angles`, which advance the rows; blocks: table columns that all passes need. Ends after a pass that yields an id in
// stops[ends[r - 1], ends[r]) for a row r, and before one that fails or has no finite largest logit. drawn: [passes][rows].
// made: number of valid passes.
EXPORT int WINDLASS_NAME(run_decode_steps)(const void *calls, long count, long passes, int64_t *metadata, long rows,
                                      const int32_t *tables, long group_stride, long row_stride, long groups, long blocks,
                                      long block_size, int64_t *positions, int64_t *lengths, int64_t *slots,
                                      int32_t *own_tables, long own_columns, const double *inv_freq, long rotary_groups,
                                      long table_rows, long half, float *cos, float *sin, const int64_t *ids,
                                      const float *values, const int64_t *stops, const int64_t *ends, int64_t *drawn,
                                      int64_t *made) {
    int64_t *index = metadata + rows, *rotary = metadata + 3 * rows;
    *made = 0;
    as_team([&] {
        for (long pass = 0; pass < passes; pass++) {
            if (run_calls(calls, count)) return;
            bool ended = false;
            for (long r = 0; r < rows; r++) {
                if (!(values[r] * 0.0f == 0.0f)) return;
                drawn[pass * rows + r] = ids[r];
                for (long s = r ? ends[r - 1] : 0; s < ends[r]; s++) ended |= stops[s] == ids[r];
            }
            *made = pass + 1;
            if (ended || pass + 1 == passes) return;
            for (long r = 0; r < rows; r++) metadata[r] = ids[r], index[r]++;
            if (WINDLASS_NAME(fill_step_buffers)(metadata, rows, tables, group_stride, row_stride, groups, blocks, block_size, positions,
                                         lengths, slots, own_tables, own_columns))
                return;
            if (WINDLASS_NAME(rotary_angles)(inv_freq, rotary_groups, table_rows, half, rotary, positions, rows, cos, sin))
                return;
        }
    });
    return 0;
}

}  // namespace
