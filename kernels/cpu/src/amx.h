// AMX, the matrix unit of x86-64: products of full tiles of bfloat16, and the same in plain code.
//
// A tile of x is 16 rows by 32 elements of K; a tile of the weight is 16 lines of a panel, each with a pair of adjacent elements of K
// of 16 rows. Products are exact, sums are float32, and subnormal numbers count as zero.

#pragma once

#include "bf16_dot.h"
#include "simd.h"

namespace {
namespace matrix {

constexpr long ROWS = 16;   // of a tile of x, and lines of one of the weight
constexpr long STEP = 32;   // elements of K
constexpr long PAIRS_OF_TILE = ROWS * STEP / 2;

#if !defined(WINDLASS_PORTABLE)
// The compiler's intrinsics need literal register numbers and declare less memory than they read. stride: between rows, in bytes.
template <int T> INLINE void load_tile(const void *from, long row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(T) : "memory");
}
// Streamed data should not evict the resident tiles from L1.
template <int T> INLINE void stream_tile(const void *from, long row_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(T) : "memory");
}
template <int T> INLINE void store_tile(void *to, long row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(T) : "memory");
}
template <int T> INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T, int A, int B> INLINE void add_product_of_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(T), "i"(A), "i"(B));
}
#endif

// Configures all tiles at full size for the scope of a product; releases the unit afterwards.
struct Use {
    INLINE_MEMBER Use() {
#if !defined(WINDLASS_PORTABLE)
        struct alignas(64) Shapes {
            uint8_t palette, start, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } shapes = {};
        shapes.palette = 1;
        for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = ROWS;
        asm volatile("ldtilecfg (%0)" : : "r"(&shapes) : "memory");
#endif
    }
    INLINE_MEMBER ~Use() {
#if !defined(WINDLASS_PORTABLE)
        asm volatile("tilerelease");
#endif
    }
};

// Addresses of tiles: the first one, and the strides in elements of adjacent tiles, steps of K, and rows of a tile.
template <class N> struct Tiled {
    N *first;
    long tile, step, row;
};

// to = from + the products of TILES tiles of x and PANELS panels over `steps` steps of K; if `fresh`, without `from`. The sums of a
// tile and a panel begin tile * to.tile + panel * to.step elements from the first. x stays cached, the weight is streamed.
template <int TILES, int PANELS>
static NOINLINE void multiply_tiles(Tiled<const pair> x, Tiled<const pair> weight, long steps, Tiled<float> from, Tiled<float> to, bool fresh) {
#if !defined(WINDLASS_PORTABLE)
    // Sums are registers 0 to 3, tiles of x 4 and 5, of the weight 6 and 7.
    const long x_row = x.row * 4, w_row = weight.row * 4, from_row = from.row * 4, to_row = to.row * 4;
    const auto at = [](const Tiled<float> &sums, long t, long n) { return sums.first + t * sums.tile + n * sums.step; };
    if (fresh) clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    else {
        load_tile<0>(at(from, 0, 0), from_row);
        if (PANELS > 1) load_tile<1>(at(from, 0, 1), from_row);
        if (TILES > 1) load_tile<2>(at(from, 1, 0), from_row);
        if (TILES > 1 && PANELS > 1) load_tile<3>(at(from, 1, 1), from_row);
    }
    const pair *a = x.first, *b = weight.first;
    for (long i = 0; i < steps; i++, a += x.step, b += weight.step) {
        stream_tile<6>(b, w_row);
        load_tile<4>(a, x_row);
        add_product_of_tiles<0, 4, 6>();
        if (PANELS > 1) stream_tile<7>(b + weight.tile, w_row), add_product_of_tiles<1, 4, 7>();
        if (TILES > 1) load_tile<5>(a + x.tile, x_row), add_product_of_tiles<2, 5, 6>();
        if (TILES > 1 && PANELS > 1) add_product_of_tiles<3, 5, 7>();
    }
    store_tile<0>(at(to, 0, 0), to_row);
    if (PANELS > 1) store_tile<1>(at(to, 0, 1), to_row);
    if (TILES > 1) store_tile<2>(at(to, 1, 0), to_row);
    if (TILES > 1 && PANELS > 1) store_tile<3>(at(to, 1, 1), to_row);
#else
    for (int t = 0; t < TILES; t++)
        for (int n = 0; n < PANELS; n++)
            for (int m = 0; m < ROWS; m++) {
                vf acc = fresh ? vf{} : load(from.first + t * from.tile + n * from.step + m * from.row);
                for (long i = 0; i < steps; i++)
                    for (int k = 0; k < ROWS; k++)
                        acc = add_product(acc, load(weight.first + n * weight.tile + i * weight.step + k * weight.row),
                                          splat(x.first[t * x.tile + i * x.step + m * x.row + k]));
                store(to.first + t * to.tile + n * to.step + m * to.row, acc);
            }
#endif
}
// sums += the same.
template <int TILES, int PANELS>
INLINE void multiply_tiles(Tiled<const pair> x, Tiled<const pair> weight, long steps, Tiled<float> sums, bool fresh) {
    multiply_tiles<TILES, PANELS>(x, weight, steps, sums, sums, fresh);
}

}  // namespace matrix
}  // namespace
