/* lanes.h on AVX-512. */

#pragma once

#define VECTOR_CODE AVX
#define TILE_CODE AMX
#define WITHIN INTERNAL
#define PART(name) name##_wide
#define IS_BF16(x) ((x)->is_bf16)

typedef __m512 floats;
typedef __m512i ints;
typedef __mmask16 mask;
typedef __mmask64 byte_mask;

#define lanes_zero _mm512_setzero_ps
#define lanes_set _mm512_set1_ps
#define lanes_load _mm512_loadu_ps
#define lanes_store _mm512_storeu_ps
#define lanes_add _mm512_add_ps
#define lanes_sub _mm512_sub_ps
#define lanes_mul _mm512_mul_ps
#define lanes_div _mm512_div_ps
#define lanes_fma _mm512_fmadd_ps
#define lanes_fms _mm512_fmsub_ps
#define lanes_max _mm512_max_ps
#define lanes_min _mm512_min_ps
#define lanes_abs _mm512_abs_ps
#define lanes_sum _mm512_reduce_add_ps
#define lanes_highest _mm512_reduce_max_ps

/* Exchanges each two neighbors. */
#define lanes_swap_neighbors(x) _mm512_permute_ps(x, 0xb1)

/* `lanes_fraction` is x - floor(x); `lanes_scale` is y 2^floor(x). */
#define lanes_fraction(x) _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define lanes_scale(y, x) _mm512_scalef_ps(y, x)

/* Rounds to whole numbers, ties to even. */
#define lanes_nearest(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* A mask from 16 bits. Masked operations leave other lanes unchanged, or zero them (`keep`, `load_some`). */
#define mask_of(bits) ((__mmask16)(bits))
#define mask_both(a, b) ((a) & (b))
#define lanes_differ _mm512_cmpneq_ps_mask
#define lanes_less(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define lanes_select _mm512_mask_mov_ps
#define lanes_keep _mm512_maskz_mov_ps
#define lanes_load_some _mm512_maskz_loadu_ps
#define lanes_store_some _mm512_mask_storeu_ps

#define lanes_set_int _mm512_set1_epi32
#define lanes_load_ints _mm512_loadu_si512
#define lanes_store_ints _mm512_storeu_si512
#define lanes_store_aligned_ints _mm512_store_si512
#define lanes_sub_ints _mm512_sub_epi32
#define lanes_at_most _mm512_cmple_epi32_mask
#define lanes_above _mm512_cmpgt_epi32_mask
#define lanes_as_ints _mm512_castps_si512
#define lanes_as_floats _mm512_castsi512_ps
#define lanes_rounded _mm512_cvtps_epi32
#define lanes_bound_ints(x, low, high) \
    _mm512_min_epi32(_mm512_max_epi32(x, _mm512_set1_epi32(low)), _mm512_set1_epi32(high))

/* Stores integers as int8. */
#define lanes_store_int8(at, some, whole) _mm_mask_storeu_epi8(at, some, _mm512_cvtepi32_epi8(whole))

/* A mask of the leading bytes of 64. */
#define lanes_first_bytes(count) ((count) >= 64 ? ~0ull : (count) > 0 ? (1ull << (count)) - 1 : 0)
#define lanes_load_bytes _mm512_maskz_loadu_epi8

/* Loads sixteen numbers of rows, from `index` on. */
AVX INLINE __m512 load_numbers(const void *at, int64_t index, const int is_bf16) {
    if (!is_bf16) return _mm512_loadu_ps((const float *)at + index);
    const __m256i numbers = _mm256_loadu_si256((const __m256i *)((const bf16 *)at + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

AVX INLINE __m512 load_some_numbers(const void *at, int64_t index, __mmask16 lanes, int is_bf16) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(lanes, (const float *)at + index);
    const __m256i numbers = _mm256_maskz_loadu_epi16(lanes, (const bf16 *)at + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

/* Returns the stored, rounded x. */
AVX INLINE __m512 store_numbers(void *at, int64_t index, __m512 x, const int is_bf16) {
    if (!is_bf16) {
        _mm512_storeu_ps((float *)at + index, x);
        return x;
    }
    const __m256i numbers = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i *)((bf16 *)at + index), numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

/* Transposes: rows[i] holds M[i, 0 .. 15] before and M[0 .. 15, i] after. */
AVX INLINE void transpose(__m512i rows[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

/* Stores 32 numbers of a row from `index` on, only those in `dims`. In bfloat16, `low` and `high` alternate in
   fours. */
AVX INLINE void store_dims(void *at, int64_t index, __mmask32 dims, __m512i low, __m512i high, int is_bf16) {
    if (is_bf16) {
        const __m512i evens = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        const __m512i odds = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        __m512 first = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, evens, high));
        __m512 second = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, odds, high));
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        _mm512_mask_storeu_epi16((bf16 *)at + index, dims, both);
    } else {
        _mm512_mask_storeu_epi32((float *)at + index, (__mmask16)dims, low);
        _mm512_mask_storeu_epi32((float *)at + index + 16, (__mmask16)(dims >> 16), high);
    }
}

/* Stores two weights of each lane as an adjacent bfloat16 pair. */
AVX INLINE void store_pairs(bf16 *at, __m512 even, __m512 odd) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_store_si512(at, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
}
