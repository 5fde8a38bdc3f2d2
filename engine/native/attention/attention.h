/* Paged attention, for other files of the library. */

#pragma once

#include "attention/types.h"

/* Write the new keys and values, then compute `out`. Returns 0, or 1 where memory is short. */
int outrider_attend(const struct attention *attention);
