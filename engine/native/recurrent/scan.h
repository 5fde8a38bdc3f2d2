/* The recurrences of Mamba-2 and of the gated delta rule, declared for the layers around them. */

#pragma once

#include "lanes/lanes.h"
#include "team.h"

enum { MAX_DEPTH = 512, MAMBA_ROWS = 4, DELTA_COLUMNS = 64 };

VECTOR_CODE INLINE mask first_lanes(int64_t count) {
    return mask_of(count >= LANES ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
}

/* The rows of a pass. `x_row` floats are between two rows of `x`, `group_row` between two of `b` and of `c`. */
struct scan {
    const float *x, *steps, *decay, *b, *c; /* delta rule: value, beta, decay, key, query */
    const float *skips;                     /* [heads], of Mamba-2: out += x skip; or NULL */
    float *out, *pool;                      /* [rows, heads, width], [slots, heads, state] */
    const int64_t *before, *ends, *after;   /* slots and last rows by span; slots by row, or -1 */
    int64_t x_row, group_row;
    int64_t heads, groups, width, depth; /* a head's state is [width, depth], or [depth, width] */
    int64_t blocks;                      /* parts of a head's state */
};

PARTS(mamba2_part);
PARTS(delta_part);

/* Sets `blocks` and computes a scan; `depth` is at most MAX_DEPTH. */
static inline void run_scan(struct scan *scan, int64_t spans, int is_delta) {
    const int64_t block_size = is_delta ? DELTA_COLUMNS : MAMBA_ROWS;
    scan->blocks = (scan->width + block_size - 1) / block_size;
    share_out(is_delta ? FITTING(delta_part) : FITTING(mamba2_part), scan, spans * scan->heads * scan->blocks);
}
