// Attention of the queries of prompts over int8 pages with vpdpbusd: nothing is converted, codes are multiplied as they lie.
//
// Units, blocks at absolute places and the running softmax are those of attention_prefill.h. Queries, and per row and block
// the weights times the scales of their values, are rounded to 16 bits and go as two planes of bytes; sums are exact
// integers, so what is lost is 2^-16 of the largest element, far below what the codes have lost. The sum over the upper
// plane is shifted and gathers the lower plane in the same accumulators.
//
// Keys are the unsigned side, as code + 128, so that a query's planes may be broadcast as signed bytes; the constant this
// adds is one number per query. A piece of keys holds 4 dims of 16 tokens, a piece of values 16 dims of 4 tokens: no sum
// crosses lanes. What a softmax needs of all lanes is folded for all rows of a tile at once.
//
// The blocks of a row are gathered in cuts at absolute places, merged in order: that lets a few rows over many keys spread
// over the threads, with the same bits as if one thread had passed over all.

#if defined(WINDLASS_VNNI)
#define WINDLASS_INT8_PREFILL 1

namespace prefill_codes {

constexpr long PANELS = BLOCK / PANEL_TOKENS;
constexpr long CUT_KEYS = 8 * BLOCK;         // keys gathered before they are merged
constexpr long MOST_DIM = 512;               // 127 * 32639 * 512 is below 2^31
constexpr float QUERY_STEPS = 32639.0f;      // 127 * 256 + 127: the largest number of two signed planes
constexpr float WEIGHT_STEPS = 65535.0f;
constexpr float MAGIC = 12582912.0f;         // 1.5 * 2^23: adding it rounds to the nearest integer, even on a tie, in the low bits
constexpr long UNIT_BYTES = 256 << 10;       // queries and results of a unit: a share of an L2
constexpr long FEWEST_UNIT_ROWS = 2 * TILE_ROWS;  // smaller units would wait for their codes
constexpr long STEP_ROWS = TILE_ROWS / 3;    // tiles are one, two or three times as high

INLINE bool fit(const Prefill &p) {
    return p.value_dim % W == 0 && p.dim <= MOST_DIM;
}

INLINE long quads_of(const Prefill &p) { return ceil_div(p.dim, QUAD); }

// Rows whose queries and results fit.
INLINE long fitting_rows(const Prefill &p) { return UNIT_BYTES / (2 * QUAD * quads_of(p) + 8 * p.value_dim); }

// What rows have gathered over some keys: weighted values, the largest score in base 2, the sum of weights.
struct Gathered {
    float *acc;            // [row][value_dim]
    float *top, *total;    // [row]; a vector may be loaded at any row
    void start(long rows, long value_dim) const {
        for (long r = 0; r < rows; r++) top[r] = -__builtin_inff(), total[r] = 0.0f;
        for (long i = 0; i < rows * value_dim; i++) acc[i] = 0.0f;
    }
};

// Working memory of a thread; rows are rounded up to whole tiles.
struct Workspace {
    int8_t *query;          // [tile][plane: upper, lower][quad of dims][TILE_ROWS][4]
    int32_t *bias;          // [row]: what the keys' offset adds to a sum, negated
    float *factor;          // [row]: of the integer sums
    Gathered cut, whole;
    float *scores;          // [TILE_ROWS][BLOCK]: scores, then weights
    uint8_t *weights;       // [TILE_ROWS][plane: upper, lower][BLOCK], in the order of `quad_place`

    // Sets the parts that stand in `memory`, or null to count; returns the bytes.
    long place(const Prefill &p, long most_rows, void *memory) {
        long used = 0;
        const auto take = [&](long bytes) {
            char *part = (char *)memory + used;
            used += round_up(bytes, 64);
            return (void *)part;
        };
        const long rows = round_up(most_rows, TILE_ROWS);
        const auto gathered = [&] {
            return Gathered{(float *)take(rows * p.value_dim * 4), (float *)take((rows + W) * 4), (float *)take((rows + W) * 4)};
        };
        scores = (float *)take(TILE_ROWS * BLOCK * 4);
        weights = (uint8_t *)take(TILE_ROWS * BLOCK * 2);
        query = (int8_t *)take(rows * quads_of(p) * QUAD * 2);
        bias = (int32_t *)take(rows * 4);
        factor = (float *)take((rows + W) * 4);
        cut = gathered();
        whole = gathered();
        return used;
    }
};

// Where the codes and scales of one kv head in a block lie, panel by panel.
struct Places {
    const int8_t *keys[PANELS], *values[PANELS];
    const float *key_scales[PANELS], *value_scales[PANELS];

    // Of keys [begin, end); other panels get the place of the first, so that they may be loaded too.
    void find(const Prefill &p, const int32_t *table, long head, long begin, long end) {
        const CodePages pages = p.codes();
        const long first = begin % BLOCK / PANEL_TOKENS, start = begin / BLOCK * BLOCK;
        for (long n = 0; n < PANELS; n++) {
            const long at = start + (n < first || start + n * PANEL_TOKENS >= end ? first : n) * PANEL_TOKENS;
            const long block = table[at / p.block_size], token = at % p.block_size;
            keys[n] = pages.key_panel(block, head, token), values[n] = pages.value_quad(block, head, token);
            key_scales[n] = pages.key_scale(block, head, token), value_scales[n] = pages.value_scale(block, head, token);
        }
    }
};

struct CodeBlock {
    Places here, next;                 // next is asked for while `here` is worked on
    float key_scales[BLOCK], value_scales[BLOCK];  // zeros for what no row of the unit sees

    void take_scales(long skip, long there) {
        for (long n = 0; n < PANELS; n++) {
            __builtin_memcpy(key_scales + n * PANEL_TOKENS, here.key_scales[n], PANEL_TOKENS * sizeof(float));
            __builtin_memcpy(value_scales + n * PANEL_TOKENS, here.value_scales[n], PANEL_TOKENS * sizeof(float));
        }
        for (long j = 0; j < skip; j++) key_scales[j] = value_scales[j] = 0.0f;
        for (long j = there; j < BLOCK; j++) key_scales[j] = value_scales[j] = 0.0f;
        for (long n = 0; n < PANELS; n++) __builtin_prefetch(next.key_scales[n], 0, 2), __builtin_prefetch(next.value_scales[n], 0, 2);
    }
};

// Keys that a row sees, of a block.
struct Sight { long begin, end; };

INLINE vi seen_from(long j, Sight sight) {
    return (lane_numbers() >= int32_t(sight.begin - j)) & (lane_numbers() < int32_t(sight.end - j));
}
template <bool SOME> INLINE vf only_seen(vf x, vf other, long j, Sight sight) {
    if constexpr (SOME) return seen_from(j, sight) ? x : other;
    else return x;
}

// The largest of a row's scores in [first, last), lane by lane. With a soft cap scores are brought to their final form first.
template <bool SOME> INLINE vf largest_lanes(const Prefill &p, float *scores, long first, long last, Sight sight, float factor) {
    const vf nothing = splat(-__builtin_inff());
    vf most = nothing;
    for (long j = first; j < last; j += W) {
        vf score = load(scores + j);
        if (p.soft_cap != 0.0f) {
            score = tanh_of(score * factor / p.soft_cap) * (p.soft_cap * LOG2_E);
            store(scores + j, score);
        }
        most = larger(only_seen<SOME>(score, nothing, j, sight), most);
    }
    return most;
}

// Of what is never negative the bits rise with the number, and those of NaN are above all.
INLINE vu larger_bits(vu a, vu b) { return a > b ? a : b; }

// A row's scores become weights times scales; adds the weights into `total` and finds the largest product, lane by lane.
template <bool SOME>
INLINE void weigh(float *scores, long first, long last, Sight sight, float factor, float base, const float *value_scales,
                  vf &total, vu &most) {
    const vf by = splat(factor), less = splat(-base);
    for (long j = first; j < last; j += W) {
        const vf weight = only_seen<SOME>(exp2_of(add_product(less, load(scores + j), by)), vf{}, j, sight);
        const vf product = only_seen<SOME>(weight * load(value_scales + j), vf{}, j, sight);
        total += weight;
        most = larger_bits((vu)product, most);
        store(scores + j, product);
    }
}

// Steps of a tile between its two products: softmax and rounding. Leaves planes of weights, and per row what the products
// of integers are worth and what the values so far shrink by.
static NOINLINE void soften_tile(const Prefill &p, const Workspace &w, const CodeBlock &block, long row, long rows, long first, long last,
                                 const Sight *sight, float *worth, float *shrink) {
    const auto sees_all = [&](long i) { return sight[i].begin <= first && sight[i].end >= last; };
    vf lanes[W] = {};
    for (long i = 0; i < rows; i++) {
        float *scores = w.scores + i * BLOCK;
        const float factor = w.factor[row + i];
        lanes[i] = sees_all(i) ? largest_lanes<false>(p, scores, first, last, sight[i], factor)
                               : largest_lanes<true>(p, scores, first, last, sight[i], factor);
    }
    const vf factor = p.soft_cap != 0.0f ? splat(1.0f) : load(w.factor + row);
    const vf old = load(w.cut.top + row), top = larger(fold_rows(lanes, [](vf a, vf b) { return larger(a, b); }) * factor, old);
    const vf base = top == -__builtin_inff() ? vf{} : top;
    const vf shrinking = exp2_of(old - base);
    float factors[W], bases[W];
    store(factors, factor), store(bases, base);

    vu products[W] = {};
    for (long i = 0; i < rows; i++) {
        float *scores = w.scores + i * BLOCK;
        lanes[i] = vf{};
        if (sees_all(i)) weigh<false>(scores, first, last, sight[i], factors[i], bases[i], block.value_scales, lanes[i], products[i]);
        else weigh<true>(scores, first, last, sight[i], factors[i], bases[i], block.value_scales, lanes[i], products[i]);
    }
    const vf total = load(w.cut.total + row) * shrinking + fold_rows(lanes, [](vf a, vf b) { return a + b; });
    const vf most = (vf)fold_rows(products, [](vu a, vu b) { return larger_bits(a, b); });
    const vf steps = most > 0x1p-100f ? WEIGHT_STEPS / most : vf{};
    float kept[4][W], by[W];
    store(kept[0], top), store(kept[1], total), store(kept[2], most / WEIGHT_STEPS), store(kept[3], shrinking), store(by, steps);
    __builtin_memcpy(w.cut.top + row, kept[0], TILE_ROWS * sizeof(float));
    __builtin_memcpy(w.cut.total + row, kept[1], TILE_ROWS * sizeof(float));
    __builtin_memcpy(worth, kept[2], TILE_ROWS * sizeof(float));
    __builtin_memcpy(shrink, kept[3], TILE_ROWS * sizeof(float));

    const vf magic = splat(MAGIC);
    for (long i = 0; i < rows; i++)
        for (long j = first / (4 * W) * (4 * W); j < last; j += 4 * W) {
            vi codes[4];
            for (int v = 0; v < 4; v++)
                codes[v] = (vi)add_product(magic, load(w.scores + i * BLOCK + j + v * W), splat(by[i])) - (vi)magic;
            uint8_t *planes = w.weights + i * 2 * BLOCK + j;
            split_planes(codes, planes, planes + BLOCK);
        }
}

// NR rows from `row` on over the keys [first, last) of a block, whole panels.
template <int NR>
static void pass_tile(const Prefill &p, const Workspace &w, const CodeBlock &block, long row, long first, long last, const Sight *sight) {
    const int8_t *keys[2], *next[2];
    const auto score = [&](long j, auto *count) {
        constexpr int NV = sizeof(*count);
        for (int n = 0; n < NV; n++) {
            const long at = j + n * W, inside = at % PANEL_TOKENS * 4;
            keys[n] = block.here.keys[at / PANEL_TOKENS] + inside;
            next[n] = block.next.keys[at / PANEL_TOKENS] + inside;
        }
        const int8_t *query = w.query + row * 2 * QUAD * quads_of(p);
        score_keys<NR, NV>(query, w.bias + row, quads_of(p), keys, next, block.key_scales + j, w.scores + j);
    };
    long j = first;
    for (; j + 2 * W <= last; j += 2 * W) score(j, (char(*)[2])nullptr);
    if (j < last) score(j, (char(*)[1])nullptr);
    float worth[TILE_ROWS], shrink[TILE_ROWS];
    soften_tile(p, w, block, row, NR, first, last, sight, worth, shrink);
    const int8_t *values[PANELS], *next_values[PANELS];
    const auto add = [&](long d, auto *count) {
        constexpr int NV = sizeof(*count);
        for (long n = 0; n < PANELS; n++) values[n] = block.here.values[n] + 4 * d, next_values[n] = block.next.values[n] + 4 * d;
        add_values<NR, NV>(w.weights, values, next_values, first, last, p.value_dim, worth, shrink, w.cut.acc + row * p.value_dim + d);
    };
    long d = 0;
    for (; d + 2 * W <= p.value_dim; d += 2 * W) add(d, (char(*)[2])nullptr);
    if (d < p.value_dim) add(d, (char(*)[1])nullptr);
}

// All rows of a unit over a block that begins at key `start` and of which they see [skip, there).
static NOINLINE void pass_block(const Prefill &p, const Workspace &w, const Unit &unit, const CodeBlock &block, long start, long skip,
                                long there) {
    const long group = p.group(), rows = unit.count * group;
    for (long row = 0; row < rows; row += TILE_ROWS) {
        const long high = min_of(TILE_ROWS, round_up(rows - row, STEP_ROWS));
        Sight sight[TILE_ROWS];
        long begin = BLOCK, end = 0;
        for (long i = 0; i < high; i++) {
            const long at = unit.position + min_of(row + i, rows - 1) / group - start;
            sight[i] = {max_of(skip, p.window ? at - p.window + 1 : 0), min_of(there, at + 1)};
            begin = min_of(begin, sight[i].begin), end = max_of(end, sight[i].end);
        }
        if (begin >= end) continue;
        const long first = begin / PANEL_TOKENS * PANEL_TOKENS, last = round_up(end, PANEL_TOKENS);
        if (high == TILE_ROWS) pass_tile<TILE_ROWS>(p, w, block, row, first, last, sight);
        else if (high == 2 * STEP_ROWS) pass_tile<2 * STEP_ROWS>(p, w, block, row, first, last, sight);
        else pass_tile<STEP_ROWS>(p, w, block, row, first, last, sight);
    }
}

// The queries of a unit, scaled and rounded to two planes of signed bytes.
static NOINLINE void round_queries(const Prefill &p, const Workspace &w, const Unit &unit, long head) {
    const long group = p.group(), rows = unit.count * group;
    const long quads = quads_of(p), padded = round_up(p.dim, W);
    const vf magic = splat(MAGIC);
    for (long r = 0; r < round_up(rows, STEP_ROWS); r++) {
        float x[MOST_DIM] = {};
        if (r < rows) load_query(p, unit.token + r / group, head * group + r % group, x, 1);
        vf most = {}, poison = {};
        for (long d = 0; d < padded; d += W) {
            most = larger((vf)((vu)load(x + d) & 0x7fffffffu), most);
            poison += load(x + d) * 0.0f;
        }
        const float peak = largest(most), steps = peak > 0x1p-100f && peak < __builtin_inff() ? QUERY_STEPS / peak : 0.0f;
        w.factor[r] = peak / QUERY_STEPS + sum(poison);
        int8_t *upper = w.query + (r / TILE_ROWS * TILE_ROWS * 2 * quads + r % TILE_ROWS) * QUAD;
        int8_t *lower = upper + TILE_ROWS * quads * QUAD;
        vi sums = {};
        for (long d = 0; d < padded; d += W) {
            const vi code = (vi)(load(x + d) * steps + magic) - (vi)magic, low = (code << 24) >> 24, high = (code - low) >> 8;
            sums += code;
            for (long i = 0; i < W && d + i < quads * QUAD; i++) {
                const long at = (d + i) / QUAD * QUAD * TILE_ROWS + (d + i) % QUAD;
                upper[at] = int8_t(high[i]), lower[at] = int8_t(low[i]);
            }
        }
        w.bias[r] = -128 * packed::total_of(sums);
    }
}

// One cut of a unit for one kv head: fills w.cut. The queries are rounded already.
static NOINLINE void gather_cut(const Prefill &p, const Workspace &w, const Unit &unit, long head, long cut) {
    const int32_t *table = p.tables + unit.b * p.table_row;
    const long first_key = p.window ? max_of(0, unit.position - p.window + 1) : 0, end_key = unit.position + unit.count;
    const long begin = max_of(cut * CUT_KEYS, first_key), end = min_of((cut + 1) * CUT_KEYS, end_key);
    w.cut.start(round_up(unit.count * p.group(), TILE_ROWS), p.value_dim);
    CodeBlock block;
    block.next.find(p, table, head, begin, end_key);
    for (long start = begin / BLOCK * BLOCK; start < end; start += BLOCK) {
        block.here = block.next;
        if (start + BLOCK < end_key) block.next.find(p, table, head, start + BLOCK, end_key);
        const long skip = max_of(0, begin - start), there = min_of(BLOCK, end - start);
        block.take_scales(skip, there);
        pass_block(p, w, unit, block, start, skip, there);
    }
}

// Adds what a row gathered in a cut to what it has gathered before.
INLINE void merge_row(const Prefill &p, const Gathered &whole, long r, const float *acc, float top, float total) {
    if (total == 0.0f) return;  // it saw none of the cut
    const float old = whole.top[r], here = top > old ? top : old, base = here == -__builtin_inff() ? 0.0f : here;
    const float before = exp2_of(splat(old - base))[0], by = exp2_of(splat(top - base))[0];
    whole.top[r] = here;
    whole.total[r] = whole.total[r] * before + total * by;
    for (long d = 0; d < p.value_dim; d += W) {
        float *target = whole.acc + r * p.value_dim + d;
        store(target, load(target) * before + load(acc + d) * by);
    }
}

// Cuts of a unit: absolute numbers.
INLINE long first_cut(const Prefill &p, const Unit &unit) { return p.window ? max_of(0, unit.position - p.window + 1) / CUT_KEYS : 0; }
INLINE long end_cut(const Unit &unit) { return ceil_div(unit.position + unit.count, CUT_KEYS); }

static void finish(const Prefill &p, const Workspace &w, const Unit &unit, long head) {
    finish_unit(p, unit, head, w.whole.acc, p.value_dim, w.whole.top, w.whole.total);
}

// One unit for one kv head, from its queries to its results.
static void run_unit(const Prefill &p, const Workspace &w, const Unit &unit, long head) {
    const long rows = unit.count * p.group();
    round_queries(p, w, unit, head);
    w.whole.start(rows, p.value_dim);
    for (long cut = first_cut(p, unit); cut < end_cut(unit); cut++) {
        gather_cut(p, w, unit, head, cut);
        for (long r = 0; r < rows; r++) merge_row(p, w.whole, r, w.cut.acc + r * p.value_dim, w.cut.top[r], w.cut.total[r]);
    }
    finish(p, w, unit, head);
}

// The same in two steps, where units are too few for the threads: cuts one by one, kept as [row][value_dim sums, top, total];
// and their merge.
static void keep_cut(const Prefill &p, const Workspace &w, const Unit &unit, long head, long cut, float *part) {
    const long part_row = p.value_dim + 2;
    round_queries(p, w, unit, head);
    gather_cut(p, w, unit, head, cut);
    for (long r = 0; r < unit.count * p.group(); r++, part += part_row) {
        __builtin_memcpy(part, w.cut.acc + r * p.value_dim, p.value_dim * sizeof(float));
        part[p.value_dim] = w.cut.top[r], part[p.value_dim + 1] = w.cut.total[r];
    }
}
static void merge_cuts(const Prefill &p, const Workspace &w, const Unit &unit, long head, const float *parts, long cuts, long part_floats) {
    const long rows = unit.count * p.group(), part_row = p.value_dim + 2;
    w.whole.start(rows, p.value_dim);
    for (long c = 0; c < cuts; c++)
        for (long r = 0; r < rows; r++) {
            const float *part = parts + c * part_floats + r * part_row;
            merge_row(p, w.whole, r, part, part[p.value_dim], part[p.value_dim + 1]);
        }
    finish(p, w, unit, head);
}

// All kv heads of the units, none of more than most_rows rows. Returns 1 when out of memory.
static int run_units(const Prefill &p, const Unit *units, long count, long most_rows, long threads) {
    const long works = count * p.kv_heads, part_floats = most_rows * (p.value_dim + 2);
    long *before = (long *)malloc((works + 1) * sizeof(long));  // cuts before each
    if (!before) return 1;
    before[0] = 0;
    for (long i = 0; i < works; i++) before[i + 1] = before[i] + end_cut(units[i / p.kv_heads]) - first_cut(p, units[i / p.kv_heads]);
    const long cuts = before[works];
    const bool split = threads > 1 && works < UNITS_PER_THREAD * threads && cuts > works;
    float *parts = split ? (float *)malloc(cuts * part_floats * sizeof(float)) : nullptr;
    int failed = split && !parts;
    if (!failed) {
#pragma omp parallel num_threads(min_of(threads, cuts)) reduction(| : failed)
        {
            Workspace w;
            void *memory = nullptr;
            failed |= posix_memalign(&memory, 64, w.place(p, most_rows, nullptr)) != 0;
            if (!failed) w.place(p, most_rows, memory);
            if (split) {
#pragma omp for schedule(dynamic, 1)
                for (long number = 0; number < cuts; number++) {
                    long i = 0;
                    while (before[i + 1] <= number) i++;
                    const Unit &unit = units[i / p.kv_heads];
                    const long cut = first_cut(p, unit) + number - before[i];
                    if (!failed) keep_cut(p, w, unit, i % p.kv_heads, cut, parts + number * part_floats);
                }
            }
#pragma omp for schedule(dynamic, 1) nowait
            for (long i = 0; i < works; i++) {
                if (failed) continue;
                const Unit &unit = units[i / p.kv_heads];
                const long head = i % p.kv_heads, own = before[i + 1] - before[i];
                if (split) merge_cuts(p, w, unit, head, parts + before[i] * part_floats, own, part_floats);
                else run_unit(p, w, unit, head);
            }
            free(memory);
        }
    }
    free(before), free(parts);
    return failed;
}

}  // namespace prefill_codes
#else
#define WINDLASS_INT8_PREFILL 0
#endif
