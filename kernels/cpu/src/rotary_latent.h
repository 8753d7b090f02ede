// Rotation with append, and re-rotation, for the int8 rows of latent attention (int8_pages.h).

#pragma once

#include "int8_pages.h"
#include "recordable.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "simd.h"
#include "work_split.h"

namespace {

// Codes and scales of n numbers, by groups.
INLINE void quantize_groups(const float *x, long n, int8_t *codes, float *scales) {
    for (long d = 0; d < n; d += ROW_GROUP) scales[d / ROW_GROUP] = quantize(x + d, min_of(ROW_GROUP, n - d), codes + d);
}

// As rotate_and_append, into codes; there are no values. Returns 1 when out of memory, 2 for a slot past num_slots, with nothing
// touched.
EXPORT int WINDLASS_NAME(rotate_and_append_rows)(void *q, long q_row, long q_head, const void *k, long k_row, long k_head, int type,
                                                 const float *cos, long cos_row, const float *sin, long sin_row,
                                                 const float *q_scale, int8_t *codes, float *scales, long num_slots,
                                                 const int64_t *slots, long tokens, long q_heads, long kv_heads, long dim,
                                                 long half) {
    const Appended p = {q, q_row, q_head, q_scale, slots, tokens, q_heads, dim, {cos, cos_row, sin, sin_row, half}};
    if (!p.fit(num_slots)) return 2;
    const long threads = p.threads(kv_heads), groups = row_groups(dim);
    float *memory = (float *)malloc(max_of(1, threads * dim) * sizeof(float));
    if (!memory) return 1;
    with_type(type, [&](auto *element_type) {
        typedef __typeof__(*element_type) T;
        p.rotate<T>(threads, [&](long t, long thread) {
            float *row = memory + thread * dim;
            for (long h = 0; h < kv_heads; h++) {
                const long entry = slots[t] * kv_heads + h;
                p.angles.rotate(t, (const T *)k + t * k_row + h * k_head, row, dim);
                quantize_groups(row, dim, codes + entry * dim, scales + entry * groups);
            }
        });
    });
    free(memory);
    return 0;
}
RECORDABLE(rotate_and_append_rows)

// As rerotate_cached_keys: the groups that hold rotated numbers are widened, rotated and rounded once, the others are copied.
// Returns 1 when out of memory, 2 for a slot outside the pages, with nothing touched.
EXPORT int WINDLASS_NAME(rerotate_cached_rows)(int8_t *codes, float *scales, long num_slots, const int64_t *sources,
                                               const int64_t *targets, long count, const float *cos, long cos_row,
                                               const float *sin, long sin_row, long kv_heads, long dim, long half) {
    if (!slots_exist(sources, targets, count, num_slots)) return 2;
    const Angles angles = {cos, cos_row, sin, sin_row, half};
    const long groups = row_groups(dim), rotated = row_groups(2 * half), rotated_dims = min_of(dim, rotated * ROW_GROUP);
    const long threads = threads_for(count * kv_heads * dim, count);
    float *memory = (float *)malloc(max_of(1, threads * rotated_dims) * sizeof(float));
    if (!memory) return 1;
    Units units(count, max_of(1, ceil_div(count, threads)));
    on_threads(threads, [&](long thread) {
        float *row = memory + thread * rotated_dims;
        units.take([&](long n) {
            for (long h = 0; h < kv_heads; h++) {
                const long from = sources[n] * kv_heads + h, to = targets[n] * kv_heads + h;
                const int8_t *source = codes + from * dim;
                const float *source_scales = scales + from * groups;
                int8_t *target = codes + to * dim;
                float *target_scales = scales + to * groups;
                if (from != to) {
                    __builtin_memcpy(target + rotated_dims, source + rotated_dims, dim - rotated_dims);
                    __builtin_memcpy(target_scales + rotated, source_scales + rotated, (groups - rotated) * sizeof(float));
                }
                if (!half) continue;
                copy_converted(CodeRow{source, source_scales, 0}, row, rotated_dims);
                angles.rotate(n, row, row, rotated_dims);
                quantize_groups(row, rotated_dims, target, target_scales);
            }
        });
    });
    free(memory);
    return 0;
}

}  // namespace
