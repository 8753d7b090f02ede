// What one call of attention is asked, as the entry points take it: field by field the same as in kernels/cpu/library.py.
//
// Strides are in elements. Fields of no use to a kernel are there for those to come: see `unknown_to_the_kernels`.

#pragma once

#include <cstdint>

struct AttentionArguments {
    const void *q;                                  // [q_rows, heads, dim]; without ranges row t is token t's
    const void *keys, *values;                      // pages
    const float *key_scales, *value_scales;         // of int8 pages, else null
    const int32_t *tables;                          // [batch, table_columns]
    const int64_t *query_start;                     // [batch + 1]; null for one token per sequence
    const void *lengths;                            // [batch]
    const float *score_scale;                       // [tokens]
    const float *sinks;                             // [heads], or null
    const int64_t *range_ends;                      // [batch, ranges], or null: each token has its own row of q for all keys
    const int64_t *range_rows, *range_reaches;      // [batch, ranges]; see attention_ranges.h
    const float *slopes;                            // [heads], or null: scores lose so much for every place between query and key
    const int64_t *range_gaps;                      // [batch, ranges], with slopes: places more than there are slots between them
    void *out;                                      // [tokens, heads, value_dim]
    long q_rows, q_row, q_head;                     // rows of q, strides of q
    long num_blocks, block_size, kv_heads, dim, value_dim;
    long table_row, table_columns;
    long batch, heads, ranges;
    long window, chunk;                             // keys; 0: none
    float scale, soft_cap;                          // soft_cap 0: none
    int q_type, page_type, lengths_are_64, causal;
    long rounds;                                    // prompts may be computed with what is multiplied rounded to bfloat16
};

// Of page_type: 0 float32, 1 bfloat16, 2 float16, 3 int8 codes in panels (int8_pages.h); and rows of codes (code_rows.h), which are
// keys and values at once.
constexpr int PAGES_OF_ROWS = 4;

// Whether the call asks for what no kernel does.
static inline bool unknown_to_the_kernels(const AttentionArguments &a) {
    return (a.chunk != 0 && (a.window != 0 || !a.causal)) || (a.range_ends && (a.window != 0 || a.chunk != 0 || !a.causal)) ||
           (a.slopes && (!a.range_ends || !a.range_gaps)) ||
           (a.page_type == PAGES_OF_ROWS && (a.values != a.keys || a.value_dim != a.dim));
}

// What the entry points return, 0 for success.
constexpr int OUT_OF_MEMORY = 1, NO_SUCH_BLOCK = 2, NOT_DONE_HERE = 3, NO_SUCH_ROW = 4, KEYS_WITHOUT_RANGE = 5;
