#include "attention/tiles.h"

#include "attention/state.h"

#ifdef NARROW
#include "attention/products_narrow.h"
#else
#include "attention/products_wide.h"
#endif

VECTOR_CODE INLINE mask seen(const struct visibility *visibility, int64_t key) {
    ints place = lanes_set_int((int)key);
    mask lanes = lanes_at_most(place, visibility->position);
    if (!visibility->window) return lanes;
    ints oldest = lanes_sub_ints(visibility->position, lanes_set_int((int)visibility->window));
    return mask_both(lanes, lanes_above(place, oldest));
}

/* The sum of what 16 keys side by side have been added to: halves onto each other. */
VECTOR_CODE INLINE floats sum_of_totals(floats totals[TOTALS]) {
    for (int half = TOTALS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) totals[i] = lanes_add(totals[i], totals[i + half]);
    return totals[0];
}

/* Scores of one tile to weights, in place or as pairs of bfloat16; peak, total and sums follow the new peak. */
VECTOR_CODE INLINE void soften(const struct visibility *visibility, int64_t begin, int64_t num_keys, float *scores,
                               float scale, float *state, int64_t width, const struct unit *next, int64_t num_bytes,
                               bf16 *weights, int is_masked) {
    const floats floor = lanes_set(FLOOR);
    floats tops[4] = {floor, floor, floor, floor};
    for (int64_t key = 0; key < num_keys; key += 4)
        for (int i = 0; i < 4; i++) {
            floats score = lanes_load(scores + (key + i) * LANES);
            if (is_masked) score = lanes_select(floor, seen(visibility, begin + key + i), score);
            tops[i] = lanes_max(tops[i], score);
        }
    const floats top = lanes_max(lanes_max(tops[0], tops[1]), lanes_max(tops[2], tops[3]));
    const floats factor = lanes_set(scale);
    const floats peak = lanes_load(state);
    const floats new_peak = lanes_max(peak, lanes_mul(top, factor));
    floats totals[TOTALS]; /* of each 16th key, as few lanes have them side by side */
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
    const floats fade = power_of_two(lanes_sub(peak, new_peak), 0);
    lanes_store(state, new_peak);
    lanes_store(state + LANES, lanes_fma(lanes_load(state + LANES), fade, sum_of_totals(totals)));
    if (lanes_differ(fade, lanes_set(1.0f)))
        for (int64_t i = 2; i < width + 2; i++) {
            float *sum = state + i * LANES;
            lanes_store(sum, lanes_mul(lanes_load(sum), fade));
        }
}

/* Add a unit to the states of one or two tiles, or on AVX2 to the first `half_lanes` lanes of one. */
TILE_CODE INLINE void attend_tiles(const struct attention *a, const struct unit *unit, const struct unit *next,
                                   const bf16 *values, const void *queries, const struct visibility *visibilities,
                                   float *states, int is_pair, int64_t half_lanes) {
    float scores[2 * UNIT * LANES] __attribute__((aligned(64)));
    bf16 weights[2 * UNIT * LANES] __attribute__((aligned(64)));
    const int64_t width = round_up(a->value_dim, 32), size = state_size(width);
    const int64_t highest = is_pair ? max(visibilities[0].highest, visibilities[1].highest) : visibilities[0].highest;
    const int64_t num_keys = round_up(min(unit->count, highest + 1 - unit->begin), 32);
    if (num_keys <= 0) return;
    score_unit(a, unit, num_keys, values, queries, scores, is_pair, half_lanes);
    for (int tile = 0; tile <= is_pair; tile++) {
        const struct visibility *visibility = visibilities + tile;
        float *scored = scores + tile * UNIT * LANES, scale = a->scaling * LOG2_E;
        bf16 *weighed = weights + tile * UNIT * LANES;
        if (a->softcap > 0) cap(scored, num_keys * LANES, a->scaling, a->softcap), scale = LOG2_E;
        const int is_masked = unit->begin + num_keys - 1 > visibility->lowest ||
                              (visibility->window && unit->begin <= visibility->highest - visibility->window);
        float *state = states + tile * size;
        const struct unit *later = tile ? NULL : next;
        const int64_t first = unit->begin, bytes = key_bytes(a);
        if (is_masked && IS_BF16(a))
            soften(visibility, first, num_keys, scored, scale, state, width, NULL, 0, weighed, 1);
        else if (is_masked) soften(visibility, first, num_keys, scored, scale, state, width, NULL, 0, NULL, 1);
        else if (IS_BF16(a)) soften(visibility, first, num_keys, scored, scale, state, width, later, bytes, weighed, 0);
        else soften(visibility, first, num_keys, scored, scale, state, width, later, bytes, NULL, 0);
    }
    float *sums = states + 2 * LANES;
    add_unit(a, unit, next, num_keys, values, scores, weights, sums, is_pair, half_lanes);
}

TILE_CODE void attend_one(const struct attention *a, const struct unit *unit, const struct unit *next,
                          const bf16 *values, const void *queries, const struct visibility *visibilities,
                          float *states) {
    attend_tiles(a, unit, next, values, queries, visibilities, states, 0, 0);
}

#ifdef NARROW
TILE_CODE void attend_half(const struct attention *a, const struct unit *unit, const struct unit *next,
                           int64_t num_lanes, const void *queries, const struct visibility *visibilities,
                           float *states) {
    attend_tiles(a, unit, next, NULL, queries, visibilities, states, 0, num_lanes);
}
#endif

TILE_CODE void attend_two(const struct attention *a, const struct unit *unit, const struct unit *next,
                          const bf16 *values, const void *queries, const struct visibility *visibilities,
                          float *states) {
    attend_tiles(a, unit, next, values, queries, visibilities, states, 1, 0);
}
