/* Stores the new keys and values of a pass in the pool. */

#include "attention/job.h"

#include <float.h>

/* Stores a head as int8 with its scale, bit-identical to engine/kv_cache/pool.py. The scale of a head that is not
   finite is NaN. */
VECTOR_CODE static void store_int8_head(const char *head, int64_t dim, int is_bf16, char *out) {
    floats largest = lanes_zero(), faults = largest;
    for (int64_t d = 0; d < dim; d += 16) {
        const mask lanes = mask_of(dim - d >= 16 ? 0xffff : (1 << (dim - d)) - 1);
        const floats numbers = load_some_numbers(head, d, lanes, is_bf16);
        largest = lanes_max(largest, lanes_abs(numbers));
        faults = lanes_fma(numbers, lanes_zero(), faults);
    }
    /* A head with NaN or infinity gets the scale NaN, so that its readers notice. */
    const float fault = lanes_sum(faults);
    if (fault != fault) {
        const bf16 no_number = 0x7fc0;
        memset(out, 0, (size_t)dim);
        memcpy(out + dim, &no_number, 2);
        return;
    }
    /* The scale maps the largest magnitude to 127, rounded to bfloat16 before it is used. */
    float scale = lanes_highest(largest) / 127.0f;
    if (scale < FLT_MIN) scale = FLT_MIN; /* never zero */
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000; /* to the nearest bfloat16 */
    const floats scales = lanes_as_floats(lanes_set_int((int)bits));
    for (int64_t d = 0; d < dim; d += 16) {
        const mask lanes = mask_of(dim - d >= 16 ? 0xffff : (1 << (dim - d)) - 1);
        ints whole = lanes_rounded(lanes_div(load_some_numbers(head, d, lanes, is_bf16), scales));
        whole = lanes_bound_ints(whole, -127, 127);
        lanes_store_int8(out + d, lanes, whole);
    }
    const bf16 stored = (bf16)(bits >> 16);
    memcpy(out + dim, &stored, 2);
}

static void store_head(const struct attention *a, const char *head, int64_t dim, char *out) {
    if (a->is_int8) store_int8_head(head, dim, IS_BF16(a), out);
    else memcpy(out, head, head_bytes(a, dim));
}

/* Stores the KV of a row. */
static void store_kv(const struct attention *a, int64_t row) {
    const int64_t item = IS_BF16(a) ? 2 : 4;
    for (int64_t head = 0; head < a->num_heads; head++) {
        const int64_t at = a->slots[row] * a->num_heads + head;
        const int64_t key = row * a->key_row + head * a->key_head, value = row * a->value_row + head * a->value_head;
        store_head(a, (const char *)a->new_keys + key * item, a->key_dim, (char *)a->keys + at * key_bytes(a));
        if (are_values_in_keys(a)) continue;
        store_head(a, (const char *)a->new_values + value * item, a->value_dim,
                   (char *)a->values + at * value_bytes(a));
    }
}

VECTOR_CODE void PART(store_kv_part)(const void *work, int64_t part) {
    const struct attention *a = ((const struct pass *)work)->attention;
    for (int64_t row = part * STORED_ROWS; row < min((part + 1) * STORED_ROWS, a->num_rows); row++) store_kv(a, row);
}
