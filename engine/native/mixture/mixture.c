/* A mixture of experts in one call. A row's result does not depend on other rows. */

#include "mixture/mixture.h"
#include "products/numbers.h"
#include "products/products.h"
#include "team.h"

#include <math.h>
#include <stdlib.h>

enum {
    TURN = 4096,       /* pairs of a row and an expert at a time, so that buffers stay small */
    SHARED_ROWS = 128, /* rows of the shared MLP at a time */
    ADDED_ROWS = 8,    /* rows of a part of the sum */
};

static int64_t item_of(const struct mixture *m) { return m->experts.is_bf16 ? 2 : 4; }

static int64_t rows_of_turn(const struct mixture *m, int64_t num_rows) {
    return min(max(1, TURN / m->router.top), num_rows);
}

/* out += gate * shared, all [rows, size]. */
struct sum {
    const struct mixture *mixture;
    const void *x, *shared;
    void *out;
    int64_t num_rows;
};

/* Returns sigmoid(gate x) of a row. */
AVX2 INLINE float gate_of(const struct sum *s, int64_t row, const int is_bf16) {
    const int64_t size = s->mixture->router.num_inputs;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t k = 0; k < size; k += 8)
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(s->mixture->shared_gate + k), load_eight(s->x, row * size + k, is_bf16),
                              sum);
    float lanes[8], total = 0;
    _mm256_storeu_ps(lanes, sum);
    for (int lane = 0; lane < 8; lane++) total += lanes[lane];
    return 1.0f / (1.0f + expf(-total));
}

AVX2 static void sum_part(const void *work, int64_t part) {
    const struct sum *s = work;
    const int64_t size = s->mixture->router.num_inputs;
    const int is_bf16 = (int)s->mixture->experts.is_bf16;
    for (int64_t row = part * ADDED_ROWS; row < min((part + 1) * ADDED_ROWS, s->num_rows); row++) {
        const float factor = s->mixture->shared_factor;
        const __m256 gate = _mm256_set1_ps(s->mixture->shared_gate ? factor * gate_of(s, row, is_bf16) : factor);
        for (int64_t i = row * size; i < (row + 1) * size; i += 8) {
            const __m256 shared = load_eight(s->shared, i, is_bf16), own = load_eight(s->out, i, is_bf16);
            store_eight(s->out, i, _mm256_fmadd_ps(gate, shared, own), is_bf16);
        }
    }
}

/* The buffers of the shared MLP. */
struct shared {
    char *inner, *out, *scratch;
};

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Places the buffers of so many rows. Returns their bytes. */
static int64_t lay_out_shared(const struct mixture *m, int64_t num_rows, char *memory, struct shared *s) {
    char *at = memory;
    s->inner = at, at += whole_lines(num_rows * m->shared_down.num_inputs * item_of(m));
    s->out = at, at += whole_lines(num_rows * m->router.num_inputs * item_of(m));
    s->scratch = at;
    at += whole_lines(max(product_scratch(&m->shared_inner, num_rows), product_scratch(&m->shared_down, num_rows)));
    return at - memory;
}

/* Adds the shared MLP's results to `out`. */
static void add_shared(const struct mixture *m, const char *x, char *out, int64_t num_rows, char *memory) {
    const int64_t row_bytes = m->router.num_inputs * item_of(m), is_bf16 = m->experts.is_bf16;
    struct shared shared;
    lay_out_shared(m, min(num_rows, SHARED_ROWS), memory, &shared);
    for (int64_t row = 0; row < num_rows; row += SHARED_ROWS) {
        const struct sum sum = {m, x + row * row_bytes, shared.out, out + row * row_bytes,
                                min(SHARED_ROWS, num_rows - row)};
        run_product(&m->shared_inner, sum.x, shared.inner, sum.num_rows, is_bf16, shared.scratch);
        if (m->shared_function)
            outrider_activate(shared.inner, sum.num_rows * m->shared_down.num_inputs, (int)m->shared_function,
                              (const float[2]){0}, (int)is_bf16);
        run_product(&m->shared_down, shared.inner, shared.out, sum.num_rows, is_bf16, shared.scratch);
        share_out(sum_part, &sum, (sum.num_rows + ADDED_ROWS - 1) / ADDED_ROWS);
    }
}

/* The experts' rows, and their results. */
struct latent {
    char *in, *out, *scratch;
};

/* Places the buffers of the experts; their rows and results need some only in a latent space. Returns the bytes. */
static int64_t lay_out_experts(const struct mixture *m, int64_t num_rows, char *memory, struct latent *l) {
    const int64_t bytes = whole_lines(num_rows * m->experts.in.num_inputs * item_of(m));
    int64_t scratch = experts_scratch(&m->experts, num_rows * m->router.top);
    l->in = l->out = l->scratch = memory;
    if (!m->latent_in.packed) return scratch;
    l->out += bytes, l->scratch += 2 * bytes;
    scratch = max(scratch, max(product_scratch(&m->latent_in, num_rows), product_scratch(&m->latent_out, num_rows)));
    return 2 * bytes + whole_lines(scratch);
}

/* Computes the weighted sums of the experts, in a latent space if they have one. */
static void sum_experts(const struct mixture *m, const struct routing *r, const char *x, char *out, char *memory) {
    const int64_t is_bf16 = m->experts.is_bf16;
    struct latent latent;
    lay_out_experts(m, r->num_rows, memory, &latent);
    if (!m->latent_in.packed) {
        run_experts(&m->experts, r, x, out, latent.scratch);
        return;
    }
    run_product(&m->latent_in, x, latent.in, r->num_rows, is_bf16, latent.scratch);
    run_experts(&m->experts, r, latent.in, latent.out, latent.scratch);
    run_product(&m->latent_out, latent.out, out, r->num_rows, is_bf16, latent.scratch);
}

int64_t mixture_scratch(const struct mixture *m, int64_t num_rows) {
    const int64_t rows = rows_of_turn(m, num_rows);
    struct shared shared;
    struct latent latent;
    const int64_t of_experts = routing_scratch(&m->router, rows) + lay_out_experts(m, rows, NULL, &latent);
    return max(of_experts, m->shared_inner.packed ? lay_out_shared(m, min(num_rows, SHARED_ROWS), NULL, &shared) : 0);
}

void run_mixture(const struct mixture *m, const void *routed, const void *x, void *out, int64_t num_rows,
                 char *scratch) {
    const int64_t turn = rows_of_turn(m, num_rows), row_bytes = m->router.num_inputs * item_of(m);
    char *memory = scratch + routing_scratch(&m->router, turn);
    for (int64_t row = 0; row < num_rows; row += turn) {
        const int64_t rows = min(turn, num_rows - row), at = row * row_bytes, is_bf16 = m->experts.is_bf16;
        const struct routing r = choose_experts(&m->router, (const char *)routed + at, rows, (int)is_bf16, scratch);
        sum_experts(m, &r, (const char *)x + at, (char *)out + at, memory);
    }
    if (m->shared_inner.packed) add_shared(m, x, out, num_rows, scratch);
}

/* Computes the mixture of rows. Returns 0, or 1 if memory is short. */
int outrider_mixture(const struct mixture *m, const void *routed, const void *x, void *out, int64_t num_rows) {
    char *memory = aligned_alloc(64, (size_t)mixture_scratch(m, num_rows));
    if (!memory) return 1;
    run_mixture(m, routed, x, out, num_rows, memory);
    free(memory);
    return 0;
}
