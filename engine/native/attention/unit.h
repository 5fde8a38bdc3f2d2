/* A unit of keys and values, as the tiles of a job read them. */

#pragma once

#include "attention/types.h"
#include "lanes/lanes.h"

struct unit {
    int64_t begin, count; /* keys [begin, begin + count) */
    int64_t slots[UNIT];
    const char *keys[UNIT], *values[UNIT]; /* rows in memory, up to 32 keys; those behind the last are rows of zeros */
    const char *key_tiles[UNIT / 16];      /* 16 rows each, at a stride */
    int64_t key_strides[UNIT / 16];
};

/* Ask for two rows of a unit that comes later: blocks lie anywhere, which no processor can foresee. A few at a time, so
   that they come while others are computed with. */
VECTOR_CODE INLINE void fetch(const char *const *rows, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) {
        _mm_prefetch(rows[0] + at, _MM_HINT_T1);
        _mm_prefetch(rows[1] + at, _MM_HINT_T1);
    }
}

/* Find where the keys and values [begin, stop) lie, at most UNIT of them; those from the span's `tree_start` on follow
   `path`, if there is one. */
WITHIN void load_unit(const struct attention *a, const struct job *job, int64_t begin, int64_t stop,
                        const int32_t *path, struct unit *unit);

/* Have zeros in the place of the first `count` keys and values. */
WITHIN void hide_keys(struct unit *unit, int64_t count);

/* Bring to `room` what the kernel cannot read as it is, and keys that it reads often: rows of a pool lie so far apart
   that they share few sets of the cache. Few lanes read it as it is. */
WITHIN void copy_to_room(const struct attention *a, struct unit *unit, char *room, int is_few, int is_read_once);

#ifdef NARROW
/* Whether so few lanes have keys, and then dims, side by side in their place. */
INLINE int are_side_by_side(const struct attention *a, int64_t num_lanes) {
    return num_lanes > 0 && num_lanes <= FEW_HALF && a->key_dim % 8 == 0 && a->value_dim % 8 == 0;
}
#endif

#ifndef NARROW
/* V^T of the unit as tiles of 16 dims x 32 keys, [keys / 32, dims / 16]. Two tiles share 32 dims, of which the even one
   has 0-3 8-11 16-19 24-27 and the odd one the others: as they come apart in registers. `num_bytes` of each value of
   `next`, if there is one, are fetched meanwhile. */
WITHIN void transpose_values(const struct unit *unit, int64_t dim, const struct unit *next, int64_t num_bytes,
                               bf16 *tiles);

/* Keys and values of the unit, in bfloat16, to `wide` as floats, zeros up to whole widths: `unit` has those from then
   on. Parts of `next`, if there is one, are fetched meanwhile. */
WITHIN void widen_rows(const struct attention *a, struct unit *unit, const struct unit *next, float *wide);
#endif
