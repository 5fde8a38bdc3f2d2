/* The two products of tiles.c on AVX-512, in float32 and bfloat16, and on AMX in bfloat16. */

#pragma once

#include "amx.h"
#include "attention/products_split.h"
#include "attention/unit.h"

/* Computes scores [tiles, UNIT, LANES] of the unit's first `num_keys`, a multiple of 32; queries [tiles, D, LANES]. */
AMX INLINE void score_tiles(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                            float *scores, int is_pair) {
    const int64_t num_tiles = (unit->count + 15) / 16;
    for (int64_t tile = 0; tile < num_keys / 16; tile += 2) {
        const int64_t other = min(tile + 1, num_tiles - 1);
        const char *low = unit->key_tiles[tile], *high = unit->key_tiles[other];
        const int64_t low_stride = unit->key_strides[tile], high_stride = unit->key_strides[other];
        _tile_zero(0);
        _tile_zero(1);
        if (is_pair) {
            _tile_zero(2);
            _tile_zero(3);
        }
        /* Two tiles of keys meet one or two tiles of lanes: each load is used twice. */
        for (int64_t d = 0; d < width; d += 32) {
            tile_load(6, queries + d * LANES, 64);
            tile_load(4, low + d * 2, low_stride);
            _tile_dpbf16ps(0, 4, 6);
            tile_load(5, high + d * 2, high_stride);
            _tile_dpbf16ps(1, 5, 6);
            if (is_pair) {
                tile_load(7, queries + (width + d) * LANES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores + tile * 16 * LANES, 64);
        _tile_stored(1, scores + (tile + 1) * 16 * LANES, 64);
        if (is_pair) {
            _tile_stored(2, scores + (UNIT + tile * 16) * LANES, 64);
            _tile_stored(3, scores + (UNIT + (tile + 1) * 16) * LANES, 64);
        }
    }
}

/* `score_tiles` without AMX. */
AVX INLINE void score_vectors(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                              float *scores, int is_pair) {
    const int at_once = is_pair ? 8 : 16; /* the sums of so many keys fill the registers */
    const int64_t last_tile = (unit->count - 1) / 16;
    for (int64_t key = 0; key < num_keys; key += at_once) {
        const int64_t tile = min(key / 16, last_tile), stride = unit->key_strides[tile];
        const char *keys = unit->key_tiles[tile] + key % 16 * stride;
        __m512 sums[16][2];
        for (int i = 0; i < at_once; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        /* A pair of dims of 16 lanes meets the same pair of each key, broadcast. */
        for (int64_t d = 0; d < width; d += 2) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(queries + d * LANES);
            const __m512bh second = is_pair ? (__m512bh)_mm512_loadu_si512(queries + (width + d) * LANES) : first;
#pragma GCC unroll 16
            for (int i = 0; i < at_once; i++) {
                const __m512bh numbers = (__m512bh)broadcast(keys + i * stride + d * 2);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], first, numbers);
                if (is_pair) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], second, numbers);
            }
        }
        for (int i = 0; i < at_once; i++) {
            _mm512_storeu_ps(scores + (key + i) * LANES, sums[i][0]);
            if (is_pair) _mm512_storeu_ps(scores + (UNIT + key + i) * LANES, sums[i][1]);
        }
    }
}

AVX INLINE void score_f32(const struct unit *unit, int64_t num_keys, const float *queries, int64_t dim, int64_t width,
                          float *scores, int is_pair) {
    for (int64_t key = 0; key < num_keys; key += 8) {
        __m512 sums[8][2];
        for (int i = 0; i < 8; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        const float *rows[8];
        for (int i = 0; i < 8; i++) rows[i] = (const float *)unit->keys[key + i];
        for (int64_t d = 0; d < dim; d++) {
            __m512 first = _mm512_loadu_ps(queries + d * LANES), second = first;
            if (is_pair) second = _mm512_loadu_ps(queries + (width + d) * LANES);
            for (int i = 0; i < 8; i++) {
                __m512 number = _mm512_set1_ps(rows[i][d]);
                sums[i][0] = _mm512_fmadd_ps(number, first, sums[i][0]);
                if (is_pair) sums[i][1] = _mm512_fmadd_ps(number, second, sums[i][1]);
            }
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(scores + (key + i) * LANES, sums[i][0]);
            if (is_pair) _mm512_storeu_ps(scores + (UNIT + key + i) * LANES, sums[i][1]);
        }
    }
}

/* Computes sums += V^T P for the first `num_keys` of the unit. */
AMX INLINE void add_tiles(const bf16 *values, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                          int64_t size, int is_pair) {
    for (int64_t d = 0; d < width; d += 32) {
        float *low = sums + d * LANES, *high = low + 16 * LANES;
        tile_load(0, low, 64);
        tile_load(1, high, 64);
        if (is_pair) {
            tile_load(2, low + size, 64);
            tile_load(3, high + size, 64);
        }
        for (int64_t key = 0; key < num_keys; key += 32) {
            const bf16 *v = values + (key / 32 * (width / 16) + d / 16) * 512;
            tile_load(6, weights + key * LANES, 64);
            tile_load(4, v, 64);
            _tile_dpbf16ps(0, 4, 6);
            tile_load(5, v + 512, 64);
            _tile_dpbf16ps(1, 5, 6);
            if (is_pair) {
                tile_load(7, weights + (UNIT + key) * LANES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, low, 64);
        _tile_stored(1, high, 64);
        if (is_pair) {
            _tile_stored(2, low + size, 64);
            _tile_stored(3, high + size, 64);
        }
    }
}

/* `add_tiles` without AMX. */
AVX INLINE void add_vectors(const bf16 *values, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                            int64_t size, int is_pair) {
    const int at_once = is_pair ? 8 : 16; /* the sums of so many dims fill the registers */
    for (int64_t d = 0; d < width; d += at_once) {
        float *onto = sums + d * LANES;
        __m512 kept[16][2];
        for (int i = 0; i < at_once; i++) {
            kept[i][0] = _mm512_loadu_ps(onto + i * LANES);
            if (is_pair) kept[i][1] = _mm512_loadu_ps(onto + size + i * LANES);
        }
        for (int64_t key = 0; key < num_keys; key += 32) {
            const bf16 *tile = values + (key / 32 * (width / 16) + d / 16) * 512 + d % 16 * 32;
            for (int64_t i = 0; i < 32; i += 2) {
                const bf16 *at = weights + (key + i) * LANES;
                const __m512bh first = (__m512bh)_mm512_loadu_si512(at);
                const __m512bh second = is_pair ? (__m512bh)_mm512_loadu_si512(at + UNIT * LANES) : first;
#pragma GCC unroll 16
                for (int dim = 0; dim < at_once; dim++) {
                    const __m512bh numbers = (__m512bh)broadcast(tile + dim * 32 + i);
                    kept[dim][0] = _mm512_dpbf16_ps(kept[dim][0], first, numbers);
                    if (is_pair) kept[dim][1] = _mm512_dpbf16_ps(kept[dim][1], second, numbers);
                }
            }
        }
        for (int i = 0; i < at_once; i++) {
            _mm512_storeu_ps(onto + i * LANES, kept[i][0]);
            if (is_pair) _mm512_storeu_ps(onto + size + i * LANES, kept[i][1]);
        }
    }
}

/* Does the same in float32, for `dims` sums from `d` on. */
AVX INLINE void add_dims_f32(const struct unit *unit, int64_t d, int dims, const float *weights, int64_t num_keys,
                             float *sums, int64_t size, int is_pair) {
    __m512 kept[8][2];
    for (int i = 0; i < dims; i++) {
        kept[i][0] = _mm512_loadu_ps(sums + (d + i) * LANES);
        if (is_pair) kept[i][1] = _mm512_loadu_ps(sums + size + (d + i) * LANES);
    }
    for (int64_t key = 0; key < num_keys; key++) {
        const float *row = (const float *)unit->values[key] + d;
        __m512 first = _mm512_loadu_ps(weights + key * LANES), second = first;
        if (is_pair) second = _mm512_loadu_ps(weights + (UNIT + key) * LANES);
        for (int i = 0; i < dims; i++) {
            __m512 number = _mm512_set1_ps(row[i]);
            kept[i][0] = _mm512_fmadd_ps(number, first, kept[i][0]);
            if (is_pair) kept[i][1] = _mm512_fmadd_ps(number, second, kept[i][1]);
        }
    }
    for (int i = 0; i < dims; i++) {
        _mm512_storeu_ps(sums + (d + i) * LANES, kept[i][0]);
        if (is_pair) _mm512_storeu_ps(sums + size + (d + i) * LANES, kept[i][1]);
    }
}

AVX INLINE void add_f32(const struct unit *unit, int64_t dim, const float *weights, int64_t num_keys, float *sums,
                        int64_t size, int is_pair) {
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) add_dims_f32(unit, d, 8, weights, num_keys, sums, size, is_pair);
    for (; d < dim; d++) add_dims_f32(unit, d, 1, weights, num_keys, sums, size, is_pair);
}

/* Computes scores [tiles, UNIT, LANES] of one or two tiles. */
AMX INLINE void score_unit(const struct attention *a, const struct unit *unit, int64_t num_keys, const bf16 *values,
                           const void *queries, float *scores, int is_pair, int64_t half_lanes) {
    (void)values, (void)half_lanes;
    const int64_t width = round_up(a->key_dim, 32);
    if (a->is_bf16 && outrider_has_tiles) score_tiles(unit, num_keys, queries, width, scores, is_pair);
    else if (a->is_bf16 && outrider_splits_pairs) score_split(unit, num_keys, queries, width, scores, is_pair);
    else if (a->is_bf16) score_vectors(unit, num_keys, queries, width, scores, is_pair);
    else score_f32(unit, num_keys, queries, a->key_dim, width, scores, is_pair);
}

/* Computes sums += V^T P for the same tiles. P are the `weights`, or `scores` for a float32 model. */
AMX INLINE void add_unit(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_keys,
                         const bf16 *values, const float *scores, const bf16 *weights, float *sums, int is_pair,
                         int64_t half_lanes) {
    (void)next, (void)half_lanes;
    const int64_t width = round_up(a->value_dim, 32), size = (width + 2) * LANES;
    if (a->is_bf16 && outrider_has_tiles) add_tiles(values, weights, num_keys, width, sums, size, is_pair);
    else if (a->is_bf16 && outrider_splits_pairs) add_split(unit, weights, num_keys, width, sums, size, is_pair);
    else if (a->is_bf16) add_vectors(values, weights, num_keys, width, sums, size, is_pair);
    else add_f32(unit, a->value_dim, scores, num_keys, sums, size, is_pair);
}
