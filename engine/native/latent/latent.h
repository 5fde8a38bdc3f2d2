/* Queries, keys and values from latents (multi-head latent attention, arXiv:2405.04434). */

#pragma once

#include "attention/types.h"
#include "products/products.h"
#include "products/weight.h"

/* The products and norms after the first product of a layer. engine/model/decoders/latent.py has the same fields. */
struct latent {
    const void *query_norm; /* [inputs of `queries`] */
    const void *key_norm;   /* [inputs of `keys_values`] */
    struct weight queries;  /* absent: the first product has the queries */
    struct weight keys_values; /* of each head a key without its rotary part, and a value */
    int64_t value_dim;
    float epsilon; /* of the norms */
};

/* The rows of a pass. */
struct latent_rows {
    char *first; /* [rows, stride numbers]: queries or their latent, the latent of keys and values, and the rotary part
                    that all keys of a row share; queries and this part are rotated in place */
    int64_t stride;
    const void *angles; /* [rows, 2, rotated dims] */
    int64_t num_rows, num_heads, head_dim, num_rotated_dims; /* the last dims of a head are rotated */
    int rotates_pairs, is_bf16, has_bf16_norms;
    char *memory; /* of `latent_bytes` */
    char *scratch; /* of the products */
};

/* Returns the bytes of `memory`. */
INTERNAL int64_t latent_bytes(const struct latent *m, int64_t num_rows, int64_t num_heads, int64_t head_dim, int is_bf16);

/* Points `a` to the queries, new keys and new values, which stay valid as long as `rows`. */
INTERNAL void expand_latents(const struct latent *m, const struct latent_rows *rows, struct attention *a);
