// Arguments of one attention call, as the entry points take them. This list is the only description of the fields: it generates the
// struct, and the table of names, types and offsets (isa_generic.cpp) from which kernels/cpu/library.py packs a call.
//
// Strides are in elements; addresses without a value are null. Combinations that no kernel computes: see `is_unsupported`.

#pragma once

#include "system_headers.h"

#define WINDLASS_ATTENTION_FIELDS(F) \
    F(const void *, q)                 /* [q_rows, heads, dim]; without ranges row t belongs to token t */ \
    F(const void *, keys)              /* pages */ \
    F(const void *, values)            /* pages */ \
    F(const float *, key_scales)       /* of int8 pages, else null */ \
    F(const float *, value_scales)     /* of int8 pages, else null */ \
    F(const int32_t *, tables)         /* [batch, table_columns] */ \
    F(const int64_t *, query_start)    /* [batch + 1]; null for one token per sequence */ \
    F(const void *, lengths)           /* [batch] int32 or int64 */ \
    F(const float *, score_scale)      /* [tokens] */ \
    F(const float *, sinks)            /* [heads], or null */ \
    F(const int64_t *, range_ends)     /* [batch, ranges], or null: each token has one row of q for all keys */ \
    F(const int64_t *, range_rows)     /* [batch, ranges]; see attention_key_ranges.h */ \
    F(const int64_t *, range_reaches)  /* [batch, ranges]; see attention_key_ranges.h */ \
    F(const float *, slopes)           /* [heads], or null: a score loses slope * distance (ALiBi) */ \
    F(const int64_t *, range_gaps)     /* [batch, ranges], with slopes: distance = slots between query and key + gap */ \
    F(void *, out)                     /* [tokens, heads, value_dim] */ \
    F(long, q_rows)                    /* rows of q */ \
    F(long, q_row)                     /* row stride of q */ \
    F(long, q_head)                    /* head stride of q */ \
    F(long, num_blocks) \
    F(long, block_size) \
    F(long, kv_heads) \
    F(long, dim)                       /* of a query and key */ \
    F(long, value_dim) \
    F(long, table_row)                 /* row stride of tables */ \
    F(long, table_columns) \
    F(long, batch)                     /* sequences */ \
    F(long, heads)                     /* of queries */ \
    F(long, ranges)                    /* per sequence */ \
    F(long, window)                    /* keys; 0: none */ \
    F(long, chunk)                     /* keys; 0: none */ \
    F(float, scale) \
    F(float, soft_cap)                 /* 0: none */ \
    F(int, q_type)                     /* 0 float32, 1 bfloat16, 2 float16 */ \
    F(int, page_type)                  /* as q_type; 3 int8 codes in panels; LATENT_PAGES */ \
    F(int, int64_lengths) \
    F(int, causal) \
    F(long, bf16_products)             /* prefill may round the operands of its products to bfloat16 */

struct AttentionArguments {
#define WINDLASS_FIELD(type, name) type name;
    WINDLASS_ATTENTION_FIELDS(WINDLASS_FIELD)
#undef WINDLASS_FIELD
};

// page_type of rows of int8 codes (latent attention, int8_pages.h): a row is key and value at once.
constexpr int LATENT_PAGES = 4;

// Whether no kernel computes this combination of arguments.
static inline bool is_unsupported(const AttentionArguments &a) {
    return (a.chunk != 0 && (a.window != 0 || !a.causal)) || (a.range_ends && (a.window != 0 || a.chunk != 0 || !a.causal)) ||
           (a.slopes && (!a.range_ends || !a.range_gaps)) ||
           (a.page_type == LATENT_PAGES && (a.values != a.keys || a.value_dim != a.dim));
}

// What the entry points return, 0 for success.
constexpr int OUT_OF_MEMORY = 1, NO_SUCH_BLOCK = 2, UNSUPPORTED_CALL = 3, NO_SUCH_ROW = 4, RANGES_TOO_SHORT = 5;
