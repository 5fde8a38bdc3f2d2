/* A mixture of experts with packed weights. */

#pragma once

#include "products/weight.h"

/* engine/model/linear/packed_experts.py has the same fields here and below. */
struct experts {
    struct weight in, out; /* the outputs of all experts, one expert after the other; num_outputs are of one expert */
    int64_t num_experts;
    int64_t is_bf16; /* rows and results are bfloat16, or else float32 */
};

/* Experts, and a router that chooses the `top` of each row. */
struct mixture {
    struct experts experts;
    const void *router; /* [experts, inputs], */
    int64_t router_is_bf16; /* or else float32 */
    int64_t top;
    int64_t is_normalized; /* the weights of a row's experts add up to 1 */
};

/* Returns the bytes of `scratch`. */
INTERNAL int64_t mixture_scratch(const struct mixture *m, int64_t num_rows);

/* Computes out [rows, K] of x [rows, K]. `scratch` is aligned to cache lines. */
INTERNAL void run_mixture(const struct mixture *m, const void *x, void *out, int64_t num_rows, char *scratch);
