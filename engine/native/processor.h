/* What a processor can do, and how our kernels say what they need of it. */

#pragma once

#include <immintrin.h>
#include <stdint.h>

/* Kernels of float32 rows need AVX2, those of bfloat16 AVX-512 with bfloat16 and VNNI (AMD's from Zen 4, Intel's from
   Sapphire Rapids and some before), and AMX makes them faster. The compiler itself makes nothing of AMX. */
#define VECTORS "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni"
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512F __attribute__((target("avx512f")))
#define AVX __attribute__((target(VECTORS)))
#define AMX __attribute__((target(VECTORS ",amx-tile,amx-bf16,amx-int8")))
#define INLINE static inline __attribute__((always_inline))
#define INTERNAL __attribute__((visibility("hidden"))) /* for other files of the library, not for its users */

typedef uint16_t bf16;

enum instructions { NONE, WITH_AVX2, WITH_AVX512, WITH_AMX };

/* Whether kernels may use AVX-512 for products of float32, whatever else it can, for all that VECTORS says, and AMX;
   set by `outrider_start`. */
extern int outrider_has_wide_floats, outrider_has_vectors, outrider_has_tiles;

/* Whether two products of float32 take the place of one of pairs of bfloat16, the odd numbers' first: with denormals as
   zeros they have its bits, and on Intel's processors half its time. Set by `outrider_start`; tests set it too. */
extern int outrider_splits_pairs;

/* The variant of a function that this processor runs; lanes.h says which there are. */
#define FITTING(name) (outrider_has_vectors ? name##_wide : name##_narrow)

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Have the cache lines [from, to) of what lies at `at` fetched for later. */
INLINE void fetch_lines(const void *at, int from, int to) {
    for (int line = from; line < to; line++) _mm_prefetch((const char *)at + line * 64, _MM_HINT_T1);
}

/* Two pairs of bfloat16, or four of int8, for all 16 lanes. */
AVX INLINE __m512i broadcast(const void *four_bytes) {
    int32_t bits;
    __builtin_memcpy(&bits, four_bytes, 4);
    return _mm512_set1_epi32(bits);
}

/* The numbers of pairs of bfloat16 as floats: of each pair the second, and the first. */
AVX INLINE __m512 odd_numbers(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

AVX INLINE __m512 even_numbers(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
