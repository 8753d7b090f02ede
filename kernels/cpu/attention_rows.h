// Attention over all rows of a call: what the threads take, and in which order results are merged. See attention.h.

// Rows of tables of their own: units are (row, cut, kv head), so one long row spreads over the threads.
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
    const long units = first[p.batch] * p.kv_heads;
    long *owner = (long *)malloc(max_of(1, first[p.batch]) * sizeof(long));
    // [cut][head][part_row]
    float *parts = (float *)malloc(max_of(1, first[p.batch] * p.heads * part_row) * sizeof(float));
    const long threads = keys * p.kv_heads * p.dim < SERIAL_ELEMENTS ? 1 : max_of(1, min_of(units, omp_get_max_threads()));
    // A cut's heads lie side by side in memory: one thread takes them all where there are enough cuts.
    const long together = first[p.batch] >= 4 * threads ? p.kv_heads : 1;
    int failed = !owner || !parts;
    if (!failed) {
        for (long b = 0; b < p.batch; b++)
            for (long c = first[b]; c < first[b + 1]; c++) owner[c] = b;
#pragma omp parallel num_threads(threads) reduction(| : failed)
        {
            float *memory = (float *)malloc(Scratch::floats(p, 1) * sizeof(float));
            failed |= !memory;
            Scratch s;
            s.place(p, 1, memory);
#pragma omp for schedule(dynamic, together)
            for (long unit = 0; unit < units; unit++) {
                if (!memory) continue;
                const long cut = unit / p.kv_heads, head = unit % p.kv_heads, b = owner[cut];
                attend_cut<T>(p, s, b, 1, head, p.first_cut(b) + cut - first[b]);
                for (long i = 0; i < group; i++)
                    keep_part(p, s, i, parts + (cut * p.heads + head * group + i) * part_row);
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
    const long threads = keys * p.kv_heads * p.dim < SERIAL_ELEMENTS ? 1 : max_of(1, min_of(units, omp_get_max_threads()));
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const long scratch = Scratch::floats(p, rows);
        // Scratch, then parts [cut][row][query of the group][part_row].
        float *memory = (float *)malloc((scratch + most_cuts * rows * group * part_row) * sizeof(float));
        failed |= !memory;
        Scratch s;
        s.place(p, rows, memory);
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
                    while (r + run < count && p.has(b0 + r + run, cut) && p.begin_of(b0 + r + run, cut) == begin) run++;
                    attend_cut<T>(p, s, b0 + r, run, head, cut);
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
