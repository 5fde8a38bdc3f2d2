/* A packed weight and the product by it. */

#pragma once

#include "processor.h"

/* The numbers of a weight and their tables, as quantized.h describes them; engine/model/linear/native_product.py has
   the same kinds. */
enum kind { INT8, INT6, INT4, INT4_BASES, BFLOAT16 };

/* What a product does with a pair of 16 + 16 outputs: nothing, or function(gate) * up, half as many outputs. From GELU
   on they are functions of rows alone (activation.c). CLAMPED is of gates and ups of experts alone. */
enum gate { NO_GATE, SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, LOGISTIC, XIELU, CLAMPED };

/* engine/model/linear/native_product.py has the same fields. */
struct weight {
    const void *packed;
    const uint8_t *tables; /* or NULL, for BFLOAT16 */
    const float *bias;      /* or NULL */
    int64_t num_inputs, num_outputs;
    int64_t kind;  /* `enum kind` */
    int64_t group; /* inputs that share a scale */
    int64_t gate;  /* `enum gate` */
};

/* Returns the bytes of the product's `scratch`. */
INTERNAL int64_t product_scratch(const struct weight *w, int64_t num_rows);

/* Computes out = x W^T, or function(gate) * up; rows are bfloat16 or float32. */
INTERNAL void run_product(const struct weight *w, const void *x, void *out, int64_t num_rows, int64_t is_bf16,
                            char *scratch);
