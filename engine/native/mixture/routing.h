/* The choice of experts. */

#pragma once

#include "products/experts.h"

/* SPARSE is the sparse mixer of Phi-3.5 (arXiv:2409.12136): each expert in turn has its weight in a softmax of those that
   are left and near it, (best - logit) / max(|logit|, best) <= tolerance. */
enum scores { SOFTMAX, SIGMOID, SPARSE };

/* Chooses the `top` experts of a row by scores of its products with `weight`. engine/model/linear/native_mixture.py has
   the same fields. */
struct router {
    const void *weight;  /* [experts, inputs], */
    int64_t is_bf16;     /* or else float32 */
    const float *logit_biases; /* [experts], of the products, or NULL */
    const float *biases; /* [experts], of scores that are compared but not of weights, or NULL */
    const float *factors; /* [experts], of weights, or NULL */
    int64_t num_experts, num_inputs, top;
    int64_t scores;                 /* `enum scores` of the products */
    int64_t num_groups, top_groups; /* of so many groups of neighbours, experts of the best are chosen */
    int64_t has_group_sums;         /* groups are compared by their two best experts, or else by the best */
    int64_t is_normalized;          /* the weights of a row's experts add up to 1, before the factor */
    float epsilon, factor;          /* of the sum, and of the weights */
    float tolerance;                /* of SPARSE */
};

/* Returns the bytes of `scratch`. */
INTERNAL int64_t routing_scratch(const struct router *router, int64_t num_rows);

/* Returns the experts of x [rows, inputs], in `scratch`. */
INTERNAL struct routing choose_experts(const struct router *router, const void *x, int64_t num_rows, int is_bf16,
                                       char *scratch);
