/* The products of products_wide.h in bfloat16 by two products of floats for each pair, the odd numbers' first: the same
   bits, where vdpbf16ps takes four times as long as a product of floats (Intel's processors; AMD's take as long). Keys
   and values of whole tiles are floats then (`widen_rows`), those of few lanes come apart in registers. */

#pragma once

#include "attention/few_lanes.h"
#include "attention/unit.h"

/* Pairs of numbers for all lanes, [n / 2, LANES], as numbers [n, LANES]. */
AVX INLINE void split_pairs(const bf16 *pairs, int64_t n, float *numbers) {
    for (int64_t i = 0; i < n; i += 2) {
        const __m512i both = _mm512_loadu_si512(pairs + i * LANES);
        _mm512_store_ps(numbers + i * LANES, even_numbers(both));
        _mm512_store_ps(numbers + (i + 1) * LANES, odd_numbers(both));
    }
}

/* `score_few` where pairs are split. */
AVX INLINE void score_few_split(const int lanes, const struct unit *unit, int64_t num_keys, const bf16 *queries,
                                int64_t width, float *scores) {
    float numbers[MAX_DIM * LANES] __attribute__((aligned(64)));
    split_pairs(queries, width, numbers);
    const int64_t last_tile = (unit->count - 1) / 16;
    for (int64_t key = 0; key < num_keys; key += 16) {
        const int64_t tile = min(key / 16, last_tile), stride = unit->key_strides[tile];
        const char *keys = unit->key_tiles[tile];
        __m512 sums[FEW_SPLIT];
        for (int lane = 0; lane < lanes; lane++) sums[lane] = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += 32) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++) pairs[i] = _mm512_loadu_si512(keys + i * stride + d * 2);
            transpose(pairs);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const float *even = numbers + (d + 2 * i) * LANES, *odd = even + LANES;
                const __m512 odds = odd_numbers(pairs[i]), evens = even_numbers(pairs[i]);
#pragma GCC unroll 12
                for (int lane = 0; lane < lanes; lane++)
                    sums[lane] = _mm512_fmadd_ps(_mm512_set1_ps(odd[lane]), odds, sums[lane]);
#pragma GCC unroll 12
                for (int lane = 0; lane < lanes; lane++)
                    sums[lane] = _mm512_fmadd_ps(_mm512_set1_ps(even[lane]), evens, sums[lane]);
            }
        }
        store_few(lanes, sums, scores + key * LANES);
    }
}

/* `add_few` where pairs are split. */
AVX INLINE void add_few_split(const int lanes, const struct unit *unit, const struct unit *next, int64_t num_bytes,
                              const bf16 *weights, int64_t num_keys, int64_t dim, float *sums) {
    const __m512i places = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4); /* of dims, LANES apart */
    const __m512i zero = _mm512_setzero_si512();
    float numbers[UNIT * LANES] __attribute__((aligned(64)));
    split_pairs(weights, num_keys, numbers);
    for (int64_t d = 0; d < dim; d += 32) {
        const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
        float *onto = sums + d * LANES;
        __m512 kept[FEW_SPLIT][2];
        for (int lane = 0; lane < lanes; lane++)
            for (int half = 0; half < 2; half++)
                kept[lane][half] = _mm512_i32gather_ps(places, onto + half * 16 * LANES + lane, 4);
        for (int64_t key = 0; key < num_keys; key += 2) {
            if (next && d == 0) fetch(next->values + key, num_bytes);
            for (int64_t each = key + 1; each >= key; each--) {
                const __m512i row = _mm512_maskz_loadu_epi16(dims, unit->values[each] + 2 * d);
                const __m512 low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, row));
                const __m512 high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, row));
#pragma GCC unroll 12
                for (int lane = 0; lane < lanes; lane++) {
                    const __m512 weight = _mm512_set1_ps(numbers[each * LANES + lane]);
                    kept[lane][0] = _mm512_fmadd_ps(weight, low, kept[lane][0]);
                    kept[lane][1] = _mm512_fmadd_ps(weight, high, kept[lane][1]);
                }
            }
        }
        for (int lane = 0; lane < lanes; lane++)
            for (int half = 0; half < 2; half++)
                _mm512_i32scatter_ps(onto + half * 16 * LANES + lane, places, kept[lane][half], 4);
    }
}

/* `score_vectors` where pairs are split, from keys as floats. */
AVX INLINE void score_split(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                            float *scores, int is_pair) {
    for (int64_t key = 0; key < num_keys; key += 8) {
        __m512 sums[8][2];
        const float *rows[8];
        for (int i = 0; i < 8; i++) {
            rows[i] = (const float *)unit->keys[key + i];
            sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        }
        for (int64_t d = 0; d < width; d += 2) {
            const __m512i first = _mm512_loadu_si512(queries + d * LANES);
            const __m512i second = is_pair ? _mm512_loadu_si512(queries + (width + d) * LANES) : first;
            const __m512 odds = odd_numbers(first), evens = even_numbers(first);
            const __m512 second_odds = odd_numbers(second), second_evens = even_numbers(second);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512 number = _mm512_set1_ps(rows[i][d + 1]);
                sums[i][0] = _mm512_fmadd_ps(odds, number, sums[i][0]);
                if (is_pair) sums[i][1] = _mm512_fmadd_ps(second_odds, number, sums[i][1]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512 number = _mm512_set1_ps(rows[i][d]);
                sums[i][0] = _mm512_fmadd_ps(evens, number, sums[i][0]);
                if (is_pair) sums[i][1] = _mm512_fmadd_ps(second_evens, number, sums[i][1]);
            }
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(scores + (key + i) * LANES, sums[i][0]);
            if (is_pair) _mm512_storeu_ps(scores + (UNIT + key + i) * LANES, sums[i][1]);
        }
    }
}

/* `add_vectors` where pairs are split, from values as floats. */
AVX INLINE void add_split(const struct unit *unit, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                          int64_t size, int is_pair) {
    for (int64_t d = 0; d < width; d += 8) {
        float *onto = sums + d * LANES;
        __m512 kept[8][2];
        for (int i = 0; i < 8; i++) {
            kept[i][0] = _mm512_loadu_ps(onto + i * LANES);
            if (is_pair) kept[i][1] = _mm512_loadu_ps(onto + size + i * LANES);
        }
        for (int64_t key = 0; key < num_keys; key += 2) {
            const float *odd = (const float *)unit->values[key + 1] + d, *even = (const float *)unit->values[key] + d;
            const __m512i first = _mm512_loadu_si512(weights + key * LANES);
            const __m512i second = is_pair ? _mm512_loadu_si512(weights + (UNIT + key) * LANES) : first;
            const __m512 odds = odd_numbers(first), evens = even_numbers(first);
            const __m512 second_odds = odd_numbers(second), second_evens = even_numbers(second);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512 number = _mm512_set1_ps(odd[i]);
                kept[i][0] = _mm512_fmadd_ps(odds, number, kept[i][0]);
                if (is_pair) kept[i][1] = _mm512_fmadd_ps(second_odds, number, kept[i][1]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512 number = _mm512_set1_ps(even[i]);
                kept[i][0] = _mm512_fmadd_ps(evens, number, kept[i][0]);
                if (is_pair) kept[i][1] = _mm512_fmadd_ps(second_evens, number, kept[i][1]);
            }
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(onto + i * LANES, kept[i][0]);
            if (is_pair) _mm512_storeu_ps(onto + size + i * LANES, kept[i][1]);
        }
    }
}
