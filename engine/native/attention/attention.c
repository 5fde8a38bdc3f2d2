/* Paged attention on AVX2 and AVX-512, and on AMX for keys and values in bfloat16 or int8. It reads the pool in place.

   A job is one kv head and up to 256 *lanes* of a span. A lane is one query head of one token; 16 lanes make a tile.
   Registers hold adjacent lanes, so no sum crosses a register. (For jobs of few lanes, registers hold keys and then
   dims: few_lanes.h.)

       scores [keys x 16 lanes] = K [keys x D] Q^T [D x 16 lanes]        K is read in the pool
       sums   [D x 16 lanes]   += V^T [D x keys] P [keys x 16 lanes]     V^T transposed once per job and unit of keys

   A lane's bits depend only on its query and on its visible keys with their positions. For this, keys are read in units
   of UNIT at fixed positions, each split has its own softmax and sums (arXiv:2205.14135), and splits are merged in
   order (arXiv:2311.01282). A hidden key adds exact zeros. If a hidden key is not finite, its product with zero is NaN;
   the job's tokens are then computed one by one, each from its visible keys. A node of a draft tree reads its path as
   the chain that it may become: the whole units before the tree together with the other lanes, and the rest alone.

   types.h has the arguments, store_kv.c stores new keys and values, unit.c loads a unit, state.h has the state of
   lanes, softmax.h the softmax of a tile, lane.h the softmax of one lane, tiles.c computes tiles over a unit,
   few_lanes.c few lanes, int8/ int8 pools, products_*.h have the products of tiles for each register width, job.c
   computes a job. This file plans the jobs of a pass. */

#include "attention/job.h"
#include "attention/state.h"
#include "team.h"

#include <stdlib.h>

enum { PARTS_EACH = 4 /* parts per thread, so that all threads end at about the same time */ };

struct jobs {
    struct job *jobs;
    struct merge *merges;
    float *partials;
    int64_t num_jobs, num_merges, num_partials; /* num_partials: floats of all partials */
    int64_t max_lanes; /* lanes of the largest job */
    double work;       /* lanes (of whole tiles) x keys of one head */
};

/* Adds the jobs of `lanes` lanes of a span. If `jobs->jobs` is NULL, they are only counted. */
static void plan_lanes(const struct attention *a, const struct span *span, int64_t first, int64_t lanes,
                       struct jobs *jobs) {
    const int64_t last_token = (first + lanes - 1) / a->group_size, whole = round_up(lanes, LANES);
    /* The splits that the lanes see, from the window's oldest key to the last row's own; a tree is one split. */
    int64_t first_split = 0, last_split = 1;
    if (span->nodes < 0) {
        const int64_t end = span->start + last_token + 1;
        const int64_t oldest = a->window ? max(0, span->start + first / a->group_size - a->window + 1) : 0;
        first_split = oldest / split_size(a), last_split = (end - 1) / split_size(a) + 1;
        jobs->work += (double)whole * (end - oldest);
    } else {
        jobs->work += (double)whole * (span->tree_start + span->num_rows);
    }
    jobs->max_lanes = max(jobs->max_lanes, lanes);
    /* Few lanes: each split is a job of its own, merged by the last one that ends. Else one job per head. */
    const int64_t num_tiles = (lanes + LANES - 1) / LANES, num_splits = last_split - first_split;
    const int64_t size = num_tiles * state_size(round_up(a->value_dim, 32));
    const int is_split = num_splits > 1 && num_tiles <= FEW_TILES;
    for (int64_t head = 0; jobs->jobs && head < a->num_heads; head++) {
        struct job job = {span, head, first, lanes, first_split, last_split, NULL, NULL, 0};
        if (!is_split) {
            jobs->jobs[jobs->num_jobs + head] = job;
            continue;
        }
        struct merge *merge = job.merge = jobs->merges + jobs->num_merges + head;
        float *partials = jobs->partials + jobs->num_partials + head * num_splits * size;
        *merge = (struct merge){partials, num_splits, size, num_splits};
        for (int64_t i = 0; i < num_splits; i++) { /* heads that are adjacent in memory are read together */
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
        /* Later rows come first, since they see more keys. */
        for (int64_t first = (lanes - 1) / block * block; first >= 0; first -= block)
            plan_lanes(a, span, first, min(block, lanes - first), jobs);
    }
}

/* Returns the jobs per part if all have few lanes. In a part, the next job's first keys are prefetched. */
static int64_t few_each(int64_t num_jobs) { return max(1, num_jobs / (PARTS_EACH * team_size())); }

int outrider_attend(const struct attention *a) {
    /* Count the jobs, with smaller blocks of lanes if there are too few for all threads. */
    struct jobs jobs = {0};
    /* The buffers of a job lie on the stack, and some threads have 2 MiB of it. */
    const int is_large = max(a->key_dim, a->value_dim) > MAX_DIM / 2;
    int64_t block = (is_large ? MAX_TILES / 2 : MAX_TILES) * LANES;
    plan(a, &jobs, block);
    const int64_t least = (are_values_in_keys(a) ? FEW_TILES : 4) * LANES;
    while (jobs.num_jobs < 12 && block > least) {
        block /= 2, jobs.work = 0;
        plan(a, &jobs, block);
    }
    const int is_small = jobs.work < SMALL;
    /* One allocation for jobs, merges and partial states; then plan again to fill them. */
    jobs.jobs = malloc(jobs.num_jobs * sizeof(struct job) + jobs.num_merges * sizeof(struct merge) +
                       jobs.num_partials * sizeof(float));
    if (!jobs.jobs) return 1;
    jobs.merges = (struct merge *)(jobs.jobs + jobs.num_jobs);
    jobs.partials = (float *)(jobs.merges + jobs.num_merges);
    plan(a, &jobs, block);
    const int64_t jobs_each = is_small ? jobs.num_jobs : jobs.max_lanes <= FEW_LANES ? few_each(jobs.num_jobs) : 1;
    const struct pass pass = {a, jobs.jobs, jobs.num_jobs, jobs_each};
    /* All new KV is stored before any job reads it. */
    if (a->new_keys) share_out(FITTING(store_kv_part), &pass, (a->num_rows + STORED_ROWS - 1) / STORED_ROWS);
    share_out(FITTING(run_part), &pass, jobs_each ? (jobs.num_jobs + jobs_each - 1) / jobs_each : 0);
    free(jobs.jobs);
    return 0;
}
