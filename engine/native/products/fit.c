/* Rounds weights to INT4: levels 0 to 15, and for each group of 32 a byte for the scale and one for the zero.

   The first scale tried reaches from the least to the greatest number of a group. The next smaller ones cut these off
   and round the others more finely. The first zeros tried put the least number, the greatest, and the middle where
   levels have them; then the zero moves to where the error of these levels is least. The least sum of squares wins.
   llama.cpp's `make_qkx2_quants` searches alike. Eight groups are computed at once. */

#include "products/quantized.h"
#include "team.h"

enum {
    LANES = 8,
    SMALLER = 2, /* scales tried, and one more */
    TURNS = 3,   /* zeros tried from each start */
    PART = 512,  /* groups of a part */
};

/* The fit of eight groups. */
struct fit {
    __m256 error, zero;
    __m256i scale; /* its byte */
};

struct rounding {
    const float *weight; /* [groups, GROUP] */
    int64_t num_groups;
    uint8_t *levels; /* [groups, GROUP] */
    uint8_t *scales, *zeros;
};

AVX2 INLINE __m256 scale_of(__m256i byte) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(byte, 20), _mm256_set1_epi32(LEAST_SCALE << 23)));
}

AVX2 INLINE __m256i within_byte(__m256i x) {
    return _mm256_min_epi32(_mm256_max_epi32(x, _mm256_setzero_si256()), _mm256_set1_epi32(255));
}

/* Returns the byte of the least scale that is not below `scale`. */
AVX2 INLINE __m256i byte_of(__m256 scale) {
    const __m256i above = _mm256_add_epi32(_mm256_castps_si256(scale), _mm256_set1_epi32((1 << 20) - 1));
    return within_byte(_mm256_srai_epi32(_mm256_sub_epi32(above, _mm256_set1_epi32(LEAST_SCALE << 23)), 20));
}

AVX2 INLINE __m256i sixteenths(__m256 zero) {
    return within_byte(_mm256_cvtps_epi32(_mm256_mul_ps(zero, _mm256_set1_ps(16))));
}

AVX2 INLINE __m256 zero_of(__m256i sixteenths) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sixteenths), _mm256_set1_ps(1.0f / 16));
}

AVX2 INLINE __m256 level_of(__m256 x) {
    const __m256 level = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_max_ps(level, _mm256_setzero_ps()), _mm256_set1_ps(15));
}

/* Tries a scale with zeros from `zero` on, and keeps the best. */
AVX2 INLINE void try_scale(const float (*x)[LANES], __m256i byte, __m256 inverse, __m256 zero, struct fit *best) {
    const __m256 scale = scale_of(byte);
    for (int turn = 0; turn < TURNS; turn++) {
        zero = zero_of(sixteenths(zero));
        __m256 squares = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++) {
            const __m256 exact = _mm256_fmadd_ps(_mm256_load_ps(x[i]), inverse, zero);
            const __m256 off = _mm256_sub_ps(level_of(exact), exact);
            squares = _mm256_fmadd_ps(off, off, squares), sum = _mm256_add_ps(sum, off);
        }
        const __m256 error = _mm256_mul_ps(_mm256_mul_ps(squares, scale), scale);
        const __m256 is_better = _mm256_cmp_ps(error, best->error, _CMP_LT_OQ);
        best->error = _mm256_blendv_ps(best->error, error, is_better);
        best->zero = _mm256_blendv_ps(best->zero, zero, is_better);
        best->scale = _mm256_blendv_epi8(best->scale, byte, _mm256_castps_si256(is_better));
        zero = _mm256_fmadd_ps(sum, _mm256_set1_ps(1.0f / GROUP), zero);
    }
}

AVX2 INLINE struct fit fit_eight(const float (*x)[LANES]) {
    __m256 least = _mm256_setzero_ps(), most = least;
    for (int i = 0; i < GROUP; i++)
        least = _mm256_min_ps(least, _mm256_load_ps(x[i])), most = _mm256_max_ps(most, _mm256_load_ps(x[i]));
    const __m256i widest = byte_of(_mm256_mul_ps(_mm256_sub_ps(most, least), _mm256_set1_ps(1.0f / 15)));
    struct fit best = {_mm256_set1_ps(3.4e38f), _mm256_setzero_ps(), _mm256_setzero_si256()};
    for (int smaller = 0; smaller <= SMALLER; smaller++) {
        const __m256i byte = within_byte(_mm256_sub_epi32(widest, _mm256_set1_epi32(smaller)));
        const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1), scale_of(byte));
        const __m256 low = _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), least), inverse);
        const __m256 high = _mm256_fnmadd_ps(most, inverse, _mm256_set1_ps(15));
        try_scale(x, byte, inverse, low, &best);
        try_scale(x, byte, inverse, high, &best);
        try_scale(x, byte, inverse, _mm256_mul_ps(_mm256_add_ps(low, high), _mm256_set1_ps(0.5f)), &best);
    }
    return best;
}

/* Rounds a group with its scale and zero. */
AVX2 INLINE void round_group(const float *from, float inverse, float zero, uint8_t *to) {
    for (int i = 0; i < GROUP; i += 8) {
        const __m256 exact = _mm256_fmadd_ps(_mm256_loadu_ps(from + i), _mm256_set1_ps(inverse), _mm256_set1_ps(zero));
        const __m256i level = _mm256_cvtps_epi32(level_of(exact));
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(level), _mm256_extracti128_si256(level, 1));
        _mm_storel_epi64((__m128i *)(to + i), _mm_packus_epi16(words, words));
    }
}

AVX2 static void round_part(const void *work, int64_t part) {
    const struct rounding *r = work;
    const int64_t last = min((part + 1) * PART, r->num_groups);
    for (int64_t group = part * PART; group < last; group += LANES) {
        const int lanes = (int)min(LANES, last - group);
        float x[GROUP][LANES] __attribute__((aligned(32))) = {{0}}, inverses[LANES], zeros[LANES];
        int32_t scale_bytes[LANES], zero_bytes[LANES];
        for (int lane = 0; lane < lanes; lane++)
            for (int i = 0; i < GROUP; i++) x[i][lane] = r->weight[(group + lane) * GROUP + i];
        const struct fit fit = fit_eight((const float (*)[LANES])x);
        _mm256_storeu_ps(inverses, _mm256_div_ps(_mm256_set1_ps(1), scale_of(fit.scale)));
        _mm256_storeu_ps(zeros, fit.zero);
        _mm256_storeu_si256((__m256i *)scale_bytes, fit.scale);
        _mm256_storeu_si256((__m256i *)zero_bytes, sixteenths(fit.zero));
        for (int lane = 0; lane < lanes; lane++) {
            const int64_t at = group + lane;
            r->scales[at] = (uint8_t)scale_bytes[lane], r->zeros[at] = (uint8_t)zero_bytes[lane];
            round_group(r->weight + at * GROUP, inverses[lane], zeros[lane], r->levels + at * GROUP);
        }
    }
}

/* Rounds a weight [groups, GROUP]. A weight is (level - zero / 16) * scale. */
void outrider_round(const float *weight, int64_t num_groups, uint8_t *levels, uint8_t *scales, uint8_t *zeros) {
    const struct rounding r = {weight, num_groups, levels, scales, zeros};
    share_out(round_part, &r, (num_groups + PART - 1) / PART);
}
