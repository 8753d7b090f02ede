// Rotation with append, and re-rotation of keys, for caches of int8 codes with one float32 scale per token and head.
//
// code = round(x / scale) with scale = largest |x| / 127, so every head uses the full range. A head of (nearly) zeros has scale 0;
// one that holds an infinity or a NaN has scale NaN, so that every result that reads it is NaN.

#pragma once

#include "int8_pages.h"
#include "recordable.h"
#include "rotary.h"
#include "simd.h"
#include "work_split.h"

namespace {

constexpr float SMALLEST_SCALE = 0x1p-100f;

// Codes of n floats; returns their scale.
INLINE float quantize(const float *x, long n, int8_t *codes) {
    vf most = {}, poison = {};
    for (long j = 0; j < n; j += W) {
        const vf value = load_part(x + j, n - j);
        most = larger(magnitude_of(value), most);
        poison += value * 0.0f;
    }
    float scale = largest(most) / 127.0f + sum(poison);
    if (!(scale >= SMALLEST_SCALE)) {
        __builtin_memset(codes, 0, n);
        return scale != scale ? scale : 0.0f;
    }
    long j = 0;
    for (; j + W <= n; j += W) *(vb_any *)(codes + j) = __builtin_convertvector(nearest_int(load(x + j) / splat(scale)), vb);
    for (; j < n; j++) codes[j] = (int8_t)(int32_t)(bits_of(x[j] / scale + ROUNDER) - bits_of(ROUNDER));
    return scale;
}

// Buffers of heads to or from the pages: floats, and codes padded to full quads.
struct HeadMemory {
    float *head;
    int8_t *codes;
    static long bytes(long dim) { return dim * long(sizeof(float)) + round_up(dim, 64); }
    HeadMemory(char *memory, long dim) : head((float *)memory), codes((int8_t *)(head + dim)) {}
};

// As rotate_and_append, into codes. Returns 1 when out of memory, 2 for a slot past num_slots, with nothing touched.
EXPORT int WINDLASS_NAME(rotate_and_append_int8)(
    void *q, long q_row, long q_head, const void *k, long k_row, long k_head, const void *v, long v_row, long v_head,
    int type, const float *cos, long cos_row, const float *sin, long sin_row, const float *q_scale, int8_t *key_pages,
    int8_t *value_pages, float *key_scales, float *value_scales, long block_size, long num_slots, const int64_t *slots,
    long tokens, long q_heads, long kv_heads, long dim, long value_dim, long half) {
    const Appended p = {q, q_row, q_head, q_scale, slots, tokens, q_heads, dim, {cos, cos_row, sin, sin_row, half}};
    if (!p.fit(num_slots)) return 2;
    const CodePages pages = {key_pages, value_pages, key_scales, value_scales, block_size, kv_heads, ceil_div(dim, QUAD), value_dim};
    const long threads = p.threads(2 * kv_heads), widest = round_up(max_of(dim, value_dim), QUAD);
    char *memory = (char *)malloc(max_of(1, threads * HeadMemory::bytes(widest)));
    if (!memory) return 1;
    with_type(type, [&](auto *element_type) {
        typedef __typeof__(*element_type) T;
        p.rotate<T>(threads, [&](long t, long thread) {
            const HeadMemory own(memory + thread * HeadMemory::bytes(widest), widest);
            const long block = slots[t] / block_size, token = slots[t] % block_size;
            for (long h = 0; h < kv_heads; h++) {
                p.angles.rotate(t, (const T *)k + t * k_row + h * k_head, own.head, dim);
                *pages.key_scale(block, h, token) = quantize(own.head, dim, own.codes);
                for (long d = dim; d < pages.quads * QUAD; d++) own.codes[d] = 0;
                pages.put_key(block, h, token, own.codes);
                copy_converted((const T *)v + t * v_row + h * v_head, own.head, value_dim);
                *pages.value_scale(block, h, token) = quantize(own.head, value_dim, own.codes);
                pages.put_value(block, h, token, own.codes);
            }
        });
    });
    free(memory);
    return 0;
}
RECORDABLE(rotate_and_append_int8)

// As rerotate_cached_keys, on codes: a key is widened, rotated and rounded once; values, and keys without pairs, are
// copied. dim: of a key with its padding. value_dim: 0 where values stay. Returns 1 when out of memory, 2 for a slot
// outside the pages, with nothing touched.
EXPORT int WINDLASS_NAME(rerotate_cached_keys_int8)(
    int8_t *key_pages, int8_t *value_pages, float *key_scales, float *value_scales, long block_size, long num_slots,
    const int64_t *sources, const int64_t *targets, long count, const float *cos, long cos_row, const float *sin,
    long sin_row, long kv_heads, long dim, long value_dim, long half) {
    if (!slots_exist(sources, targets, count, num_slots)) return 2;
    const Angles angles = {cos, cos_row, sin, sin_row, half};
    const CodePages pages = {key_pages, value_pages, key_scales, value_scales, block_size, kv_heads, ceil_div(dim, QUAD), value_dim};
    const long threads = threads_for(count * kv_heads * (dim + value_dim), count), widest = round_up(max_of(dim, value_dim), QUAD);
    char *memory = (char *)malloc(max_of(1, threads * HeadMemory::bytes(widest)));
    if (!memory) return 1;
#pragma omp parallel num_threads(threads)
    {
        const HeadMemory own(memory + omp_get_thread_num() * HeadMemory::bytes(widest), widest);
#pragma omp for schedule(static) nowait
        for (long n = 0; n < count; n++) {
            const long from = sources[n] / block_size, old = sources[n] % block_size;
            const long to = targets[n] / block_size, place = targets[n] % block_size;
            const bool moves = sources[n] != targets[n];
            for (long h = 0; h < kv_heads; h++) {
                if (!half && !moves) continue;
                float scale = *pages.key_scale(from, h, old);
                pages.take_key(from, h, old, own.codes);
                if (half) {
                    for (long d = 0; d < dim; d++) own.head[d] = widen(own.codes[d]) * scale;
                    angles.rotate(n, own.head, own.head, dim);
                    scale = quantize(own.head, dim, own.codes);
                }
                pages.put_key(to, h, place, own.codes);
                *pages.key_scale(to, h, place) = scale;
            }
            for (long h = 0; moves && value_dim && h < kv_heads; h++) {
                pages.take_value(from, h, old, own.codes);
                pages.put_value(to, h, place, own.codes);
                *pages.value_scale(to, h, place) = *pages.value_scale(from, h, old);
            }
        }
    }
    free(memory);
    return 0;
}

}  // namespace
