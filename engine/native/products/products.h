/* The products by packed weights, declared for other files of the library. */

#pragma once

#include "processor.h"

void outrider_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                      int64_t num_inputs, int64_t num_outputs);
void outrider_gated_product(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs);
void outrider_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                            int64_t num_inputs, int64_t num_outputs);
void outrider_gated_float_product(const float *x, const bf16 *weight, const float *bias, float *out, int64_t num_rows,
                                  int64_t num_inputs, int64_t num_outputs);
void outrider_quantized_product(const bf16 *x, const uint8_t *weight, const uint16_t *tables, const float *bias,
                                bf16 *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int bits,
                                int group, int is_gated, int8_t *scratch);
void outrider_quantized_float_product(const float *x, const uint8_t *weight, const uint16_t *tables, const float *bias,
                                      float *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int bits,
                                      int group, int is_gated, int8_t *scratch);

/* Returns the bytes of `scratch`. */
int64_t outrider_quantized_scratch(int64_t num_rows, int64_t num_inputs);
