/* Attention over latents (multi-head latent attention, arXiv:2405.04434). */

#pragma once

#include "attention/types.h"
#include "products/weight.h"

/* The products and norms next to the attention. A stored key is the normed latent of a row, followed by the rotary part
   that its keys share; the latent is the stored value. So a query meets it after its plain part is multiplied by the
   keys' factor of its head, and results are latents until they are multiplied by the values' factor (section 2.1.2).
   engine/model/decoders/latent.py has the same fields. */
struct latent {
    const void *query_norm; /* [inputs of `queries`] */
    const void *key_norm;   /* [rank], the size of the latent */
    struct weight queries;  /* absent: the first product has the queries */
    struct weight keys;     /* of each head, plain part -> rank; num_outputs are of one head, here and below */
    struct weight values;   /* of each head, rank -> a value */
    float epsilon; /* of the norms */
};

/* The rows of a pass. */
struct latent_rows {
    char *first; /* [rows, stride numbers]: queries or their latent, the latent of keys and values, and the rotary part
                    that all keys of a row share; all are normed or rotated in place, but a latent of queries */
    int64_t stride;
    const void *angles; /* [rows, 2, rotated dims] */
    int64_t num_rows, num_heads, num_rotated_dims; /* the last dims of a head are rotated */
    int rotates_pairs, is_bf16, has_bf16_norms;
    char *memory; /* of `latent_bytes` */
    char *scratch; /* of the product of queries */
};

/* Returns the bytes of `memory`. */
INTERNAL int64_t latent_bytes(const struct latent *m, int64_t num_rows, int64_t num_heads, int64_t num_rotated_dims,
                              int is_bf16);

/* Stores the latents and computes `out` [rows, heads, D of the values]. `a` has the pass and the pool. Returns 0, or 1
   if memory is short. */
INTERNAL int attend_latents(const struct latent *m, const struct latent_rows *rows, struct attention *a, char *out);
