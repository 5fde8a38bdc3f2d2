/* One lane on AVX-512, with adjacent keys, and then dims, in registers. */

#pragma once

#include "attention/state.h"

/* How numbers are multiplied: bfloat16 in pairs, or one by one (`outrider_splits_pairs`), or one by one and added as
   AMX does; or floats. */
enum number_format { PAIRS, APART, AS_TILES, FLOATS };

AVX INLINE __mmask16 first_lanes(int64_t count) { return (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1); }

/* Returns the keys from `place` on that are visible to a lane at `position`. */
AVX INLINE __mmask16 seen_of(int64_t place, int32_t position, int64_t window) {
    const __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)place),
                                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 seen = _mm512_cmple_epi32_mask(places, _mm512_set1_epi32(position));
    if (!window) return seen;
    return seen & _mm512_cmpgt_epi32_mask(places, _mm512_set1_epi32(position - (int)window));
}

/* Returns the sum of 16 numbers. It adds halves to each other, as in softmax.h. */
AVX INLINE __m512 sum_across(__m512 x) {
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
}

/* `soften` of softmax.h for the scores [UNIT] of one lane. The weights have the format of `kind`. */
AVX INLINE void soften_lane(const enum number_format kind, int32_t position, int64_t window, int64_t begin,
                            int64_t num_keys, const float *scores, float scale, float *peak, float *total, float *sums,
                            int64_t width, void *weights) {
    const int is_masked = begin + num_keys - 1 > position || (window && begin <= position - window);
    const __m512 floor = _mm512_set1_ps(FLOOR), factor = _mm512_set1_ps(scale);
    /* The peak over the visible keys, and before. */
    __m512 top = floor, totals = _mm512_setzero_ps();
    for (int64_t key = 0; key < num_keys; key += 16) {
        const __mmask16 seen = is_masked ? seen_of(begin + key, position, window) : 0xffff;
        top = _mm512_max_ps(top, _mm512_mask_mov_ps(floor, seen, _mm512_load_ps(scores + key)));
    }
    const __m512 old_peak = _mm512_set1_ps(*peak);
    const __m512 new_peak =
        _mm512_max_ps(old_peak, _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(top)), factor));
    for (int64_t key = 0; key < num_keys; key += 16) {
        const __mmask16 seen = is_masked ? seen_of(begin + key, position, window) : 0xffff;
        const __m512 score = _mm512_fmsub_ps(_mm512_load_ps(scores + key), factor, new_peak);
        const __m512 weight = _mm512_maskz_mov_ps(seen, power_of_two(score, kind != FLOATS));
        totals = _mm512_add_ps(totals, weight);
        if (kind == FLOATS) {
            _mm512_store_ps((float *)weights + key, weight);
            continue;
        }
        /* Weights round to bfloat16, also where they are stored as floats. */
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weight);
        if (kind == PAIRS) _mm256_store_si256((__m256i *)((bf16 *)weights + key), rounded);
        else _mm512_store_si512((float *)weights + key, _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    }
    /* Rescale the state to the new peak. */
    const __m512 fade = power_of_two(_mm512_sub_ps(old_peak, new_peak), 0);
    *peak = _mm512_cvtss_f32(new_peak);
    *total = _mm512_cvtss_f32(_mm512_fmadd_ps(_mm512_set1_ps(*total), fade, sum_across(totals)));
    if (_mm512_cmpneq_ps_mask(fade, _mm512_set1_ps(1.0f)))
        for (int64_t d = 0; d < width; d += 16)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), fade));
}
