/* A unit of keys and values, as the tiles of a job read them. */

#pragma once

#include "attention_types.h"

struct unit {
    int64_t begin, count; /* keys [begin, begin + count) */
    int64_t slots[UNIT];
    const char *keys[UNIT], *values[UNIT]; /* rows in memory; those behind the last key are rows of zeros */
    const char *key_tiles[UNIT / 16];      /* 16 rows each, at a stride */
    int64_t key_strides[UNIT / 16];
};

/* rows[i] holds M[i, 0 .. 15] -> M[0 .. 15, i]. */
AVX INLINE void transpose(__m512i rows[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

/* Ask for two rows of a unit that comes later: blocks lie anywhere, which no processor can foresee. A few at a time, so
   that they come while others are computed with. */
AVX INLINE void fetch(const char *const *rows, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) {
        _mm_prefetch(rows[0] + at, _MM_HINT_T1);
        _mm_prefetch(rows[1] + at, _MM_HINT_T1);
    }
}

/* Find where the keys and values [begin, stop) lie, at most UNIT of them; those from the span's `tree_start` on follow
   `path`, if there is one. */
INTERNAL void load_unit(const struct attention *a, const struct job *job, int64_t begin, int64_t stop,
                        const int32_t *path, struct unit *unit);

/* Bring to `room` what the kernel cannot read as it is, and keys that it reads often: rows of a pool lie so far apart
   that they share few sets of the cache. */
INTERNAL void copy_to_room(const struct attention *a, struct unit *unit, char *room, int is_read_once);

/* V^T of the unit as tiles of 16 dims x 32 keys, [keys / 32, dims / 16]. Two tiles share 32 dims, of which the even one
   has 0-3 8-11 16-19 24-27 and the odd one the others: as they come apart in registers. `num_bytes` of each value of
   `next`, if there is one, are fetched meanwhile. */
INTERNAL void transpose_values(const struct unit *unit, int64_t dim, const struct unit *next, int64_t num_bytes,
                               bf16 *tiles);
