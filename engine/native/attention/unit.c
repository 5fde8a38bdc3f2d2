#include "attention/unit.h"

static const char zeros[MAX_DIM * 4] __attribute__((aligned(64)));

void load_unit(const struct attention *a, const struct job *job, int64_t begin, int64_t stop, const int32_t *path,
               struct unit *unit) {
    unit->begin = begin, unit->count = min(UNIT, stop - begin);
    const struct span *span = job->span;
    const int32_t *table = a->tables + span->table;
    const char *keys = (const char *)a->keys + job->head * key_bytes(a);
    const int64_t size = a->block_size, value_size = are_values_in_keys(a) ? key_bytes(a) : value_bytes(a);
    const char *values = (const char *)a->values + job->head * value_size;
    const int64_t key_stride = a->num_heads * key_bytes(a), value_stride = a->num_heads * value_size;
    const int64_t end = path ? min(begin + unit->count, max(span->tree_start, begin)) : begin + unit->count;
    /* Keys in order: one look-up in the block table per block. */
    for (int64_t place = begin, last; place < end;) {
        int64_t slot = table[place / size] * size + place % size;
        const char *key = keys + slot * key_stride, *value = values + slot * value_stride;
        for (last = min(end, place - place % size + size); place < last; place++) {
            const int64_t i = place - begin;
            unit->slots[i] = slot++;
            unit->keys[i] = key, unit->values[i] = value;
            key += key_stride, value += value_stride;
        }
    }
    /* Keys on the tree's path: one look-up per key. */
    for (int64_t i = end - begin; i < unit->count; i++) {
        const int64_t node = path[begin + i - span->tree_start];
        const int64_t slot = unit->slots[i] = table[node / size] * size + node % size;
        unit->keys[i] = keys + slot * key_stride, unit->values[i] = values + slot * value_stride;
    }
    for (int64_t i = unit->count; i % 32; i++) unit->keys[i] = unit->values[i] = zeros;
}

void hide_keys(struct unit *unit, int64_t count) {
    for (int64_t i = 0; i < min(count, unit->count); i++) {
        unit->slots[i] = -UNIT; /* `are_run` is false here */
        unit->keys[i] = unit->values[i] = zeros;
    }
}

#ifdef NARROW
/* Loads a stored int8 head as floats, padded with zeros up to `width`. */
VECTOR_CODE INLINE void load_int8(const char *head, int64_t dim, int64_t width, float *out) {
    bf16 bits;
    memcpy(&bits, head + dim, 2);
    const floats scale = lanes_as_floats(lanes_set_int((int)((uint32_t)bits << 16)));
    for (int64_t d = 0; d < width; d += 16)
        lanes_store(out + d, lanes_mul(lanes_load_int8(head + d, max(0, min(dim - d, 16))), scale));
}
#endif

/* True if 16 slots are consecutive. All are compared: with small blocks, the first and the last are not enough. */
INLINE int are_run(const int64_t *slots) {
    int are = 1;
    for (int64_t i = 1; i < 16; i++) are &= slots[i] == slots[0] + i;
    return are;
}

VECTOR_CODE void copy_to_scratch(const struct attention *a, struct unit *unit, char *scratch, int is_few,
                                 int is_read_once) {
    const int64_t key_stride = a->num_heads * key_bytes(a), key_width = round_up(a->key_dim, 32);
    const int64_t count = unit->count;
#ifdef NARROW
    const int64_t value_width = round_up(a->value_dim, 32);
    float *keys = (float *)scratch, *values = keys + UNIT * key_width;
    for (int64_t i = 0; a->is_int8 && !is_few && i < count; i++) {
        load_int8(unit->keys[i], a->key_dim, key_width, keys + i * key_width);
        load_int8(unit->values[i], a->value_dim, value_width, values + i * value_width);
        unit->keys[i] = (const char *)(keys + i * key_width);
        unit->values[i] = (const char *)(values + i * value_width);
    }
#endif
    if (!IS_BF16(a) || is_few) return;
    /* AMX loads 16 rows at one stride: consecutive slots are read in place, others are copied. */
    for (int64_t tile = 0; tile < (count + 15) / 16; tile++) {
        const int64_t first = tile * 16;
        const int is_run = first + 16 <= count && are_run(unit->slots + first);
        if (is_run && (is_read_once || a->num_heads == 1) && a->key_dim % 32 == 0) {
            unit->key_tiles[tile] = unit->keys[first], unit->key_strides[tile] = key_stride;
        } else {
            char *copy = scratch + first * key_width * 2;
            for (int64_t i = 0; i < 16; i++) {
                char *row = copy + i * key_width * 2;
                memcpy(row, unit->keys[first + i], a->key_dim * 2);
                memset(row + a->key_dim * 2, 0, (key_width - a->key_dim) * 2);
            }
            unit->key_tiles[tile] = copy, unit->key_strides[tile] = key_width * 2;
        }
    }
}

#ifndef NARROW
AVX void transpose_values(const struct unit *unit, int64_t dim, const struct unit *next, int64_t num_bytes,
                          bf16 *tiles) {
    const int64_t width = round_up(dim, 32);
    for (int64_t key = 0; key < unit->count; key += 32)
        for (int64_t d = 0; d < width; d += 32) {
            const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
            __m512i low[16], high[16];
            for (int64_t i = 0; i < 16; i++) {
                const char *const *rows = unit->values + key + 2 * i;
                if (next && d == 0 && key + 2 * i < next->count) fetch(next->values + key + 2 * i, num_bytes);
                __m512i first = _mm512_maskz_loadu_epi16(dims, rows[0] + 2 * d);
                __m512i second = _mm512_maskz_loadu_epi16(dims, rows[1] + 2 * d);
                /* Interleave two keys, so that pairs of bfloat16 are adjacent. */
                low[i] = _mm512_unpacklo_epi16(first, second);
                high[i] = _mm512_unpackhi_epi16(first, second);
            }
            transpose(low);
            transpose(high);
            bf16 *to = tiles + (key / 32 * (width / 16) + d / 16) * 512;
            for (int64_t i = 0; i < 16; i++) {
                _mm512_store_si512(to + i * 32, low[i]);
                _mm512_store_si512(to + 512 + i * 32, high[i]);
            }
        }
}

/* Converts a row to floats. If `is_value`, the dims have the order of `transpose_values`. */
AVX INLINE void widen_row(const char *row, int64_t dim, int64_t width, const int is_value, float *to) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t d = 0; d < width; d += 32) {
        const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
        __m512i numbers = _mm512_maskz_loadu_epi16(dims, row + 2 * d);
        if (!is_value) numbers = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), numbers);
        _mm512_store_si512(to + d, _mm512_unpacklo_epi16(zero, numbers));
        _mm512_store_si512(to + d + 16, _mm512_unpackhi_epi16(zero, numbers));
    }
}

AVX void widen_rows(const struct attention *a, struct unit *unit, const struct unit *next, float *wide) {
    const int64_t key_width = round_up(a->key_dim, 32), value_width = round_up(a->value_dim, 32);
    float *wide_values = wide + UNIT * key_width;
    for (int64_t i = 0; i < unit->count; i++) {
        if (next && i % 2 == 0 && i < next->count) fetch(next->values + i, value_bytes(a));
        widen_row(unit->keys[i], a->key_dim, key_width, 0, wide + i * key_width);
        widen_row(unit->values[i], a->value_dim, value_width, 1, wide_values + i * value_width);
        unit->keys[i] = (const char *)(wide + i * key_width);
        unit->values[i] = (const char *)(wide_values + i * value_width);
    }
}
#endif
