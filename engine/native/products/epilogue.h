/* The epilogue of a product of float32 rows: bias and gate. */

#pragma once

#include "processor.h"
#include "products/gate.h"

/* Finishes one row of a pair of 16 + 16 outputs: out [32] = sums (+ bias [32]), or out [16] = function(gate) * up. */
AVX2 INLINE void finish_row(const float *bias, int gate, const float *sums, float *out) {
    __m256 result[4];
    for (int quarter = 0; quarter < 4; quarter++) {
        result[quarter] = _mm256_loadu_ps(sums + quarter * 8);
        if (bias) result[quarter] = _mm256_add_ps(result[quarter], _mm256_loadu_ps(bias + quarter * 8));
    }
    if (gate) {
        _mm256_storeu_ps(out, _mm256_mul_ps(exact_gate(gate, result[0]), result[2]));
        _mm256_storeu_ps(out + 8, _mm256_mul_ps(exact_gate(gate, result[1]), result[3]));
    } else {
        for (int quarter = 0; quarter < 4; quarter++) _mm256_storeu_ps(out + quarter * 8, result[quarter]);
    }
}
