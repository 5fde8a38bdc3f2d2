/* The layers of LFM2, Mamba-2 and Qwen3-Next between their two products: a causal convolution, a scan, gates and norms.
   All is computed in float32 and rounded once. A row's sums have one order, so its bits depend on the state before it
   and on its own inputs alone. */

#include "recurrent/mixer.h"
#include "recurrent/scan.h"

#include <math.h>

enum {
    MAX_KEPT = 7,   /* rows that a convolution looks back */
    CHANNELS = 256, /* of a part of a convolution */
    MIXED_ROWS = 8,  /* of a part of gates and norms; they take less time than the rest */
};

struct mix {
    const struct mixer *mixer;
    const struct mixed_rows *rows;
    float *convolved; /* [T, width] */
    float *scanned;   /* [T, heads * head_width] */
    float *steps, *decay; /* [T, heads]; the delta rule has betas as steps */
    int64_t blocks;       /* parts of a convolution in a span */
    int is_bf16;
};

/* Returns 1 / (1 + e^-x). e^-x = 2^whole 2^rest, with |rest| <= 1/2 and a polynomial for 2^rest. */
VECTOR_CODE INLINE floats logistic(floats x) {
    static const float powers[] = {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f,
                                   2.40226507e-1f, 6.93147181e-1f, 1.0f};
    const floats half = lanes_set(0.5f), bound = lanes_set(125.0f); /* 2^bound is finite */
    floats t = lanes_fma(x, lanes_set(-1.44269504f), half);
    t = lanes_min(bound, lanes_max(lanes_sub(lanes_zero(), bound), t)); /* NaN stays NaN */
    const floats rest = lanes_sub(lanes_fraction(t), half);
    floats power = lanes_set(1.52527338e-5f);
    for (int i = 0; i < 7; i++) power = lanes_fma(power, rest, lanes_set(powers[i]));
    const floats one = lanes_set(1.0f);
    return lanes_div(one, lanes_add(lanes_scale(power, t), one));
}

VECTOR_CODE INLINE floats silu(floats x) { return lanes_mul(x, logistic(x)); }

/* Convolves LANES channels of a span, and keeps the inputs before rows with a slot `after`. */
VECTOR_CODE INLINE void convolve(const struct mix *m, int64_t span, int64_t channel, const int is_bf16) {
    const struct mixer *x = m->mixer;
    const struct mixed_rows *r = m->rows;
    const int64_t num_kept = x->num_kept, width = x->width;
    floats inputs[MAX_KEPT + 1], weights[MAX_KEPT + 1];
    for (int64_t i = 0; i <= num_kept; i++) weights[i] = lanes_load(x->weight + i * width + channel);
    for (int64_t i = 0; i < num_kept; i++)
        inputs[i] = load_numbers(r->rows, (r->before[span] * num_kept + i) * width + channel, is_bf16);
    for (int64_t row = span ? r->ends[span - 1] : 0; row < r->ends[span]; row++) {
        floats input = load_numbers(r->inputs, row * r->input_row + channel, is_bf16);
        if (x->kind == SHORT_CONVOLUTION) { /* states have rounded inputs, so all inputs are rounded */
            char rounded[4 * LANES];
            input = lanes_mul(input, load_numbers(r->betas, row * r->beta_row + channel, is_bf16));
            input = store_numbers(rounded, 0, input, is_bf16);
        }
        inputs[num_kept] = input;
        floats sum = lanes_mul(inputs[0], weights[0]);
        for (int64_t i = 1; i <= num_kept; i++) sum = lanes_fma(inputs[i], weights[i], sum);
        if (x->bias) sum = lanes_add(sum, lanes_load(x->bias + channel));
        for (int64_t i = 0; i < num_kept; i++) {
            inputs[i] = inputs[i + 1];
            if (r->after[row] >= 0)
                store_numbers(r->rows, (r->after[row] * num_kept + i) * width + channel, inputs[i], is_bf16);
        }
        if (x->kind == SHORT_CONVOLUTION) {
            const floats gate = load_numbers(r->gates, row * r->gate_row + channel, is_bf16);
            store_numbers(r->out, row * width + channel, lanes_mul(gate, sum), is_bf16);
        } else {
            lanes_store(m->convolved + row * width + channel, silu(sum));
        }
    }
}

VECTOR_CODE void PART(convolve_part)(const void *work, int64_t part) {
    const struct mix *m = work;
    const int64_t span = part / m->blocks, first = part % m->blocks * CHANNELS;
    for (int64_t channel = first; channel < min(first + CHANNELS, m->mixer->width); channel += LANES) {
        if (IS_BF16(m)) convolve(m, span, channel, 1);
        else convolve(m, span, channel, 0);
    }
}

/* Divides `count` numbers by their length, and multiplies them by `factor`. */
VECTOR_CODE INLINE void make_unit(float *x, int64_t count, float factor) {
    floats squares = lanes_zero();
    for (int64_t i = 0; i < count; i += LANES) {
        const floats some = lanes_load_some(first_lanes(count - i), x + i);
        squares = lanes_fma(some, some, squares);
    }
    const floats inverse = lanes_set(factor / sqrtf(lanes_sum(squares) + 1e-6f));
    for (int64_t i = 0; i < count; i += LANES) {
        const mask lanes = first_lanes(count - i);
        lanes_store_some(x + i, lanes, lanes_mul(lanes_load_some(lanes, x + i), inverse));
    }
}

/* Makes the queries and keys of rows units; queries are scaled. */
VECTOR_CODE void PART(unit_part)(const void *work, int64_t part) {
    const struct mix *m = work;
    const struct mixer *x = m->mixer;
    const float factor = 1.0f / sqrtf((float)x->depth);
    for (int64_t row = part * MIXED_ROWS; row < min((part + 1) * MIXED_ROWS, m->rows->num_rows); row++)
        for (int64_t group = 0; group < x->groups; group++) {
            float *query = m->convolved + row * x->width + group * x->depth;
            make_unit(query, x->depth, factor);
            make_unit(query + x->groups * x->depth, x->depth, 1.0f);
        }
}

/* Returns the function of LANES gates. */
VECTOR_CODE INLINE floats gates_of(const struct mix *m, int64_t at, mask lanes) {
    const floats gates = load_some_numbers(m->rows->gates, at, lanes, m->is_bf16);
    return silu(lanes_mul(gates, lanes_set(m->mixer->gate_factor)));
}

/* Gates and norms numbers of a row that are normed together, in place. `at` is their place in the row. */
VECTOR_CODE INLINE void gate_and_norm(const struct mix *m, int64_t row, int64_t at, int64_t count) {
    const struct mixer *x = m->mixer;
    const int64_t gates = row * m->rows->gate_row + at;
    float *numbers = m->scanned + row * x->heads * x->head_width + at;
    floats squares = lanes_zero();
    for (int64_t i = 0; i < count; i += LANES) {
        const mask lanes = first_lanes(count - i);
        floats some = lanes_load_some(lanes, numbers + i);
        if (x->gates_first) {
            some = lanes_mul(some, gates_of(m, gates + i, lanes));
            lanes_store_some(numbers + i, lanes, some);
        }
        squares = lanes_fma(some, some, squares);
    }
    if (!x->norm) return;
    const floats inverse = lanes_set(1.0f / sqrtf(lanes_sum(squares) / (float)count + x->epsilon));
    for (int64_t i = 0; i < count; i += LANES) {
        const mask lanes = first_lanes(count - i);
        floats some = lanes_mul(lanes_load_some(lanes, numbers + i), inverse);
        some = lanes_mul(some, lanes_load_some(lanes, x->norm + at + i));
        if (!x->gates_first) some = lanes_mul(some, gates_of(m, gates + i, lanes));
        lanes_store_some(numbers + i, lanes, some);
    }
}

VECTOR_CODE void PART(gate_part)(const void *work, int64_t part) {
    const struct mix *m = work;
    const int64_t size = m->mixer->heads * m->mixer->head_width;
    for (int64_t row = part * MIXED_ROWS; row < min((part + 1) * MIXED_ROWS, m->rows->num_rows); row++) {
        for (int64_t at = 0; at < size; at += m->mixer->norm_size) gate_and_norm(m, row, at, m->mixer->norm_size);
        for (int64_t i = row * size; i < (row + 1) * size; i += LANES)
            store_numbers(m->rows->out, i, lanes_load(m->scanned + i), IS_BF16(m));
    }
}

#ifndef NARROW /* compiled once: the entry points of both widths */

PARTS(convolve_part);
PARTS(unit_part);
PARTS(gate_part);

static float number_at(const void *from, int64_t index, int64_t is_bf16) {
    if (!is_bf16) return ((const float *)from)[index];
    const uint32_t bits = (uint32_t)((const bf16 *)from)[index] << 16;
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

/* Computes the steps and decays of all rows. */
static void take_steps(const struct mix *m) {
    const struct mixer *x = m->mixer;
    const struct mixed_rows *r = m->rows;
    for (int64_t row = 0; row < r->num_rows; row++)
        for (int64_t head = 0; head < x->heads; head++) {
            const float given = number_at(r->steps, row * r->step_row + head, x->is_bf16) * x->step_factor;
            const float raw = given + x->step_biases[head];
            const float softplus = raw > 20 ? raw : log1pf(expf(raw));
            const float step = fminf(fmaxf(softplus, x->least_step), x->most_step);
            const int64_t at = row * x->heads + head;
            m->decay[at] = expf(step * x->rates[head]);
            m->steps[at] = step;
            if (x->kind == GATED_DELTA)
                m->steps[at] = 1.0f / (1.0f + expf(-number_at(r->betas, row * r->beta_row + head, x->is_bf16)));
        }
}

static void scan_heads(const struct mix *m) {
    const struct mixer *x = m->mixer;
    const struct mixed_rows *r = m->rows;
    const int64_t group = x->groups * x->depth;
    struct scan scan = {.steps = m->steps, .decay = m->decay, .skips = x->skips, .out = m->scanned,
                        .pool = r->matrices, .before = r->before, .ends = r->ends, .after = r->after,
                        .x_row = x->width, .group_row = x->width, .heads = x->heads, .groups = x->groups,
                        .width = x->head_width, .depth = x->depth};
    const int is_delta = x->kind == GATED_DELTA;
    const float *key = m->convolved + (is_delta ? group : x->heads * x->head_width);
    scan.x = m->convolved + (is_delta ? 2 * group : 0);
    scan.b = key;
    scan.c = is_delta ? m->convolved : key + group;
    run_scan(&scan, r->num_spans, is_delta);
}

int64_t outrider_mixer_scratch(const struct mixer *x, int64_t num_rows) {
    return num_rows * (x->width + x->heads * (x->head_width + 2));
}

void outrider_mix(const struct mixer *x, const struct mixed_rows *r, float *scratch) {
    const int64_t size = x->heads * x->head_width, row_parts = (r->num_rows + MIXED_ROWS - 1) / MIXED_ROWS;
    struct mix m = {.mixer = x, .rows = r, .blocks = (x->width + CHANNELS - 1) / CHANNELS, .is_bf16 = (int)x->is_bf16};
    m.convolved = scratch, m.scanned = m.convolved + r->num_rows * x->width;
    m.steps = m.scanned + r->num_rows * size, m.decay = m.steps + r->num_rows * x->heads;
    share_out(FITTING(convolve_part), &m, r->num_spans * m.blocks);
    if (x->kind == SHORT_CONVOLUTION) return;
    if (x->kind == GATED_DELTA) share_out(FITTING(unit_part), &m, row_parts);
    take_steps(&m);
    scan_heads(&m);
    share_out(FITTING(gate_part), &m, row_parts);
}

#endif
