/* Scores of few lanes, whose sums have keys side by side in place of lanes, to where those of whole tiles are. */

#pragma once

#include "attention/types.h"

/* Sums of 16 keys side by side, for each of the first lanes, to scores [16, LANES]; zeros for other lanes. */
AVX INLINE void store_few(const int lanes, const __m512 *sums, float *scores) {
    if (lanes <= 4) {
        const __m512 zero = _mm512_setzero_ps();
        const __m512 second = lanes > 1 ? sums[1] : zero, third = lanes > 2 ? sums[2] : zero;
        const __m512 fourth = lanes > 3 ? sums[3] : zero;
        const __m512 a = _mm512_unpacklo_ps(sums[0], second), b = _mm512_unpackhi_ps(sums[0], second);
        const __m512 c = _mm512_unpacklo_ps(third, fourth), d = _mm512_unpackhi_ps(third, fourth);
        float fours[64] __attribute__((aligned(64))); /* of each fourth key: 0 4 8 12, 1 5 9 13, ... */
        _mm512_store_ps(fours, _mm512_shuffle_ps(a, c, 0x44));
        _mm512_store_ps(fours + 16, _mm512_shuffle_ps(a, c, 0xee));
        _mm512_store_ps(fours + 32, _mm512_shuffle_ps(b, d, 0x44));
        _mm512_store_ps(fours + 48, _mm512_shuffle_ps(b, d, 0xee));
        for (int i = 0; i < 16; i++) {
            const __m128 four = _mm_load_ps(fours + i % 4 * 16 + i / 4 * 4);
            _mm512_storeu_ps(scores + i * LANES, _mm512_zextps128_ps512(four));
        }
        return;
    }
    __m512i rows[16];
    for (int lane = 0; lane < 16; lane++)
        rows[lane] = lane < lanes ? _mm512_castps_si512(sums[lane]) : _mm512_setzero_si512();
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(scores + i * LANES, rows[i]);
}
