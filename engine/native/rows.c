/* The row-wise operations between a layer's products: the residual sum with its norm, norms of heads, and rotary
   position embeddings. In bfloat16, each result is computed in float32 and rounded once. A row's result does not depend
   on other rows. */

#include "rows.h"
#include "lanes/lanes.h"
#include "team.h"

enum { PART_ROWS = 32 /* fewer rows are not worth another thread */ };

/* Computes one row: sum += scale * hidden, unless one of both is NULL, and out = (sum or hidden) / root mean square *
   weight, unless `weight` is NULL. With `is_centered`, it subtracts the mean first; with `has_bias`, it adds the
   numbers that follow `weight`. `out` may be `hidden`. */
VECTOR_CODE INLINE void norm_row(const void *hidden, void *sum, const void *weight, void *out, int64_t row,
                                 int64_t size, float epsilon, float scale, int is_centered, int has_bias,
                                 const int is_bf16, const int has_bf16_sum, const int has_bf16_weight) {
    const int64_t at = row * size;
    const floats factor = lanes_set(scale);
    floats squares = lanes_zero(), total = lanes_zero();
    for (int64_t i = 0; i < size; i += LANES) {
        floats x = hidden ? load_numbers(hidden, at + i, is_bf16) : load_numbers(sum, at + i, has_bf16_sum);
        if (hidden && sum) {
            x = lanes_fma(x, factor, load_numbers(sum, at + i, has_bf16_sum));
            x = store_numbers(sum, at + i, x, has_bf16_sum);
        }
        squares = lanes_fma(x, x, squares);
        total = lanes_add(x, total);
    }
    if (!weight) return;
    const void *from = sum ? sum : hidden;
    const floats center = lanes_set(is_centered ? lanes_sum(total) / (float)size : 0.0f);
    if (is_centered) {
        squares = lanes_zero();
        for (int64_t i = 0; i < size; i += LANES) {
            const floats x = lanes_sub(load_numbers(from, at + i, has_bf16_sum), center);
            squares = lanes_fma(x, x, squares);
        }
    }
    const float mean = lanes_sum(squares) / (float)size;
    const floats inverse = lanes_set(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t i = 0; i < size; i += LANES) {
        const floats x = lanes_mul(lanes_sub(load_numbers(from, at + i, has_bf16_sum), center), inverse);
        floats y = lanes_mul(x, load_numbers(weight, i, has_bf16_weight));
        if (has_bias) y = lanes_add(y, load_numbers(weight, size + i, has_bf16_weight));
        store_numbers(out, at + i, y, is_bf16);
    }
}

struct norm {
    const void *hidden;
    void *sum;
    const void *weight;
    void *out;
    int64_t num_rows, size;
    float epsilon, scale;
    int is_centered, has_bias, is_bf16, has_bf16_sum, has_bf16_weight;
};

VECTOR_CODE void PART(norm_part)(const void *work, int64_t part) {
    const struct norm *n = work;
#define NORM(is_bf16, has_bf16_sum, has_bf16_weight) \
    norm_row(n->hidden, n->sum, n->weight, n->out, row, n->size, n->epsilon, n->scale, n->is_centered, n->has_bias, \
             is_bf16, has_bf16_sum, has_bf16_weight)
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (!IS_BF16(n)) NORM(0, 0, 0);
        else if (!n->has_bf16_sum && n->has_bf16_weight) NORM(1, 0, 1);
        else if (!n->has_bf16_sum) NORM(1, 0, 0);
        else if (n->has_bf16_weight) NORM(1, 1, 1);
        else NORM(1, 1, 0);
    }
#undef NORM
}

/* Returns the mean of a head's numbers. */
VECTOR_CODE INLINE float mean_of_head(const void *x, int64_t first, int64_t dim, const int is_bf16) {
    floats total = lanes_zero();
    for (int64_t i = first; i < first + dim; i += LANES) total = lanes_add(load_numbers(x, i, is_bf16), total);
    return lanes_sum(total) / (float)dim;
}

/* Divides one row's heads [heads, dim] by their root mean squares, in place; with `is_centered`, it subtracts the mean
   first. In bfloat16, rounds before multiplying by `weight`, as transformers does. With `has_bias`, adds the numbers
   that follow `weight`. */
VECTOR_CODE INLINE void norm_heads_row(void *x, int64_t at, const void *weight, int64_t num_heads, int64_t dim,
                                       float epsilon, int is_centered, int has_bias, const int is_bf16,
                                       const int has_bf16_weight) {
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t first = head * dim;
        const floats center = lanes_set(is_centered ? mean_of_head(x, at + first, dim, is_bf16) : 0.0f);
        floats squares = lanes_zero();
        for (int64_t i = first; i < first + dim; i += LANES) {
            const floats number = lanes_sub(load_numbers(x, at + i, is_bf16), center);
            squares = lanes_fma(number, number, squares);
        }
        const float mean = lanes_sum(squares) / (float)dim;
        const floats inverse = lanes_set(1.0f / __builtin_sqrtf(mean + epsilon));
        for (int64_t i = first; i < first + dim; i += LANES) {
            const floats number = lanes_sub(load_numbers(x, at + i, is_bf16), center);
            const floats normed = store_numbers(x, at + i, lanes_mul(number, inverse), is_bf16);
            floats y = lanes_mul(normed, load_numbers(weight, i, has_bf16_weight));
            if (has_bias) y = lanes_add(y, load_numbers(weight, num_heads * dim + i, has_bf16_weight));
            store_numbers(x, at + i, y, is_bf16);
        }
    }
}

struct head_norm {
    void *x;
    const void *weight;
    int64_t num_rows, stride, num_heads, dim;
    float epsilon;
    int is_centered, has_bias, is_bf16, has_bf16_weight;
};

VECTOR_CODE void PART(norm_heads_part)(const void *work, int64_t part) {
    const struct head_norm *n = work;
#define NORM(is_bf16, has_bf16_weight) \
    norm_heads_row(n->x, row * n->stride, n->weight, n->num_heads, n->dim, n->epsilon, n->is_centered, n->has_bias, \
                   is_bf16, has_bf16_weight)
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (!IS_BF16(n)) NORM(0, 0);
        else if (n->has_bf16_weight) NORM(1, 1);
        else NORM(1, 0);
    }
#undef NORM
}

INLINE float number_at(const void *x, int64_t i, const int is_bf16) {
    if (!is_bf16) return ((const float *)x)[i];
    const uint32_t bits = (uint32_t)((const bf16 *)x)[i] << 16;
    float number;
    __builtin_memcpy(&number, &bits, 4);
    return number;
}

/* Stores a number, rounded to the nearest bfloat16, ties to even. */
INLINE void put_number(void *x, int64_t i, float number, const int is_bf16) {
    if (!is_bf16) {
        ((float *)x)[i] = number;
        return;
    }
    uint32_t bits;
    __builtin_memcpy(&bits, &number, 4);
    ((bf16 *)x)[i] = number == number ? (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* Rotates one number `at` of each head by its partner, `step` numbers apart, and the partner by it. */
VECTOR_CODE INLINE void rotate_numbers(void *x, int64_t at, int64_t step, int64_t i, const void *table,
                                       int64_t num_heads, int64_t dim, int64_t num_dims, const int is_bf16) {
    const float cos = number_at(table, i, is_bf16), sin = number_at(table, num_dims + i, is_bf16);
    const float other_cos = number_at(table, i + step, is_bf16);
    const float other_sin = number_at(table, num_dims + i + step, is_bf16);
    for (int64_t place = at + i; place < at + num_heads * dim; place += dim) {
        const float number = number_at(x, place, is_bf16), other = number_at(x, place + step, is_bf16);
        put_number(x, place, __builtin_fmaf(other, sin, number * cos), is_bf16);
        put_number(x, place + step, __builtin_fmaf(number, other_sin, other * other_cos), is_bf16);
    }
}

/* Rotates the first `num_dims` of each of a row's heads [heads, dim] in place: x cos + swapped(x) sin, where `swapped`
   exchanges their halves. */
VECTOR_CODE INLINE void rotate_row(void *x, int64_t at, const void *table, int64_t num_heads, int64_t dim,
                                   int64_t num_dims, const int is_bf16) {
    const int64_t half = num_dims / 2, whole = half / LANES * LANES;
    for (int64_t i = whole; i < half; i++) rotate_numbers(x, at, half, i, table, num_heads, dim, num_dims, is_bf16);
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats low_cos = load_numbers(table, i, is_bf16), high_cos = load_numbers(table, half + i, is_bf16);
        const floats low_sin = load_numbers(table, num_dims + i, is_bf16);
        const floats high_sin = load_numbers(table, num_dims + half + i, is_bf16);
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t place = at + head * dim + i;
            const floats low = load_numbers(x, place, is_bf16), high = load_numbers(x, place + half, is_bf16);
            store_numbers(x, place, lanes_fma(high, low_sin, lanes_mul(low, low_cos)), is_bf16);
            store_numbers(x, place + half, lanes_fma(low, high_sin, lanes_mul(high, high_cos)), is_bf16);
        }
    }
}

/* Does the same where `swapped` exchanges neighbors. */
VECTOR_CODE INLINE void rotate_pairs_row(void *x, int64_t at, const void *table, int64_t num_heads, int64_t dim,
                                         int64_t num_dims, const int is_bf16) {
    const int64_t whole = num_dims / LANES * LANES;
    for (int64_t i = whole; i < num_dims; i += 2)
        rotate_numbers(x, at, 1, i, table, num_heads, dim, num_dims, is_bf16);
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats cos = load_numbers(table, i, is_bf16), sin = load_numbers(table, num_dims + i, is_bf16);
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t place = at + head * dim + i;
            const floats number = load_numbers(x, place, is_bf16);
            const floats turned = lanes_fma(lanes_swap_neighbors(number), sin, lanes_mul(number, cos));
            store_numbers(x, place, turned, is_bf16);
        }
    }
}

struct rotation {
    void *x;
    const void *table;
    int64_t num_rows, stride, num_heads, dim, num_dims;
    int in_pairs, is_bf16;
};

VECTOR_CODE void PART(rotate_part)(const void *work, int64_t part) {
    const struct rotation *r = work;
#define ROTATE(one_row, is_bf16) \
    one_row(r->x, row * r->stride, angles, r->num_heads, r->dim, r->num_dims, is_bf16)
    const int64_t table_bytes = 2 * r->num_dims * (IS_BF16(r) ? 2 : 4);
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, r->num_rows); row++) {
        const void *angles = (const char *)r->table + row * table_bytes;
        if (IS_BF16(r) && r->in_pairs) ROTATE(rotate_pairs_row, 1);
        else if (IS_BF16(r)) ROTATE(rotate_row, 1);
        else if (r->in_pairs) ROTATE(rotate_pairs_row, 0);
        else ROTATE(rotate_row, 0);
    }
#undef ROTATE
}

#ifndef NARROW /* compiled once: the entry points of both widths */

PARTS(norm_part);
PARTS(norm_heads_part);
PARTS(rotate_part);

/* `norm_row` for all rows: hidden, sum and out [rows, size], weight [size], or [2, size] with its bias. `size` is a
   multiple of 16; `sum` or `hidden` may be NULL. A sum of float32 to rows of bfloat16 is not NULL. */
void outrider_add_norm(const void *hidden, void *sum, const void *weight, void *out, int64_t num_rows, int64_t size,
                       float epsilon, float scale, int is_centered, int has_bias, int is_bf16, int has_bf16_sum,
                       int has_bf16_weight) {
    const struct norm norm = {hidden, sum,         weight,   out,     num_rows,     size,           epsilon,
                              scale,  is_centered, has_bias, is_bf16, has_bf16_sum, has_bf16_weight};
    share_out(FITTING(norm_part), &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* Norms the first `num_heads` heads of x [rows, stride numbers] in place; weight [num_heads, dim], or
   [2, num_heads, dim] with biases. `dim` is a multiple of 16. */
void outrider_norm_heads(void *x, const void *weight, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                         float epsilon, int is_centered, int has_bias, int is_bf16, int has_bf16_weight) {
    const struct head_norm norm = {x,       weight,      num_rows, stride,  num_heads,      dim,
                                   epsilon, is_centered, has_bias, is_bf16, has_bf16_weight};
    share_out(FITTING(norm_heads_part), &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* Rotates the first `num_dims` of the first `num_heads` heads of x [rows, stride numbers] in place; table
   [rows, 2, num_dims]: cosines, then sines with the first half negated. `num_dims` is even. With `in_pairs`,
   neighbors turn together, and the first of each two sines is negated. */
void outrider_rotate(void *x, const void *table, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                     int64_t num_dims, int in_pairs, int is_bf16) {
    const struct rotation rotation = {x, table, num_rows, stride, num_heads, dim, num_dims, in_pairs, is_bf16};
    share_out(FITTING(rotate_part), &rotation, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

#endif
