/* Work that is shared out in parts among threads of our own. */

#pragma once

#include "processor.h"

typedef void part_function(const void *work, int64_t part);

/* Call `compute` with `work` and each of the parts [0, num_parts), in this order but side by side on as many threads as
   torch has in this one; returns when all are done. A part may not share out work itself. */
INTERNAL void share_out(part_function *compute, const void *work, int64_t num_parts);

/* The variants of a part, of which FITTING chooses. */
#define PARTS(name) INTERNAL part_function name##_wide, name##_narrow

/* As many threads as may take part. */
INTERNAL int64_t team_size(void);
