/* Quantizes rows of bfloat16 or float32 to 8 bits, with a scale per group. AVX-512 and AVX2 give the same numbers. If a
   group is not finite, its scale is NaN, and so are the sums of its row. */

#include "lanes/lanes.h"
#include "products/numbers.h"
#include "products/quantized.h"

/* Returns a group's scale, which maps `range` in x to `levels`. The lower bound keeps the product with a weight's scale
   and 1/16 normal (not denormal), so that sums that are 16 times too large are scaled back exactly. */
INLINE float scale_of(float range, float levels) { return range < 1e-28f * levels ? 1e-28f : range / levels; }

/* Quantizes a group of `vectors` x 16 numbers for 8-bit weights: 0 is the group's least number, 255 its greatest. */
AVX INLINE void quantize_based(const int vectors, const __m512 *x, int8_t *to, float *scale, float *base) {
    __m512 lowest = x[0], highest = x[0], faults = _mm512_mul_ps(x[0], _mm512_setzero_ps());
#pragma GCC unroll 4
    for (int i = 1; i < vectors; i++) {
        lowest = _mm512_min_ps(lowest, x[i]), highest = _mm512_max_ps(highest, x[i]);
        faults = _mm512_fmadd_ps(x[i], _mm512_setzero_ps(), faults);
    }
    *base = _mm512_reduce_min_ps(lowest);
    *scale = scale_of(_mm512_reduce_max_ps(highest) - *base, 255.0f) + _mm512_reduce_add_ps(faults);
    const __m512 inverse = _mm512_set1_ps(1.0f / *scale), least = _mm512_set1_ps(*base);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) {
        const __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(x[i], least), inverse));
        _mm_storeu_si128((__m128i *)(to + i * 16), _mm512_cvtusepi32_epi8(numbers));
    }
}

/* Quantizes a group for weights of 4 and 6 bits: 127 is the largest magnitude. */
AVX INLINE void quantize_summed(__m512 low, __m512 high, int8_t *to, float *scale, float *sum) {
    const __m512 zero = _mm512_setzero_ps(), faults = _mm512_fmadd_ps(low, zero, _mm512_mul_ps(high, zero));
    *scale = scale_of(_mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high))), 127.0f) +
             _mm512_reduce_add_ps(faults);
    const __m512 inverse = _mm512_set1_ps(1.0f / *scale);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(to + 16), _mm512_cvtsepi32_epi8(second));
    *sum = *scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

AVX INLINE void quantize_rows_wide(const struct quantized *p, const void *x, struct region region,
                                   const int is_bf16) {
    for (int64_t group = region.group; group < region.last_group; group++) {
        float *scales = p->row_scales + group * p->table_stride, *bases = p->row_bases + group * p->table_stride;
        for (int64_t row = region.row; row < region.last_row; row++) {
            const int64_t at = row * p->num_inputs + group * p->group;
            __m512 numbers[2 * GROUP / 16];
#pragma GCC unroll 4
            for (int i = 0; i < p->group / 16; i++) numbers[i] = load_numbers(x, at + i * 16, is_bf16);
            int8_t *to = p->x + row * p->stride + group * p->group;
            if (p->kind != INT8) quantize_summed(numbers[0], numbers[1], to, scales + row, bases + row);
            else if (p->group == GROUP) quantize_based(2, numbers, to, scales + row, bases + row);
            else quantize_based(4, numbers, to, scales + row, bases + row);
        }
    }
}

AVX void quantize_wide(const struct quantized *p, const void *x, struct region region) {
    if (p->is_bf16) quantize_rows_wide(p, x, region, 1);
    else quantize_rows_wide(p, x, region, 0);
}

AVX2 INLINE float highest(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

AVX2 INLINE float lowest(__m256 x) {
    const __m128 four = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

AVX2 INLINE int32_t sum_of(__m256i x) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

/* Returns 0, or NaN if a number is not finite. */
AVX2 INLINE float fault_of(const int vectors, const __m256 *x) {
    __m256 faults = _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) faults = _mm256_fmadd_ps(x[i], _mm256_setzero_ps(), faults);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(faults), _mm256_extractf128_ps(faults, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Restores the order of the bytes packed from four vectors. */
AVX2 INLINE __m256i in_order(__m256i packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* `quantize_based` on AVX2: the low halves of the bytes of 32 inputs, followed by their high halves. */
AVX2 INLINE void quantize_based_narrow(const int vectors, const __m256 *x, int8_t *to, float *scale, float *base) {
    __m256 least = x[0], most = x[0];
#pragma GCC unroll 8
    for (int i = 1; i < vectors; i++) least = _mm256_min_ps(least, x[i]), most = _mm256_max_ps(most, x[i]);
    *base = lowest(least);
    *scale = scale_of(highest(most) - *base, 255.0f) + fault_of(vectors, x);
    const __m256 inverse = _mm256_set1_ps(1.0f / *scale), zero = _mm256_set1_ps(*base);
    for (int at = 0; at < vectors; at += 4, to += 2 * GROUP) {
        __m256i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(x[at + i], zero), inverse));
        const __m256i first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
        const __m256i bytes = in_order(_mm256_packus_epi16(first, second)), low = _mm256_set1_epi8(15);
        _mm256_storeu_si256((__m256i *)to, _mm256_and_si256(bytes, low));
        _mm256_storeu_si256((__m256i *)(to + GROUP), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
    }
}

AVX2 INLINE void quantize_summed_narrow(const __m256 *x, int8_t *to, float *scale, float *sum) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) most = _mm256_max_ps(most, _mm256_andnot_ps(sign, x[i]));
    *scale = scale_of(highest(most), 127.0f) + fault_of(4, x);
    const __m256 inverse = _mm256_set1_ps(1.0f / *scale);
    __m256i whole[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
    const __m256i first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
    _mm256_storeu_si256((__m256i *)to, in_order(_mm256_packs_epi16(first, second)));
    const __m256i sums = _mm256_add_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
    *sum = *scale * (float)sum_of(sums);
}

AVX2 INLINE void quantize_rows_narrow(const struct quantized *p, const void *from, struct region region,
                                      const int is_bf16) {
    const int64_t x_bytes = group_bytes_of_x(p);
    for (int64_t group = region.group; group < region.last_group; group++) {
        float *scales = p->row_scales + group * p->table_stride, *bases = p->row_bases + group * p->table_stride;
        for (int64_t row = region.row; row < region.last_row; row++) {
            const int64_t at = row * p->num_inputs + group * p->group;
            __m256 x[2 * GROUP / 8];
            for (int i = 0; i < p->group / 8; i++) x[i] = load_eight(from, at + i * 8, is_bf16);
            int8_t *to = p->x + row * p->stride + group * x_bytes;
            if (p->kind != INT8) quantize_summed_narrow(x, to, scales + row, bases + row);
            else if (p->group == GROUP) quantize_based_narrow(4, x, to, scales + row, bases + row);
            else quantize_based_narrow(8, x, to, scales + row, bases + row);
        }
    }
}

AVX2 void quantize_narrow(const struct quantized *p, const void *x, struct region region) {
    if (p->is_bf16) quantize_rows_narrow(p, x, region, 1);
    else quantize_rows_narrow(p, x, region, 0);
}
