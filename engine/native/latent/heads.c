/* A product of its own for each head: the grouped product of products/grouped.h, with heads as experts. */

#include "latent/heads.h"

#include "products/grouped.h"
#include "products/products.h"
#include "team.h"

#include <stdlib.h>
#include <string.h>

enum { COPIED_ROWS = 8 /* rows of a part that copies */ };

/* Addresses in `memory`. */
struct buffers {
    int64_t *sources;
    struct block *blocks;
    char *rows, *to, *scratch, *end;
};

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static struct buffers lay_out(const struct weight *w, int64_t num_heads, int64_t num_rows, int is_bf16, char *memory) {
    const int64_t num_sorted = num_heads * num_rows, item = is_bf16 ? 2 : 4;
    const int64_t num_blocks = num_heads * ((num_rows + PART_ROWS - 1) / PART_ROWS);
    struct buffers b = {.sources = (int64_t *)memory};
    b.blocks = (struct block *)(memory + whole_lines(num_sorted * (int64_t)sizeof *b.sources));
    b.rows = (char *)b.blocks + whole_lines(num_blocks * (int64_t)sizeof *b.blocks);
    b.to = b.rows + whole_lines(num_sorted * w->num_inputs * item);
    b.scratch = b.to + whole_lines(num_sorted * w->num_outputs * item);
    b.end = b.scratch + whole_lines(product_scratch(w, num_sorted));
    return b;
}

int64_t heads_bytes(const struct weight *w, int64_t num_heads, int64_t num_rows, int is_bf16) {
    return lay_out(w, num_heads, num_rows, is_bf16, NULL).end - (char *)NULL;
}

struct copying {
    struct heads from, to;
    int64_t num_rows, num_heads, item, bytes; /* bytes of a head */
};

static void copy_part(const void *work, int64_t part) {
    const struct copying *c = work;
    for (int64_t row = part * COPIED_ROWS; row < min((part + 1) * COPIED_ROWS, c->num_rows); row++)
        for (int64_t head = 0; head < c->num_heads; head++)
            memcpy(c->to.first + (row * c->to.row + head * c->to.head) * c->item,
                   c->from.first + (row * c->from.row + head * c->from.head) * c->item, (size_t)c->bytes);
}

void copy_heads(struct heads from, struct heads to, int64_t num_rows, int64_t num_heads, int64_t size, int is_bf16) {
    const int64_t item = is_bf16 ? 2 : 4;
    const struct copying copying = {from, to, num_rows, num_heads, item, size * item};
    share_out(copy_part, &copying, (num_rows + COPIED_ROWS - 1) / COPIED_ROWS);
}

void run_heads(const struct weight *w, int64_t first_head, int64_t num_heads, struct heads x, struct heads out,
               int64_t num_rows, int is_bf16, char *memory) {
    const struct buffers b = lay_out(w, num_heads, num_rows, is_bf16, memory);
    struct order order = {.sources = b.sources, .blocks = b.blocks, .num_sorted = num_heads * num_rows};
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t first = head * num_rows;
        for (int64_t row = 0; row < num_rows; row++) b.sources[first + row] = row * x.row + head * x.head;
        for (int64_t row = 0; row < num_rows; row += PART_ROWS)
            b.blocks[order.num_blocks++] =
                (struct block){first_head + head, first + row, min(PART_ROWS, num_rows - row)};
    }
    multiply_grouped((struct grouped){.w = w, .order = &order, .x = x.first, .sources = b.sources,
                                      .source_bytes = is_bf16 ? 2 : 4, .rows = b.rows, .to = b.to, .is_bf16 = is_bf16},
                     b.scratch);
    const struct heads results = {b.to, w->num_outputs, num_rows * w->num_outputs};
    copy_heads(results, out, num_rows, num_heads, w->num_outputs, is_bf16);
}

/* Computes out [rows, heads, outputs] of x, whose rows and heads are `x_row` and `x_head` numbers apart. Returns 0, or
   1 if memory is short. */
int outrider_heads(const struct weight *w, int64_t num_heads, const void *x, int64_t x_row, int64_t x_head, void *out,
                   int64_t num_rows, int is_bf16) {
    char *memory = aligned_alloc(64, (size_t)heads_bytes(w, num_heads, num_rows, is_bf16));
    if (!memory) return 1;
    run_heads(w, 0, num_heads, (struct heads){(char *)x, x_row, x_head},
              (struct heads){out, num_heads * w->num_outputs, w->num_outputs}, num_rows, is_bf16, memory);
    free(memory);
    return 0;
}
