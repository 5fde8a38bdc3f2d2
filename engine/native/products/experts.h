/* The experts of a mixture, with packed weights. */

#pragma once

#include "products/weight.h"

/* engine/model/linear/packed_experts.py has the same fields. */
struct experts {
    struct weight in, out; /* the outputs of all experts, one expert after the other; num_outputs are of one expert */
    int64_t num_experts;
    int64_t gate;    /* `enum gate`, of gates and ups; of rows alone where `in` has as many outputs as `out` has inputs */
    int64_t is_bf16; /* rows and results are bfloat16, or else float32 */
    float factors[2]; /* alpha and limit of CLAMPED */
};

/* The rows of a call and their experts. */
struct routing {
    const int64_t *ids;   /* [rows, top]; rows skip ids that are not below num_experts */
    const float *weights; /* [rows, top] */
    int64_t num_rows, top;
};

/* Returns the bytes of `scratch` for so many pairs of a row and an expert. */
INTERNAL int64_t experts_scratch(const struct experts *e, int64_t num_pairs);

/* Computes out [rows, K] = sum of weight * W_out (function(gate) * up) over the experts of each row of x [rows, K], where
   gate and up are W_in x; without gates W_out function(W_in x). Inputs and outputs are multiples of 32. `scratch` is aligned to cache lines. */
INTERNAL void run_experts(const struct experts *e, const struct routing *r, const void *x, void *out, char *scratch);
