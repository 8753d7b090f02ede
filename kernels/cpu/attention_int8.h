// Queries against a chunk of int8 keys and values with vpdpbusd, where heads are whole vectors of 64 codes wide.
//
// Queries, and later weights, are rounded to 16 bits and go as two planes of unsigned bytes against the signed codes. Sums
// are exact integers, so what is lost is 2^-16 of the largest element of the query or weight of the chunk, far below what
// the codes have lost. A query's element is 256 * high + low - 32768; the last part is taken off by the sum of the codes.
//
// Keys are turned so that a vector holds four dims of 16 keys, and values so that it holds 16 dims of four keys: no sum
// crosses lanes, and all queries of a kv head share the turning.

#if defined(WINDLASS_VNNI) && WINDLASS_LANES == 16
#define WINDLASS_INT8_CHUNKS 1

namespace codes {

using packed::add_quads;
using packed::load_bytes;
using packed::splat_int;
using packed::spread;
using packed::vub;

constexpr long PIECE = 64;      // codes in a vector
constexpr long PANEL = 16;      // keys side by side
constexpr long MOST_DIM = 256;  // sums stay below 2^31

struct Turned {
    alignas(64) int8_t keys[CHUNK * MOST_DIM];    // [panel][dim / 4] vectors of [16 keys][4 dims]
    alignas(64) int32_t key_sums[CHUNK];
    alignas(64) int8_t values[CHUNK * MOST_DIM];  // [4 keys][piece][4] vectors of [4 quarters][4 dims][4 keys]
};

INLINE bool fit(const Attention &p) {
    return p.key_scales && p.dim % PIECE == 0 && p.value_dim % PIECE == 0 && p.dim <= MOST_DIM && p.value_dim <= MOST_DIM;
}

// Units of n bytes of a and b in turns, from the lower or the upper half of each 128 bits.
typedef uint8_t bytes __attribute__((vector_size(64)));
template <int n, bool upper> INLINE bytes interleave(bytes a, bytes b) {
    bytes from = {};
    for (int i = 0; i < 64; i++) {
        const int unit = i % 16 / n;
        from[i] = uint8_t(i / 16 * 16 + (upper ? 8 : 0) + unit / 2 * n + i % n + (unit % 2 ? 64 : 0));
    }
    return __builtin_shuffle(a, b, from);
}

static NOINLINE void turn_keys(const Attention &p, const Chunk<int8_t> &chunk, Turned &t) {
    const vub ones = vub{} + 1;
    for (long j = 0; j < chunk.count; j += PANEL) {
        int8_t *target = t.keys + j * p.dim;
        vi sums[4] = {};  // one would wait for itself
        for (long d = 0; d < p.dim; d += PIECE) {
            chunk.ahead->ask(PANEL / 2);
            vf rows[W];
            for (int n = 0; n < W; n++) rows[n] = (vf)load_bytes(chunk.keys[min_of(j + n, chunk.count - 1)] + d);
            transpose(rows);
            for (int n = 0; n < W; n++) {
                sums[n % 4] = add_quads(sums[n % 4], ones, (vi)rows[n]);
                store((float *)(target + (d / 4 + n) * PIECE), rows[n]);
            }
        }
        *(packed::vi_any *)(t.key_sums + j) = sums[0] + sums[1] + sums[2] + sums[3];
    }
}

static NOINLINE void turn_values(const Attention &p, const Chunk<int8_t> &chunk, Turned &t) {
    int8_t *target = t.values;
    for (long j = 0; j < chunk.count; j += 4) {
        for (long d = 0; d < p.value_dim; d += PIECE, target += 4 * PIECE) {
            chunk.ahead->ask(2);
            bytes v[4];
            for (int n = 0; n < 4; n++) v[n] = (bytes)load_bytes(chunk.values[min_of(j + n, chunk.count - 1)] + d);
            const bytes low = interleave<1, false>(v[0], v[1]), high = interleave<1, true>(v[0], v[1]);
            const bytes low2 = interleave<1, false>(v[2], v[3]), high2 = interleave<1, true>(v[2], v[3]);
            *(bytes *)target = interleave<2, false>(low, low2);
            *(bytes *)(target + PIECE) = interleave<2, true>(low, low2);
            *(bytes *)(target + 2 * PIECE) = interleave<2, false>(high, high2);
            *(bytes *)(target + 3 * PIECE) = interleave<2, true>(high, high2);
        }
    }
}

// n elements as two planes of n bytes: codes = round(x * by) + offset. n is a multiple of W.
INLINE void round_planes(const float *x, float by, int32_t offset, long n, uint8_t *planes) {
    typedef uint8_t narrow_bytes __attribute__((vector_size(W)));
    typedef narrow_bytes narrow_any __attribute__((aligned(1), may_alias));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest, even
    for (long j = 0; j < n; j += W) {
        const vi code = (vi)(load(x + j) * by + magic) - (vi)magic + offset;
        *(narrow_any *)(planes + j) = __builtin_convertvector((code >> 8) & 255, narrow_bytes);
        *(narrow_any *)(planes + n + j) = __builtin_convertvector(code & 255, narrow_bytes);
    }
}

// The largest |x|, NaN if any is not finite. n is a multiple of W.
INLINE float largest_of(const float *x, long n) {
    vf most = {}, poison = {};
    for (long j = 0; j < n; j += W) {
        const vf value = load(x + j);
        most = larger((vf)((vu)value & 0x7fffffffu), most);
        poison += value * 0.0f;
    }
    return largest(most) + sum(poison);
}
INLINE float inverse(float most, float steps) { return most > 0x1p-100f && most < __builtin_inff() ? steps / most : 0.0f; }

// A scaled query becomes, where it stands, two planes of dim bytes and the factor of their integers.
static NOINLINE void round_query(const Attention &p, float *query) {
    float x[MOST_DIM];
    __builtin_memcpy(x, query, p.dim * sizeof(float));
    const float most = largest_of(x, p.dim), factor = most / 32767.0f;
    round_planes(x, inverse(most, 32767.0f), 32768, p.dim, (uint8_t *)query);
    query[p.dim / 2] = factor;
}

template <int NQ> static NOINLINE void score(const Attention &p, const Scratch &s, long i, const Chunk<int8_t> &chunk, const Turned &t) {
    const long quads = p.dim / 4;
    const uint8_t *planes[NQ];
    for (int n = 0; n < NQ; n++) planes[n] = (const uint8_t *)(s.query + (i + n) * s.query_row);
    for (long j = 0; j < chunk.count; j += 2 * PANEL) {
        if (i == 0) chunk.ahead->ask(PANEL * p.dim / PIECE);
        const int8_t *first = t.keys + j * p.dim, *second = first + PANEL * p.dim;
        vi acc[NQ][2][2] = {};
        for (long q = 0; q < quads; q++) {
            const vi key[2] = {(vi)load_bytes(first + q * PIECE), (vi)load_bytes(second + q * PIECE)};
            for (int n = 0; n < NQ; n++)
                for (int plane = 0; plane < 2; plane++) {
                    const vub x = (vub)spread(planes[n] + plane * p.dim + 4 * q);
                    for (int half = 0; half < 2; half++) acc[n][plane][half] = add_quads(acc[n][plane][half], x, key[half]);
                }
        }
        for (int n = 0; n < NQ; n++)
            for (int half = 0; half < 2; half++) {
                const long at = j + half * PANEL;
                const vi sums = *(const packed::vi_any *)(t.key_sums + at);
                const vi whole = (vi)(((vu)acc[n][0][half] << 8) + (vu)acc[n][1][half] - ((vu)sums << 15));
                const vf factor = load(chunk.key_scales + at) * s.query[(i + n) * s.query_row + p.dim / 2];
                store(s.scores + (i + n) * CHUNK + at, __builtin_convertvector(whole, vf) * factor);
            }
    }
}

template <int NQ>
static NOINLINE void add_values(const Attention &p, const Scratch &s, long i, const Chunk<int8_t> &chunk, const Turned &t) {
    alignas(64) uint8_t planes[NQ][2 * CHUNK];
    const long padded = round_up(chunk.count, W);
    float factor[NQ];
    for (int n = 0; n < NQ; n++) {
        const float *weights = s.scores + (i + n) * CHUNK, most = largest_of(weights, padded);
        factor[n] = most / 65535.0f;
        round_planes(weights, inverse(most, 65535.0f), 0, padded, planes[n]);
    }
    const long pieces = p.value_dim / PIECE;
    for (long piece = 0; piece < pieces; piece++) {
        vi acc[NQ][2][4] = {};
        const int8_t *values = t.values + piece * 4 * PIECE;
        for (long j = 0; j < chunk.count; j += 4, values += pieces * 4 * PIECE) {
            if (i == 0) chunk.ahead->ask(1);
            vi value[4];
            for (int m = 0; m < 4; m++) value[m] = (vi)load_bytes(values + m * PIECE);
            for (int n = 0; n < NQ; n++)
                for (int plane = 0; plane < 2; plane++) {
                    const vub x = (vub)spread(planes[n] + plane * padded + j);
                    for (int m = 0; m < 4; m++) acc[n][plane][m] = add_quads(acc[n][plane][m], x, value[m]);
                }
        }
        for (int n = 0; n < NQ; n++) {
            vf x[4];
            for (int m = 0; m < 4; m++) x[m] = __builtin_convertvector((acc[n][0][m] << 8) + acc[n][1][m], vf) * factor[n];
            // x[m] holds dims 4m to 4m + 3 of every quarter of 16 dims.
            const vi lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, upper = lower + 8;
            const vi even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
            const vf a = __builtin_shuffle(x[0], x[1], lower), b = __builtin_shuffle(x[2], x[3], lower);
            const vf c = __builtin_shuffle(x[0], x[1], upper), d = __builtin_shuffle(x[2], x[3], upper);
            float *target = s.acc + (i + n) * s.acc_row + piece * PIECE;
            store(target, load(target) + __builtin_shuffle(a, b, even));
            store(target + W, load(target + W) + __builtin_shuffle(a, b, odd));
            store(target + 2 * W, load(target + 2 * W) + __builtin_shuffle(c, d, even));
            store(target + 3 * W, load(target + 3 * W) + __builtin_shuffle(c, d, odd));
        }
    }
}

// All queries of the scratch, `group` of each row, against one chunk of which row r sees counts[r] keys from the first on.
static void attend_chunk(const Attention &p, const Scratch &s, long rows, const long *counts, const Chunk<int8_t> &chunk, Turned &t) {
    const long group = p.group(), queries = rows * group;
    turn_keys(p, chunk, t);
    long i = 0;
    for (; i + QUERIES <= queries; i += QUERIES) score<QUERIES>(p, s, i, chunk, t);
    for (; i < queries; i++) score<1>(p, s, i, chunk, t);
    for (i = 0; i < queries; i++) {
        const long seen = counts[i / group];
        if (seen > 0) soften(p, s, i, seen, nullptr, chunk.value_scales);
        for (long j = max_of(0, round_up(seen, W)); j < round_up(chunk.count, W); j++) s.scores[i * CHUNK + j] = 0.0f;
    }
    turn_values(p, chunk, t);
    for (i = 0; i + 2 <= queries; i += 2) add_values<2>(p, s, i, chunk, t);
    for (; i < queries; i++) add_values<1>(p, s, i, chunk, t);
    chunk.ahead->ask(CHUNK);
}

}  // namespace codes
#else
#define WINDLASS_INT8_CHUNKS 0
#endif
