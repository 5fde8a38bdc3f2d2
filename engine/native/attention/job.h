/* The jobs of a pass. */

#pragma once

#include "attention/types.h"
#include "team.h"

/* The work of a pass: it stores the KV of its rows, then runs its jobs. */
struct pass {
    const struct attention *attention;
    const struct job *jobs;
    int64_t num_jobs, jobs_each; /* jobs_each: jobs of a part */
};

PARTS(store_kv_part); /* stores the KV of STORED_ROWS rows */
PARTS(run_part);  /* runs some jobs */
