/* A mixture of experts: a router, experts, and perhaps an MLP that all rows pass. */

#pragma once

#include "mixture/routing.h"

/* engine/model/linear/native_mixture.py has the same fields. */
struct mixture {
    struct experts experts;
    struct router router;
    struct weight latent_in, latent_out;     /* before and after the experts, if their rows have another size */
    struct weight shared_inner, shared_down; /* of the MLP, if it has one */
    const float *shared_gate;                /* [inputs]: its results are multiplied by sigmoid(gate x); or NULL */
    int64_t shared_function;                 /* `enum gate`: of an MLP without gates */
    float shared_factor;                     /* of its results */
};

/* Returns the bytes of `scratch`. */
INTERNAL int64_t mixture_scratch(const struct mixture *m, int64_t num_rows);

/* Computes out [rows, K] of x [rows, K]; the router reads `routed` [rows, K], which may be x or out. `scratch` is
   aligned to cache lines. */
INTERNAL void run_mixture(const struct mixture *m, const void *routed, const void *x, void *out, int64_t num_rows,
                          char *scratch);
