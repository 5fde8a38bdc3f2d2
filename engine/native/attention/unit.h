/* A unit of keys and values, the input of a job's tiles. */

#pragma once

#include "attention/types.h"
#include "lanes/lanes.h"

struct unit {
    int64_t begin, count; /* keys [begin, begin + count) */
    int64_t slots[UNIT];
    const char *keys[UNIT], *values[UNIT]; /* rows in memory; rows of zeros pad them to a multiple of 32 */
    const char *key_tiles[UNIT / 16];      /* 16 rows each, at a stride */
    int64_t key_strides[UNIT / 16];
};

/* Prefetches two rows of a later unit. Hardware cannot predict the addresses of blocks. Prefetching a few rows at a
   time overlaps the loads with computation. */
VECTOR_CODE INLINE void fetch(const char *const *rows, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) {
        _mm_prefetch(rows[0] + at, _MM_HINT_T1);
        _mm_prefetch(rows[1] + at, _MM_HINT_T1);
    }
}

/* Finds the addresses of the keys and values [begin, stop), at most UNIT of them. Those from the span's `tree_start` on
   follow `path`, unless it is NULL. */
WITHIN void load_unit(const struct attention *a, const struct job *job, int64_t begin, int64_t stop,
                        const int32_t *path, struct unit *unit);

/* Replaces the first `count` keys and values by zeros. */
WITHIN void hide_keys(struct unit *unit, int64_t count);

/* Copies rows to `scratch` that the kernel cannot read in the pool, and keys of several heads that it reads often: a
   head's rows are so far apart that they share few cache sets. Few lanes read the pool directly. */
WITHIN void copy_to_scratch(const struct attention *a, struct unit *unit, char *scratch, int is_few, int is_read_once);

#ifdef NARROW
/* True if the lanes are so few that registers hold keys, and then dims, instead of lanes. */
INLINE int are_side_by_side(const struct attention *a, int64_t num_lanes) {
    return num_lanes > 0 && num_lanes <= FEW_HALF && a->key_dim % 8 == 0 && a->value_dim % 8 == 0;
}
#endif

#ifndef NARROW
/* Stores V^T of the unit as tiles of 16 dims x 32 keys, [keys / 32, dims / 16]. Two tiles share 32 dims: the even one
   has 0-3 8-11 16-19 24-27, the odd one the others, which is the order that unpacking in registers gives. Meanwhile,
   `num_bytes` of each value of `next` are prefetched, unless it is NULL. */
WITHIN void transpose_values(const struct unit *unit, int64_t dim, const struct unit *next, int64_t num_bytes,
                               bf16 *tiles);

/* Converts the unit's keys and values from bfloat16 to floats in `wide`, padded with zeros, and points `unit` to them.
   Meanwhile, parts of `next` are prefetched, unless it is NULL. */
WITHIN void widen_rows(const struct attention *a, struct unit *unit, const struct unit *next, float *wide);
#endif
