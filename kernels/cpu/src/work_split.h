// Work distribution over rows of x and over threads.

#pragma once

#include "simd.h"
#include "thread_team.h"

namespace {

constexpr long CHUNK_BYTES = 64 << 10;   // of weight per unit, if there are enough units for all threads
constexpr long CHUNKS_PER_THREAD = 8;
constexpr long SERIAL_WORK = 1 << 15;    // multiply-adds below which a second thread does not pay

// Rows of x split as evenly as possible into tiles of a bounded number of rows.
struct Tiles {
    long rows, count;
    INLINE_MEMBER long begin(long t) const { return rows * t / count; }
    INLINE_MEMBER long size(long t) const { return begin(t + 1) - begin(t); }
};

// How many of `count` panels or rows of `bytes` bytes one chunk has.
INLINE long chunk_of(long count, long bytes) {
    return max_of(1, min_of(CHUNK_BYTES / bytes, count / (CHUNKS_PER_THREAD * most_threads())));
}

// Chunks 0 .. count distributed over threads: each takes a share of consecutive chunks, then helps with the shares of others. So a
// thread reads one long run of memory, which suits prefetching, and none waits for a thread that the system has descheduled.
struct Shares {
    static constexpr long MOST = 64;  // further threads only help
    struct alignas(64) Cursor { long next, end; };
    Cursor cursors[MOST];
    long count, shares;

    Shares(long count, long threads) : count(count), shares(min_of(threads, MOST)) {
        for (long i = 0; i < shares; i++) cursors[i] = {first(i), first(i + 1)};
    }
    INLINE_MEMBER long first(long share) const { return count * share / shares; }
    // Whether a share begins with this chunk, or all are over.
    INLINE_MEMBER bool begins_one(long chunk) const { return chunk >= count || first(ceil_div(chunk * shares, count)) == chunk; }
    // Calls f(chunk) for what this thread takes.
    template <class F> INLINE_MEMBER void take(long thread, const F &f) {
        for (long i = 0; i < shares; i++) {
            Cursor &from = cursors[(thread + i) % shares];
            for (long c; (c = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED)) < from.end;) f(c);
        }
    }
};

// Calls multiply(pass) for at most `step` rows of a product at a time, in order; the first code other than 0 ends it and is returned.
// T: of the elements of x and out.
template <class T, class P, class F> INLINE int in_passes(const P &product, long step, const F &multiply) {
    for (long m = 0; m < product.M; m += step) {
        P pass = product;
        pass.M = min_of(step, product.M - m);
        pass.x = (const T *)product.x + m * product.x_stride;
        pass.out = (T *)product.out + m * product.out_stride;
        if (const int code = multiply(pass)) return code;
    }
    return 0;
}

// x, the weight and out of a product, strides in elements. Types: 0 float32, 1 bfloat16, 2 float16; x and out are 0 or 1.
struct Linear {
    const void *x; long x_stride; int x_type;
    const void *weight; long w_stride; int w_type;  // the stride of rows; panels have none
    const void *bias; int bias_type;                // null: no bias
    void *out; long out_stride;
    long M, N, K;
};

// All rows of x by all of the weight: multiply(packed, first row of the weight, end) in chunks that hold multiples of `unit` rows.
// Every thread packs x for itself by pack(packed), into packed_bytes, which is faster than a barrier. Returns 1 when out of memory.
template <class PACK, class MULTIPLY>
INLINE int in_chunks(const Linear &p, long unit, long weight_size, long packed_bytes, const PACK &pack, const MULTIPLY &multiply) {
    const long chunk = round_up(chunk_of(p.N, p.K * weight_size), unit), chunks = ceil_div(p.N, chunk);
    const long threads = p.M * p.N * p.K < SERIAL_WORK ? 1 : min_of(chunks, most_threads()), bytes = round_up(packed_bytes, 64);
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, threads * bytes)) return 1;
    Shares shares(chunks, threads);
    on_threads(threads, [&](long thread) {
        void *packed = (char *)memory + thread * bytes;
        pack(packed);
        shares.take(thread, [&](long c) { multiply(packed, c * chunk, min_of((c + 1) * chunk, p.N)); });
    });
    free(memory);
    return 0;
}

constexpr long SERIAL_ELEMENTS = 1 << 15, SERIAL_IN_TEAM = 1 << 12;  // of other work, below which one thread is faster

INLINE long threads_for(long elements, long units) {
    return elements < (own_team() ? SERIAL_IN_TEAM : SERIAL_ELEMENTS) ? 1 : min_of(max_of(1, units), most_threads());
}

}  // namespace
