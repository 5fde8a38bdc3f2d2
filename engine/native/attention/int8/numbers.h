/* Numbers of an int8 pool, and of the integers that are multiplied by them. */

#pragma once

#include "attention/unit.h"

enum {
    MAX_QUERY = 127 * 256 + 127,  /* the largest integer of a query, and of a weight */
    MAX_WEIGHT = 127 * 256 + 255,
};

#define LEAST 1e-30f /* smaller maxima count as zero, since the inverse of their scale overflows */

/* Returns 256 high + low. */
AVX INLINE __m512i joined(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

INLINE float scale_of(const char *row, int64_t dim) {
    bf16 bits;
    float scale;
    memcpy(&bits, row + dim, 2);
    const uint32_t whole = (uint32_t)bits << 16;
    memcpy(&scale, &whole, 4);
    return scale;
}

AVX INLINE __mmask64 some_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

/* Loads the numbers [d, d + 64) of four rows, interleaved. Register i has the i-th four of each 16 dims. */
AVX INLINE void load_fours(const char *const *rows, int64_t d, int64_t dim, __m512i fours[4]) {
    __m512i row[4];
    for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some_bytes(dim - d), rows[i] + d);
    const __m512i low = _mm512_unpacklo_epi8(row[0], row[1]), low_next = _mm512_unpacklo_epi8(row[2], row[3]);
    const __m512i high = _mm512_unpackhi_epi8(row[0], row[1]), high_next = _mm512_unpackhi_epi8(row[2], row[3]);
    fours[0] = _mm512_unpacklo_epi16(low, low_next), fours[1] = _mm512_unpackhi_epi16(low, low_next);
    fours[2] = _mm512_unpacklo_epi16(high, high_next), fours[3] = _mm512_unpackhi_epi16(high, high_next);
}
