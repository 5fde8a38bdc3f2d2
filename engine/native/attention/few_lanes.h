/* Few lanes of one tile on AVX-512: of a sequence that decodes, mostly. Keys, and then dims, lie side by side in
   registers in place of lanes, of which a tile would compute more than there are. The products are those of whole
   tiles, each sum in the same order: a lane has the same bits in both.

   The state of such lanes begins as in state.h, with 16 peaks and 16 totals; then come the sums of each lane, [width],
   in bfloat16 with those of alternating fours of 32 dims side by side, as they come apart in registers. */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
/* True where `num_lanes` of a job are few. */
INTERNAL int are_few(const struct attention *a, int64_t num_lanes);

/* The query of a lane, to its place in `queries`, which has room for [FEW_LANES, width] floats. */
INTERNAL void load_few(const struct attention *a, const char *query, int64_t lane, void *queries);

/* Add a unit to the state of `num_lanes`; parts of `next` are fetched meanwhile, if there is one. */
INTERNAL void attend_few(const struct attention *a, const struct unit *unit, const struct unit *next, int64_t num_lanes,
                         const void *queries, const struct visibility *visibility, float *state);

/* `clear` and `merge` of state.h for the lanes whose bits are set in `lanes`. */
INTERNAL void clear_few(float *state, int64_t width, uint16_t lanes);
INTERNAL void merge_few(float *state, const float *later, int64_t width, uint16_t lanes);

/* The sums of a lane times `factor`, to its place in the result. */
INTERNAL void store_few(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place);
#endif
