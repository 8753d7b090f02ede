// Quantizes rows of a weight and lays them into the panels of quantized.h.
//
// 8 bits: one float32 scale a row, its largest magnitude becomes 127. 4 bits: one bfloat16 scale for 32 elements, values
// -8 .. 7. Of several ranges that clip more or less, the one with the least squared error wins; given the integers, the
// best scale is the least-squares fit. A row or group that holds NaN or infinity gets the scale NaN.

namespace packed {

constexpr int RANGES = 9;
constexpr float NARROWEST = 7.0f, RANGE_STEP = 0.25f;  // the largest magnitude falls on 7 .. 9, of which 8 is kept

static void pack_row_eight(const float *row, long K, long panel_row, uint8_t *panel, float *scale) {
    float largest = 0.0f;
    bool finite = true;
    vu top = {};
    for (long k = 0; k < K; k += W) {
        const vu bits = (vu)(k + W <= K ? load(row + k) : load_some(row + k, K - k)) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    for (int i = 0; i < W; i++) {
        finite &= top[i] < 0x7f800000u;
        if (float_of(top[i]) > largest) largest = float_of(top[i]);
    }
    const float by = inverse_scale(largest, finite, *scale);
    for (long k = 0; k < K; k += W) {
        typedef int8_t quarter __attribute__((vector_size(W)));
        const vi q = round_scaled(k + W <= K ? load(row + k) : load_some(row + k, K - k), by);
        const quarter bytes = __builtin_convertvector(q, quarter);
        for (long i = 0; i < W && k + i < K; i += 4)
            __builtin_memcpy(panel + (k + i) * PANEL + 4 * panel_row, (const char *)&bytes + i, 4);
    }
}

INLINE vf clip_four(vf x) {
    const vf low = splat(-8.0f), high = splat(7.0f);
    return x < low ? low : x > high ? high : x;
}

// The scale of 32 values and 1 / scale; 0 where all are as good as zero.
static float choose_scale(const vf (&x)[GROUP / W], bf16 &stored) {
    const vf magic = splat(12582912.0f);
    float extreme = 0.0f, best = -1.0f, chosen = 0.0f;
    bool finite = true;
    for (int j = 0; j < GROUP / W; j++) {
        for (int i = 0; i < W; i++) {
            const float magnitude = float_of(bits_of(x[j][i]) & 0x7fffffffu);
            finite &= bits_of(magnitude) < 0x7f800000u;
            if (magnitude > float_of(bits_of(extreme) & 0x7fffffffu)) extreme = x[j][i];
        }
    }
    if (!finite) {
        narrow(__builtin_nanf(""), stored);
        return 0.0f;
    }
    if (float_of(bits_of(extreme) & 0x7fffffffu) < TINY) {
        narrow(0.0f, stored);
        return 0.0f;
    }
    // Relative to the extreme, so that no square leaves the range of float32. The side with room for -8 takes the extreme;
    // the other side is tried too.
    vf y[GROUP / W];
    for (int j = 0; j < GROUP / W; j++) y[j] = x[j] * (1.0f / extreme);
    for (int side = -1; side <= 1; side += 2) {
        for (int r = 0; r < RANGES; r++) {
            const float by = float(side) * (NARROWEST - (side > 0 ? 1.0f : 0.0f) + RANGE_STEP * float(r));
            vf products = {}, squares = {};
            for (int j = 0; j < GROUP / W; j++) {
                const vf q = clip_four((y[j] * by + magic) - magic);
                products += y[j] * q;
                squares += q * q;
            }
            const float xq = sum(products), qq = sum(squares);
            if (xq * xq > best * qq) best = xq * xq / qq, chosen = xq / qq * extreme;
        }
    }
    narrow(chosen, stored);
    return 1.0f / widen(stored);
}

static void pack_row_four(const float *row, long K, long panel_row, uint8_t *panel, bf16 *scales) {
    const vf magic = splat(12582912.0f);
    for (long k = 0; k < K; k += GROUP, panel += GROUP / 8 * QUAD_BYTES, scales += PANEL) {
        vf x[GROUP / W];
        for (int j = 0; j < GROUP / W; j++) {
            const long at = k + j * W;
            x[j] = at + W <= K ? load(row + at) : at < K ? load_some(row + at, K - at) : vf{};
        }
        const float by = choose_scale(x, scales[panel_row]);
        uint8_t q[GROUP];
        for (int j = 0; j < GROUP / W; j++) {
            const vf rounded = by == 0.0f ? vf{} : clip_four((x[j] * by + magic) - magic);
            for (int i = 0; i < W; i++) q[j * W + i] = uint8_t(int(rounded[i]) + 8);
        }
        for (int pair = 0; pair < GROUP / 8; pair++) {
            uint8_t both[4];
            for (int i = 0; i < 4; i++) both[i] = uint8_t(q[8 * pair + i] | (q[8 * pair + 4 + i] << 4));
            __builtin_memcpy(panel + pair * QUAD_BYTES + 4 * panel_row, both, 4);
        }
    }
}

template <class T> static int pack_rows_of(const T *source, long stride, long first, long count, long K, int bits,
                                           uint8_t *data, void *scales) {
    const long units = ceil_div(K, bits == 8 ? 4 : GROUP), panel_bytes = units * QUAD_BYTES * (bits == 8 ? 1 : GROUP / 8);
    const long begin = first / PANEL, end = ceil_div(first + count, PANEL);
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        void *memory = nullptr;
        failed |= posix_memalign(&memory, 64, round_up(4 * K, 64)) != 0;
        float *row = (float *)memory;
#pragma omp for schedule(dynamic, 4)
        for (long panel = begin; panel < end; panel++) {  // whole panels, so that threads never write to one line
            for (long r = max_of(first, panel * PANEL); r < min_of(first + count, (panel + 1) * PANEL) && !failed; r++) {
                const T *from = source + (r - first) * stride;
                for (long k = 0; k < K; k += W) {
                    if (k + W <= K) store(row + k, load(from + k));
                    else store_some(row + k, load_some(from + k, K - k), K - k);
                }
                uint8_t *to = data + panel * panel_bytes;
                if (bits == 8) pack_row_eight(row, K, r % PANEL, to, (float *)scales + r);
                else pack_row_four(row, K, r % PANEL, to, (bf16 *)scales + panel * units * PANEL);
            }
        }
        free(memory);
    }
    return failed;
}

// Rows [first, first + count) of a packed weight from source [count, K] of the given type. Returns 1 when out of memory.
EXPORT int WINDLASS_NAME(pack_weight)(const void *source, long stride, int type, long first, long count, long K, int bits,
                                      uint8_t *data, void *scales) {
    if (type == 0) return pack_rows_of((const float *)source, stride, first, count, K, bits, data, scales);
    if (type == 1) return pack_rows_of((const bf16 *)source, stride, first, count, K, bits, data, scales);
    return pack_rows_of((const f16 *)source, stride, first, count, K, bits, data, scales);
}

}  // namespace packed
