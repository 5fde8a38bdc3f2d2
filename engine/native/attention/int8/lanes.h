/* Lanes over an int8 pool on AVX-512. The pool's numbers are multiplied as int8, without conversion.

   A query becomes 16-bit integers with a scale. So do the weights of a unit, each times the scale of its value. They
   lose less precision than in bfloat16. VNNI multiplies four 8-bit numbers at once, so each integer is split into a
   high and a low byte, and products with keys and values are summed exactly:

       score = scale of q * scale of k * (256 high(q) + low(q)) k
       sums += scale of w * (256 high(w) + low(w)) v

   As in few_lanes.h, registers hold adjacent keys, and then dims, and each lane has its own sums, for any number of
   lanes. (With AMX, tiles.h computes many lanes.) */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
enum { INT8_DIMS = 64 /* dims that are read together */ };

/* A query as 16-bit integers, split into bytes. */
struct int8_query {
    int8_t high[MAX_DIM], low[MAX_DIM]; /* zeros up to whole INT8_DIMS */
    float scale;
    int32_t offset; /* added to the sums, since stored keys are shifted by 128 */
} __attribute__((aligned(64)));

/* A unit in the layout of VNNI: four adjacent dims for each of 16 keys, and four adjacent values for each of 16
   dims. */
struct int8_unit {
    uint8_t keys[UNIT * MAX_DIM]; /* [UNIT / 16, dims / 4, 16, 4], shifted by 128 */
    int8_t values[UNIT * MAX_DIM]; /* [dims / INT8_DIMS, UNIT / 4, INT8_DIMS, 4], dims in the order of `in_order` */
    float key_scales[UNIT], value_scales[UNIT];
} __attribute__((aligned(64)));

INTERNAL void load_int8_query(const struct attention *a, const char *query, struct int8_query *to);

/* Copies a unit to `to`. Meanwhile, `next` is prefetched, unless it is NULL. */
INTERNAL void take_int8_unit(const struct attention *a, const struct unit *unit, const struct unit *next,
                             struct int8_unit *to);

/* Adds a unit to the state of `num_lanes` lanes, at most LANES. The state is as in few_lanes.h, with dims in order. */
INTERNAL void attend_int8(const struct attention *a, const struct unit *unit, const struct int8_unit *numbers,
                          int64_t num_lanes, const struct int8_query *queries, const struct visibility *visibility,
                          float *state);

/* Stores the sums of a lane times `factor` in the result. */
INTERNAL void store_int8(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place);
#endif
