#include "attention/tiles.h"

#include "attention/softmax.h"

#ifdef NARROW
#include "attention/products_narrow.h"
#else
#include "attention/products_wide.h"
#endif

/* Adds a unit to the states of one or two tiles, or on AVX2 to the first `half_lanes` lanes of one tile. */
TILE_CODE INLINE void attend_tiles(const struct attention *a, const struct unit *unit, const struct unit *next,
                                   const bf16 *values, const void *queries, const struct visibility *visibilities,
                                   float *states, int is_pair, int64_t half_lanes) {
    float scores[2 * UNIT * LANES] __attribute__((aligned(64)));
    bf16 weights[2 * UNIT * LANES] __attribute__((aligned(64)));
    const int64_t width = round_up(a->value_dim, 32), size = state_size(width);
    const int64_t highest = is_pair ? max(visibilities[0].highest, visibilities[1].highest) : visibilities[0].highest;
    const int64_t num_keys = round_up(min(unit->count, highest + 1 - unit->begin), 32);
    if (num_keys <= 0) return;
    /* Scores, then online softmax per tile, then weighted values. */
    score_unit(a, unit, num_keys, values, queries, scores, is_pair, half_lanes);
    for (int tile = 0; tile <= is_pair; tile++) {
        const struct visibility *visibility = visibilities + tile;
        float *scored = scores + tile * UNIT * LANES;
        bf16 *weighed = weights + tile * UNIT * LANES;
        if (a->softcap > 0) cap(scored, num_keys * LANES, lanes_set(a->scaling), a->softcap);
        const floats factor = lanes_set(LOG2_E * (a->softcap > 0 ? 1 : a->scaling));
        const int is_masked = hides(visibility, unit->begin, num_keys);
        float *state = states + tile * size;
        const struct unit *later = tile ? NULL : next;
        const int64_t first = unit->begin, bytes = key_bytes(a);
        if (is_masked && IS_BF16(a))
            soften(visibility, first, num_keys, scored, factor, state, width, NULL, 0, weighed, 1);
        else if (is_masked) soften(visibility, first, num_keys, scored, factor, state, width, NULL, 0, NULL, 1);
        else if (IS_BF16(a))
            soften(visibility, first, num_keys, scored, factor, state, width, later, bytes, weighed, 0);
        else soften(visibility, first, num_keys, scored, factor, state, width, later, bytes, NULL, 0);
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
