/* The operations between products, declared for other files of the library. */

#pragma once

#include "processor.h"

void outrider_add_norm(const void *hidden, void *sum, const void *weight, void *out, int64_t num_rows, int64_t size,
                       float epsilon, float scale, int is_centered, int has_bias, int is_bf16, int has_bf16_sum,
                       int has_bf16_weight);
void outrider_norm_heads(void *x, const void *weight, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                         float epsilon, int is_centered, int has_bias, int is_bf16, int has_bf16_weight);
void outrider_rotate(void *x, const void *table, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t dim,
                     int64_t num_dims, int in_pairs, int is_bf16);
