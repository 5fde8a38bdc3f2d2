/* What recurrent layers compute between their two products. */

#pragma once

#include <stdint.h>

enum mixer_kind { SHORT_CONVOLUTION, MAMBA2, GATED_DELTA };

/* engine/recurrent/native_mixer.py has the same fields here and below. */
struct mixer {
    const float *weight, *bias;        /* of the convolution: [num_kept + 1, width], and [width] or NULL */
    const float *rates, *step_biases;  /* [heads]: the state decays by e^(rate step) */
    const float *skips;                /* [heads], or NULL */
    const float *norm;                 /* [heads * head_width], or NULL */
    int64_t kind;                      /* `enum mixer_kind` */
    int64_t num_kept, width;           /* rows that the convolution looks back, and their numbers */
    int64_t heads, groups;             /* heads of a group share b and c, or key and query */
    int64_t head_width, depth;         /* of a head's state */
    int64_t norm_size;                 /* numbers that are normed together */
    int64_t gates_first;               /* the gate comes before the norm */
    int64_t inputs_at, gates_at, steps_at, betas_at; /* in a row of the first product, if that has all of them */
    int64_t is_bf16;
    float epsilon, least_step, most_step;
    float gate_factor, step_factor;    /* of gates and steps in a row of the first product */
};

/* A pass. So many numbers are between two rows of an input. */
struct mixed_rows {
    const void *inputs;                   /* of the convolution */
    const void *gates;                    /* [T, width] of the output */
    const void *steps, *betas;            /* [T, heads]; a short convolution has factors of its inputs as `betas` */
    int64_t input_row, gate_row, step_row, beta_row;
    void *out;                            /* [T, heads * head_width], or [T, width] of a short convolution */
    void *rows;                           /* the pool: [slots, num_kept, width], of the dtype of rows */
    float *matrices;                      /* [slots, heads, head_width, depth], or [slots, heads, depth, head_width] */
    const int64_t *before, *ends, *after; /* slots and last rows by span; slots by row, or -1 */
    int64_t num_spans, num_rows;
};

/* Returns the floats of `scratch`. */
int64_t outrider_mixer_scratch(const struct mixer *mixer, int64_t num_rows);

void outrider_mix(const struct mixer *mixer, const struct mixed_rows *rows, float *scratch);
