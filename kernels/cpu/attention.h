// Attention of one new token per sequence over its paged keys and values: "flash decoding".
//
// The keys of a sequence are cut at absolute multiples of SPLIT; each (sequence, cut, kv head) is a unit that any thread
// may take, with a running maximum and sum over CHUNK keys at a time. Cuts are merged in order by their log-sum-exp, so
// a sequence's result depends on its own length only, never on its neighbours or the number of threads. The queries
// that share a kv head share its loads. Only keys a query sees are ever read, nor any table entry before them.
//
// Rows that share one table are the queries of one prompt. They go in packs, which share the loads of the chunks that all
// of a pack see; every row still passes through the same cuts and chunks as it would alone, so its bits are the same.

constexpr long SPLIT = 256;    // keys per unit
constexpr long CHUNK = 64;     // keys whose scores are kept; divides SPLIT
constexpr int QUERIES = 4;     // queries of one kv head handled together
constexpr int KEYS = 2;        // keys handled together: 8 accumulators hide the latency of the multiply-add
constexpr long AHEAD = 8;      // keys prefetched before their turn at the start of a unit
constexpr long PACK = 16;      // queries of one kv head, over all rows of a pack

struct Attention {
    const void *q; long q_row, q_head; int q_type;
    const void *keys, *values; const float *key_scales, *value_scales; int page_type;  // scales: of int8 pages, else null
    long block_size, kv_heads, dim, value_dim;
    const int32_t *tables; long table_row;
    const void *lengths; int lengths_are_64;
    long window;             // 0: none
    float scale, soft_cap;   // soft_cap 0: none
    const float *score_scale, *sinks;
    void *out;
    long batch, heads;

    INLINE_MEMBER long length(long b) const {
        return lengths_are_64 ? (long)((const int64_t *)lengths)[b] : (long)((const int32_t *)lengths)[b];
    }
    INLINE_MEMBER long first_key(long b) const { return window ? max_of(0, length(b) - window) : 0; }
    INLINE_MEMBER long first_cut(long b) const { return first_key(b) / SPLIT; }
    INLINE_MEMBER long cuts(long b) const { return length(b) <= 0 ? 0 : ceil_div(length(b), SPLIT) - first_cut(b); }
    INLINE_MEMBER long group() const { return heads / kv_heads; }
    INLINE_MEMBER long begin_of(long b, long cut) const { return max_of(cut * SPLIT, first_key(b)); }
    INLINE_MEMBER long end_of(long b, long cut) const { return min_of((cut + 1) * SPLIT, length(b)); }
    INLINE_MEMBER bool has(long b, long cut) const { return begin_of(b, cut) < end_of(b, cut); }
};

// Per-thread working memory: scaled queries, scores of a chunk, weighted values, running maximum and sum.
struct Scratch {
    float *query, *scores, *acc, *top, *total;
    long query_row, acc_row;
    static long floats(const Attention &p, long rows) {
        return rows * p.group() * (round_up(p.dim, W) + CHUNK + round_up(p.value_dim, W) + 2) + 4 * W;
    }
    void place(const Attention &p, long rows, float *memory) {
        const long queries = rows * p.group();
        query_row = round_up(p.dim, W), acc_row = round_up(p.value_dim, W);
        query = memory;
        acc = query + queries * query_row;
        scores = acc + queries * acc_row;
        top = scores + queries * CHUNK;
        total = top + queries;
    }
};

// The keys and values of one chunk, and the keys of the next: while one is worked on, the other is on its way.
template <class T> struct Chunk {
    const T *const *keys, *const *values, *const *next_keys;
    long count, next_count;
    bool first;  // of its unit: nothing has asked for its keys yet
    const float *key_scales, *value_scales;  // of int8 keys and values, whole vectors readable
};

INLINE void prefetch_row(const void *row, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i, 0, 3);
}

// scores[i][j] of NQ queries and KEYS keys, unscaled.
template <class T, int NQ>
INLINE void score_tile(const float *query, long query_row, const T *const *keys, long dim, float *scores) {
    vf acc[NQ][KEYS] = {};
    const T *key[KEYS];
    for (int j = 0; j < KEYS; j++) key[j] = keys[j];
    for (long d = 0; d + W <= dim; d += W) {
        vf k[KEYS];
        for (int j = 0; j < KEYS; j++) k[j] = load(key[j] + d);
        for (int i = 0; i < NQ; i++) {
            const vf x = load(query + i * query_row + d);
            for (int j = 0; j < KEYS; j++) acc[i][j] = add_product(acc[i][j], k[j], x);
        }
    }
    for (int i = 0; i < NQ; i += 2) {
        const int next = i + 1 < NQ ? i + 1 : i;
        float four[4];
        sum_four(acc[i][0], acc[i][1], acc[next][0], acc[next][1], four);
        __builtin_memcpy(scores + i * CHUNK, four, 8);
        __builtin_memcpy(scores + next * CHUNK, four + 2, 8);
    }
}

// The share of the dims past the last whole vector.
template <class T>
static NOINLINE void score_tail(const float *query, const T *const *keys, long dim, long count, float *scores) {
    for (long j = 0; j < count; j++)
        for (long d = dim / W * W; d < dim; d++) scores[j] += query[d] * widen(keys[j][d]);
}

template <class T, int NQ>
static NOINLINE void score_chunk(const Attention &p, const Scratch &s, long i, const Chunk<T> &chunk) {
    const long key_bytes = p.dim * (long)sizeof(T), value_bytes = p.value_dim * (long)sizeof(T), last = chunk.count - 1;
    for (long j = 0; j <= last; j += KEYS) {
        // Past the last key the tile repeats it; its score is overwritten.
        const T *tile[KEYS];
        for (int n = 0; n < KEYS; n++) {
            const long at = min_of(j + n, last);
            tile[n] = chunk.keys[at];
            if (i) continue;
            prefetch_row(chunk.values[at], value_bytes);
            if (chunk.first) prefetch_row(chunk.keys[min_of(at + AHEAD, last)], key_bytes);
        }
        score_tile<T, NQ>(s.query + i * s.query_row, s.query_row, tile, p.dim, s.scores + i * CHUNK + j);
    }
    if (p.dim % W)
        for (int n = 0; n < NQ; n++)
            score_tail(s.query + (i + n) * s.query_row, chunk.keys, p.dim, chunk.count, s.scores + (i + n) * CHUNK);
}

// Scores become weights exp(score - top); acc and total are brought to the new top. The scales of int8 keys and values are
// those of their scores and weights.
static NOINLINE void soften(const Attention &p, const Scratch &s, long i, long count, const float *key_scales,
                            const float *value_scales) {
    float *scores = s.scores + i * CHUNK;
    const long padded = round_up(count, W);
    if (key_scales)
        for (long j = 0; j < padded; j += W) store(scores + j, load(scores + j) * load(key_scales + j));
    for (long j = count; j < padded; j++) scores[j] = -__builtin_inff();
    vf most = splat(-__builtin_inff());
    for (long j = 0; j < padded; j += W) {
        vf x = load(scores + j);
        if (p.soft_cap != 0.0f) {
            // The padding stays at minus infinity.
            const vf capped = tanh_of(x / p.soft_cap) * p.soft_cap;
            if (j + W <= count) x = capped;
            else for (long n = 0; n < count - j; n++) x[n] = capped[n];
            store(scores + j, x);
        }
        most = larger(most, x);
    }
    const float top = largest(most) > s.top[i] ? largest(most) : s.top[i];
    const float base = top == -__builtin_inff() ? 0.0f : top;
    const float shrink = exp_of(s.top[i] - base);
    vf total = {};
    for (long j = 0; j < padded; j += W) {
        const vf weight = exp_of(load(scores + j) - base);
        store(scores + j, value_scales ? weight * load(value_scales + j) : weight);
        total += weight;
    }
    s.total[i] = s.total[i] * shrink + sum(total);
    s.top[i] = top;
    if (shrink != 1.0f)
        for (long d = 0; d < s.acc_row; d += W) store(s.acc + i * s.acc_row + d, load(s.acc + i * s.acc_row + d) * shrink);
}

// acc[i][:] += sum over keys of weight * value, NQ queries at once.
template <class T, int NQ>
static NOINLINE void add_values(const Attention &p, const Scratch &s, long i, const Chunk<T> &chunk) {
    const float *weights = s.scores + i * CHUNK;
    const T *const *values = chunk.values;
    const long count = chunk.count;
    if (i == 0)
        for (long j = 0; j < chunk.next_count; j++) prefetch_row(chunk.next_keys[j], p.dim * (long)sizeof(T));
    long d = 0;
    for (; d + 2 * W <= p.value_dim; d += 2 * W) {
        float *acc = s.acc + i * s.acc_row + d;
        vf sums[NQ][2];
        for (int n = 0; n < NQ; n++) sums[n][0] = load(acc + n * s.acc_row), sums[n][1] = load(acc + n * s.acc_row + W);
        for (long j = 0; j < count; j++) {
            const vf first = load(values[j] + d), second = load(values[j] + d + W);
            for (int n = 0; n < NQ; n++) {
                const vf weight = splat(weights[n * CHUNK + j]);
                sums[n][0] = add_product(sums[n][0], first, weight);
                sums[n][1] = add_product(sums[n][1], second, weight);
            }
        }
        for (int n = 0; n < NQ; n++) store(acc + n * s.acc_row, sums[n][0]), store(acc + n * s.acc_row + W, sums[n][1]);
    }
    for (; d < p.value_dim; d += W) {
        const long rest = min_of(W, p.value_dim - d);
        for (int n = 0; n < NQ; n++) {
            float *acc = s.acc + (i + n) * s.acc_row + d;
            vf sums = load(acc);
            for (long j = 0; j < count; j++) {
                const vf value = rest == W ? load(values[j] + d) : load_some(values[j] + d, rest);
                sums = add_product(sums, value, splat(weights[n * CHUNK + j]));
            }
            store(acc, sums);
        }
    }
}

// Queries [first, last) of the scratch against one chunk.
template <class T>
static void attend_chunk(const Attention &p, const Scratch &s, long first, long last, const Chunk<T> &chunk) {
    long i = first;
    for (; i + QUERIES <= last; i += QUERIES) score_chunk<T, QUERIES>(p, s, i, chunk);
    for (; i + 2 <= last; i += 2) score_chunk<T, 2>(p, s, i, chunk);
    for (; i < last; i++) score_chunk<T, 1>(p, s, i, chunk);
    for (i = first; i < last; i++) soften(p, s, i, chunk.count, chunk.key_scales, chunk.value_scales);
    for (i = first; i + QUERIES <= last; i += QUERIES) add_values<T, QUERIES>(p, s, i, chunk);
    for (; i + 2 <= last; i += 2) add_values<T, 2>(p, s, i, chunk);
    for (; i < last; i++) add_values<T, 1>(p, s, i, chunk);
}

// One cut of `rows` rows from row b on, which share a table and see this cut from the same key on: fills acc, top and
// total of their queries.
template <class T> static void attend_cut(const Attention &p, const Scratch &s, long b, long rows, long head, long cut) {
    const long group = p.group(), begin = p.begin_of(b, cut);
    long shortest = SPLIT, longest = 0;
    for (long r = 0; r < rows; r++) {
        const float scale = p.scale * p.score_scale[b + r];
        for (long i = 0; i < group; i++) {
            const long source = (b + r) * p.q_row + (head * group + i) * p.q_head, query = r * group + i;
            for (long d = 0; d < s.query_row; d++)
                s.query[query * s.query_row + d] = d < p.dim ? element(p.q, p.q_type, source + d) * scale : 0.0f;
            for (long d = 0; d < s.acc_row; d++) s.acc[query * s.acc_row + d] = 0.0f;
            s.top[query] = -__builtin_inff();
            s.total[query] = 0.0f;
        }
        shortest = min_of(shortest, p.end_of(b + r, cut) - begin);
        longest = max_of(longest, p.end_of(b + r, cut) - begin);
    }
    const int32_t *table = p.tables + b * p.table_row;
    const T *keys[SPLIT], *values[SPLIT];
    float key_scales[SPLIT], value_scales[SPLIT];
    if (p.key_scales)
        for (long j = max_of(0, longest - W); j < SPLIT; j++) key_scales[j] = value_scales[j] = 0.0f;
    long block = begin / p.block_size, offset = begin % p.block_size;
    for (long j = 0; j < longest; block++, offset = 0)
        for (; offset < p.block_size && j < longest; offset++, j++) {
            const long entry = ((long)table[block] * p.block_size + offset) * p.kv_heads + head;
            keys[j] = (const T *)p.keys + entry * p.dim;
            values[j] = (const T *)p.values + entry * p.value_dim;
            if (p.key_scales) key_scales[j] = p.key_scales[entry], value_scales[j] = p.value_scales[entry];
        }
    // After the last chunk comes the next head's first, most likely on this thread: its keys lie beside this head's.
    const T *beside[CHUNK];
    const long beside_count = head + 1 < p.kv_heads ? min_of(CHUNK, longest) : 0;
    for (long j = 0; j < beside_count; j++) beside[j] = keys[j] + p.dim;
    for (long j = 0; j < longest; j += CHUNK) {
        const long next = j + CHUNK, left = longest - next;
        Chunk<T> chunk = {keys + j, values + j, left > 0 ? keys + next : beside, min_of(CHUNK, longest - j),
                          left > 0 ? min_of(CHUNK, left) : beside_count, j == 0 && head == 0,
                          p.key_scales ? key_scales + j : nullptr, p.key_scales ? value_scales + j : nullptr};
        if (shortest >= min_of(next, longest)) {
            attend_chunk<T>(p, s, 0, rows * group, chunk);
            continue;
        }
        for (long r = 0; r < rows; r++) {
            chunk.count = min_of(CHUNK, p.end_of(b + r, cut) - begin - j);
            if (chunk.count > 0) attend_chunk<T>(p, s, r * group, (r + 1) * group, chunk);
        }
    }
}

// A query's state after a cut, for the merge.
INLINE void keep_part(const Attention &p, const Scratch &s, long query, float *part) {
    __builtin_memcpy(part, s.acc + query * s.acc_row, p.value_dim * sizeof(float));
    part[p.value_dim] = s.top[query];
    part[p.value_dim + 1] = s.total[query];
}

// Result of one head from its cuts, each [value_dim weighted sums, top, total].
static NOINLINE void merge(const Attention &p, const float *parts, long count, long part_row, long b, long head) {
    const long at = (b * p.heads + head) * p.value_dim;
    float top = p.sinks ? p.sinks[head] : -__builtin_inff();
    for (long c = 0; c < count; c++) top = parts[c * part_row + p.value_dim] > top ? parts[c * part_row + p.value_dim] : top;
    const float base = top == -__builtin_inff() ? 0.0f : top;
    float total = p.sinks ? exp_of(p.sinks[head] - base) : 0.0f;
    for (long c = 0; c < count; c++)
        total += parts[c * part_row + p.value_dim + 1] * exp_of(parts[c * part_row + p.value_dim] - base);
    for (long d = 0; d < p.value_dim; d += W) {
        const long n = min_of(W, p.value_dim - d);
        vf sums = {};
        for (long c = 0; c < count; c++) {
            const float *part = parts + c * part_row;
            const vf x = n == W ? load(part + d) : load_some(part + d, n);
            sums += x * exp_of(splat(part[p.value_dim] - base));
        }
        if (count) sums /= total;
        with_type(p.q_type, [&](auto *type) { store_some((decltype(type))p.out + at + d, sums, n); });
    }
}
