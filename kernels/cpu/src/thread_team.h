// Threads that share the work of a kernel: one OpenMP region per call, or, for a recorded list of calls (recorded_calls.h), one
// region for all of them.
//
// A step of a small model consists of about a hundred pieces of ten microseconds, each of which depends on the previous one. An
// OpenMP region for each costs about a tenth of that, and every piece would wait for a thread that the system has descheduled. In a
// team, the calling thread opens a piece by writing one word and helpers that see it join. When no work is left, the caller closes
// the piece and waits only for the helpers inside. So pieces must distribute their work unit by unit and contain no barrier: work
// that depends on all units is a separate piece.

#pragma once

#include "simd.h"

// Shared by all instruction sets, and so outside of the namespace: a list of calls may contain functions of several sets.
inline __thread void *windlass_own_team = nullptr;

namespace {

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    explicit Team(long threads) : threads_(threads) {}

    // Calls body(thread) here with 0 and on at most threads - 1 helpers with their own numbers; returns when all have returned.
    template <class F> INLINE_MEMBER void run(long threads, const F &body) {
        run_ = [](const void *of, long thread) { (*(const F *)of)(thread); };
        body_ = &body, wanted_ = threads, piece_ += PIECE;
        __atomic_store_n(&gate_, piece_ | OPEN, __ATOMIC_RELEASE);
        body(0);
        __atomic_fetch_and(&gate_, ~OPEN, __ATOMIC_ACQ_REL);
        for (long turns = 0; __atomic_load_n(&gate_, __ATOMIC_ACQUIRE) & INSIDE; turns++) wait(turns);
    }

    // Helpers stay in here until `dismiss`.
    void help(long thread) {
        unsigned long done = 0;
        for (long turns = 0;; turns++) {
            unsigned long gate = __atomic_load_n(&gate_, __ATOMIC_ACQUIRE);
            if (gate & OVER) return;
            const unsigned long piece = gate & ~(PIECE - 1);
            if (!(gate & OPEN) || piece == done) {
                wait(turns);
                continue;
            }
            if (!__atomic_compare_exchange_n(&gate_, &gate, gate + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
            if (thread < wanted_) run_(body_, thread);
            __atomic_fetch_sub(&gate_, 1, __ATOMIC_RELEASE);
            done = piece, turns = 0;
        }
    }
    void dismiss() { __atomic_fetch_or(&gate_, OVER, __ATOMIC_RELEASE); }
    long threads() const { return threads_; }

  private:
    static constexpr unsigned long INSIDE = 0xffff, OPEN = 1 << 16, OVER = 1 << 17, PIECE = 1 << 18;
    static constexpr long SPINS = 1 << 11;  // about ten microseconds; then the core is yielded

    static void wait(long turns) {
        if (turns < SPINS) relax();
        else sched_yield();
    }

    // Number of helpers inside, OPEN, OVER, and above those the number of the piece.
    alignas(64) unsigned long gate_ = 0;
    alignas(64) void (*run_)(const void *, long) = nullptr;
    const void *body_ = nullptr;
    long wanted_ = 0, threads_;
    unsigned long piece_ = 0;
};

// The team of the list of calls that this thread runs, or null.
INLINE Team *own_team() { return (Team *)windlass_own_team; }

INLINE long most_threads() { return own_team() ? own_team()->threads() : max_of(1, omp_get_max_threads()); }

// Calls body(thread) on up to `threads` threads at once, always on this one with 0; returns when all have returned. Thread numbers
// are distinct and below `threads`. Work must be taken unit by unit: a thread may start late or not at all.
template <class F> INLINE void on_threads(long threads, const F &body) {
    if (threads <= 1) return body(0);
    if (own_team()) return own_team()->run(threads, body);
#pragma omp parallel num_threads(threads)
    body((long)omp_get_thread_num());
}

// Units 0 .. count, taken run by run by the next free thread.
struct Units {
    long count, run;
    alignas(64) long next = 0;
    Units(long count, long run = 1) : count(count), run(run) {}
    // Calls f(unit) for what this thread takes.
    template <class F> INLINE_MEMBER void take(const F &f) {
        for (long first; (first = __atomic_fetch_add(&next, run, __ATOMIC_RELAXED)) < count;)
            for (long unit = first; unit < min_of(first + run, count); unit++) f(unit);
    }
};

// Calls calls() with all products on this thread.
template <class F> INLINE void alone(const F &calls) {
    Team one(1);
    void *const before = windlass_own_team;
    windlass_own_team = &one;
    calls();
    windlass_own_team = before;
}

// f(unit) for all units, in even runs on up to `threads` threads.
template <class F> INLINE void for_units(long count, long threads, const F &f) {
    if (threads <= 1) {
        for (long unit = 0; unit < count; unit++) f(unit);
        return;
    }
    Units units(count, ceil_div(count, threads));
    on_threads(threads, [&](long) { units.take(f); });
}

// Calls calls(), with one region for all that it shares among threads.
template <class F> static void as_team(const F &calls) {
    const long threads = omp_get_max_threads();
    if (threads <= 1 || own_team()) return calls();
    Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num();
        if (thread) team.help(thread);
        else {
            windlass_own_team = &team;
            calls();
            windlass_own_team = nullptr;
            team.dismiss();
        }
    }
}

}  // namespace
