/* The arguments of attention, and the jobs that it is split into. */

#pragma once

#include "lanes/lanes.h"

#include <string.h>

enum {
    UNIT = 128,
    SPLIT = 1024,
    LATENT_SPLIT = 256, /* of latents: with one kv head, the splits of few lanes are all the jobs that a row has */
    MAX_TILES = 16,  /* tiles of a job */
    TOTALS = 16,     /* partial totals of weights, each over every 16th key */
    FEW_LANES = 12,  /* up to so many lanes, registers hold keys and dims instead of lanes; */
    FEW_PAIRS = 4,   /* the limit if pairs of bfloat16 are multiplied at once, */
    FEW_TILED = 4,   /* or added as AMX does, */
    FEW_HALF = 4,    /* and the limit on AVX2 */
    FEW_TILES = 2,   /* up to so many tiles, each split of a job is a separate job */
    MAX_DIM = 576,   /* dims of a head */
    SMALL = 1 << 14, /* with fewer lanes (of whole tiles) x keys, one thread computes all jobs */
    STORED_ROWS = 16, /* rows whose KV one part stores */
};

#define FLOOR (-1e30f) /* finite, so that a lane without keys gives no NaN */
#define LOG2_E 1.44269504f

struct span {
    int64_t first_row; /* index in the pass */
    int64_t num_rows;
    int64_t start; /* KV index of the first row */
    int64_t table; /* index of its block table */
    int64_t tree_start;
    int64_t nodes; /* index of its rows' nodes; -1 if the rows are a chain */
};

struct node {
    int32_t position;
    int32_t path; /* index of its path, the KV indices from `tree_start` on */
};

/* The attention of a pass in one layer; engine/attention/native.py has the same fields. Strides count numbers. */
struct attention {
    const void *query; /* [T, H * G, D] */
    const void *new_keys, *new_values; /* [T, H, D]; NULL: an earlier layer has stored them */
    void *keys, *values; /* [N, P, H, D]; if `is_int8`, a scale follows each head; the same if values are in keys */
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

/* Stores the new keys and values, then computes `out`. Returns 0, or 1 if memory is short. */
int outrider_attend(const struct attention *attention);

struct job {
    const struct span *span;
    int64_t head, first_lane, num_lanes;
    int64_t first_split, last_split; /* [first, last) */
    float *partial;                  /* buffer of the split's state until it is merged, or NULL */
    struct merge *merge;
    int is_apart; /* all lanes belong to one token, and keys before the window are not read */
};

/* Partial states of the same lanes, computed by several jobs. */
struct merge {
    float *partials;
    int64_t num_partials, size; /* size: floats of a partial */
    int64_t num_open;           /* unfinished jobs */
};

static inline int64_t round_up(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

/* Returns the bytes of a stored head. */
static inline int64_t head_bytes(const struct attention *a, int64_t dim) {
    return a->is_int8 ? dim + 2 : dim * (a->is_bf16 ? 2 : 4);
}

static inline int64_t key_bytes(const struct attention *a) { return head_bytes(a, a->key_dim); }
static inline int64_t value_bytes(const struct attention *a) { return head_bytes(a, a->value_dim); }

/* True if a value is the first numbers of its key and is not stored apart. */
static inline int are_values_in_keys(const struct attention *a) { return a->values == a->keys; }

/* Returns the keys of a split, a multiple of UNIT. */
static inline int64_t split_size(const struct attention *a) { return are_values_in_keys(a) ? LATENT_SPLIT : SPLIT; }
