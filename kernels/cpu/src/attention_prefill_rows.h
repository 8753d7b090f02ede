// Attention of prompts over all sequences of a call: which units the threads take. See attention_prefill.h.

// The units of every sequence with at least `fewest` queries. Returns their number; units may be null, to count only.
static long cut_units(const Prefill &p, long batch, long fewest, long most_tokens, Unit *units) {
    long count = 0;
    for (long b = 0; b < batch; b++) {
        const long queries = p.query_start[b + 1] - p.query_start[b], pieces = ceil_div(queries, most_tokens);
        if (queries < fewest) continue;
        for (long i = pieces - 1; i >= 0; i--, count++) {  // the last sees most keys: it goes first
            const long begin = queries * i / pieces, end = queries * (i + 1) / pieces;
            if (units) units[count] = {b, p.query_start[b] + begin, end - begin, p.lengths[b] - queries + begin};
        }
    }
    return count;
}

template <class T> static int prefill_all(const Prefill &p, long batch, long fewest) {
    const long group = p.group(), all_threads = max_of(1, omp_get_max_threads());
    long queries = 0, elements = 0;
    for (long b = 0; b < batch; b++) {
        const long own = p.query_start[b + 1] - p.query_start[b];
        if (own < fewest) continue;
        queries += own;
        elements += own * (p.lengths[b] - own / 2) * p.heads;
    }
    if (!queries) return 0;
#if WINDLASS_INT8_PREFILL
    const bool with_codes = sizeof(T) == 1 && prefill_codes::fit(p);
    const long fewest_rows = with_codes ? prefill_codes::FEWEST_UNIT_ROWS : FEWEST_ROWS;
    const long fitting_rows = with_codes ? prefill_codes::fitting_rows(p) : UNIT_FLOATS / (p.dim + p.value_dim);
#else
    const long fewest_rows = FEWEST_ROWS, fitting_rows = UNIT_FLOATS / (p.dim + p.value_dim);
#endif
    // Enough units per thread that none is left alone with the last, but no smaller than pays for the packing.
    const long fair = ceil_div(queries * p.kv_heads, UNITS_PER_THREAD * all_threads);
    const long most = max_of(ceil_div(fewest_rows, group), min_of(fair, max_of(1, fitting_rows / group)));
    const long count = cut_units(p, batch, fewest, most, nullptr), rows = round_up(most * group, PASS_ROWS);
    Unit *units = (Unit *)malloc(count * sizeof(Unit));
    if (!units) return 1;
    cut_units(p, batch, fewest, most, units);
    long threads = elements * p.dim < SERIAL_ELEMENTS ? 1 : all_threads;
#if WINDLASS_INT8_PREFILL
    if (with_codes) {
        const int failed = prefill_codes::run_units(p, units, count, most * group, threads);
        free(units);
        return failed;
    }
#endif
    threads = min_of(count * p.kv_heads, threads);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        void *memory = nullptr;
        failed |= posix_memalign(&memory, 64, Workspace::floats(p, rows) * sizeof(float)) != 0;
        Workspace w;
        if (!failed) w.place(p, rows, (float *)memory);
#pragma omp for schedule(dynamic, 1) nowait
        for (long i = 0; i < count * p.kv_heads; i++)
            if (!failed) run_unit<T>(p, w, units[i / p.kv_heads], i % p.kv_heads);
        free(memory);
    }
    free(units);
    return failed;
}

// Shapes as in attention.py. Sequences with fewer than `fewest` queries are passed over, their rows of out untouched.
// Returns 1 when out of memory, 2 for a block that a query sees and the tables or the pages lack.
EXPORT int WINDLASS_NAME(paged_attention_prefill)(
    const void *q, long q_row, long q_head, int q_type, const void *keys, const void *values, const float *key_scales,
    const float *value_scales, int page_type, long num_blocks, long block_size, long kv_heads, long dim, long value_dim,
    const int32_t *tables, long table_row, long table_columns, const int64_t *query_start, const int64_t *lengths,
    long window, float scale, float soft_cap, const float *score_scale, const float *sinks, void *out, long batch, long heads,
    long fewest) {
    const Prefill p = {q, q_row, q_head, q_type, keys, values, key_scales, value_scales, block_size, kv_heads, dim,
                       value_dim, tables, table_row, query_start, lengths, window, scale, soft_cap, score_scale, sinks,
                       out, heads};
    for (long b = 0; b < batch; b++) {
        const long queries = query_start[b + 1] - query_start[b];
        if (queries < fewest || queries < 1) continue;
        const long last = ceil_div(lengths[b], block_size);
        const long first = window ? max_of(0, lengths[b] - queries - window + 1) / block_size : 0;
        if (lengths[b] < queries || last > table_columns) return 2;
        for (long i = first; i < last; i++)
            if (tables[b * table_row + i] < 0 || tables[b * table_row + i] >= num_blocks) return 2;
    }
    if (page_type == 0) return prefill_all<float>(p, batch, max_of(1, fewest));
    if (page_type == 1) return prefill_all<bf16>(p, batch, max_of(1, fewest));
    if (page_type == 2) return prefill_all<f16>(p, batch, max_of(1, fewest));
    return prefill_all<int8_t>(p, batch, max_of(1, fewest));
}
