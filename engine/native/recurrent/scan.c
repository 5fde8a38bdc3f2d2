/* The recurrences of Mamba-2 and of the gated delta rule. Each row's sums have one order, so its bits depend on the
   state before it and on its own inputs alone, not on chunks or neighbours.

   A state divides into parts that never meet: in Mamba-2 its rows, in the delta rule its columns. A few of them stay in
   the first cache while all rows of a sequence pass over them. */

#include "recurrent/scan.h"

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

/* Where a row reads a part of its state, and where it leaves it: the first row of a span reads the pool, the last one
   writes there, and between them the state stays in the cache. */
struct passage {
    const float *from;
    float *to, *copy; /* `copy` is NULL, or the pool's state after a row that is not the last */
    int64_t from_stride, to_stride; /* of a part's rows */
};

/* `in_pool` floats are between a part's rows in the pool, `in_cache` in `state`; its first float is at `first`. */
INLINE struct passage passage_of(const struct scan *s, const struct block *block, int64_t row, int64_t first,
                                 int64_t in_pool, float *state, int64_t in_cache) {
    float *after = kept_after(s, row, block->head);
    const int is_first = row == block->row, leaves = after && row + 1 == block->end;
    return (struct passage){
        .from = is_first ? block->before + first : state,
        .from_stride = is_first ? in_pool : in_cache,
        .to = leaves ? after + first : state,
        .to_stride = leaves ? in_pool : in_cache,
        .copy = after && !leaves ? after + first : 0,
    };
}

/* Computes a row of `size` rows of a state: state[p, n] = state[p, n] decay + x[p] step b[n]; out[p] = sum over n of
   state[p, n] c[n], + x[p] skip. */
VECTOR_CODE INLINE void mamba2_row(const struct scan *s, const struct block *block, const struct passage *passage,
                                   int64_t row, const int64_t size) {
    const int64_t at = row * s->heads + block->head, depth = s->depth;
    const int64_t group = row * s->group_row + block->head / (s->heads / s->groups) * depth;
    const float *b = s->b + group, *c = s->c + group;
    const float *x = s->x + row * s->x_row + block->head * s->width + block->first;
    const floats decay = lanes_set(s->decay[at]);
    floats written[MAMBA_ROWS], sums[MAMBA_ROWS];
    for (int64_t p = 0; p < size; p++) written[p] = lanes_set(x[p] * s->steps[at]), sums[p] = lanes_zero();
    for (int64_t n = 0; n < depth; n += LANES) {
        const mask lanes = first_lanes(depth - n);
        const floats writes = lanes_load_some(lanes, b + n), reads = lanes_load_some(lanes, c + n);
        for (int64_t p = 0; p < size; p++) {
            const floats old = lanes_load_some(lanes, passage->from + p * passage->from_stride + n);
            const floats next = lanes_fma(written[p], writes, lanes_mul(old, decay));
            lanes_store_some(passage->to + p * passage->to_stride + n, lanes, next);
            if (passage->copy) lanes_store_some(passage->copy + p * depth + n, lanes, next);
            sums[p] = lanes_fma(next, reads, sums[p]);
        }
    }
    for (int64_t p = 0; p < size; p++) {
        const float sum = lanes_sum(sums[p]);
        s->out[at * s->width + block->first + p] = s->skips ? sum + x[p] * s->skips[block->head] : sum;
    }
}

VECTOR_CODE void PART(mamba2_part)(const void *work, int64_t part) {
    const struct scan *s = work;
    const struct block block = block_of(s, part, MAMBA_ROWS);
    float state[MAMBA_ROWS * MAX_DEPTH];
    for (int64_t row = block.row; row < block.end; row++) {
        const struct passage passage = passage_of(s, &block, row, block.first * s->depth, s->depth, state, MAX_DEPTH);
        if (block.size == MAMBA_ROWS) mamba2_row(s, &block, &passage, row, MAMBA_ROWS);
        else mamba2_row(s, &block, &passage, row, block.size);
    }
}

enum { COLUMN_VECTORS = DELTA_COLUMNS / LANES }; /* sums that do not wait for each other */

/* change[v] = (value[v] - sum over k of state[k, v] decay key[k]) beta; state[k, v] = state[k, v] decay + key[k]
   change[v]; out[v] = sum over k of state[k, v] query[k]. */
VECTOR_CODE void PART(delta_part)(const void *work, int64_t part) {
    const struct scan *s = work;
    const struct block block = block_of(s, part, DELTA_COLUMNS);
    const int64_t depth = s->depth, width = s->width, heads_per_group = s->heads / s->groups;
    mask some[COLUMN_VECTORS];
    for (int v = 0; v < COLUMN_VECTORS; v++) some[v] = first_lanes(block.size - v * LANES);
    float state[MAX_DEPTH * DELTA_COLUMNS];
    for (int64_t row = block.row; row < block.end; row++) {
        const int64_t at = row * s->heads + block.head, first = at * width + block.first;
        const int64_t group = row * s->group_row + block.head / heads_per_group * depth;
        const float *key = s->b + group, *query = s->c + group;
        const float *value = s->x + row * s->x_row + block.head * width + block.first;
        const struct passage passage = passage_of(s, &block, row, block.first, width, state, DELTA_COLUMNS);
        const floats decay = lanes_set(s->decay[at]), beta = lanes_set(s->steps[at]);
        floats known[COLUMN_VECTORS], out[COLUMN_VECTORS], changes[COLUMN_VECTORS];
        for (int v = 0; v < COLUMN_VECTORS; v++) known[v] = out[v] = lanes_zero();
        for (int64_t k = 0; k < depth; k++)
            for (int v = 0; v < COLUMN_VECTORS; v++) {
                const float *from = passage.from + k * passage.from_stride + v * LANES;
                const floats old = lanes_mul(lanes_load_some(some[v], from), decay);
                known[v] = lanes_fma(old, lanes_set(key[k]), known[v]);
            }
        for (int v = 0; v < COLUMN_VECTORS; v++)
            changes[v] = lanes_mul(lanes_sub(lanes_load_some(some[v], value + v * LANES), known[v]), beta);
        for (int64_t k = 0; k < depth; k++)
            for (int v = 0; v < COLUMN_VECTORS; v++) {
                const float *from = passage.from + k * passage.from_stride + v * LANES;
                const floats old = lanes_mul(lanes_load_some(some[v], from), decay);
                const floats next = lanes_fma(lanes_set(key[k]), changes[v], old);
                lanes_store_some(passage.to + k * passage.to_stride + v * LANES, some[v], next);
                if (passage.copy) lanes_store_some(passage.copy + k * width + v * LANES, some[v], next);
                out[v] = lanes_fma(next, lanes_set(query[k]), out[v]);
            }
        for (int v = 0; v < COLUMN_VECTORS; v++) lanes_store_some(s->out + first + v * LANES, some[v], out[v]);
    }
}

#ifndef NARROW /* compiled once: the entry points of both widths */

/* Computes the rows of each span from the state in its slot `before`, and keeps the states after rows with a slot
   `after`. Mamba-2: x, out [rows, heads, width], steps, decay [rows, heads], b, c [rows, groups, depth], states
   [heads, width, depth]. Delta rule: x are values, steps are betas, b are keys and c queries, states
   [heads, depth, width]. Returns 0 if `depth` is too large, and computes nothing then. */
int outrider_scan(const float *x, const float *steps, const float *decay, const float *b, const float *c, float *out,
                  float *pool, const int64_t *before, const int64_t *ends, const int64_t *after, int64_t spans,
                  int64_t heads, int64_t groups, int64_t width, int64_t depth, int is_delta) {
    struct scan scan = {.x = x, .steps = steps, .decay = decay, .b = b, .c = c, .out = out, .pool = pool,
                        .before = before, .ends = ends, .after = after, .x_row = heads * width,
                        .group_row = groups * depth, .heads = heads, .groups = groups, .width = width, .depth = depth};
    if (depth > MAX_DEPTH) return 0;
    run_scan(&scan, spans, is_delta);
    return 1;
}

#endif
