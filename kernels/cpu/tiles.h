// How work is split, over rows of x and over threads.

constexpr long CHUNK_BYTES = 192 << 10;  // of weight, the unit threads take
constexpr long SERIAL_WORK = 1 << 15;    // multiply-adds below which a second thread costs more than it gives

// Rows of x split as evenly as can be over tiles of a bounded number of rows.
struct Tiles {
    long rows, count;
    INLINE_MEMBER long begin(long t) const { return rows * t / count; }
    INLINE_MEMBER long size(long t) const { return begin(t + 1) - begin(t); }
};

constexpr long SERIAL_ELEMENTS = 1 << 15;  // of everything else, below which one thread is quicker

INLINE long threads_for(long elements, long units) {
    return elements < SERIAL_ELEMENTS ? 1 : max_of(1, min_of(units, omp_get_max_threads()));
}
