/* Products by int8 and int4 weights on AMX or AVX-512 VNNI. */

#include "amx.h"
#include "products/quantized.h"
#include "products/gate.h"

enum {
    BLOCK_INPUTS = 768, /* inputs that stay in the L1 cache across rows */
    VECTOR_ROWS = 6,    /* rows with their sums of one pair in registers */
    FEW_ROWS = 3,       /* rows with their sums of several pairs in registers */
    TILE_ROWS = 16,     /* rows of an AMX tile */
    LEAST_TILED = 12,   /* fewer rows are faster without AMX, with groups of 32 inputs, */
    LEAST_LONG = 7,     /* or of 64 */
};

/* The layouts of W: 8 bits in groups of 32 (WHOLE) or 64 (LONG), 4 bits in halves of bytes (HALVES) or as bytes
   (LEVELS). */
enum layout { WHOLE, LONG, HALVES, LEVELS };

INLINE int is_8_bits(const enum layout layout) { return layout == WHOLE || layout == LONG; }

INLINE int64_t inputs_of(const enum layout layout) { return layout == LONG ? 2 * GROUP : GROUP; }

INLINE int64_t half_block_of(const enum layout layout) { return inputs_of(layout) * (HALF_BLOCK / GROUP); }

INLINE int64_t group_bytes_of(const enum layout layout) { return half_block_of(layout) * (layout == HALVES ? 1 : 2); }

AVX INLINE __m512 from_float16(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }

/* Returns the base of a group's weights, or their sum if rows have the bases. `tables` are for 16 outputs. */
AVX INLINE __m512 second_of(const uint16_t *tables, __m512 scale, const enum layout layout) {
    if (!is_8_bits(layout)) return from_float16(tables + OUTPUTS);
    const __m512i sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(tables + OUTPUTS)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
}

/* Adds a group's exact sum, and the term of the base, to `onto`. */
AVX INLINE __m512 add_group(__m512 onto, __m512i sum, __m512 scale, __m512 second, float row_scale, float row_base) {
    onto = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(row_scale)), onto);
    return _mm512_fmadd_ps(second, _mm512_set1_ps(row_base), onto);
}

/* Adds four products of 16 outputs each to their sums. VNNI multiplies 0 to 255 by -128 to 127. */
AVX INLINE __m512i add_four(__m512i sum, __m512i weights, __m512i inputs, const enum layout layout) {
    return is_8_bits(layout) ? _mm512_dpbusd_epi32(sum, inputs, weights) : _mm512_dpbusd_epi32(sum, weights, inputs);
}

/* Computes the sums [pairs, rows, 32] of a part, and adds them to `sums` unless it is the first. Several pairs in
   parallel are several streams from memory, and enough sums to hide the latency of products; they are `pair` groups
   apart. High halves of bytes are not extracted: the sum of the low halves is subtracted from the sum of whole bytes,
   which leaves 16 times the sum of the high halves. */
AVX INLINE void add_vectors(const int rows, const int pairs, const enum layout layout, struct part p, int64_t pair,
                            float *sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t pair_bytes = pair * group_bytes_of(layout);
    const int64_t pair_tables = pair * GROUP_TABLES;
    __m512 total[VECTOR_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows * pairs; i++)
        for (int half = 0; half < 2; half++)
            total[i][half] = p.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * OUTPUTS + half * 16);
    for (int64_t group = 0; group < p.num_groups; group++) {
        const int is_end = pairs > 1 && group + PREFETCH / group_bytes_of(layout) >= p.num_groups;
        const int64_t next = p.ahead + (is_end ? (pairs - 1) * pair_bytes : 0);
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++) {
            fetch_lines(p.later + i * pair_bytes + next, p.from, p.to);
            if (pairs > 1) fetch_lines(p.tables + i * pair_tables + next / group_bytes_of(layout) * GROUP_TABLES, 0, 2);
        }
        __m512i sum[VECTOR_ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < rows * pairs; i++) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int line = 0; line < inputs_of(layout) / 4; line++) { /* four inputs of 32 outputs */
#pragma GCC unroll 4
            for (int i = 0; i < pairs; i++) {
                const uint8_t *w = p.w + i * pair_bytes + line * 64;
                __m512i first = _mm512_loadu_si512(w), second;
                if (layout != HALVES) {
                    second = _mm512_loadu_si512(w + half_block_of(layout));
                } else {
                    second = first; /* both halves */
                    first = _mm512_and_si512(first, low);
                }
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const __m512i inputs = broadcast(p.x + row * p.stride + line * 4);
                    sum[i * rows + row][0] = add_four(sum[i * rows + row][0], first, inputs, layout);
                    sum[i * rows + row][1] = add_four(sum[i * rows + row][1], second, inputs, layout);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const uint16_t *tables = p.tables + i * pair_tables + half * 16;
                const int is_high = layout == HALVES && half;
                __m512 scale = from_float16(tables);
                const __m512 second = second_of(tables, scale, layout);
                if (is_high) scale = _mm512_mul_ps(scale, _mm512_set1_ps(1.0f / 16));
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const int64_t place = group * p.table_stride + row;
                    __m512 *onto = &total[i * rows + row][half];
                    const __m512i *sums_of = sum[i * rows + row];
                    const __m512i exact = is_high ? _mm512_sub_epi32(sums_of[1], sums_of[0]) : sums_of[half];
                    *onto = add_group(*onto, exact, scale, second, p.row_scales[place], p.row_bases[place]);
                }
            }
        p.x += inputs_of(layout);
        p.w += group_bytes_of(layout);
        p.later += p.later_bytes;
        p.tables += GROUP_TABLES;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * pairs; i++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + i * OUTPUTS + half * 16, total[i][half]);
}

/* Does the same, with constant numbers of rows and layouts for the compiler. */
AVX static void add_any_rows(int64_t rows, enum layout layout, struct part p, float *sums) {
#define SUMS(n, layout) case n: add_vectors(n, 1, layout, p, 0, sums); break;
#define UP_TO_SIX(l) switch (rows) { SUMS(1, l) SUMS(2, l) SUMS(3, l) SUMS(4, l) SUMS(5, l) SUMS(6, l) }
    if (layout == WHOLE) UP_TO_SIX(WHOLE)
    else if (layout == LONG) UP_TO_SIX(LONG)
    else if (layout == HALVES) UP_TO_SIX(HALVES)
    else UP_TO_SIX(LEVELS)
#undef UP_TO_SIX
#undef SUMS
}

/* Computes the sums of `pairs` pairs of 8 bits, at most `pairs_at_once`. */
AVX static void add_pairs(int64_t rows, int64_t pairs, enum layout layout, struct part p, int64_t pair, float *sums) {
#define SUMS(r, n, layout) case 10 * r + n: add_vectors(r, n, layout, p, pair, sums); break;
#define UP_TO_SIX(l)                                                                                                   \
    switch (10 * rows + pairs) {                                                                                       \
        SUMS(1, 1, l) SUMS(1, 2, l) SUMS(1, 3, l) SUMS(1, 4, l) SUMS(2, 1, l) SUMS(2, 2, l) SUMS(2, 3, l)              \
        SUMS(3, 1, l) SUMS(3, 2, l)                                                                                    \
    }
    if (layout == LONG) UP_TO_SIX(LONG)
    else UP_TO_SIX(WHOLE)
#undef UP_TO_SIX
#undef SUMS
}

static int64_t pairs_at_once(int64_t rows) { return rows == 1 ? 4 : VECTOR_ROWS / rows; }

/* Unpacks groups of 4 bits to int8 in `to`, which is aligned. */
AVX static void unpack(const uint8_t *from, int64_t num_groups, uint8_t *to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t group = 0; group < num_groups; group++, from += HALF_BLOCK, to += 2 * HALF_BLOCK)
        for (int line = 0; line < HALF_BLOCK; line += 64) {
            const __m512i both = _mm512_loadu_si512(from + line);
            _mm512_store_si512(to + line, _mm512_and_si512(both, low));
            _mm512_store_si512(to + HALF_BLOCK + line, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
}

/* Stores one group's products of 16 outputs in `numbers` [16, 16], using tile 0 or 1 and two operand tiles. */
#define MULTIPLY_GROUP(sum, inputs, weights, x, w, stride, numbers, layout)                                            \
    do {                                                                                                               \
        _tile_zero(sum);                                                                                               \
        tile_load(inputs, x, stride);                                                                                  \
        tile_load(weights, w, 64);                                                                                     \
        if (is_8_bits(layout)) _tile_dpbusd(sum, inputs, weights);                                                     \
        else _tile_dpbssd(sum, inputs, weights);                                                                       \
        _tile_stored(sum, numbers, 64);                                                                                \
    } while (0)

/* `add_vectors` with AMX, for `least_tiled` to 16 rows, the number that the tiles are configured for; W is int8. The
   sums of 16 outputs stay in registers. While one group is added to them, the next group is multiplied. */
AMX INLINE void add_tiles(const int rows, const enum layout layout, struct part p, float *sums) {
    int32_t numbers[2][TILE_ROWS * 16] __attribute__((aligned(64)));
    for (int half = 0; half < 2; half++) {
        __m512 total[TILE_ROWS];
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            total[row] = p.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * OUTPUTS + half * 16);
        const int8_t *x = p.x;
        const uint8_t *w = p.w + half * half_block_of(layout), *later = p.later + p.ahead;
        const uint16_t *tables = p.tables + half * 16;
        const float *row_scales = p.row_scales, *row_bases = p.row_bases;
        MULTIPLY_GROUP(0, 4, 6, x, w, p.stride, numbers[0], layout);
        for (int64_t group = 0; group < p.num_groups; group++) {
            x += inputs_of(layout), w += 2 * half_block_of(layout);
            if (group + 1 < p.num_groups) {
                if (group % 2) MULTIPLY_GROUP(0, 4, 6, x, w, p.stride, numbers[0], layout);
                else MULTIPLY_GROUP(1, 5, 7, x, w, p.stride, numbers[1], layout);
            }
            if (!half) fetch_lines(later, p.from, p.to);
            const __m512 scale = from_float16(tables), second = second_of(tables, scale, layout);
            const int32_t *of = numbers[group % 2];
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const __m512i sum = _mm512_load_si512(of + row * 16);
                total[row] = add_group(total[row], sum, scale, second, row_scales[row], row_bases[row]);
            }
            later += p.later_bytes, tables += GROUP_TABLES;
            row_scales += p.table_stride, row_bases += p.table_stride;
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) _mm512_storeu_ps(sums + row * OUTPUTS + half * 16, total[row]);
    }
}

static int64_t least_tiled(const struct quantized *p) { return p->group > GROUP ? LEAST_LONG : LEAST_TILED; }

/* Does the same, with constant numbers of rows, `least_tiled` to 16, and layouts for the compiler. */
AMX static void add_tile_rows(int64_t rows, enum layout layout, struct part p, float *sums) {
#define SUMS(n, layout) case n: add_tiles(n, layout, p, sums); break;
#define TO_SIXTEEN(l) SUMS(12, l) SUMS(13, l) SUMS(14, l) SUMS(15, l) SUMS(16, l)
    if (layout == WHOLE) switch (rows) { TO_SIXTEEN(WHOLE) }
    else if (layout == LEVELS) switch (rows) { TO_SIXTEEN(LEVELS) }
    else switch (rows) { SUMS(7, LONG) SUMS(8, LONG) SUMS(9, LONG) SUMS(10, LONG) SUMS(11, LONG) TO_SIXTEEN(LONG) }
#undef TO_SIXTEEN
#undef SUMS
}

/* Stores the sums [rows, 32] of a pair in `out`. */
AVX static void finish(const struct quantized *p, int64_t row, int64_t rows, int64_t pair, const float *sums) {
    if (!p->is_bf16) {
        finish_narrow(p, row, rows, pair, sums);
        return;
    }
    for (int64_t i = 0; i < rows; i++) {
        __m512 result[2];
        for (int half = 0; half < 2; half++) {
            const __m512 bias =
                p->bias ? _mm512_loadu_ps(p->bias + pair * OUTPUTS + half * 16) : _mm512_setzero_ps();
            result[half] = _mm512_add_ps(_mm512_loadu_ps(sums + i * OUTPUTS + half * 16), bias);
        }
        if (p->gate) {
            const __m512 gated = _mm512_mul_ps(rough_gate(p->gate, result[0]), result[1]);
            _mm256_storeu_si256(out_of(p, row + i, pair), (__m256i)_mm512_cvtneps_pbh(gated));
        } else {
            _mm512_storeu_si512(out_of(p, row + i, pair), (__m512i)_mm512_cvtne2ps_pbh(result[1], result[0]));
        }
    }
}

/* Multiplies up to FEW_ROWS rows by the 8-bit pairs [first, last), some pairs at once, each read whole. (Unpacking 4
   bits takes so long that memory is not the limit.) */
AVX static void multiply_few(const struct quantized *p, int64_t first, int64_t last) {
    float sums[VECTOR_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t rows = p->num_rows, groups = p->num_groups;
    const enum layout layout = p->group > GROUP ? LONG : WHOLE;
    const int64_t group_bytes = group_bytes_of(layout);
    struct part part = {.x = p->x, .stride = p->stride, .row_scales = p->row_scales, .row_bases = p->row_bases,
                        .table_stride = p->table_stride, .num_groups = groups, .later_bytes = group_bytes,
                        .ahead = PREFETCH, .to = (int)(group_bytes / 64), .is_first = 1};
    for (int64_t pair = first, pairs; pair < last; pair += pairs) {
        pairs = min(pairs_at_once(rows), last - pair);
        part.w = part.later = p->weight + pair * groups * group_bytes;
        part.tables = p->tables + pair * groups * GROUP_TABLES;
        add_pairs(rows, pairs, layout, part, groups, sums);
        for (int64_t i = 0; i < pairs; i++) finish(p, 0, rows, pair + i, sums + i * rows * OUTPUTS);
    }
}

/* Returns how many of the remaining rows are read together: as many as fit, or half of them if that gives two turns. */
static int64_t height_of(int64_t rows) {
    return rows > VECTOR_ROWS && rows < 2 * VECTOR_ROWS ? (rows + 1) / 2 : min(rows, VECTOR_ROWS);
}

/* Multiplies up to BLOCK_ROWS rows by the pairs [first, last). A block of a pair stays in the cache across the rows. */
AMX static void multiply_many(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    uint8_t unpacked[BLOCK_INPUTS * OUTPUTS] __attribute__((aligned(64)));
    float sums[BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t least = least_tiled(p);
    const int has_tiles = outrider_has_tiles && rows >= least;
    const int64_t max_rows = has_tiles ? TILE_ROWS : VECTOR_ROWS;
    const int64_t group_bytes = p->group * OUTPUTS * p->bits / 8, block = BLOCK_INPUTS / p->group;
    const int is_unpacked = p->bits == 4 && (has_tiles || rows > 4 * VECTOR_ROWS);
    const enum layout layout = p->bits == 8 ? p->group > GROUP ? LONG : WHOLE : is_unpacked ? LEVELS : HALVES;
    if (has_tiles) configure_tiles_for(min(rows, TILE_ROWS), min(rows, TILE_ROWS), p->group);
    for (int64_t pair = first; pair < last; pair++) {
        for (int64_t group = 0; group < p->num_groups; group += block) {
            struct part part = {.stride = p->stride, .table_stride = p->table_stride, .later_bytes = group_bytes};
            part.num_groups = min(block, p->num_groups - group);
            part.is_first = group == 0;
            part.ahead = rows <= max_rows ? PREFETCH : part.num_groups * group_bytes;
            part.w = part.later = p->weight + (pair * p->num_groups + group) * group_bytes;
            part.tables = p->tables + (pair * p->num_groups + group) * GROUP_TABLES;
            if (is_unpacked) {
                unpack(part.w, part.num_groups, unpacked);
                part.w = unpacked;
            }
            for (int64_t i = 0, height, lines = group_bytes / 64; i < rows; i += height) {
                const int is_tile = has_tiles && rows - i >= least;
                height = is_tile ? min(TILE_ROWS, rows - i) : height_of(rows - i);
                set_rows(&part, p, row + i, group, p->group);
                part.from = (int)(lines * i / rows), part.to = (int)(lines * (i + height) / rows);
                float *onto = sums + i * OUTPUTS;
                if (!is_tile) {
                    add_any_rows(height, layout, part, onto);
                    continue;
                }
                const int is_rest = i && height < TILE_ROWS;
                if (is_rest) configure_tiles_for(height, height, p->group);
                add_tile_rows(height, layout, part, onto);
                if (is_rest) configure_tiles_for(TILE_ROWS, TILE_ROWS, p->group);
            }
        }
        finish(p, row, rows, pair, sums);
    }
    if (has_tiles) _tile_release();
}

AMX void multiply_wide(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    if (p->bits == 8 && p->num_rows <= FEW_ROWS) multiply_few(p, first, last);
    else multiply_many(p, row, rows, first, last);
}
