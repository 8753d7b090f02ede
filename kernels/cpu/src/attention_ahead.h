// What decoding over keys and values of floats asks for in advance. See attention.h.

#pragma once

#include "attention.h"
#include "simd.h"

namespace {

// Walks the keys and values of a course and some heads in the order in which they lie in memory and asks for them, between the
// arithmetic. It stays ahead of that by what is asked for at its start: a chunk, since its first head meets all of it at once, and
// some more, for what comes late.
template <class T> struct Ahead {
    const Attention *p;
    const Course *course;
    long number, head, heads;
    Following piece;
    bool over = true;
    long count = 0;             // keys of the run: up to those of a block where all heads are asked for, else one
    bool value = true;          // the run's part: keys, then values
    const char *line = nullptr;
    long left = 0;              // lines of the run
    static constexpr long MORE = 48 << 10;  // bytes asked for at the start, besides a chunk

    // Begins with piece `number`.
    void set_out(const Attention &attention, const Course &pieces, long from, long first_head, long some_heads) {
        p = &attention, course = &pieces, number = from, head = first_head, heads = some_heads, piece = course->piece(number);
        over = false, count = 0, value = true, left = 0;
        const long chunk = CHUNK_KEYS<T> * heads * (p->dim + p->value_dim) * (long)sizeof(T);
        ask((chunk + min_of(chunk, MORE)) / 64);
    }
    NOINLINE bool next_run() {
        value = !value;
        if (!value) {
            piece.at += count, count = 0;
            if (piece.at >= piece.end) {
                const Following next = course->piece(number + 1);
                if (next.at >= next.end) return over = true, false;
                piece = next, number++;
            }
            const long at = piece.at;
            count = heads == p->kv_heads ? min_of(piece.end - at, p->block_size - at % p->block_size) : 1;
            if (IN_BURSTS<T>) count = max_of(1, min_of(count, BURST_RUN / (heads * p->dim * (long)sizeof(T))));
        }
        const long entry = p->entry(piece.b, piece.at) + head, dim = value ? p->value_dim : p->dim;
        line = (const char *)((const T *)(value ? p->values : p->keys) + entry * dim);
        left = ceil_div(count * heads * dim * (long)sizeof(T), 64);
        return true;
    }
    NOINLINE void ask_one_by_one(long lines) {
        for (; lines > 0; lines--, left--, line += 64) {
            if (left == 0 && (over || !next_run())) return;
            __builtin_prefetch(line, 0, 2);
        }
    }
    INLINE_MEMBER void ask(long lines) {
        if (left < lines) return ask_one_by_one(lines);
        left -= lines;
        for (; lines > 0; lines--, line += 64) __builtin_prefetch(line, 0, 2);
    }
    template <long lines> INLINE_MEMBER void ask() {
        if (left < lines) return ask_one_by_one(lines);
        for (long i = 0; i < lines; i++) __builtin_prefetch(line + i * 64, 0, 2);
        left -= lines, line += lines * 64;
    }
};

// What is multiplied of pages of T.
template <class T> struct Multiplied { typedef T type; };
template <> struct Multiplied<row_code> { typedef float type; };

// What a thread that works over pages of T knows of what comes. Rows of codes are asked for as they are widened.
template <class T> struct Walk { typedef Ahead<typename Multiplied<T>::type> type; };
template <class T, class E>
INLINE void set_out(Ahead<E> &walk, const Attention &p, const Course &course, long number, long head, long heads) {
    if (sizeof(T) == sizeof(E)) walk.set_out(p, course, number, head, heads);
}
// Behind the cut that is worked on next comes this; it goes on by itself.
template <class E> INLINE void turn_to(Ahead<E> &, const Following &) {}

}  // namespace
