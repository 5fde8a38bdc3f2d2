#include "attention/int8/lanes.h"

#include "attention/int8/numbers.h"
#include "attention/lane.h"

enum {
    AT_ONCE = 4,              /* lanes with their sums in registers */
    BLOCK = UNIT * INT8_DIMS, /* bytes of INT8_DIMS dims of a unit's values */
    REGISTER = 64,            /* bytes */
};

AVX void load_int8_query(const struct attention *a, const char *query, struct int8_query *to) {
    __m512 largest = _mm512_setzero_ps(), faults = largest;
    for (int64_t d = 0; d < a->key_dim; d += 16) {
        const __m512 some = load_some_numbers(query, d, first_lanes(a->key_dim - d), a->is_bf16);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(some));
        faults = _mm512_fmadd_ps(some, _mm512_setzero_ps(), faults);
    }
    /* The scale maps the largest magnitude to MAX_QUERY; a NaN or infinity makes it NaN. */
    const float top = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top < LEAST ? 0 : MAX_QUERY / top);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < round_up(a->key_dim, INT8_DIMS); d += 16) {
        const __m512 some = load_some_numbers(query, d, first_lanes(max(0, a->key_dim - d)), a->is_bf16);
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(some, inverse));
        /* Split each 16-bit integer into 256 * high + low, both signed bytes. */
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        _mm_store_si128((__m128i *)(to->high + d), _mm512_cvtepi32_epi8(high));
        _mm_store_si128((__m128i *)(to->low + d), _mm512_cvtepi32_epi8(low));
        sum = _mm512_add_epi32(sum, whole);
    }
    to->scale = top / MAX_QUERY + _mm512_reduce_add_ps(faults);
    to->offset = -128 * _mm512_reduce_add_epi32(sum);
}

/* Copies 16 keys from `key` on. */
AVX INLINE void take_keys(const struct unit *unit, int64_t key, int64_t dim, struct int8_unit *to) {
    const __m512i more = _mm512_set1_epi8((char)128);
    uint8_t *at = to->keys + key * round_up(dim, INT8_DIMS);
    for (int64_t d = 0; d < dim; d += INT8_DIMS, at += 16 * INT8_DIMS) {
        __m512i rows[16];
        for (int i = 0; i < 16; i++)
            rows[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some_bytes(dim - d), unit->keys[key + i] + d), more);
        transpose(rows);
        for (int i = 0; i < 16; i++) _mm512_store_si512(at + i * 64, rows[i]);
    }
    for (int i = 0; i < 16; i++) to->key_scales[key + i] = scale_of(unit->keys[key + i], dim);
}

/* Copies four values from `key` on. */
AVX INLINE void take_values(const struct unit *unit, int64_t key, int64_t dim, struct int8_unit *to) {
    int8_t *at = to->values + key / 4 * 256;
    for (int64_t d = 0; d < dim; d += INT8_DIMS, at += BLOCK) {
        __m512i fours[4];
        load_fours(unit->values + key, d, dim, fours);
        for (int i = 0; i < 4; i++) _mm512_store_si512(at + i * 64, fours[i]);
    }
    for (int i = 0; i < 4; i++) to->value_scales[key + i] = scale_of(unit->values[key + i], dim);
}

AVX void take_int8_unit(const struct attention *a, const struct unit *unit, const struct unit *next,
                        struct int8_unit *to) {
    for (int64_t key = 0; key < unit->count; key += 16) {
        for (int64_t i = key; next && i < min(key + 16, next->count); i += 2) {
            fetch(next->keys + i, key_bytes(a));
            fetch(next->values + i, value_bytes(a));
        }
        take_keys(unit, key, a->key_dim, to);
        for (int64_t i = key; i < key + 16; i += 4) take_values(unit, i, a->value_dim, to);
    }
}

/* Converts the exact sums of 16 keys to scores, in units of the query's scale. */
AVX INLINE void to_scores(__m512i whole, const struct int8_query *query, __m512 key_scales, float *scores) {
    const __m512i sums = _mm512_add_epi32(whole, _mm512_set1_epi32(query->offset));
    _mm512_store_ps(scores, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), key_scales));
}

/* Computes the scores of 16 keys (or 32, with two tiles) from `key` on, to [lane, UNIT]. */
AVX INLINE void score_int8(const int lanes, const int tiles, const struct int8_unit *unit, int64_t key, int64_t dim,
                           const struct int8_query *queries, float *scores) {
    const int64_t width = round_up(dim, INT8_DIMS);
    __m512i high[2][AT_ONCE], low[2][AT_ONCE];
#pragma GCC unroll 2
    for (int tile = 0; tile < tiles; tile++)
#pragma GCC unroll 4
        for (int lane = 0; lane < lanes; lane++) high[tile][lane] = low[tile][lane] = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim; d += 4) {
        __m512i numbers[2];
        for (int tile = 0; tile < tiles; tile++)
            numbers[tile] = _mm512_load_si512(unit->keys + (key + tile * 16) * width + d * 16);
#pragma GCC unroll 4
        for (int lane = 0; lane < lanes; lane++) {
            /* High and low bytes are summed apart, exactly, and joined at the end. */
            const __m512i first = broadcast(queries[lane].high + d), second = broadcast(queries[lane].low + d);
#pragma GCC unroll 2
            for (int tile = 0; tile < tiles; tile++) {
                high[tile][lane] = _mm512_dpbusd_epi32(high[tile][lane], numbers[tile], first);
                low[tile][lane] = _mm512_dpbusd_epi32(low[tile][lane], numbers[tile], second);
            }
        }
    }
#pragma GCC unroll 2
    for (int tile = 0; tile < tiles; tile++) {
        const __m512 scales = _mm512_load_ps(unit->key_scales + key + tile * 16);
#pragma GCC unroll 4
        for (int lane = 0; lane < lanes; lane++)
            to_scores(joined(high[tile][lane], low[tile][lane]), queries + lane, scales,
                      scores + lane * UNIT + key + tile * 16);
    }
}

/* Packs the low bytes of four registers' 16-bit integers, in order. Shift them before to get the high bytes. */
AVX INLINE __m512i bytes_of(__m512i first, __m512i second) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second));
}

/* Converts weights times the scales of their values to integers. Returns their scale, NaN if one is not finite. */
AVX INLINE float weigh_int8(float *weights, const float *scales, int64_t num_keys, uint8_t *high, uint8_t *low) {
    __m512 largest = _mm512_setzero_ps(), faults = largest;
    for (int64_t key = 0; key < num_keys; key += 16) {
        const __m512 weight = _mm512_mul_ps(_mm512_load_ps(weights + key), _mm512_load_ps(scales + key));
        largest = _mm512_max_ps(largest, weight);
        faults = _mm512_fmadd_ps(weight, _mm512_setzero_ps(), faults);
        _mm512_store_ps(weights + key, weight);
    }
    for (int64_t key = num_keys; key % REGISTER; key += 16) _mm512_store_ps(weights + key, _mm512_setzero_ps());
    /* The scale maps the largest weight to MAX_WEIGHT. */
    const float top = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top < LEAST ? 0 : MAX_WEIGHT / top);
    for (int64_t key = 0; key < num_keys; key += REGISTER) {
        __m512i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(weights + key + i * 16), inverse));
        /* Split each 16-bit integer into its high and its low byte. */
        const __m512i first = _mm512_packus_epi32(whole[0], whole[1]), second = _mm512_packus_epi32(whole[2], whole[3]);
        const __m512i last = _mm512_set1_epi16(255);
        _mm512_store_si512(high + key, bytes_of(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)));
        _mm512_store_si512(low + key, bytes_of(_mm512_and_si512(first, last), _mm512_and_si512(second, last)));
    }
    return top / MAX_WEIGHT + _mm512_reduce_add_ps(faults);
}

/* Computes the weighted sums of two of the four groups of 16 dims, from the group `first` on, to `sums`. */
AVX INLINE void add_int8(const int lanes, const int first, const int8_t *values, int64_t num_keys,
                         const uint8_t *high, const uint8_t *low, __m512i sums[][4]) {
    __m512i highs[AT_ONCE][2], lows[AT_ONCE][2];
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) highs[lane][i] = lows[lane][i] = _mm512_setzero_si512();
    for (int64_t key = 0; key < num_keys; key += 4, values += 256) {
        __m512i numbers[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) numbers[i] = _mm512_load_si512(values + (first + i) * 64);
#pragma GCC unroll 4
        for (int lane = 0; lane < lanes; lane++) {
            const __m512i upper = broadcast(high + lane * UNIT + key), lower = broadcast(low + lane * UNIT + key);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                highs[lane][i] = _mm512_dpbusd_epi32(highs[lane][i], upper, numbers[i]);
                lows[lane][i] = _mm512_dpbusd_epi32(lows[lane][i], lower, numbers[i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) sums[lane][first + i] = joined(highs[lane][i], lows[lane][i]);
}

/* Reorders four registers of interleaved groups of four dims to 16 consecutive dims each. */
AVX INLINE void in_order(__m512i x[4]) {
    const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(a, c, 0x88), x[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[2] = _mm512_shuffle_i32x4(b, d, 0x88), x[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

/* `attend_int8` for at most AT_ONCE lanes from `first` on. */
AVX INLINE void attend_some(const int lanes, const struct attention *a, const struct unit *unit,
                            const struct int8_unit *numbers, const int64_t first, const struct int8_query *queries,
                            const struct visibility *visibility, float *state) {
    float scores[lanes * UNIT] __attribute__((aligned(64)));
    float weights[UNIT] __attribute__((aligned(64)));
    uint8_t high[lanes * UNIT] __attribute__((aligned(64))), low[lanes * UNIT] __attribute__((aligned(64)));
    float scales[lanes];
    const int64_t dim = a->value_dim, width = round_up(dim, 32);
    const int64_t num_keys = round_up(min(unit->count, visibility->highest + 1 - unit->begin), 16);
    if (num_keys <= 0) return;
    queries += first;
    /* Exact integer scores, in units of the query's and the key's scales. */
    for (int64_t key = 0; key < num_keys; key += 32)
        if (key + 16 < num_keys) score_int8(lanes, 2, numbers, key, a->key_dim, queries, scores);
        else score_int8(lanes, 1, numbers, key, a->key_dim, queries, scores);
    /* Softmax per lane, then weights as integers. */
    int32_t positions[LANES];
    _mm512_storeu_si512(positions, visibility->position);
    float *sums = state + 2 * LANES + first * width;
    for (int lane = 0; lane < lanes; lane++) {
        float *scored = scores + lane * UNIT, *peak = state + first + lane, scaling = a->scaling * queries[lane].scale;
        if (a->softcap > 0) cap(scored, num_keys, _mm512_set1_ps(scaling), a->softcap), scaling = 1;
        soften_lane(FLOATS, positions[first + lane], visibility->window, unit->begin, num_keys, scored,
                    LOG2_E * scaling, peak, peak + LANES, sums + lane * width, width, weights);
        scales[lane] = weigh_int8(weights, numbers->value_scales, num_keys, high + lane * UNIT, low + lane * UNIT);
    }
    /* Exact integer sums of the values, scaled back when they are added to the state. */
    for (int64_t d = 0; d < dim; d += INT8_DIMS) {
        const int8_t *values = numbers->values + d / INT8_DIMS * BLOCK;
        __m512i added[AT_ONCE][4];
        add_int8(lanes, 0, values, num_keys, high, low, added);
        add_int8(lanes, 2, values, num_keys, high, low, added);
        for (int lane = 0; lane < lanes; lane++) {
            in_order(added[lane]);
            for (int64_t i = 0; i < 4 && d + i * 16 < width; i++) {
                float *sum = sums + lane * width + d + i * 16;
                const __m512 more = _mm512_cvtepi32_ps(added[lane][i]);
                _mm512_store_ps(sum, _mm512_fmadd_ps(more, _mm512_set1_ps(scales[lane]), _mm512_load_ps(sum)));
            }
        }
    }
}

AVX void attend_int8(const struct attention *a, const struct unit *unit, const struct int8_unit *numbers,
                     int64_t num_lanes, const struct int8_query *queries, const struct visibility *visibility,
                     float *state) {
#define LANES_OF(n) case n: attend_some(n, a, unit, numbers, first, queries, visibility, state); break;
    for (int64_t first = 0; first < num_lanes; first += AT_ONCE)
        switch (min(AT_ONCE, num_lanes - first)) { LANES_OF(1) LANES_OF(2) LANES_OF(3) LANES_OF(4) }
#undef LANES_OF
}

AVX void store_int8(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place) {
    const float *sums = state + 2 * LANES + lane * round_up(a->value_dim, 32);
    for (int64_t d = 0; d < a->value_dim; d += 16) {
        const __m512 result = _mm512_mul_ps(_mm512_load_ps(sums + d), _mm512_set1_ps(factor));
        const __mmask16 some = first_lanes(a->value_dim - d);
        if (a->is_bf16) _mm256_mask_storeu_epi16((bf16 *)a->out + place + d, some, (__m256i)_mm512_cvtneps_pbh(result));
        else _mm512_mask_storeu_ps((float *)a->out + place + d, some, result);
    }
}
