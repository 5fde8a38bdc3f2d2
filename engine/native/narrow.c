/* Compiles the kernels of float32 rows a second time, for AVX2; see lanes.h. */

#define NARROW

#include "attention/job.c"
#include "attention/store_kv.c"
#include "attention/tiles.c"
#include "attention/unit.c"
#include "logits.c"
#include "products/fit.c"
#include "recurrent/mixer.c"
#include "recurrent/scan.c"
#include "rows.c"
