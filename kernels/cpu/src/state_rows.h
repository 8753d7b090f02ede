// Whose states the tokens of a step change (kernels/backend.py), read anew at every call.

#pragma once

#include <cstdint>

#include "names.h"
#include "simd.h"

namespace {

struct StateRows {
    const int64_t *blocks;   // [count]
    const int64_t *starts;   // [count + 1]
    const int64_t *lengths;  // [count], tokens in all once this step is over
    long count;
    const int64_t *kept;     // [tokens], where the state after a token is left besides, -1: nowhere; or NULL

    INLINE_MEMBER int64_t kept_after(long token) const { return kept ? kept[token] : -1; }
    INLINE_MEMBER long tokens(long s) const { return starts[s + 1] - starts[s]; }
    // Whether the state before the sequence's tokens is zero, whatever its block holds.
    INLINE_MEMBER bool begins(long s) const { return lengths[s] == tokens(s); }

    // 0, or why these are no rows of so many tokens and blocks: 2 for a block that there is not, 3 where tokens are left out.
    int refusal(long all, long num_blocks) const {
        if (starts[0] != 0 || starts[count] != all) return 3;
        for (long s = 0; s < count; s++)
            if (starts[s + 1] < starts[s]) return 3;
        for (long s = 0; s < count; s++)
            if (tokens(s) && (blocks[s] < 0 || blocks[s] >= num_blocks)) return 2;
        for (long t = 0; t < all; t++)
            if (kept_after(t) < -1 || kept_after(t) >= num_blocks) return 2;
        return 0;
    }
};

}  // namespace
