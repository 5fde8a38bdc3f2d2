/* The jobs of a pass. */

#pragma once

#include "attention/types.h"
#include "team.h"

/* The work of a pass: first its rows are kept, then its jobs are run. */
struct pass {
    const struct attention *attention;
    const struct job *jobs;
    int64_t num_jobs, jobs_each; /* of a part */
};

PARTS(keep_part); /* keeps the KV of KEPT_ROWS rows */
PARTS(run_part);  /* runs some jobs */
