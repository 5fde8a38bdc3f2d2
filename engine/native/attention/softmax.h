/* The softmax of a tile of lanes over a unit. */

#pragma once

#include "attention/state.h"
#include "attention/tiles.h"

VECTOR_CODE INLINE mask seen(const struct visibility *visibility, int64_t key) {
    ints place = lanes_set_int((int)key);
    mask lanes = lanes_at_most(place, visibility->position);
    if (!visibility->window) return lanes;
    ints oldest = lanes_sub_ints(visibility->position, lanes_set_int((int)visibility->window));
    return mask_both(lanes, lanes_above(place, oldest));
}

/* True if some of the keys are hidden from some lane. */
INLINE int hides(const struct visibility *visibility, int64_t begin, int64_t num_keys) {
    if (begin + num_keys - 1 > visibility->lowest) return 1;
    return visibility->window && begin <= visibility->highest - visibility->window;
}

/* Returns the sum of the partial totals of 16 adjacent keys. It adds halves to each other. */
VECTOR_CODE INLINE floats sum_of_totals(floats totals[TOTALS]) {
    for (int half = TOTALS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) totals[i] = lanes_add(totals[i], totals[i + half]);
    return totals[0];
}

/* Turns the scores of one tile, times each lane's factor, into weights, in place or as pairs of bfloat16. Rescales
   peak, total and sums to the new peak. Meanwhile, `num_bytes` of each row of `next` are prefetched, unless it is
   NULL. */
VECTOR_CODE INLINE void soften(const struct visibility *visibility, int64_t begin, int64_t num_keys, float *scores,
                               floats factor, float *state, int64_t width, const struct unit *next, int64_t num_bytes,
                               bf16 *weights, int is_masked) {
    /* Find the new peak of each lane. */
    const floats floor = lanes_set(FLOOR);
    floats tops[4] = {floor, floor, floor, floor};
    for (int64_t key = 0; key < num_keys; key += 4)
        for (int i = 0; i < 4; i++) {
            floats score = lanes_load(scores + (key + i) * LANES);
            if (is_masked) score = lanes_select(floor, seen(visibility, begin + key + i), score);
            tops[i] = lanes_max(tops[i], score);
        }
    const floats top = lanes_max(lanes_max(tops[0], tops[1]), lanes_max(tops[2], tops[3]));
    const floats peak = lanes_load(state);
    const floats new_peak = lanes_max(peak, lanes_mul(top, factor));
    /* Compute the weights and their totals, one total per 16th key, as few_lanes.c does. */
    floats totals[TOTALS];
    for (int i = 0; i < TOTALS; i++) totals[i] = lanes_zero();
    for (int64_t key = 0; key < num_keys; key += TOTALS)
#pragma GCC unroll 8
        for (int i = 0; i < TOTALS; i += 2) {
            float *at = scores + (key + i) * LANES;
            if (next && key + i < next->count) {
                fetch(next->keys + key + i, num_bytes);
                if (!weights) fetch(next->values + key + i, num_bytes);
            }
            floats even = lanes_fms(lanes_load(at), factor, new_peak);
            floats odd = lanes_fms(lanes_load(at + LANES), factor, new_peak);
            even = power_of_two(even, weights != NULL);
            odd = power_of_two(odd, weights != NULL);
            if (is_masked) {
                even = lanes_keep(seen(visibility, begin + key + i), even);
                odd = lanes_keep(seen(visibility, begin + key + i + 1), odd);
            }
            totals[i] = lanes_add(totals[i], even);
            totals[i + 1] = lanes_add(totals[i + 1], odd);
            if (weights) {
                store_pairs(weights + (key + i) * LANES, even, odd);
            } else {
                lanes_store(at, even);
                lanes_store(at + LANES, odd);
            }
        }
    /* Rescale the state if a peak has changed. */
    const floats fade = power_of_two(lanes_sub(peak, new_peak), 0);
    lanes_store(state, new_peak);
    lanes_store(state + LANES, lanes_fma(lanes_load(state + LANES), fade, sum_of_totals(totals)));
    if (lanes_differ(fade, lanes_set(1.0f)))
        for (int64_t i = 2; i < width + 2; i++) {
            float *sum = state + i * LANES;
            lanes_store(sum, lanes_mul(lanes_load(sum), fade));
        }
}
