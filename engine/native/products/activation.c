/* Functions of single numbers: between the two products of an MLP without gates, gates of rows, and factors of rows. */

#include "products/gate.h"
#include "products/numbers.h"
#include "products/products.h"
#include "team.h"

enum { PART_NUMBERS = 8192 /* fewer are not worth another thread */ };

struct activation {
    char *x;
    int64_t num_numbers;
    int function;
    float factors[2]; /* xIELU's p and n, or the first of them without a function */
    int is_bf16;
};

AVX2 INLINE __m256 activated(const struct activation *a, const void *from, int64_t i) {
    const __m256 x = load_eight(from, i, a->is_bf16);
    if (a->function == XIELU) return xielu(x, a->factors[0], a->factors[1]);
    return a->function ? exact_gate(a->function, x) : _mm256_mul_ps(x, _mm256_set1_ps(a->factors[0]));
}

AVX2 static void activate_part(const void *work, int64_t part) {
    const struct activation *a = work;
    const int64_t last = min((part + 1) * PART_NUMBERS, a->num_numbers), item = a->is_bf16 ? 2 : 4;
    int64_t i = part * PART_NUMBERS;
    for (; i + 8 <= last; i += 8) store_eight(a->x, i, activated(a, a->x, i), a->is_bf16);
    if (i == last) return;
    char rest[32] = {0};
    __builtin_memcpy(rest, a->x + i * item, (size_t)((last - i) * item));
    store_eight(rest, 0, activated(a, rest, 0), a->is_bf16);
    __builtin_memcpy(a->x + i * item, rest, (size_t)((last - i) * item));
}

static void activate(const struct activation *a) {
    share_out(activate_part, a, (a->num_numbers + PART_NUMBERS - 1) / PART_NUMBERS);
}

/* Replaces each number of x by a function of it, an `enum gate`. `factors`, two of them, are xIELU's. */
void outrider_activate(void *x, int64_t num_numbers, int function, const float *factors, int is_bf16) {
    activate(&(struct activation){x, num_numbers, function, {factors[0], factors[1]}, is_bf16});
}

/* Multiplies each number of x by `factor`. */
void outrider_scale(void *x, int64_t num_numbers, float factor, int is_bf16) {
    activate(&(struct activation){x, num_numbers, NO_GATE, {factor}, is_bf16});
}

struct gated_rows {
    const char *gates;
    char *x;
    int64_t num_rows, size, stride;
    int function, is_bf16;
};

AVX2 static void gate_part(const void *work, int64_t row) {
    const struct gated_rows *g = work;
    for (int64_t i = 0; i < g->size; i += 8) {
        const __m256 gate = exact_gate(g->function, load_eight(g->gates, row * g->stride + i, g->is_bf16));
        const __m256 x = load_eight(g->x, row * g->size + i, g->is_bf16);
        store_eight(g->x, row * g->size + i, _mm256_mul_ps(gate, x), g->is_bf16);
    }
}

/* Multiplies x [rows, size] by a function, an `enum gate`, of gates [rows, stride numbers]. `size` is a multiple of 8. */
void outrider_gate_rows(const void *gates, void *x, int64_t num_rows, int64_t size, int64_t stride, int function,
                        int is_bf16) {
    share_out(gate_part, &(struct gated_rows){gates, x, num_rows, size, stride, function, is_bf16}, num_rows);
}
