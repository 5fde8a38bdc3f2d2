/* The instructions of the processor, and the attributes of kernels that require them. */

#pragma once

#include <immintrin.h>
#include <stdint.h>

/* Kernels of float32 rows need AVX2. Kernels of bfloat16 rows need AVX-512 with bfloat16 and VNNI (AMD from Zen 4,
   Intel from Sapphire Rapids and some earlier ones); AMX makes them faster. The compiler generates no AMX code
   itself. */
#define VECTORS "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni"
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512F __attribute__((target("avx512f")))
#define AVX __attribute__((target(VECTORS)))
#define AMX __attribute__((target(VECTORS ",amx-tile,amx-bf16,amx-int8")))
#define INLINE static inline __attribute__((always_inline))
#define INTERNAL __attribute__((visibility("hidden"))) /* for other files of the library, not for its users */

typedef uint16_t bf16;

enum instructions { NONE, WITH_AVX2, WITH_AVX512, WITH_AMX };

/* True if kernels may use AVX-512 for float32 products (AVX-512F is enough), all of VECTORS, and AMX. `outrider_start`
   sets them. */
extern int outrider_has_wide_floats, outrider_has_vectors, outrider_has_tiles;

/* True if two float32 products replace one product of bfloat16 pairs, the odd numbers first. With denormals flushed to
   zero the bits are the same, and on Intel's processors it takes half the time. `outrider_start` and tests set it. */
extern int outrider_splits_pairs;

/* True on AMD's processors. There W arrives faster in one stream per thread than in several, and past the L2 cache.
   `outrider_start` and tests set it. */
extern int outrider_is_amd;

/* Selects the variant of a function for this processor; see lanes.h. */
#define FITTING(name) (outrider_has_vectors ? name##_wide : name##_narrow)

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Prefetches the cache lines [from, to) after `at`. */
INLINE void fetch_lines(const void *at, int from, int to) {
    const char *lines = at;
    if (outrider_is_amd)
        for (int line = from; line < to; line++) _mm_prefetch(lines + line * 64, _MM_HINT_NTA);
    else
        for (int line = from; line < to; line++) _mm_prefetch(lines + line * 64, _MM_HINT_T1);
}

/* Broadcasts two bfloat16, or four int8, to all 16 lanes. */
AVX INLINE __m512i broadcast(const void *four_bytes) {
    int32_t bits;
    __builtin_memcpy(&bits, four_bytes, 4);
    return _mm512_set1_epi32(bits);
}

/* Converts the second number of each bfloat16 pair to a float; `even_numbers` converts the first. */
AVX INLINE __m512 odd_numbers(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

AVX INLINE __m512 even_numbers(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
