/* The row-wise operations between a layer's products: the residual sum with its norm, norms of heads, and rotary
   position embeddings. In bfloat16, each result is computed in float32 and rounded once. A row's result does not depend
   on other rows. */

#include "rows.h"
#include "lanes/lanes.h"
#include "team.h"

enum { PART_ROWS = 32 /* fewer rows are not worth another thread */ };

/* Computes one row: sum += hidden, unless `sum` is NULL, and out = (sum or hidden) / root mean square * weight. */
VECTOR_CODE INLINE void norm_row(const void *hidden, void *sum, const void *weight, void *out, int64_t row,
                                 int64_t size, float epsilon, const int is_bf16) {
    const int64_t at = row * size;
    floats squares = lanes_zero();
    for (int64_t i = 0; i < size; i += LANES) {
        floats x = load_numbers(hidden, at + i, is_bf16);
        if (sum) x = store_numbers(sum, at + i, lanes_add(x, load_numbers(sum, at + i, is_bf16)), is_bf16);
        squares = lanes_fma(x, x, squares);
    }
    const float mean = lanes_sum(squares) / (float)size;
    const floats inverse = lanes_set(1.0f / __builtin_sqrtf(mean + epsilon));
    const void *from = sum ? sum : hidden;
    for (int64_t i = 0; i < size; i += LANES) {
        const floats x = lanes_mul(load_numbers(from, at + i, is_bf16), inverse);
        store_numbers(out, at + i, lanes_mul(x, load_numbers(weight, i, is_bf16)), is_bf16);
    }
}

struct norm {
    const void *hidden;
    void *sum;
    const void *weight;
    void *out;
    int64_t num_rows, size;
    float epsilon;
    int is_bf16;
};

VECTOR_CODE void PART(norm_part)(const void *work, int64_t part) {
    const struct norm *n = work;
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (IS_BF16(n)) norm_row(n->hidden, n->sum, n->weight, n->out, row, n->size, n->epsilon, 1);
        else norm_row(n->hidden, n->sum, n->weight, n->out, row, n->size, n->epsilon, 0);
    }
}

/* Divides one row's heads [heads, dim] by their root mean squares, in place. In bfloat16, rounds before multiplying by
   `weight`, as transformers does. */
VECTOR_CODE INLINE void norm_heads_row(void *x, int64_t at, const void *weight, int64_t num_heads, int64_t dim,
                                       float epsilon, const int is_bf16) {
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t first = head * dim;
        floats squares = lanes_zero();
        for (int64_t i = first; i < first + dim; i += LANES) {
            const floats number = load_numbers(x, at + i, is_bf16);
            squares = lanes_fma(number, number, squares);
        }
        const float mean = lanes_sum(squares) / (float)dim;
        const floats inverse = lanes_set(1.0f / __builtin_sqrtf(mean + epsilon));
        for (int64_t i = first; i < first + dim; i += LANES) {
            const floats number = load_numbers(x, at + i, is_bf16);
            const floats normed = store_numbers(x, at + i, lanes_mul(number, inverse), is_bf16);
            store_numbers(x, at + i, lanes_mul(normed, load_numbers(weight, i, is_bf16)), is_bf16);
        }
    }
}

struct head_norm {
    void *x;
    const void *weight;
    int64_t num_rows, stride, num_heads, dim;
    float epsilon;
    int is_bf16;
};

VECTOR_CODE void PART(norm_heads_part)(const void *work, int64_t part) {
    const struct head_norm *n = work;
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (IS_BF16(n)) norm_heads_row(n->x, row * n->stride, n->weight, n->num_heads, n->dim, n->epsilon, 1);
        else norm_heads_row(n->x, row * n->stride, n->weight, n->num_heads, n->dim, n->epsilon, 0);
    }
}

/* Rotates one row's heads [heads, dim] in place: x cos + swapped(x) sin, where `swapped` exchanges a head's halves. */
VECTOR_CODE INLINE void rotate_row(void *x, int64_t at, const void *table, int64_t num_heads, int64_t dim,
                                   const int is_bf16) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const floats low_cos = load_numbers(table, i, is_bf16), high_cos = load_numbers(table, half + i, is_bf16);
        const floats low_sin = load_numbers(table, dim + i, is_bf16);
        const floats high_sin = load_numbers(table, dim + half + i, is_bf16);
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t place = at + head * dim + i;
            const floats low = load_numbers(x, place, is_bf16), high = load_numbers(x, place + half, is_bf16);
            store_numbers(x, place, lanes_fma(high, low_sin, lanes_mul(low, low_cos)), is_bf16);
            store_numbers(x, place + half, lanes_fma(low, high_sin, lanes_mul(high, high_cos)), is_bf16);
        }
    }
}

struct rotation {
    void *x;
    const void *table;
    int64_t num_rows, stride, num_heads, dim;
    int is_bf16;
};

VECTOR_CODE void PART(rotate_part)(const void *work, int64_t part) {
    const struct rotation *r = work;
    const int64_t table_bytes = 2 * r->dim * (IS_BF16(r) ? 2 : 4);
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, r->num_rows); row++) {
        const void *angles = (const char *)r->table + row * table_bytes;
        if (IS_BF16(r)) rotate_row(r->x, row * r->stride, angles, r->num_heads, r->dim, 1);
        else rotate_row(r->x, row * r->stride, angles, r->num_heads, r->dim, 0);
    }
}

#ifndef NARROW /* compiled once: the entry points of both widths */

PARTS(norm_part);
PARTS(norm_heads_part);
PARTS(rotate_part);

/* `norm_row` for all rows: hidden, sum and out [rows, size], weight [size]. `size` is a multiple of 16; `sum` may be
   NULL. */
void outrider_add_norm(const void *hidden, void *sum, const void *weight, void *out, int64_t num_rows, int64_t size,
                       float epsilon, int is_bf16) {
    const struct norm norm = {hidden, sum, weight, out, num_rows, size, epsilon, is_bf16};
    share_out(FITTING(norm_part), &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* Norms the first `num_heads` heads of x [rows, stride numbers] in place; weight [num_heads, dim]. `dim` is a multiple
   of 16. */
void outrider_norm_heads(void *x, const void *weight, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                         float epsilon, int is_bf16) {
    const struct head_norm norm = {x, weight, num_rows, stride, num_heads, dim, epsilon, is_bf16};
    share_out(FITTING(norm_heads_part), &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* Rotates the first `num_heads` heads of x [rows, stride numbers] in place; table [rows, 2, dim]: cosines, then sines
   with the first half negated. `dim` is a multiple of 32. */
void outrider_rotate(void *x, const void *table, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                     int is_bf16) {
    const struct rotation rotation = {x, table, num_rows, stride, num_heads, dim, is_bf16};
    share_out(FITTING(rotate_part), &rotation, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

#endif
