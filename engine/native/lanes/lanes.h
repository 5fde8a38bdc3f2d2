/* Sixteen lanes of float32 side by side: what kernels of float32 rows are written in, for two widths of registers.

   Their files are compiled twice: for AVX-512, where a register has sixteen lanes, and, included by narrow.c, for AVX2,
   where two registers make one of these. What they compute is the same, each sum in the same order. bfloat16 is for
   AVX-512 only.

       floats, ints, mask       sixteen numbers; those of them that something is done with
       lanes_NAME(...)          a step over all of them
       VECTOR_CODE, TILE_CODE   before a function that takes such steps, and perhaps AMX's
       PART(name)               a part of work for a team, which FITTING(name) chooses at run time
       WITHIN                   before a function for other files of the same width */

#pragma once

#include "processor.h"

enum { LANES = 16 };

#ifdef NARROW
#include "lanes/narrow.h"
#else
#include "lanes/wide.h"
#endif
