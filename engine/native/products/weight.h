/* A packed weight and the product by it. */

#pragma once

#include "processor.h"

enum kind { INT4 = 4, INT8 = 8, BFLOAT16 = 16 };
/* What a product does with a pair of 16 + 16 outputs: nothing, or function(gate) * up, half as many outputs. The last
   three are functions of `outrider_activate` alone. */
enum gate { NO_GATE, SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };

/* engine/model/linear/native_product.py has the same fields. */
struct weight {
    const void *packed;
    const uint16_t *tables; /* for INT4 and INT8 */
    const float *bias;      /* or NULL */
    int64_t num_inputs, num_outputs;
    int64_t kind;
    int64_t group;    /* inputs that share a scale, for INT4 and INT8 */
    int64_t gate;     /* `enum gate` */
};
