/* The product by a packed weight of any kind. */

#include "products/products.h"
#include "products/weight.h"

int64_t product_scratch(const struct weight *w, int64_t num_rows) {
    return w->kind == BFLOAT16 ? 0 : outrider_quantized_scratch(num_rows, w->num_inputs);
}

static void multiply_quantized(const struct weight *w, const void *x, void *out, int64_t num_rows, int64_t is_bf16,
                               char *scratch) {
    const int kind = (int)w->kind, group = (int)w->group, gate = (int)w->gate;
    if (is_bf16)
        outrider_quantized_product(x, w->packed, w->tables, w->bias, out, num_rows, w->num_inputs, w->num_outputs, kind,
                                   group, gate, (int8_t *)scratch);
    else
        outrider_quantized_float_product(x, w->packed, w->tables, w->bias, out, num_rows, w->num_inputs, w->num_outputs,
                                         kind, group, gate, (int8_t *)scratch);
}

void run_product(const struct weight *w, const void *x, void *out, int64_t num_rows, int64_t is_bf16, char *scratch) {
    const int64_t num_inputs = w->num_inputs, num_outputs = w->num_outputs;
    if (w->kind != BFLOAT16)
        multiply_quantized(w, x, out, num_rows, is_bf16, scratch);
    else if (is_bf16 && w->gate)
        outrider_gated_product(x, w->packed, w->bias, out, num_rows, num_inputs, num_outputs, w->gate);
    else if (is_bf16)
        outrider_product(x, w->packed, w->bias, out, num_rows, num_inputs, num_outputs);
    else if (w->gate)
        outrider_gated_float_product(x, w->packed, w->bias, out, num_rows, num_inputs, num_outputs, w->gate);
    else
        outrider_float_product(x, w->packed, w->bias, out, num_rows, num_inputs, num_outputs);
}
