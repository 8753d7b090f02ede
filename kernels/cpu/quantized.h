// out[M, N] = x[M, K] * weight[N, K]^T + bias for weights of 8 or 4 bits, with x rounded to 8 bits on the way.
//
// Weights lie in panels of 16 rows, four elements of K (a quad) of each row side by side: 64 bytes, so that one vector
// holds a quad of WINDLASS_LANES rows and meets a quad of x in every lane. No sum crosses lanes, and every instruction
// set reads the same bytes. With 4 bits a byte holds quad 2j in its lower half and quad 2j + 1 in its upper half, plus 8.
//
// Sums of products are int32 (int16 where they provably fit) and exact: over all of K with 8 bits, over a group of 32
// with 4. What follows in float32 happens in one order for every output. So a row's bits do not depend on other rows,
// on tiles or on threads.
//
// Three forms of the product. Pairs: bytes widened to int16, two products a lane, exact for all values (vpmaddwd). Bytes:
// vpmaddubsw, whose int16 sums saturate, only for weights of 4 bits: eight sums of two products of at most 15 * 127 reach
// 30,480. Quads: vpdpbusd. The last two want an unsigned factor, so weights carry an offset there, and the offset times
// the sum of x is taken off again. ARM multiplies signed bytes: quads by sdot, or by widening products of which two fit
// int16, and weights of 8 bits stay as they are; with 4 bits widening products are collected in int16 like vpmaddubsw's. On processors with vpmaddwd alone 8 bits reach twice the float32 rate and no more:
// any way to split the bytes for vpmaddubsw costs as many instructions.

namespace packed {

#if defined(WINDLASS_VNNI) || defined(WINDLASS_NEON)
#define WINDLASS_QUADS 1
#else
#define WINDLASS_QUADS 0
#endif
#if defined(WINDLASS_NEON) && !defined(WINDLASS_DOT)  // 4 bits only, 8 bits go by quads
#define WINDLASS_BYTES 1
#else
#define WINDLASS_BYTES (!WINDLASS_QUADS && WINDLASS_LANES >= 8)
#endif

constexpr long PANEL = 16;            // rows of the weight side by side
constexpr int V = PANEL / W;          // vectors per panel
constexpr long GROUP = 32;            // elements of K under one scale, with 4 bits
constexpr long QUAD_BYTES = 4 * PANEL;
constexpr int PACKED_MT = WINDLASS_LANES == 16 ? 8 : WINDLASS_LANES == 8 ? 6 : WINDLASS_REGISTERS >= 32 ? 4 : 2;  // rows of x in a tile
constexpr long READY_QUADS = 128;     // of one panel, unpacked for many tiles: they stay in L1 beside a tile of x
constexpr long SHARED_ROWS = 8;       // from here on threads share the rounding of x, at the price of a barrier
constexpr long X_BYTES = 256 << 10;   // of rounded x per pass, if that leaves enough rows
constexpr long LEAST_PASS = 48, MOST_PASS = 192;
constexpr long AHEAD = 3072;          // bytes of weight asked for in advance: left to the hardware, one row of x reads a third slower
constexpr float TINY = 0x1p-100f;     // what is smaller counts as zero

typedef int16_t vs __attribute__((vector_size(4 * W)));
typedef uint16_t vus __attribute__((vector_size(4 * W)));
typedef uint8_t vub __attribute__((vector_size(4 * W)));
typedef vi vi_any __attribute__((aligned(4), may_alias));
typedef vub vub_any __attribute__((aligned(1), may_alias));

INLINE vub load_bytes(const void *p) { return *(const vub_any *)p; }
INLINE vi splat_int(int32_t x) { return x - vi{}; }
// Four bytes or two int16 of x in every lane.
INLINE vi spread(const void *p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return splat_int(x);
}

// Sums of two products of int16, lane by lane.
INLINE vi madd_pairs(vs a, vs b) {
#if defined(WINDLASS_FMA) && WINDLASS_LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(WINDLASS_FMA) && WINDLASS_LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__SSE2__) && WINDLASS_LANES == 4
    return (vi)__builtin_ia32_pmaddwd128(a, b);
#else
    const vi x = (vi)a, y = (vi)b;
    return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// acc + madd_pairs(a, b). One piece, where there are instructions: apart, the compiler moves all products ahead of the
// additions and runs out of registers (measured: a third slower).
INLINE vi add_pairs(vi acc, vs a, vs b) {
#if defined(WINDLASS_FMA)
    vi products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(a), "v"(b));
    return acc;
#else
    return acc + madd_pairs(a, b);
#endif
}

#if defined(WINDLASS_NEON)
// As below: products of bytes 0 to 7 and of bytes 8 to 15, each on its own.
struct BytesSum { int16x8_t low, high; };
INLINE BytesSum add_bytes(BytesSum acc, vub a, vi b) {
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
    return {vmlal_s8(acc.low, vget_low_s8(x), vget_low_s8(y)), vmlal_high_s8(acc.high, x, y)};
}
INLINE vi total_bytes(BytesSum x) { return (vi)vpaddlq_s16(vpaddq_s16(x.low, x.high)); }
#elif WINDLASS_BYTES
// acc plus sums of two products of a uint8 and an int8; the callers' values cannot saturate.
typedef vs BytesSum;
INLINE BytesSum add_bytes(BytesSum acc, vub a, vi b) {
#if defined(WINDLASS_FMA)
    vs products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(acc), "=&v"(products) : "v"(a), "v"(b));
    return acc;
#else
    const vus u = (vus)a;
    const vs s = (vs)b;
    return acc + (vs)(u & 0xff) * ((s << 8) >> 8) + (vs)(u >> 8) * (s >> 8);
#endif
}
// The sums of the four bytes of every lane.
INLINE vi total_bytes(BytesSum x) { return madd_pairs(x, vs{} + 1); }
#endif

#if WINDLASS_QUADS
// acc plus the sum of four products, modulo 2^32, of a uint8 (int8 on ARM) and an int8. Two bytes of -128 in one lane of both
// may not meet: their products overflow int16 where there is no sdot.
INLINE vi add_quads(vi acc, vub a, vi b) {
#if defined(WINDLASS_DOT)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
#elif defined(WINDLASS_NEON)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
    return (vi)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, vmull_high_s8((int8x16_t)a, (int8x16_t)b)));
#elif defined(WINDLASS_FMA) && WINDLASS_LANES == 8
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(WINDLASS_FMA) && WINDLASS_LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    const vu u = (vu)a;
    for (int shift = 0; shift < 32; shift += 8) acc += (vi)((u >> shift) & 0xffu) * ((b << (24 - shift)) >> 24);
    return acc;
#endif
}
#endif

#if WINDLASS_QUADS
// Adds the products of a quad of W rows of the weight and of MT rows of x, which lie side by side.
template <int MT> INLINE void add_rows(vi (&acc)[MT], vub weight, const uint8_t *x) {
#if defined(WINDLASS_DOT)
    if constexpr (MT == 4) {  // sdot takes a quad from any lane
        const int8x16_t w = (int8x16_t)weight, rows = vld1q_s8((const int8_t *)x);
        acc[0] = (vi)vdotq_laneq_s32((int32x4_t)acc[0], w, rows, 0);
        acc[1] = (vi)vdotq_laneq_s32((int32x4_t)acc[1], w, rows, 1);
        acc[2] = (vi)vdotq_laneq_s32((int32x4_t)acc[2], w, rows, 2);
        acc[3] = (vi)vdotq_laneq_s32((int32x4_t)acc[3], w, rows, 3);
        return;
    }
#endif
    for (int m = 0; m < MT; m++) acc[m] = add_quads(acc[m], weight, spread(x + 4 * m));
}
#endif

// What a weight of 8 bits carries in the product of quads, whose factor on its side is unsigned on x86.
#if defined(WINDLASS_NEON)
constexpr int BIAS = 0;
#else
constexpr int BIAS = 128;
#endif

// What differs between the two widths. X: bytes per element of rounded x; pairs are kept as int16 in the order 0 2 1 3,
// as they meet the even and the odd bytes of a quad. OFFSET: what the weight carries above its value in the product.
template <int BITS> struct Packing;
template <> struct Packing<8> {
    static constexpr bool PAIRS = !WINDLASS_QUADS;
    static constexpr long X = PAIRS ? 2 : 1, OFFSET = PAIRS ? 0 : BIAS, READY_BYTES = QUAD_BYTES * (PAIRS ? 2 : 1);
    static constexpr long QUADS = 1, STORED_BYTES = QUAD_BYTES;  // the unit of K: quads, and their bytes in a panel
};
template <> struct Packing<4> {
    static constexpr bool PAIRS = !WINDLASS_QUADS && !WINDLASS_BYTES;
    static constexpr long X = PAIRS ? 2 : 1, OFFSET = 8, READY_BYTES = QUAD_BYTES;
    static constexpr long QUADS = GROUP / 4, STORED_BYTES = QUAD_BYTES * GROUP / 8;
};

struct PackedLinear {
    const float *x; long x_stride;
    const uint8_t *data;
    const void *scales;  // 8 bits: float32 [N]; 4 bits: bfloat16 [panels, groups, 16]
    const float *bias;
    float *out; long out_stride;
    long M, N, K;
    long units;  // of K: quads with 8 bits, groups with 4
};

// x of one pass, rounded: values[tile][quad][row of the tile][4], scale and correction [tile][group][row of the tile].
struct Rounded {
    uint8_t *values;
    float *scale;
    int32_t *correction;
};

// ---- rounding x ----

// 127 / |largest| and the scale that goes with it. A row that holds NaN or infinity gets the scale NaN and zeros, so that
// all of its outputs are NaN and no others.
INLINE float inverse_scale(float largest, bool finite, float &scale) {
    scale = finite ? (largest < TINY ? 0.0f : largest * (1.0f / 127.0f)) : __builtin_nanf("");
    return finite && largest >= TINY ? 127.0f / largest : 0.0f;
}

// The nearest integers of x * by (even on a tie) for |x * by| < 2^22; zeros where by is 0, whatever x.
INLINE vi round_scaled(vf x, float by) {
    const vf magic = splat(12582912.0f);
    vu product = (vu)(x * by);
    hide(product);  // or it joins the addition where it can, and ties fall differently from one instruction set to the next
    const vi rounded = (vi)((vf)product + magic) - (vi)magic;
    return by == 0.0f ? vi{} : rounded;
}

// Lane i gets lane i + by, around the end.
template <int by> INLINE vi rotated_lanes() {
    vi from = {};
    for (int i = 0; i < W; i++) from[i] = (i + by) % W;
    return from;
}
template <int by = W / 2> INLINE uint32_t most_of(vu x) {
    const vu other = __builtin_shuffle(x, (vu)rotated_lanes<by>()), both = x > other ? x : other;
    if constexpr (by == 1) return both[0];
    else return most_of<by / 2>(both);
}
template <int by = W / 2> INLINE int32_t total_of(vi x) {
    const vi both = x + __builtin_shuffle(x, rotated_lanes<by>());
    if constexpr (by == 1) return both[0];
    else return total_of<by / 2>(both);
}

template <int BITS>
static void round_row(const float *x, long K, long quads, long first, long end, long rows, uint8_t *values, float &scale,
                      int32_t &correction) {
    constexpr long X = Packing<BITS>::X;
    // Bits of |x| order like |x|, with infinity and NaN on top.
    vu top = {};
    const long stop = min_of(4 * end, K), whole = 4 * first + (stop - 4 * first) / W * W;
    for (long k = 4 * first; k < stop; k += W) {
        const vu bits = (vu)(k < whole ? load(x + k) : load_some(x + k, stop - k)) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const uint32_t most = most_of(top);
    const float by = inverse_scale(float_of(most), most < 0x7f800000u, scale);
    vi total = {};
    for (long k = 4 * first; k < 4 * end; k += W) {
        const vf part = k < whole ? load(x + k) : k < stop ? load_some(x + k, stop - k) : vf{};
        const vi q = round_scaled(part, by);
        total += q;
        if constexpr (Packing<BITS>::PAIRS) {
            typedef int16_t half __attribute__((vector_size(2 * W)));
            const half narrow_q = __builtin_convertvector(q, half);
            for (long i = 0; i < W && k + i < 4 * quads; i += 4) {
                const int16_t four[4] = {narrow_q[i], narrow_q[i + 2], narrow_q[i + 1], narrow_q[i + 3]};
                __builtin_memcpy(values + (k + i) * X * rows, four, 8);
            }
        } else {
            typedef int8_t quarter __attribute__((vector_size(W)));
            const quarter narrow_q = __builtin_convertvector(q, quarter);
            for (long i = 0; i < W && k + i < 4 * quads; i += 4)
                __builtin_memcpy(values + (k + i) * X * rows, (const char *)&narrow_q + i, 4);
        }
    }
    correction = -int32_t(Packing<BITS>::OFFSET) * total_of(total);
}

template <int BITS> static void round_tile(const PackedLinear &p, Tiles tiles, long t, const Rounded &to) {
    constexpr long X = Packing<BITS>::X, QUADS = Packing<BITS>::QUADS;
    const long begin = tiles.begin(t), rows = tiles.size(t), quads = p.units * QUADS;
    const long groups = BITS == 8 ? 1 : p.units, step = BITS == 8 ? quads : QUADS;
    for (long m = 0; m < rows; m++) {
        const float *x = p.x + (begin + m) * p.x_stride;
        uint8_t *values = to.values + begin * quads * 4 * X + m * 4 * X;
        for (long g = 0; g < groups; g++) {
            const long at = begin * groups + g * rows + m;
            round_row<BITS>(x, p.K, quads, g * step, (g + 1) * step, rows, values, to.scale[at], to.correction[at]);
        }
    }
}

// ---- unpacking weights ----

INLINE vs even_bytes(vub w, bool is_signed) { return is_signed ? ((vs)w << 8) >> 8 : (vs)((vus)w & 0xff); }
INLINE vs odd_bytes(vub w, bool is_signed) { return is_signed ? (vs)w >> 8 : (vs)((vus)w >> 8); }
INLINE vub lower_halves(vub w) { return w & 0x0f; }
INLINE vub upper_halves(vub w) { return (vub)((vus)w >> 4) & 0x0f; }

// `units` of a panel as the product wants them.
template <int BITS> static void make_ready(const uint8_t *stored, long units, uint8_t *ready) {
    if constexpr (BITS == 8) {
        for (long q = 0; q < units * V; q++, stored += 4 * W) {
            const vub w = load_bytes(stored);
            if constexpr (Packing<8>::PAIRS) {
                *(vub_any *)ready = (vub)even_bytes(w, true);
                *(vub_any *)(ready + 4 * W) = (vub)odd_bytes(w, true);
                ready += 8 * W;
            } else {
                *(vub_any *)ready = w ^ BIAS;
                ready += 4 * W;
            }
        }
    } else {
        for (long pair = 0; pair < units * GROUP / 8; pair++, ready += QUAD_BYTES) {
            for (int v = 0; v < V; v++, stored += 4 * W, ready += 4 * W) {
                const vub w = load_bytes(stored);
                *(vub_any *)ready = lower_halves(w);
                *(vub_any *)(ready + QUAD_BYTES) = upper_halves(w);
            }
        }
    }
}

// ---- products of one panel and one tile; sums is [MT][16] ----

// Asks for weights ahead. Into L2 where there is so little to do with a line that as many as possible must be under way
// (measured on Zen 4: a tenth more for one or two rows of 8 bits, less for anything else), else into L1.
template <bool FAR> INLINE void ask_ahead(const uint8_t *w) {
    if constexpr (FAR) __builtin_prefetch(w + AHEAD, 0, 2);
    else __builtin_prefetch(w + AHEAD);
}

template <bool READY, int MT> static NOINLINE void dot_eight(const uint8_t *w, const uint8_t *x, long quads, int32_t *sums,
                                                             bool fresh) {
    vi acc[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) acc[v][m] = fresh ? vi{} : *(const vi_any *)(sums + m * PANEL + v * W);
    for (long q = 0; q < quads; q++) {
        if (!READY) ask_ahead<(MT <= 2)>(w);
#if WINDLASS_QUADS
        for (int v = 0; v < V; v++) {
            const vub raw = load_bytes(w + v * 4 * W), weight = READY ? raw : raw ^ BIAS;
            add_rows<MT>(acc[v], weight, x);
        }
        w += QUAD_BYTES, x += 4 * MT;
#else
        // Even bytes of all vectors, then odd ones: half the registers. The hidden pointer makes the bytes load again.
        for (int odd = 0; odd < 2; odd++) {
            vs weight[V];
            const uint8_t *from = w;
            if (!READY && odd) asm("" : "+r"(from));
            for (int v = 0; v < V; v++) {
                if (READY) weight[v] = (vs)load_bytes(from + (2 * v + odd) * 4 * W);
                else weight[v] = odd ? odd_bytes(load_bytes(from + v * 4 * W), true)
                                     : even_bytes(load_bytes(from + v * 4 * W), true);
            }
            for (int m = 0; m < MT; m++) {
                const vs xm = (vs)spread(x + 8 * m + 4 * odd);
                for (int v = 0; v < V; v++) acc[v][m] = add_pairs(acc[v][m], weight[v], xm);
            }
        }
        w += READY ? 2 * QUAD_BYTES : QUAD_BYTES, x += 8 * MT;
#endif
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) *(vi_any *)(sums + m * PANEL + v * W) = acc[v][m];
}

template <bool READY, int MT>
static NOINLINE void dot_four(const uint8_t *w, const bf16 *w_scale, const uint8_t *x, const float *x_scale,
                              const int32_t *correction, long groups, float *sums, bool fresh) {
    constexpr long X = Packing<4>::X, STEP_BYTES = 4 * X * MT;
    vf acc[V][MT];
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) acc[v][m] = fresh ? vf{} : load(sums + m * PANEL + v * W);
    for (long g = 0; g < groups; g++) {
        for (int v = 0; v < V; v++) {
            const uint8_t *xg = x;
            asm("" : "+r"(xg));  // or the spread values are kept from one vector to the next, on the stack
#if WINDLASS_BYTES
            BytesSum part[MT] = {};
#else
            vi part[MT] = {};
#endif
            for (int pair = 0; pair < GROUP / 8; pair++) {
                if (!READY && v == 0) ask_ahead<false>(w + pair * QUAD_BYTES);
                vub weight[2];
                if (READY) {
                    weight[0] = load_bytes(w + 2 * pair * QUAD_BYTES + v * 4 * W);
                    weight[1] = load_bytes(w + (2 * pair + 1) * QUAD_BYTES + v * 4 * W);
                } else {
                    const vub both = load_bytes(w + pair * QUAD_BYTES + v * 4 * W);
                    weight[0] = lower_halves(both), weight[1] = upper_halves(both);
                }
                for (int i = 0; i < 2; i++, xg += STEP_BYTES) {
#if WINDLASS_QUADS && !WINDLASS_BYTES
                    add_rows<MT>(part, weight[i], xg);
#else
                    for (int m = 0; m < MT; m++) {
#if WINDLASS_BYTES
                        part[m] = add_bytes(part[m], weight[i], spread(xg + 4 * m));
#else
                        part[m] = add_pairs(part[m], even_bytes(weight[i], false), (vs)spread(xg + 8 * m));
                        part[m] = add_pairs(part[m], odd_bytes(weight[i], false), (vs)spread(xg + 8 * m + 4));
#endif
                    }
#endif
                }
            }
            const vf scale = load(w_scale + v * W);
            for (int m = 0; m < MT; m++) {
#if WINDLASS_BYTES
                const vi products = total_bytes(part[m]);
#else
                const vi products = part[m];
#endif
                const vf sum_of = __builtin_convertvector(products + correction[m], vf);
                acc[v][m] = add_product(acc[v][m], sum_of, scale * x_scale[m]);
            }
        }
        w += READY ? 2 * Packing<4>::STORED_BYTES : Packing<4>::STORED_BYTES;
        w_scale += PANEL, x += GROUP / 4 * STEP_BYTES, x_scale += MT, correction += MT;
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) store(sums + m * PANEL + v * W, acc[v][m]);
}

// Calls f with the row count as a constant.
template <int N> struct Count { static constexpr int value = N; };
template <int MT = 1, class F> INLINE void with_rows(long rows, const F &f) {
    if constexpr (MT < PACKED_MT) {
        if (rows > MT) return with_rows<MT + 1>(rows, f);
    }
    f(Count<MT>{});
}

// ---- all tiles against a chunk of panels ----

static NOINLINE void finish_eight(const PackedLinear &p, const int32_t *sums, float x_scale, int32_t correction, long n,
                                  float *out) {
    for (long i = 0; i < PANEL && n + i < p.N; i += W) {
        const long valid = min_of(W, p.N - n - i);
        const float *w_scale = (const float *)p.scales + n + i;
        const vf scale = (valid == W ? load(w_scale) : load_some(w_scale, valid)) * x_scale;
        vf y = __builtin_convertvector(*(const vi_any *)(sums + i) + correction, vf) * scale;
        if (p.bias) y += valid == W ? load(p.bias + n + i) : load_some(p.bias + n + i, valid);
        if (valid == W) store(out + i, y);
        else store_some(out + i, y, valid);
    }
}

static NOINLINE void finish_four(const PackedLinear &p, const float *sums, long n, float *out) {
    for (long i = 0; i < PANEL && n + i < p.N; i++) out[i] = p.bias ? sums[i] + p.bias[n + i] : sums[i];
}

template <int BITS, bool READY>
static void multiply_panel(const PackedLinear &p, Tiles tiles, const Rounded &x, long panel, int32_t *sums, uint8_t *ready) {
    typedef Packing<BITS> P;
    const uint8_t *stored = p.data + panel * p.units * P::STORED_BYTES;
    const bf16 *w_scale = BITS == 4 ? (const bf16 *)p.scales + panel * p.units * PANEL : nullptr;
    const long block = tiles.count == 1 ? p.units : READY_QUADS / P::QUADS, quads = p.units * P::QUADS;
    for (long u = 0; u < p.units; u += block) {
        const long units = min_of(block, p.units - u);
        const uint8_t *w = stored + u * P::STORED_BYTES;
        if (READY) {
            make_ready<BITS>(w, units, ready);
            w = ready;
        }
        for (long t = 0; t < tiles.count; t++) {
            const long begin = tiles.begin(t), rows = tiles.size(t);
            if (READY) {  // fetch the next block meanwhile
                const long bytes = units * P::STORED_BYTES, end = bytes * (t + 1) / tiles.count;
                const uint8_t *next = stored + u * P::STORED_BYTES + bytes;
                for (long i = round_up(bytes * t / tiles.count, 64); i < end; i += 64) __builtin_prefetch(next + i);
            }
            const uint8_t *values = x.values + (begin * quads + u * P::QUADS * rows) * 4 * P::X;
            int32_t *to = sums + begin * PANEL;
            with_rows(rows, [&](auto count) {
                constexpr int MT = decltype(count)::value;
                if constexpr (BITS == 8) dot_eight<READY, MT>(w, values, units, to, u == 0);
                else {
                    const long at = begin * p.units + u * rows;
                    dot_four<READY, MT>(w, w_scale + u * PANEL, values, x.scale + at, x.correction + at, units, (float *)to,
                                        u == 0);
                }
            });
        }
    }
    for (long m = 0; m < p.M; m++) {
        float *out = p.out + m * p.out_stride + panel * PANEL;
        if (BITS == 8) finish_eight(p, sums + m * PANEL, x.scale[m], x.correction[m], panel * PANEL, out);
        else finish_four(p, (const float *)sums + m * PANEL, panel * PANEL, out);
    }
}

template <int BITS> static int packed_pass(const PackedLinear &p) {
    typedef Packing<BITS> P;
    const Tiles tiles = {p.M, ceil_div(p.M, PACKED_MT)};
    const long panels = ceil_div(p.N, PANEL), panel_bytes = p.units * P::STORED_BYTES;
    const long chunk = max_of(1, CHUNK_BYTES / panel_bytes), chunks = ceil_div(panels, chunk);
    const long threads = p.M * p.N * p.K < SERIAL_WORK ? 1 : min_of(chunks, omp_get_max_threads());
    Shares shares(chunks, threads);
    const bool shared = p.M >= SHARED_ROWS && threads > 1;
    const long scales = p.M * (BITS == 8 ? 1 : p.units);
    const long value_bytes = round_up(p.M * p.units * P::QUADS * 4 * P::X, 64), scale_bytes = round_up(4 * scales, 64);
    const long x_bytes = value_bytes + 2 * scale_bytes;
    const long own_bytes = 4 * p.M * PANEL + READY_QUADS * P::READY_BYTES + 64;
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, (shared ? 1 : threads) * x_bytes + threads * round_up(own_bytes, 64))) return 1;
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num();
        uint8_t *base = (uint8_t *)memory + (shared ? 0 : thread * x_bytes);
        const Rounded x = {base, (float *)(base + value_bytes), (int32_t *)(base + value_bytes + scale_bytes)};
        uint8_t *own = (uint8_t *)memory + (shared ? 1 : threads) * x_bytes + thread * round_up(own_bytes, 64);
        int32_t *sums = (int32_t *)(own + READY_QUADS * P::READY_BYTES);
        if (shared) {
#pragma omp for schedule(static)
            for (long t = 0; t < tiles.count; t++) round_tile<BITS>(p, tiles, t, x);
        } else {  // each thread for itself: cheaper than a barrier when another process holds a core
            for (long t = 0; t < tiles.count; t++) round_tile<BITS>(p, tiles, t, x);
        }
        shares.take(thread, [&](long c) {
            for (long panel = c * chunk; panel < min_of((c + 1) * chunk, panels); panel++) {
                if (tiles.count > 2) multiply_panel<BITS, true>(p, tiles, x, panel, sums, own);
                else multiply_panel<BITS, false>(p, tiles, x, panel, sums, own);
            }
        });
    }
    free(memory);
    return 0;
}

template <int BITS> static int packed_all(PackedLinear p) {
    p.units = ceil_div(p.K, BITS == 8 ? 4 : GROUP);
    const long fitting = X_BYTES / (p.units * Packing<BITS>::QUADS * 4 * Packing<BITS>::X);
    const long most = max_of(LEAST_PASS, min_of(MOST_PASS, fitting));
    const long passes = ceil_div(p.M, most), step = passes ? round_up(ceil_div(p.M, passes), PACKED_MT) : 1;
    for (long m = 0; m < p.M; m += step) {
        PackedLinear pass = p;
        pass.M = min_of(step, p.M - m);
        pass.x = p.x + m * p.x_stride;
        pass.out = p.out + m * p.out_stride;
        if (packed_pass<BITS>(pass)) return 1;
    }
    return 0;
}

// bits: 8 or 4. x, bias and out are float32, strides in elements; bias may be null. Returns 1 when out of memory.
EXPORT int WINDLASS_NAME(linear_packed)(const float *x, long x_stride, const uint8_t *data, const void *scales, int bits,
                                        const float *bias, float *out, long out_stride, long M, long N, long K) {
    const PackedLinear p = {x, x_stride, data, scales, bias, out, out_stride, M, N, K, 0};
    return bits == 8 ? packed_all<8>(p) : packed_all<4>(p);
}

}  // namespace packed
