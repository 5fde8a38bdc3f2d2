/* lanes.h on AVX2, with two registers of eight lanes. */

#pragma once

#define VECTOR_CODE AVX2
#define TILE_CODE AVX2
#define WITHIN static
#define PART(name) name##_narrow
#define IS_BF16(x) 0

typedef struct {
    __m256 low, high;
} floats;

typedef struct {
    __m256i low, high;
} ints;

/* Each lane is all ones or all zeros. */
typedef ints mask;
typedef int64_t byte_mask; /* the number of bytes */

AVX2 INLINE floats lanes_zero(void) { return (floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AVX2 INLINE floats lanes_set(float x) { return (floats){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
AVX2 INLINE ints lanes_set_int(int x) { return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

AVX2 INLINE floats lanes_load(const float *at) { return (floats){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }

AVX2 INLINE void lanes_store(float *at, floats x) {
    _mm256_storeu_ps(at, x.low);
    _mm256_storeu_ps(at + 8, x.high);
}

AVX2 INLINE ints lanes_load_ints(const void *at) {
    return (ints){_mm256_loadu_si256(at), _mm256_loadu_si256((const __m256i *)at + 1)};
}

AVX2 INLINE void lanes_store_ints(void *at, ints x) {
    _mm256_storeu_si256(at, x.low);
    _mm256_storeu_si256((__m256i *)at + 1, x.high);
}

#define lanes_store_aligned_ints lanes_store_ints

#define OF_TWO(name, step) \
    AVX2 INLINE floats name(floats a, floats b) { return (floats){step(a.low, b.low), step(a.high, b.high)}; }
#define OF_THREE(name, step) \
    AVX2 INLINE floats name(floats a, floats b, floats c) { \
        return (floats){step(a.low, b.low, c.low), step(a.high, b.high, c.high)}; \
    }
OF_TWO(lanes_add, _mm256_add_ps)
OF_TWO(lanes_sub, _mm256_sub_ps)
OF_TWO(lanes_mul, _mm256_mul_ps)
OF_TWO(lanes_div, _mm256_div_ps)
OF_TWO(lanes_max, _mm256_max_ps)
OF_TWO(lanes_min, _mm256_min_ps)
OF_THREE(lanes_fma, _mm256_fmadd_ps)
OF_THREE(lanes_fms, _mm256_fmsub_ps)
#undef OF_TWO
#undef OF_THREE

AVX2 INLINE floats lanes_abs(floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (floats){_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

/* Adds in the same order as on AVX-512. */
AVX2 INLINE float lanes_sum(floats x) {
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return two[0] + two[1];
}

AVX2 INLINE float lanes_highest(floats x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}

/* Exchanges each two neighbors. */
AVX2 INLINE floats lanes_swap_neighbors(floats x) {
    return (floats){_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
}

AVX2 INLINE floats lanes_fraction(floats x) {
    return (floats){_mm256_sub_ps(x.low, _mm256_floor_ps(x.low)), _mm256_sub_ps(x.high, _mm256_floor_ps(x.high))};
}

/* Rounds to whole numbers, ties to even. */
AVX2 INLINE floats lanes_nearest(floats x) {
    return (floats){_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* y is in [1/2, 2). Results below 2^-126 are 0, or have lost bits. */
AVX2 INLINE __m256 scaled(__m256 y, __m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-127.0f), x); /* NaN stays NaN */
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

AVX2 INLINE floats lanes_scale(floats y, floats x) { return (floats){scaled(y.low, x.low), scaled(y.high, x.high)}; }

AVX2 INLINE ints lanes_as_ints(floats x) { return (ints){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
AVX2 INLINE floats lanes_as_floats(ints x) { return (floats){_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
AVX2 INLINE ints lanes_rounded(floats x) { return (ints){_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }

AVX2 INLINE ints lanes_sub_ints(ints a, ints b) {
    return (ints){_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}

AVX2 INLINE ints lanes_bound_ints(ints x, int low, int high) {
    const __m256i least = _mm256_set1_epi32(low), most = _mm256_set1_epi32(high);
    return (ints){_mm256_min_epi32(_mm256_max_epi32(x.low, least), most),
                  _mm256_min_epi32(_mm256_max_epi32(x.high, least), most)};
}

AVX2 INLINE mask mask_of(int bits) {
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    const __m256i all = _mm256_set1_epi32(bits);
    return (mask){_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low),
                  _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)};
}

AVX2 INLINE mask mask_both(mask a, mask b) {
    return (mask){_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}

AVX2 INLINE mask lanes_above(ints a, ints b) {
    return (mask){_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)};
}

AVX2 INLINE mask lanes_at_most(ints a, ints b) {
    const __m256i all = _mm256_set1_epi32(-1);
    const mask above = lanes_above(a, b);
    return (mask){_mm256_andnot_si256(above.low, all), _mm256_andnot_si256(above.high, all)};
}

AVX2 INLINE mask lanes_less(floats a, floats b) {
    return (mask){_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
                  _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}

AVX2 INLINE int lanes_differ(floats a, floats b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ)) |
           _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ));
}

AVX2 INLINE int lanes_equal(floats a, floats b) { /* in any lane */
    return _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ)) |
           _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}

AVX2 INLINE floats lanes_select(floats other, mask some, floats x) {
    return (floats){_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(some.low)),
                    _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(some.high))};
}

AVX2 INLINE floats lanes_keep(mask some, floats x) {
    return (floats){_mm256_and_ps(x.low, _mm256_castsi256_ps(some.low)),
                    _mm256_and_ps(x.high, _mm256_castsi256_ps(some.high))};
}

AVX2 INLINE floats lanes_load_some(mask some, const float *at) {
    return (floats){_mm256_maskload_ps(at, some.low), _mm256_maskload_ps(at + 8, some.high)};
}

AVX2 INLINE void lanes_store_some(float *at, mask some, floats x) {
    _mm256_maskstore_ps(at, some.low, x.low);
    _mm256_maskstore_ps(at + 8, some.high, x.high);
}

/* Returns the number of leading lanes. */
AVX2 INLINE int num_first(mask some) {
    return __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(some.low))) +
           __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(some.high)));
}

/* Loads the first `count` of 16 numbers, and zeros. */
AVX2 INLINE floats lanes_load_int8(const char *at, int64_t count) {
    int8_t some[LANES] = {0};
    if (count < LANES) at = __builtin_memcpy(some, at, (size_t)count);
    const __m128i all = _mm_loadu_si128((const __m128i *)at);
    return (floats){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}

AVX2 INLINE void lanes_store_int8(char *at, mask some, ints whole) {
    int32_t numbers[LANES];
    lanes_store_ints(numbers, whole);
    for (int i = 0; i < num_first(some); i++) at[i] = (char)numbers[i];
}

AVX2 INLINE byte_mask lanes_first_bytes(int64_t count) { return max(0, min(count, 64)); }

AVX2 INLINE ints lanes_load_bytes(byte_mask count, const void *at) {
    if (count == 64) return lanes_load_ints(at);
    float numbers[LANES] = {0};
    __builtin_memcpy(numbers, at, (size_t)count);
    return lanes_load_ints(numbers);
}

/* Loads sixteen numbers of rows, from `index` on. */
AVX2 INLINE floats load_numbers(const void *at, int64_t index, int is_bf16) {
    (void)is_bf16;
    return lanes_load((const float *)at + index);
}

AVX2 INLINE floats load_some_numbers(const void *at, int64_t index, mask some, int is_bf16) {
    (void)is_bf16;
    return lanes_load_some(some, (const float *)at + index);
}

/* Returns the stored, rounded x. */
AVX2 INLINE floats store_numbers(void *at, int64_t index, floats x, int is_bf16) {
    (void)is_bf16;
    lanes_store((float *)at + index, x);
    return x;
}

/* Stores 32 numbers of a row from `index` on, only those in `dims`. */
AVX2 INLINE void store_dims(void *at, int64_t index, uint32_t dims, ints low, ints high, int is_bf16) {
    (void)is_bf16;
    lanes_store_some((float *)at + index, mask_of((int)(dims & 0xffff)), lanes_as_floats(low));
    lanes_store_some((float *)at + index + 16, mask_of((int)(dims >> 16)), lanes_as_floats(high));
}

#define store_pairs(at, even, odd)

/* Transposes: register i holds M[i, 0 .. 7] before and M[0 .. 7, i] after. */
AVX2 INLINE void transpose_eight(__m256 rows[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* Transposes: rows[i] holds M[i, 0 .. 15] before and M[0 .. 15, i] after. */
AVX2 INLINE void transpose(ints rows[16]) {
    __m256 quarters[2][2][8]; /* [half of rows, half of columns] */
    for (int i = 0; i < 16; i++) {
        quarters[i / 8][0][i % 8] = _mm256_castsi256_ps(rows[i].low);
        quarters[i / 8][1][i % 8] = _mm256_castsi256_ps(rows[i].high);
    }
    for (int i = 0; i < 4; i++) transpose_eight(quarters[i / 2][i % 2]);
    for (int i = 0; i < 16; i++)
        rows[i] = lanes_as_ints((floats){quarters[0][i / 8][i % 8], quarters[1][i / 8][i % 8]});
}
