/* The softmax state of lanes over the keys so far: [peak | total | sums, dim by dim], 16 lanes each. */

#pragma once

#include "attention/types.h"

/* Returns 2^x with a relative error of 2e-9, or 9e-5 if `is_rough`, enough for bfloat16 weights; exactly 1 at 0. */
VECTOR_CODE INLINE floats power_of_two(floats x, int is_rough) {
    floats rest = lanes_fraction(x); /* [0, 1) */
    floats sum;
    if (is_rough) {
        sum = lanes_set(0.07706706353f);
        sum = lanes_fma(sum, rest, lanes_set(0.2276449539f));
        sum = lanes_fma(sum, rest, lanes_set(0.6951168019f));
    } else {
        sum = lanes_set(2.161291893e-4f);
        sum = lanes_fma(sum, rest, lanes_set(1.246784513e-3f));
        sum = lanes_fma(sum, rest, lanes_set(9.675451731e-3f));
        sum = lanes_fma(sum, rest, lanes_set(5.548528052e-2f));
        sum = lanes_fma(sum, rest, lanes_set(0.2402293056f));
        sum = lanes_fma(sum, rest, lanes_set(0.6931470444f));
    }
    return lanes_scale(lanes_fma(sum, rest, lanes_set(1.0f)), x);
}

/* Computes cap tanh(score * scaling / cap), with an error of 1e-7 of the cap. */
VECTOR_CODE INLINE void cap(float *scores, int64_t count, floats scaling, float softcap) {
    const floats one = lanes_set(1.0f);
    const floats factor = lanes_div(lanes_mul(lanes_set(2 * LOG2_E), scaling), lanes_set(softcap));
    const floats bound = lanes_set(60.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = lanes_mul(lanes_load(scores + i), factor);
        x = lanes_max(lanes_sub(lanes_zero(), bound), lanes_min(bound, x)); /* NaN stays NaN */
        floats grown = power_of_two(x, 0);
        floats ratio = lanes_div(lanes_sub(grown, one), lanes_add(grown, one));
        lanes_store(scores + i, lanes_mul(ratio, lanes_set(softcap)));
    }
}

static inline int64_t state_size(int64_t width) { return (width + 2) * LANES; }

VECTOR_CODE INLINE void clear(float *state, int64_t width, mask lanes) {
    lanes_store_some(state, lanes, lanes_set(FLOOR));
    for (int64_t i = 1; i < width + 2; i++) lanes_store_some(state + i * LANES, lanes, lanes_zero());
}

/* Merges the state `later` into `state`, for some lanes. */
VECTOR_CODE INLINE void merge(float *state, const float *later, int64_t width, mask lanes) {
    floats peak = lanes_load(state), peak_later = lanes_load(later);
    floats top = lanes_max(peak, peak_later);
    floats factor = power_of_two(lanes_sub(peak, top), 0);
    floats factor_later = power_of_two(lanes_sub(peak_later, top), 0);
    lanes_store_some(state, lanes, top);
    for (int64_t i = 1; i < width + 2; i++) {
        floats old = lanes_mul(factor, lanes_load(state + i * LANES));
        floats sum = lanes_fma(factor_later, lanes_load(later + i * LANES), old);
        lanes_store_some(state + i * LANES, lanes, sum);
    }
}
