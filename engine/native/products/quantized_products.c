/* Products by weights of 8, 6 and 4 bits, x W^T or silu(gate) * up, on AMX, AVX-512's VNNI or AVX2.

   Rows and weights are integers with a scale per group of 32 inputs, as in llama.cpp's Q8_0 and Q4_1 blocks, or of 64
   inputs, to scale half as many sums. A huge input (arXiv:2402.17762) costs precision only in its own group. Where rows
   also have a base, the least input of a group, that cost is halved, since huge inputs are mostly of one sign. Rows
   have bases for 8-bit weights, -127 to 127; narrower weights have bases themselves, and levels from 0. A base is
   multiplied by the sum of the other side's numbers in the group, which is stored with them. With 6 bits it is minus 32
   levels. The sum of a group is exact; groups are added in float32, in the order of the inputs. A row's result does
   not depend on other rows.

   W is stored as a stream of blocks, one per group and pair of 16 + 16 outputs. 8 bits: eight lines of 64 bytes (for 64
   inputs: sixteen) for the first 16 outputs, then as many for the others; a line has four inputs of 16 outputs. 4 bits:
   eight lines, with the first 16 outputs in the low halves of bytes and the others in the high halves. 6 bits: eight
   such lines of the low 4 bits, then four of the high 2. A byte of these is for two lines: bits 4 and 5 for the first
   line's first 16 outputs, 6 and 7 for its others, 2 and 3 for the second line's first, 0 and 1 for its others. */

#include "products/products.h"
#include "products/quantized.h"
#include "team.h"

enum {
    LINE_ROWS = 16,    /* rows whose scales share a cache line, for one thread unless there are few rows */
    PART_GROUPS = 128, /* groups of few rows for one thread */
};

/* A product, divided into parts of some rows and pairs. */
struct grid {
    struct quantized product;
    const void *x;
    int64_t quantized, groups; /* rows and groups of a quantization part */
    int64_t pairs, rows, row_blocks;
};

static void quantize_part(const void *work, int64_t part) {
    const struct grid *grid = work;
    const struct quantized *p = &grid->product;
    const int64_t group_blocks = (p->num_groups + grid->groups - 1) / grid->groups;
    const int64_t row = part / group_blocks * grid->quantized, group = part % group_blocks * grid->groups;
    const struct region region = {row, min(row + grid->quantized, p->num_rows), group,
                                  min(group + grid->groups, p->num_groups)};
    FITTING(quantize)(p, grid->x, region);
}

static void multiply_part(const void *work, int64_t part) {
    const struct grid *grid = work;
    const struct quantized *p = &grid->product;
    const int64_t row = part % grid->row_blocks * grid->rows, pair = part / grid->row_blocks * grid->pairs;
    const int64_t rows = min(grid->rows, p->num_rows - row), last = min(pair + grid->pairs, p->num_outputs / OUTPUTS);
    FITTING(multiply)(p, row, rows, pair, last);
}

static int64_t row_bytes(int64_t num_inputs) { return num_inputs * (outrider_has_vectors ? 1 : 2) + PAD; }

/* Returns an odd number of whole cache lines, so that the groups of a row do not map to the same cache sets. */
static int64_t table_stride(int64_t num_rows) { return ((num_rows + 15) / 16 | 1) * 16; }

void lay_out_rows(struct quantized *p, int8_t *scratch) {
    p->num_groups = p->num_inputs / p->group;
    p->stride = row_bytes(p->num_inputs);
    p->x = scratch;
    p->row_scales = (float *)(scratch + p->num_rows * p->stride);
    p->table_stride = table_stride(p->num_rows);
    p->row_bases = p->row_scales + p->num_groups * p->table_stride;
}

static void multiply(struct quantized p, const void *x, int8_t *scratch) {
    const int64_t num_pairs = p.num_outputs / OUTPUTS;
    const int64_t pairs = max(1, min((256 << 10) / (p.num_inputs * OUTPUTS), num_pairs / 8));
    lay_out_rows(&p, scratch);
    const int64_t rows = outrider_has_tiles ? TILED_ROWS : BLOCK_ROWS;
    const int are_few = p.num_rows < 2 * LINE_ROWS;
    const int64_t quantized = are_few ? LINE_ROWS / 2 : LINE_ROWS;
    const int64_t groups = are_few ? PART_GROUPS / min(max(p.num_rows, 1), quantized) : p.num_groups;
    const struct grid grid = {p, x, quantized, groups, pairs, rows, (p.num_rows + rows - 1) / rows};
    share_out(quantize_part, &grid, (p.num_rows + quantized - 1) / quantized * ((p.num_groups + groups - 1) / groups));
    share_out(multiply_part, &grid, grid.row_blocks * ((num_pairs + pairs - 1) / pairs));
}

/* Computes out [rows, N] = x [rows, K] W^T (+ bias). N is a multiple of 32, K of `group`; `group` is 32, or 64 with 8
   bits. If gated, out [rows, N / 2] = function(gate) * up; each pair of W has 16 outputs of the gate and the same 16 of
   up. */
void outrider_quantized_product(const bf16 *x, const uint8_t *weight, const uint8_t *tables, const float *bias,
                                bf16 *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int kind,
                                int group, int gate, int8_t *scratch) {
    multiply((struct quantized){.weight = weight, .tables = tables, .bias = bias, .out = out, .num_rows = num_rows,
                                .num_inputs = num_inputs, .num_outputs = num_outputs, .kind = kind,
                                .group = group, .gate = gate, .is_bf16 = 1}, x, scratch);
}

/* Does the same with float32 rows. */
void outrider_quantized_float_product(const float *x, const uint8_t *weight, const uint8_t *tables, const float *bias,
                                      float *out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int kind,
                                      int group, int gate, int8_t *scratch) {
    multiply((struct quantized){.weight = weight, .tables = tables, .bias = bias, .out = out, .num_rows = num_rows,
                                .num_inputs = num_inputs, .num_outputs = num_outputs, .kind = kind,
                                .group = group, .gate = gate}, x, scratch);
}

int64_t outrider_quantized_scratch(int64_t num_rows, int64_t num_inputs) {
    return num_rows * row_bytes(num_inputs) + 2 * num_inputs / GROUP * table_stride(num_rows) * (int64_t)sizeof(float);
}
