/* Products by weights of 8, 6 and 4 bits on AVX2, whose byte products have 16-bit sums of at most 32,767.

   A 4-bit weight is 0 to 15 and x is -127 to 127, so eight pairs of products (32 inputs) sum to at most 30,480; two
   pairs of a 6-bit weight, 0 to 63, to at most 32,004. For 8-bit weights of -127 to 127, the bytes of x are split into
   halves of 0 to 15, and eight pairs fit again. The result is the sum of the low halves plus 16 times the sum of the
   high halves. So sums are exactly as with VNNI. */

#include "products/epilogue.h"
#include "products/numbers.h"
#include "products/quantized.h"

#include <string.h>

enum {
    BLOCK_INPUTS = 512, /* inputs that stay in the L1 cache across rows */
    BYTE_ROWS = 2,      /* rows with their sums of 16 outputs in registers, for 8-bit weights, */
    LEVEL_ROWS = 4,     /* and for narrower ones */
};

AVX2 INLINE __m256 from_float16(const uint8_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }

AVX2 INLINE __m256i load(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }

/* Broadcasts four inputs to all 8 outputs. */
AVX2 INLINE __m256i four_inputs(const int8_t *x) {
    int32_t bits;
    __builtin_memcpy(&bits, x, 4);
    return _mm256_set1_epi32(bits);
}

/* Computes sum += levels * x, in pairs. The assembly keeps each product next to its sum: the compiler would compute all
   products first and run out of registers. */
AVX2 INLINE __m256i add_products(__m256i sum, __m256i levels, __m256i x) {
    __m256i products;
    __asm__ volatile("vpmaddubsw %3, %2, %0\n\tvpaddw %0, %1, %1" : "=&x"(products), "+x"(sum) : "x"(levels), "x"(x));
    return sum;
}

/* Adds a group's exact sums of 8 outputs, and the term of the base, to `sums`. */
AVX2 INLINE void add_group(float *sums, __m256i sum, __m256 scale, __m256 second, __m256 row_scale, __m256 row_base) {
    __m256 onto = _mm256_loadu_ps(sums);
    onto = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, row_scale), onto);
    _mm256_storeu_ps(sums, _mm256_fmadd_ps(second, row_base, onto));
}

/* Adds a part with 8-bit weights, with groups of `runs` x 32 inputs, to the sums [rows, 32]. */
AVX2 INLINE void add_bytes(const int rows, const int runs, struct part p, float *sums) {
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    for (int64_t group = 0; group < p.num_groups; group++) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        __m256 row_scale[BYTE_ROWS], row_base[BYTE_ROWS];
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++) {
            row_scale[row] = _mm256_set1_ps(p.row_scales[group * p.table_stride + row]);
            row_base[row] = _mm256_set1_ps(p.row_bases[group * p.table_stride + row]);
        }
        for (int half = 0; half < 2; half++) { /* of the pair */
            __m256i sum[BYTE_ROWS][2];
#pragma GCC unroll 2
            for (int run = 0; run < runs; run++) {
                /* Inputs are split into 4-bit halves, so that sums of products fit 16 bits. */
                __m256i low[BYTE_ROWS][2], high[BYTE_ROWS][2];
#pragma GCC unroll 4
                for (int i = 0; i < rows * 2; i++) low[i / 2][i % 2] = high[i / 2][i % 2] = _mm256_setzero_si256();
#pragma GCC unroll 8
                for (int line = 0; line < 8; line++) { /* four inputs of 16 outputs */
                    const uint8_t *w = p.w + (half * runs + run) * HALF_BLOCK + line * 64;
                    const __m256i weights[2] = {load(w), load(w + 32)};
#pragma GCC unroll 2
                    for (int row = 0; row < rows; row++) {
                        const int8_t *x = p.x + row * p.stride + run * 2 * GROUP + line * 4;
                        const __m256i low_x = four_inputs(x), high_x = four_inputs(x + GROUP);
#pragma GCC unroll 2
                        for (int i = 0; i < 2; i++) {
                            low[row][i] = add_products(low[row][i], low_x, weights[i]);
                            high[row][i] = add_products(high[row][i], high_x, weights[i]);
                        }
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < rows * 2; i++) {
                    const __m256i of_run = _mm256_add_epi32(_mm256_madd_epi16(low[i / 2][i % 2], ones),
                                                            _mm256_madd_epi16(high[i / 2][i % 2], sixteens));
                    sum[i / 2][i % 2] = run ? _mm256_add_epi32(sum[i / 2][i % 2], of_run) : of_run;
                }
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                /* The group's exact sums times its scales, plus the bases. */
                const int at = half * 16 + i * 8;
                const __m256 scale = from_float16(p.tables + 2 * at);
                const __m128i weights = _mm_loadu_si128((const __m128i *)(p.tables + 2 * (OUTPUTS + at))); /* sums */
                const __m256 second = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(weights)), scale);
#pragma GCC unroll 2
                for (int row = 0; row < rows; row++)
                    add_group(sums + row * OUTPUTS + at, sum[row][i], scale, second, row_scale[row], row_base[row]);
            }
        }
        p.x += runs * 2 * GROUP;
        p.w += runs * 2 * HALF_BLOCK;
        p.tables += table_bytes(INT8);
    }
}

AVX2 INLINE __m256i from_bytes(const uint8_t *x) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)); }

/* A group's scales and bases of 8 outputs. */
struct tables {
    __m256 scale, base;
};

AVX2 INLINE struct tables read_tables(const uint8_t *from, const int at, const int kind) {
    if (kind == INT4) {
        const __m256i scale = _mm256_slli_epi32(from_bytes(from + at), 20);
        const __m256i sixteenth = _mm256_add_epi32(scale, _mm256_set1_epi32((int)((256u + LEAST_SCALE - 4) << 23)));
        const __m256 zero = _mm256_cvtepi32_ps(from_bytes(from + OUTPUTS + at));
        return (struct tables){_mm256_castsi256_ps(_mm256_add_epi32(scale, _mm256_set1_epi32(LEAST_SCALE << 23))),
                               _mm256_mul_ps(_mm256_castsi256_ps(sixteenth), zero)};
    }
    const __m256 scale = from_float16(from + 2 * at);
    if (kind == INT6) return (struct tables){scale, _mm256_mul_ps(scale, _mm256_set1_ps(-32.0f))};
    return (struct tables){scale, from_float16(from + 2 * (OUTPUTS + at))};
}

/* Adds a group's exact sums of 8 + 8 outputs, one half of a line, in 32 bits. */
AVX2 INLINE void add_levels(const int rows, const uint8_t *w, const int8_t *x, int64_t stride, const int half,
                            const int kind, __m256i (*sum)[2]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(48);
    __m256i narrow[LEVEL_ROWS][2];
#pragma GCC unroll 8
    for (int line = 0; line < 8; line++) { /* four inputs of 16 outputs */
        /* A byte holds a weight of the first 16 outputs and one of the other 16. */
        const __m256i both = load(w + line * 64 + half * 32);
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        if (kind == INT6) {
            const __m256i quarters = load(w + HALF_BLOCK + line / 2 * 64 + half * 32);
            const __m256i of_first = line % 2 ? _mm256_slli_epi16(quarters, 2) : quarters;
            const __m256i of_second = line % 2 ? _mm256_slli_epi16(quarters, 4) : _mm256_srli_epi16(quarters, 2);
            first = _mm256_or_si256(first, _mm256_and_si256(of_first, high));
            second = _mm256_or_si256(second, _mm256_and_si256(of_second, high));
        }
        const int run = kind == INT6 ? 2 : 8; /* lines whose sums fit 16 bits */
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const __m256i inputs = four_inputs(x + row * stride + line * 4);
            if (line % run == 0) narrow[row][0] = narrow[row][1] = _mm256_setzero_si256();
            narrow[row][0] = add_products(narrow[row][0], first, inputs);
            narrow[row][1] = add_products(narrow[row][1], second, inputs);
            if (line % run != run - 1) continue;
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m256i wide = _mm256_madd_epi16(narrow[row][i], ones);
                sum[row][i] = line < run ? wide : _mm256_add_epi32(sum[row][i], wide);
            }
        }
    }
}

/* Adds a part with weights of 4 or 6 bits. */
AVX2 INLINE void add_part(const int rows, const int kind, struct part p, float *sums) {
    for (int64_t group = 0; group < p.num_groups; group++) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        __m256 row_scale[LEVEL_ROWS], row_base[LEVEL_ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            row_scale[row] = _mm256_set1_ps(p.row_scales[group * p.table_stride + row]);
            row_base[row] = _mm256_set1_ps(p.row_bases[group * p.table_stride + row]);
        }
        for (int half = 0; half < 2; half++) { /* of a line: 8 of the first 16 outputs, and the same 8 of the others */
            __m256i sum[LEVEL_ROWS][2];
            add_levels(rows, p.w, p.x, p.stride, half, kind, sum);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                /* The group's exact sums times its scales, plus the bases. */
                const int at = i * 16 + half * 8;
                const struct tables t = read_tables(p.tables, at, kind);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++)
                    add_group(sums + row * OUTPUTS + at, sum[row][i], t.scale, t.base, row_scale[row], row_base[row]);
            }
        }
        p.x += GROUP;
        p.w += GROUP * OUTPUTS * bits_of(kind) / 8;
        p.tables += table_bytes(kind);
    }
}

/* Each number of rows has its own code, so that the sums stay in registers. */
AVX2 static void add_few(int64_t rows, int kind, int group, struct part part, float *sums) {
#define ROWS(n, kind) case n: add_part(n, kind, part, sums); break;
#define UP_TO_FOUR(kind) switch (rows) { ROWS(1, kind) ROWS(2, kind) ROWS(3, kind) ROWS(4, kind) }
    if (kind == INT8 && group == GROUP) {
        if (rows == 1) add_bytes(1, 1, part, sums);
        else add_bytes(2, 1, part, sums);
    } else if (kind == INT8) {
        if (rows == 1) add_bytes(1, 2, part, sums);
        else add_bytes(2, 2, part, sums);
    } else if (kind == INT6) UP_TO_FOUR(INT6)
    else if (kind == INT4) UP_TO_FOUR(INT4)
    else UP_TO_FOUR(INT4_BASES)
#undef UP_TO_FOUR
#undef ROWS
}

AVX2 void finish_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, const float *sums) {
    const float *bias = p->bias ? p->bias + pair * OUTPUTS : NULL;
    for (int64_t i = 0; i < rows; i++, sums += OUTPUTS) {
        void *out = out_of(p, row + i, pair);
        float results[OUTPUTS];
        finish_row(bias, p->gate, sums, p->is_bf16 ? results : out);
        if (p->is_bf16)
            for (int at = 0; at < (p->gate ? OUTPUTS / 2 : OUTPUTS); at += 8)
                _mm_storeu_si128((__m128i *)((bf16 *)out + at), to_bf16(_mm256_loadu_ps(results + at)));
    }
}

/* A block of a pair stays in the cache across the rows. A few rows read the pair whole, as one stream. */
void multiply_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    float sums[BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t at_once = p->kind == INT8 ? BYTE_ROWS : LEVEL_ROWS, lines = group_bytes(p) / 64;
    const int64_t block = rows <= at_once ? p->num_groups : BLOCK_INPUTS / p->group, x_bytes = group_bytes_of_x(p);
    for (int64_t pair = first; pair < last; pair++) {
        memset(sums, 0, (size_t)(rows * OUTPUTS) * sizeof *sums);
        for (int64_t group = 0; group < p->num_groups; group += block) {
            const int64_t at = pair * p->num_groups + group;
            struct part part = {.stride = p->stride, .table_stride = p->table_stride, .w = p->weight + at * lines * 64,
                                .tables = p->tables + at * table_bytes(p->kind)};
            part.num_groups = min(block, p->num_groups - group);
            part.ahead = rows <= at_once ? PREFETCH : part.num_groups * lines * 64;
            for (int64_t i = 0; i < rows; i += at_once) {
                const int64_t height = min(at_once, rows - i);
                set_rows(&part, p, row + i, group, x_bytes);
                part.from = (int)(lines * i / rows), part.to = (int)(lines * (i + height) / rows);
                add_few(height, p->kind, p->group, part, sums + i * OUTPUTS);
            }
        }
        finish_narrow(p, row, rows, pair, sums);
    }
}
