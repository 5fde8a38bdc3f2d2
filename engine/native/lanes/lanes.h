/* Vectors of sixteen float32 lanes, for kernels of float32 rows on two register widths.

   Files with such kernels are compiled twice: for AVX-512, where a register has sixteen lanes, and, included by
   narrow.c, for AVX2, where two registers make a vector. Both compute the same results, with each sum in the same
   order. bfloat16 needs AVX-512.

       floats, ints, mask       sixteen numbers, and a selection of lanes
       lanes_NAME(...)          an operation on all lanes
       VECTOR_CODE, TILE_CODE   attribute of a function with such operations, or also with AMX
       PART(name)               name of a part function, which FITTING(name) selects at run time
       WITHIN                   attribute of a function for other files of the same width */

#pragma once

#include "processor.h"

enum { LANES = 16 };

#ifdef NARROW
#include "lanes/narrow.h"
#else
#include "lanes/wide.h"
#endif
