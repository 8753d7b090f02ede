// Rotation with the append to the cache, RMS norm, and gated activations. float32 arithmetic whatever the storage.

constexpr long SERIAL_ELEMENTS = 1 << 15;  // below it one thread is quicker

INLINE long threads_for(long elements, long units) {
    return elements < SERIAL_ELEMENTS ? 1 : max_of(1, min_of(units, omp_get_max_threads()));
}

// Calls f(pointer of the type) with the type that the code names: 0 float32, 1 bfloat16, 2 float16.
template <class F> INLINE void with_type(int type, F f) {
    if (type == 0) f((float *)nullptr);
    else if (type == 1) f((bf16 *)nullptr);
    else f((f16 *)nullptr);
}

// target = source rotated by half-split pairs (j, j + half), the pair times `scale`; dims past 2 * half are copied.
template <class TS, class TT>
INLINE void rotate_head(const TS *source, TT *target, long dim, long half, const float *cos, const float *sin, float scale) {
    long j = 0;
    for (; j + W <= half; j += W) {
        const vf a = load(source + j), b = load(source + half + j), c = load(cos + j) , s = load(sin + j);
        store(target + j, (a * c - b * s) * scale);
        store(target + half + j, (b * c + a * s) * scale);
    }
    for (; j < half; j++) {
        const float a = widen(source[j]), b = widen(source[half + j]);
        narrow((a * cos[j] - b * sin[j]) * scale, target[j]);
        narrow((b * cos[j] + a * sin[j]) * scale, target[half + j]);
    }
    if ((const void *)source == (const void *)target) return;
    for (j = 2 * half; j < dim; j++) narrow(widen(source[j]), target[j]);
}

template <class TS, class TT> INLINE void copy_row(const TS *source, TT *target, long n) {
    long j = 0;
    for (; j + W <= n; j += W) store(target + j, load(source + j));
    for (; j < n; j++) narrow(widen(source[j]), target[j]);
}

// q, k, v: [T, heads, dim], strides of T and heads in elements, one type. Pages: [slots, kv_heads, dim], contiguous, one type.
// Negative slots are padding: q is rotated, nothing is written. Returns 2 for a slot past num_slots, with nothing touched.
EXPORT int WINDLASS_NAME(rotate_and_append)(
    void *q, long q_row, long q_head, const void *k, long k_row, long k_head, const void *v, long v_row, long v_head,
    int type, const float *cos, long cos_row, const float *sin, long sin_row, const float *q_scale, void *key_pages,
    void *value_pages, int page_type, long num_slots, const int64_t *slots, long tokens, long q_heads, long kv_heads,
    long dim, long value_dim, long half) {
    for (long t = 0; t < tokens; t++)
        if (slots[t] >= num_slots) return 2;
    const long threads = threads_for(tokens * (q_heads + 2 * kv_heads) * dim, tokens);
    with_type(type, [&](auto *element) {
        with_type(page_type, [&](auto *page) {
            typedef decltype(element) TS;
            typedef decltype(page) TP;
#pragma omp parallel for num_threads(threads) schedule(static)
            for (long t = 0; t < tokens; t++) {
                const float *c = cos + t * cos_row, *s = sin + t * sin_row;
                for (long h = 0; h < q_heads; h++) {
                    const TS head = (TS)q + t * q_row + h * q_head;
                    rotate_head(head, head, dim, half, c, s, q_scale[t]);
                }
                if (slots[t] < 0) continue;
                for (long h = 0; h < kv_heads; h++) {
                    const long entry = slots[t] * kv_heads + h;
                    rotate_head((TS)k + t * k_row + h * k_head, (TP)key_pages + entry * dim, dim, half, c, s, 1.0f);
                    copy_row((TS)v + t * v_row + h * v_head, (TP)value_pages + entry * value_dim, value_dim);
                }
            }
        });
    });
    return 0;
}

// out = x / sqrt(mean(x^2) + eps) * weight. With a residual: residual += x first, rounded to its type, then normed.
EXPORT int WINDLASS_NAME(rms_norm)(const void *x, long x_row, void *residual, long residual_row, int type,
                                   const float *weight, float eps, void *out, long rows, long dim) {
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
#pragma omp parallel for num_threads(threads_for(rows * dim, rows)) schedule(static)
        for (long r = 0; r < rows; r++) {
            const auto *source = (T)x + r * x_row;
            auto *target = (T)out + r * dim;
            if (residual) {
                auto *carried = (T)residual + r * residual_row;
                long j = 0;
                for (; j + W <= dim; j += W) store(carried + j, load(carried + j) + load(source + j));
                for (; j < dim; j++) narrow(widen(carried[j]) + widen(source[j]), carried[j]);
                source = carried;
            }
            vf squares[2] = {};
            long j = 0;
            for (; j + 2 * W <= dim; j += 2 * W) {
                const vf a = load(source + j), b = load(source + j + W);
                squares[0] += a * a;
                squares[1] += b * b;
            }
            float total = sum(squares[0] + squares[1]);
            for (; j < dim; j++) total += widen(source[j]) * widen(source[j]);
            const float scale = 1.0f / __builtin_sqrtf(total / float(dim) + eps);
            for (j = 0; j + W <= dim; j += W) store(target + j, load(source + j) * scale * load(weight + j));
            for (; j < dim; j++) narrow(widen(source[j]) * scale * weight[j], target[j]);
        }
    });
    return 0;
}

// silu(x) = x / (1 + exp(-x)); gelu's tanh form (Hendrycks and Gimpel, 1606.08415).
INLINE vf silu(vf x) { return x / (1.0f + exp_of(-x)); }
INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }

// out[r, j] = activation(gate_up[r, j]) * gate_up[r, dim + j]. activation: 0 silu, 1 gelu_tanh.
EXPORT int WINDLASS_NAME(gated_activation)(const void *gate_up, long row, int type, int activation, void *out, long rows,
                                           long dim) {
    constexpr long PIECE = 4096;  // so that a single wide row still spreads over the threads
    const long pieces = ceil_div(dim, PIECE);
    with_type(type, [&](auto *element) {
        typedef decltype(element) T;
#pragma omp parallel for num_threads(threads_for(rows * dim, rows * pieces)) schedule(static)
        for (long unit = 0; unit < rows * pieces; unit++) {
            const long r = unit / pieces, begin = unit % pieces * PIECE, end = min_of(begin + PIECE, dim);
            const auto *gate = (T)gate_up + r * row, *up = gate + dim;
            auto *target = (T)out + r * dim;
            for (long j = begin; j < end; j += W) {
                const long n = min_of(W, end - j);
                const vf g = n == W ? load(gate + j) : load_some(gate + j, n);
                const vf u = n == W ? load(up + j) : load_some(up + j, n);
                const vf y = (activation ? gelu_tanh(g) : silu(g)) * u;
                if (n == W) store(target + j, y);
                else store_some(target + j, y, n);
            }
        }
    });
    return 0;
}
