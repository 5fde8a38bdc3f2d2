/* Products by int8 and int4 weights, x W^T or silu(gate) * up, on AMX or AVX-512's VNNI: bfloat16 rows become int8 with
   scales of their own (arXiv:2208.07339), sums of whole numbers are exact, and a few float32 operations for each group
   of inputs turn them into numbers.

   W lies as a stream of AMX tiles of 1 KB, for each pair of 16 outputs and another 16, for each 64 inputs, one and the
   other; a row of a tile holds four inputs of 16 outputs. 4 bits: a row of the first tile is in the low halves of
   bytes, the same row of the second in the high ones. A row's result does not depend on the rows beside it. */

#include "processor.h"
#include "silu.h"

enum {
    TILE = 1024,         /* bytes: 16 outputs x 64 inputs */
    LINES = 32,          /* of the cache, of two tiles */
    OUTPUTS = 32,        /* of a pair */
    BLOCK_INPUTS = 1024, /* whose tiles of a pair stay in the first cache while rows go by */
    BLOCK_ROWS = 128,
    VECTOR_ROWS = 8,     /* half a tile: as many as have their sums in registers */
    PAD = 64,            /* bytes behind a row of x, so that rows do not share the cache's few sets */
    PREFETCH = 4096,     /* bytes ahead of the reader */
};

struct quantized {
    int8_t *x;          /* [rows, num_inputs + PAD], times row_scales */
    float *row_scales;  /* [rows] */
    int32_t *row_sums;  /* [rows, parts] of x */
    const uint8_t *weight;
    const float *bias;  /* [num_outputs] or NULL */
    bf16 *out;          /* [rows, num_outputs], or half as many if gated */
    int64_t num_rows, num_inputs, num_outputs;
    int bits;           /* of a weight: 8, -127 to 127, or 4, 0 to 15 */
    int64_t group;      /* inputs that share a row of scales and bases: 64 to BLOCK_INPUTS, or all */
    int64_t part;       /* inputs that are summed as whole numbers: a group's, at most BLOCK_INPUTS */
    int64_t num_parts;
    const float *scales, *bases; /* [groups, num_outputs]; a weight is number * scale + base; no bases: 0 */
    int is_gated;
};

AVX static __m512 widened(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

/* One row of x to int8: its largest magnitude is 127 of its scale. */
AVX static void quantize(const struct quantized *p, const bf16 *x, int64_t row) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->num_inputs; k += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(widened(x + k)));
    float scale = _mm512_reduce_max_ps(largest) / 127.0f;
    if (scale < 1e-30f) scale = 1e-30f;
    const __m512 inverse = _mm512_set1_ps(1.0f / scale);
    int8_t *to = p->x + row * (p->num_inputs + PAD);
    for (int64_t part = 0; part < p->num_parts; part++) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = part * p->part; k < min((part + 1) * p->part, p->num_inputs); k += 16) {
            __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(widened(x + k), inverse));
            _mm_storeu_si128((__m128i *)(to + k), _mm512_cvtsepi32_epi8(numbers));
            sum = _mm512_add_epi32(sum, numbers);
        }
        p->row_sums[row * p->num_parts + part] = _mm512_reduce_add_epi32(sum);
    }
    p->row_scales[row] = scale;
}

/* The inputs [k, k + 64 steps) of a pair as tiles: where they lie, or made in `tiles`. */
AVX static const uint8_t *tiles_of(const struct quantized *p, int64_t pair, int64_t k, int64_t steps, uint8_t *tiles) {
    const uint8_t *from = p->weight + (pair * p->num_inputs + k) * OUTPUTS * p->bits / 8;
    if (p->bits == 8) return from;
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t step = 0; step < steps; step++, tiles += 2 * TILE, from += TILE)
        for (int64_t line = 0; line < TILE; line += 64) {
            _mm_prefetch((const char *)from + PREFETCH + line, _MM_HINT_T1);
            __m512i both = _mm512_loadu_si512(from + line);
            _mm512_store_si512(tiles + line, _mm512_and_si512(both, low));
            _mm512_store_si512(tiles + TILE + line, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
    return tiles - steps * 2 * TILE;
}

/* What up to 16 rows read of one pair: `steps` x 64 inputs of rows `stride` bytes apart. Per step the lines [from, to)
   of W are fetched for later, `ahead` bytes further on. */
struct part {
    const int8_t *x;
    int64_t stride;
    const uint8_t *w;
    int64_t steps;
    int64_t ahead;
    int from, to;
    const int32_t *row_sums; /* of x, `num_parts` apart */
    int64_t num_parts;
    int bits;
};

/* Sums of a part, as whole numbers [2 tiles of 16 x 16]. No more rows at once, for the reason in products.c. */
AMX INLINE void add_tiles(struct part p, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < p.steps; step++, p.x += 64, p.w += 2 * TILE) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        _tile_loadd(4, p.x, p.stride);
        _tile_loadd(6, p.w, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, p.w + TILE, 64);
        _tile_dpbssd(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

/* `add_tiles` without AMX, for at most half a tile of rows. The instruction takes weights as they are above zero: those
   of 8 bits are 128 more meanwhile, and sums begin at as much less. */
AVX INLINE void add_vectors(const int rows, struct part p, int32_t *sums) {
    const __m512i raise = p.bits == 8 ? _mm512_set1_epi8(-128) : _mm512_setzero_si512();
    __m512i sum[VECTOR_ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        sum[row][0] = sum[row][1] = _mm512_set1_epi32(p.bits == 8 ? -128 * p.row_sums[row * p.num_parts] : 0);
    for (int64_t step = 0; step < p.steps; step++, p.x += 64, p.w += 2 * TILE) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        for (int line = 0; line < 16; line++) { /* four inputs of 32 outputs */
            const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(p.w + line * 64), raise);
            const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(p.w + TILE + line * 64), raise);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const __m512i inputs = broadcast(p.x + row * p.stride + line * 4);
                sum[row][0] = _mm512_dpbusd_epi32(sum[row][0], first, inputs);
                sum[row][1] = _mm512_dpbusd_epi32(sum[row][1], second, inputs);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) _mm512_storeu_si512(sums + row * 16 + half * 256, sum[row][half]);
}

/* The same for up to 16 rows, half a tile at a time. */
AVX static void add_halves(int64_t rows, struct part part, int32_t *sums) {
#define ROWS(n) case n: add_vectors(n, part, sums); break;
    for (; rows > 0; rows -= VECTOR_ROWS, sums += VECTOR_ROWS * 16) {
        switch (min(VECTOR_ROWS, rows)) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
        part.x += VECTOR_ROWS * part.stride, part.row_sums += VECTOR_ROWS * part.num_parts, part.from = part.to;
    }
#undef ROWS
}

/* A part's whole numbers, scaled, onto the sums [rows, 32] of up to 16 rows from `row` on. */
AVX static void add_scaled(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, int64_t k,
                      const int32_t *from, float *sums) {
    const int64_t at = k / p->group * p->num_outputs + pair * OUTPUTS;
    for (int half = 0; half < 2; half++) {
        const __m512 scale = _mm512_loadu_ps(p->scales + at + half * 16);
        const __m512 base = p->bases ? _mm512_loadu_ps(p->bases + at + half * 16) : _mm512_setzero_ps();
        for (int64_t i = 0; i < rows; i++) {
            float *onto = sums + i * OUTPUTS + half * 16;
            __m512 sum = k ? _mm512_load_ps(onto) : _mm512_setzero_ps();
            const int32_t *numbers = from + half * 256 + i * 16;
            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(numbers)), scale, sum);
            const int32_t of_row = p->row_sums[(row + i) * p->num_parts + k / p->part];
            sum = _mm512_fmadd_ps(_mm512_set1_ps((float)of_row), base, sum);
            _mm512_store_ps(onto, sum);
        }
    }
}

/* The sums [rows, 32] of a pair, by the rows' own scales, to `out`. */
AVX static void finish(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, const float *sums) {
    for (int64_t i = 0; i < rows; i++) {
        const __m512 scale = _mm512_set1_ps(p->row_scales[row + i]);
        __m512 result[2];
        for (int half = 0; half < 2; half++) {
            const float *bias = p->bias + pair * OUTPUTS + half * 16;
            const __m512 more = p->bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
            result[half] = _mm512_fmadd_ps(_mm512_load_ps(sums + i * OUTPUTS + half * 16), scale, more);
        }
        if (p->is_gated) {
            const __m512 gated = _mm512_mul_ps(rough_silu(result[0]), result[1]);
            bf16 *to = p->out + (row + i) * (p->num_outputs / 2) + pair * OUTPUTS / 2;
            _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(gated));
        } else {
            bf16 *to = p->out + (row + i) * p->num_outputs + pair * OUTPUTS;
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(result[1], result[0]));
        }
    }
}

/* Up to BLOCK_ROWS rows and the pairs [first, last): a part of a pair stays in the cache while the rows go by. */
AMX static void multiply(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    uint8_t tiles[BLOCK_INPUTS * OUTPUTS] __attribute__((aligned(64)));
    float sums[BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    int32_t numbers[16 * OUTPUTS] __attribute__((aligned(64)));
    if (outrider_has_tiles) configure_tiles(min(rows, 16), 0);
    struct part part = {.stride = p->num_inputs + PAD, .num_parts = p->num_parts, .bits = p->bits};
    for (int64_t pair = first; pair < last; pair++) {
        for (int64_t k = 0; k < p->num_inputs; k += BLOCK_INPUTS) {
            const int64_t inputs = min(BLOCK_INPUTS, p->num_inputs - k);
            const uint8_t *w = tiles_of(p, pair, k, inputs / 64, tiles);
            part.ahead = rows > 16 ? inputs * OUTPUTS : PREFETCH;
            for (int64_t i = 0; i < rows; i += 16) {
                const int64_t height = min(16, rows - i);
                if (p->bits == 8) /* `tiles_of` fetches what has 4 */
                    part.from = LINES * i / rows, part.to = LINES * (i + height) / rows;
                const int is_rest = outrider_has_tiles && rows > 16 && height < 16;
                if (is_rest) configure_tiles(height, 0);
                for (int64_t j = 0; j < inputs; j += p->part) {
                    part.x = p->x + (row + i) * part.stride + k + j;
                    part.row_sums = p->row_sums + (row + i) * p->num_parts + (k + j) / p->part;
                    part.w = w + j * OUTPUTS, part.steps = min(p->part, inputs - j) / 64;
                    if (outrider_has_tiles) add_tiles(part, numbers);
                    else add_halves(height, part, numbers);
                    add_scaled(p, row + i, height, pair, k + j, numbers, sums + i * OUTPUTS);
                }
                if (is_rest) configure_tiles(16, 0);
            }
        }
        finish(p, row, rows, pair, sums);
    }
}

/* out [rows, N] = x [rows, K] W^T (+ bias), where K is a multiple of 64 and of `group`, and N one of 32;
   `group` is all of K or divides BLOCK_INPUTS. If gated, out [rows, N / 2] = silu(gate) * up, where each pair of W has
   16 outputs of the gate and the same 16 of up.
   `scratch`: rows * (K + 64) bytes and, behind them, rows * (1 + parts) * 4. */
AMX void outrider_quantized_product(const bf16 *x, const uint8_t *weight, const float *bias, bf16 *out,
                                    int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int bits,
                                    const float *scales, const float *bases, int64_t group, int is_gated,
                                    int8_t *scratch) {
    float *row_scales = (float *)(scratch + num_rows * (num_inputs + PAD));
    int32_t *row_sums = (int32_t *)(row_scales + num_rows);
    const int64_t part = min(group, BLOCK_INPUTS), num_parts = (num_inputs + part - 1) / part;
    const struct quantized p = {scratch, row_scales, row_sums, weight, bias, out, num_rows, num_inputs, num_outputs,
                                bits, group, part, num_parts, scales, bases, is_gated};
    const int64_t num_pairs = num_outputs / OUTPUTS;
    const int64_t pairs = max(1, min((256 << 10) / (num_inputs * OUTPUTS), num_pairs / 8));
#pragma omp parallel
    {
#pragma omp for
        for (int64_t row = 0; row < num_rows; row++) quantize(&p, x + row * num_inputs, row);
#pragma omp for collapse(2) schedule(dynamic, 1) nowait
        for (int64_t pair = 0; pair < num_pairs; pair += pairs)
            for (int64_t row = 0; row < num_rows; row += BLOCK_ROWS)
                multiply(&p, row, min(BLOCK_ROWS, num_rows - row), pair, min(pair + pairs, num_pairs));
        if (outrider_has_tiles) _tile_release();
    }
}
