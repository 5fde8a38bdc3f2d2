/* The products by packed weights, declared for other files of the library. */

#pragma once

#include "processor.h"

void outrider_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                      int64_t num_inputs, int64_t num_outputs);
void outrider_gated_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs, int64_t gate);
void outrider_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs);
void outrider_gated_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                                  int64_t num_inputs, int64_t num_outputs, int64_t gate);
void outrider_quantized_product(const bf16 *x, const uint8_t *weight, const uint8_t *tables, const float *bias,
                                bf16 *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int kind,
                                int group, int gate, int8_t *scratch);
void outrider_quantized_float_product(const float *x, const uint8_t *weight, const uint8_t *tables, const float *bias,
                                      float *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int kind,
                                      int group, int gate, int8_t *scratch);
void outrider_scale(void *x, int64_t num_numbers, float factor, int is_bf16);
void outrider_activate(void *x, int64_t num_numbers, int function, const float *factors, int is_bf16);
void outrider_gate_rows(const void *gates, void *x, int64_t num_rows, int64_t size, int64_t stride, int function,
                        int is_bf16);

/* The part of `outrider_product`, or of `outrider_float_product`, that one thread computes: all rows, at most
   PART_ROWS, by the pairs [first, last) of 32 outputs. */
enum { PART_ROWS = 128 };
INTERNAL void product_part(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                           int64_t num_inputs, int64_t num_outputs, int64_t first, int64_t last);
INTERNAL void float_product_part(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs, int64_t first, int64_t last);

/* Returns the bytes of `scratch`. */
int64_t outrider_quantized_scratch(int64_t num_rows, int64_t num_inputs);
