/* The softmax of some lanes over some keys: [peak | total | sums, dim by dim], 16 lanes each. */

#pragma once

#include "attention_types.h"

/* 2^x to 2e-9 of itself, and to 9e-5 where `is_rough`, as weights in bfloat16 may be; exactly 1 at 0. */
AVX INLINE __m512 power_of_two(__m512 x, int is_rough) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* [0, 1) */
    __m512 sum;
    if (is_rough) {
        sum = _mm512_set1_ps(0.07706706353f);
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.2276449539f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6951168019f));
    } else {
        sum = _mm512_set1_ps(2.161291893e-4f);
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.246784513e-3f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.675451731e-3f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.548528052e-2f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.2402293056f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6931470444f));
    }
    return _mm512_scalef_ps(_mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f)), x);
}

static inline int64_t state_size(int64_t width) { return (width + 2) * LANES; }

AVX INLINE void clear(float *state, int64_t width, __mmask16 lanes) {
    _mm512_mask_storeu_ps(state, lanes, _mm512_set1_ps(FLOOR));
    for (int64_t i = 1; i < width + 2; i++) _mm512_mask_storeu_ps(state + i * LANES, lanes, _mm512_setzero_ps());
}

/* Add what `later` has seen to `state`, for some lanes. */
AVX INLINE void merge(float *state, const float *later, int64_t width, __mmask16 lanes) {
    __m512 peak = _mm512_loadu_ps(state), peak_later = _mm512_loadu_ps(later);
    __m512 top = _mm512_max_ps(peak, peak_later);
    __m512 factor = power_of_two(_mm512_sub_ps(peak, top), 0);
    __m512 factor_later = power_of_two(_mm512_sub_ps(peak_later, top), 0);
    _mm512_mask_storeu_ps(state, lanes, top);
    for (int64_t i = 1; i < width + 2; i++) {
        __m512 old = _mm512_mul_ps(factor, _mm512_loadu_ps(state + i * LANES));
        __m512 sum = _mm512_fmadd_ps(factor_later, _mm512_loadu_ps(later + i * LANES), old);
        _mm512_mask_storeu_ps(state + i * LANES, lanes, sum);
    }
}
