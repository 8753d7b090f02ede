// Collectives of a rank group through shared memory: all-reduce, and gathering columns on the first rank.
//
// The memory begins with a page of lines, one per rank and one more, followed by two slots per rank. A rank copies its data into
// its slot, marks its line and waits until all other lines are marked. The two slots alternate: a rank that has seen all others in
// round n knows that they have read everything of round n - 1, and may overwrite it. Every rank forms sums in the order of the
// ranks, so that all have the same bits.

#pragma once

#include "recordable.h"
#include "shared_structs.h"
#include "simd.h"
#include "thread_team.h"
#include "work_split.h"

namespace {

namespace ranks {

// Sleeps while the word has this value, for some milliseconds at most.
INLINE void sleep_on(uint32_t *word, uint32_t value) {
#if defined(__linux__)
    const struct timespec most = {0, 20000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}
// Wakes the sleepers.
INLINE void wake_all(uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

constexpr long HEADER = 4096;
constexpr long SPINS = 1 << 11;  // about ten microseconds; then the core is yielded
constexpr int RANK_ENDED = 3;          // a rank has ended

struct alignas(64) Line { uint32_t round, sleeps; };

INLINE Line *lines_of(const RankGroup &group) { return (Line *)group.memory; }
INLINE char *slot_of(const RankGroup &group, long rank) {
    return group.memory + HEADER + ((group.round & 1) * group.ranks + rank) * group.slot_bytes;
}

// Marks the slot of this rank as full and waits for the others. False if the word of the last line is set (a rank has ended).
static bool wait_for_ranks(const RankGroup &group) {
    Line *lines = lines_of(group), &own = lines[group.rank];
    const uint32_t round = uint32_t(group.round);
    __atomic_store_n(&own.round, round, __ATOMIC_SEQ_CST);
    bool sleeps = false;
    for (long r = 0; r < group.ranks; r++) sleeps |= r != group.rank && __atomic_load_n(&lines[r].sleeps, __ATOMIC_SEQ_CST);
    if (sleeps) wake_all(&own.round);
    for (long r = 0; r < group.ranks; r++) {
        for (long turns = 0; r != group.rank; turns++) {
            const uint32_t there = __atomic_load_n(&lines[r].round, __ATOMIC_ACQUIRE);
            if (int32_t(there - round) >= 0) break;
            if (__atomic_load_n(&lines[group.ranks].round, __ATOMIC_RELAXED)) return false;
            if (turns < SPINS) {
                relax();
                continue;
            }
            __atomic_store_n(&own.sleeps, 1, __ATOMIC_SEQ_CST);
            const uint32_t still = __atomic_load_n(&lines[r].round, __ATOMIC_SEQ_CST);
            if (int32_t(still - round) < 0) sleep_on(&lines[r].round, still);
            __atomic_store_n(&own.sleeps, 0, __ATOMIC_RELAXED);
        }
    }
    return true;
}

}  // namespace ranks

// Replaces x [count] by the sum over all ranks, in float32 in their order, rounded once. Returns 3 if a rank has ended.
EXPORT int WINDLASS_NAME(all_reduce)(void *of, void *x, int type, long count) {
    RankGroup &group = *(RankGroup *)of;
    int code = 0;
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
        const long size = sizeof(*element), piece = group.slot_bytes / size;
        for (long first = 0; first < count && !code; first += piece) {
            const long n = min_of(piece, count - first);
            auto *own = (T)((char *)x + first * size);
            group.round++;
            __builtin_memcpy(ranks::slot_of(group, group.rank), own, n * size);
            if (!ranks::wait_for_ranks(group)) {
                code = ranks::RANK_ENDED;
                return;
            }
            const T start = (T)ranks::slot_of(group, 0);
            const long step = group.slot_bytes / size;
            long i = 0;
            for (; i + W <= n; i += W) {
                vf total = load(start + i);
                for (long r = 1; r < group.ranks; r++) total += load(start + r * step + i);
                store(own + i, total);
            }
            for (; i < n; i++) {
                float total = widen(start[i]);
                for (long r = 1; r < group.ranks; r++) total += widen(start[r * step + i]);
                narrow(total, own[i]);
            }
        }
    });
    return code;
}
RECORDABLE(all_reduce)

// part: float32 [rows][columns] of this rank, whose columns begin at its bound. The first rank receives the columns of all ranks in
// `out` [rows][all columns]; the others pass null. Returns 3 if a rank has ended.
EXPORT int WINDLASS_NAME(gather_columns)(void *of, const float *part, float *out, long rows) {
    RankGroup &group = *(RankGroup *)of;
    const int64_t *bounds = group.bounds;
    const long columns = bounds[group.rank + 1] - bounds[group.rank], all = bounds[group.ranks];
    long widest = 1;
    for (long r = 0; r < group.ranks; r++) widest = max_of(widest, bounds[r + 1] - bounds[r]);
    const long piece = group.slot_bytes / long(sizeof(float)), width = min_of(widest, piece), height = piece / width;
    const auto move = [](float *to, long to_row, const float *from, long from_row, long count, long length) {
        for (long i = 0; i < count; i++) __builtin_memcpy(to + i * to_row, from + i * from_row, length * sizeof(float));
    };
    if (out) move(out + bounds[group.rank], all, part, columns, rows, columns);
    for (long row = 0; row < rows; row += height) {
        const long count = min_of(height, rows - row);
        for (long first = 0; first < widest; first += width) {
            group.round++;
            const long own = max_of(0, min_of(width, columns - first));
            if (!out) move((float *)ranks::slot_of(group, group.rank), width, part + row * columns + first, columns, count, own);
            if (!ranks::wait_for_ranks(group)) return ranks::RANK_ENDED;
            for (long r = 0; out && r < group.ranks; r++) {
                const long theirs = max_of(0, min_of(width, bounds[r + 1] - bounds[r] - first));
                if (r == group.rank) continue;
                move(out + row * all + bounds[r] + first, all, (const float *)ranks::slot_of(group, r), width, count, theirs);
            }
        }
    }
    return 0;
}
RECORDABLE(gather_columns)

}  // namespace
