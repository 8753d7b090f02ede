// Entry point of prefill attention: distribution of all sequences of a call over threads. See attention_prefill.h.

#pragma once

#include "attention_call.h"
#include "attention_prefill.h"
#include "attention_prefill_int8.h"
#include "attention_prefill_int8_blocks.h"
#if defined(WINDLASS_AMX)
#include "attention_prefill_amx.h"
#endif
#include "attention_key_ranges.h"
#include "simd.h"
#include "work_split.h"

namespace {

// The units of every sequence with at least `fewest` queries. Returns their number; units may be null, to count only.
static long cut_units(const Prefill &p, long fewest, long most_tokens, Unit *units) {
    long count = 0;
    for (long b = 0; b < p.batch; b++) {
        const long queries = p.queries(b), pieces = ceil_div(queries, most_tokens);
        if (queries < fewest) continue;
        for (long i = pieces - 1; i >= 0; i--) {  // the last one sees most keys, so it is scheduled first
            const long begin = queries * i / pieces, end = queries * (i + 1) / pieces;
            for (long head = 0; head < p.kv_heads; head++, count++)
                if (units) units[count] = {b, p.query_start[b] + begin, end - begin, p.length(b) - queries + begin, head};
        }
    }
    return count;
}

// Runs a unit in the arithmetic that the call allows.
template <class T> static void run_any(const Prefill &p, const Workspace &w, const Unit &unit) {
#if defined(WINDLASS_BF16)
    if constexpr (!IN_PANELS<T>)
        if (p.bf16_products && p.queries(unit.b) >= MIN_BF16_QUERIES) {
#if defined(WINDLASS_AMX)
            const matrix::Use use;
            if (prefill_matrix::fits(p)) return run_unit<prefill_matrix::MatrixUnit, T>(p, w, unit);
#endif
            return run_unit<Vectors<pair>, T>(p, w, unit);
        }
#endif
    run_unit<Vectors<float>, T>(p, w, unit);
}

template <class T> static int prefill_all(const Prefill &p, long fewest) {
    const long group = p.group(), all_threads = max_of(1, omp_get_max_threads());
    long queries = 0, elements = 0;
    for (long b = 0; b < p.batch; b++) {
        const long own = p.queries(b);
        if (own < fewest) continue;
        queries += own;
        elements += own * (p.length(b) - own / 2) * p.heads;
    }
    if (!queries) return 0;
    long fewest_rows = FEWEST_ROWS, fitting_rows = UNIT_FLOATS / (p.dim + p.value_dim);
#if WINDLASS_INT8_PREFILL
    const bool with_codes = IN_PANELS<T> && !p.range_ends && p.causal && prefill_codes::fit(p);
    if (with_codes) fewest_rows = prefill_codes::FEWEST_UNIT_ROWS, fitting_rows = prefill_codes::fitting_rows(p);
#endif
    // Enough units per thread for an even load, but none smaller than the packing is worth.
    const long fair = ceil_div(queries * p.kv_heads, UNITS_PER_THREAD * all_threads);
    const long most = max_of(ceil_div(fewest_rows, group), min_of(fair, max_of(1, fitting_rows / group)));
    const long count = cut_units(p, fewest, most, nullptr), rows = round_up(most * group, WHOLE_ROWS);
    Unit *units = (Unit *)malloc(count * sizeof(Unit));
    if (!units) return 1;
    cut_units(p, fewest, most, units);
    long threads = elements * p.dim < SERIAL_ELEMENTS ? 1 : all_threads;
#if WINDLASS_INT8_PREFILL
    if (with_codes) {
        const int failed = prefill_codes::run_units(p, units, count, most * group, threads);
        free(units);
        return failed;
    }
#endif
    threads = min_of(count, threads);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        void *memory = nullptr;
        failed |= posix_memalign(&memory, 64, Workspace::floats(p, rows) * sizeof(float)) != 0;
        Workspace w;
        if (!failed) w.place(p, rows, (float *)memory);
#pragma omp for schedule(dynamic, 1) nowait
        for (long i = 0; i < count; i++)
            if (!failed) run_any<T>(p, w, units[i]);
        free(memory);
    }
    free(units);
    return failed;
}

// Sequences with fewer than `fewest` queries are skipped; their rows of out stay unchanged. NO_SUCH_BLOCK: a visible block is
// missing in the tables or pages. For ranges see attention_decode_entry.h.
EXPORT int WINDLASS_NAME(paged_attention_prefill)(const AttentionArguments *arguments, long fewest) {
    const Prefill p(*arguments);
    if (is_unsupported(p)) return UNSUPPORTED_CALL;
    for (long b = 0; b < p.batch; b++) {
        const long queries = p.queries(b), length = p.length(b);
        if (queries < fewest || queries < 1) continue;
        if (length < queries) return NO_SUCH_BLOCK;
        if (const int code = check_ranges(p, b, p.query_start[b], queries)) return code;
    }
    return with_page_type(p.page_type, [&](auto *page) { return prefill_all<__typeof__(*page)>(p, max_of(1, fewest)); });
}

}  // namespace
