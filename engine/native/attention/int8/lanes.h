/* Lanes over a pool of int8 on AVX-512: its numbers are multiplied as they lie there.

   A query and the weights of a unit, each times the scale of its value, become whole numbers of 16 bits with a scale of
   their own: less of them is lost than in bfloat16. VNNI multiplies four numbers of 8 bits at once, so each is a high
   and a low byte, and products with keys and values are summed exactly:

       score = scale of q * scale of k * (256 high(q) + low(q)) k
       sums += scale of w * (256 high(w) + low(w)) v

   Keys, and then dims, lie side by side in registers, and each lane has sums of its own, as in few_lanes.h, whatever
   the number of lanes. (Many lanes of a processor with AMX: tiles.h.) */

#pragma once

#include "attention/tiles.h"

#ifndef NARROW
enum { INT8_DIMS = 64 /* that are read together */ };

/* A query, or 16 bits of each of its numbers. */
struct int8_query {
    int8_t high[MAX_DIM], low[MAX_DIM]; /* zeros up to whole INT8_DIMS */
    float scale;
    int32_t offset; /* of the sums, as keys are 128 more than they are */
} __attribute__((aligned(64)));

/* A unit of keys and values as VNNI takes them: four dims of 16 keys, and four values of 16 dims, side by side. */
struct int8_unit {
    uint8_t keys[UNIT * MAX_DIM]; /* [UNIT / 16, dims / 4, 16, 4], 128 more than they are */
    int8_t values[UNIT * MAX_DIM]; /* [dims / INT8_DIMS, UNIT / 4, INT8_DIMS, 4], dims in the order of `in_order` */
    float key_scales[UNIT], value_scales[UNIT];
} __attribute__((aligned(64)));

INTERNAL void load_int8_query(const struct attention *a, const char *query, struct int8_query *to);

/* Bring a unit to `to`; that of `next`, if there is one, is fetched meanwhile. */
INTERNAL void take_int8_unit(const struct attention *a, const struct unit *unit, const struct unit *next,
                             struct int8_unit *to);

/* Add a unit to the state of `num_lanes`, LANES at most; the state is that of few_lanes.h, with dims in their order. */
INTERNAL void attend_int8(const struct attention *a, const struct unit *unit, const struct int8_unit *numbers,
                          int64_t num_lanes, const struct int8_query *queries, const struct visibility *visibility,
                          float *state);

/* The sums of a lane times `factor`, to its place in the result. */
INTERNAL void store_int8(const struct attention *a, const float *state, int64_t lane, float factor, int64_t place);
#endif
