/* Few lanes of one tile on AVX-512, usually of a decoding sequence. A whole tile would compute lanes that do not exist,
   so registers hold adjacent keys, and then dims, instead of lanes. The products and the order of each sum are the same
   as for whole tiles, so a lane has the same bits in both.

   The state starts as in state.h, with 16 peaks and 16 totals. The sums of each lane follow, [width]. In bfloat16, 32
   dims are stored as alternating fours, the order that unpacking in registers gives. */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
/* True if a job of `num_lanes` lanes is computed here. */
INTERNAL int are_few(const struct attention *a, int64_t num_lanes);

/* Loads a lane's query into `queries`, a buffer of [FEW_LANES, width] floats. */
INTERNAL void load_few(const struct attention *a, const char *query, int64_t lane, void *queries);

/* Adds a unit to the state of `num_lanes` lanes. Meanwhile, parts of `next` are prefetched, unless it is NULL. */
INTERNAL void attend_few(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_lanes,
                         const void *queries, const struct visibility *visibility, float *state);

/* `clear` and `merge` of state.h for the lanes whose bits are set in `lanes`. */
INTERNAL void clear_few(float *state, int64_t width, uint16_t lanes);
INTERNAL void merge_few(float *state, const float *later, int64_t width, uint16_t lanes);

/* Stores the sums of a lane times `factor` in the result. */
INTERNAL void store_few(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place);
#endif
