/* Many lanes over a pool of int8 by AMX: the exact sums of lanes.h with lanes side by side, so that each lane has the
   bits that it has there. The state of a tile is that of state.h. */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
/* The queries of a tile, of which each four dims of all lanes lie side by side. */
struct int8_queries {
    int8_t high[MAX_DIM * LANES], low[MAX_DIM * LANES];
    float scales[LANES];
} __attribute__((aligned(64)));

/* A unit as rows of keys, zeros up to whole INT8_DIMS, and of dims of its values. */
struct int8_rows {
    int8_t keys[UNIT * MAX_DIM];   /* [UNIT, dims] */
    int8_t values[MAX_DIM * UNIT]; /* [dims, UNIT], the dims in the order of the state */
    float key_scales[UNIT], value_scales[UNIT];
} __attribute__((aligned(64)));

/* True where AMX takes less time for so many lanes. */
INTERNAL int are_tiled(int64_t num_lanes);

/* The queries of the lanes of a tile, at most 16. */
INTERNAL void load_int8_queries(const struct attention *a, const char *const *queries, int64_t num_lanes,
                                struct int8_queries *to);

/* Bring a unit to `to`; that of `next`, if there is one, is fetched meanwhile. */
INTERNAL void take_int8_rows(const struct attention *a, const struct unit *unit, const struct unit *next,
                             struct int8_rows *to);

/* Add a unit to the state of a tile. */
INTERNAL void attend_int8_tile(const struct attention *a, const struct unit *unit, const struct int8_rows *rows,
                               const struct int8_queries *queries, const struct visibility *visibility, float *state);
#endif
