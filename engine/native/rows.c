/* What stands between a layer's products, row by row: the residual sum with the norm behind it, norms of heads, and
   rotary position embeddings. In bfloat16 every result is computed in float32 and rounded once; a row's result does not depend on the
   rows beside it. */

#include "rows.h"
#include "team.h"

enum { LANES = 16, PART_ROWS = 32 /* fewer are not worth another thread */ };

AVX INLINE __m512 load(const void *at, int64_t index, const int is_bf16) {
    if (!is_bf16) return _mm512_loadu_ps((const float *)at + index);
    const __m256i numbers = _mm256_loadu_si256((const __m256i *)((const bf16 *)at + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

/* Returns what was kept of x. */
AVX INLINE __m512 store(void *at, int64_t index, __m512 x, const int is_bf16) {
    if (!is_bf16) {
        _mm512_storeu_ps((float *)at + index, x);
        return x;
    }
    const __m256i numbers = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i *)((bf16 *)at + index), numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

/* One row: sum += hidden where there is a sum, and out = (sum or hidden) / root mean square * weight. */
AVX INLINE void norm_row(const void *hidden, void *sum, const void *weight, void *out, int64_t row, int64_t size,
                         float epsilon, const int is_bf16) {
    const int64_t at = row * size;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m512 x = load(hidden, at + i, is_bf16);
        if (sum) x = store(sum, at + i, _mm512_add_ps(x, load(sum, at + i, is_bf16)), is_bf16);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / (float)size;
    const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + epsilon));
    const void *from = sum ? sum : hidden;
    for (int64_t i = 0; i < size; i += LANES) {
        const __m512 x = _mm512_mul_ps(load(from, at + i, is_bf16), inverse);
        store(out, at + i, _mm512_mul_ps(x, load(weight, i, is_bf16)), is_bf16);
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

AVX static void norm_part(const void *work, int64_t part) {
    const struct norm *n = work;
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (n->is_bf16) norm_row(n->hidden, n->sum, n->weight, n->out, row, n->size, n->epsilon, 1);
        else norm_row(n->hidden, n->sum, n->weight, n->out, row, n->size, n->epsilon, 0);
    }
}

/* hidden, sum and out [rows, size], weight [size]; `size` is a multiple of 16, and `sum` may be NULL. */
void outrider_add_norm(const void *hidden, void *sum, const void *weight, void *out, int64_t num_rows, int64_t size,
                       float epsilon, int is_bf16) {
    const struct norm norm = {hidden, sum, weight, out, num_rows, size, epsilon, is_bf16};
    share_out(norm_part, &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* One row's heads [heads, dim], in place, each by its root mean square; in bfloat16 rounded once more before `weight`,
   as transformers does. */
AVX INLINE void norm_heads_row(void *x, int64_t at, const void *weight, int64_t num_heads, int64_t dim, float epsilon,
                               const int is_bf16) {
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t first = head * dim;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = first; i < first + dim; i += LANES) {
            const __m512 number = load(x, at + i, is_bf16);
            squares = _mm512_fmadd_ps(number, number, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / (float)dim;
        const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + epsilon));
        for (int64_t i = first; i < first + dim; i += LANES) {
            const __m512 normed = store(x, at + i, _mm512_mul_ps(load(x, at + i, is_bf16), inverse), is_bf16);
            store(x, at + i, _mm512_mul_ps(normed, load(weight, i, is_bf16)), is_bf16);
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

AVX static void norm_heads_part(const void *work, int64_t part) {
    const struct head_norm *n = work;
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, n->num_rows); row++) {
        if (n->is_bf16) norm_heads_row(n->x, row * n->stride, n->weight, n->num_heads, n->dim, n->epsilon, 1);
        else norm_heads_row(n->x, row * n->stride, n->weight, n->num_heads, n->dim, n->epsilon, 0);
    }
}

/* The first `num_heads` heads of x [rows, stride numbers], in place; weight [num_heads, dim]. `dim` is a multiple of
   16. */
void outrider_norm_heads(void *x, const void *weight, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                         float epsilon, int is_bf16) {
    const struct head_norm norm = {x, weight, num_rows, stride, num_heads, dim, epsilon, is_bf16};
    share_out(norm_heads_part, &norm, (num_rows + PART_ROWS - 1) / PART_ROWS);
}

/* One row's heads [heads, dim], in place: x cos + swapped(x) sin, where the halves of a head change places. */
AVX INLINE void rotate_row(void *x, int64_t at, const void *table, int64_t num_heads, int64_t dim, const int is_bf16) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const __m512 low_cos = load(table, i, is_bf16), high_cos = load(table, half + i, is_bf16);
        const __m512 low_sin = load(table, dim + i, is_bf16), high_sin = load(table, dim + half + i, is_bf16);
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t place = at + head * dim + i;
            const __m512 low = load(x, place, is_bf16), high = load(x, place + half, is_bf16);
            store(x, place, _mm512_fmadd_ps(high, low_sin, _mm512_mul_ps(low, low_cos)), is_bf16);
            store(x, place + half, _mm512_fmadd_ps(low, high_sin, _mm512_mul_ps(high, high_cos)), is_bf16);
        }
    }
}

struct rotation {
    void *x;
    const void *table;
    int64_t num_rows, stride, num_heads, dim;
    int is_bf16;
};

AVX static void rotate_part(const void *work, int64_t part) {
    const struct rotation *r = work;
    const int64_t table_bytes = 2 * r->dim * (r->is_bf16 ? 2 : 4);
    for (int64_t row = part * PART_ROWS; row < min((part + 1) * PART_ROWS, r->num_rows); row++) {
        const void *angles = (const char *)r->table + row * table_bytes;
        if (r->is_bf16) rotate_row(r->x, row * r->stride, angles, r->num_heads, r->dim, 1);
        else rotate_row(r->x, row * r->stride, angles, r->num_heads, r->dim, 0);
    }
}

/* The first `num_heads` heads of x [rows, stride numbers], in place; table [rows, 2, dim]: cosines, and sines of which
   the first half is negated. `dim` is a multiple of 32. */
void outrider_rotate(void *x, const void *table, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                     int is_bf16) {
    const struct rotation rotation = {x, table, num_rows, stride, num_heads, dim, is_bf16};
    share_out(rotate_part, &rotation, (num_rows + PART_ROWS - 1) / PART_ROWS);
}
