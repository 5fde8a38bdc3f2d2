/* The bfloat16 products of products_wide.h, computed as two float products per pair, the odd numbers first. The bits
   are the same. It is faster on Intel's processors, where vdpbf16ps takes four times as long as a float product (on
   AMD's it takes as long). Keys and values are converted to floats first (`widen_rows`). */

#pragma once

#include "attention/unit.h"

/* `score_vectors` with split pairs, from keys as floats. */
AVX INLINE void score_split(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                            float *scores, int is_pair) {
    for (int64_t key = 0; key < num_keys; key += 8) {
        __m512 sums[8][2];
        const float *rows[8];
        for (int i = 0; i < 8; i++) {
            rows[i] = (const float *)unit->keys[key + i];
            sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        }
        /* Per pair of dims: first the odd ones of all keys, then the even ones, as vdpbf16ps adds them. */
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

/* `add_vectors` with split pairs, from values as floats. */
AVX INLINE void add_split(const struct unit *unit, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                          int64_t size, int is_pair) {
    for (int64_t d = 0; d < width; d += 8) {
        float *onto = sums + d * LANES;
        __m512 kept[8][2];
        for (int i = 0; i < 8; i++) {
            kept[i][0] = _mm512_loadu_ps(onto + i * LANES);
            if (is_pair) kept[i][1] = _mm512_loadu_ps(onto + size + i * LANES);
        }
        /* Per pair of keys: first the odd one for all dims, then the even one, as vdpbf16ps adds them. */
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
