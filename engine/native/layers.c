/* Runs the layers of a decoder in one call, with the kernels of the other files. A step of a small model
   is many short kernels, and a call from Python costs as much as some of them. */

#include "attention/types.h"
#include "latent/latent.h"
#include "mixture/mixture.h"
#include "products/products.h"
#include "recurrent/mixer.h"
#include "rows.h"

#include <stdlib.h>
#include <string.h>

enum {
    MLP_ROWS = 128, /* rows of the MLP at a time, so that its intermediate results stay in the cache */
    MAX_TABLES = 2, /* of rotary angles: for windows and for all keys, or for queries and for keys */
};

/* engine/model/decoders/native_layers.py has the same fields here and below.

   Experts that read the residual stream as the MLP does, each after its own norm, and add to its result. */
struct added_experts {
    const struct mixture *mixture;
    const void *mlp_output_norm, *input_norm, *output_norm, *router_norm; /* [hidden]; of the MLP, and of the experts */
};

struct layer {
    /* [hidden], or [2, hidden] with biases; NULL: no such norm. */
    const void *input_norm, *output_norm, *mlp_norm, *mlp_output_norm;
    const void *input_step_norm; /* of the layer's own input; NULL: no such norm, or the layer has none */
    const void *head_norm;       /* [normed heads, D] for queries, keys and perhaps values, or NULL */
    const void *attended_norm, *inner_norm; /* of the rows that `output` and `down` read, or NULL */
    const float *sinks;          /* [heads], or NULL */
    struct weight qkv, output, inner, down;
    struct weight steps; /* of a mixer's steps and betas, if `qkv` lacks these */
    struct weight input_gate, input_projection; /* of the layer's own input, if it has one */
    const struct mixture *mixture; /* in place of `inner` and `down`; without any of them the layer has no MLP */
    struct added_experts experts;  /* absent without a mixture */
    struct latent latent;          /* of the latents that `qkv` yields; or absent */
    const struct mixer *mixer;     /* in place of the attention, or NULL; without `qkv` the layer has neither */
    int64_t leaves_mlp;            /* the caller has the MLP */
    int64_t shares_rows;           /* reads the normed rows of the layer before, not its own */
    int64_t num_kv_heads, head_dim, value_dim;
    int64_t kv_layer;  /* in the pool; the place of a mixer's states */
    int64_t stores_kv; /* or an earlier layer has stored it, and `qkv` are queries alone */
    int64_t num_rotated_dims; /* of a head */
    int64_t window; /* 0: none */
    int64_t table;  /* of the keys' rotary angles; -1: positions are not encoded */
    int64_t query_table;
    float scaling, softcap;
    float factor; /* of the residual stream after the layer */
    float value_factor;               /* of values */
    float output_factor, down_factor; /* of the results of `output` and `down` */
    float activation_factors[2];
};

struct decoder {
    const struct layer *layers;
    int64_t hidden_size, num_heads;
    int64_t norms_values;      /* by heads too, as queries and keys */
    int64_t norms_projections; /* all queries of a row are normed together, and all keys */
    int64_t norms_rotated;     /* after their rotation */
    int64_t rotates_pairs;     /* of neighbors, not of a head's halves */
    int64_t centers;           /* norms subtract the mean */
    int64_t has_norm_biases;
    int64_t is_parallel; /* the attention and the MLP read the same rows, each after its own norm if it has one */
    int64_t gates_attention; /* the last outputs of `qkv` are gates of the attention's results */
    int64_t activation;      /* `enum gate`: the function of an MLP without gates */
    int64_t input_function;  /* `enum gate`: of the layers' own inputs */
    int64_t is_bf16, has_bf16_norms;
    int64_t has_wide_stream; /* the residual stream is float32, whatever rows are */
    float epsilon;
    float residual_scale; /* factor of a layer's outputs in the residual stream */
};

struct rows {
    char *hidden; /* [T, hidden], the residual stream; updated in place; float32 if it is wide */
    char *delta;  /* [T, hidden], the last output that is not yet added to it */
    char *normed; /* [T, hidden], for the rows that the caller's MLP reads, or NULL; only the last layer has such */
    char *inputs; /* [layers, T, inputs of `input_projection`], the layers' own inputs; overwritten */
    const void *angles[MAX_TABLES]; /* [T, 2, rotated dims] */
    int64_t num_rows;
    int64_t has_delta; /* delta has a value before the first layer; after the last layer it always has */
    const int64_t *kept; /* [num_kept], ascending: the rows needed after the last layer, moved to the front of hidden
                            and delta; not read if all rows or no rows are needed */
    int64_t num_kept;
};

/* The states of mixers: the pool of each layer, and the slots of the pass as `struct mixed_rows` has them. */
struct states {
    void *const *rows, *const *matrices;
    const int64_t *before, *ends, *after;
    int64_t num_spans;
};

/* Buffers of intermediate results within a layer, and the products' scratch memory. */
struct buffers {
    char *normed, *added, *qkv, *latent, *attended, *inner, *scratch;
};

/* Rounds up to whole cache lines. */
static int64_t round_up_to_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Returns the maximum of `so_far` and the scratch bytes of a product. */
static int64_t max_scratch(int64_t so_far, const struct weight *w, int64_t num_rows) {
    return max(so_far, product_scratch(w, num_rows));
}

/* Allocates `buffers` for the layers [first, last); `own_normed` is one of them, or NULL. Returns the memory to free, or
   NULL if memory is short. */
static char *allocate_buffers(const struct decoder *d, int64_t first, int64_t last, int64_t num_rows, char *own_normed,
                              struct buffers *buffers) {
    const int64_t item = d->is_bf16 ? 2 : 4, mlp_rows = min(num_rows, MLP_ROWS);
    /* All layers share the buffers, so each has the size of the largest layer. */
    int64_t num_qkv = 0, num_attended = 0, num_inner = 0, scratch = 0, has_added = 0, latent = 0;
    for (const struct layer *l = d->layers + first; l < d->layers + last; l++) {
        num_qkv = max(num_qkv, l->qkv.num_outputs + l->steps.num_outputs);
        num_attended = max(num_attended, l->output.num_inputs);
        num_inner = max(num_inner, l->down.num_inputs);
        scratch = max_scratch(max_scratch(scratch, &l->qkv, num_rows), &l->output, num_rows);
        if (l->input_gate.packed) {
            num_inner = max(num_inner, l->input_projection.num_inputs);
            scratch = max_scratch(max_scratch(scratch, &l->input_gate, mlp_rows), &l->input_projection, mlp_rows);
        }
        if (l->latent.keys.packed) {
            const int64_t bytes =
                latent_bytes(&l->latent, num_rows, d->num_heads, l->num_rotated_dims, (int)d->is_bf16);
            latent = max(latent, bytes), scratch = max_scratch(scratch, &l->latent.queries, num_rows);
        }
        if (l->mixer) scratch = max(scratch, 4 * outrider_mixer_scratch(l->mixer, num_rows));
        scratch = max_scratch(scratch, &l->steps, num_rows);
        if (l->experts.mixture) scratch = max(scratch, mixture_scratch(l->experts.mixture, num_rows)), has_added = 1;
        if (l->mixture) scratch = max(scratch, mixture_scratch(l->mixture, num_rows));
        else scratch = max_scratch(max_scratch(scratch, &l->inner, mlp_rows), &l->down, mlp_rows);
    }
    const int64_t normed = round_up_to_lines(num_rows * d->hidden_size * item);
    const int64_t qkv = round_up_to_lines(num_rows * num_qkv * item);
    const int64_t attended = round_up_to_lines(num_rows * num_attended * item);
    const int64_t inner = round_up_to_lines(mlp_rows * num_inner * item), added = has_added * normed;
    const int64_t bytes = normed + added + qkv + latent + attended + inner + round_up_to_lines(scratch);
    char *memory = aligned_alloc(64, (size_t)bytes);
    *buffers = (struct buffers){.normed = own_normed ? own_normed : memory};
    if (!memory) return NULL;
    buffers->added = memory + normed;
    buffers->qkv = buffers->added + added;
    buffers->latent = buffers->qkv + qkv;
    buffers->attended = buffers->latent + latent;
    buffers->inner = buffers->attended + attended;
    buffers->scratch = buffers->inner + inner;
    return memory;
}

/* Computes hidden += delta and returns norm(hidden), in `normed` if there is such a norm. */
static const char *add_norm(const struct decoder *d, const struct rows *r, const void *weight, int has_delta,
                            char *normed) {
    if (has_delta || weight)
        outrider_add_norm(has_delta ? r->delta : NULL, r->hidden, weight, normed, r->num_rows, d->hidden_size,
                          d->epsilon, d->residual_scale, (int)d->centers, (int)d->has_norm_biases, (int)d->is_bf16,
                          d->is_bf16 && !d->has_wide_stream, (int)d->has_bf16_norms);
    return weight ? normed : r->hidden;
}

/* Norms rows in place, or without a weight adds them to `sum`, if there is one. */
static void norm_or_add(const struct decoder *d, char *rows, void *sum, const void *weight, int64_t num_rows,
                        int64_t size) {
    if (sum || weight)
        outrider_add_norm(rows, sum, weight, rows, num_rows, size, d->epsilon, 1.0f, (int)d->centers,
                          (int)d->has_norm_biases, (int)d->is_bf16, (int)d->is_bf16, (int)d->has_bf16_norms);
}

/* Norms delta in place, if there is such a norm. */
static void norm_delta(const struct decoder *d, const struct rows *r, const void *weight) {
    norm_or_add(d, r->delta, NULL, weight, r->num_rows, d->hidden_size);
}

/* Multiplies rows, the residual stream or delta, by a factor. */
static void scale(const struct decoder *d, const struct rows *r, char *rows, float factor, int64_t is_bf16) {
    if (factor != 1.0f) outrider_scale(rows, r->num_rows * d->hidden_size, factor, (int)is_bf16);
}

/* Norms the queries and keys of `qkv`, by heads or all queries and all keys of a row together. */
static void norm_heads(const struct decoder *d, const struct layer *l, int64_t num_rows, int64_t stride, char *qkv) {
    const char *weight = l->head_norm;
    const int is_bf16 = (int)d->is_bf16, has_bf16_weight = (int)d->has_bf16_norms;
    const int64_t dim = l->head_dim, num_queries = d->num_heads * dim;
    if (!d->norms_projections) {
        const int64_t num_normed = d->num_heads + (d->norms_values ? 2 : 1) * (l->stores_kv ? l->num_kv_heads : 0);
        outrider_norm_heads(qkv, weight, num_rows, stride, num_normed, dim, d->epsilon, (int)d->centers,
                            (int)d->has_norm_biases, is_bf16, has_bf16_weight);
        return;
    }
    outrider_norm_heads(qkv, weight, num_rows, stride, 1, num_queries, d->epsilon, 0, 0, is_bf16, has_bf16_weight);
    outrider_norm_heads(qkv + num_queries * (is_bf16 ? 2 : 4), weight + num_queries * (has_bf16_weight ? 2 : 4),
                        num_rows, stride, 1, l->num_kv_heads * dim, d->epsilon, 0, 0, is_bf16, has_bf16_weight);
}

/* Rotates queries and keys, `num_keys` of them. */
static void rotate(const struct decoder *d, const struct layer *l, const struct rows *r, int64_t stride,
                   int64_t num_keys, char *qkv) {
    const int64_t together = l->query_table == l->table ? num_keys : 0;
    char *keys = qkv + d->num_heads * l->head_dim * (d->is_bf16 ? 2 : 4);
    outrider_rotate(qkv, r->angles[l->query_table], r->num_rows, stride, d->num_heads + together, l->head_dim,
                    l->num_rotated_dims, (int)d->rotates_pairs, (int)d->is_bf16);
    if (num_keys > together)
        outrider_rotate(keys, r->angles[l->table], r->num_rows, stride, num_keys, l->head_dim, l->num_rotated_dims,
                        (int)d->rotates_pairs, (int)d->is_bf16);
}

/* Points `a` to the queries, keys and values of buffers->qkv, normed and rotated. */
static void take_heads(const struct decoder *d, const struct layer *l, const struct rows *r, struct attention *a,
                       const struct buffers *buffers) {
    const int64_t item = d->is_bf16 ? 2 : 4, dim = l->head_dim, stride = l->qkv.num_outputs;
    const int64_t num_keys = l->stores_kv ? l->num_kv_heads : 0;
    char *keys = buffers->qkv + d->num_heads * dim * item, *values = keys + num_keys * dim * item;
    for (int64_t row = 0; l->value_factor != 1.0f && row < r->num_rows; row++)
        outrider_scale(values + row * stride * item, num_keys * l->value_dim, l->value_factor, (int)d->is_bf16);
    if (l->head_norm && !d->norms_rotated) norm_heads(d, l, r->num_rows, stride, buffers->qkv);
    if (l->table >= 0) rotate(d, l, r, stride, num_keys, buffers->qkv);
    if (l->head_norm && d->norms_rotated) norm_heads(d, l, r->num_rows, stride, buffers->qkv);
    a->query = buffers->qkv;
    a->new_keys = l->stores_kv ? keys : NULL;
    a->new_values = values;
    a->query_row = a->key_row = a->value_row = stride;
    a->query_head = a->key_head = a->key_dim = dim;
    a->value_head = a->value_dim = l->value_dim;
}

/* Computes buffers->attended from the latents of buffers->qkv. Returns 1 if memory is short. */
static int attend_over_latents(const struct decoder *d, const struct layer *l, const struct rows *r,
                               struct attention *a, const struct buffers *buffers) {
    const struct latent_rows rows = {
        .first = buffers->qkv, .stride = l->qkv.num_outputs, .angles = r->angles[l->table], .num_rows = r->num_rows,
        .num_heads = d->num_heads, .num_rotated_dims = l->num_rotated_dims,
        .rotates_pairs = (int)d->rotates_pairs, .is_bf16 = (int)d->is_bf16, .has_bf16_norms = (int)d->has_bf16_norms,
        .memory = buffers->latent, .scratch = buffers->scratch,
    };
    return attend_latents(&l->latent, &rows, a, buffers->attended);
}

/* Computes buffers->attended from buffers->qkv. Returns 1 if memory is short. */
static int attend(const struct decoder *d, const struct layer *l, const struct rows *r, struct attention *a,
                  const struct buffers *buffers) {
    a->window = l->window, a->scaling = l->scaling, a->softcap = l->softcap, a->sinks = l->sinks;
    if (l->latent.keys.packed) return attend_over_latents(d, l, r, a, buffers);
    take_heads(d, l, r, a, buffers);
    a->out = buffers->attended;
    a->num_heads = l->num_kv_heads, a->group_size = d->num_heads / l->num_kv_heads;
    const int is_short = outrider_attend(a);
    if (d->gates_attention) {
        const int64_t size = d->num_heads * l->head_dim, stride = l->qkv.num_outputs;
        outrider_gate_rows(buffers->qkv + (stride - size) * (d->is_bf16 ? 2 : 4), buffers->attended, r->num_rows, size,
                           stride, LOGISTIC, (int)d->is_bf16);
    }
    return is_short;
}

/* Returns a layer's own input of the first row. */
static char *input_of(const struct decoder *d, const struct rows *r, int64_t layer, int64_t num_rows) {
    const int64_t size = d->layers[layer].input_projection.num_inputs * (d->is_bf16 ? 2 : 4);
    return r->inputs + layer * num_rows * size;
}

/* Computes buffers->attended of a layer with a mixer from the rows x that `qkv` has. */
static void mix(const struct decoder *d, const struct layer *l, const struct rows *r, const struct states *s,
                const char *x, const struct buffers *buffers) {
    const struct mixer *m = l->mixer;
    const int64_t item = d->is_bf16 ? 2 : 4, row = l->qkv.num_outputs;
    char *steps = buffers->qkv;
    int64_t step_row = row;
    if (l->steps.packed) {
        steps += r->num_rows * row * item, step_row = l->steps.num_outputs;
        run_product(&l->steps, x, steps, r->num_rows, d->is_bf16, buffers->scratch);
    }
    const struct mixed_rows rows = {
        .inputs = buffers->qkv + m->inputs_at * item,
        .gates = buffers->qkv + m->gates_at * item,
        .steps = steps + m->steps_at * item,
        .betas = steps + m->betas_at * item,
        .input_row = row, .gate_row = row, .step_row = step_row, .beta_row = step_row,
        .out = buffers->attended,
        .rows = s->rows[l->kv_layer],
        .matrices = s->matrices[l->kv_layer],
        .before = s->before, .ends = s->ends, .after = s->after,
        .num_spans = s->num_spans, .num_rows = r->num_rows,
    };
    outrider_mix(m, &rows, (float *)buffers->scratch);
}

/* Moves the kept rows to the front of `from` [T, row_bytes]. */
static void move_to_front(const struct rows *r, char *from, int64_t row_bytes) {
    for (int64_t i = 0; i < r->num_kept; i++)
        memmove(from + i * row_bytes, from + r->kept[i] * row_bytes, (size_t)row_bytes);
}

/* Drops the other rows of the last layer, after the keys, values and states of all rows are in the pool. */
static void keep_rows(const struct decoder *d, int64_t layer, struct rows *r, const struct buffers *buffers) {
    const struct layer *l = d->layers + layer;
    const int64_t item = d->is_bf16 ? 2 : 4;
    if (l->input_gate.packed)
        move_to_front(r, input_of(d, r, layer, r->num_rows), l->input_projection.num_inputs * item);
    move_to_front(r, r->hidden, d->hidden_size * (d->has_wide_stream ? 4 : item));
    if (l->qkv.packed) move_to_front(r, buffers->attended, l->output.num_inputs * item);
    else move_to_front(r, r->delta, d->hidden_size * item);
    if (d->is_parallel) move_to_front(r, buffers->normed, d->hidden_size * item);
    r->num_rows = r->num_kept;
}

/* Adds the layer's own input, `inputs` [rows, its size]: hidden += delta, and then
   delta = norm(projection(function(gate(hidden)) * input)). */
static void add_input(const struct decoder *d, const struct layer *l, const struct rows *r, const char *inputs,
                      const struct buffers *buffers) {
    const int64_t row_bytes = d->hidden_size * (d->is_bf16 ? 2 : 4), size = l->input_projection.num_inputs;
    const char *hidden = add_norm(d, r, NULL, 1, buffers->normed);
    for (int64_t row = 0; row < r->num_rows; row += MLP_ROWS) {
        const int64_t num_rows = min(MLP_ROWS, r->num_rows - row), row_of_inputs = row * size * (d->is_bf16 ? 2 : 4);
        run_product(&l->input_gate, hidden + row * row_bytes, buffers->inner, num_rows, d->is_bf16, buffers->scratch);
        outrider_gate_rows(buffers->inner, (char *)inputs + row_of_inputs, num_rows, size, size,
                           (int)d->input_function, (int)d->is_bf16);
        run_product(&l->input_projection, inputs + row_of_inputs, r->delta + row * row_bytes, num_rows, d->is_bf16,
                 buffers->scratch);
    }
    norm_delta(d, r, l->input_step_norm);
}

/* Computes delta from x [rows, hidden]. */
static void feed_forward(const struct decoder *d, const struct layer *l, const struct rows *r, const char *x,
                         const struct buffers *buffers) {
    if (l->mixture) {
        run_mixture(l->mixture, x, x, r->delta, r->num_rows, buffers->scratch);
        return;
    }
    const int64_t row_bytes = d->hidden_size * (d->is_bf16 ? 2 : 4);
    for (int64_t row = 0; row < r->num_rows; row += MLP_ROWS) {
        const int64_t num_rows = min(MLP_ROWS, r->num_rows - row);
        run_product(&l->inner, x + row * row_bytes, buffers->inner, num_rows, d->is_bf16, buffers->scratch);
        if (d->activation)
            outrider_activate(buffers->inner, num_rows * l->down.num_inputs, (int)d->activation, l->activation_factors,
                              (int)d->is_bf16);
        norm_or_add(d, buffers->inner, NULL, l->inner_norm, num_rows, l->down.num_inputs);
        run_product(&l->down, buffers->inner, r->delta + row * row_bytes, num_rows, d->is_bf16, buffers->scratch);
    }
}

/* Adds the experts next to an MLP to its result. */
static void add_experts(const struct decoder *d, const struct added_experts *b, const struct rows *r,
                        const struct buffers *buffers) {
    norm_delta(d, r, b->mlp_output_norm);
    add_norm(d, r, b->router_norm, 0, buffers->added);
    add_norm(d, r, b->input_norm, 0, buffers->normed);
    run_mixture(b->mixture, buffers->added, buffers->normed, buffers->added, r->num_rows, buffers->scratch);
    norm_or_add(d, buffers->added, NULL, b->output_norm, r->num_rows, d->hidden_size);
    norm_or_add(d, buffers->added, r->delta, NULL, r->num_rows, d->hidden_size);
}

/* Computes buffers->attended of a layer, from its own normed rows or from the last layer's. Returns these rows,
   or NULL if memory is short. */
static const char *mix_or_attend(const struct decoder *d, const struct layer *l, const struct rows *r,
                                 struct attention *attention, void *const *keys, void *const *values,
                                 const struct states *states, int has_delta, const struct buffers *buffers) {
    const char *x = add_norm(d, r, l->shares_rows ? NULL : l->input_norm, has_delta, buffers->normed);
    if (l->shares_rows) x = buffers->normed;
    run_product(&l->qkv, x, buffers->qkv, r->num_rows, d->is_bf16, buffers->scratch);
    if (l->mixer) {
        mix(d, l, r, states, x, buffers);
        return x;
    }
    attention->keys = keys[l->kv_layer], attention->values = values[l->kv_layer];
    return attend(d, l, r, attention, buffers) ? NULL : x;
}

/* Runs the layers [first, last) over the rows of a pass. `pass` has its spans and slots; `keys` and `values` are the
   pool; `states` are not read without mixers. Returns 0, or 1 if memory is short. */
int outrider_run_layers(const struct decoder *d, const struct attention *pass, void *const *keys, void *const *values,
                        const struct states *states, struct rows *r, int64_t first, int64_t last) {
    struct attention attention = *pass;
    struct buffers buffers;
    const int64_t num_rows = r->num_rows;
    char *memory = allocate_buffers(d, first, last, r->num_rows, r->normed, &buffers);
    int is_short = !memory;
    for (int64_t i = first; i < last && !is_short; i++) {
        const struct layer *l = d->layers + i;
        int has_delta = i > first || r->has_delta;
        const char *x = NULL;
        if (l->qkv.packed) {
            x = mix_or_attend(d, l, r, &attention, keys, values, states, has_delta, &buffers);
            is_short = !x;
        }
        if (i + 1 == last && r->num_kept < r->num_rows) keep_rows(d, i, r, &buffers);
        if (!r->num_rows) break;
        if (l->qkv.packed) {
            norm_or_add(d, buffers.attended, NULL, l->attended_norm, r->num_rows, l->output.num_inputs);
            run_product(&l->output, buffers.attended, r->delta, r->num_rows, d->is_bf16, buffers.scratch);
            scale(d, r, r->delta, l->output_factor, d->is_bf16);
            norm_delta(d, r, l->output_norm);
            has_delta = 1;
        }
        if (!l->mixture && !l->inner.packed && !l->leaves_mlp) continue;
        if (d->is_parallel && l->mlp_norm) x = add_norm(d, r, l->mlp_norm, 0, buffers.normed);
        const char *normed = add_norm(d, r, d->is_parallel ? NULL : l->mlp_norm, has_delta, buffers.normed);
        x = d->is_parallel ? x : normed;
        if (l->leaves_mlp) break;
        feed_forward(d, l, r, x, &buffers);
        if (l->experts.mixture) add_experts(d, &l->experts, r, &buffers);
        scale(d, r, r->delta, l->down_factor, d->is_bf16);
        norm_delta(d, r, l->mlp_output_norm);
        if (l->input_gate.packed) add_input(d, l, r, input_of(d, r, i, num_rows), &buffers);
        scale(d, r, r->hidden, l->factor, d->is_bf16 && !d->has_wide_stream);
        scale(d, r, r->delta, l->factor, d->is_bf16);
    }
    free(memory);
    return is_short;
}
