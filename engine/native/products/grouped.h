/* One product of rows that are sorted by the part of a weight that each of them meets: experts, or heads. */

#pragma once

#include "products/quantized.h"

/* Consecutive sorted rows of one expert; at most PART_ROWS. */
struct block {
    int64_t expert, first, num_rows;
};

/* The order of the rows. */
struct order {
    int64_t *places;  /* [rows, top]: the sorted row of each, or -1 */
    int64_t *sources; /* [sorted rows]: the row of each */
    struct block *blocks;
    int64_t num_blocks, num_sorted;
};

/* One product of all sorted rows by the weights of their experts. */
struct grouped {
    const struct experts *experts;
    const struct weight *w; /* num_outputs are of one expert */
    const struct order *order;
    const void *x;          /* rows in the order of `sources`, or already sorted */
    const int64_t *sources; /* or NULL */
    int64_t source_bytes;   /* from row to row in the order of `sources` */
    int is_activated;       /* x are what `in` has computed */
    char *rows, *to;        /* [sorted rows, inputs] and [sorted rows, outputs] */
    struct quantized quantized;
    int64_t pairs, num_parts; /* pairs of a part, and parts of a block */
    int is_bf16;
};

/* Computes `to`; `scratch` is of `outrider_quantized_scratch` bytes. */
INTERNAL void multiply_grouped(struct grouped g, char *scratch);
