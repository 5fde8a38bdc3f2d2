"""Recurrent layers between their two products: what kernels need to know of them, and the forward around a kernel.

transformers' modules compute some forty short operations there. The mixers of a family that
`engine.recurrent.mixer_families` knows keep their module, its parameters and its packed products, and get another
forward; without states it is the module's own. So the agreement check compares both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.recurrent.state_pass import PooledLayer
from engine.recurrent.stock_functions import is_recurrent


class MixerKind(IntEnum):
    """`enum mixer_kind` of the native kernel."""

    SHORT_CONVOLUTION = 0
    MAMBA2 = 1
    GATED_DELTA = 2


class MixerInputs(NamedTuple):
    """A mixer's inputs, each [1, T, numbers] with adjacent numbers; its kind may not read all."""

    rows: Tensor
    gates: Tensor
    steps: Tensor
    betas: Tensor


@dataclass(frozen=True, slots=True)
class MixerForm:
    """The numbers of one mixer; tensors are float32 and contiguous.

    Attributes:
        kind: of the recurrence.
        inputs: returns the inputs of a module and its hidden states, or a tensor that has all of them, at `*_at`.
        weight: of the convolution, [R + 1, D].
        bias: of the convolution, [D].
        rates: a state decays by e^(rate step), [heads].
        step_biases: [heads].
        skips: Mamba-2's, [heads].
        norm: [heads * head_width].
        heads, groups: heads of a group share b and c, or key and query.
        head_width, depth: of a head's state.
        norm_size: numbers that are normed together.
        gates_first: the gate comes before the norm.
        gate_factor, step_factor: of gates and steps as they come.
    """

    kind: MixerKind
    inputs: Callable[[Any, Tensor], Tensor | MixerInputs]
    weight: Tensor
    bias: Tensor | None
    rates: Tensor | None = None
    step_biases: Tensor | None = None
    skips: Tensor | None = None
    norm: Tensor | None = None
    heads: int = 0
    groups: int = 0
    head_width: int = 0
    depth: int = 0
    norm_size: int = 0
    gates_first: bool = False
    inputs_at: int = 0
    gates_at: int = 0
    steps_at: int = 0
    betas_at: int = 0
    epsilon: float = 0.0
    least_step: float = 0.0
    most_step: float = 0.0
    gate_factor: float = 1.0
    step_factor: float = 1.0

    @property
    def num_kept(self) -> int:
        """Rows that the convolution looks back."""
        return len(self.weight) - 1

    @property
    def num_inputs(self) -> int:
        """Numbers of a row of the convolution."""
        return self.weight.shape[1]

    @property
    def num_outputs(self) -> int:
        """Numbers of a row of the result."""
        return self.heads * self.head_width or self.num_inputs


class KernelMixer(ABC):
    """The forward of one mixer, from hidden states [1, T, hidden] to as many.

    Attributes:
        form: the mixer.
        is_recordable: a recorded pass may call it.
    """

    is_recordable = False

    def __init__(self, module: Any, form: MixerForm, dtype: torch.dtype) -> None:
        """Compute `module`, whose `out_proj` follows, for rows of `dtype`."""
        self.form = form
        self._module, self._dtype = module, dtype
        self._inputs = form.inputs

    @abstractmethod
    def mix(self, inputs: MixerInputs, out: Tensor, states: PooledLayer) -> None:
        """Compute a pass's rows [1, T, `num_outputs`] into `out`, and keep the states of its slots."""

    def __call__(
        self, hidden_states: Tensor, *arguments: Any, state_pass: PooledLayer | None = None, **keywords: Any
    ) -> Tensor:
        module, form = self._module, self.form
        if state_pass is None:
            found: Tensor = type(module).forward(module, hidden_states, *arguments, **keywords)
            return found
        inputs = self._inputs(module, hidden_states)
        if isinstance(inputs, Tensor):
            places = form.inputs_at, form.gates_at, form.steps_at, form.betas_at
            inputs = MixerInputs(*(inputs[..., place:] for place in places))
        assert inputs.rows.dtype is state_pass.rows.dtype is self._dtype, "a model's rows and states have one dtype"
        out = inputs.rows.new_empty(*inputs.rows.shape[:-1], form.num_outputs)
        self.mix(inputs, out, state_pass)
        mixed: Tensor = module.out_proj(out)
        return mixed


def are_recordable(model: nn.Module) -> bool:
    """True if recorded passes may call all recurrent layers of a model, or if it has none."""
    mixers = (vars(module).get("forward") for module in model.modules() if is_recurrent(module))
    return all(isinstance(mixer, KernelMixer) and mixer.is_recordable for mixer in mixers)
