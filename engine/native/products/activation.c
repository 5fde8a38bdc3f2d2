/* The function of an MLP without gates, between its two products. */

#include "products/gate.h"
#include "products/numbers.h"
#include "products/products.h"
#include "team.h"

enum { PART_NUMBERS = 8192 /* fewer are not worth another thread */ };

struct activation {
    char *x;
    int64_t num_numbers;
    int function, is_bf16;
};

AVX2 static void activate_part(const void *work, int64_t part) {
    const struct activation *a = work;
    const int64_t last = min((part + 1) * PART_NUMBERS, a->num_numbers), item = a->is_bf16 ? 2 : 4;
    int64_t i = part * PART_NUMBERS;
    for (; i + 8 <= last; i += 8)
        store_eight(a->x, i, exact_gate(a->function, load_eight(a->x, i, a->is_bf16)), a->is_bf16);
    if (i == last) return;
    char rest[32] = {0};
    __builtin_memcpy(rest, a->x + i * item, (size_t)((last - i) * item));
    store_eight(rest, 0, exact_gate(a->function, load_eight(rest, 0, a->is_bf16)), a->is_bf16);
    __builtin_memcpy(a->x + i * item, rest, (size_t)((last - i) * item));
}

/* Replaces each number of x by a function of it, an `enum gate`. */
void outrider_activate(void *x, int64_t num_numbers, int function, int is_bf16) {
    const struct activation activation = {x, num_numbers, function, is_bf16};
    share_out(activate_part, &activation, (num_numbers + PART_NUMBERS - 1) / PART_NUMBERS);
}
