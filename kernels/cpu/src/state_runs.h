// What kernels share whose tokens change matrices column by column: runs of tokens, panels of columns, and how one changes.

#pragma once

#include <cstdint>

#include <cmath>

#include "names.h"
#include "simd.h"
#include "state_rows.h"

namespace {

constexpr long SLICE = 64;  // tokens whose keys and gates lie ready at once

// Tokens first .. end, of one sequence and in one slice.
struct Run {
    long first, end;
    int64_t block;
    bool begins;
};

// The runs of tokens begin .. end. s: the sequence of the last slice's last token, then of this one's.
static long find_runs(const StateRows &rows, long begin, long end, long &s, Run (&runs)[SLICE]) {
    long count = 0;
    for (; s < rows.count && rows.starts[s] < end; s++) {
        const long first = max_of(rows.starts[s], begin), last = min_of(rows.starts[s + 1], end);
        if (first < last) runs[count++] = {first, last, rows.blocks[s], first == rows.starts[s] && rows.begins(s)};
        if (rows.starts[s + 1] > end) break;
    }
    return count;
}

// n columns from here on, zeros after them.
template <class T, int V> INLINE void load_columns(const T *from, long n, vf (&to)[V]) {
    for (int v = 0; v < V; v++, n -= W) to[v] = n >= W ? load(from + v * W) : n > 0 ? load_some(from + v * W, n) : vf{};
}
template <class T, int V> INLINE void store_columns(T *to, long n, const vf (&from)[V]) {
    for (int v = 0; v < V; v++, n -= W) {
        if (n >= W) store(to + v * W, from[v]);
        else if (n > 0) store_some(to + v * W, from[v], n);
    }
}

// What fades and is added to.
INLINE vf changed(vf m, float kept, vf added, vf key) {
    vu faded = (vu)(m * kept);
    hide(faded);  // or it joins the addition in one place and not in the other
    return add_product((vf)faded, added, key);
}

INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
