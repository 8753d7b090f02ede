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

// How many of `count` panels or rows, of so many bytes, one chunk has.
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

constexpr long SERIAL_ELEMENTS = 1 << 15, SERIAL_IN_TEAM = 1 << 12;  // of other work, below which one thread is faster

INLINE long threads_for(long elements, long units) {
    return elements < (own_team() ? SERIAL_IN_TEAM : SERIAL_ELEMENTS) ? 1 : min_of(max_of(1, units), most_threads());
}

}  // namespace
