// Attention over all rows of a call: what the threads take, and in which order results are merged. See attention.h.

// Elements of keys below which one thread is quicker (measured: two are at 24 keys of 8 heads of 64 already).
constexpr long SERIAL_KEYS = 1 << 12;

// One cut of `rows` rows from row b on, which share a table and see this cut from the same key on, for `heads` kv heads from
// `head` on: fills acc, top and total of their queries, [head][row][query of the group]. ask_until: keys before it may be
// asked for ahead. loaded: the queries are there from the cut before.
template <class T>
static void attend_cut(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut,
                       long ask_until, bool loaded) {
    const long group = p.group(), begin = p.begin_of(b, cut);
    long shortest = SPLIT, longest = 0;
    for (long r = 0; r < rows; r++) {
        shortest = min_of(shortest, p.end_of(b + r, cut) - begin);
        longest = max_of(longest, p.end_of(b + r, cut) - begin);
    }
    long entries[SPLIT];
    for (long j = 0; j < longest; j++) entries[j] = p.entry(b, begin + j);
    for (long h = 0; h < heads; h++) {
        const Scratch s = all.from(h * rows * group);
        if (!loaded) {
            load_queries(p, s, b, rows, head + h);
            for (long i = 0; i < rows * group; i++) arrange_query<T>(s.query + i * s.query_row, p.dim);
        }
        clear_results(s, rows * group);
    }
    Chunk<T> chunk;
    constexpr long keys = CHUNK_KEYS<T>;
    for (long j = 0; j < longest; j += keys) {
        const long next = begin + j + keys, coming = max_of(0, min_of(keys, ask_until - next));
        Ahead<T> ahead(p, b, head, heads, next, next + coming);
        chunk.ahead = &ahead;
        for (long h = 0; h < heads; h++) {
            const Scratch s = all.from(h * rows * group);
            const long there = min_of(keys, longest - j);
            if (h == 0 || chunk.count != there) chunk.find(p, entries + j, head + h, there);
            else chunk.go_on(p);
            if (shortest >= min_of(j + keys, longest)) {
                attend_chunk<T>(p, s, 0, rows * group, chunk);
                continue;
            }
            for (long r = 0; r < rows; r++) {
                chunk.count = min_of(keys, p.end_of(b + r, cut) - begin - j);
                if (chunk.count > 0) attend_chunk<T>(p, s, r * group, (r + 1) * group, chunk);
            }
        }
    }
}

template <>
void attend_cut<int8_t>(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut, long ask_until,
                        bool loaded) {
#if defined(WINDLASS_VNNI) || defined(WINDLASS_DOT)
    if (codes::quads_fit(p)) return codes::attend_cut<codes::Quads>(p, all, b, rows, head, heads, cut, ask_until, loaded);
#endif
    codes::attend_cut<codes::Floats>(p, all, b, rows, head, heads, cut, ask_until, loaded);
}

// Whether row b may share the pass over a cut with rows before it that see it from `begin` to `end`.
template <class T> INLINE bool may_join(const Attention &p, long b, long cut, long begin, long end) {
    if (!p.has(b, cut)) return false;
    const long own = p.begin_of(b, cut);
    return sizeof(T) == 1 ? own >= begin && own <= end : own == begin;
}

// Rows of tables of their own: units are (row, cut, some heads), so one long row spreads over the threads.
template <class T> static int attend_alone(const Attention &p) {
    const long group = p.group(), part_row = p.value_dim + 2;
    long *first = (long *)malloc((p.batch + 1) * sizeof(long));  // cuts before each sequence
    if (!first) return 1;
    first[0] = 0;
    long keys = 0;
    for (long b = 0; b < p.batch; b++) {
        first[b + 1] = first[b] + p.cuts(b);
        keys += max_of(0, p.length(b) - p.first_key(b));
    }
    const long cuts = first[p.batch], all_threads = max_of(1, omp_get_max_threads());
    const bool serial = keys * p.kv_heads * p.dim < SERIAL_KEYS;
    // A cut's heads lie side by side in memory: one thread takes them all where there are enough cuts, and a lone cut is split
    // evenly. Cuts of different lengths go in smaller pieces, so that no thread is left alone with a long one.
    const long pieces = serial ? 1 : min_of(p.kv_heads, cuts == 1 ? all_threads : ceil_div(4 * all_threads, max_of(1, cuts)));
    const long heads = ceil_div(p.kv_heads, pieces), units = cuts * ceil_div(p.kv_heads, heads);
    const long threads = serial ? 1 : max_of(1, min_of(units, all_threads));
    // Runs of units that one thread takes: within them the next cut is asked for ahead.
    const long run = pieces > 1 ? 1 : max_of(1, units / (2 * threads)), runs = ceil_div(units, run);
    long *owner = (long *)malloc(max_of(1, cuts) * sizeof(long));
    // [cut][head][part_row]
    float *parts = (float *)malloc(max_of(1, cuts * p.heads * part_row) * sizeof(float));
    int failed = !owner || !parts;
    if (!failed) {
        for (long b = 0; b < p.batch; b++)
            for (long c = first[b]; c < first[b + 1]; c++) owner[c] = b;
#pragma omp parallel num_threads(threads) reduction(| : failed)
        {
            float *memory = (float *)malloc(Scratch::floats(p, 1, heads) * sizeof(float));
            failed |= !memory;
            Scratch s;
            s.place(p, 1, heads, memory);
#pragma omp for schedule(dynamic, 1)
            for (long r = 0; r < runs; r++) {
                if (!memory) continue;
                const long stop = min_of((r + 1) * run, units);
                for (long unit = r * run; unit < stop; unit++) {
                    const long at = unit / ceil_div(p.kv_heads, heads), head = unit % ceil_div(p.kv_heads, heads) * heads;
                    const long b = owner[at], cut = p.first_cut(b) + at - first[b], here = min_of(heads, p.kv_heads - head);
                    const long begin = p.begin_of(b, cut), end = p.end_of(b, cut);
                    const bool goes_on = unit + 1 < stop && at + 1 < first[b + 1] && pieces == 1;
                    if (unit == r * run || at == first[b]) {
                        if constexpr (sizeof(T) == 1) {
                            codes::Ahead(p, p.codes(), b, head, here, begin / PANEL_TOKENS * PANEL_TOKENS, min_of(begin / CHUNK * CHUNK + CHUNK, end)).ask(1 << 20);
                        } else {
                            Ahead<T>(p, b, head, here, begin, min_of(begin + CHUNK_KEYS<T>, end)).ask(1 << 20);
                        }
                    }
                    attend_cut<T>(p, s, b, 1, head, here, cut, goes_on ? p.length(b) : end, unit > r * run && at > first[b] && pieces == 1);
                    for (long i = 0; i < here * group; i++)
                        keep_part(p, s, i, parts + (at * p.heads + head * group + i) * part_row);
                }
            }
            free(memory);
#pragma omp for schedule(static)
            for (long i = 0; i < p.batch * p.heads; i++) {
                const long b = i / p.heads, head = i % p.heads;
                merge(p, parts + (first[b] * p.heads + head) * part_row, first[b + 1] - first[b], p.heads * part_row, b, head);
            }
        }
    }
    free(first), free(owner), free(parts);
    return failed;
}

// Rows of one table: units are (pack of rows, kv head), merged on the spot.
template <class T> static int attend_packed(const Attention &p) {
    const long group = p.group(), part_row = p.value_dim + 2, rows = max_of(1, PACK / group);
    const long packs = ceil_div(p.batch, rows), units = packs * p.kv_heads;
    long keys = 0, most_cuts = 0;
    for (long pack = 0; pack < packs; pack++) {
        long first = p.first_cut(pack * rows), last = 0;
        for (long b = pack * rows; b < min_of((pack + 1) * rows, p.batch); b++) {
            first = min_of(first, p.first_cut(b));
            last = max_of(last, p.first_cut(b) + p.cuts(b));
            keys += max_of(0, p.length(b) - p.first_key(b));
        }
        most_cuts = max_of(most_cuts, last - first);
    }
    const long threads = keys * p.kv_heads * p.dim < SERIAL_KEYS ? 1 : max_of(1, min_of(units, omp_get_max_threads()));
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const long scratch = Scratch::floats(p, rows, 1);
        // Scratch, then parts [cut][row][query of the group][part_row].
        float *memory = (float *)malloc((scratch + most_cuts * rows * group * part_row) * sizeof(float));
        failed |= !memory;
        Scratch s;
        s.place(p, rows, 1, memory);
        float *parts = memory + scratch;
#pragma omp for schedule(dynamic, 1)
        for (long unit = 0; unit < units; unit++) {
            if (!memory) continue;
            // The last pack sees most keys: it goes first, so that no thread is left alone with it.
            const long b0 = (packs - 1 - unit / p.kv_heads) * rows, head = unit % p.kv_heads;
            const long count = min_of(rows, p.batch - b0);
            long first = p.first_cut(b0), last = 0;
            for (long r = 0; r < count; r++) {
                first = min_of(first, p.first_cut(b0 + r));
                last = max_of(last, p.first_cut(b0 + r) + p.cuts(b0 + r));
            }
            for (long cut = first; cut < last; cut++) {
                for (long r = 0, run; r < count; r += run) {
                    run = 1;
                    if (!p.has(b0 + r, cut)) continue;
                    const long begin = p.begin_of(b0 + r, cut);
                    long end = p.end_of(b0 + r, cut);
                    for (; r + run < count && may_join<T>(p, b0 + r + run, cut, begin, end); run++)
                        end = max_of(end, p.end_of(b0 + r + run, cut));
                    attend_cut<T>(p, s, b0 + r, run, head, 1, cut, p.length(b0 + r), false);
                    float *part = parts + ((cut - first) * rows + r) * group * part_row;
                    for (long i = 0; i < run * group; i++) keep_part(p, s, i, part + i * part_row);
                }
            }
            for (long r = 0; r < count; r++) {
                const float *part = parts + ((p.first_cut(b0 + r) - first) * rows + r) * group * part_row;
                for (long i = 0; i < group; i++)
                    merge(p, part + i * part_row, p.cuts(b0 + r), rows * group * part_row, b0 + r, head * group + i);
            }
        }
        free(memory);
    }
    return failed;
}

// Whether every block that row b looks at is one of the pages.
static bool blocks_are_there(const Attention &p, long b, long table_columns, long num_blocks) {
    const long last = ceil_div(max_of(0, p.length(b)), p.block_size);
    if (last > table_columns) return false;
    const int32_t *table = p.tables + b * p.table_row;
    for (long i = p.first_key(b) / p.block_size; i < last; i++)
        if (table[i] < 0 || table[i] >= num_blocks) return false;
    return true;
}

// Shapes as in ops.py. A length of 0 gives a row of zeros. Returns 1 when out of memory, 2 for a block that the tables
// name in a query's sight and the pages lack. With a table_row of 0 all rows share the first one's table.
EXPORT int WINDLASS_NAME(paged_attention_decode)(
    const void *q, long q_row, long q_head, int q_type, const void *keys, const void *values, const float *key_scales,
    const float *value_scales, int page_type, long num_blocks, long block_size, long kv_heads, long dim, long value_dim, const int32_t *tables, long table_row,
    long table_columns, const void *lengths, int lengths_are_64, long window, float scale, float soft_cap,
    const float *score_scale, const float *sinks, void *out, long batch, long heads) {
    const Attention p = {q, q_row, q_head, q_type, keys, values, key_scales, value_scales, page_type, block_size, kv_heads, dim, value_dim, tables,
                         table_row, lengths, lengths_are_64, window, scale, soft_cap, score_scale, sinks, out, batch, heads};
    for (long b = 0; b < batch; b++)
        if (!blocks_are_there(p, b, table_columns, num_blocks)) return 2;
    const bool packed = table_row == 0 && batch > 1;
    const auto attend = [&](auto *page) {
        typedef __typeof__(*page) T;
        return packed ? attend_packed<T>(p) : attend_alone<T>(p);
    };
    if (page_type == 0) return attend((float *)nullptr);
    if (page_type == 1) return attend((bf16 *)nullptr);
    return page_type == 2 ? attend((f16 *)nullptr) : attend((int8_t *)nullptr);
}
