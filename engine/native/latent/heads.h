/* A product of its own for each head. */

#pragma once

#include "products/weight.h"

/* The heads of rows; strides count numbers. */
struct heads {
    char *first;
    int64_t row, head;
};

/* Copies `size` numbers of each head. */
INTERNAL void copy_heads(struct heads from, struct heads to, int64_t num_rows, int64_t num_heads, int64_t size,
                         int is_bf16);

/* Returns the bytes of `memory`. */
INTERNAL int64_t heads_bytes(const struct weight *w, int64_t num_heads, int64_t num_rows, int is_bf16);

/* Computes out = x W^T with the weight of each head, from `first_head` on. `w` has the outputs of all heads, one head
   after the other, and its num_outputs are of one. Inputs and outputs are multiples of 32. A row's result does not
   depend on other rows. */
INTERNAL void run_heads(const struct weight *w, int64_t first_head, int64_t num_heads, struct heads x,
                        struct heads out, int64_t num_rows, int is_bf16, char *memory);
