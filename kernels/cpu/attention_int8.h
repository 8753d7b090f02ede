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

// Walks what some heads hold of the tokens [at, end) of a row in the order in which it lies in memory and asks for it, a few
// lines at a time between the arithmetic: many at once would only wait for each other, and one head at a time would be runs
// too short for the hardware to follow (measured: half the bandwidth).
struct Ahead {
    const Attention *p;
    CodePages pages;
    long b, head, heads, at, end;
    long count = 0;             // tokens of the block that `at` lies in, up to the end
    long part = 0, number = 0;  // keys, values, their scales; the head
    const char *line = nullptr;
    long left = 0;              // lines of the run

    Ahead(const Attention &p, const CodePages &pages, long b, long head, long heads, long at, long end)
        : p(&p), pages(pages), b(b), head(head), heads(heads), at(at), end(end) {
        count = min_of(end - at, p.block_size - at % p.block_size);
    }
    NOINLINE bool next_run() {
        if (number == heads) number = 0, part++;
        if (part == 4) {
            part = 0, at += count;
            count = min_of(end - at, p->block_size);
        }
        if (at >= end) return false;
        const long block = p->tables[b * p->table_row + at / p->block_size], token = at % p->block_size, h = head + number;
        const long bytes = part == 0 ? pages.quads * QUAD : part == 1 ? pages.value_dim : long(sizeof(float));
        const void *first = part == 0   ? (const void *)pages.key_panel(block, h, token)
                            : part == 1 ? (const void *)pages.value_quad(block, h, token)
                            : part == 2 ? (const void *)pages.key_scale(block, h, token)
                                        : (const void *)pages.value_scale(block, h, token);
        // The heads of a whole block are one run.
        const long together = count == p->block_size ? heads : 1;
        line = (const char *)first;
        left = ceil_div(together * count * bytes, 64);
        number += together;
        return true;
    }
    INLINE_MEMBER void ask(long lines) {
        for (; lines > 0; lines--, left--, line += 64) {
            if (left == 0 && !next_run()) return;
            __builtin_prefetch(line, 0, 2);
        }
    }
    // Lines of one head in `tokens` tokens.
    static long lines_of(const CodePages &pages, long tokens) {
        return ceil_div(tokens * (pages.quads * QUAD + pages.value_dim + 2 * long(sizeof(float))), 64);
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
// their queries, [head][row][query of the group]. What the rows see of the cut has no gap. Products: Floats or Quads. ask_until:
// tokens before it may be asked for ahead. loaded: the queries are there from the cut before.
template <class Products>
static void attend_cut(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut,
                       long ask_until, bool loaded) {
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
    Chunk chunk;
    for (long start = first / CHUNK * CHUNK; start < last; start += CHUNK) {
        Ahead ahead(p, pages, b, head, heads, start + CHUNK, min_of(start + 2 * CHUNK, ask_until));
        for (long h = 0; h < heads; h++) {
            if (h == 0) chunk.find(p, pages, b, head, start, max_of(start, first), min_of(start + CHUNK, last));
            else chunk.go_on(pages);
            const Scratch s = all.from(h * queries);
            Products::score(p, s, queries, chunk, ahead);
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
            Products::add(p, s, queries, chunk, ahead);
            ahead.ask(24);
        }
    }
}

}  // namespace codes
