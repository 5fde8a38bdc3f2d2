/* Products by weights of 8, 6 and 4 bits on AMX or AVX-512 VNNI. */

#include "amx.h"
#include "products/quantized.h"
#include "products/gate.h"

enum {
    BLOCK_INPUTS = 768, /* inputs that stay in the L1 cache across rows */
    VECTOR_SUMS = 6,    /* rows x pairs with all their sums in registers */
    VECTOR_ROWS = 8,    /* rows with their sums of one group in registers: faster where memory limits */
    FEW_ROWS = 3,       /* rows with their sums of several pairs in registers */
    MOST_PACKED = 24,   /* more rows are faster with W unpacked; arithmetic limits them */
    TILE_ROWS = 16,     /* rows of an AMX tile */
    LEAST_TILED = 12,   /* fewer rows are faster without AMX, with groups of 32 inputs, */
    LEAST_LONG = 7,     /* or of 64 */
};

/* The layouts of W: 8 bits in groups of 32 (WHOLE) or 64 (LONG), 6 bits (SIX), 4 bits with bytes (HALVES) or float16
   (BASED) in their tables, and 4 or 6 bits unpacked to bytes with tables of float32 (LEVELS). */
enum layout { WHOLE, LONG, SIX, HALVES, BASED, LEVELS };

INLINE int is_8_bits(const enum layout layout) { return layout == WHOLE || layout == LONG; }

INLINE int is_4_bits(const enum layout layout) { return layout == HALVES || layout == BASED; }

INLINE int64_t inputs_of(const enum layout layout) { return layout == LONG ? 2 * GROUP : GROUP; }

INLINE int64_t half_block_of(const enum layout layout) { return inputs_of(layout) * (HALF_BLOCK / GROUP); }

INLINE int64_t group_bytes_of(const enum layout layout) {
    if (layout == SIX) return HALF_BLOCK + QUARTERS;
    return half_block_of(layout) * (is_4_bits(layout) ? 1 : 2);
}

INLINE int64_t table_bytes_of(const enum layout layout) {
    return layout == LEVELS ? 8 * OUTPUTS : layout == SIX || layout == HALVES ? 2 * OUTPUTS : 4 * OUTPUTS;
}

/* A group's scales of 16 outputs, and the bases of their weights, or the sums of weights if rows have the bases. */
struct tables {
    __m512 scale, second;
};

AVX INLINE __m512 from_float16(const uint8_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }

AVX INLINE __m512i from_bytes(const uint8_t *x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); }

AVX INLINE struct tables read_tables(const uint8_t *from, const int half, const enum layout layout) {
    if (layout == LEVELS)
        return (struct tables){_mm512_loadu_ps(from + half * 64), _mm512_loadu_ps(from + 4 * OUTPUTS + half * 64)};
    if (layout == HALVES) {
        const __m512i scale = _mm512_slli_epi32(from_bytes(from + half * 16), 20);
        const __m512i sixteenth = _mm512_add_epi32(scale, _mm512_set1_epi32((int)((256u + LEAST_SCALE - 4) << 23)));
        const __m512 zero = _mm512_cvtepi32_ps(from_bytes(from + OUTPUTS + half * 16));
        return (struct tables){_mm512_castsi512_ps(_mm512_add_epi32(scale, _mm512_set1_epi32(LEAST_SCALE << 23))),
                               _mm512_mul_ps(_mm512_castsi512_ps(sixteenth), zero)};
    }
    const __m512 scale = from_float16(from + half * 32);
    const uint8_t *second = from + 2 * OUTPUTS + half * 32;
    if (layout == SIX) return (struct tables){scale, _mm512_mul_ps(scale, _mm512_set1_ps(-32.0f))};
    if (layout == BASED) return (struct tables){scale, from_float16(second)};
    const __m512i sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)second));
    return (struct tables){scale, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale)};
}

/* Four inputs of 32 outputs, as bytes. */
struct line {
    __m512i first, second;
};

/* Reads a line. Of 4 bits the second has both halves; `add_vectors` subtracts. */
AVX INLINE struct line read_line(const uint8_t *w, const int line, const enum layout layout) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(48);
    const __m512i both = _mm512_loadu_si512(w + line * 64);
    if (is_4_bits(layout)) return (struct line){_mm512_and_si512(both, low), both};
    if (layout != SIX) return (struct line){both, _mm512_loadu_si512(w + half_block_of(layout) + line * 64)};
    const __m512i quarters = _mm512_loadu_si512(w + HALF_BLOCK + line / 2 * 64);
    const __m512i first = line % 2 ? _mm512_slli_epi16(quarters, 2) : quarters;
    const __m512i second = line % 2 ? _mm512_slli_epi16(quarters, 4) : _mm512_srli_epi16(quarters, 2);
    const __m512i others = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    /* 0xea: the third, or both others. */
    return (struct line){_mm512_ternarylogic_epi32(first, high, _mm512_and_si512(both, low), 0xea),
                         _mm512_ternarylogic_epi32(second, high, others, 0xea)};
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
    const int64_t pair_bytes = pair * group_bytes_of(layout), pair_tables = pair * table_bytes_of(layout);
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
            const uint8_t *tables = p.tables + i * pair_tables + next / group_bytes_of(layout) * table_bytes_of(layout);
            fetch_lines(tables, 0, (int)(table_bytes_of(layout) / 64));
        }
        __m512i sum[VECTOR_ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < rows * pairs; i++) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int line = 0; line < inputs_of(layout) / 4; line++) { /* four inputs of 32 outputs */
#pragma GCC unroll 4
            for (int i = 0; i < pairs; i++) {
                const struct line w = read_line(p.w + i * pair_bytes, line, layout);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const __m512i inputs = broadcast(p.x + row * p.stride + line * 4);
                    sum[i * rows + row][0] = add_four(sum[i * rows + row][0], w.first, inputs, layout);
                    sum[i * rows + row][1] = add_four(sum[i * rows + row][1], w.second, inputs, layout);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                struct tables t = read_tables(p.tables + i * pair_tables, half, layout);
                const int is_high = is_4_bits(layout) && half;
                if (is_high) t.scale = _mm512_mul_ps(t.scale, _mm512_set1_ps(1.0f / 16));
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const int64_t place = group * p.table_stride + row;
                    __m512 *onto = &total[i * rows + row][half];
                    const __m512i *sums_of = sum[i * rows + row];
                    const __m512i exact = is_high ? _mm512_sub_epi32(sums_of[1], sums_of[0]) : sums_of[half];
                    *onto = add_group(*onto, exact, t.scale, t.second, p.row_scales[place], p.row_bases[place]);
                }
            }
        p.x += inputs_of(layout);
        p.w += group_bytes_of(layout);
        p.later += p.later_bytes;
        p.tables += table_bytes_of(layout);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * pairs; i++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + i * OUTPUTS + half * 16, total[i][half]);
}

/* Does the same, with constant numbers of rows and layouts for the compiler. */
AVX static void add_any_rows(int64_t rows, enum layout layout, struct part p, float *sums) {
#define SUMS(n, layout) case n: add_vectors(n, 1, layout, p, 0, sums); break;
#define ALL_ROWS(l)                                                                                                    \
    switch (rows) { SUMS(1, l) SUMS(2, l) SUMS(3, l) SUMS(4, l) SUMS(5, l) SUMS(6, l) SUMS(7, l) SUMS(8, l) }
    if (layout == WHOLE) ALL_ROWS(WHOLE)
    else if (layout == LONG) ALL_ROWS(LONG)
    else if (layout == SIX) ALL_ROWS(SIX)
    else if (layout == HALVES) ALL_ROWS(HALVES)
    else if (layout == BASED) ALL_ROWS(BASED)
    else ALL_ROWS(LEVELS)
#undef ALL_ROWS
#undef SUMS
}

/* Computes the sums of `pairs` pairs, at most `pairs_at_once`. */
AVX static void add_pairs(int64_t rows, int64_t pairs, enum layout layout, struct part p, int64_t pair, float *sums) {
#define SUMS(r, n, layout) case 10 * r + n: add_vectors(r, n, layout, p, pair, sums); break;
#define ALL_PAIRS(l)                                                                                                   \
    switch (10 * rows + pairs) {                                                                                       \
        SUMS(1, 1, l) SUMS(1, 2, l) SUMS(1, 3, l) SUMS(1, 4, l) SUMS(2, 1, l) SUMS(2, 2, l) SUMS(2, 3, l)              \
        SUMS(3, 1, l) SUMS(3, 2, l)                                                                                    \
    }
    if (layout == LONG) ALL_PAIRS(LONG)
    else if (layout == WHOLE) ALL_PAIRS(WHOLE)
    else ALL_PAIRS(SIX)
#undef ALL_PAIRS
#undef SUMS
}

static int64_t pairs_at_once(int64_t rows) { return rows == 1 ? 4 : VECTOR_SUMS / rows; }

/* A block of W unpacked to LEVELS. */
struct unpacked {
    uint8_t levels[BLOCK_INPUTS * OUTPUTS] __attribute__((aligned(64)));
    float tables[BLOCK_INPUTS / GROUP * 2 * OUTPUTS];
};

AVX INLINE void unpack_groups(struct part p, struct unpacked *to, const enum layout layout) {
    uint8_t *levels = to->levels;
    float *tables = to->tables;
    for (int64_t group = 0; group < p.num_groups; group++, levels += 2 * HALF_BLOCK, tables += 2 * OUTPUTS) {
#pragma GCC unroll 8
        for (int line = 0; line < GROUP / 4; line++) {
            struct line w = read_line(p.w, line, layout);
            if (layout != SIX) w.second = _mm512_and_si512(_mm512_srli_epi16(w.second, 4), _mm512_set1_epi8(15));
            _mm512_store_si512(levels + line * 64, w.first);
            _mm512_store_si512(levels + HALF_BLOCK + line * 64, w.second);
        }
        for (int half = 0; half < 2; half++) {
            const struct tables t = read_tables(p.tables, half, layout);
            _mm512_store_ps(tables + half * 16, t.scale);
            _mm512_store_ps(tables + OUTPUTS + half * 16, t.second);
        }
        p.w += group_bytes_of(layout), p.tables += table_bytes_of(layout);
    }
}

AVX static void unpack(struct part p, struct unpacked *to, enum layout layout) {
    if (layout == SIX) unpack_groups(p, to, SIX);
    else if (layout == HALVES) unpack_groups(p, to, HALVES);
    else unpack_groups(p, to, BASED);
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
        const uint8_t *tables = p.tables;
        const float *row_scales = p.row_scales, *row_bases = p.row_bases;
        MULTIPLY_GROUP(0, 4, 6, x, w, p.stride, numbers[0], layout);
        for (int64_t group = 0; group < p.num_groups; group++) {
            x += inputs_of(layout), w += 2 * half_block_of(layout);
            if (group + 1 < p.num_groups) {
                if (group % 2) MULTIPLY_GROUP(0, 4, 6, x, w, p.stride, numbers[0], layout);
                else MULTIPLY_GROUP(1, 5, 7, x, w, p.stride, numbers[1], layout);
            }
            if (!half) fetch_lines(later, p.from, p.to);
            const struct tables t = read_tables(tables, half, layout);
            const int32_t *of = numbers[group % 2];
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const __m512i sum = _mm512_load_si512(of + row * 16);
                total[row] = add_group(total[row], sum, t.scale, t.second, row_scales[row], row_bases[row]);
            }
            later += p.later_bytes, tables += table_bytes_of(layout);
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

static enum layout layout_of(const struct quantized *p) {
    if (p->kind == INT8) return p->group > GROUP ? LONG : WHOLE;
    return p->kind == INT6 ? SIX : p->kind == INT4 ? HALVES : BASED;
}

/* Multiplies up to FEW_ROWS rows by the pairs [first, last), some pairs at once, each read whole. */
AVX static void multiply_few(const struct quantized *p, int64_t first, int64_t last) {
    float sums[VECTOR_SUMS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t rows = p->num_rows, groups = p->num_groups, bytes = group_bytes(p);
    struct part part = {.x = p->x, .stride = p->stride, .row_scales = p->row_scales, .row_bases = p->row_bases,
                        .table_stride = p->table_stride, .num_groups = groups, .later_bytes = bytes,
                        .ahead = PREFETCH, .to = (int)(bytes / 64), .is_first = 1};
    for (int64_t pair = first, pairs; pair < last; pair += pairs) {
        pairs = min(pairs_at_once(rows), last - pair);
        part.w = part.later = p->weight + pair * groups * bytes;
        part.tables = p->tables + pair * groups * table_bytes(p->kind);
        add_pairs(rows, pairs, layout_of(p), part, groups, sums);
        for (int64_t i = 0; i < pairs; i++) finish(p, 0, rows, pair + i, sums + i * rows * OUTPUTS);
    }
}

/* Returns how many of the remaining rows are read together: as many as fit, or half of them if that gives two turns. */
static int64_t height_of(int64_t rows, int64_t most) {
    return rows > most && rows < 2 * most ? (rows + 1) / 2 : min(rows, most);
}

/* Multiplies up to BLOCK_ROWS rows by the pairs [first, last). A block of a pair stays in the cache across the rows. */
AMX static void multiply_many(const struct quantized *p, int64_t row, int64_t rows, int64_t first, int64_t last) {
    struct unpacked unpacked;
    float sums[BLOCK_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t least = least_tiled(p), bytes = group_bytes(p), block = BLOCK_INPUTS / p->group;
    const int has_tiles = outrider_has_tiles && rows >= least;
    const int64_t vector_rows = outrider_is_amd && rows <= MOST_PACKED ? VECTOR_ROWS : VECTOR_SUMS;
    const int64_t max_rows = has_tiles ? TILE_ROWS : vector_rows;
    const int is_unpacked = p->kind != INT8 && (has_tiles || rows > MOST_PACKED);
    const enum layout packed = layout_of(p), layout = is_unpacked ? LEVELS : packed;
    if (has_tiles) configure_tiles_for(min(rows, TILE_ROWS), min(rows, TILE_ROWS), p->group);
    for (int64_t pair = first; pair < last; pair++) {
        for (int64_t group = 0; group < p->num_groups; group += block) {
            struct part part = {.stride = p->stride, .table_stride = p->table_stride, .later_bytes = bytes};
            part.num_groups = min(block, p->num_groups - group);
            part.is_first = group == 0;
            part.ahead = rows <= max_rows ? PREFETCH : part.num_groups * bytes;
            part.w = part.later = p->weight + (pair * p->num_groups + group) * bytes;
            part.tables = p->tables + (pair * p->num_groups + group) * table_bytes(p->kind);
            if (is_unpacked) {
                unpack(part, &unpacked, packed);
                part.w = unpacked.levels, part.tables = (const uint8_t *)unpacked.tables;
            }
            for (int64_t i = 0, height, lines = bytes / 64; i < rows; i += height) {
                const int is_tile = has_tiles && rows - i >= least;
                height = is_tile ? min(TILE_ROWS, rows - i) : height_of(rows - i, vector_rows);
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
    const int is_few = (p->kind == INT8 || p->kind == INT6) && p->num_rows <= FEW_ROWS;
    if (is_few && !outrider_is_amd) multiply_few(p, first, last);
    else multiply_many(p, row, rows, first, last);
}
