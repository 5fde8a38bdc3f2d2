/* Many lanes over an int8 pool with AMX: the exact sums of lanes.h, with adjacent lanes. Each lane has the same bits as
   there. The state of a tile is as in state.h. */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
/* The queries of a tile, with four adjacent dims per lane. */
struct int8_queries {
    int8_t high[MAX_DIM * LANES], low[MAX_DIM * LANES];
    float scales[LANES];
} __attribute__((aligned(64)));

/* A unit as rows of keys, padded with zeros to whole INT8_DIMS, and rows of the dims of its values. */
struct int8_rows {
    int8_t keys[UNIT * MAX_DIM];   /* [UNIT, dims] */
    int8_t values[MAX_DIM * UNIT]; /* [dims, UNIT], the dims in the order of the state */
    float key_scales[UNIT], value_scales[UNIT];
} __attribute__((aligned(64)));

/* True if AMX is faster for so many lanes. */
INTERNAL int are_tiled(int64_t num_lanes);

/* Loads the queries of a tile's lanes, at most 16. */
INTERNAL void load_int8_queries(const struct attention *a, const char *const *queries, int64_t num_lanes,
                                struct int8_queries *to);

/* Copies a unit to `to`. Meanwhile, `next` is prefetched, unless it is NULL. */
INTERNAL void take_int8_rows(const struct attention *a, const struct unit *unit, const struct unit *next,
                             struct int8_rows *to);

/* Adds a unit to the state of a tile. */
INTERNAL void attend_int8_tile(const struct attention *a, const struct unit *unit, const struct int8_rows *rows,
                               const struct int8_queries *queries, const struct visibility *visibility, float *state);
#endif
