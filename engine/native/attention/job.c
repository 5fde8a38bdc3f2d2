/* Computes a job, from its queries to its rows of the result. */

#include "attention/job.h"

#include "amx.h"
#include "attention/few_lanes.h"
#include "attention/int8/lanes.h"
#include "attention/int8/tiles.h"
#include "attention/state.h"
#include "attention/tiles.h"

/* Two units of keys and values: the current one, and the next one, which may belong to the part's next job. */
struct double_buffer {
    struct unit units[2], *unit;
    const struct job *ahead; /* the job whose first unit is already in `unit` and being prefetched */
};

#ifndef NARROW
/* A unit of an int8 pool. */
union int8_numbers {
    struct int8_unit unit;
    struct int8_rows rows;
};
#endif

/* The state of a job. Its lanes are grouped into tiles. */
struct job_state {
    const struct attention *a;
    const struct job *job;
    const struct job *following; /* the part's next job; its first unit is prefetched after this job's last; or NULL */
    int64_t num_tiles;
    int has_few;            /* few_lanes.h computes the job */
    int is_int8;            /* int8/lanes.h computes it, */
    int is_tiled;           /* or int8/tiles.h */
    char *queries;          /* [tiles, D, LANES]; or the layout of `load_few` or of int8/ */
    float *states;          /* of the current split */
    struct visibility *visibilities;
    char *scratch; /* copies of keys and values */
    bf16 *values;  /* a unit's values, transposed */
    float *wide;   /* or its keys and values as floats */
    union int8_numbers *int8_numbers;
    struct double_buffer *buffer;
};

/* True if sums are laid out per lane, and not per dim. */
static int has_sums_per_lane(const struct job_state *w) { return w->has_few || (w->is_int8 && !w->is_tiled); }

static int64_t token_of(const struct job_state *w, int64_t lane) {
    const int64_t last = w->job->num_lanes - 1; /* lanes after the last repeat it and are not stored */
    return (w->job->first_lane + min(lane, last)) / w->a->group_size;
}

static const struct node *node_of(const struct job_state *w, int64_t token) {
    const struct span *span = w->job->span;
    return span->nodes < 0 ? NULL : w->a->nodes + span->nodes + token;
}

static int64_t position_of(const struct job_state *w, int64_t token) {
    const struct node *node = node_of(w, token);
    return node ? node->position : w->job->span->start + token;
}

static int64_t query_head(const struct job_state *w, int64_t lane) {
    return w->job->head * w->a->group_size + (w->job->first_lane + lane) % w->a->group_size;
}

/* Returns the address of a lane's query. */
static const char *query_of(const struct job_state *w, int64_t lane) {
    const struct attention *a = w->a;
    const int64_t row = w->job->span->first_row + token_of(w, lane);
    const int64_t number = row * a->query_row + query_head(w, lane) * a->query_head;
    return (const char *)a->query + number * (a->is_bf16 ? 2 : 4);
}

/* Loads the queries of the job's lanes as [tiles, D, LANES], padded with zeros. In bfloat16, pairs of dims are
   adjacent. */
VECTOR_CODE static void load_queries(struct job_state *w) {
    const struct attention *a = w->a;
#ifndef NARROW
    for (int64_t lane = 0; w->has_few && lane < w->job->num_lanes; lane++)
        load_few(a, query_of(w, lane), lane, w->queries);
    for (int64_t lane = 0; w->is_int8 && !w->is_tiled && lane < w->job->num_lanes; lane++)
        load_int8_query(a, query_of(w, lane), (struct int8_query *)w->queries + lane);
    for (int64_t tile = 0; w->is_tiled && tile < w->num_tiles; tile++) {
        const char *queries[LANES];
        const int64_t num_lanes = min(LANES, w->job->num_lanes - tile * LANES);
        for (int64_t i = 0; i < num_lanes; i++) queries[i] = query_of(w, tile * LANES + i);
        load_int8_queries(a, queries, num_lanes, (struct int8_queries *)w->queries + tile);
    }
    if (w->has_few || w->is_int8) return;
#endif
    /* Whole tiles: load 64 bytes of each lane's query, then transpose, so that lanes are adjacent. The prefetches read
       each query in order, and hardware does not predict addresses that change with each load. */
    const int64_t item = IS_BF16(a) ? 2 : 4, bytes = a->key_dim * item, width = round_up(a->key_dim, 32) * item;
    for (int64_t tile = 0; tile < w->num_tiles; tile++) {
        const char *queries[LANES];
        const int64_t num_lanes = min(LANES, w->job->num_lanes - tile * LANES);
        for (int64_t i = 0; i < num_lanes; i++) {
            queries[i] = query_of(w, tile * LANES + i);
            for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(queries[i] + at, _MM_HINT_T0);
        }
        for (int64_t at = 0; at < width; at += 64) {
            ints rows[16];
            const byte_mask kept = lanes_first_bytes(bytes - at);
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = i < num_lanes ? lanes_load_bytes(kept, queries[i] + at) : lanes_as_ints(lanes_zero());
            transpose(rows);
            char *to = w->queries + (tile * width + at) * LANES;
            for (int64_t i = 0; i < 16; i++) lanes_store_aligned_ints(to + i * 64, rows[i]);
        }
    }
}

/* Sets the visible keys of the lanes of one token, or of all tokens if `token` is -1. */
VECTOR_CODE static void set_visibility(struct job_state *w, int64_t token, int64_t first_tile, int64_t last_tile) {
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
        int32_t positions[LANES];
        struct visibility *visibility = w->visibilities + tile;
        visibility->lowest = INT32_MAX, visibility->highest = -1, visibility->window = w->a->window;
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t of = token_of(w, tile * LANES + i);
            const int64_t position = token < 0 || of == token ? position_of(w, of) : -1;
            positions[i] = (int32_t)position;
            visibility->lowest = min(visibility->lowest, position);
            visibility->highest = max(visibility->highest, position);
        }
        visibility->position = lanes_load_ints(positions);
    }
}

/* Loads the first unit of a job without a tree, as `attend_range` will read it. */
static void load_first(const struct attention *a, const struct job *job, struct unit *unit) {
    const struct span *span = job->span;
    const int64_t first = job->first_lane / a->group_size;
    const int64_t last = (job->first_lane + job->num_lanes - 1) / a->group_size;
    const int64_t oldest = a->window ? max(0, span->start + first - a->window + 1) : 0;
    const int64_t begin = max(job->first_split * split_size(a), oldest / UNIT * UNIT);
    load_unit(a, job, begin, min((job->first_split + 1) * split_size(a), span->start + last + 1), NULL, unit);
}

#ifndef NARROW
/* Attends to a unit of an int8 pool, for the tiles [first, last). */
AVX static void attend_int8_unit(const struct job_state *w, const struct unit *unit, const struct unit *next,
                                 int64_t first, int64_t last) {
    const int64_t size = state_size(round_up(w->a->value_dim, 32));
    if (w->is_tiled) take_int8_rows(w->a, unit, next, &w->int8_numbers->rows);
    else take_int8_unit(w->a, unit, next, &w->int8_numbers->unit);
    for (int64_t tile = first; tile < last; tile++) {
        const struct visibility *visibility = w->visibilities + tile;
        float *state = w->states + tile * size;
        if (w->is_tiled) {
            const struct int8_queries *queries = (const struct int8_queries *)w->queries + tile;
            attend_int8_tile(w->a, unit, &w->int8_numbers->rows, queries, visibility, state);
        } else {
            const struct int8_query *queries = (const struct int8_query *)w->queries + tile * LANES;
            const int64_t num_lanes = min(LANES, w->job->num_lanes - tile * LANES);
            attend_int8(w->a, unit, &w->int8_numbers->unit, num_lanes, queries, visibility, state);
        }
    }
}
#endif

/* True if the job's lanes read the rows in the pool directly, without a copy. */
static int are_read_in_place(const struct job_state *w) {
#ifdef NARROW
    return are_side_by_side(w->a, w->job->num_lanes);
#else
    return w->has_few;
#endif
}

/* Attends to the keys [begin, end) of one split, for the tiles [first, last) with their current visibility. */
VECTOR_CODE static void attend_range(struct job_state *w, int64_t begin, int64_t end, const int32_t *path,
                                     int64_t first, int64_t last) {
    const struct attention *a = w->a;
    const int64_t item = IS_BF16(a) ? 2 : 4, query_size = round_up(a->key_dim, 32) * LANES * item;
    const int64_t size = state_size(round_up(a->value_dim, 32));
    int64_t oldest = 0;
    if (a->window) {
        oldest = INT32_MAX;
        for (int64_t tile = first; tile < last; tile++) {
            int32_t positions[LANES];
            lanes_store_ints(positions, w->visibilities[tile].position);
            for (int i = 0; i < LANES; i++)
                if (positions[i] >= 0) oldest = min(oldest, positions[i] - a->window + 1);
        }
    }
    begin = max(begin, oldest / UNIT * UNIT);
    /* Load the first unit, unless the last job has prefetched it. */
    struct double_buffer *buffer = w->buffer;
    struct unit *unit = buffer->unit, *next = unit == buffer->units ? unit + 1 : buffer->units;
    if (begin < end && buffer->ahead != w->job) {
        load_unit(a, w->job, begin, end, path, unit);
        for (int64_t i = 0; i < unit->count; i += 2) {
            fetch(unit->keys + i, key_bytes(a));
            fetch(unit->values + i, value_bytes(a));
        }
    }
    buffer->ahead = begin < end ? w->following : NULL;
    /* Compute a unit while the next one is prefetched: of this range, or of the following job. */
    for (; begin < end; begin += UNIT) {
        if (w->job->is_apart) hide_keys(unit, oldest - begin);
        const int has_next = begin + UNIT < end || w->following;
        if (begin + UNIT < end) load_unit(a, w->job, begin + UNIT, end, path, next);
        else if (w->following) load_first(a, w->following, next);
        if (!w->is_int8) copy_to_scratch(a, unit, w->scratch, are_read_in_place(w), last - first <= FEW_TILES);
#ifndef NARROW
        const struct unit *later = has_next ? next : NULL;
        if (w->is_int8) {
            attend_int8_unit(w, unit, later, first, last);
        } else if (w->has_few) {
            attend_few(a, unit, later, w->job->num_lanes, w->queries, w->visibilities, w->states);
        } else if (a->is_bf16 && outrider_splits_pairs)
            widen_rows(a, unit, later, w->wide);
        else if (a->is_bf16)
            transpose_values(unit, a->value_dim, later, value_bytes(a), w->values);
#endif
        for (int64_t tile = first; tile < last && !w->has_few && !w->is_int8; tile += 2) {
            const char *queries = w->queries + tile * query_size;
            float *states = w->states + tile * size;
            const struct unit *later = has_next && tile == first ? next : NULL;
#ifdef NARROW
            if (w->job->num_lanes <= LANES / 2) {
                attend_half(a, unit, later, w->job->num_lanes, queries, w->visibilities + tile, states);
                continue;
            }
#endif
            if (tile + 1 < last) attend_two(a, unit, later, w->values, queries, w->visibilities + tile, states);
            else attend_one(a, unit, later, w->values, queries, w->visibilities + tile, states);
        }
        struct unit *done = unit;
        unit = next, next = done;
    }
    buffer->unit = unit;
}

/* Returns the lanes of a tile that are computed: all, or the job's few lanes. */
static uint16_t all_lanes(const struct job_state *w) { return w->has_few ? (1 << w->job->num_lanes) - 1 : 0xffff; }

/* Resets some lanes of a tile's state. */
VECTOR_CODE static void clear_lanes(const struct job_state *w, float *state, uint16_t lanes) {
    const int64_t width = round_up(w->a->value_dim, 32);
#ifndef NARROW
    if (has_sums_per_lane(w)) clear_few(state, width, lanes);
    else
#endif
        clear(state, width, mask_of(lanes));
}

/* Merges the state `later` into some lanes of a tile's state. */
VECTOR_CODE static void merge_lanes(const struct job_state *w, float *state, const float *later, uint16_t lanes) {
    const int64_t width = round_up(w->a->value_dim, 32);
#ifndef NARROW
    if (has_sums_per_lane(w)) merge_few(state, later, width, lanes);
    else
#endif
        merge(state, later, width, mask_of(lanes));
}

/* Returns the index of a lane's result in `out`. */
static int64_t place_of(const struct job_state *w, int64_t lane) {
    const struct attention *a = w->a;
    const int64_t row = w->job->span->first_row + token_of(w, lane);
    return (row * a->num_heads * a->group_size + query_head(w, lane)) * a->value_dim;
}

/* Stores a tile's result in its rows of `out`. */
VECTOR_CODE static void store(const struct job_state *w, int64_t tile, const float *state) {
    const struct attention *a = w->a;
    const int64_t dim = a->value_dim, width = round_up(dim, 32), num_lanes = min(LANES, w->job->num_lanes - tile * LANES);
    int64_t places[LANES];
    for (int64_t i = 0; i < num_lanes; i++) places[i] = place_of(w, tile * LANES + i);
    /* A sink adds its weight to the total. */
    float sinks[LANES];
    floats kept = lanes_set(1.0f), total = lanes_load(state + LANES);
    if (a->sinks) {
        for (int64_t i = 0; i < LANES; i++) sinks[i] = LOG2_E * a->sinks[query_head(w, tile * LANES + i)];
        floats sink = lanes_load(sinks), peak = lanes_load(state), top = lanes_max(peak, sink);
        kept = power_of_two(lanes_sub(peak, top), 0);
        total = lanes_fma(total, kept, power_of_two(lanes_sub(sink, top), 0));
    }
    /* Sums per lane are contiguous already. */
    const floats factor = lanes_div(kept, total);
#ifndef NARROW
    if (has_sums_per_lane(w)) {
        float factors[LANES];
        lanes_store(factors, factor);
        for (int64_t i = 0; i < num_lanes; i++)
            (w->is_int8 ? store_int8 : store_few)(a, state, i, factors[i], places[i]);
        return;
    }
#endif
    /* Sums per dim: transpose 32 dims x 16 lanes, then store lane by lane. */
    for (int64_t d = 0; d < width; d += 32) {
        ints low[16], high[16];
        for (int64_t i = 0; i < 16; i++) {
            const float *sums = state + (2 + d + i) * LANES;
            low[i] = lanes_as_ints(lanes_mul(lanes_load(sums), factor));
            high[i] = lanes_as_ints(lanes_mul(lanes_load(sums + 16 * LANES), factor));
        }
        transpose(low);
        transpose(high);
        const uint32_t dims = dim - d >= 32 ? 0xffffffff : (1u << (dim - d)) - 1;
        for (int64_t i = 0; i < num_lanes; i++)
            store_dims(a->out, places[i] + d, dims, low[i], high[i], IS_BF16(a));
    }
}

/* True if `n` results are finite; apart for each size, so that the loops have no branch and are vectorized. */
VECTOR_CODE static int floats_are_finite(const uint32_t *bits, int64_t n) {
    uint32_t has_other = 0;
    for (int64_t i = 0; i < n; i++) has_other |= (bits[i] & 0x7f800000) == 0x7f800000;
    return !has_other;
}

VECTOR_CODE static int halves_are_finite(const uint16_t *bits, int64_t n) {
    uint16_t has_other = 0;
    for (int64_t i = 0; i < n; i++) has_other |= (bits[i] & 0x7f80) == 0x7f80;
    return !has_other;
}

/* True if the results of all lanes of the job are finite. */
VECTOR_CODE static int are_finite(const struct job_state *w) {
    const struct attention *a = w->a;
    int all = 1;
    for (int64_t lane = 0; lane < w->job->num_lanes; lane++) {
        const int64_t place = place_of(w, lane);
        all &= IS_BF16(a) ? halves_are_finite((const uint16_t *)a->out + place, a->value_dim)
                          : floats_are_finite((const uint32_t *)a->out + place, a->value_dim);
    }
    return all;
}

/* The last job of the same lanes merges the partials of all of them. Returns its `are_finite`, or 1 from other jobs. */
VECTOR_CODE static int merge_partials(const struct job_state *w, float *states) {
    struct merge *m = w->job->merge;
    if (__atomic_sub_fetch(&m->num_open, 1, __ATOMIC_ACQ_REL)) return 1;
    const int64_t size = state_size(round_up(w->a->value_dim, 32));
    for (int64_t tile = 0; tile < w->num_tiles; tile++) {
        clear_lanes(w, states + tile * size, all_lanes(w));
        for (int64_t i = 0; i < m->num_partials; i++)
            merge_lanes(w, states + tile * size, m->partials + i * m->size + tile * size, all_lanes(w));
        store(w, tile, states + tile * size);
    }
    return are_finite(w);
}

/* Returns the lanes of `token` in a tile, or all lanes if it is -1. */
static uint16_t lanes_of(const struct job_state *w, int64_t token, int64_t tile) {
    uint16_t lanes = 0;
    for (int64_t i = 0; i < LANES; i++)
        if (token < 0 || token_of(w, tile * LANES + i) == token) lanes |= 1 << i;
    return lanes & all_lanes(w);
}

/* Ends a split for the lanes of `token`, or for all lanes if it is -1. */
VECTOR_CODE static void close_split(struct job_state *w, float *merged, int64_t token, int64_t first, int64_t last) {
    const int64_t size = state_size(round_up(w->a->value_dim, 32));
    for (int64_t tile = first; tile < last; tile++) {
        const uint16_t lanes = lanes_of(w, token, tile);
        merge_lanes(w, merged + tile * size, w->states + tile * size, lanes);
        clear_lanes(w, w->states + tile * size, lanes);
    }
}

/* Computes the nodes of a tree: all lanes share the whole units before it; each node reads the rest along its path. */
VECTOR_CODE static void attend_tree(struct job_state *w, float *merged) {
    const int64_t shared = w->job->span->tree_start / UNIT * UNIT, size = split_size(w->a);
    set_visibility(w, -1, 0, w->num_tiles);
    for (int64_t begin = 0; begin < shared; begin += size) {
        attend_range(w, begin, min(begin + size, shared), NULL, 0, w->num_tiles);
        if (begin + size <= shared) close_split(w, merged, -1, 0, w->num_tiles);
    }
    const int64_t last_token = token_of(w, w->job->num_lanes - 1);
    for (int64_t token = token_of(w, 0); token <= last_token; token++) {
        const int64_t lane = max(0, token * w->a->group_size - w->job->first_lane);
        const int64_t end_lane = min((token + 1) * w->a->group_size - w->job->first_lane, w->job->num_lanes);
        const int64_t first = lane / LANES, last = (end_lane + LANES - 1) / LANES;
        const int64_t end = position_of(w, token) + 1;
        const int32_t *path = w->a->paths + node_of(w, token)->path;
        set_visibility(w, token, first, last);
        for (int64_t begin = shared; begin < end; begin = (begin / size + 1) * size) {
            attend_range(w, begin, min((begin / size + 1) * size, end), path, first, last);
            close_split(w, merged, token, first, last);
        }
    }
}

/* Computes a job. Returns 0 if a result is not finite. */
VECTOR_CODE static int compute(const struct attention *a, const struct job *job, const struct job *following,
                               struct double_buffer *buffer) {
    struct job_state w = {.a = a, .job = job, .buffer = buffer, .num_tiles = (job->num_lanes + LANES - 1) / LANES};
#ifndef NARROW
    union int8_numbers int8_numbers;
    w.is_int8 = (int)a->is_int8, w.is_tiled = w.is_int8 && are_tiled(job->num_lanes), w.int8_numbers = &int8_numbers;
    w.has_few = !w.is_int8 && are_few(a, job->num_lanes);
    const size_t query_sizes[] = {0, LANES * sizeof(struct int8_query), sizeof(struct int8_queries)};
    const int64_t query_size = (int64_t)query_sizes[w.is_int8 + w.is_tiled]; /* bytes per tile */
#else
    const int64_t query_size = 0;
#endif
    /* All buffers are on the stack: their sizes follow from the job's lanes and the head's dims. */
    const int64_t item = IS_BF16(a) ? 2 : 4, key_width = round_up(a->key_dim, 32), width = round_up(a->value_dim, 32);
    const int64_t size = state_size(width), num_numbers = w.num_tiles * size;
    const int64_t query_bytes = w.has_few ? FEW_LANES * (int64_t)sizeof(float) : w.num_tiles * LANES * item;
    char queries[query_size ? w.num_tiles * query_size : key_width * query_bytes] __attribute__((aligned(64)));
    float states[2 * num_numbers] __attribute__((aligned(64)));
    struct visibility visibilities[MAX_TILES];
    char scratch[UNIT * (key_width + width) * item] __attribute__((aligned(64)));
    const int is_wide = IS_BF16(a) && outrider_splits_pairs;
    bf16 values[is_wide ? 1 : UNIT * width] __attribute__((aligned(64)));
    float wide[is_wide ? UNIT * (key_width + width) : 1] __attribute__((aligned(64)));
    float *merged = states + num_numbers;
    w.queries = queries, w.states = states, w.visibilities = visibilities;
    w.scratch = scratch, w.values = values, w.wide = wide;
    /* Attend split by split; a split's state is merged in a fixed order, so the bits do not depend on the jobs. */
    load_queries(&w);
    /* One split has nothing to merge with: the sum of a state and an empty one is the state. */
    const int is_whole = job->span->nodes < 0 && job->last_split - job->first_split == 1;
    const int64_t num_states = is_whole ? w.num_tiles : 2 * w.num_tiles;
    for (int64_t tile = 0; tile < num_states; tile++) clear_lanes(&w, states + tile * size, all_lanes(&w));
    if (job->span->nodes >= 0) {
        attend_tree(&w, merged);
    } else {
        set_visibility(&w, -1, 0, w.num_tiles);
        const int64_t end = position_of(&w, token_of(&w, job->num_lanes - 1)) + 1;
        for (int64_t split = job->first_split; split < job->last_split; split++) {
            if (has_sums_per_lane(&w) && split + 1 == job->last_split) w.following = following;
            attend_range(&w, split * split_size(a), min((split + 1) * split_size(a), end), NULL, 0, w.num_tiles);
            if (!is_whole) close_split(&w, merged, -1, 0, w.num_tiles);
        }
    }
    /* A job of one split leaves its state to the last job of its lanes. */
    if (job->partial) {
        memcpy(job->partial, states, num_numbers * sizeof(float));
        return merge_partials(&w, merged);
    }
    const float *last = is_whole ? states : merged;
    for (int64_t tile = 0; tile < w.num_tiles; tile++) store(&w, tile, last + tile * size);
    return are_finite(&w);
}

/* Computes the lanes of a job over all splits, token by token, each from its visible keys only. The bits are the same
   as in `compute` if the hidden keys are finite. */
VECTOR_CODE static void compute_apart(const struct attention *a, const struct job *job) {
    const int64_t last = job->first_lane + job->num_lanes;
    for (int64_t lane = job->first_lane, next; lane < last; lane = next) {
        const int64_t token = lane / a->group_size, end = job->span->start + token + 1;
        next = min((token + 1) * a->group_size, last);
        const int64_t oldest = a->window ? max(0, end - a->window) : 0;
        const struct job apart = {job->span,          job->head, lane, next - lane, oldest / split_size(a),
                                  (end - 1) / split_size(a) + 1, NULL, NULL, 1};
        struct double_buffer buffer = {.unit = buffer.units};
        compute(a, &apart, NULL, &buffer);
    }
}

TILE_CODE void PART(run_part)(const void *work, int64_t part) {
    const struct pass *pass = work;
    const int64_t first = part * pass->jobs_each;
#ifndef NARROW
    const int has_tiles = (pass->attention->is_bf16 || pass->attention->is_int8) && outrider_has_tiles;
    if (has_tiles) configure_tiles(16, 16);
#endif
    const int64_t last = min(first + pass->jobs_each, pass->num_jobs);
    struct double_buffer buffer = {.unit = buffer.units};
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* flush denormals to zero: computing with them takes a hundred times as long */
    for (int64_t i = first; i < last; i++) {
        const struct job *job = pass->jobs + i, *next = i + 1 < last && job[1].span->nodes < 0 ? job + 1 : NULL;
        if (!compute(pass->attention, job, next, &buffer)) compute_apart(pass->attention, job);
    }
    _mm_setcsr(mode);
#ifndef NARROW
    if (has_tiles) _tile_release();
#endif
}
