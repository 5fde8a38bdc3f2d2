#include "attention/few_lanes.h"

#include "attention/lane.h"

enum { NARROW_LANES = 4 /* up to so many lanes, registers have the sums of twice as many keys and dims */ };

static enum number_format format_of(const struct attention *a) {
    if (!a->is_bf16) return FLOATS;
    return outrider_has_tiles ? AS_TILES : outrider_splits_pairs ? APART : PAIRS;
}

int are_few(const struct attention *a, int64_t num_lanes) {
    static const int64_t most[] = {[PAIRS] = FEW_PAIRS, [APART] = FEW_LANES, [AS_TILES] = FEW_TILED,
                                   [FLOATS] = FEW_LANES};
    return num_lanes <= most[format_of(a)];
}

AVX void load_few(const struct attention *a, const char *query, int64_t lane, void *queries) {
    const int64_t width = round_up(a->key_dim, 32);
    if (format_of(a) == PAIRS) {
        bf16 *to = (bf16 *)queries + lane * width;
        memcpy(to, query, a->key_dim * 2);
        memset(to + a->key_dim, 0, (width - a->key_dim) * 2);
        return;
    }
    for (int64_t d = 0; d < width; d += 16) {
        const __mmask16 some = first_lanes(max(0, a->key_dim - d));
        _mm512_storeu_ps((float *)queries + lane * width + d, load_some_numbers(query, d, some, a->is_bf16));
    }
}

/* Loads a register of a row from dim `d` on: 16 floats, or 32 bfloat16. */
AVX INLINE __m512i load_row(const char *row, int64_t d, int64_t dim, const enum number_format kind) {
    if (kind == FLOATS) return _mm512_maskz_loadu_epi32(first_lanes(dim - d), row + 4 * d);
    return _mm512_maskz_loadu_epi16(dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1, row + 2 * d);
}

/* Rows of a later unit to prefetch during this one, `each` of them per key. */
struct ahead {
    const char *const *rows;
    int64_t count, num_bytes, each;
};

INLINE struct ahead ahead_of(const char *const *rows, int64_t count, int64_t num_bytes, int64_t num_keys) {
    return (struct ahead){rows, count, num_bytes, (count + num_keys - 1) / num_keys};
}

/* Prefetches the rows that belong to the 16 keys from `key` on. */
INLINE void prefetch_rows(struct ahead ahead, int64_t key) {
    const int64_t last = min((key + 16) * ahead.each, ahead.count);
    for (int64_t i = key * ahead.each; i < last; i++) {
        const char *row = ahead.rows[i];
        _mm_prefetch(row, _MM_HINT_T1);
        if (ahead.num_bytes > 64) _mm_prefetch(row + 64, _MM_HINT_T1);
        for (int64_t at = 128; at < ahead.num_bytes; at += 64) _mm_prefetch(row + at, _MM_HINT_T1);
    }
}

/* Adds as AMX does: the sum of the even products plus the sum of the odd ones, as one number per 32 products. */
AVX INLINE __m512 add_as_tiles(__m512 onto, __m512 apart[2]) {
    const __m512 both = _mm512_add_ps(apart[0], apart[1]);
    apart[0] = apart[1] = _mm512_setzero_ps();
    return _mm512_add_ps(onto, both);
}

/* Computes the scores of 16 keys (or 32, with two tiles) from `key` on, to [lane, UNIT]. */
AVX INLINE void score_keys(const int lanes, const int tiles, const enum number_format kind, const struct unit *unit,
                           int64_t key, int64_t dim, const void *queries, float *scores) {
    const int64_t width = round_up(dim, 32);
    const int are_split = kind == APART || kind == AS_TILES;
    const float *floats = queries;
    __m512 sums[2][FEW_LANES], apart[2][FEW_TILED][2];
    for (int tile = 0; tile < tiles; tile++)
        for (int lane = 0; lane < lanes; lane++) {
            sums[tile][lane] = _mm512_setzero_ps();
            if (kind == AS_TILES) apart[tile][lane][0] = apart[tile][lane][1] = _mm512_setzero_ps();
        }
    /* Transpose 16 keys x 64 bytes, so that a register holds one dim of 16 keys, then add dim by dim. */
    for (int64_t d = 0; d < dim; d += kind == FLOATS ? 16 : 32) {
        __m512i numbers[2][16]; /* in memory, so that the products of all tiles are interleaved */
        for (int tile = 0; tile < tiles; tile++) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++) rows[i] = load_row(unit->keys[key + tile * 16 + i], d, dim, kind);
            transpose(rows);
            for (int i = 0; i < 16; i++) numbers[tile][i] = rows[i];
        }
        __asm__("" : "+m"(numbers));
        for (int i = 0; i < 16; i++)
            for (int half = are_split; half >= 0; half--) /* the odd numbers first */
#pragma GCC unroll 2
                for (int tile = 0; tile < tiles; tile++) {
                    const __m512i both = numbers[tile][i];
                    __m512 number = _mm512_castsi512_ps(both);
                    if (are_split) number = half ? odd_numbers(both) : even_numbers(both);
#pragma GCC unroll 12
                    for (int lane = 0; lane < lanes; lane++) {
                        const int64_t at = lane * width + (kind == FLOATS ? d + i : d + 2 * i + half);
                        __m512 *sum = kind == AS_TILES ? &apart[tile][lane][half] : &sums[tile][lane];
                        if (kind == PAIRS) {
                            const __m512i query = broadcast((const bf16 *)queries + at);
                            *sum = _mm512_dpbf16_ps(*sum, (__m512bh)query, (__m512bh)number);
                        } else {
                            *sum = _mm512_fmadd_ps(_mm512_set1_ps(floats[at]), number, *sum);
                        }
                    }
                }
        /* AMX adds even and odd products apart, 32 dims at a time. */
        for (int tile = 0; tile < tiles && kind == AS_TILES; tile++)
            for (int lane = 0; lane < lanes; lane++)
                sums[tile][lane] = add_as_tiles(sums[tile][lane], apart[tile][lane]);
    }
    for (int tile = 0; tile < tiles; tile++)
        for (int lane = 0; lane < lanes; lane++)
            _mm512_store_ps(scores + lane * UNIT + key + tile * 16, sums[tile][lane]);
}

/* Adds to the sums [lane, width] of 32 dims (or 64, with two blocks) from `d` on. */
AVX INLINE void add_dims(const int lanes, const int blocks, const enum number_format kind, const struct unit *unit,
                         struct ahead ahead, int64_t num_keys, int64_t d, int64_t dim, const void *weights,
                         float *sums) {
    const int64_t width = round_up(dim, 32);
    const __m512i zero = _mm512_setzero_si512();
    const float *floats = weights;
    __m512 kept[FEW_LANES][4], apart[FEW_TILED][4][2];
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < 2 * blocks; i++) {
            kept[lane][i] = _mm512_load_ps(sums + lane * width + d + i * 16);
            if (kind == AS_TILES) apart[lane][i][0] = apart[lane][i][1] = _mm512_setzero_ps();
        }
    /* Two keys per step, since a bfloat16 product adds a pair; the sums stay in registers over all keys. */
    for (int64_t key = 0; key < num_keys; key += 2) {
        if (d == 0 && key % 16 == 0) prefetch_rows(ahead, key);
        for (int each = 0; each < (kind == PAIRS ? 1 : 2); each++) {
            const int64_t place = kind == APART ? key + 1 - each : key + each;
            __m512 numbers[4];
#pragma GCC unroll 2
            for (int block = 0; block < blocks; block++) {
                const int64_t at = d + block * 32;
                const __m512i row = load_row(unit->values[place], at, dim, kind);
                __m512i low = row, high;
                if (kind == FLOATS) {
                    const __mmask16 rest = first_lanes(max(0, dim - at - 16));
                    high = _mm512_maskz_loadu_epi32(rest, unit->values[place] + 4 * at + 64);
                } else {
                    const __m512i other = kind == PAIRS ? load_row(unit->values[key + 1], at, dim, kind) : row;
                    low = _mm512_unpacklo_epi16(kind == PAIRS ? row : zero, other);
                    high = _mm512_unpackhi_epi16(kind == PAIRS ? row : zero, other);
                }
                numbers[2 * block] = _mm512_castsi512_ps(low), numbers[2 * block + 1] = _mm512_castsi512_ps(high);
            }
#pragma GCC unroll 12
            for (int lane = 0; lane < lanes; lane++)
                if (kind == PAIRS) {
                    const __m512bh weight = (__m512bh)broadcast((const bf16 *)weights + lane * UNIT + key);
#pragma GCC unroll 4
                    for (int i = 0; i < 2 * blocks; i++)
                        kept[lane][i] = _mm512_dpbf16_ps(kept[lane][i], weight, (__m512bh)numbers[i]);
                } else {
                    const __m512 weight = _mm512_set1_ps(floats[lane * UNIT + place]);
#pragma GCC unroll 4
                    for (int i = 0; i < 2 * blocks; i++) {
                        __m512 *sum = kind == AS_TILES ? &apart[lane][i][each] : &kept[lane][i];
                        *sum = _mm512_fmadd_ps(numbers[i], weight, *sum);
                    }
                }
        }
        /* AMX adds even and odd products apart, 32 keys at a time. */
        if (kind == AS_TILES && (key % 32 == 30 || key + 2 == num_keys))
            for (int lane = 0; lane < lanes; lane++)
                for (int i = 0; i < 2 * blocks; i++) kept[lane][i] = add_as_tiles(kept[lane][i], apart[lane][i]);
    }
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < 2 * blocks; i++) _mm512_store_ps(sums + lane * width + d + i * 16, kept[lane][i]);
}

/* `attend_few` with constant numbers of lanes and kinds, so that the sums stay in registers. */
AVX INLINE void attend_lanes(const int lanes, const enum number_format kind, const struct attention *a,
                             const struct unit *unit, const struct unit *next, const void *queries,
                             const struct visibility *visibility, float *state) {
    float scores[lanes * UNIT] __attribute__((aligned(64)));
    float weights[lanes * UNIT] __attribute__((aligned(64)));
    const int is_narrow = lanes <= NARROW_LANES;
    const int64_t dim = a->value_dim, width = round_up(dim, 32);
    const int64_t num_keys = round_up(min(unit->count, visibility->highest + 1 - unit->begin), 16);
    if (num_keys <= 0) return;
    const int64_t num_ahead = next ? next->count : 0;
    const struct ahead keys = ahead_of(next ? next->keys : NULL, num_ahead, key_bytes(a), num_keys);
    const struct ahead values = ahead_of(next ? next->values : NULL, num_ahead, value_bytes(a), num_keys);
    /* Scores of all keys, while the next unit's keys are prefetched. */
    for (int64_t key = 0; key < num_keys; key += 16) {
        prefetch_rows(keys, key);
        if (!is_narrow || key + 16 == num_keys) {
            score_keys(lanes, 1, kind, unit, key, a->key_dim, queries, scores);
            continue;
        }
        prefetch_rows(keys, key + 16);
        score_keys(lanes, 2, kind, unit, key, a->key_dim, queries, scores);
        key += 16;
    }
    /* Online softmax: scores become weights, and the sums so far are rescaled. */
    int32_t positions[LANES];
    _mm512_storeu_si512(positions, visibility->position);
    float scale = a->scaling * LOG2_E, *sums = state + 2 * LANES;
    if (a->softcap > 0) {
        for (int lane = 0; lane < lanes; lane++)
            cap(scores + lane * UNIT, num_keys, _mm512_set1_ps(a->scaling), a->softcap);
        scale = LOG2_E;
    }
    for (int lane = 0; lane < lanes; lane++) {
        void *to = (char *)weights + lane * UNIT * (kind == PAIRS ? 2 : 4);
        soften_lane(kind, positions[lane], visibility->window, unit->begin, num_keys, scores + lane * UNIT, scale,
                    state + lane, state + LANES + lane, sums + lane * width, width, to);
    }
    /* Add the weighted values, as many dims at a time as registers hold. */
    int64_t d = 0;
    for (; is_narrow && d + 64 <= width; d += 64)
        add_dims(lanes, 2, kind, unit, values, num_keys, d, dim, weights, sums);
    for (; d < width; d += 32)
        add_dims(lanes, 1, kind, unit, values, num_keys, d, dim, weights, sums);
}

AVX void attend_few(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_lanes,
                    const void *queries, const struct visibility *visibility, float *state) {
    const enum number_format kind = format_of(a);
#define LANES_OF(n, kind) case n: attend_lanes(n, kind, a, unit, next, queries, visibility, state); break;
#define UP_TO_FOUR(kind) LANES_OF(1, kind) LANES_OF(2, kind) LANES_OF(3, kind) LANES_OF(4, kind)
#define UP_TO_TWELVE(kind) UP_TO_FOUR(kind) LANES_OF(5, kind) LANES_OF(6, kind) LANES_OF(7, kind) LANES_OF(8, kind) \
    LANES_OF(9, kind) LANES_OF(10, kind) LANES_OF(11, kind) LANES_OF(12, kind)
    if (kind == PAIRS) switch (num_lanes) { UP_TO_FOUR(PAIRS) }
    else if (kind == APART) switch (num_lanes) { UP_TO_TWELVE(APART) }
    else if (kind == AS_TILES) switch (num_lanes) { UP_TO_FOUR(AS_TILES) }
    else switch (num_lanes) { UP_TO_TWELVE(FLOATS) }
#undef UP_TO_TWELVE
#undef UP_TO_FOUR
#undef LANES_OF
}

AVX void clear_few(float *state, int64_t width, uint16_t lanes) {
    _mm512_mask_store_ps(state, lanes, _mm512_set1_ps(FLOOR));
    _mm512_mask_store_ps(state + LANES, lanes, _mm512_setzero_ps());
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t d = 0; (lanes >> lane & 1) && d < width; d += 16)
            _mm512_store_ps(state + 2 * LANES + lane * width + d, _mm512_setzero_ps());
}

AVX void merge_few(float *state, const float *later, int64_t width, uint16_t lanes) {
    const __m512 peak = _mm512_load_ps(state), peak_later = _mm512_loadu_ps(later);
    const __m512 top = _mm512_max_ps(peak, peak_later);
    const __m512 factor = power_of_two(_mm512_sub_ps(peak, top), 0);
    const __m512 factor_later = power_of_two(_mm512_sub_ps(peak_later, top), 0);
    const __m512 total = _mm512_mul_ps(factor, _mm512_load_ps(state + LANES));
    _mm512_mask_store_ps(state, lanes, top);
    _mm512_mask_store_ps(state + LANES, lanes, _mm512_fmadd_ps(factor_later, _mm512_loadu_ps(later + LANES), total));
    float factors[LANES], factors_later[LANES];
    _mm512_storeu_ps(factors, factor);
    _mm512_storeu_ps(factors_later, factor_later);
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t d = 0; (lanes >> lane & 1) && d < width; d += 16) {
            const int64_t at = 2 * LANES + lane * width + d;
            const __m512 old = _mm512_mul_ps(_mm512_set1_ps(factors[lane]), _mm512_load_ps(state + at));
            const __m512 added = _mm512_loadu_ps(later + at);
            _mm512_store_ps(state + at, _mm512_fmadd_ps(_mm512_set1_ps(factors_later[lane]), added, old));
        }
}

AVX void store_few(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place) {
    const int64_t dim = a->value_dim, width = round_up(dim, 32);
    const float *sums = state + 2 * LANES + lane * width;
    for (int64_t d = 0; d < width; d += 32) {
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + d), _mm512_set1_ps(factor));
        const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + d + 16), _mm512_set1_ps(factor));
        const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
        store_dims(a->out, place + d, dims, _mm512_castps_si512(low), _mm512_castps_si512(high), a->is_bf16);
    }
}
