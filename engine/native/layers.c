/* Layers of a Llama-shaped decoder, one after the other, in one call: the kernels of the other files, with nothing in
   between. A step of a small model is many short kernels, and a call from Python costs as much as some of them. */

#include "attention/types.h"
#include "products/products.h"
#include "rows.h"

#include <stdlib.h>
#include <string.h>

enum { MLP_ROWS = 128 /* at a time, so that what lies between the MLP's products stays in the cache */ };

enum kind { INT4 = 4, INT8 = 8, BFLOAT16 = 16 };

/* A packed weight and the product by it; engine/model/linear/native_product.py has the same fields. */
struct weight {
    const void *packed;
    const uint16_t *tables; /* of INT4 and INT8 */
    const float *bias;      /* or NULL */
    int64_t num_inputs, num_outputs;
    int64_t kind;
    int64_t group;    /* inputs that share a scale, of INT4 and INT8 */
    int64_t is_gated; /* out has half as many outputs */
};

/* engine/model/decoders/native_layers.py has the same fields here and below. */
struct layer {
    const void *input_norm, *mlp_norm; /* [hidden] */
    const void *head_norm;             /* [heads + kv heads, D] of queries and keys, or NULL */
    struct weight qkv, output, gated, down;
    int64_t window; /* 0: none */
    float scaling, softcap;
};

struct decoder {
    const struct layer *layers;
    int64_t hidden_size, num_heads, num_kv_heads, head_dim;
    int64_t is_bf16;
    float epsilon;
};

struct rows {
    char *hidden; /* [T, hidden], the residual stream: before the first of the layers, then behind the last */
    char *delta;  /* [T, hidden], not yet part of it */
    const void *angles; /* [T, 2, D] */
    int64_t num_rows;
    int64_t has_delta; /* delta holds something before the first layer; behind the last it does */
    const int64_t *kept; /* [num_kept], rising: the rows that are wanted behind the last layer, as the first of hidden
                            and delta; not read where those are all or none */
    int64_t num_kept;
};

/* Results that no longer matter when the layer is done, and what a product needs beside them. */
struct room {
    char *normed, *qkv, *attended, *gated, *scratch;
};

static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t largest(int64_t so_far, const struct weight *w, int64_t num_rows) {
    return w->kind == BFLOAT16 ? so_far : max(so_far, outrider_quantized_scratch(num_rows, w->num_inputs));
}

/* Lay `room` out for the layers [first, last); returns the memory to free, NULL where there is none. */
static char *make_room(const struct decoder *d, int64_t first, int64_t last, int64_t num_rows, struct room *room) {
    const int64_t item = d->is_bf16 ? 2 : 4, mlp_rows = min(num_rows, MLP_ROWS);
    int64_t num_gated = 0, scratch = 0;
    for (const struct layer *l = d->layers + first; l < d->layers + last; l++) {
        num_gated = max(num_gated, l->down.num_inputs);
        scratch = largest(largest(scratch, &l->qkv, num_rows), &l->output, num_rows);
        scratch = largest(largest(scratch, &l->gated, mlp_rows), &l->down, mlp_rows);
    }
    const int64_t normed = lines(num_rows * d->hidden_size * item);
    const int64_t qkv = lines(num_rows * (d->num_heads + 2 * d->num_kv_heads) * d->head_dim * item);
    const int64_t attended = lines(num_rows * d->num_heads * d->head_dim * item);
    const int64_t gated = lines(mlp_rows * num_gated * item);
    char *memory = aligned_alloc(64, (size_t)(normed + qkv + attended + gated + lines(scratch)));
    *room = (struct room){.normed = memory};
    if (!memory) return NULL;
    room->qkv = memory + normed;
    room->attended = room->qkv + qkv;
    room->gated = room->attended + attended;
    room->scratch = room->gated + gated;
    return memory;
}

static void multiply_quantized(const struct weight *w, const void *x, void *out, int64_t num_rows, int64_t is_bf16,
                               char *scratch) {
    const int bits = (int)w->kind, group = (int)w->group, is_gated = (int)w->is_gated;
    if (is_bf16)
        outrider_quantized_product(x, w->packed, w->tables, w->bias, out, num_rows, w->num_inputs, w->num_outputs, bits,
                                   group, is_gated, (int8_t *)scratch);
    else
        outrider_quantized_float_product(x, w->packed, w->tables, w->bias, out, num_rows, w->num_inputs, w->num_outputs,
                                         bits, group, is_gated, (int8_t *)scratch);
}

/* out = x W^T, or silu(gate) * up; rows are bfloat16 or float32. */
static void multiply(const struct weight *w, const void *x, void *out, int64_t num_rows, int64_t is_bf16,
                     char *scratch) {
    const int64_t num_inputs = w->num_inputs, num_outputs = w->num_outputs;
    if (w->kind != BFLOAT16)
        multiply_quantized(w, x, out, num_rows, is_bf16, scratch);
    else if (is_bf16)
        (w->is_gated ? outrider_gated_product : outrider_product)(x, w->packed, w->bias, out, num_rows, num_inputs,
                                                                  num_outputs);
    else
        (w->is_gated ? outrider_gated_float_product : outrider_float_product)(x, w->packed, w->bias, out, num_rows,
                                                                              num_inputs, num_outputs);
}

/* hidden += delta; normed = its norm. */
static void add_norm(const struct decoder *d, const struct rows *r, const void *weight, int has_delta, char *normed) {
    const void *hidden = has_delta ? r->delta : r->hidden;
    outrider_add_norm(hidden, has_delta ? r->hidden : NULL, weight, normed, r->num_rows, d->hidden_size, d->epsilon,
                      (int)d->is_bf16);
}

/* From qkv, of which queries and keys are not rotated yet, to room->attended; returns 1 where memory is short. */
static int attend(const struct decoder *d, const struct layer *l, const struct rows *r, struct attention *a,
                  const struct room *room) {
    const int64_t item = d->is_bf16 ? 2 : 4, dim = d->head_dim;
    const int64_t num_rotated = d->num_heads + d->num_kv_heads, stride = (num_rotated + d->num_kv_heads) * dim;
    const int is_bf16 = (int)d->is_bf16;
    if (l->head_norm)
        outrider_norm_heads(room->qkv, l->head_norm, r->num_rows, stride, num_rotated, dim, d->epsilon, is_bf16);
    outrider_rotate(room->qkv, r->angles, r->num_rows, stride, num_rotated, dim, is_bf16);
    a->query = room->qkv;
    a->new_keys = room->qkv + d->num_heads * dim * item;
    a->new_values = room->qkv + num_rotated * dim * item;
    a->out = room->attended;
    a->query_row = a->key_row = a->value_row = stride;
    a->query_head = a->key_head = a->value_head = a->key_dim = a->value_dim = dim;
    a->num_heads = d->num_kv_heads, a->group_size = d->num_heads / d->num_kv_heads;
    a->window = l->window, a->scaling = l->scaling, a->softcap = l->softcap, a->sinks = NULL;
    return outrider_attend(a);
}

/* `from` [T, row_bytes], the rows that are kept before all others. */
static void keep(const struct rows *r, char *from, int64_t row_bytes) {
    for (int64_t i = 0; i < r->num_kept; i++)
        memmove(from + i * row_bytes, from + r->kept[i] * row_bytes, (size_t)row_bytes);
}

/* Of the last layer's rows only those go on, once the keys and values of all are in the pool. */
static void keep_rows(const struct decoder *d, struct rows *r, const struct room *room) {
    const int64_t item = d->is_bf16 ? 2 : 4;
    keep(r, r->hidden, d->hidden_size * item);
    keep(r, room->attended, d->num_heads * d->head_dim * item);
    r->num_rows = r->num_kept;
}

static void feed_forward(const struct decoder *d, const struct layer *l, const struct rows *r,
                         const struct room *room) {
    const int64_t row_bytes = d->hidden_size * (d->is_bf16 ? 2 : 4);
    for (int64_t row = 0; row < r->num_rows; row += MLP_ROWS) {
        const int64_t num_rows = min(MLP_ROWS, r->num_rows - row);
        multiply(&l->gated, room->normed + row * row_bytes, room->gated, num_rows, d->is_bf16, room->scratch);
        multiply(&l->down, room->gated, r->delta + row * row_bytes, num_rows, d->is_bf16, room->scratch);
    }
}

/* The layers [first, last) over the rows of a pass, whose spans and slots `pass` has; `keys` and `values` are each
   layer's in the pool. Returns 0, or 1 where memory is short. */
int outrider_run_layers(const struct decoder *d, const struct attention *pass, void *const *keys, void *const *values,
                        struct rows *r, int64_t first, int64_t last) {
    struct attention attention = *pass;
    struct room room;
    char *memory = make_room(d, first, last, r->num_rows, &room);
    int is_short = !memory;
    for (int64_t i = first; i < last && !is_short; i++) {
        const struct layer *l = d->layers + i;
        add_norm(d, r, l->input_norm, i > first || r->has_delta, room.normed);
        multiply(&l->qkv, room.normed, room.qkv, r->num_rows, d->is_bf16, room.scratch);
        attention.keys = keys[i], attention.values = values[i];
        is_short = attend(d, l, r, &attention, &room);
        if (i + 1 == last && r->num_kept < r->num_rows) keep_rows(d, r, &room);
        if (!r->num_rows) break;
        multiply(&l->output, room.attended, r->delta, r->num_rows, d->is_bf16, room.scratch);
        add_norm(d, r, l->mlp_norm, 1, room.normed);
        feed_forward(d, l, r, &room);
    }
    free(memory);
    return is_short;
}
