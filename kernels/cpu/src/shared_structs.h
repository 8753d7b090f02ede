// Structs that kernels/cpu/library.py declares too. The library reports their sizes, and is refused where they differ.

#pragma once

#include "system_headers.h"

namespace {

// One row to sample. See sampling.h.
struct SamplingRow {
    int64_t row;                                       // of the logits
    const int64_t *allowed; int64_t num_allowed;       // null: all tokens
    const int64_t *forbidden; int64_t num_forbidden;
    const int64_t *biased; const float *bias; int64_t num_biased;
    const int64_t *counted; const float *in_output; int64_t num_counted;  // tokens of the text, and their counts in the output
    const int64_t *decreased; const float *decrease; int64_t num_decreased;
    const uint32_t *mask;                              // a bit per token, set if it is allowed; null: all are
    float repetition, frequency, presence;
    float temperature;                                 // 0 or less: the first of the largest
    float floor;                                       // log(min_p), or the lowest float
    int32_t status;                                    // result: 0 sampled, 1 bad logits, 2 no candidate left, 3 an id out of range
    int64_t top_k;                                     // 0: off
    double top_p, typical_p;                           // 1: off
    double exclude_from;                               // 1: off
    double uniform;                                    // [0, 1)
    int64_t token;                                     // result
};
static_assert(sizeof(void *) != 8 || sizeof(SamplingRow) == 192, "no padding but what ctypes expects");

// See low_rank.h. Types: 0 float32, 1 bfloat16, 2 float16.
struct LowRankPart {  // of columns first .. first + columns of the product, by numbers rank_first .. rank_first + rank of x A^T
    const void *up;   // [panels][rank][32]
    int64_t type, first, columns, rank_first, rank;
    double scale;
};
struct LowRankUpdate {
    const void *down;  // [panels][strips of K][4][16]
    int64_t type, rank, num_parts;
    const LowRankPart *parts;
};

// Rows first .. first + columns of an expert's weight, stored together; see experts.h.
struct ExpertPart {
    const void *data, *scales, *supers, *bias;  // of blocks: codes, scales and scales of super groups; bias may be null
    int64_t kind;                               // 0 rows, 1 panels, 2 blocks
    int64_t type, stride;                       // of rows and panels; of rows
    int64_t bits, group, super_groups, minimum, offset;  // of blocks
    int64_t bias_type, first, columns;
};

// Exported functions of the selected instruction set.
struct ExpertProducts {
    int (*linear)(const void *, long, int, const void *, long, int, const void *, int, void *, long, long, long, long);
    int (*linear_panels)(const void *, long, int, const void *, int, const void *, int, void *, long, long, long, long);
    int (*linear_blocks)(const float *, long, const uint8_t *, const void *, const void *, int, int, int, int, int,
                         const float *, int, float *, long, long, long, long);  // -1: no activation
    // By AMX, or null, also with -1; and the smallest number of rows of an expert for them. Panels and their rows are bfloat16.
    int (*linear_blocks_amx)(const void *, long, int, const uint8_t *, const void *, const void *, int, int, int, int, int,
                                 const float *, int, void *, long, long, long, long);
    int (*linear_panels_amx)(const void *, long, const void *, const float *, int, void *, long, long, long, long);
    int64_t amx_min_rows_blocks, amx_min_rows_panels;
};

// State of one rank of a group, in its own memory; see collectives.h. round: of the last exchange. bounds: first column of each rank, and the end.
struct RankGroup {
    char *memory;
    const int64_t *bounds;
    int64_t rank, ranks, slot_bytes, round;
};

// One call of a recorded step; see recorded_calls.h.
struct RecordedCall {
    int (*run)(const char *);  // made by RECORDABLE
    const char *arguments;     // 8 bytes each: an integer, an address, or a float64 for a float
};

}  // namespace
