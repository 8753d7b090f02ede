// Runs a recorded list of kernel calls, so that a recorded step takes one call instead of dozens.

#pragma once

#include "rotary.h"
#include "shared_structs.h"
#include "simd.h"
#include "step_buffers.h"
#include "thread_team.h"

namespace {

static int run_calls(const void *calls, long count) {
    for (long i = 0; i < count; i++) {
        const RecordedCall &call = ((const RecordedCall *)calls)[i];
        if (const int code = call.run(call.arguments)) return code;
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
