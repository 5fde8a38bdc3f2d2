/* Distributes the parts of a job among our own threads. */

#pragma once

#include "processor.h"

typedef void part_function(const void *work, int64_t part);

/* Calls `compute` with `work` and each of the parts [0, num_parts), in parallel on as many threads as
   torch uses. Returns when all parts are done. A part must not call `share_out`. */
INTERNAL void share_out(part_function *compute, const void *work, int64_t num_parts);

/* Declares the variants of a part; FITTING selects one. */
#define PARTS(name) INTERNAL part_function name##_wide, name##_narrow

/* Returns the number of threads that may take part. */
INTERNAL int64_t team_size(void);
