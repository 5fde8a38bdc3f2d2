/* Eight bfloat16 or float32 numbers of a row, on AVX2. */

#pragma once

#include "processor.h"

AVX2 INLINE __m256 load_eight(const void *from, int64_t index, const int is_bf16) {
    if (!is_bf16) return _mm256_loadu_ps((const float *)from + index);
    const __m128i numbers = _mm_loadu_si128((const __m128i *)((const bf16 *)from + index));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

/* Rounds eight numbers to the nearest bfloat16, ties to even. */
AVX2 INLINE __m128i to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_none), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

AVX2 INLINE void store_eight(void *to, int64_t index, __m256 x, const int is_bf16) {
    if (is_bf16) _mm_storeu_si128((__m128i *)((bf16 *)to + index), to_bf16(x));
    else _mm256_storeu_ps((float *)to + index, x);
}
