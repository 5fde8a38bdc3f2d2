/* The functions of a gate, and of an MLP without gates: x times the logistic function of z, 1 / (1 + e^-z). silu(x) has
   z = x; the approximation of gelu(x) by tanh has z = 2 sqrt(2 / pi) (x + 0.044715 x^3). e^-z = 2^t = 2^whole 2^rest,
   with |rest| <= 1/2 and a polynomial for 2^rest. gelu(x) itself has the error function, as 1 - e^-x^2 p(t) with
   t = 1 / (1 + 0.3275911 x). */

#pragma once

#include "processor.h"
#include "products/weight.h"

enum { NUM_POWERS = 8 };

/* The polynomial of 2^rest, from the highest power down to 1. */
static const float powers_of_rest[NUM_POWERS] = {1.52527338e-5f, 1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f,
                                                 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};

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

/* Splits e^-z into `whole_power` and 2^rest, and returns the rest; z is taken as at most 87 and at least -87. */
AVX2 INLINE __m256 split_power(__m256 z, __m256 *whole_power) {
    const __m256 in = _mm256_min_ps(_mm256_max_ps(z, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(87.0f));
    const __m256 whole = _mm256_round_ps(_mm256_mul_ps(in, _mm256_set1_ps(-1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m256 rest = _mm256_fmadd_ps(in, _mm256_set1_ps(-1.44269502f), _mm256_sub_ps(_mm256_setzero_ps(), whole));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    *whole_power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    return _mm256_fmadd_ps(in, _mm256_set1_ps(-1.92596303e-8f), rest);
}

/* Computes the polynomial of the first `num` coefficients. */
AVX2 INLINE __m256 polynomial(__m256 rest, const int num) {
    __m256 power = _mm256_set1_ps(powers_of_rest[0]);
    for (int i = 1; i < num; i++) power = _mm256_fmadd_ps(power, rest, _mm256_set1_ps(powers_of_rest[i]));
    return power;
}

/* Computes e^-z with an error of a few units in the last place. */
AVX2 INLINE __m256 negative_power(__m256 z) {
    __m256 whole_power;
    const __m256 rest = split_power(z, &whole_power);
    return _mm256_mul_ps(polynomial(rest, NUM_POWERS), whole_power);
}

/* Computes e^-z - 1, as exact near 0. */
AVX2 INLINE __m256 negative_power_less_one(__m256 z) {
    __m256 whole_power;
    const __m256 rest = split_power(z, &whole_power);
    const __m256 less_one = _mm256_mul_ps(polynomial(rest, NUM_POWERS - 1), rest); /* 2^rest - 1 */
    return _mm256_fmadd_ps(less_one, whole_power, _mm256_sub_ps(whole_power, _mm256_set1_ps(1.0f)));
}

/* `rough_product`, as exact as that; 0 for z below -87, where silu is less than 2e-36. */
AVX2 INLINE __m256 exact_product(__m256 x, __m256 z) {
    const __m256 result = _mm256_div_ps(x, _mm256_add_ps(negative_power(z), _mm256_set1_ps(1.0f)));
    return _mm256_and_ps(result, _mm256_cmp_ps(z, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ));
}

AVX INLINE __m512 rough_gate(int gate, __m512 x) {
    if (gate == SILU) return rough_product(x, x);
    const __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN stays NaN */
    if (gate == RELU_SQUARED) return _mm512_mul_ps(positive, positive);
    const __m512 square = _mm512_mul_ps(x, x);
    const __m512 factor = _mm512_fmadd_ps(square, _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.59576912f));
    return rough_product(x, _mm512_mul_ps(x, factor));
}

/* Computes x / 2 (1 + erf(x / sqrt(2))) with an error of 1.5e-7 x (Abramowitz and Stegun 7.1.26). */
AVX2 INLINE __m256 exact_gelu(__m256 x) {
    static const float factors[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    const __m256 z = _mm256_mul_ps(_mm256_andnot_ps(sign, x), _mm256_set1_ps(0.707106781f));
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(z, _mm256_set1_ps(0.3275911f), one));
    __m256 p = _mm256_setzero_ps();
    for (int i = 0; i < 5; i++) p = _mm256_mul_ps(_mm256_add_ps(p, _mm256_set1_ps(factors[i])), t);
    const __m256 tail = _mm256_mul_ps(p, negative_power(_mm256_mul_ps(z, z)));
    const __m256 erf = _mm256_or_ps(_mm256_sub_ps(one, tail), _mm256_and_ps(sign, x));
    const __m256 half = _mm256_mul_ps(x, _mm256_set1_ps(0.5f));
    return _mm256_fmadd_ps(half, erf, half);
}

/* Computes the logistic function; NaN stays NaN. */
AVX2 INLINE __m256 logistic(__m256 z) {
    return _mm256_or_ps(exact_product(_mm256_set1_ps(1.0f), z), _mm256_cmp_ps(z, z, _CMP_UNORD_Q));
}

/* Computes xIELU (arXiv:2411.13010), as transformers does: p x^2 + x / 2 above 0, n (e^x - 1 - x) + x / 2 below. */
AVX2 INLINE __m256 xielu(__m256 x, float p, float n) {
    const __m256 half = _mm256_mul_ps(x, _mm256_set1_ps(0.5f)), positive = _mm256_mul_ps(_mm256_set1_ps(p), x);
    const __m256 z = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_min_ps(x, _mm256_set1_ps(-1e-6f)));
    const __m256 below = _mm256_fmadd_ps(_mm256_set1_ps(n), _mm256_sub_ps(negative_power_less_one(z), x), half);
    const __m256 is_above = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_blendv_ps(below, _mm256_fmadd_ps(positive, x, half), is_above);
}

/* Computes gpt-oss' gate logistic(alpha gate) (1 + up), where gate is at most `limit` and |up| too; NaN stays NaN. */
AVX2 INLINE __m256 clamped_gate(__m256 gate, __m256 up, float alpha, float limit) {
    const __m256 most = _mm256_set1_ps(limit), least = _mm256_set1_ps(-limit);
    gate = _mm256_min_ps(most, gate); /* the second number where one is NaN */
    up = _mm256_max_ps(least, _mm256_min_ps(most, up));
    gate = exact_product(gate, _mm256_mul_ps(_mm256_set1_ps(alpha), gate));
    return _mm256_fmadd_ps(up, gate, gate);
}

AVX2 INLINE __m256 exact_gate(int gate, __m256 x) {
    const __m256 positive = _mm256_max_ps(_mm256_setzero_ps(), x); /* NaN stays NaN */
    if (gate == SILU) return exact_product(x, x);
    if (gate == GELU) return exact_gelu(x);
    if (gate == RELU) return positive;
    if (gate == RELU_SQUARED) return _mm256_mul_ps(positive, positive);
    if (gate == LOGISTIC) return logistic(x);
    const __m256 square = _mm256_mul_ps(x, x);
    const __m256 factor = _mm256_fmadd_ps(square, _mm256_set1_ps(0.0713548163f), _mm256_set1_ps(1.59576912f));
    return exact_product(x, _mm256_mul_ps(x, factor));
}
