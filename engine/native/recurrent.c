/* The recurrences of Mamba-2 and of the gated delta rule. Each row's sums have one order, so its bits depend on the
   state before it and on its own inputs alone, not on chunks or neighbours.

   A state divides into parts that never meet: in Mamba-2 its rows, in the delta rule its columns. A few of them stay in
   the first cache while all rows of a sequence pass over them. */

#include "lanes/lanes.h"
#include "team.h"

enum { MAX_DEPTH = 512, MAMBA_ROWS = 4, DELTA_COLUMNS = 2 * LANES };

struct scan {
    const float *x, *steps, *decay, *b, *c; /* delta rule: value, beta, decay, key, query */
    float *out, *pool;                      /* [rows, heads, width], [slots, heads, state] */
    const int64_t *before, *ends, *after;   /* slots and last rows by span; slots by row, or -1 */
    int64_t heads, groups, width, depth;    /* a head's state is [width, depth], or [depth, width] */
    int64_t blocks;                         /* parts of a head's state */
};

/* One part of one head's state in one span. */
struct block {
    int64_t head, first, size, row, end; /* [first, first + size) of the width; rows [row, end) */
    float *before;
};

INLINE struct block block_of(const struct scan *s, int64_t part, int64_t block_size) {
    const int64_t span = part / (s->heads * s->blocks), rest = part % (s->heads * s->blocks);
    const int64_t head = rest / s->blocks, first = rest % s->blocks * block_size;
    return (struct block){head, first, min(block_size, s->width - first), span ? s->ends[span - 1] : 0, s->ends[span],
                          s->pool + (s->before[span] * s->heads + head) * s->width * s->depth};
}

/* Returns a head's state after a row, or NULL if the row's state is not kept. */
INLINE float *kept_after(const struct scan *s, int64_t row, int64_t head) {
    if (s->after[row] < 0) return 0;
    return s->pool + (s->after[row] * s->heads + head) * s->width * s->depth;
}

VECTOR_CODE INLINE mask first_lanes(int64_t count) {
    return mask_of(count >= LANES ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
}

/* state[p, n] = state[p, n] decay + x[p] step b[n]; out[p] = sum over n of state[p, n] c[n]. */
VECTOR_CODE void PART(mamba2_part)(const void *work, int64_t part) {
    const struct scan *s = work;
    const struct block block = block_of(s, part, MAMBA_ROWS);
    const int64_t depth = s->depth, rows_per_group = s->heads / s->groups;
    float state[MAMBA_ROWS][MAX_DEPTH] = {0};
    for (int64_t p = 0; p < block.size; p++)
        for (int64_t n = 0; n < depth; n += LANES)
            lanes_store(state[p] + n, lanes_load_some(first_lanes(depth - n), block.before + (block.first + p) * depth + n));
    for (int64_t row = block.row; row < block.end; row++) {
        const int64_t at = row * s->heads + block.head, group = row * s->groups + block.head / rows_per_group;
        const float *b = s->b + group * depth, *c = s->c + group * depth, *x = s->x + at * s->width + block.first;
        const floats decay = lanes_set(s->decay[at]);
        floats written[MAMBA_ROWS], sums[MAMBA_ROWS];
        for (int64_t p = 0; p < MAMBA_ROWS; p++) {
            written[p] = lanes_set(p < block.size ? x[p] * s->steps[at] : 0);
            sums[p] = lanes_zero();
        }
        for (int64_t n = 0; n < depth; n += LANES) {
            const mask lanes = first_lanes(depth - n);
            const floats writes = lanes_load_some(lanes, b + n), reads = lanes_load_some(lanes, c + n);
            for (int64_t p = 0; p < MAMBA_ROWS; p++) {
                const floats next = lanes_fma(written[p], writes, lanes_mul(lanes_load(state[p] + n), decay));
                lanes_store(state[p] + n, next);
                sums[p] = lanes_fma(next, reads, sums[p]);
            }
        }
        for (int64_t p = 0; p < block.size; p++) s->out[at * s->width + block.first + p] = lanes_sum(sums[p]);
        float *after = kept_after(s, row, block.head);
        for (int64_t p = 0; after && p < block.size; p++)
            for (int64_t n = 0; n < depth; n += LANES)
                lanes_store_some(after + (block.first + p) * depth + n, first_lanes(depth - n), lanes_load(state[p] + n));
    }
}

/* state[k, v] = state[k, v] decay; change[v] = (value[v] - sum over k of state[k, v] key[k]) beta;
   state[k, v] += key[k] change[v]; out[v] = sum over k of state[k, v] query[k]. */
VECTOR_CODE void PART(delta_part)(const void *work, int64_t part) {
    const struct scan *s = work;
    const struct block block = block_of(s, part, DELTA_COLUMNS);
    const int64_t depth = s->depth, width = s->width;
    const mask low = first_lanes(block.size), high = first_lanes(block.size - LANES);
    float state[MAX_DEPTH][DELTA_COLUMNS];
    for (int64_t k = 0; k < depth; k++) {
        lanes_store(state[k], lanes_load_some(low, block.before + k * width + block.first));
        lanes_store(state[k] + LANES, lanes_load_some(high, block.before + k * width + block.first + LANES));
    }
    for (int64_t row = block.row; row < block.end; row++) {
        const int64_t at = row * s->heads + block.head, first = at * width + block.first;
        const float *key = s->b + at * depth, *query = s->c + at * depth;
        const floats decay = lanes_set(s->decay[at]), beta = lanes_set(s->steps[at]);
        floats known[2] = {lanes_zero(), lanes_zero()}, out[2] = {lanes_zero(), lanes_zero()};
        for (int64_t k = 0; k < depth; k++)
            for (int half = 0; half < 2; half++) {
                const floats old = lanes_mul(lanes_load(state[k] + half * LANES), decay);
                lanes_store(state[k] + half * LANES, old);
                known[half] = lanes_fma(old, lanes_set(key[k]), known[half]);
            }
        const floats changes[2] = {
            lanes_mul(lanes_sub(lanes_load_some(low, s->x + first), known[0]), beta),
            lanes_mul(lanes_sub(lanes_load_some(high, s->x + first + LANES), known[1]), beta),
        };
        for (int64_t k = 0; k < depth; k++)
            for (int half = 0; half < 2; half++) {
                const floats old = lanes_load(state[k] + half * LANES);
                const floats next = lanes_fma(lanes_set(key[k]), changes[half], old);
                lanes_store(state[k] + half * LANES, next);
                out[half] = lanes_fma(next, lanes_set(query[k]), out[half]);
            }
        lanes_store_some(s->out + first, low, out[0]);
        lanes_store_some(s->out + first + LANES, high, out[1]);
        float *after = kept_after(s, row, block.head);
        for (int64_t k = 0; after && k < depth; k++) {
            lanes_store_some(after + k * width + block.first, low, lanes_load(state[k]));
            lanes_store_some(after + k * width + block.first + LANES, high, lanes_load(state[k] + LANES));
        }
    }
}

#ifndef NARROW /* compiled once: the entry points of both widths */

PARTS(mamba2_part);
PARTS(delta_part);

/* Computes the rows of each span from the state in its slot `before`, and keeps the states after rows with a slot
   `after`. Mamba-2: x, out [rows, heads, width], steps, decay [rows, heads], b, c [rows, groups, depth], states
   [heads, width, depth]. Delta rule: x are values, steps are betas, b are keys and c queries [rows, heads, depth],
   states [heads, depth, width]. Returns 0 if `depth` is too large, and computes nothing then. */
int outrider_scan(const float *x, const float *steps, const float *decay, const float *b, const float *c, float *out,
                  float *pool, const int64_t *before, const int64_t *ends, const int64_t *after, int64_t spans,
                  int64_t heads, int64_t groups, int64_t width, int64_t depth, int is_delta) {
    const int64_t block_size = is_delta ? DELTA_COLUMNS : MAMBA_ROWS, blocks = (width + block_size - 1) / block_size;
    const struct scan scan = {x,     steps,  decay, b,     c,     out,   pool,
                              before, ends, after, heads, groups, width, depth, blocks};
    if (depth > MAX_DEPTH) return 0;
    share_out(is_delta ? FITTING(delta_part) : FITTING(mamba2_part), &scan, spans * heads * blocks);
    return 1;
}

#endif
