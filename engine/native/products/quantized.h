/* Products by int8 and int4 weights, between the files that make them. */

#pragma once

#include "processor.h"

enum {
    GROUP = 32,       /* inputs, or twice as many of 8 bits */
    OUTPUTS = 32,     /* of a pair */
    GROUP_TABLES = 2 * OUTPUTS,
    HALF_BLOCK = 512, /* bytes of 32 inputs of 16 outputs, as int8 */
    PAD = 64,         /* bytes behind a row of x, so that rows do not share the cache's few sets */
    PREFETCH = 4096,  /* bytes ahead of the reader */
    TILED_ROWS = 128, /* that share a block of W in the first cache: whole tiles, */
    BLOCK_ROWS = 132, /* or without AMX as many as are read together on AVX-512 and on AVX2 */
};

struct quantized {
    int8_t *x;         /* rows `stride` bytes apart, in units of row_scales: -127 to 127; for 8 bits 0 to 255 */
    int64_t stride;
    float *row_scales; /* [groups, rows], `table_stride` apart */
    float *row_bases;  /* the same, for 8 bits; for 4 the sums of the groups */
    int64_t table_stride;
    const uint8_t *weight;
    const uint16_t *tables; /* [pairs, groups, 2, OUTPUTS]: scales, float16; bases of 4 bits, or int16 sums of 8 */
    const float *bias;      /* [num_outputs] or NULL */
    void *out;              /* [rows, num_outputs], or half as many if gated */
    int64_t num_rows, num_inputs, num_outputs, num_groups;
    int group; /* inputs that share a scale */
    int bits; /* 8: a weight is number * scale, -127 to 127; 4: number * scale + base, 0 to 15 */
    int is_gated, is_bf16; /* rows and results are bfloat16, or else float32 */
};

/* What a few rows read of one pair: `num_groups` groups. Lines [from, to) are fetched for later with each group of W:
   `ahead` bytes behind `later`, which goes on by `later_bytes`. */
struct part {
    const int8_t *x; /* rows `stride` bytes apart */
    int64_t stride;
    const float *row_scales; /* and row_bases: groups `table_stride` apart */
    const float *row_bases;
    int64_t table_stride;
    const uint8_t *w, *later;
    const uint16_t *tables;
    int64_t num_groups;
    int64_t later_bytes, ahead;
    int from, to;
    int is_first; /* of the inputs: there are no sums yet */
};

/* The rows [first, last) of x to numbers of 8 bits, by AVX-512 or AVX2. The latter's products by 8 bits take the low
   halves of a group's bytes and, behind them, the high ones. */
INTERNAL void quantize_wide(const struct quantized *p, const void *x, int64_t first, int64_t last);
INTERNAL void quantize_narrow(const struct quantized *p, const void *x, int64_t first, int64_t last);

/* Up to BLOCK_ROWS rows and the pairs [first, last), by AMX or AVX-512 or by AVX2. */
INTERNAL void multiply_wide(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last);
INTERNAL void multiply_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last);

/* The sums [rows, 32] of a pair, to `out`, without AVX-512. */
INTERNAL void finish_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, const float *sums);

/* Let a part read the rows from `row` on and the groups from `group` on, of which each takes `x_bytes`. */
static inline void set_rows(struct part *part, const struct quantized *p, int64_t row, int64_t group, int64_t x_bytes) {
    part->x = p->x + row * part->stride + group * x_bytes;
    part->row_scales = p->row_scales + group * p->table_stride + row;
    part->row_bases = p->row_bases + group * p->table_stride + row;
}

/* The place of one row's results of one pair. */
static inline void *out_of(const struct quantized *p, int64_t row, int64_t pair) {
    const int64_t width = p->is_gated ? OUTPUTS / 2 : OUTPUTS;
    return (char *)p->out + (row * (p->num_outputs / OUTPUTS) + pair) * width * (p->is_bf16 ? 2 : 4);
}
