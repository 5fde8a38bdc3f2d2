/* The choice of experts. Each logit is one sum over the inputs in order, and a row's experts depend on its own alone. */

#include "mixture/routing.h"
#include "products/numbers.h"
#include "team.h"

#include <math.h>
#include <string.h>

enum {
    ROUTED = 4,        /* experts whose logits are computed together */
    ROUTED_PART = 32,  /* experts of a part of the logits */
    CHOSEN_ROWS = 8,   /* rows of a part of the choice */
    MAX_GROUPS = 64,
};

struct choice {
    const struct router *router;
    const void *x;
    float *scores; /* [rows, experts]: logits, then the weights of experts */
    float *ranks;  /* [rows, experts]: compared */
    int64_t *ids;
    float *weights;
    int64_t num_rows, num_parts; /* parts of a row's logits */
    int is_bf16;
};

/* Computes the logits of `count` experts. */
AVX2 INLINE void add_logits(const int count, const void *x, int64_t at, const void *weight, int64_t first, int64_t size,
                            const int x_is_bf16, const int is_bf16, float *logits) {
    __m256 sum[ROUTED];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < size; k += 8) {
        const __m256 numbers = load_eight(x, at + k, x_is_bf16);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            sum[i] = _mm256_fmadd_ps(load_eight(weight, (first + i) * size + k, is_bf16), numbers, sum[i]);
    }
    for (int i = 0; i < count; i++) {
        float lanes[8], total = 0;
        _mm256_storeu_ps(lanes, sum[i]);
        for (int lane = 0; lane < 8; lane++) total += lanes[lane];
        logits[i] = total;
    }
}

AVX2 INLINE void logits_of(const struct choice *c, int64_t row, int64_t first, int64_t last, const int x_is_bf16,
                           const int is_bf16) {
    const struct router *m = c->router;
    const int64_t size = m->num_inputs;
    float *logits = c->scores + row * m->num_experts;
    for (; first + ROUTED <= last; first += ROUTED)
        add_logits(ROUTED, c->x, row * size, m->weight, first, size, x_is_bf16, is_bf16, logits + first);
    for (; first < last; first++)
        add_logits(1, c->x, row * size, m->weight, first, size, x_is_bf16, is_bf16, logits + first);
}

AVX2 static void logits_part(const void *work, int64_t part) {
    const struct choice *c = work;
    const int64_t row = part / c->num_parts, first = part % c->num_parts * ROUTED_PART;
    const int64_t last = min(first + ROUTED_PART, c->router->num_experts);
    if (c->is_bf16) {
        if (c->router->is_bf16) logits_of(c, row, first, last, 1, 1);
        else logits_of(c, row, first, last, 1, 0);
    } else if (c->router->is_bf16) logits_of(c, row, first, last, 0, 1);
    else logits_of(c, row, first, last, 0, 0);
}

/* Computes a row's scores and ranks from its logits in `scores`. Returns the sum of all scores. */
static float score(const struct router *m, float *scores, float *ranks) {
    float highest = scores[0], sum = 0;
    for (int64_t i = 1; i < m->num_experts; i++) highest = scores[i] > highest ? scores[i] : highest;
    for (int64_t i = 0; i < m->num_experts; i++) {
        ranks[i] = scores[i]; /* a logit, which has the order of its score and fewer equals */
        scores[i] = m->scores == SIGMOID ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - highest);
        sum += scores[i];
    }
    const float unit = m->scores == SIGMOID ? 1.0f : 1.0f / sum;
    if (m->biases)
        for (int64_t i = 0; i < m->num_experts; i++) ranks[i] = scores[i] * unit + m->biases[i];
    return sum;
}

static int64_t best_of(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) best = numbers[i] > numbers[best] ? i : best;
    return best;
}

/* Returns the sum of the two best ranks of a group, or the best. */
static float rank_of_group(const float *ranks, int64_t size, int64_t is_sum) {
    float best[] = {-INFINITY, -INFINITY};
    for (int64_t i = 0; i < size; i++) {
        if (ranks[i] > best[0]) best[1] = best[0], best[0] = ranks[i];
        else if (ranks[i] > best[1]) best[1] = ranks[i];
    }
    return is_sum ? best[0] + best[1] : best[0];
}

/* Drops the experts of all groups except the best `top_groups`. */
static void drop_groups(const struct router *m, float *ranks) {
    const int64_t size = m->num_experts / m->num_groups;
    float groups[MAX_GROUPS];
    for (int64_t group = 0; group < m->num_groups; group++)
        groups[group] = rank_of_group(ranks + group * size, size, m->has_group_sums);
    for (int64_t group = 0; group < m->num_groups; group++) {
        int64_t before = 0;
        for (int64_t other = 0; other < m->num_groups; other++)
            before += groups[other] > groups[group] || (groups[other] == groups[group] && other < group);
        for (int64_t i = group * size; before >= m->top_groups && i < (group + 1) * size; i++) ranks[i] = -INFINITY;
    }
}

static void choose_sparse(const struct router *m, const float *logits, float *ranks, int64_t *ids, float *weights) {
    memcpy(ranks, logits, (size_t)m->num_experts * sizeof *ranks);
    for (int64_t k = 0; k < m->top; k++) {
        const int64_t best = best_of(ranks, m->num_experts);
        const float highest = ranks[best];
        float sum = 0;
        for (int64_t i = 0; i < m->num_experts; i++) {
            const int is_far = (highest - logits[i]) / fmaxf(fabsf(logits[i]), highest) > m->tolerance;
            if (!is_far) sum += expf(ranks[i] - highest);
        }
        ids[k] = best;
        weights[k] = 1.0f / sum;
        ranks[best] = -INFINITY;
    }
}

/* Takes the `top` experts with the greatest ranks, the greatest first. */
static void choose_row(const struct router *m, float *scores, float *ranks, int64_t *ids, float *weights) {
    for (int64_t i = 0; m->logit_biases && i < m->num_experts; i++) scores[i] += m->logit_biases[i];
    if (m->scores == SPARSE) {
        choose_sparse(m, scores, ranks, ids, weights);
        return;
    }
    const float all = score(m, scores, ranks);
    float sum = m->epsilon;
    if (m->top_groups < m->num_groups) drop_groups(m, ranks);
    for (int64_t k = 0; k < m->top; k++) {
        const int64_t best = best_of(ranks, m->num_experts);
        ids[k] = best;
        weights[k] = scores[best];
        sum += weights[k];
        ranks[best] = -INFINITY;
    }
    if (!m->is_normalized) sum = m->scores == SIGMOID ? 1.0f : all;
    for (int64_t k = 0; k < m->top; k++)
        weights[k] = weights[k] / sum * (m->factors ? m->factors[ids[k]] : m->factor);
}

static void choose_part(const void *work, int64_t part) {
    const struct choice *c = work;
    const struct router *m = c->router;
    for (int64_t row = part * CHOSEN_ROWS; row < min((part + 1) * CHOSEN_ROWS, c->num_rows); row++)
        choose_row(m, c->scores + row * m->num_experts, c->ranks + row * m->num_experts, c->ids + row * m->top,
                   c->weights + row * m->top);
}

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Places the buffers of the choice. Returns their bytes. */
static int64_t lay_out(const struct router *m, int64_t num_rows, char *memory, struct choice *c) {
    const int64_t scores = whole_lines(num_rows * m->num_experts * (int64_t)sizeof(float));
    char *at = memory;
    c->scores = (float *)at, at += scores;
    c->ranks = (float *)at, at += scores;
    c->ids = (int64_t *)at, at += whole_lines(num_rows * m->top * (int64_t)sizeof(int64_t));
    c->weights = (float *)at, at += whole_lines(num_rows * m->top * (int64_t)sizeof(float));
    return at - memory;
}

int64_t routing_scratch(const struct router *m, int64_t num_rows) {
    struct choice choice;
    return lay_out(m, num_rows, NULL, &choice);
}

struct routing choose_experts(const struct router *m, const void *x, int64_t num_rows, int is_bf16, char *scratch) {
    struct choice c = {.router = m, .x = x, .num_rows = num_rows, .is_bf16 = is_bf16};
    c.num_parts = (m->num_experts + ROUTED_PART - 1) / ROUTED_PART;
    lay_out(m, num_rows, scratch, &c);
    share_out(logits_part, &c, num_rows * c.num_parts);
    share_out(choose_part, &c, (num_rows + CHOSEN_ROWS - 1) / CHOSEN_ROWS);
    return (struct routing){c.ids, c.weights, num_rows, m->top};
}
