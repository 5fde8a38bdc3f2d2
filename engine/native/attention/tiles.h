/* One or two tiles of lanes over one unit: scores, their softmax, and the weighted sums of values. */

#pragma once

#include "attention/unit.h"

/* The keys that the lanes of a tile see. */
struct visibility {
    ints position; /* -1: a lane that sees nothing */
    int64_t lowest, highest;
    int64_t window;
};

/* Add a unit to the state of a tile, or to those of two, of which each key is then read once. `values` are the unit's,
   transposed, for bfloat16; parts of `next` are fetched meanwhile, if there is one. */
WITHIN void attend_one(const struct attention *a, const struct unit *unit, const struct unit *next,
                         const bf16 *values, const void *queries, const struct visibility *visibilities, float *states);
WITHIN void attend_two(const struct attention *a, const struct unit *unit, const struct unit *next,
                         const bf16 *values, const void *queries, const struct visibility *visibilities, float *states);

#ifdef NARROW
/* `attend_one` for at most half a tile, as the other half would compute nothing. (On AVX-512: few_lanes.h.) */
WITHIN void attend_half(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_lanes,
                         const void *queries, const struct visibility *visibilities, float *states);
#endif
