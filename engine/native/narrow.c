/* The kernels of float32 rows once more, for AVX2: lanes.h says how. */

#define NARROW

#include "attention/job.c"
#include "attention/keep.c"
#include "attention/tiles.c"
#include "attention/unit.c"
#include "logits.c"
#include "rows.c"
