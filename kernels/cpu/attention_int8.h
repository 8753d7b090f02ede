// Decoding over int8 keys and values as they lie in the pages (int8_pages.h). See attention.h for cuts, chunks and merging.
//
// A vector holds a quad of W tokens' keys or W dims of four tokens' values, so no sum crosses lanes: scores come out token by
// token, results dim by dim. Chunks begin at absolute multiples of CHUNK whatever the window; what a row does not see of one is
// left out by selection, since its codes and scales may be anything. Adding what is left out would add zeros, so a row's bits
// are the same whichever rows it shares a chunk with.

namespace codes {

constexpr long PANELS = CHUNK / PANEL_TOKENS;
constexpr int SOFTENED = 4;  // queries whose chains of operations overlap

// The part [begin, end) of a chunk that any row sees, for one kv head: whole panels, as tokens of the chunk.
struct Chunk {
    const int8_t *keys[PANELS], *values[PANELS];
    const float *key_scales[PANELS], *value_scales[PANELS];
    long begin, end;

    INLINE_MEMBER const int8_t *key_codes(long token) const { return keys[token / PANEL_TOKENS] + token % PANEL_TOKENS * QUAD; }
    INLINE_MEMBER vf key_scale(long token) const { return load(key_scales[token / PANEL_TOKENS] + token % PANEL_TOKENS); }
    INLINE_MEMBER vf value_scale(long token) const { return load(value_scales[token / PANEL_TOKENS] + token % PANEL_TOKENS); }

    // Tokens first to last of row b's sequence, of the chunk that begins at `start`.
    void find(const Attention &p, const CodePages &pages, long b, long head, long start, long first, long last) {
        begin = (first - start) / PANEL_TOKENS * PANEL_TOKENS, end = round_up(last - start, PANEL_TOKENS);
        for (long j = begin; j < end; j += PANEL_TOKENS) {
            const long at = start + j, block = p.tables[b * p.table_row + at / p.block_size], token = at % p.block_size;
            const long panel = j / PANEL_TOKENS;
            keys[panel] = pages.key_panel(block, head, token), values[panel] = pages.value_quad(block, head, token);
            key_scales[panel] = pages.key_scale(block, head, token), value_scales[panel] = pages.value_scale(block, head, token);
        }
    }
    // The same tokens of the next head.
    void go_on(const CodePages &pages) {
        for (long i = begin / PANEL_TOKENS; i < end / PANEL_TOKENS; i++) {
            keys[i] += pages.block_size * pages.quads * QUAD, values[i] += pages.block_size * pages.value_dim;
            key_scales[i] += pages.block_size, value_scales[i] += pages.block_size;
        }
    }
};

// Of W tokens from j on, x where a row sees them, else `hidden`.
INLINE vf only_seen(vf x, long j, long first, long last, float hidden) {
    if (j >= first && j + W <= last) return x;
    const vi lanes = lane_numbers() + int32_t(j);
    return (lanes >= int32_t(first)) & (lanes < int32_t(last)) ? x : splat(hidden);
}

// The tokens [first, last) of a chunk that a query sees.
struct Seen { long first, last; };

// A query's scores, of which those it does not see become -inf, set its new top, to which its acc and total are brought.
static NOINLINE void raise_top(const Attention &p, const Scratch &s, long i, const Chunk &chunk, Seen seen) {
    float *scores = s.scores + i * CHUNK;
    vf most = splat(-__builtin_inff());
    for (long j = chunk.begin; j < chunk.end; j += W) {
        vf x = load(scores + j);
        if (p.soft_cap != 0.0f) x = tanh_of(x / p.soft_cap) * (p.soft_cap * LOG2_E);
        x = only_seen(x, j, seen.first, seen.last, -__builtin_inff());
        most = larger(x, most);
        store(scores + j, x);
    }
    const float here = largest(most), old = s.top[i];
    if (!(here > old)) return;
    const float shrink = exp2_of(splat(old - here))[0];
    s.top[i] = here;
    s.total[i] *= shrink;
    for (long d = 0; d < s.acc_row; d += W) store(s.acc + i * s.acc_row + d, load(s.acc + i * s.acc_row + d) * shrink);
}

// Scores become weights times value scales, zeros where the query does not see. Returns the largest, NaN if any is.
static NOINLINE float weigh(const Scratch &s, long i, const Chunk &chunk, Seen seen) {
    float *scores = s.scores + i * CHUNK;
    const float base = s.top[i] == -__builtin_inff() ? 0.0f : s.top[i];
    vf total = {};
    vu most = {};  // of what is never negative the bits rise with the number, and those of NaN are above all
    for (long j = chunk.begin; j < chunk.end; j += W) {
        const vf weight = exp2_of(load(scores + j) - base);
        total += weight;
        const vf scaled = only_seen(weight * chunk.value_scale(j), j, seen.first, seen.last, 0.0f);
        most = (vu)scaled > most ? (vu)scaled : most;
        store(scores + j, scaled);
    }
    s.total[i] += sum(total);
    return float_of(packed::most_of(most));
}

// One cut of `rows` rows from row b on, which share a table, for `heads` kv heads from `head` on: fills acc, top and total of
// their queries, [head][row][query of the group]. What the rows see of the cut has no gap. Products: Floats or Quads. loaded:
// the queries are there from the cut before.
template <class Products>
static void attend_cut(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut, bool loaded) {
    const long group = p.group(), queries = rows * group;
    const CodePages pages = p.codes();
    for (long h = 0; h < heads; h++) {
        const Scratch s = all.from(h * queries);
        if (!loaded) {
            load_queries(p, s, b, rows, head + h);
            for (long i = 0; i < queries; i++) Products::prepare(p, s.query + i * s.query_row);
        }
        clear_results(s, queries);
    }
    long first = p.begin_of(b, cut), last = p.end_of(b, cut);
    for (long r = 1; r < rows; r++) first = min_of(first, p.begin_of(b + r, cut)), last = max_of(last, p.end_of(b + r, cut));
    Chunk chunk, next;
    next.find(p, pages, b, head, first / CHUNK * CHUNK, first, min_of(first / CHUNK * CHUNK + CHUNK, last));
    for (long start = first / CHUNK * CHUNK; start < last; start += CHUNK) {
        for (long h = 0; h < heads; h++) {
            chunk = next;
            if (h + 1 < heads) next.go_on(pages);
            else if (start + CHUNK < last) next.find(p, pages, b, head, start + CHUNK, start + CHUNK, min_of(start + 2 * CHUNK, last));
            const Scratch s = all.from(h * queries);
            Products::score(p, s, queries, chunk, next);
            for (long i = 0; i < queries; i += SOFTENED) {
                const long count = min_of(SOFTENED, queries - i);
                Seen seen[SOFTENED];
                float most[SOFTENED];
                for (long n = 0; n < count; n++) {
                    const long row = b + (i + n) / group;
                    seen[n] = {p.begin_of(row, cut) - start, p.end_of(row, cut) - start};
                }
                for (long n = 0; n < count; n++) raise_top(p, s, i + n, chunk, seen[n]);
                for (long n = 0; n < count; n++) most[n] = weigh(s, i + n, chunk, seen[n]);
                for (long n = 0; n < count; n++) Products::finish_weights(s.scores + (i + n) * CHUNK, chunk, most[n]);
            }
            Products::add(p, s, queries, chunk, next);
        }
    }
}

}  // namespace codes
