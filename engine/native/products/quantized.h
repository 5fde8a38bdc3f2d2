/* Products by weights of 8, 6 and 4 bits: declarations shared by their files. */

#pragma once

#include "processor.h"
#include "products/weight.h"

enum {
    GROUP = 32,       /* inputs; 8-bit weights may have twice as many */
    OUTPUTS = 32,     /* outputs of a pair */
    HALF_BLOCK = 512, /* bytes of 32 inputs of 16 outputs, as int8 */
    QUARTERS = 256,   /* bytes of 32 inputs of 32 outputs, as 2 bits */
    LEAST_SCALE = 127 - 20, /* the exponent of an INT4 scale of byte 0, in a float */
    PAD = 64,         /* bytes after a row of x, so that rows do not map to the same cache sets */
    PREFETCH = 6144,  /* bytes of the prefetch distance */
    TILED_ROWS = 128, /* rows that share a block of W in the L1 cache: whole tiles with AMX, */
    BLOCK_ROWS = 132, /* or a multiple of the rows read together on AVX-512 and on AVX2 */
};

struct quantized {
    int8_t *x;         /* rows `stride` bytes apart, in units of row_scales: -127 to 127, or 0 to 255 for 8 bits */
    int64_t stride;
    float *row_scales; /* [groups, rows], `table_stride` apart */
    float *row_bases;  /* [groups, rows]: for INT8 bases, otherwise sums of the groups */
    int64_t table_stride;
    const uint8_t *weight;
    const uint8_t *tables; /* [pairs, groups, `table_bytes`] */
    const float *bias;      /* [num_outputs] or NULL */
    void *out;              /* [rows, num_outputs], or half as many if gated */
    int64_t num_rows, num_inputs, num_outputs, num_groups;
    int group; /* inputs that share a scale */
    int kind;  /* `enum kind` */
    int gate; /* `enum gate` */
    int is_bf16; /* rows and results are bfloat16, or else float32 */
};

/* The input of a few rows from one pair: `num_groups` groups. With each group of W, the lines [from, to) at `ahead`
   bytes after `later` are prefetched; then `later` advances by `later_bytes`. */
struct part {
    const int8_t *x; /* rows `stride` bytes apart */
    int64_t stride;
    const float *row_scales; /* like row_bases, groups are `table_stride` apart */
    const float *row_bases;
    int64_t table_stride;
    const uint8_t *w, *later;
    const uint8_t *tables;
    int64_t num_groups;
    int64_t later_bytes, ahead;
    int from, to;
    int is_first; /* the first inputs: there are no sums yet */
};

/* Places the quantized rows and their tables in `scratch`, of `outrider_quantized_scratch` bytes. */
INTERNAL void lay_out_rows(struct quantized *p, int8_t *scratch);

/* The rows [row, last_row) and groups [group, last_group). */
struct region {
    int64_t row, last_row, group, last_group;
};

/* Quantizes a region of x to 8 bits, with AVX-512 or AVX2. On AVX2, products by INT8 take the low halves of a group's
   bytes, followed by the high halves. */
INTERNAL void quantize_wide(const struct quantized *p, const void *x, struct region region);
INTERNAL void quantize_narrow(const struct quantized *p, const void *x, struct region region);

/* Multiplies up to BLOCK_ROWS rows by the pairs [first, last), with AMX or AVX-512, or with AVX2. */
INTERNAL void multiply_wide(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last);
INTERNAL void multiply_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last);

/* Stores the sums [rows, 32] of a pair in `out`, without AVX-512. */
INTERNAL void finish_narrow(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, const float *sums);

/* Points a part to the rows from `row` on and the groups from `group` on; a group of x has `x_bytes` bytes. */
static inline void set_rows(struct part *part, const struct quantized *p, int64_t row, int64_t group, int64_t x_bytes) {
    part->x = p->x + row * part->stride + group * x_bytes;
    part->row_scales = p->row_scales + group * p->table_stride + row;
    part->row_bases = p->row_bases + group * p->table_stride + row;
}

INLINE int64_t bits_of(int kind) { return kind == INT8 ? 8 : kind == INT6 ? 6 : 4; }

/* Returns the bytes of a group's tables of one pair: float16 scales of the outputs, followed by int16 sums of their
   numbers (INT8) or float16 bases (INT4_BASES). INT4 has a byte for each scale, 2^(e - 20) (1 + m / 8) with five bits e
   above three bits m, and then one for each zero, in sixteenths of a level. */
INLINE int64_t table_bytes(int kind) { return kind == INT8 || kind == INT4_BASES ? 4 * OUTPUTS : 2 * OUTPUTS; }

/* Returns the bytes of a group's numbers of one pair, and of one row on AVX2. */
INLINE int64_t group_bytes(const struct quantized *p) { return p->group * OUTPUTS * bits_of(p->kind) / 8; }

INLINE int64_t group_bytes_of_x(const struct quantized *p) { return p->kind == INT8 ? 2 * p->group : p->group; }

/* Returns the address of one row's results of one pair. */
static inline void *out_of(const struct quantized *p, int64_t row, int64_t pair) {
    const int64_t width = p->gate ? OUTPUTS / 2 : OUTPUTS;
    return (char *)p->out + (row * (p->num_outputs / OUTPUTS) + pair) * width * (p->is_bf16 ? 2 : 4);
}
