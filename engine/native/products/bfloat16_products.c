/* Matrix products out = x W^T of bfloat16 rows, on AMX or AVX-512. They read W once, at memory speed. float_products.c
   has the products of float32 rows.

   W [N, K] is stored as a stream of AMX tiles of 1 KB, in the kernel's reading order. Outputs form *pairs* of 16 + 16.
   For each pair and each 32 inputs, the stream has the tile of the first 16 outputs, then the tile of the other 16.

       pair 0: [k 0..31 | out 0..15][k 0..31 | out 16..31][k 32..63 | out 0..15] ...      pair 1: ...

   A row of a tile is also a vector: two inputs of 16 outputs. Each output is one float32 sum over k = 0, 1, ... K - 1,
   in that order, for any number of rows. So a row's result does not depend on other rows. */

#include "amx.h"
#include "lanes/lanes.h"
#include "processor.h"
#include "products/products.h"
#include "products/gate.h"
#include "team.h"

enum {
    TILE = 512,         /* numbers of a tile: 16 outputs x 32 inputs */
    LINES = 32,         /* cache lines of two tiles */
    OUTPUTS = 32,       /* outputs of a pair */
    FEW_ROWS = 16,      /* up to so many rows, one tile, W is read as one stream */
    FEW_PAIRS = 4,      /* pairs read in parallel without AMX, at most */
    VECTOR_SUMS = 14,   /* sums of a row and a pair in registers, next to two vectors of W and one of x */
    VECTOR_ROWS = 8,    /* rows with their sums in registers without AMX, half a tile; the limit of one stream, */
    SPLIT_ROWS = 7,     /* or the limit if pairs are split: more rows are worth converting to floats */
    BLOCK_ROWS = 128,   /* rows of x that stay in the cache across pairs */
    BLOCK_INPUTS = 384, /* inputs of a pair, and of a tile of rows, that share the L1 cache */
    BLOCK_PAIRS = 8,
    PREFETCH = 1024,    /* numbers of the prefetch distance: two tiles */
};

struct product {
    const bf16 *x;       /* [rows, num_inputs] */
    const bf16 *weight;  /* packed */
    const float *bias;   /* [num_outputs of the packed weight] or NULL */
    bf16 *out;           /* [rows, num_outputs], or half as many if gated */
    int64_t num_rows, num_inputs, num_outputs;
    int gate;
};

/* The input of up to 16 rows from one pair: `steps` x 32 inputs. A tile of x has rows `stride` numbers apart; the next
   32 inputs follow `step` numbers later. Each step prefetches the lines [from, to) of W, `ahead` numbers ahead. */
struct part {
    const bf16 *x;
    int64_t stride, step;
    const bf16 *w;
    int64_t steps;
    int64_t ahead;
    int from, to;
};

/* Computes the sums [2 tiles of 16 x 16] of a part, and adds them to `sums` unless `is_first`.

   Two tiles of rows at once would read W half as often. But with all eight tile registers in use, loads and products
   wait for each other while the core's other hyperthread is busy (in a cloud, with another machine): twice the time. */
AMX INLINE void add_tiles(struct part p, float *sums, int is_first) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
    } else {
        tile_load(0, sums, 64);
        tile_load(1, sums + 256, 64);
    }
    for (int64_t k = 0; k < p.steps; k++, p.x += p.step, p.w += 2 * TILE) {
        fetch_lines(p.w + p.ahead, p.from, p.to);
        tile_load(4, p.x, p.stride * 2);
        tile_load(6, p.w, 64);
        _tile_dpbf16ps(0, 4, 6);
        tile_load(7, p.w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

/* `add_tiles` without AMX, for at most half a tile of rows and several pairs in parallel. With few rows, the sums of
   one pair are too few to hide the latency of products, and memory would idle. Pairs are `pair` numbers apart in W. */
AVX INLINE void add_vectors(const int rows, const int pairs, struct part p, int64_t pair, float *sums, int is_first) {
    __m512 sum[VECTOR_SUMS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows * pairs; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = is_first ? _mm512_setzero_ps()
                                    : _mm512_loadu_ps(sums + i / rows * TILE + i % rows * 16 + half * 256);
    for (int64_t k = 0; k < p.steps; k++, p.x += p.step, p.w += 2 * TILE) {
        /* Near the end of a pair, prefetch the first lines of the next pairs. */
        const int64_t ahead = p.ahead + (k + p.ahead / (2 * TILE) < p.steps ? 0 : (pairs - 1) * pair);
        for (int line = 0; line < 16; line++) { /* two inputs of 32 outputs */
#pragma GCC unroll 4
            for (int i = 0; i < pairs; i++) {
                const bf16 *w = p.w + i * pair + line * 32;
                if (pairs > 1) {
                    _mm_prefetch((const char *)(w + ahead), _MM_HINT_T1);
                    _mm_prefetch((const char *)(w + ahead + TILE), _MM_HINT_T1);
                } else if (line == 0) {
                    fetch_lines(w + p.ahead, p.from, p.to);
                }
                const __m512bh first = (__m512bh)_mm512_loadu_si512(w);
                const __m512bh second = (__m512bh)_mm512_loadu_si512(w + TILE);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const __m512bh inputs = (__m512bh)broadcast(p.x + row * p.stride + line * 2);
                    sum[i * rows + row][0] = _mm512_dpbf16_ps(sum[i * rows + row][0], first, inputs);
                    sum[i * rows + row][1] = _mm512_dpbf16_ps(sum[i * rows + row][1], second, inputs);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * pairs; i++)
        for (int half = 0; half < 2; half++)
            _mm512_storeu_ps(sums + i / rows * TILE + i % rows * 16 + half * 256, sum[i][half]);
}

/* `add_vectors` for one pair with split pairs of numbers. x are floats: for each tile, 32 inputs per row. */
AVX INLINE void add_split(const int rows, struct part p, const float *x, float *sums, int is_first) {
    __m512 sum[VECTOR_ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++)
            sum[row][half] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * 16 + half * 256);
    const int num_fetched = p.to - p.from; /* prefetched a few at a time: all at once would delay the loads of W */
    for (int64_t k = 0; k < p.steps; k++, x += TILE, p.w += 2 * TILE) {
        for (int line = 0; line < 16; line++) {
            fetch_lines(p.w + p.ahead, p.from + num_fetched * line / 16, p.from + num_fetched * (line + 1) / 16);
            const __m512i first = _mm512_loadu_si512(p.w + line * 32);
            const __m512i second = _mm512_loadu_si512(p.w + TILE + line * 32);
            /* First the odd inputs, then the even ones, as vdpbf16ps adds them. */
            const __m512 odds = odd_numbers(first), second_odds = odd_numbers(second);
            const __m512 evens = even_numbers(first), second_evens = even_numbers(second);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const __m512 number = _mm512_set1_ps(x[row * 32 + line * 2 + 1]);
                sum[row][0] = _mm512_fmadd_ps(odds, number, sum[row][0]);
                sum[row][1] = _mm512_fmadd_ps(second_odds, number, sum[row][1]);
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const __m512 number = _mm512_set1_ps(x[row * 32 + line * 2]);
                sum[row][0] = _mm512_fmadd_ps(evens, number, sum[row][0]);
                sum[row][1] = _mm512_fmadd_ps(second_evens, number, sum[row][1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + row * 16 + half * 256, sum[row][half]);
}

/* Returns the number of pairs that are read at once; the sums of `rows` rows fit in registers. */
static int64_t pairs_at_once(int64_t rows) {
    static const int64_t pairs[VECTOR_ROWS + 1] = {1, 4, 4, 4, 3, 2, 2, 2, 1};
    return outrider_is_amd ? 1 : pairs[rows];
}

/* Computes the sums of `pairs` pairs, at most `pairs_at_once`. */
AVX static void add_pairs(int64_t rows, int64_t pairs, struct part part, int64_t pair, float *sums) {
#define PAIRS(r, n) case 10 * r + n: add_vectors(r, n, part, pair, sums, 1); break;
    switch (10 * rows + pairs) {
        PAIRS(1, 1) PAIRS(1, 2) PAIRS(1, 3) PAIRS(1, 4) PAIRS(2, 1) PAIRS(2, 2) PAIRS(2, 3) PAIRS(2, 4)
        PAIRS(3, 1) PAIRS(3, 2) PAIRS(3, 3) PAIRS(3, 4) PAIRS(4, 1) PAIRS(4, 2) PAIRS(4, 3) PAIRS(5, 1)
        PAIRS(5, 2) PAIRS(6, 1) PAIRS(6, 2) PAIRS(7, 1) PAIRS(7, 2) PAIRS(8, 1)
    }
#undef PAIRS
}

/* Computes the sums of up to 16 rows and one pair, half a tile at a time. */
AVX static void add_halves(int64_t rows, struct part part, float *sums, int is_first) {
#define ROWS(n) case n: add_vectors(n, 1, part, 0, sums, is_first); break;
    for (; rows > 0; rows -= VECTOR_ROWS, sums += VECTOR_ROWS * 16) {
        switch (min(VECTOR_ROWS, rows)) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
        part.x += VECTOR_ROWS * part.stride, part.from = part.to;
    }
#undef ROWS
}

AVX static void add_split_halves(int64_t rows, struct part part, const float *x, float *sums, int is_first) {
#define ROWS(n) case n: add_split(n, part, x, sums, is_first); break;
    for (; rows > 0; rows -= VECTOR_ROWS, x += VECTOR_ROWS * 32, sums += VECTOR_ROWS * 16) {
        switch (min(VECTOR_ROWS, rows)) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
        part.from = part.to;
    }
#undef ROWS
}

/* Adds a tile of up to 16 rows of x in the layout of `to_tiles` or `to_numbers`. */
AMX INLINE void add(int64_t rows, struct part part, const void *x, float *sums, int is_first) {
    part.x = x;
    if (outrider_has_tiles) add_tiles(part, sums, is_first);
    else if (outrider_splits_pairs) add_split_halves(rows, part, x, sums, is_first);
    else add_halves(rows, part, sums, is_first);
}

/* Applies bias and epilogue to one row's sums of one pair, which are two rows of tiles. */
AVX INLINE void finish(const struct product *p, int64_t row, int64_t pair, const float *sums) {
    __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + 256);
    if (p->bias) {
        first = _mm512_add_ps(first, _mm512_loadu_ps(p->bias + pair * OUTPUTS));
        second = _mm512_add_ps(second, _mm512_loadu_ps(p->bias + pair * OUTPUTS + 16));
    }
    if (p->gate) {
        bf16 *to = p->out + row * (p->num_outputs / 2) + pair * 16;
        _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(rough_gate(p->gate, first), second)));
    } else {
        bf16 *to = p->out + row * p->num_outputs + pair * OUTPUTS;
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* Multiplies a few rows by the pairs [first, last). Each pair is read whole, as one stream. */
__attribute__((noinline)) AMX static void multiply_few(const struct product *p, int64_t first, int64_t last) {
    float sums[16 * OUTPUTS * FEW_PAIRS] __attribute__((aligned(64)));
    const int64_t rows = p->num_rows, stride = p->num_inputs, size = stride * OUTPUTS;
    if (outrider_has_tiles) configure_tiles(rows, 0);
    for (int64_t pair = first, num_pairs; pair < last; pair += num_pairs) {
        const struct part part = {p->x, stride, 32, p->weight + pair * size, stride / 32, PREFETCH, 0, LINES};
        num_pairs = outrider_has_tiles ? 1 : min(pairs_at_once(rows), last - pair);
        if (outrider_has_tiles) add_tiles(part, sums, 1);
        else add_pairs(rows, num_pairs, part, size, sums);
        for (int64_t i = 0; i < num_pairs; i++)
            for (int64_t row = 0; row < rows; row++) finish(p, row, pair + i, sums + i * TILE + row * 16);
    }
}

/* Copies the inputs [k, k + 32 steps) of `rows` rows to tiles, padded with zeros. Rows of a tile get distinct cache
   sets. */
AMX static void to_tiles(const struct product *p, int64_t row, int64_t rows, int64_t k, int64_t steps, bf16 *tiles) {
    for (int64_t i = 0; i < (rows + 15) / 16 * 16; i++)
        for (int64_t step = 0; step < steps; step++) {
            const bf16 *from = p->x + (row + i) * p->num_inputs + k + step * 32;
            __m512i line = i < rows ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
            _mm512_store_si512(tiles + ((i / 16) * steps + step) * TILE + (i % 16) * 32, line);
        }
}

/* Does the same, converted to floats. */
AVX static void to_numbers(const struct product *p, int64_t row, int64_t rows, int64_t k, int64_t steps,
                           float *numbers) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t step = 0; step < steps; step++) {
            const bf16 *from = p->x + (row + i) * p->num_inputs + k + step * 32;
            float *to = numbers + ((i / 16) * steps + step) * TILE + (i % 16) * 32;
            for (int half = 0; half < 32; half += 16) _mm512_store_ps(to + half, load_numbers(from, half, 1));
        }
}

/* Multiplies up to BLOCK_ROWS rows by the pairs [first, last). A block of a pair stays in the cache across the rows. */
__attribute__((noinline)) AMX static void multiply_many(const struct product *p, int64_t row, int64_t rows,
                                                        int64_t first, int64_t last) {
    float sums[BLOCK_PAIRS * BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    char x[BLOCK_ROWS * BLOCK_INPUTS * sizeof(bf16)] __attribute__((aligned(64)));
    const int64_t item = outrider_splits_pairs ? sizeof(float) : sizeof(bf16);
    const int64_t block_inputs = BLOCK_INPUTS * sizeof(bf16) / item;
    if (outrider_has_tiles) configure_tiles(16, 0);
    for (int64_t pairs = first; pairs < last; pairs += BLOCK_PAIRS) {
        const int64_t num_pairs = min(BLOCK_PAIRS, last - pairs);
        for (int64_t k = 0; k < p->num_inputs; k += block_inputs) {
            const int64_t steps = min(block_inputs, p->num_inputs - k) / 32;
            const int is_new = pairs == first || p->num_inputs > block_inputs;
            if (is_new && outrider_splits_pairs) to_numbers(p, row, rows, k, steps, (float *)x);
            else if (is_new) to_tiles(p, row, rows, k, steps, (bf16 *)x);
            for (int64_t pair = 0; pair < num_pairs; pair++) {
                const int64_t at = (pair * p->num_inputs + k) * OUTPUTS;
                const bf16 *w = p->weight + pairs * p->num_inputs * OUTPUTS + at;
                /* Prefetch the block that is read next: the same inputs of the next pair, the next inputs of the first
                   pair, or the first inputs of the next pairs. */
                int64_t next = at + p->num_inputs * OUTPUTS;
                if (pair == num_pairs - 1) {
                    const int is_last = k + block_inputs >= p->num_inputs;
                    next = (is_last ? num_pairs * p->num_inputs : k + block_inputs) * OUTPUTS;
                }
                struct part part = {.stride = 32, .step = TILE, .w = w, .steps = steps, .ahead = next - at};
                for (int64_t i = 0; i < rows; i += 16) {
                    const int64_t height = min(16, rows - i);
                    part.from = LINES * i / rows, part.to = LINES * (i + height) / rows; /* lines of that block */
                    float *onto = sums + (pair * BLOCK_ROWS + i) * OUTPUTS;
                    add(height, part, x + i * steps * 32 * item, onto, k == 0);
                }
            }
        }
        for (int64_t i = 0; i < rows; i++) /* row by row, to write whole cache lines of `out` */
            for (int64_t pair = 0; pair < num_pairs; pair++)
                finish(p, row + i, pairs + pair, sums + (pair * BLOCK_ROWS + i / 16 * 16) * OUTPUTS + i % 16 * 16);
    }
}

/* A product, divided into parts of some rows and pairs. */
struct grid {
    struct product product;
    int is_few;
    int64_t pairs, rows, row_blocks;
};

/* Multiplies rows of one block by the pairs [first, last); all rows at once if they are few. */
AMX static void multiply_rows(const struct product *p, int is_few, int64_t row, int64_t rows, int64_t first,
                              int64_t last) {
    const unsigned mode = _mm_getcsr();
    if (outrider_splits_pairs) _mm_setcsr(mode | 0x8040); /* flush denormals to zero, as vdpbf16ps does */
    if (is_few) multiply_few(p, first, last);
    else multiply_many(p, row, rows, first, last);
    _mm_setcsr(mode);
    if (outrider_has_tiles) _tile_release();
}

static void multiply_part(const void *work, int64_t part) {
    const struct grid *grid = work;
    const struct product *p = &grid->product;
    const int64_t row = part % grid->row_blocks * grid->rows, pair = part / grid->row_blocks * grid->pairs;
    const int64_t last = min(pair + grid->pairs, p->num_outputs / OUTPUTS);
    multiply_rows(p, grid->is_few, row, min(grid->rows, p->num_rows - row), pair, last);
}

static int are_few(int64_t num_rows) {
    return num_rows <= (outrider_has_tiles ? FEW_ROWS : outrider_splits_pairs ? SPLIT_ROWS : VECTOR_ROWS);
}

void product_part(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                  int64_t num_inputs, int64_t num_outputs, int64_t first, int64_t last) {
    const struct product p = {x, weight, bias, out, num_rows, num_inputs, num_outputs, 0};
    multiply_rows(&p, are_few(num_rows), 0, num_rows, first, last);
}

static void multiply(struct product p) {
    const int64_t num_pairs = p.num_outputs / OUTPUTS;
    const int is_few = are_few(p.num_rows);
    /* Parts are small, so that other threads can help a delayed one, and large enough to amortise loading x. */
    int64_t pairs = min((is_few ? 256 << 10 : 1 << 20) / (p.num_inputs * 2 * OUTPUTS), num_pairs / 8);
    if (!is_few) { /* at least BLOCK_PAIRS, or fewer if that balances all threads */
        const int64_t threads = team_size(), all = threads * BLOCK_PAIRS;
        const int64_t parts = (num_pairs + all - 1) / all * threads;
        pairs = max(pairs, (num_pairs + parts - 1) / parts);
    }
    pairs = max(pairs, 1);
    const int64_t rows = is_few ? max(p.num_rows, 1) : BLOCK_ROWS;
    const struct grid grid = {p, is_few, pairs, rows, (p.num_rows + rows - 1) / rows};
    share_out(multiply_part, &grid, grid.row_blocks * ((num_pairs + pairs - 1) / pairs));
}

/* Computes out [rows, N] = x [rows, K] W^T (+ bias); K and N are multiples of 32. */
void outrider_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                      int64_t num_inputs, int64_t num_outputs) {
    multiply((struct product){x, weight, bias, out, num_rows, num_inputs, num_outputs, 0});
}

/* Computes out [rows, N / 2] = function(gate) * up. Each pair of W has 16 outputs of the gate and the same 16 of up. */
void outrider_gated_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs, int64_t gate) {
    multiply((struct product){x, weight, bias, out, num_rows, num_inputs, num_outputs, (int)gate});
}
