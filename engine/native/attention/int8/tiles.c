#include "attention/int8/tiles.h"

#include "amx.h"
#include "attention/int8/lanes.h"
#include "attention/int8/numbers.h"
#include "attention/softmax.h"

enum {
    LEAST_TILED = 8,
    TILE_BYTES = 64, /* bytes of a tile's row: dims of a key, or keys of a dim */
    TILE = 16 * TILE_BYTES,
};

int are_tiled(int64_t num_lanes) { return outrider_has_tiles && num_lanes >= LEAST_TILED; }

AVX void load_int8_queries(const struct attention *a, const char *const *queries, int64_t num_lanes,
                           struct int8_queries *to) {
    struct int8_query rows[LANES];
    memset(to->scales, 0, sizeof to->scales);
    for (int64_t lane = 0; lane < num_lanes; lane++) {
        load_int8_query(a, queries[lane], rows + lane);
        to->scales[lane] = rows[lane].scale;
    }
    for (int64_t d = 0; d < a->key_dim; d += INT8_DIMS) {
        __m512i high[LANES], low[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t of = min(lane, num_lanes - 1);
            high[lane] = _mm512_load_si512(rows[of].high + d), low[lane] = _mm512_load_si512(rows[of].low + d);
        }
        transpose(high);
        transpose(low);
        for (int i = 0; i < 16; i++) {
            _mm512_store_si512(to->high + d * LANES + i * 64, high[i]);
            _mm512_store_si512(to->low + d * LANES + i * 64, low[i]);
        }
    }
}

/* Returns the index of a dim among the sums of a tile, in the order that `store` of job.c expects. */
INLINE int64_t place_of(int64_t dim, int is_bf16) {
    return is_bf16 ? dim / 32 * 32 + dim / 4 % 2 * 16 + dim % 32 / 8 * 4 + dim % 4 : dim;
}

/* Copies the values [key, key + TILE_BYTES) of INT8_DIMS dims from `d` on. */
AVX INLINE void take_values(const struct attention *a, const struct unit *unit, int64_t key, int64_t d, int8_t *to) {
    const int64_t end = round_up(unit->count, 32);
    __m512i rows[4][16];
    for (int i = 0; i < 16; i++) {
        __m512i fours[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                            _mm512_setzero_si512()};
        if (key + i * 4 < end) load_fours(unit->values + key + i * 4, d, a->value_dim, fours);
        for (int j = 0; j < 4; j++) rows[j][i] = fours[j];
    }
    for (int j = 0; j < 4; j++) {
        transpose(rows[j]);
        for (int i = 0; i < 16; i++) {
            const int64_t dim = d + i / 4 * 16 + j * 4 + i % 4;
            _mm512_store_si512(to + place_of(dim, (int)a->is_bf16) * UNIT + key, rows[j][i]);
        }
    }
}

AVX void take_int8_rows(const struct attention *a, const struct unit *unit, const struct unit *next,
                        struct int8_rows *to) {
    const int64_t width = round_up(a->key_dim, INT8_DIMS);
    for (int64_t key = 0; key < round_up(unit->count, 32); key++) {
        if (next && key % 2 == 0 && key < next->count) {
            fetch(next->keys + key, key_bytes(a));
            fetch(next->values + key, value_bytes(a));
        }
        for (int64_t d = 0; d < width; d += INT8_DIMS) {
            const __m512i some = _mm512_maskz_loadu_epi8(some_bytes(a->key_dim - d), unit->keys[key] + d);
            _mm512_store_si512(to->keys + key * width + d, some);
        }
        to->key_scales[key] = scale_of(unit->keys[key], a->key_dim);
        to->value_scales[key] = scale_of(unit->values[key], a->value_dim);
    }
    for (int64_t key = 0; key < unit->count; key += TILE_BYTES)
        for (int64_t d = 0; d < a->value_dim; d += INT8_DIMS) take_values(a, unit, key, d, to->values);
}

/* Converts the exact sums of 16 keys to scores, in units of the queries' scales. */
AVX INLINE void to_scores(const int32_t *high, const int32_t *low, const float *key_scales, float *scores) {
    for (int key = 0; key < 16; key++) {
        const __m512i whole = joined(_mm512_load_si512(high + key * 16), _mm512_load_si512(low + key * 16));
        const __m512 score = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(key_scales[key]));
        _mm512_store_ps(scores + key * LANES, score);
    }
}

/* Multiplies 32 rows of `size` bytes, `stride` apart, by the high and the low bytes [size / 4, LANES, 4] of 16 lanes.
   The exact sums [16, LANES] are: the first 16 rows by the high bytes, by the low bytes, then the other rows by
   both. */
AMX INLINE void multiply(const int8_t *rows, int64_t stride, int64_t size, const void *high, const void *low,
                         const int are_unsigned, int32_t sums[4][TILE / 4]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < size; at += TILE_BYTES) {
        /* Each loaded tile of rows meets both bytes of the lanes. */
        tile_load(4, rows + at, stride);
        tile_load(5, rows + 16 * stride + at, stride);
        tile_load(6, (const char *)high + at * LANES, 64);
        tile_load(7, (const char *)low + at * LANES, 64);
        if (are_unsigned) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

/* Computes scores [UNIT, LANES] of the first `num_keys`, a multiple of 32. */
AMX INLINE void score(const struct attention *a, const struct int8_rows *rows, int64_t num_keys,
                      const struct int8_queries *queries, float *scores) {
    const int64_t width = round_up(a->key_dim, INT8_DIMS);
    int32_t sums[4][TILE / 4] __attribute__((aligned(64)));
    for (int64_t key = 0; key < num_keys; key += 32) {
        multiply(rows->keys + key * width, width, width, queries->high, queries->low, 0, sums);
        to_scores(sums[0], sums[1], rows->key_scales + key, scores + key * LANES);
        to_scores(sums[2], sums[3], rows->key_scales + key + 16, scores + (key + 16) * LANES);
    }
}

/* Selects the bits of `first` where `bits` is 1, and of `second` elsewhere. */
AVX INLINE __m512i select_bits(int bits, __m512i first, __m512i second) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), first, second, 0xca);
}

/* Packs the low bytes of four 16-bit integers; `high_bytes` packs the high ones. */
AVX INLINE __m512i low_bytes(const __m512i x[4]) {
    const __m512i bytes = select_bits(0xff, x[0], _mm512_slli_epi32(x[1], 8));
    return select_bits(0xffffff, select_bits(0xffff, bytes, _mm512_slli_epi32(x[2], 16)), _mm512_slli_epi32(x[3], 24));
}

AVX INLINE __m512i high_bytes(const __m512i x[4]) {
    const __m512i bytes = select_bits(0xff, _mm512_srli_epi32(x[0], 8), x[1]);
    return select_bits(0xffffff, select_bits(0xffff, bytes, _mm512_slli_epi32(x[2], 8)), _mm512_slli_epi32(x[3], 16));
}

/* Converts weights [UNIT, LANES] times the scales of their values to integers [UNIT / 4, LANES, 4], padded with zeros
   to whole TILE_BYTES. Returns their scales, NaN if a weight is not finite. */
AVX INLINE __m512 weigh(float *weights, const float *scales, int64_t num_keys, uint8_t *high, uint8_t *low) {
    __m512 top = _mm512_setzero_ps(), faults = top;
    for (int64_t key = 0; key < num_keys; key++) {
        float *weight = weights + key * LANES;
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(weight), _mm512_set1_ps(scales[key]));
        top = _mm512_max_ps(top, scaled);
        faults = _mm512_fmadd_ps(scaled, _mm512_setzero_ps(), faults);
        _mm512_store_ps(weight, scaled);
    }
    /* Each lane's scale maps its largest weight to MAX_WEIGHT; lanes without weight stay 0. */
    const __mmask16 some = _mm512_cmp_ps_mask(top, _mm512_set1_ps(LEAST), _CMP_GE_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(MAX_WEIGHT), top);
    for (int64_t key = 0; key < round_up(num_keys, TILE_BYTES); key += 4) {
        __m512i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512 weight = _mm512_load_ps(weights + (key + i) * LANES);
            whole[i] = key < num_keys ? _mm512_cvtps_epi32(_mm512_mul_ps(weight, inverse)) : _mm512_setzero_si512();
        }
        /* Four keys' bytes are adjacent per lane, as AMX multiplies them. */
        _mm512_store_si512(high + key * LANES, high_bytes(whole));
        _mm512_store_si512(low + key * LANES, low_bytes(whole));
    }
    return _mm512_add_ps(_mm512_div_ps(top, _mm512_set1_ps(MAX_WEIGHT)), faults);
}

/* Adds the exact sums of 16 dims, times `scales`, to `to`. */
AVX INLINE void add_sums(const int32_t *high, const int32_t *low, __m512 scales, float *to) {
    for (int64_t i = 0; i < TILE / 4; i += LANES) {
        const __m512 more = _mm512_cvtepi32_ps(joined(_mm512_load_si512(high + i), _mm512_load_si512(low + i)));
        _mm512_store_ps(to + i, _mm512_fmadd_ps(more, scales, _mm512_load_ps(to + i)));
    }
}

/* Adds the weighted values of the first `num_keys` to `sums` [dims, LANES]. */
AMX INLINE void add(const struct attention *a, const struct int8_rows *rows, int64_t num_keys, const uint8_t *high,
                    const uint8_t *low, __m512 scales, float *sums) {
    int32_t added[4][TILE / 4] __attribute__((aligned(64)));
    for (int64_t d = 0; d < a->value_dim; d += 32) {
        multiply(rows->values + d * UNIT, UNIT, round_up(num_keys, TILE_BYTES), high, low, 1, added);
        add_sums(added[0], added[1], scales, sums + d * LANES);
        add_sums(added[2], added[3], scales, sums + (d + 16) * LANES);
    }
}

AMX void attend_int8_tile(const struct attention *a, const struct unit *unit, const struct int8_rows *rows,
                          const struct int8_queries *queries, const struct visibility *visibility, float *state) {
    float scores[UNIT * LANES] __attribute__((aligned(64)));
    uint8_t high[UNIT * LANES] __attribute__((aligned(64))), low[UNIT * LANES] __attribute__((aligned(64)));
    const int64_t num_keys = round_up(min(unit->count, visibility->highest + 1 - unit->begin), 32);
    if (num_keys <= 0) return;
    score(a, rows, num_keys, queries, scores);
    __m512 scaling = _mm512_mul_ps(_mm512_set1_ps(a->scaling), _mm512_load_ps(queries->scales));
    if (a->softcap > 0) {
        for (int64_t key = 0; key < num_keys; key++) cap(scores + key * LANES, LANES, scaling, a->softcap);
        scaling = _mm512_set1_ps(1);
    }
    const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(LOG2_E), scaling);
    const int64_t width = round_up(a->value_dim, 32);
    if (hides(visibility, unit->begin, num_keys))
        soften(visibility, unit->begin, num_keys, scores, factor, state, width, NULL, 0, NULL, 1);
    else soften(visibility, unit->begin, num_keys, scores, factor, state, width, NULL, 0, NULL, 0);
    const __m512 scales = weigh(scores, rows->value_scales, num_keys, high, low);
    add(a, rows, num_keys, high, low, scales, state + 2 * LANES);
}
