/* The call of attention and the jobs that it becomes. */

#pragma once

#include "lanes/lanes.h"

#include <string.h>

enum {
    UNIT = 128,
    SPLIT = 1024,
    MAX_TILES = 16,  /* of a job */
    TOTALS = 16,     /* of weights, each of every 16th key */
    FEW_LANES = 12,  /* of a job, up to which keys and dims lie side by side in registers in place of lanes, */
    FEW_PAIRS = 4,   /* and up to which where pairs of bfloat16 are multiplied at once, */
    FEW_TILED = 4,   /* or added as AMX does */
    FEW_HALF = 4,    /* and up to which on AVX2 */
    FEW_TILES = 2,   /* up to which the splits of a job are jobs of their own */
    MAX_DIM = 256,   /* of a head */
    SMALL = 1 << 14, /* lanes of whole tiles x keys below which one thread does all */
    KEPT_ROWS = 16, /* whose KV is kept in one part of the work */
};

#define FLOOR (-1e30f) /* finite: a lane that has seen no key yet makes no NaN */
#define LOG2_E 1.44269504f

struct span {
    int64_t first_row; /* in the pass */
    int64_t num_rows;
    int64_t start; /* place of the first row */
    int64_t table; /* where its block table begins */
    int64_t tree_start;
    int64_t nodes; /* where the nodes of its rows begin; -1: they are a chain */
};

struct node {
    int32_t position;
    int32_t path; /* where the places of its path from `tree_start` on begin */
};

/* The attention of a pass in one layer; engine/attention/native.py has the same fields. Strides count numbers. */
struct attention {
    const void *query; /* [T, H * G, D] */
    const void *new_keys, *new_values; /* [T, H, D] */
    void *keys, *values; /* [N, P, H, D], with a scale behind each head where `is_int8` */
    void *out; /* [T, H * G, D of the values] */
    const int64_t *slots; /* [T], of the new keys */
    const float *sinks; /* [H * G] or NULL */
    const struct span *spans;
    const int32_t *tables;
    const struct node *nodes;
    const int32_t *paths;
    int64_t num_rows, num_spans;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t num_heads, group_size, key_dim, value_dim, block_size;
    int64_t window; /* 0: none */
    int64_t is_bf16, is_int8;
    float scaling, softcap; /* 0: none */
};

/* Write the new keys and values, then compute `out`. Returns 0, or 1 where memory is short. */
int outrider_attend(const struct attention *attention);

struct job {
    const struct span *span;
    int64_t head, first_lane, num_lanes;
    int64_t first_split, last_split; /* [first, last) */
    float *partial;                  /* where the one split goes that is merged later, or NULL */
    struct merge *merge;
    int is_apart; /* its lanes are one token's, and keys before the window are not read */
};

/* Splits of the same lanes that several jobs have read. */
struct merge {
    float *partials;
    int64_t num_partials, size; /* numbers of a partial */
    int64_t num_open;           /* jobs that have not ended */
};

static inline int64_t round_up(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

/* Bytes of a stored head. */
static inline int64_t head_bytes(const struct attention *a, int64_t dim) {
    return a->is_int8 ? dim + 2 : dim * (a->is_bf16 ? 2 : 4);
}

static inline int64_t key_bytes(const struct attention *a) { return head_bytes(a, a->key_dim); }
static inline int64_t value_bytes(const struct attention *a) { return head_bytes(a, a->value_dim); }
