"""Recurrent layers between their two products on a GPU: three launches, or one for a short convolution.

The launches are a causal convolution, a scan, and gates and norms. All is computed in float32 and rounded once. A row's
sums have one order: it depends on neither chunks, neighbours nor the number of rows, so a row's bits depend on the
state before it and on its own inputs alone. A scan therefore walks the rows of a span one by one; a part of a head's
state stays in the registers of one warp meanwhile.

Import it only where Triton is installed; TRITON_INTERPRET=1, set before the first import, runs it on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.recurrent.mixer import KernelMixer, MixerInputs, MixerKind, mixer_forms
from engine.recurrent.state_pass import PooledLayer

# No kernel is compiled again for another number of rows or another stride: sums might get another order.
_ANY = ("input_row", "gate_row", "step_row", "beta_row")


@triton.jit
def _softplus(x):
    """log(1 + e^x). With w = 1 + u rounded, log(w) u / (w - 1) is as exact as log1p(u), which interpreters lack."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit(do_not_specialize=_ANY)
def convolve_rows(
    out,  # [T, WIDTH]; float32 before a scan
    pool,  # [slots, NUM_KEPT, WIDTH]: the inputs of the rows before a row
    inputs,  # [T, input_row]; the first WIDTH of a row are read
    gates,  # [T, gate_row], of outputs, or None
    betas,  # [T, beta_row], factors of inputs, or None
    weight,  # [NUM_KEPT + 1, WIDTH] float32, of the oldest row first
    bias,  # [WIDTH] float32 or None
    rows,  # [T, 3] int64: rows of its span before it, the slot before the span, the slot after the row or -1
    input_row,
    gate_row,
    beta_row,
    WIDTH: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and BLOCK channels. A row's inputs come from the pass, and before its span from the pool."""
    row = tl.program_id(0).to(tl.int64)
    place, slot = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    after = tl.load(rows + row * 3 + 2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = channel < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for age in tl.static_range(NUM_KEPT + 1):
        back = NUM_KEPT - age  # rows
        is_own = is_there & (back <= place)
        x = tl.load(inputs + (row - back) * input_row + channel, mask=is_own, other=0.0)
        if betas is not None:  # states have rounded inputs, so all inputs are rounded
            beta = tl.load(betas + (row - back) * beta_row + channel, mask=is_own, other=0.0)
            x = (x.to(tl.float32) * beta.to(tl.float32)).to(pool.dtype.element_ty)
        kept = pool + (slot * NUM_KEPT + place + age) * WIDTH + channel
        x = tl.where(back <= place, x, tl.load(kept, mask=is_there & (back > place), other=0.0))
        total += x.to(tl.float32) * tl.load(weight + age * WIDTH + channel, mask=is_there, other=0.0)
        if age > 0:
            # A span of one row may leave its state where it began: each number there is read before it is replaced.
            kept = pool + (after * NUM_KEPT + age - 1) * WIDTH + channel
            tl.store(kept, x, mask=is_there & (after >= 0))
    if bias is not None:
        total += tl.load(bias + channel, mask=is_there, other=0.0)
    if gates is None:
        total *= tl.sigmoid(total)
    else:
        total *= tl.load(gates + row * gate_row + channel, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=_ANY)
def scan_heads(
    out,  # [T, HEADS, WIDTH] float32
    pool,  # [slots, HEADS, WIDTH, DEPTH] float32, or [slots, HEADS, DEPTH, WIDTH] of the delta rule
    convolved,  # [T, ...] float32: x, b and c, or query, key and value
    steps,  # [T, step_row]
    betas,  # [T, beta_row], of the delta rule
    rates,  # [HEADS] float32
    step_biases,  # [HEADS] float32
    skips,  # [HEADS] float32 or None
    spans,  # [S, 2] int64: the first row of each span, and the row after its last
    rows,  # [T, 3] int64, as in `convolve_rows`
    step_factor,
    least_step,
    most_step,
    step_row,
    beta_row,
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per span, head and BLOCK_W of its width; parts of a state never meet.

    Mamba-2: state[n, p] = state[n, p] decay + b[n] x[p] step; out[p] = sum over n of state[n, p] c[n], + x[p] skip.
    Delta rule: state[k, v] = state[k, v] decay; change[v] = (value[v] - sum over k of state[k, v] key[k]) beta;
    state[k, v] += key[k] change[v]; out[v] = sum over k of state[k, v] query[k].
    """
    SIZE: tl.constexpr = GROUPS * DEPTH
    first, end = tl.load(spans + tl.program_id(0) * 2), tl.load(spans + tl.program_id(0) * 2 + 1)
    head = tl.program_id(1)
    d, w = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_deep, is_wide = d < DEPTH, w < WIDTH
    is_there = is_deep[:, None] & is_wide[None, :]
    places = d[:, None] * WIDTH + w[None, :] if IS_DELTA else w[None, :] * DEPTH + d[:, None]
    group = head // (HEADS // GROUPS) * DEPTH + d
    rate, step_bias = tl.load(rates + head), tl.load(step_biases + head)
    if first < end:
        slot = tl.load(rows + first * 3 + 1)
        state = tl.load(pool + (slot * HEADS + head) * DEPTH * WIDTH + places, mask=is_there, other=0.0)
        for row in range(first, end):
            values = convolved + row * (2 * SIZE + HEADS * WIDTH)
            # The inputs of the row.
            raw = tl.load(steps + row * step_row + head).to(tl.float32) * step_factor + step_bias
            step = tl.minimum(tl.maximum(_softplus(raw), least_step), most_step)
            if IS_DELTA:
                query = tl.load(values + group, mask=is_deep, other=0.0)
                key = tl.load(values + SIZE + group, mask=is_deep, other=0.0)
                x = tl.load(values + 2 * SIZE + head * WIDTH + w, mask=is_wide, other=0.0)
                query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * DEPTH**-0.5
                key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            else:
                x = tl.load(values + head * WIDTH + w, mask=is_wide, other=0.0)
                key = tl.load(values + HEADS * WIDTH + group, mask=is_deep, other=0.0)
                query = tl.load(values + HEADS * WIDTH + SIZE + group, mask=is_deep, other=0.0)
            # The state after it.
            state *= tl.exp(step * rate)
            if IS_DELTA:
                beta = tl.sigmoid(tl.load(betas + row * beta_row + head).to(tl.float32))
                change = (x - tl.sum(state * key[:, None], 0)) * beta
            else:
                change = x * step
            state += key[:, None] * change[None, :]
            # What it reads.
            result = tl.sum(state * query[:, None], 0)
            if skips is not None:
                result += x * tl.load(skips + head)
            tl.store(out + (row * HEADS + head) * WIDTH + w, result, mask=is_wide)
            after = tl.load(rows + row * 3 + 2)
            kept = pool + (after * HEADS + head) * DEPTH * WIDTH + places
            tl.store(kept, state, mask=is_there & (after >= 0))


@triton.jit
def _silu(gates):
    return gates * tl.sigmoid(gates)


@triton.jit(do_not_specialize=_ANY)
def gate_and_norm(
    out,  # [T, GROUPS, SIZE]
    scanned,  # [T, GROUPS, SIZE] float32
    gates,  # [T, gate_row]
    norm,  # [GROUPS, SIZE] float32 or None
    gate_factor,
    epsilon,
    gate_row,
    GATES_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and numbers that are normed together."""
    row, group, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_there = at < SIZE
    place = row * GROUPS * SIZE + group * SIZE + at
    x = tl.load(scanned + place, mask=is_there, other=0.0)
    gate = tl.load(gates + row * gate_row + group * SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    gate = _silu(gate * gate_factor)
    if GATES_FIRST:
        x *= gate
    if norm is not None:
        x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
        x *= tl.load(norm + group * SIZE + at, mask=is_there, other=0.0)
    if not GATES_FIRST:
        x *= gate
    tl.store(out + place, x.to(out.dtype.element_ty), mask=is_there)


CHANNELS = 256  # of a convolution in one program


def state_block(depth: int, width: int) -> tuple[int, int]:
    """Return the depth and the width of a head's state that one program keeps: its whole depth, in powers of two.

    A program keeps 1,024 numbers: 32 registers of each lane.
    """
    whole = triton.next_power_of_2(depth)
    return whole, max(1, min(triton.next_power_of_2(width), 1024 // whole))


class TritonMixer(KernelMixer):
    """A mixer by our kernels on a GPU.

    Every launch has the sizes of the model and the number of rows and spans alone, and reads slots from the device, so
    it can be recorded.
    """

    is_recordable = True

    def mix(self, inputs: MixerInputs, out: Tensor, states: PooledLayer) -> None:
        with torch.cuda.device_of(out):
            if self.form.kind is MixerKind.SHORT_CONVOLUTION:
                self._convolve(inputs, out, states, is_gated=True)
                return
            num_rows, like = out.shape[-2], inputs.rows
            convolved = torch.empty(num_rows, self.form.num_inputs, dtype=torch.float32, device=like.device)
            self._convolve(inputs, convolved, states, is_gated=False)
            scanned = torch.empty(num_rows, self.form.num_outputs, dtype=torch.float32, device=like.device)
            self._scan(inputs, convolved, scanned, states)
            self._finish(inputs, scanned, out)

    def _convolve(self, inputs: MixerInputs, out: Tensor, states: PooledLayer, *, is_gated: bool) -> None:
        form, block = self.form, min(CHANNELS, triton.next_power_of_2(self.form.num_inputs))
        convolve_rows[(out.shape[-2], triton.cdiv(form.num_inputs, block))](
            out,
            states.rows,
            inputs.rows,
            inputs.gates if is_gated else None,
            inputs.betas if is_gated else None,
            form.weight,
            form.bias,
            states.row_slots.rows,
            *(each.stride(-2) for each in (inputs.rows, inputs.gates, inputs.betas)),
            WIDTH=form.num_inputs,
            NUM_KEPT=form.num_kept,
            BLOCK=block,
            num_warps=1,
        )

    def _scan(self, inputs: MixerInputs, convolved: Tensor, out: Tensor, states: PooledLayer) -> None:
        form, slots = self.form, states.row_slots
        depth, width = state_block(form.depth, form.head_width)
        scan_heads[(len(slots.spans), form.heads, triton.cdiv(form.head_width, width))](
            out,
            states.matrices,
            convolved,
            inputs.steps,
            inputs.betas,
            form.rates,
            form.step_biases,
            form.skips,
            slots.spans,
            slots.rows,
            form.step_factor,
            form.least_step,
            form.most_step,
            inputs.steps.stride(-2),
            inputs.betas.stride(-2),
            IS_DELTA=form.kind is MixerKind.GATED_DELTA,
            HEADS=form.heads,
            GROUPS=form.groups,
            WIDTH=form.head_width,
            DEPTH=form.depth,
            BLOCK_W=width,
            BLOCK_D=depth,
            num_warps=1,
        )

    def _finish(self, inputs: MixerInputs, scanned: Tensor, out: Tensor) -> None:
        form, block = self.form, triton.next_power_of_2(self.form.norm_size)
        groups = form.num_outputs // form.norm_size
        gate_and_norm[(out.shape[-2], groups)](
            out,
            scanned,
            inputs.gates,
            form.norm,
            form.gate_factor,
            form.epsilon,
            inputs.gates.stride(-2),
            GATES_FIRST=form.gates_first,
            GROUPS=groups,
            SIZE=form.norm_size,
            BLOCK=block,
            num_warps=1 if block <= 1024 else 8,
        )


def use_triton_mixers(model: nn.Module, dtype: torch.dtype) -> int:
    """Let our kernels compute the mixers of `model` that they know, for rows of `dtype`; returns how many."""
    num_ours = 0
    for module, form in mixer_forms(model):
        setattr(module, "forward", TritonMixer(module, form, dtype))  # noqa: B010 -- shadows the class's
        num_ours += 1
    return num_ours
