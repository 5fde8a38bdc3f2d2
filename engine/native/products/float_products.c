/* Products of float32 rows by a bfloat16 matrix (for a float32 model with a bfloat16 checkpoint): out = x W^T, or
   silu(gate) * up. They read half the bytes of float32 weights; products and sums are float32. On AVX-512 or AVX2.

   W is packed as in bfloat16_products.c, and each output is one sum over the inputs in order. So a row's result depends
   neither on other rows, nor on the width of registers. */

#include "products/epilogue.h"
#include "products/products.h"
#include "team.h"

enum {
    TILE = 512,         /* numbers of a tile: 16 outputs x 32 inputs */
    LINES = 32,         /* cache lines of two tiles */
    OUTPUTS = 32,       /* outputs of a pair */
    WIDE_ROWS = 12,     /* rows whose sums of a pair fill the registers of AVX-512, */
    NARROW_ROWS = 6,    /* or whose sums of half a pair fill the registers of AVX2 */
    BLOCK_ROWS = 132,   /* rows of x that stay in the cache during a pair: a multiple of both */
    BLOCK_INPUTS = 512, /* inputs of a pair that stay in the L1 cache across rows, */
    SMALL_INPUTS = 64,  /* or so few that W is still read in order, if rows wait for memory: */
    SMALL_TURNS = 3,    /* on AVX2, up to so many times the rows that registers hold */
    PREFETCH = 2048,    /* numbers of the prefetch distance: a page, which hardware prefetchers do not cross */
};

struct float_product {
    const float *x;      /* [rows, num_inputs] */
    const bf16 *weight;  /* packed */
    const float *bias;   /* [num_outputs] or NULL */
    float *out;          /* [rows, num_outputs], or half as many if gated */
    int64_t num_rows, num_inputs, num_outputs;
    int gate;
};

/* The input of a few rows from one pair: `steps` x 32 inputs. Each step prefetches the lines [from, to) of W, `ahead`
   numbers ahead. */
struct part {
    const float *x;
    int64_t stride; /* numbers from row to row */
    const bf16 *w;
    int64_t steps;
    int64_t turn; /* steps of one half of the outputs before the other half, if registers hold the sums of one half */
    int64_t ahead;
    int from, to;
};

/* Computes the sums [rows, 32] of a part, and adds them to `sums` unless `is_first`. */
AVX512F INLINE void add_wide(const int rows, struct part p, float *sums, int is_first) {
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    __m512 sum[WIDE_ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++)
            sum[row][half] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * OUTPUTS + half * 16);
    for (int64_t k = 0; k < p.steps; k++, p.x += 32, p.w += 2 * TILE) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        for (int line = 0; line < 16; line++) { /* two inputs of 32 outputs */
            /* A register holds pairs of inputs; a bfloat16 becomes a float by a shift or a mask. */
            __m512i first = _mm512_loadu_si512(p.w + line * 32), second = _mm512_loadu_si512(p.w + TILE + line * 32);
            __m512 even[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(first, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(second, 16))};
            __m512 odd[2] = {_mm512_castsi512_ps(_mm512_and_si512(first, high)),
                             _mm512_castsi512_ps(_mm512_and_si512(second, high))};
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                const float *inputs = p.x + row * p.stride + line * 2;
                __m512 x0 = _mm512_set1_ps(inputs[0]), x1 = _mm512_set1_ps(inputs[1]);
                sum[row][0] = _mm512_fmadd_ps(even[0], x0, sum[row][0]);
                sum[row][1] = _mm512_fmadd_ps(even[1], x0, sum[row][1]);
                sum[row][0] = _mm512_fmadd_ps(odd[0], x1, sum[row][0]);
                sum[row][1] = _mm512_fmadd_ps(odd[1], x1, sum[row][1]);
            }
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + row * OUTPUTS + half * 16, sum[row][half]);
}

/* Adds one input of 16 outputs to the sums of some rows. */
AVX2 INLINE void add_input(const int rows, __m256 first, __m256 second, const float *x, int64_t stride,
                           __m256 sum[NARROW_ROWS][2]) {
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        const __m256 input = _mm256_set1_ps(x[row * stride]);
        sum[row][0] = _mm256_fmadd_ps(first, input, sum[row][0]);
        sum[row][1] = _mm256_fmadd_ps(second, input, sum[row][1]);
    }
}

/* Does the same on AVX2, one half at a time. A number of x is loaded once for 16 outputs, since a cycle has two loads
   and two products. */
AVX2 INLINE void add_narrow(const int rows, struct part p, float *sums, int is_first) {
    const __m256i high = _mm256_set1_epi32(0xffff0000);
    for (int64_t begin = 0; begin < p.steps; begin += p.turn) {
        const int64_t end = min(begin + p.turn, p.steps);
        for (int half = 0; half < 2; half++) {
            /* The sums of one half fit the registers. */
            float *at = sums + half * 16;
            __m256 sum[NARROW_ROWS][2];
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < 2; i++) {
                    const float *before = at + row * OUTPUTS + i * 8;
                    sum[row][i] = is_first && !begin ? _mm256_setzero_ps() : _mm256_loadu_ps(before);
                }
            for (int64_t k = begin; k < end; k++) {
                const float *x = p.x + k * 32;
                const bf16 *w = p.w + (2 * k + half) * TILE;
                fetch_lines(w + p.ahead, (p.from + half) / 2, (p.to + half) / 2);
#pragma GCC unroll 1
                for (int line = 0; line < 16; line++) { /* two inputs of 16 outputs */
                    const __m256i first = _mm256_loadu_si256((const __m256i *)(w + line * 32));
                    const __m256i second = _mm256_loadu_si256((const __m256i *)(w + line * 32 + 16));
                    add_input(rows, _mm256_castsi256_ps(_mm256_slli_epi32(first, 16)),
                              _mm256_castsi256_ps(_mm256_slli_epi32(second, 16)), x + line * 2, p.stride, sum);
                    add_input(rows, _mm256_castsi256_ps(_mm256_and_si256(first, high)),
                              _mm256_castsi256_ps(_mm256_and_si256(second, high)), x + line * 2 + 1, p.stride, sum);
                }
            }
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < 2; i++) _mm256_storeu_ps(at + row * OUTPUTS + i * 8, sum[row][i]);
        }
    }
}

/* Each number of rows has its own code, so that the sums stay in registers. */
AVX512F static void add_up_to_12(int64_t rows, struct part part, float *sums, int is_first) {
#define ROWS(n) case n: add_wide(n, part, sums, is_first); break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
    }
#undef ROWS
}

AVX2 static void add_up_to_6(int64_t rows, struct part part, float *sums, int is_first) {
#define ROWS(n) case n: add_narrow(n, part, sums, is_first); break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
}

/* Applies bias and epilogue to the sums [rows, 32] of one pair. */
AVX2 static void finish(const struct float_product *p, int64_t row, int64_t rows, int64_t pair, const float *sums) {
    const int64_t width = p->gate ? OUTPUTS / 2 : OUTPUTS, num_pairs = p->num_outputs / OUTPUTS;
    const float *bias = p->bias ? p->bias + pair * OUTPUTS : NULL;
    for (int64_t i = 0; i < rows; i++)
        finish_row(bias, p->gate, sums + i * OUTPUTS, p->out + ((row + i) * num_pairs + pair) * width);
}

/* Multiplies up to BLOCK_ROWS rows by the pairs [first, last). A block of a pair stays in the cache across the rows. */
static void multiply_block(const struct float_product *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    float sums[BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t most = outrider_has_wide_floats ? WIDE_ROWS : NARROW_ROWS, num_turns = (rows + most - 1) / most;
    const int64_t at_once = (rows + num_turns - 1) / num_turns;
    /* Few rows read W once: prefetch ahead. Many rows read a block of W repeatedly: keep it in the cache. */
    const int is_stream = num_turns <= (outrider_has_wide_floats ? 1 : SMALL_TURNS);
    const int64_t block = num_turns == 1 ? p->num_inputs : is_stream ? SMALL_INPUTS : BLOCK_INPUTS;
    for (int64_t pair = first; pair < last; pair++) {
        for (int64_t k = 0; k < p->num_inputs; k += block) {
            struct part part = {.stride = p->num_inputs, .steps = min(block, p->num_inputs - k) / 32};
            part.w = p->weight + (pair * p->num_inputs + k) * OUTPUTS;
            part.ahead = is_stream ? PREFETCH : part.steps * 2 * TILE;
            part.turn = is_stream ? 1 : part.steps;
            for (int64_t i = 0; i < rows; i += at_once) {
                const int64_t height = min(at_once, rows - i);
                part.x = p->x + (row + i) * p->num_inputs + k;
                part.from = LINES * i / rows, part.to = LINES * (i + height) / rows;
                if (outrider_has_wide_floats) add_up_to_12(height, part, sums + i * OUTPUTS, k == 0);
                else add_up_to_6(height, part, sums + i * OUTPUTS, k == 0);
            }
        }
        finish(p, row, rows, pair, sums);
    }
}

/* A product, divided into parts of some rows and pairs. */
struct grid {
    struct float_product product;
    int64_t pairs, row_blocks;
};

static void multiply_part(const void *work, int64_t part) {
    const struct grid *grid = work;
    const struct float_product *p = &grid->product;
    const int64_t row = part % grid->row_blocks * BLOCK_ROWS, pair = part / grid->row_blocks * grid->pairs;
    multiply_block(p, row, min(BLOCK_ROWS, p->num_rows - row), pair, min(pair + grid->pairs, p->num_outputs / OUTPUTS));
}

void float_product_part(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                        int64_t num_inputs, int64_t num_outputs, int64_t first, int64_t last) {
    const struct float_product p = {x, weight, bias, out, num_rows, num_inputs, num_outputs, 0};
    multiply_block(&p, 0, num_rows, first, last);
}

static void multiply(struct float_product p) {
    const int64_t num_pairs = p.num_outputs / OUTPUTS;
    const int64_t pairs = max(1, min((256 << 10) / (p.num_inputs * 2 * OUTPUTS), num_pairs / 8));
    const struct grid grid = {p, pairs, (p.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS};
    share_out(multiply_part, &grid, grid.row_blocks * ((num_pairs + pairs - 1) / pairs));
}

/* Computes out [rows, N] = x [rows, K] W^T (+ bias); K and N are multiples of 32. */
void outrider_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs) {
    multiply((struct float_product){x, weight, bias, out, num_rows, num_inputs, num_outputs, 0});
}

/* Computes out [rows, N / 2] = function(gate) * up. Each pair of W has 16 outputs of the gate and the same 16 of up. */
void outrider_gated_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                                  int64_t num_inputs, int64_t num_outputs, int64_t gate) {
    multiply((struct float_product){x, weight, bias, out, num_rows, num_inputs, num_outputs, (int)gate});
}
