/* The functions of a gate: x times the logistic function of z, 1 / (1 + e^-z). silu(x) has z = x; the approximation of
   gelu(x) by tanh has z = 2 sqrt(2 / pi) (x + 0.044715 x^3). e^-z = 2^t = 2^whole 2^rest, with |rest| <= 1/2 and a
   polynomial for 2^rest. */

#pragma once

#include "processor.h"
#include "products/weight.h"

enum { NUM_POWERS = 7 };

/* Returns x times the logistic function of z with a relative error of 1e-4, a twentieth of bfloat16's rounding error. */
AVX INLINE __m512 rough_product(__m512 x, __m512 z) {
    __m512 t = _mm512_mul_ps(z, _mm512_set1_ps(-1.44269504f));
    t = _mm512_min_ps(_mm512_max_ps(t, _mm512_set1_ps(-1000.0f)), _mm512_set1_ps(1000.0f)); /* no infinite `whole` */
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(t, whole);
    __m512 power = _mm512_set1_ps(9.6181291e-3f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(5.5504109e-2f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(2.4022651e-1f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(6.9314718e-1f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0f));
    __m512 whole_power = _mm512_scalef_ps(power, whole);
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(whole_power, _mm512_set1_ps(1.0f))));
}

/* Does the same with an error of a few units in the last place; 0 for z below -87, where silu is less than 2e-36. */
AVX2 INLINE __m256 exact_product(__m256 x, __m256 z) {
    static const float powers[NUM_POWERS] = {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f,
                                             2.40226507e-1f, 6.93147181e-1f, 1.0f};
    const __m256 lowest = _mm256_set1_ps(-87.0f);
    const __m256 in = _mm256_min_ps(_mm256_max_ps(z, lowest), _mm256_set1_ps(87.0f));
    const __m256 whole = _mm256_round_ps(_mm256_mul_ps(in, _mm256_set1_ps(-1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m256 rest = _mm256_fmadd_ps(in, _mm256_set1_ps(-1.44269502f), _mm256_sub_ps(_mm256_setzero_ps(), whole));
    rest = _mm256_fmadd_ps(in, _mm256_set1_ps(-1.92596303e-8f), rest);
    __m256 power = _mm256_set1_ps(1.52527338e-5f);
    for (int i = 0; i < NUM_POWERS; i++) power = _mm256_fmadd_ps(power, rest, _mm256_set1_ps(powers[i]));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const __m256 result = _mm256_div_ps(x, _mm256_fmadd_ps(power, scale, _mm256_set1_ps(1.0f)));
    return _mm256_and_ps(result, _mm256_cmp_ps(z, lowest, _CMP_NLT_UQ));
}

AVX INLINE __m512 rough_gate(int gate, __m512 x) {
    if (gate == SILU) return rough_product(x, x);
    const __m512 square = _mm512_mul_ps(x, x);
    const __m512 factor = _mm512_fmadd_ps(square, _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.59576912f));
    return rough_product(x, _mm512_mul_ps(x, factor));
}

AVX2 INLINE __m256 exact_gate(int gate, __m256 x) {
    if (gate == SILU) return exact_product(x, x);
    const __m256 square = _mm256_mul_ps(x, x);
    const __m256 factor = _mm256_fmadd_ps(square, _mm256_set1_ps(0.0713548163f), _mm256_set1_ps(1.59576912f));
    return exact_product(x, _mm256_mul_ps(x, factor));
}
