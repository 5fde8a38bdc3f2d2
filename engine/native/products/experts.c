/* The products of a mixture of experts, where every row is multiplied by the weights of its own few experts.

   The rows are sorted by expert, a row once for each of its experts: then each expert's weights are read once. A row
   names its experts in an order, and its weighted results are added in this order. So a row's result does not depend
   on other rows. */

#include "products/experts.h"
#include "products/numbers.h"
#include "products/products.h"
#include "products/quantized.h"
#include "products/gate.h"
#include "products/grouped.h"
#include "team.h"

#include <stdlib.h>
#include <string.h>

enum {
    PREPARED_ROWS = 8, /* rows of a part that is no product */
};

static int64_t item_of(int is_bf16) { return is_bf16 ? 2 : 4; }

static int64_t most_blocks(int64_t num_sorted, int64_t num_experts) {
    return min(num_sorted, num_experts) + num_sorted / PART_ROWS;
}

/* Sorts the rows; `starts` [experts + 1] is scratch. */
static void sort_rows(const struct routing *r, int64_t num_experts, int64_t *starts, struct order *order) {
    const int64_t num_ids = r->num_rows * r->top;
    memset(starts, 0, (size_t)(num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < num_ids; i++)
        if (r->ids[i] >= 0 && r->ids[i] < num_experts) starts[r->ids[i] + 1]++;
    order->num_blocks = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        const int64_t first = starts[expert], end = starts[expert + 1] += first;
        for (int64_t row = first; row < end; row += PART_ROWS)
            order->blocks[order->num_blocks++] = (struct block){expert, row, min(PART_ROWS, end - row)};
    }
    order->num_sorted = starts[num_experts];
    for (int64_t i = 0; i < num_ids; i++) {
        const int is_known = r->ids[i] >= 0 && r->ids[i] < num_experts;
        order->places[i] = is_known ? starts[r->ids[i]]++ : -1;
        if (is_known) order->sources[order->places[i]] = i / r->top;
    }
}

/* Computes a row's function(gate [size]) * up [size], where up follows gate, or function(x [size]). */
AVX2 static void activate(const struct grouped *g, int64_t row) {
    const struct experts *e = g->experts;
    const int64_t size = e->out.num_inputs, at = row * e->in.num_outputs;
    const int function = (int)e->gate, has_gates = e->in.num_outputs > size;
    for (int64_t i = 0; i < size; i += 8) {
        const __m256 x = load_eight(g->x, at + i, g->is_bf16);
        const __m256 up = has_gates ? load_eight(g->x, at + size + i, g->is_bf16) : _mm256_set1_ps(1.0f);
        const __m256 result = function == CLAMPED ? clamped_gate(x, up, e->factors[0], e->factors[1])
                                                  : _mm256_mul_ps(exact_gate(function, x), up);
        store_eight(g->rows, row * size + i, result, g->is_bf16);
    }
}

/* Copies or activates some rows, and quantizes them. */
static void prepare_part(const void *work, int64_t part) {
    const struct grouped *g = work;
    const int64_t inputs = g->w->num_inputs, row_bytes = inputs * item_of(g->is_bf16);
    const int64_t first = part * PREPARED_ROWS, last = min(first + PREPARED_ROWS, g->order->num_sorted);
    for (int64_t row = first; row < last; row++) {
        if (g->is_activated) activate(g, row);
        else if (g->sources)
            memcpy(g->rows + row * row_bytes, (const char *)g->x + g->sources[row] * g->source_bytes,
                   (size_t)row_bytes);
    }
    if (g->w->kind != BFLOAT16) FITTING(quantize)(&g->quantized, g->rows, (struct region){first, last, 0, g->quantized.num_groups});
}

static void multiply_quantized(const struct grouped *g, const struct block *b, int64_t first, int64_t last) {
    struct quantized p = g->quantized;
    const int64_t num_pairs = b->expert * p.num_outputs / OUTPUTS;
    p.weight += num_pairs * p.num_groups * group_bytes(&p);
    p.tables += num_pairs * p.num_groups * table_bytes(p.kind);
    if (p.bias) p.bias += b->expert * p.num_outputs;
    p.x += b->first * p.stride, p.row_scales += b->first, p.row_bases += b->first;
    p.out = (char *)p.out + b->first * p.num_outputs * item_of(p.is_bf16);
    p.num_rows = b->num_rows;
    FITTING(multiply)(&p, 0, p.num_rows, first, last);
}

static void multiply_part(const void *work, int64_t part) {
    const struct grouped *g = work;
    const struct block *b = g->order->blocks + part / g->num_parts;
    const int64_t inputs = g->w->num_inputs, outputs = g->w->num_outputs;
    const int64_t first = part % g->num_parts * g->pairs, last = min(first + g->pairs, outputs / OUTPUTS);
    if (g->w->kind != BFLOAT16) {
        multiply_quantized(g, b, first, last);
        return;
    }
    const bf16 *weight = (const bf16 *)g->w->packed + b->expert * inputs * outputs;
    const float *bias = g->w->bias ? g->w->bias + b->expert * outputs : NULL;
    const void *x = g->rows + b->first * inputs * item_of(g->is_bf16);
    void *out = g->to + b->first * outputs * item_of(g->is_bf16);
    if (g->is_bf16) product_part(x, weight, bias, out, b->num_rows, inputs, outputs, first, last);
    else float_product_part(x, weight, bias, out, b->num_rows, inputs, outputs, first, last);
}

void multiply_grouped(struct grouped g, char *scratch) {
    const struct weight *w = g.w;
    const int64_t num_pairs = w->num_outputs / OUTPUTS, num_sorted = g.order->num_sorted;
    const int64_t bits = w->kind == BFLOAT16 ? 16 : bits_of((int)w->kind);
    g.pairs = max(1, min((256 << 10) / (w->num_inputs * OUTPUTS * bits / 8), num_pairs / 8));
    g.num_parts = (num_pairs + g.pairs - 1) / g.pairs;
    if (w->kind != BFLOAT16) {
        g.quantized = (struct quantized){.weight = w->packed, .tables = w->tables, .bias = w->bias, .out = g.to,
                                         .num_rows = num_sorted, .num_inputs = w->num_inputs,
                                         .num_outputs = w->num_outputs, .kind = (int)w->kind, .group = (int)w->group,
                                         .is_bf16 = g.is_bf16};
        lay_out_rows(&g.quantized, (int8_t *)scratch);
    }
    share_out(prepare_part, &g, (num_sorted + PREPARED_ROWS - 1) / PREPARED_ROWS);
    share_out(multiply_part, &g, g.order->num_blocks * g.num_parts);
}

/* The weighted sums. */
struct sums {
    const struct routing *routing;
    const int64_t *places;
    const void *x; /* [sorted rows, size] */
    void *out;     /* [rows, size] */
    int64_t size;
    int is_bf16;
};

AVX2 static void sum_part(const void *work, int64_t part) {
    const struct sums *s = work;
    const int64_t top = s->routing->top, last = min((part + 1) * PREPARED_ROWS, s->routing->num_rows);
    for (int64_t row = part * PREPARED_ROWS; row < last; row++)
        for (int64_t i = 0; i < s->size; i += 8) {
            __m256 sum = _mm256_setzero_ps();
            for (int64_t k = row * top; k < (row + 1) * top; k++) {
                if (s->places[k] < 0) continue;
                const __m256 x = load_eight(s->x, s->places[k] * s->size + i, s->is_bf16);
                sum = _mm256_fmadd_ps(_mm256_set1_ps(s->routing->weights[k]), x, sum);
            }
            store_eight(s->out, row * s->size + i, sum, s->is_bf16);
        }
}

struct buffers {
    int64_t *starts;
    struct order order;
    char *rows, *between, *scratch;
};

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Places the buffers of so many sorted rows in `memory`. Returns their bytes. */
static int64_t lay_out(const struct experts *e, int64_t num_sorted, char *memory, struct buffers *b) {
    const int64_t most_inputs = max(e->in.num_inputs, max(e->out.num_inputs, e->out.num_outputs));
    const int64_t item = item_of((int)e->is_bf16), number = (int64_t)sizeof(int64_t);
    char *at = memory;
    b->starts = (int64_t *)at, at += whole_lines((e->num_experts + 1) * number);
    b->order.places = (int64_t *)at, at += whole_lines(num_sorted * number);
    b->order.sources = (int64_t *)at, at += whole_lines(num_sorted * number);
    b->order.blocks = (struct block *)at;
    at += whole_lines(most_blocks(num_sorted, e->num_experts) * (int64_t)sizeof(struct block));
    b->rows = at, at += whole_lines(num_sorted * most_inputs * item);
    b->between = at, at += whole_lines(num_sorted * max(e->in.num_outputs, e->out.num_outputs) * item);
    b->scratch = at;
    at += whole_lines(outrider_quantized_scratch(num_sorted, max(e->in.num_inputs, e->out.num_inputs)));
    return at - memory;
}

static struct grouped product_of(const struct experts *e, const struct weight *w, const struct buffers *b) {
    return (struct grouped){.experts = e, .w = w, .order = &b->order, .rows = b->rows, .is_bf16 = (int)e->is_bf16};
}

static void multiply_in(const struct experts *e, const void *x, struct buffers *b, char *to) {
    struct grouped g = product_of(e, &e->in, b);
    g.x = x, g.sources = b->order.sources, g.source_bytes = e->in.num_inputs * item_of(g.is_bf16), g.to = to;
    multiply_grouped(g, b->scratch);
}

/* Multiplies sorted rows, activated first if need be, by the second weights, and adds up. */
static void multiply_out(const struct experts *e, const struct routing *r, void *x, int is_activated,
                         struct buffers *b, void *out) {
    struct grouped g = product_of(e, &e->out, b);
    g.x = x, g.is_activated = is_activated;
    if (!is_activated) g.rows = x;
    g.to = is_activated ? x : b->between; /* x is no longer needed, and as large */
    multiply_grouped(g, b->scratch);
    const struct sums sums = {r, b->order.places, g.to, out, e->out.num_outputs, (int)e->is_bf16};
    share_out(sum_part, &sums, (r->num_rows + PREPARED_ROWS - 1) / PREPARED_ROWS);
}

int64_t experts_scratch(const struct experts *e, int64_t num_pairs) {
    struct buffers buffers;
    return lay_out(e, num_pairs, NULL, &buffers);
}

void run_experts(const struct experts *e, const struct routing *r, const void *x, void *out, char *memory) {
    struct buffers b;
    lay_out(e, r->num_rows * r->top, memory, &b);
    sort_rows(r, e->num_experts, b.starts, &b.order);
    multiply_in(e, x, &b, b.between);
    multiply_out(e, r, b.between, 1, &b, out);
}

/* Allocates the buffers and sorts the rows. Returns the memory to free, or NULL if memory is short. */
static char *begin(const struct experts *e, const struct routing *r, struct buffers *b) {
    const int64_t num_sorted = r->num_rows * r->top;
    char *memory = aligned_alloc(64, (size_t)lay_out(e, num_sorted, NULL, b));
    if (!memory) return NULL;
    lay_out(e, num_sorted, memory, b);
    sort_rows(r, e->num_experts, b->starts, &b->order);
    return memory;
}

/* Computes the weighted sums for rows whose experts are known. Returns 0, or 1 if memory is short. */
int outrider_experts(const struct experts *e, const void *x, const int64_t *ids, const float *weights, void *out,
                     int64_t num_rows, int64_t top) {
    const struct routing r = {ids, weights, num_rows, top};
    struct buffers b;
    char *memory = begin(e, &r, &b);
    if (!memory) return 1;
    multiply_in(e, x, &b, b.between);
    multiply_out(e, &r, b.between, 1, &b, out);
    free(memory);
    return 0;
}

/* Does the same in two calls, for a function that is no `enum gate`: `between` [rows * top, ...] has W_in x, in the
   order of experts, */
int outrider_experts_in(const struct experts *e, const void *x, const int64_t *ids, void *between, int64_t num_rows,
                        int64_t top) {
    const struct routing r = {ids, NULL, num_rows, top};
    struct buffers b;
    char *memory = begin(e, &r, &b);
    if (!memory) return 1;
    multiply_in(e, x, &b, between);
    free(memory);
    return 0;
}

/* and then the function of that. */
int outrider_experts_out(const struct experts *e, void *between, const int64_t *ids, const float *weights, void *out,
                         int64_t num_rows, int64_t top) {
    const struct routing r = {ids, weights, num_rows, top};
    struct buffers b;
    char *memory = begin(e, &r, &b);
    if (!memory) return 1;
    multiply_out(e, &r, between, 0, &b, out);
    free(memory);
    return 0;
}
