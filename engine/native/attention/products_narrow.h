/* The two products of tiles.c on AVX2, in float32, with eight lanes per register. */

#pragma once

#include "attention/unit.h"

/* Loads a row of numbers for the lanes of half a tile (1 register), one tile (2) or two (4). The second tile is `other`
   numbers after the first. */
AVX2 INLINE void load_row(const int registers, const float *at, int64_t other, __m256 row[4]) {
    for (int i = 0; i < registers; i++) row[i] = _mm256_loadu_ps(at + i / 2 * other + i % 2 * 8);
}

AVX2 INLINE void store_row(const int registers, float *at, int64_t other, const __m256 row[4]) {
    for (int i = 0; i < registers; i++) _mm256_storeu_ps(at + i / 2 * other + i % 2 * 8, row[i]);
    if (registers == 1) _mm256_storeu_ps(at + 8, _mm256_setzero_ps());
}

/* Computes the scores of a few keys from `key` on, with their sums in registers. */
AVX2 INLINE void score_keys(const int keys, const int registers, const struct unit *unit, int64_t key,
                            const float *queries, int64_t dim, int64_t width, float *scores) {
    __m256 sums[8][4];
    for (int i = 0; i < keys; i++)
        for (int j = 0; j < registers; j++) sums[i][j] = _mm256_setzero_ps();
    const float *rows[8];
    for (int i = 0; i < keys; i++) rows[i] = (const float *)unit->keys[key + i];
    for (int64_t d = 0; d < dim; d++) {
        __m256 query[4];
        load_row(registers, queries + d * LANES, width * LANES, query);
#pragma GCC unroll 8
        for (int i = 0; i < keys; i++) {
            const __m256 number = _mm256_set1_ps(rows[i][d]);
#pragma GCC unroll 4
            for (int j = 0; j < registers; j++) sums[i][j] = _mm256_fmadd_ps(number, query[j], sums[i][j]);
        }
    }
    for (int i = 0; i < keys; i++) store_row(registers, scores + (key + i) * LANES, UNIT * LANES, sums[i]);
}

/* Adds all keys to the sums of a few dims from `d` on. */
AVX2 INLINE void add_dims(const int dims, const int registers, const struct unit *unit, int64_t d, const float *weights,
                          int64_t num_keys, float *sums, int64_t size) {
    __m256 kept[8][4];
    for (int i = 0; i < dims; i++) load_row(registers, sums + (d + i) * LANES, size, kept[i]);
    for (int64_t key = 0; key < num_keys; key++) {
        const float *row = (const float *)unit->values[key] + d;
        __m256 weight[4];
        load_row(registers, weights + key * LANES, UNIT * LANES, weight);
#pragma GCC unroll 8
        for (int i = 0; i < dims; i++) {
            const __m256 number = _mm256_set1_ps(row[i]);
#pragma GCC unroll 4
            for (int j = 0; j < registers; j++) kept[i][j] = _mm256_fmadd_ps(number, weight[j], kept[i][j]);
        }
    }
    for (int i = 0; i < dims; i++) store_row(registers, sums + (d + i) * LANES, size, kept[i]);
}

/* Computes `at_once` keys or dims at a time, with eight sums in registers: enough for two units of four cycles each. */
AVX2 INLINE void score_all(const int at_once, const int registers, const struct unit *unit, int64_t num_keys,
                           const float *queries, int64_t dim, int64_t width, float *scores) {
    int64_t key = 0;
    for (; key + at_once <= num_keys; key += at_once)
        score_keys(at_once, registers, unit, key, queries, dim, width, scores);
    for (; key < num_keys; key++) score_keys(1, registers, unit, key, queries, dim, width, scores);
}

AVX2 INLINE void add_all(const int at_once, const int registers, const struct unit *unit, int64_t num_keys, int64_t dim,
                         const float *weights, float *sums, int64_t size) {
    int64_t d = 0;
    for (; d + at_once <= dim; d += at_once) add_dims(at_once, registers, unit, d, weights, num_keys, sums, size);
    for (; d < dim; d++) add_dims(1, registers, unit, d, weights, num_keys, sums, size);
}

/* Loads eight numbers of a stored row from `d` on: floats, or int8 without their scale. */
AVX2 INLINE __m256 load_eight(const char *row, int64_t d, const int is_int8) {
    if (!is_int8) return _mm256_loadu_ps((const float *)row + d);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(row + d))));
}

/* Returns the scale of an int8 row, which follows its numbers. */
AVX2 INLINE float row_scale(const char *row, int64_t dim) {
    bf16 stored;
    memcpy(&stored, row + dim, 2);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)((uint32_t)stored << 16))));
}

/* Computes the scores of up to FEW_HALF lanes, with `8 * blocks` adjacent keys in registers instead of lanes: three
   lanes would use three eighths of a register. Each sum adds the dims in order, as above. */
AVX2 INLINE void score_few(const int lanes, const int blocks, const int is_int8, const struct unit *unit,
                           int64_t num_keys, const float *queries, int64_t dim, float *scores) {
    for (int64_t key = 0; key < num_keys; key += 8 * blocks) {
        __m256 sums[2][8], scales[2];
        for (int i = 0; i < 8 * blocks; i++) sums[i / 8][i % 8] = _mm256_setzero_ps();
        for (int block = 0; block < blocks && is_int8; block++) {
            float each[8];
            for (int i = 0; i < 8; i++) each[i] = row_scale(unit->keys[key + block * 8 + i], dim);
            scales[block] = _mm256_loadu_ps(each);
        }
        for (int64_t d = 0; d < dim; d += 8)
#pragma GCC unroll 2
            for (int block = 0; block < blocks; block++) {
                __m256 numbers[8];
                for (int i = 0; i < 8; i++) numbers[i] = load_eight(unit->keys[key + block * 8 + i], d, is_int8);
                /* Now a register holds one dim of eight keys. */
                transpose_eight(numbers);
                for (int i = 0; i < 8 && is_int8; i++) numbers[i] = _mm256_mul_ps(numbers[i], scales[block]);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
                    for (int lane = 0; lane < lanes; lane++)
                        sums[block][lane] = _mm256_fmadd_ps(numbers[i], _mm256_set1_ps(queries[(d + i) * LANES + lane]),
                                                            sums[block][lane]);
            }
        for (int block = 0; block < blocks; block++) {
            /* Back to [key, lane]. */
            float *at = scores + (key + block * 8) * LANES;
            transpose_eight(sums[block]);
            for (int i = 0; i < 8; i++) store_row(1, at + i * LANES, 0, &sums[block][i]);
        }
    }
}

/* Adds all keys to the sums of up to FEW_HALF lanes, with `8 * registers` adjacent dims from `d` on in registers. */
AVX2 INLINE void add_block(const int lanes, const int registers, const int is_int8, const struct unit *unit, int64_t d,
                           int64_t dim, const float *weights, int64_t num_keys, float *sums) {
    const __m256i apart = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(LANES));
    __m256 kept[FEW_HALF][8];
    /* The state has 16 lanes per dim: gather one lane's dims. */
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < registers; i++)
            kept[lane][i] = _mm256_i32gather_ps(sums + (d + i * 8) * LANES + lane, apart, 4);
    /* The sums stay in registers over all keys. */
    for (int64_t key = 0; key < num_keys; key++) {
        const char *row = unit->values[key];
        const __m256 scale = _mm256_set1_ps(is_int8 ? row_scale(row, dim) : 1.0f);
        __m256 weight[FEW_HALF];
        for (int lane = 0; lane < lanes; lane++) weight[lane] = _mm256_set1_ps(weights[key * LANES + lane]);
#pragma GCC unroll 8
        for (int i = 0; i < registers; i++) {
            __m256 numbers = load_eight(row, d + i * 8, is_int8);
            if (is_int8) numbers = _mm256_mul_ps(numbers, scale);
#pragma GCC unroll 4
            for (int lane = 0; lane < lanes; lane++)
                kept[lane][i] = _mm256_fmadd_ps(numbers, weight[lane], kept[lane][i]);
        }
    }
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < registers; i++) {
            float results[8];
            _mm256_storeu_ps(results, kept[lane][i]);
            for (int j = 0; j < 8; j++) sums[(d + i * 8 + j) * LANES + lane] = results[j];
        }
}

AVX2 INLINE void add_few(const int lanes, const int registers, const int is_int8, const struct unit *unit,
                         int64_t num_keys, int64_t dim, const float *weights, float *sums) {
    int64_t d = 0;
    for (; d + 8 * registers <= dim; d += 8 * registers)
        add_block(lanes, registers, is_int8, unit, d, dim, weights, num_keys, sums);
    for (; d < dim; d += 8) add_block(lanes, 1, is_int8, unit, d, dim, weights, num_keys, sums);
}

/* Each number of lanes has its own code, so that the sums stay in registers. */
AVX2 INLINE void score_up_to_4(const int is_int8, int64_t lanes, const struct unit *unit, int64_t num_keys,
                               const float *queries, int64_t dim, float *scores) {
    if (lanes == 1) score_few(1, 2, is_int8, unit, num_keys, queries, dim, scores);
    else if (lanes == 2) score_few(2, 2, is_int8, unit, num_keys, queries, dim, scores);
    else if (lanes == 3) score_few(3, 1, is_int8, unit, num_keys, queries, dim, scores);
    else score_few(4, 1, is_int8, unit, num_keys, queries, dim, scores);
}

AVX2 INLINE void add_up_to_4(const int is_int8, int64_t lanes, const struct unit *unit, int64_t num_keys, int64_t dim,
                             const float *weights, float *sums) {
    if (lanes == 1) add_few(1, 8, is_int8, unit, num_keys, dim, weights, sums);
    else if (lanes == 2) add_few(2, 4, is_int8, unit, num_keys, dim, weights, sums);
    else if (lanes == 3) add_few(3, 4, is_int8, unit, num_keys, dim, weights, sums);
    else add_few(4, 2, is_int8, unit, num_keys, dim, weights, sums);
}

/* Computes scores [tiles, UNIT, LANES] of one or two tiles, or of the first `half_lanes` lanes of one, if not 0. */
AVX2 INLINE void score_unit(const struct attention *a, const struct unit *unit, int64_t num_keys, const bf16 *values,
                            const void *queries, float *scores, int is_pair, int64_t half_lanes) {
    (void)values;
    const int64_t dim = a->key_dim, width = round_up(dim, 32);
    if (are_side_by_side(a, half_lanes)) {
        if (a->is_int8) score_up_to_4(1, half_lanes, unit, num_keys, queries, dim, scores);
        else score_up_to_4(0, half_lanes, unit, num_keys, queries, dim, scores);
    } else if (is_pair) score_all(2, 4, unit, num_keys, queries, dim, width, scores);
    else if (half_lanes) score_all(8, 1, unit, num_keys, queries, dim, width, scores);
    else score_all(4, 2, unit, num_keys, queries, dim, width, scores);
}

/* Computes sums += V^T P for the same lanes. */
AVX2 INLINE void add_unit(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_keys,
                          const bf16 *values, const float *weights, const bf16 *pairs, float *sums, int is_pair,
                          int64_t half_lanes) {
    (void)next, (void)values, (void)pairs;
    const int64_t dim = a->value_dim, size = (round_up(dim, 32) + 2) * LANES;
    if (are_side_by_side(a, half_lanes)) {
        if (a->is_int8) add_up_to_4(1, half_lanes, unit, num_keys, dim, weights, sums);
        else add_up_to_4(0, half_lanes, unit, num_keys, dim, weights, sums);
    } else if (is_pair) add_all(2, 4, unit, num_keys, dim, weights, sums, size);
    else if (half_lanes) add_all(8, 1, unit, num_keys, dim, weights, sums, size);
    else add_all(4, 2, unit, num_keys, dim, weights, sums, size);
}
