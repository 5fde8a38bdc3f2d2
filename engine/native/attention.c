/* Paged attention on AVX-512, and on AMX for keys and values in bfloat16: the pool is read in place.

   A job is one kv head and up to 256 *lanes* of a span, a lane being one query head of one token; 16 lanes make a tile.
   Everything is computed with lanes side by side in registers: no sum crosses a register.

       scores [keys x 16 lanes] = K [keys x D] Q^T [D x 16 lanes]        K as it lies in the pool
       sums   [D x 16 lanes]   += V^T [D x keys] P [keys x 16 lanes]     V^T transposed once per job and unit of keys

   A lane's bits depend on its query and on the keys that it sees, each at its own place, and on nothing else: keys are
   read in units of UNIT that begin at fixed places, each SPLIT of them has softmax and sums of its own
   (arXiv:2205.14135), and splits are merged in their order (arXiv:2311.01282), whoever has read them. A key that a lane
   does not see adds exact zeros. A node of a draft tree reads its own path, as the chain that it may become: the keys
   up to the last unit that lies before the tree with the other lanes, and the rest by itself. */

#include "processor.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

enum {
    LANES = 16,
    UNIT = 128,
    SPLIT = 1024,
    MAX_TILES = 16,  /* of a job */
    FEW_TILES = 2,   /* up to which the splits of a job are jobs of their own */
    MAX_DIM = 256,   /* of a head */
    SMALL = 1 << 14, /* lanes of whole tiles x keys below which one thread does all */
};

static const float FLOOR = -1e30f; /* finite: a lane that has seen no key yet makes no NaN */
static const float LOG2_E = 1.44269504f;

struct span {
    int64_t first_row; /* in the pass */
    int64_t num_rows;
    int64_t start; /* place of the first row */
    int64_t table; /* where its block table begins */
    int64_t tree_start;
    int64_t nodes; /* where the nodes of its rows begin; -1: they are a chain */
};

struct node {
    int32_t position;
    int32_t path; /* where the places of its path from `tree_start` on begin */
};

/* The attention of a pass in one layer; engine/native_attention.py has the same fields. Strides count numbers. */
struct attention {
    const void *query; /* [T, H * G, D] */
    const void *new_keys, *new_values; /* [T, H, D] */
    void *keys, *values; /* [N, P, H, D], with a unit behind each head where `is_int8` */
    void *out; /* [T, H * G, D of the values] */
    const int64_t *slots; /* [T], of the new keys */
    const float *sinks; /* [H * G] or NULL */
    const struct span *spans;
    const int32_t *tables;
    const struct node *nodes;
    const int32_t *paths;
    int64_t num_rows, num_spans;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t num_heads, group_size, key_dim, value_dim, block_size;
    int64_t window; /* 0: none */
    int64_t is_bf16, is_int8;
    float scaling, softcap; /* 0: none */
};

struct job {
    const struct span *span;
    int64_t head, first_lane, num_lanes;
    int64_t first_split, last_split; /* [first, last) */
    float *partial;                  /* where the one split goes that is merged later, or NULL */
    struct merge *merge;
};

/* Splits of the same lanes that several jobs have read. */
struct merge {
    float *partials;
    int64_t num_partials, size; /* numbers of a partial */
    int64_t num_open;           /* jobs that have not ended */
};

static int64_t up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

/* 2^x to 2e-9 of itself, and to 9e-5 where `is_rough`, as weights in bfloat16 may be; exactly 1 at 0. */
AVX INLINE __m512 power_of_two(__m512 x, int is_rough) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* [0, 1) */
    __m512 sum;
    if (is_rough) {
        sum = _mm512_set1_ps(0.07706706353f);
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.2276449539f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6951168019f));
    } else {
        sum = _mm512_set1_ps(2.161291893e-4f);
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.246784513e-3f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.675451731e-3f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.548528052e-2f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.2402293056f));
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6931470444f));
    }
    return _mm512_scalef_ps(_mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f)), x);
}

/* rows[i] holds M[i, 0 .. 15] -> M[0 .. 15, i]. */
AVX INLINE void transpose(__m512i rows[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

/* ---- The softmax of some lanes over some keys: [peak | total | sums, dim by dim], 16 lanes each. ---- */

static int64_t state_size(int64_t width) { return (width + 2) * LANES; }

AVX INLINE void clear(float *state, int64_t width, __mmask16 lanes) {
    _mm512_mask_storeu_ps(state, lanes, _mm512_set1_ps(FLOOR));
    for (int64_t i = 1; i < width + 2; i++) _mm512_mask_storeu_ps(state + i * LANES, lanes, _mm512_setzero_ps());
}

/* Add what `later` has seen to `state`, for some lanes. */
AVX INLINE void merge(float *state, const float *later, int64_t width, __mmask16 lanes) {
    __m512 peak = _mm512_loadu_ps(state), peak_later = _mm512_loadu_ps(later);
    __m512 top = _mm512_max_ps(peak, peak_later);
    __m512 factor = power_of_two(_mm512_sub_ps(peak, top), 0);
    __m512 factor_later = power_of_two(_mm512_sub_ps(peak_later, top), 0);
    _mm512_mask_storeu_ps(state, lanes, top);
    for (int64_t i = 1; i < width + 2; i++) {
        __m512 old = _mm512_mul_ps(factor, _mm512_loadu_ps(state + i * LANES));
        __m512 sum = _mm512_fmadd_ps(factor_later, _mm512_loadu_ps(later + i * LANES), old);
        _mm512_mask_storeu_ps(state + i * LANES, lanes, sum);
    }
}

/* ---- A unit of keys and values, as the job's tiles read them. ---- */

static const char zeros[MAX_DIM * 4] __attribute__((aligned(64)));

struct unit {
    int64_t begin, count; /* keys [begin, begin + count) */
    int64_t slots[UNIT];
    const char *keys[UNIT], *values[UNIT]; /* rows in memory; those behind the last key are rows of zeros */
    const char *key_tiles[UNIT / 16];      /* 16 rows each, at a stride */
    int64_t key_strides[UNIT / 16];
};

/* Bytes of a stored head. */
static int64_t head_bytes(const struct attention *a, int64_t dim) {
    return a->is_int8 ? dim + 2 : dim * (a->is_bf16 ? 2 : 4);
}

static int64_t key_bytes(const struct attention *a) { return head_bytes(a, a->key_dim); }
static int64_t value_bytes(const struct attention *a) { return head_bytes(a, a->value_dim); }

/* Where the unit's keys and values lie; those from `tree_start` on follow `path`, if there is one. */
static void find_rows(const struct attention *a, const struct job *job, const int32_t *path, struct unit *unit) {
    const struct span *span = job->span;
    const int32_t *table = a->tables + span->table;
    const int64_t size = a->block_size;
    int64_t end = unit->begin + unit->count;
    if (path) end = least(end, most(span->tree_start, unit->begin));
    int64_t place = unit->begin;
    while (place < end) {
        int64_t slot = table[place / size] * size + place % size;
        int64_t last = least(end, place - place % size + size);
        for (; place < last; place++) unit->slots[place - unit->begin] = slot++;
    }
    for (; place < unit->begin + unit->count; place++) {
        int64_t node = path[place - span->tree_start];
        unit->slots[place - unit->begin] = table[node / size] * size + node % size;
    }
    const char *keys = (const char *)a->keys + job->head * key_bytes(a);
    const char *values = (const char *)a->values + job->head * value_bytes(a);
    const int64_t key_stride = a->num_heads * key_bytes(a), value_stride = a->num_heads * value_bytes(a);
    for (int64_t i = 0; i < UNIT; i++) {
        unit->keys[i] = i < unit->count ? keys + unit->slots[i] * key_stride : zeros;
        unit->values[i] = i < unit->count ? values + unit->slots[i] * value_stride : zeros;
    }
}

/* Ask for two rows of a unit that comes later: blocks lie anywhere, which no processor can foresee. A few at a time, so
   that they come while others are computed with. */
AVX INLINE void fetch(const char *const *rows, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) {
        _mm_prefetch(rows[0] + at, _MM_HINT_T1);
        _mm_prefetch(rows[1] + at, _MM_HINT_T1);
    }
}

/* A stored head of int8 as numbers of the model's type, zeros up to `width`. */
AVX INLINE void load_int8(const char *head, int64_t dim, int64_t width, int is_bf16, void *out) {
    bf16 bits;
    memcpy(&bits, head + dim, 2);
    const __m512 unit = _mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)bits << 16)));
    for (int64_t d = 0; d < width; d += 16) {
        __mmask16 lanes = dim - d >= 16 ? 0xffff : dim > d ? (1 << (dim - d)) - 1 : 0;
        __m512i whole = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, head + d));
        __m512 numbers = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), unit);
        if (is_bf16) _mm256_storeu_si256((__m256i *)((bf16 *)out + d), (__m256i)_mm512_cvtneps_pbh(numbers));
        else _mm512_storeu_ps((float *)out + d, numbers);
    }
}

/* Bring to `room` what the kernel cannot read as it is, and keys that it reads often: rows of a pool lie so far apart
   that they share few sets of the cache. */
AVX static void load(const struct attention *a, struct unit *unit, char *room, int is_read_once) {
    const int64_t item = a->is_bf16 ? 2 : 4, key_stride = a->num_heads * key_bytes(a);
    const int64_t key_width = up(a->key_dim, 32), value_width = up(a->value_dim, 32);
    char *room_values = room + UNIT * key_width * item;
    const int64_t count = unit->count;
    if (a->is_int8)
        for (int64_t i = 0; i < count; i++) {
            load_int8(unit->keys[i], a->key_dim, key_width, a->is_bf16, room + i * key_width * item);
            load_int8(unit->values[i], a->value_dim, value_width, a->is_bf16, room_values + i * value_width * item);
            unit->keys[i] = room + i * key_width * item;
            unit->values[i] = room_values + i * value_width * item;
        }
    if (!a->is_bf16) return;
    for (int64_t tile = 0; tile < (count + 15) / 16; tile++) {
        const int64_t first = tile * 16;
        const int is_whole = first + 16 <= count;
        const int is_run = is_whole && unit->slots[first + 15] == unit->slots[first] + 15;
        if (a->is_int8 && is_whole) {
            unit->key_tiles[tile] = unit->keys[first], unit->key_strides[tile] = key_width * 2;
        } else if (is_run && is_read_once && a->key_dim % 32 == 0) {
            unit->key_tiles[tile] = unit->keys[first], unit->key_strides[tile] = key_stride;
        } else {
            char *copy = room + first * key_width * 2;
            for (int64_t i = 0; i < 16; i++) {
                char *row = copy + i * key_width * 2;
                if (unit->keys[first + i] != row) memcpy(row, unit->keys[first + i], a->key_dim * 2);
                memset(row + a->key_dim * 2, 0, (key_width - a->key_dim) * 2);
            }
            unit->key_tiles[tile] = copy, unit->key_strides[tile] = key_width * 2;
        }
    }
}

/* V^T of the unit as tiles of 16 dims x 32 keys, [keys / 32, dims / 16]. Two tiles share 32 dims, of which the even one
   has 0-3 8-11 16-19 24-27 and the odd one the others: as they come apart in registers. */
AVX static void transpose_values(const struct unit *unit, int64_t dim, const struct unit *next, int64_t num_bytes,
                                    bf16 *tiles) {
    const int64_t width = up(dim, 32);
    for (int64_t key = 0; key < unit->count; key += 32)
        for (int64_t d = 0; d < width; d += 32) {
            const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
            __m512i low[16], high[16];
            for (int64_t i = 0; i < 16; i++) {
                const char *const *rows = unit->values + key + 2 * i;
                if (next && d == 0) fetch(next->values + key + 2 * i, num_bytes);
                __m512i first = _mm512_maskz_loadu_epi16(dims, rows[0] + 2 * d);
                __m512i second = _mm512_maskz_loadu_epi16(dims, rows[1] + 2 * d);
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

/* ---- One or two tiles of lanes over one unit. ---- */

/* scores [tiles, UNIT, LANES] of the first `num_keys` (a multiple of 32) of the unit; queries [tiles, D, LANES]. */
AMX INLINE void score_tiles(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                            float *scores, int is_pair) {
    const int64_t num_tiles = (unit->count + 15) / 16;
    for (int64_t tile = 0; tile < num_keys / 16; tile += 2) {
        const int64_t other = least(tile + 1, num_tiles - 1);
        const char *low = unit->key_tiles[tile], *high = unit->key_tiles[other];
        const int64_t low_stride = unit->key_strides[tile], high_stride = unit->key_strides[other];
        _tile_zero(0);
        _tile_zero(1);
        if (is_pair) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t d = 0; d < width; d += 32) {
            _tile_loadd(6, queries + d * LANES, 64);
            _tile_loadd(4, low + d * 2, low_stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, high + d * 2, high_stride);
            _tile_dpbf16ps(1, 5, 6);
            if (is_pair) {
                _tile_loadd(7, queries + (width + d) * LANES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores + tile * 16 * LANES, 64);
        _tile_stored(1, scores + (tile + 1) * 16 * LANES, 64);
        if (is_pair) {
            _tile_stored(2, scores + (UNIT + tile * 16) * LANES, 64);
            _tile_stored(3, scores + (UNIT + (tile + 1) * 16) * LANES, 64);
        }
    }
}

/* `score_tiles` without AMX. */
AVX INLINE void score_vectors(const struct unit *unit, int64_t num_keys, const bf16 *queries, int64_t width,
                                 float *scores, int is_pair) {
    const int at_once = is_pair ? 8 : 16; /* keys, whose sums fill the registers */
    const int64_t last_tile = (unit->count - 1) / 16;
    for (int64_t key = 0; key < num_keys; key += at_once) {
        const int64_t tile = least(key / 16, last_tile), stride = unit->key_strides[tile];
        const char *keys = unit->key_tiles[tile] + key % 16 * stride;
        __m512 sums[16][2];
        for (int i = 0; i < at_once; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += 2) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(queries + d * LANES);
            const __m512bh second = is_pair ? (__m512bh)_mm512_loadu_si512(queries + (width + d) * LANES) : first;
#pragma GCC unroll 16
            for (int i = 0; i < at_once; i++) {
                const __m512bh numbers = (__m512bh)broadcast(keys + i * stride + d * 2);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], first, numbers);
                if (is_pair) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], second, numbers);
            }
        }
        for (int i = 0; i < at_once; i++) {
            _mm512_storeu_ps(scores + (key + i) * LANES, sums[i][0]);
            if (is_pair) _mm512_storeu_ps(scores + (UNIT + key + i) * LANES, sums[i][1]);
        }
    }
}

AVX INLINE void score_f32(const struct unit *unit, int64_t num_keys, const float *queries, int64_t dim, int64_t width,
                      float *scores, int is_pair) {
    for (int64_t key = 0; key < num_keys; key += 8) {
        __m512 sums[8][2];
        for (int i = 0; i < 8; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        const float *rows[8];
        for (int i = 0; i < 8; i++) rows[i] = (const float *)unit->keys[key + i];
        for (int64_t d = 0; d < dim; d++) {
            __m512 first = _mm512_loadu_ps(queries + d * LANES), second = first;
            if (is_pair) second = _mm512_loadu_ps(queries + (width + d) * LANES);
            for (int i = 0; i < 8; i++) {
                __m512 number = _mm512_set1_ps(rows[i][d]);
                sums[i][0] = _mm512_fmadd_ps(number, first, sums[i][0]);
                if (is_pair) sums[i][1] = _mm512_fmadd_ps(number, second, sums[i][1]);
            }
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(scores + (key + i) * LANES, sums[i][0]);
            if (is_pair) _mm512_storeu_ps(scores + (UNIT + key + i) * LANES, sums[i][1]);
        }
    }
}

/* Which lanes see which keys. */
struct sight {
    __m512i position; /* -1: a lane that sees nothing */
    int64_t lowest, highest;
    int64_t window;
};

AVX INLINE __mmask16 seen(const struct sight *sight, int64_t key) {
    __m512i place = _mm512_set1_epi32((int)key);
    __mmask16 lanes = _mm512_cmple_epi32_mask(place, sight->position);
    if (!sight->window) return lanes;
    __m512i oldest = _mm512_sub_epi32(sight->position, _mm512_set1_epi32((int)sight->window));
    return lanes & _mm512_cmpgt_epi32_mask(place, oldest);
}

/* Scores of one tile to weights, in place or as pairs of bfloat16; peak, total and sums follow the new peak. */
AVX INLINE void soften(const struct sight *sight, int64_t begin, int64_t num_keys, float *scores, float scale,
                       float *state, int64_t width, const struct unit *next, int64_t num_bytes, bf16 *weights,
                       int is_masked) {
    const __m512 floor = _mm512_set1_ps(FLOOR);
    __m512 tops[4] = {floor, floor, floor, floor};
    for (int64_t key = 0; key < num_keys; key += 4)
        for (int i = 0; i < 4; i++) {
            __m512 score = _mm512_loadu_ps(scores + (key + i) * LANES);
            if (is_masked) score = _mm512_mask_mov_ps(floor, seen(sight, begin + key + i), score);
            tops[i] = _mm512_max_ps(tops[i], score);
        }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 peak = _mm512_loadu_ps(state);
    const __m512 new_peak = _mm512_max_ps(peak, _mm512_mul_ps(top, factor));
    __m512 total = _mm512_setzero_ps(), total_odd = total;
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t key = 0; key < num_keys; key += 2) {
        float *at = scores + key * LANES;
        if (next) {
            fetch(next->keys + key, num_bytes);
            if (!weights) fetch(next->values + key, num_bytes);
        }
        __m512 even = _mm512_fmsub_ps(_mm512_loadu_ps(at), factor, new_peak);
        __m512 odd = _mm512_fmsub_ps(_mm512_loadu_ps(at + LANES), factor, new_peak);
        even = power_of_two(even, weights != NULL);
        odd = power_of_two(odd, weights != NULL);
        if (is_masked) {
            even = _mm512_maskz_mov_ps(seen(sight, begin + key), even);
            odd = _mm512_maskz_mov_ps(seen(sight, begin + key + 1), odd);
        }
        total = _mm512_add_ps(total, even);
        total_odd = _mm512_add_ps(total_odd, odd);
        if (weights) {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            _mm512_store_si512(weights + key * LANES, _mm512_permutexvar_epi16(interleave, both));
        } else {
            _mm512_storeu_ps(at, even);
            _mm512_storeu_ps(at + LANES, odd);
        }
    }
    const __m512 fade = power_of_two(_mm512_sub_ps(peak, new_peak), 0);
    total = _mm512_add_ps(total, total_odd);
    _mm512_storeu_ps(state, new_peak);
    _mm512_storeu_ps(state + LANES, _mm512_fmadd_ps(_mm512_loadu_ps(state + LANES), fade, total));
    if (_mm512_cmpneq_ps_mask(fade, _mm512_set1_ps(1.0f)))
        for (int64_t i = 2; i < width + 2; i++) {
            float *sum = state + i * LANES;
            _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), fade));
        }
}

/* cap tanh(score * scaling / cap), to 1e-7 of the cap. */
AVX static void cap(float *scores, int64_t num_keys, float scaling, float softcap) {
    const __m512 one = _mm512_set1_ps(1.0f), factor = _mm512_set1_ps(2 * LOG2_E * scaling / softcap);
    const __m512 bound = _mm512_set1_ps(60.0f);
    for (int64_t i = 0; i < num_keys * LANES; i += LANES) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i), factor);
        x = _mm512_max_ps(_mm512_min_ps(x, bound), _mm512_sub_ps(_mm512_setzero_ps(), bound));
        __m512 grown = power_of_two(x, 0);
        __m512 ratio = _mm512_div_ps(_mm512_sub_ps(grown, one), _mm512_add_ps(grown, one));
        _mm512_storeu_ps(scores + i, _mm512_mul_ps(ratio, _mm512_set1_ps(softcap)));
    }
}

/* sums += V^T P for the first `num_keys` of the unit. */
AMX INLINE void add_tiles(const bf16 *values, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                          int64_t size, int is_pair) {
    for (int64_t d = 0; d < width; d += 32) {
        float *low = sums + d * LANES, *high = low + 16 * LANES;
        _tile_loadd(0, low, 64);
        _tile_loadd(1, high, 64);
        if (is_pair) {
            _tile_loadd(2, low + size, 64);
            _tile_loadd(3, high + size, 64);
        }
        for (int64_t key = 0; key < num_keys; key += 32) {
            const bf16 *v = values + (key / 32 * (width / 16) + d / 16) * 512;
            _tile_loadd(6, weights + key * LANES, 64);
            _tile_loadd(4, v, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, v + 512, 64);
            _tile_dpbf16ps(1, 5, 6);
            if (is_pair) {
                _tile_loadd(7, weights + (UNIT + key) * LANES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, low, 64);
        _tile_stored(1, high, 64);
        if (is_pair) {
            _tile_stored(2, low + size, 64);
            _tile_stored(3, high + size, 64);
        }
    }
}

/* `add_tiles` without AMX. */
AVX INLINE void add_vectors(const bf16 *values, const bf16 *weights, int64_t num_keys, int64_t width, float *sums,
                               int64_t size, int is_pair) {
    const int at_once = is_pair ? 8 : 16; /* dims, whose sums fill the registers */
    for (int64_t d = 0; d < width; d += at_once) {
        float *onto = sums + d * LANES;
        __m512 kept[16][2];
        for (int i = 0; i < at_once; i++) {
            kept[i][0] = _mm512_loadu_ps(onto + i * LANES);
            if (is_pair) kept[i][1] = _mm512_loadu_ps(onto + size + i * LANES);
        }
        for (int64_t key = 0; key < num_keys; key += 32) {
            const bf16 *tile = values + (key / 32 * (width / 16) + d / 16) * 512 + d % 16 * 32;
            for (int64_t i = 0; i < 32; i += 2) {
                const bf16 *at = weights + (key + i) * LANES;
                const __m512bh first = (__m512bh)_mm512_loadu_si512(at);
                const __m512bh second = is_pair ? (__m512bh)_mm512_loadu_si512(at + UNIT * LANES) : first;
#pragma GCC unroll 16
                for (int dim = 0; dim < at_once; dim++) {
                    const __m512bh numbers = (__m512bh)broadcast(tile + dim * 32 + i);
                    kept[dim][0] = _mm512_dpbf16_ps(kept[dim][0], first, numbers);
                    if (is_pair) kept[dim][1] = _mm512_dpbf16_ps(kept[dim][1], second, numbers);
                }
            }
        }
        for (int i = 0; i < at_once; i++) {
            _mm512_storeu_ps(onto + i * LANES, kept[i][0]);
            if (is_pair) _mm512_storeu_ps(onto + size + i * LANES, kept[i][1]);
        }
    }
}

/* The same in float32, for `dims` of the sums from `d` on. */
AVX INLINE void add_dims_f32(const struct unit *unit, int64_t d, int dims, const float *weights, int64_t num_keys,
                         float *sums, int64_t size, int is_pair) {
    __m512 kept[8][2];
    for (int i = 0; i < dims; i++) {
        kept[i][0] = _mm512_loadu_ps(sums + (d + i) * LANES);
        if (is_pair) kept[i][1] = _mm512_loadu_ps(sums + size + (d + i) * LANES);
    }
    for (int64_t key = 0; key < num_keys; key++) {
        const float *row = (const float *)unit->values[key] + d;
        __m512 first = _mm512_loadu_ps(weights + key * LANES), second = first;
        if (is_pair) second = _mm512_loadu_ps(weights + (UNIT + key) * LANES);
        for (int i = 0; i < dims; i++) {
            __m512 number = _mm512_set1_ps(row[i]);
            kept[i][0] = _mm512_fmadd_ps(number, first, kept[i][0]);
            if (is_pair) kept[i][1] = _mm512_fmadd_ps(number, second, kept[i][1]);
        }
    }
    for (int i = 0; i < dims; i++) {
        _mm512_storeu_ps(sums + (d + i) * LANES, kept[i][0]);
        if (is_pair) _mm512_storeu_ps(sums + size + (d + i) * LANES, kept[i][1]);
    }
}

AVX INLINE void add_f32(const struct unit *unit, int64_t dim, const float *weights, int64_t num_keys, float *sums,
                    int64_t size, int is_pair) {
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) add_dims_f32(unit, d, 8, weights, num_keys, sums, size, is_pair);
    for (; d < dim; d++) add_dims_f32(unit, d, 1, weights, num_keys, sums, size, is_pair);
}

/* Add a unit to the states of one or two tiles. */
AMX INLINE void attend_tiles(const struct attention *a, const struct unit *unit, const struct unit *next,
                         const bf16 *values, const void *queries, const struct sight *sights, float *states,
                         int is_pair) {
    float scores[2 * UNIT * LANES] __attribute__((aligned(64)));
    bf16 weights[2 * UNIT * LANES] __attribute__((aligned(64)));
    const int64_t key_width = up(a->key_dim, 32), width = up(a->value_dim, 32), size = state_size(width);
    const int64_t highest = is_pair ? most(sights[0].highest, sights[1].highest) : sights[0].highest;
    const int64_t num_keys = up(least(unit->count, highest + 1 - unit->begin), 32);
    if (num_keys <= 0) return;
    if (a->is_bf16 && outrider_has_tiles) score_tiles(unit, num_keys, queries, key_width, scores, is_pair);
    else if (a->is_bf16) score_vectors(unit, num_keys, queries, key_width, scores, is_pair);
    else score_f32(unit, num_keys, queries, a->key_dim, key_width, scores, is_pair);
    for (int tile = 0; tile <= is_pair; tile++) {
        const struct sight *sight = sights + tile;
        float *scored = scores + tile * UNIT * LANES, scale = a->scaling * LOG2_E;
        bf16 *weighed = weights + tile * UNIT * LANES;
        if (a->softcap > 0) cap(scored, num_keys, a->scaling, a->softcap), scale = LOG2_E;
        const int is_masked = unit->begin + num_keys - 1 > sight->lowest ||
                              (sight->window && unit->begin <= sight->highest - sight->window);
        float *state = states + tile * size;
        const struct unit *later = tile ? NULL : next;
        const int64_t first = unit->begin, bytes = key_bytes(a);
        if (is_masked && a->is_bf16)
            soften(sight, first, num_keys, scored, scale, state, width, NULL, 0, weighed, 1);
        else if (is_masked) soften(sight, first, num_keys, scored, scale, state, width, NULL, 0, NULL, 1);
        else if (a->is_bf16) soften(sight, first, num_keys, scored, scale, state, width, later, bytes, weighed, 0);
        else soften(sight, first, num_keys, scored, scale, state, width, later, bytes, NULL, 0);
    }
    float *sums = states + 2 * LANES;
    if (a->is_bf16 && outrider_has_tiles) add_tiles(values, weights, num_keys, width, sums, size, is_pair);
    else if (a->is_bf16) add_vectors(values, weights, num_keys, width, sums, size, is_pair);
    else add_f32(unit, a->value_dim, scores, num_keys, sums, size, is_pair);
}

AMX static void attend_one(const struct attention *a, const struct unit *unit, const struct unit *next,
                              const bf16 *values, const void *queries, const struct sight *sights, float *states) {
    attend_tiles(a, unit, next, values, queries, sights, states, 0);
}

AMX static void attend_two(const struct attention *a, const struct unit *unit, const struct unit *next,
                              const bf16 *values, const void *queries, const struct sight *sights, float *states) {
    attend_tiles(a, unit, next, values, queries, sights, states, 1);
}

/* ---- A job. ---- */

/* What a job works on; lanes are those of the job, in tiles. */
struct work {
    const struct attention *a;
    const struct job *job;
    int64_t num_tiles, end; /* keys that any lane sees: [0, end) */
    char *queries;          /* [tiles, D, LANES] */
    float *states;          /* of the split that is read */
    struct sight *sights;
    char *room;
    bf16 *values;
    struct unit units[2]; /* this one and the next */
};

static int64_t token_of(const struct work *w, int64_t lane) {
    const int64_t last = w->job->num_lanes - 1; /* lanes behind the last repeat it, and are not stored */
    return (w->job->first_lane + least(lane, last)) / w->a->group_size;
}

static const struct node *node_of(const struct work *w, int64_t token) {
    const struct span *span = w->job->span;
    return span->nodes < 0 ? NULL : w->a->nodes + span->nodes + token;
}

static int64_t position_of(const struct work *w, int64_t token) {
    const struct node *node = node_of(w, token);
    return node ? node->position : w->job->span->start + token;
}

static int64_t query_head(const struct work *w, int64_t lane) {
    return w->job->head * w->a->group_size + (w->job->first_lane + lane) % w->a->group_size;
}

/* Queries of the job's lanes to [tiles, D, LANES], pairs of dims side by side in bfloat16; zeros up to whole widths. */
AVX static void take_queries(struct work *w) {
    const struct attention *a = w->a;
    const int64_t item = a->is_bf16 ? 2 : 4, bytes = a->key_dim * item, width = up(a->key_dim, 32) * item;
    for (int64_t tile = 0; tile < w->num_tiles; tile++)
        for (int64_t at = 0; at < width; at += 64) {
            __m512i rows[16];
            const __mmask64 kept = bytes - at >= 64 ? ~0ull : bytes > at ? (1ull << (bytes - at)) - 1 : 0;
            for (int64_t i = 0; i < LANES; i++) {
                const int64_t lane = tile * LANES + i;
                if (lane >= w->job->num_lanes) {
                    rows[i] = _mm512_setzero_si512();
                    continue;
                }
                const int64_t row = w->job->span->first_row + token_of(w, lane);
                const int64_t number = row * a->query_row + query_head(w, lane) * a->query_head;
                rows[i] = _mm512_maskz_loadu_epi8(kept, (const char *)a->query + number * item + at);
            }
            transpose(rows);
            char *to = w->queries + (tile * width + at) * LANES;
            for (int64_t i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, rows[i]);
        }
}

/* What the lanes of one token see, or of all tokens where it is -1. */
AVX static void look(struct work *w, int64_t token, int64_t first_tile, int64_t last_tile) {
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
        int32_t positions[LANES];
        struct sight *sight = w->sights + tile;
        sight->lowest = INT32_MAX, sight->highest = -1, sight->window = w->a->window;
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t of = token_of(w, tile * LANES + i);
            const int64_t position = token < 0 || of == token ? position_of(w, of) : -1;
            positions[i] = (int32_t)position;
            sight->lowest = least(sight->lowest, position);
            sight->highest = most(sight->highest, position);
        }
        sight->position = _mm512_loadu_si512(positions);
    }
}

static void take(const struct work *w, int64_t begin, int64_t end, const int32_t *path, struct unit *unit) {
    unit->begin = begin, unit->count = least(UNIT, end - begin);
    find_rows(w->a, w->job, path, unit);
}

/* Keys [begin, end) of one split, for the tiles [first, last) as they see them now. */
AVX static void walk(struct work *w, int64_t begin, int64_t end, const int32_t *path, int64_t first, int64_t last) {
    const struct attention *a = w->a;
    const int64_t item = a->is_bf16 ? 2 : 4, query_size = up(a->key_dim, 32) * LANES * item;
    const int64_t size = state_size(up(a->value_dim, 32));
    int64_t oldest = 0;
    if (a->window) {
        oldest = INT32_MAX;
        for (int64_t tile = first; tile < last; tile++) {
            int32_t positions[LANES];
            _mm512_storeu_si512(positions, w->sights[tile].position);
            for (int i = 0; i < LANES; i++)
                if (positions[i] >= 0) oldest = least(oldest, positions[i] - a->window + 1);
        }
    }
    begin = most(begin, oldest / UNIT * UNIT);
    struct unit *unit = w->units, *next = unit + 1;
    if (begin < end) {
        take(w, begin, end, path, unit);
        for (int64_t i = 0; i < UNIT; i += 2) {
            fetch(unit->keys + i, key_bytes(a));
            fetch(unit->values + i, value_bytes(a));
        }
    }
    for (; begin < end; begin += UNIT) {
        const int has_next = begin + UNIT < end;
        if (has_next) take(w, begin + UNIT, end, path, next);
        load(a, unit, w->room, last - first <= FEW_TILES);
        if (a->is_bf16) transpose_values(unit, a->value_dim, has_next ? next : NULL, value_bytes(a), w->values);
        for (int64_t tile = first; tile < last; tile += 2) {
            const char *queries = w->queries + tile * query_size;
            float *states = w->states + tile * size;
            const struct unit *later = has_next && tile == first ? next : NULL;
            if (tile + 1 < last) attend_two(a, unit, later, w->values, queries, w->sights + tile, states);
            else attend_one(a, unit, later, w->values, queries, w->sights + tile, states);
        }
        struct unit *done = unit;
        unit = next, next = done;
    }
}

/* A tile's result to its rows. */
AVX static void store(const struct work *w, int64_t tile, const float *state) {
    const struct attention *a = w->a;
    const int64_t dim = a->value_dim, width = up(dim, 32);
    float sinks[LANES];
    __m512 share = _mm512_set1_ps(1.0f), total = _mm512_loadu_ps(state + LANES);
    if (a->sinks) {
        for (int64_t i = 0; i < LANES; i++) sinks[i] = LOG2_E * a->sinks[query_head(w, tile * LANES + i)];
        __m512 sink = _mm512_loadu_ps(sinks), peak = _mm512_loadu_ps(state), top = _mm512_max_ps(peak, sink);
        share = power_of_two(_mm512_sub_ps(peak, top), 0);
        total = _mm512_fmadd_ps(total, share, power_of_two(_mm512_sub_ps(sink, top), 0));
    }
    const __m512 factor = _mm512_div_ps(share, total);
    for (int64_t d = 0; d < width; d += 32) {
        __m512i low[16], high[16];
        for (int64_t i = 0; i < 16; i++) {
            const float *sums = state + (2 + d + i) * LANES;
            low[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(sums), factor));
            high[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(sums + 16 * LANES), factor));
        }
        transpose(low);
        transpose(high);
        const __mmask32 dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t lane = tile * LANES + i;
            if (lane >= w->job->num_lanes) break;
            const int64_t row = w->job->span->first_row + token_of(w, lane);
            const int64_t at = (row * a->num_heads * a->group_size + query_head(w, lane)) * dim + d;
            if (a->is_bf16) { /* the tiles have alternating fours of dims */
                const __m512i evens = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
                const __m512i odds = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
                __m512 first = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low[i], evens, high[i]));
                __m512 second = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low[i], odds, high[i]));
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
                _mm512_mask_storeu_epi16((bf16 *)a->out + at, dims, both);
            } else {
                _mm512_mask_storeu_epi32((float *)a->out + at, (__mmask16)dims, low[i]);
                _mm512_mask_storeu_epi32((float *)a->out + at + 16, (__mmask16)(dims >> 16), high[i]);
            }
        }
    }
}

/* The last job of some lanes merges what all of them have left. */
AVX static void merge_partials(const struct work *w, float *states) {
    struct merge *m = w->job->merge;
    if (__atomic_sub_fetch(&m->num_open, 1, __ATOMIC_ACQ_REL)) return;
    const int64_t width = up(w->a->value_dim, 32), size = state_size(width);
    for (int64_t tile = 0; tile < w->num_tiles; tile++) {
        clear(states + tile * size, width, 0xffff);
        for (int64_t i = 0; i < m->num_partials; i++)
            merge(states + tile * size, m->partials + i * m->size + tile * size, width, 0xffff);
        store(w, tile, states + tile * size);
    }
}

/* Lanes of `token` in a tile, all where it is -1. */
static __mmask16 lanes_of(const struct work *w, int64_t token, int64_t tile) {
    __mmask16 lanes = 0;
    for (int64_t i = 0; i < LANES; i++)
        if (token < 0 || token_of(w, tile * LANES + i) == token) lanes |= 1 << i;
    return lanes;
}

/* End a split for the lanes of `token`, or for all where it is -1. */
AVX static void close_split(struct work *w, float *merged, int64_t token, int64_t first, int64_t last) {
    const int64_t width = up(w->a->value_dim, 32), size = state_size(width);
    for (int64_t tile = first; tile < last; tile++) {
        const __mmask16 lanes = lanes_of(w, token, tile);
        merge(merged + tile * size, w->states + tile * size, width, lanes);
        clear(w->states + tile * size, width, lanes);
    }
}

/* Nodes of a tree: what lies before it is read by all, up to a whole unit, and the rest by each along its path. */
AVX static void attend_tree(struct work *w, float *merged) {
    const int64_t shared = w->job->span->tree_start / UNIT * UNIT;
    look(w, -1, 0, w->num_tiles);
    for (int64_t begin = 0; begin < shared; begin += SPLIT) {
        walk(w, begin, least(begin + SPLIT, shared), NULL, 0, w->num_tiles);
        if (begin + SPLIT <= shared) close_split(w, merged, -1, 0, w->num_tiles);
    }
    const int64_t last_token = token_of(w, w->job->num_lanes - 1);
    for (int64_t token = token_of(w, 0); token <= last_token; token++) {
        const int64_t lane = most(0, token * w->a->group_size - w->job->first_lane);
        const int64_t end_lane = least((token + 1) * w->a->group_size - w->job->first_lane, w->job->num_lanes);
        const int64_t first = lane / LANES, last = (end_lane + LANES - 1) / LANES;
        const int64_t end = position_of(w, token) + 1;
        const int32_t *path = w->a->paths + node_of(w, token)->path;
        look(w, token, first, last);
        for (int64_t begin = shared; begin < end; begin = (begin / SPLIT + 1) * SPLIT) {
            walk(w, begin, least((begin / SPLIT + 1) * SPLIT, end), path, first, last);
            close_split(w, merged, token, first, last);
        }
    }
}

AVX static void compute(const struct attention *a, const struct job *job) {
    struct work w = {.a = a, .job = job, .num_tiles = (job->num_lanes + LANES - 1) / LANES};
    const int64_t item = a->is_bf16 ? 2 : 4, key_width = up(a->key_dim, 32), width = up(a->value_dim, 32);
    const int64_t size = state_size(width), num_numbers = w.num_tiles * size;
    char queries[w.num_tiles * key_width * LANES * item] __attribute__((aligned(64)));
    float states[2 * num_numbers] __attribute__((aligned(64)));
    struct sight sights[MAX_TILES];
    char room[UNIT * (key_width + width) * item] __attribute__((aligned(64)));
    bf16 values[UNIT * width] __attribute__((aligned(64)));
    float *merged = states + num_numbers;
    w.queries = queries, w.states = states, w.sights = sights, w.room = room, w.values = values;
    take_queries(&w);
    for (int64_t tile = 0; tile < 2 * w.num_tiles; tile++) clear(states + tile * size, width, 0xffff);
    if (job->span->nodes >= 0) {
        attend_tree(&w, merged);
    } else {
        look(&w, -1, 0, w.num_tiles);
        const int64_t end = position_of(&w, token_of(&w, job->num_lanes - 1)) + 1;
        for (int64_t split = job->first_split; split < job->last_split; split++) {
            walk(&w, split * SPLIT, least((split + 1) * SPLIT, end), NULL, 0, w.num_tiles);
            if (!job->partial) close_split(&w, merged, -1, 0, w.num_tiles);
        }
    }
    if (job->partial) {
        memcpy(job->partial, states, num_numbers * sizeof(float));
        merge_partials(&w, merged);
        return;
    }
    for (int64_t tile = 0; tile < w.num_tiles; tile++) store(&w, tile, merged + tile * size);
}

static void run(const struct attention *a, const struct job *job) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* the smallest weights are zeros: as numbers they take a hundred times as long */
    compute(a, job);
    _mm_setcsr(mode);
}

/* ---- All jobs. ---- */

struct jobs {
    struct job *jobs;
    struct merge *merges;
    float *partials;
    int64_t num_jobs, num_merges, num_partials; /* numbers of all partials */
    double work; /* lanes of whole tiles x keys of one head */
};

/* The jobs of one span and `lanes` of it; with `jobs->jobs` NULL they are only counted. */
static void plan_lanes(const struct attention *a, const struct span *span, int64_t first, int64_t lanes,
                       struct jobs *jobs) {
    const int64_t last_token = (first + lanes - 1) / a->group_size, whole = up(lanes, LANES);
    int64_t first_split = 0, last_split = 1;
    if (span->nodes < 0) {
        const int64_t end = span->start + last_token + 1;
        const int64_t oldest = a->window ? most(0, span->start + first / a->group_size - a->window + 1) : 0;
        first_split = oldest / SPLIT, last_split = (end + SPLIT - 1) / SPLIT;
        jobs->work += (double)whole * (end - oldest);
    } else {
        jobs->work += (double)whole * (span->tree_start + span->num_rows);
    }
    const int64_t num_tiles = (lanes + LANES - 1) / LANES, num_splits = last_split - first_split;
    const int64_t size = num_tiles * state_size(up(a->value_dim, 32));
    const int is_split = num_splits > 1 && num_tiles <= FEW_TILES;
    for (int64_t head = 0; jobs->jobs && head < a->num_heads; head++) {
        struct job job = {span, head, first, lanes, first_split, last_split, NULL, NULL};
        if (!is_split) {
            jobs->jobs[jobs->num_jobs + head] = job;
            continue;
        }
        struct merge *merge = job.merge = jobs->merges + jobs->num_merges + head;
        float *partials = jobs->partials + jobs->num_partials + head * num_splits * size;
        *merge = (struct merge){partials, num_splits, size, num_splits};
        for (int64_t i = 0; i < num_splits; i++) { /* heads side by side in memory are read side by side */
            job.first_split = first_split + i, job.last_split = job.first_split + 1;
            job.partial = merge->partials + i * size;
            jobs->jobs[jobs->num_jobs + i * a->num_heads + head] = job;
        }
    }
    jobs->num_jobs += a->num_heads * (is_split ? num_splits : 1);
    if (is_split) jobs->num_merges += a->num_heads, jobs->num_partials += a->num_heads * num_splits * size;
}

static void plan(const struct attention *a, struct jobs *jobs, int64_t block) {
    jobs->num_jobs = jobs->num_merges = jobs->num_partials = 0;
    for (int64_t i = 0; i < a->num_spans; i++) {
        const struct span *span = a->spans + i;
        const int64_t lanes = span->num_rows * a->group_size;
        /* Later rows see more keys: they come first. */
        for (int64_t first = (lanes - 1) / block * block; first >= 0; first -= block)
            plan_lanes(a, span, first, least(block, lanes - first), jobs);
    }
}

AVX INLINE __m512 number_at(const char *head, int64_t d, __mmask16 lanes, int is_bf16) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(lanes, head + d * 4);
    __m256i bits = _mm256_maskz_loadu_epi16(lanes, head + d * 2);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* A head as int8 with its unit, to the bit what engine/int8_heads.py makes of it. */
AVX static void keep_int8(const char *head, int64_t dim, int is_bf16, char *out) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) {
        const __mmask16 lanes = dim - d >= 16 ? 0xffff : (1 << (dim - d)) - 1;
        largest = _mm512_max_ps(largest, _mm512_abs_ps(number_at(head, d, lanes, is_bf16)));
    }
    float unit = _mm512_reduce_max_ps(largest) / 127.0f;
    if (unit < FLT_MIN) unit = FLT_MIN; /* never zero */
    uint32_t bits;
    memcpy(&bits, &unit, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000; /* to the nearest bfloat16 */
    const __m512 units = _mm512_castsi512_ps(_mm512_set1_epi32((int)bits));
    for (int64_t d = 0; d < dim; d += 16) {
        const __mmask16 lanes = dim - d >= 16 ? 0xffff : (1 << (dim - d)) - 1;
        __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(number_at(head, d, lanes, is_bf16), units));
        whole = _mm512_min_epi32(_mm512_max_epi32(whole, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
        _mm_mask_storeu_epi8(out + d, lanes, _mm512_cvtepi32_epi8(whole));
    }
    const bf16 stored = (bf16)(bits >> 16);
    memcpy(out + dim, &stored, 2);
}

static void keep_head(const struct attention *a, const char *head, int64_t dim, char *out) {
    if (a->is_int8) keep_int8(head, dim, a->is_bf16, out);
    else memcpy(out, head, head_bytes(a, dim));
}

/* Keep the KV of a row. */
static void keep(const struct attention *a, int64_t row) {
    const int64_t item = a->is_bf16 ? 2 : 4;
    for (int64_t head = 0; head < a->num_heads; head++) {
        const int64_t at = a->slots[row] * a->num_heads + head;
        const int64_t key = row * a->key_row + head * a->key_head, value = row * a->value_row + head * a->value_head;
        keep_head(a, (const char *)a->new_keys + key * item, a->key_dim, (char *)a->keys + at * key_bytes(a));
        keep_head(a, (const char *)a->new_values + value * item, a->value_dim, (char *)a->values + at * value_bytes(a));
    }
}

/* Write the new keys and values, then compute `out`. Returns 0, or 1 where memory is short. */
AMX int outrider_attend(const struct attention *a) {
    struct jobs jobs = {0};
    int64_t block = MAX_TILES * LANES;
    plan(a, &jobs, block);
    while (jobs.num_jobs < 12 && block > 4 * LANES) {
        block /= 2, jobs.work = 0;
        plan(a, &jobs, block);
    }
    const int is_small = jobs.work < SMALL;
    jobs.jobs = malloc(jobs.num_jobs * sizeof(struct job) + jobs.num_merges * sizeof(struct merge) +
                       jobs.num_partials * sizeof(float));
    if (!jobs.jobs) return 1;
    jobs.merges = (struct merge *)(jobs.jobs + jobs.num_jobs);
    jobs.partials = (float *)(jobs.merges + jobs.num_merges);
    plan(a, &jobs, block);
#pragma omp parallel if (!is_small)
    {
        if (a->is_bf16 && outrider_has_tiles) configure_tiles(16, 16);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->num_rows; row++) keep(a, row);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < jobs.num_jobs; i++) run(a, jobs.jobs + i);
        if (a->is_bf16 && outrider_has_tiles) _tile_release();
    }
    free(jobs.jobs);
    return 0;
}
