/* Computes one or two tiles of lanes over one unit: scores, their softmax, and the weighted sums of values. */

#pragma once

#include "attention/unit.h"

/* The keys that the lanes of a tile see. */
struct visibility {
    ints position; /* -1: the lane sees no key */
    int64_t lowest, highest;
    int64_t window;
};

/* Adds a unit to the state of one tile, or of two tiles with a single read of each key. `values` are the unit's
   transposed values, for bfloat16. Meanwhile, parts of `next` are prefetched, unless it is NULL. */
WITHIN void attend_one(const struct attention *a, const struct unit *unit, const struct unit *next,
                         const bf16 *values, const void *queries, const struct visibility *visibilities, float *states);
WITHIN void attend_two(const struct attention *a, const struct unit *unit, const struct unit *next,
                         const bf16 *values, const void *queries, const struct visibility *visibilities, float *states);

#ifdef NARROW
/* `attend_one` for at most half a tile; the other half is not computed. (On AVX-512: few_lanes.h.) */
WITHIN void attend_half(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_lanes,
                         const void *queries, const struct visibility *visibilities, float *states);
#endif
