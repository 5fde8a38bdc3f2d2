/* Operations on logits: conversion from bfloat16 to float32, argmax, and a check for finite numbers. */

#include "lanes/lanes.h"
#include "team.h"

enum { WIDENED = 1 << 15 /* numbers per part */ };

struct choice {
    const float *scores; /* [rows, size] */
    int64_t size;
    int64_t *chosen; /* [rows] */
};

/* Returns the lowest index of a row's maximum, or -1 if the row has a NaN. */
#ifdef NARROW
AVX2 static int64_t highest(const float *scores, int64_t size) {
    floats best = lanes_set(-__builtin_inff());
    int is_none = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const floats score = lanes_load(scores + i);
        is_none |= lanes_differ(score, score);
        best = lanes_max(score, best);
    }
    float top = lanes_highest(best);
    for (; i < size; i++) {
        is_none |= scores[i] != scores[i];
        top = scores[i] > top ? scores[i] : top;
    }
    if (is_none) return -1;
    for (i = 0; i + LANES <= size && !lanes_equal(lanes_load(scores + i), lanes_set(top));) i += LANES;
    while (scores[i] != top) i++;
    return i;
}
#else
AVX static int64_t highest(const float *scores, int64_t size) {
    __m512 best = _mm512_set1_ps(-__builtin_inff());
    __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), best_places = places;
    __mmask16 is_none = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 lanes = size - i >= LANES ? 0xffff : (__mmask16)((1 << (size - i)) - 1);
        const __m512 score = _mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), lanes, scores + i);
        const __mmask16 is_better = _mm512_cmp_ps_mask(score, best, _CMP_GT_OQ);
        is_none |= _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q);
        best = _mm512_mask_mov_ps(best, is_better, score);
        best_places = _mm512_mask_mov_epi32(best_places, is_better, places);
        places = _mm512_add_epi32(places, _mm512_set1_epi32(LANES));
    }
    if (is_none) return -1;
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    const __mmask16 is_top = _mm512_cmp_ps_mask(best, top, _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(is_top, best_places);
}

#endif

VECTOR_CODE void PART(choose_part)(const void *work, int64_t row) {
    const struct choice *c = work;
    c->chosen[row] = highest(c->scores + row * c->size, c->size);
}

/* Sets 1 if a row's maximum is finite and the row has no NaN. */
VECTOR_CODE void PART(check_part)(const void *work, int64_t row) {
    const struct choice *c = work;
    const float *scores = c->scores + row * c->size;
    const int64_t place = highest(scores, c->size);
    c->chosen[row] = place >= 0 && scores[place] - scores[place] == 0;
}

#ifndef NARROW /* compiled once: the entry points of both widths, and the code for bfloat16 */

PARTS(choose_part);
PARTS(check_part);

/* Sets the index of each row's maximum, the lowest among equals; scores [rows, size], `size` less than 2^31. Returns 0
   if a score is NaN. */
int outrider_choose(const float *scores, int64_t num_rows, int64_t size, int64_t *chosen) {
    const struct choice choice = {scores, size, chosen};
    share_out(FITTING(choose_part), &choice, num_rows);
    for (int64_t row = 0; row < num_rows; row++)
        if (chosen[row] < 0) return 0;
    return 1;
}

/* Sets 1 for each row of scores [rows, size] with a finite maximum and without NaN, 0 for others. */
void outrider_check(const float *scores, int64_t num_rows, int64_t size, int64_t *are_finite) {
    const struct choice choice = {scores, size, are_finite};
    share_out(FITTING(check_part), &choice, num_rows);
}

struct widening {
    const bf16 *from;
    float *to;
    int64_t size;
};

AVX static void widen_part(const void *work, int64_t part) {
    const struct widening *w = work;
    const int64_t end = min((part + 1) * WIDENED, w->size);
    for (int64_t i = part * WIDENED; i < end; i += LANES) {
        const __mmask16 lanes = end - i >= LANES ? 0xffff : (__mmask16)((1 << (end - i)) - 1);
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, w->from + i));
        _mm512_mask_storeu_epi32(w->to + i, lanes, _mm512_slli_epi32(bits, 16));
    }
}

void outrider_widen(const bf16 *from, float *to, int64_t size) {
    const struct widening widening = {from, to, size};
    share_out(widen_part, &widening, (size + WIDENED - 1) / WIDENED);
}

#endif
