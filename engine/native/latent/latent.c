#include "latent/latent.h"

#include "latent/heads.h"
#include "products/products.h"
#include "rows.h"

enum { TURN_BYTES = 8 << 20 /* of the queries and results of the heads that are computed together */ };

/* Addresses in `memory`. */
struct buffers {
    char *latent, *queries, *absorbed, *attended, *heads, *end;
    int64_t turn; /* heads that are computed together */
};

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static struct buffers lay_out(const struct latent *m, char *memory, int64_t num_rows, int64_t num_heads,
                              int64_t num_rotated_dims, int is_bf16) {
    const int64_t column = num_rows * (is_bf16 ? 2 : 4), rank = m->values.num_inputs, key_dim = rank + num_rotated_dims;
    const int64_t query_dim = m->keys.num_inputs + num_rotated_dims;
    struct buffers b = {.latent = memory};
    b.turn = max(1, min(num_heads, TURN_BYTES / (column * (key_dim + rank))));
    b.queries = b.latent + (m->queries.packed ? whole_lines(column * m->queries.num_inputs) : 0);
    b.absorbed = b.queries + (m->queries.packed ? whole_lines(column * num_heads * query_dim) : 0);
    b.attended = b.absorbed + whole_lines(column * b.turn * key_dim);
    b.heads = b.attended + whole_lines(column * b.turn * rank);
    b.end = b.heads + max(heads_bytes(&m->keys, b.turn, num_rows, is_bf16),
                          heads_bytes(&m->values, b.turn, num_rows, is_bf16));
    return b;
}

int64_t latent_bytes(const struct latent *m, int64_t num_rows, int64_t num_heads, int64_t num_rotated_dims,
                     int is_bf16) {
    return lay_out(m, NULL, num_rows, num_heads, num_rotated_dims, is_bf16).end - (char *)NULL;
}

static void norm(const struct latent *m, const struct latent_rows *r, char *x, int64_t stride, int64_t size,
                 const void *weight) {
    outrider_norm_heads(x, weight, r->num_rows, stride, 1, size, m->epsilon, 0, 0, r->is_bf16, r->has_bf16_norms);
}

static void rotate(const struct latent_rows *r, char *x, int64_t stride, int64_t num_heads, int64_t dim) {
    outrider_rotate(x, r->angles, r->num_rows, stride, num_heads, dim, r->num_rotated_dims, r->rotates_pairs,
                    r->is_bf16);
}

/* Returns the rotated queries. */
static struct heads queries_of(const struct latent *m, const struct latent_rows *r, const struct buffers *b) {
    const int64_t item = r->is_bf16 ? 2 : 4, plain_dims = m->keys.num_inputs, dim = plain_dims + r->num_rotated_dims;
    struct heads queries = {r->first, r->stride, dim};
    if (m->queries.packed) {
        const int64_t rank = m->queries.num_inputs;
        copy_heads((struct heads){r->first, r->stride, 0}, (struct heads){b->latent, rank, 0}, r->num_rows, 1, rank,
                   r->is_bf16);
        norm(m, r, b->latent, rank, rank, m->query_norm);
        run_product(&m->queries, b->latent, b->queries, r->num_rows, r->is_bf16, r->scratch);
        queries = (struct heads){b->queries, r->num_heads * dim, dim};
    }
    rotate(r, queries.first + plain_dims * item, queries.row, r->num_heads, dim);
    return queries;
}

/* Computes some heads from `first` on; `queries` begin with the first of these. */
static int attend_heads(const struct latent *m, const struct latent_rows *r, struct attention *a,
                        const struct buffers *b, struct heads queries, int64_t first, int64_t num_heads, char *out) {
    const int64_t item = r->is_bf16 ? 2 : 4, rank = a->value_dim, plain_dims = m->keys.num_inputs;
    const struct heads absorbed = {b->absorbed, num_heads * a->key_dim, a->key_dim};
    const struct heads attended = {b->attended, num_heads * rank, rank};
    struct heads turned = queries, last = absorbed;
    run_heads(&m->keys, first, num_heads, queries, absorbed, r->num_rows, r->is_bf16, b->heads);
    turned.first += plain_dims * item, last.first += rank * item;
    copy_heads(turned, last, r->num_rows, num_heads, r->num_rotated_dims, r->is_bf16);
    a->query = absorbed.first, a->query_row = absorbed.row, a->query_head = absorbed.head, a->out = attended.first;
    a->group_size = num_heads;
    const int is_short = outrider_attend(a);
    a->new_keys = NULL; /* they are stored */
    const int64_t value_dim = m->values.num_outputs;
    const struct heads values = {out + first * value_dim * item, r->num_heads * value_dim, value_dim};
    run_heads(&m->values, first, num_heads, attended, values, r->num_rows, r->is_bf16, b->heads);
    return is_short;
}

int attend_latents(const struct latent *m, const struct latent_rows *r, struct attention *a, char *out) {
    const struct buffers b = lay_out(m, r->memory, r->num_rows, r->num_heads, r->num_rotated_dims, r->is_bf16);
    const int64_t item = r->is_bf16 ? 2 : 4, rank = m->values.num_inputs;
    struct heads queries = queries_of(m, r, &b);
    const int64_t num_first = m->queries.packed ? m->queries.num_inputs : r->num_heads * queries.head;
    /* The latent and the rotary part lie side by side already. */
    char *keys = r->first + num_first * item;
    norm(m, r, keys, r->stride, rank, m->key_norm);
    rotate(r, keys + rank * item, r->stride, 1, r->num_rotated_dims);
    a->new_keys = keys, a->key_row = r->stride, a->key_head = a->key_dim = rank + r->num_rotated_dims;
    a->value_dim = rank, a->num_heads = 1;
    int is_short = 0;
    for (int64_t first = 0; first < r->num_heads; first += b.turn) {
        const int64_t num_heads = min(b.turn, r->num_heads - first);
        is_short |= attend_heads(m, r, a, &b, queries, first, num_heads, out);
        queries.first += num_heads * queries.head * item;
    }
    return is_short;
}
