"""Recurrent layers between their two products on a GPU: three launches, or one for a short convolution.

Import it only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from engine.recurrent.mixer import KernelMixer, MixerInputs, MixerKind, mixer_forms
from engine.recurrent.state_pass import PooledLayer
from engine.recurrent.triton_kernel import convolve_rows, gate_and_norm, scan_heads

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
