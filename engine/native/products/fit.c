/* Rounds weights to INT4: levels 0 to 15, and for each group of 32 a byte for the scale and one for the zero.

   The first scale tried reaches from the least to the greatest number of a group. The next smaller ones cut these off
   and round the others more finely. The first zeros tried put the least number, the greatest, and the middle where
   levels have them; then the zero moves to where the error of these levels is least. The least sum of squares wins.
   llama.cpp's `make_qkx2_quants` searches alike. A lane computes a group. */

#include "lanes/lanes.h"
#include "products/quantized.h"
#include "team.h"

enum {
    SMALLER = 2,       /* scales tried, and one more */
    TURNS = 3,         /* zeros tried from each start */
    GROUPS_EACH = 512, /* of a part */
};

/* The fits of sixteen groups. */
struct fits {
    floats error, zero, scale;
};

struct rounding {
    const float *weight; /* [groups, GROUP] */
    int64_t num_groups;
    uint8_t *levels; /* [groups, GROUP] */
    uint8_t *scales, *zeros;
};

/* Returns the byte of the least scale that is not below `scale`. */
INLINE int32_t scale_byte(float scale) {
    int32_t bits;
    __builtin_memcpy(&bits, &scale, sizeof bits);
    return (int32_t)max(0, min(255, (bits + ((1 << 20) - 1) - (LEAST_SCALE << 23)) >> 20));
}

INLINE float scale_of_byte(int32_t byte) {
    const int32_t bits = (byte << 20) + (LEAST_SCALE << 23);
    float scale;
    __builtin_memcpy(&scale, &bits, sizeof scale);
    return scale;
}

VECTOR_CODE INLINE floats within(floats x, float most) {
    return lanes_min(lanes_max(x, lanes_zero()), lanes_set(most));
}

/* Tries a scale with zeros from `zero` on, and keeps the best. */
VECTOR_CODE INLINE void try_scale(const floats *x, floats scale, floats inverse, floats zero, struct fits *best) {
    for (int turn = 0; turn < TURNS; turn++) {
        zero = lanes_mul(within(lanes_nearest(lanes_mul(zero, lanes_set(16))), 255), lanes_set(1.0f / 16));
        floats squares = lanes_zero(), sum = lanes_zero();
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++) {
            const floats exact = lanes_fma(x[i], inverse, zero);
            const floats off = lanes_sub(within(lanes_nearest(exact), 15), exact);
            squares = lanes_fma(off, off, squares), sum = lanes_add(sum, off);
        }
        const floats error = lanes_mul(lanes_mul(squares, scale), scale);
        const mask is_better = lanes_less(error, best->error);
        best->error = lanes_select(best->error, is_better, error);
        best->zero = lanes_select(best->zero, is_better, zero);
        best->scale = lanes_select(best->scale, is_better, scale);
        zero = lanes_fma(sum, lanes_set(1.0f / GROUP), zero);
    }
}

VECTOR_CODE INLINE struct fits fit(const floats *x) {
    floats least = lanes_zero(), most = lanes_zero();
    for (int i = 0; i < GROUP; i++) least = lanes_min(least, x[i]), most = lanes_max(most, x[i]);
    float widest[LANES], scales[LANES];
    lanes_store(widest, lanes_mul(lanes_sub(most, least), lanes_set(1.0f / 15)));
    struct fits best = {lanes_set(3.4e38f), lanes_zero(), lanes_set(scale_of_byte(0))};
    for (int smaller = 0; smaller <= SMALLER; smaller++) {
        for (int i = 0; i < LANES; i++) scales[i] = scale_of_byte((int32_t)max(0, scale_byte(widest[i]) - smaller));
        const floats scale = lanes_load(scales), inverse = lanes_div(lanes_set(1), scale);
        const floats low = lanes_mul(lanes_sub(lanes_zero(), least), inverse);
        const floats high = lanes_sub(lanes_set(15), lanes_mul(most, inverse));
        try_scale(x, scale, inverse, low, &best);
        try_scale(x, scale, inverse, high, &best);
        try_scale(x, scale, inverse, lanes_mul(lanes_add(low, high), lanes_set(0.5f)), &best);
    }
    return best;
}

/* Rounds a group with its scale and zero. */
VECTOR_CODE INLINE void round_group(const float *from, float scale, float zero, uint8_t *to) {
    const floats inverse = lanes_set(1.0f / scale);
    for (int i = 0; i < GROUP; i += LANES) {
        const floats exact = lanes_fma(lanes_load(from + i), inverse, lanes_set(zero));
        lanes_store_int8((char *)to + i, mask_of(0xffff), lanes_rounded(within(exact, 15)));
    }
}

VECTOR_CODE void PART(round_part)(const void *work, int64_t part) {
    const struct rounding *r = work;
    const int64_t last = min((part + 1) * GROUPS_EACH, r->num_groups);
    for (int64_t group = part * GROUPS_EACH; group < last; group += LANES) {
        const int64_t lanes = min(LANES, last - group);
        floats x[GROUP];
        for (int half = 0; half < GROUP; half += LANES) {
            ints rows[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) /* the last groups fill the lanes without one */
                rows[lane] = lanes_load_ints(r->weight + (group + min(lane, lanes - 1)) * GROUP + half);
            transpose(rows);
            for (int i = 0; i < LANES; i++) x[half + i] = lanes_as_floats(rows[i]);
        }
        const struct fits best = fit(x);
        float scales[LANES], zeros[LANES];
        lanes_store(scales, best.scale), lanes_store(zeros, best.zero);
        for (int64_t lane = 0; lane < lanes; lane++) {
            const int64_t at = group + lane;
            r->scales[at] = (uint8_t)scale_byte(scales[lane]), r->zeros[at] = (uint8_t)(16 * zeros[lane]);
            round_group(r->weight + at * GROUP, scales[lane], zeros[lane], r->levels + at * GROUP);
        }
    }
}

#ifndef NARROW /* compiled once: the entry point of both widths */

PARTS(round_part);

/* Rounds a weight [groups, GROUP]. A weight is (level - zero / 16) * scale. */
void outrider_round(const float *weight, int64_t num_groups, uint8_t *levels, uint8_t *scales, uint8_t *zeros) {
    const struct rounding r = {weight, num_groups, levels, scales, zeros};
    share_out(FITTING(round_part), &r, (num_groups + GROUPS_EACH - 1) / GROUPS_EACH);
}

#endif
