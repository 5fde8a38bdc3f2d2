/* The kernels of float32 rows once more, for AVX2: lanes.h says how. */

#define NARROW

#include "attention_job.c"
#include "attention_keep.c"
#include "attention_tiles.c"
#include "attention_unit.c"
#include "logits.c"
#include "rows.c"
