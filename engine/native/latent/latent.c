/* Queries, keys and values from latents, with the kernels of the other files. */

#include "latent/latent.h"
#include "rows.h"
#include "team.h"

#include <string.h>

enum { JOINED_ROWS = 8 /* rows whose keys one part joins */ };

/* Addresses in `memory`. */
struct buffers {
    char *latent, *queries, *keys_values, *keys, *end;
};

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static struct buffers lay_out(const struct latent *m, char *memory, int64_t num_rows, int64_t num_heads,
                              int64_t head_dim, int is_bf16) {
    const int64_t column = num_rows * (is_bf16 ? 2 : 4), heads = whole_lines(column * num_heads * head_dim);
    struct buffers b = {.latent = memory};
    b.queries = b.latent + whole_lines(column * max(m->queries.num_inputs, m->keys_values.num_inputs));
    b.keys_values = b.queries + (m->queries.packed ? heads : 0);
    b.keys = b.keys_values + whole_lines(column * m->keys_values.num_outputs);
    b.end = b.keys + heads;
    return b;
}

int64_t latent_bytes(const struct latent *m, int64_t num_rows, int64_t num_heads, int64_t head_dim, int is_bf16) {
    return lay_out(m, NULL, num_rows, num_heads, head_dim, is_bf16).end - (char *)NULL;
}

/* Copies `size` numbers of each row, from number `first` on, and norms them. */
static void take_latent(const struct latent *m, const struct latent_rows *r, int64_t first, int64_t size,
                        const void *norm, char *latent) {
    const int64_t item = r->is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < r->num_rows; row++)
        memcpy(latent + row * size * item, r->first + (row * r->stride + first) * item, (size_t)(size * item));
    outrider_norm_heads(latent, norm, r->num_rows, size, 1, size, m->epsilon, 0, 0, r->is_bf16, r->has_bf16_norms);
}

static void rotate(const struct latent_rows *r, char *x, int64_t stride, int64_t num_heads, int64_t dim) {
    outrider_rotate(x, r->angles, r->num_rows, stride, num_heads, dim, r->num_rotated_dims, r->rotates_pairs,
                    r->is_bf16);
}

struct joining {
    const struct latent_rows *rows;
    const char *plain, *rotated;
    int64_t plain_row, plain_head, plain_bytes; /* bytes, as below */
    int64_t rotated_row, rotated_bytes;
    char *keys;
};

/* Joins the plain part of each key with the rotated part of its row. */
static void join_part(const void *work, int64_t part) {
    const struct joining *j = work;
    const int64_t key_bytes = j->plain_bytes + j->rotated_bytes, num_heads = j->rows->num_heads;
    for (int64_t row = part * JOINED_ROWS; row < min((part + 1) * JOINED_ROWS, j->rows->num_rows); row++) {
        char *key = j->keys + row * num_heads * key_bytes;
        for (int64_t head = 0; head < num_heads; head++, key += key_bytes) {
            memcpy(key, j->plain + row * j->plain_row + head * j->plain_head, (size_t)j->plain_bytes);
            memcpy(key + j->plain_bytes, j->rotated + row * j->rotated_row, (size_t)j->rotated_bytes);
        }
    }
}

void expand_latents(const struct latent *m, const struct latent_rows *r, struct attention *a) {
    const struct buffers b = lay_out(m, r->memory, r->num_rows, r->num_heads, r->head_dim, r->is_bf16);
    const int64_t item = r->is_bf16 ? 2 : 4, plain_dims = r->head_dim - r->num_rotated_dims;
    const int64_t size = r->num_heads * r->head_dim, rank = m->keys_values.num_inputs;
    /* The queries. */
    char *queries = r->first;
    int64_t num_queries = size, query_row = r->stride;
    if (m->queries.packed) {
        num_queries = m->queries.num_inputs, queries = b.queries, query_row = size;
        take_latent(m, r, 0, num_queries, m->query_norm, b.latent);
        run_product(&m->queries, b.latent, queries, r->num_rows, r->is_bf16, r->scratch);
    }
    rotate(r, queries + plain_dims * item, query_row, r->num_heads, r->head_dim);
    /* The keys and values. */
    take_latent(m, r, num_queries, rank, m->key_norm, b.latent);
    run_product(&m->keys_values, b.latent, b.keys_values, r->num_rows, r->is_bf16, r->scratch);
    char *rotated = r->first + (num_queries + rank) * item;
    rotate(r, rotated, r->stride, 1, r->num_rotated_dims);
    const int64_t row = m->keys_values.num_outputs, head = plain_dims + m->value_dim;
    const struct joining joining = {
        .rows = r, .plain = b.keys_values, .rotated = rotated, .keys = b.keys,
        .plain_row = row * item, .plain_head = head * item, .plain_bytes = plain_dims * item,
        .rotated_row = r->stride * item, .rotated_bytes = r->num_rotated_dims * item,
    };
    share_out(join_part, &joining, (r->num_rows + JOINED_ROWS - 1) / JOINED_ROWS);
    a->query = queries, a->new_keys = b.keys, a->new_values = b.keys_values + plain_dims * item;
    a->query_row = query_row, a->key_row = size, a->value_row = row;
    a->query_head = a->key_head = a->key_dim = r->head_dim, a->value_head = head, a->value_dim = m->value_dim;
}
