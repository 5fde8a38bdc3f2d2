"""Recurrent layers between their two products: descriptions for kernels, and the forward around a kernel.

transformers' modules compute some forty short operations there. A mixer of a known class keeps its module, parameters
and packed products, and gets another forward; without states it is the module's own. So the agreement check compares
both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
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
        kind: the recurrence.
        inputs: computes the inputs from a module and hidden states: each alone, or one tensor with all of them, at the
            places `*_at`.
        weight: the convolution's, [R + 1, D].
        bias: the convolution's, [D].
        rates: a state decays by e^(rate step), [heads].
        step_biases: added to the steps, [heads].
        skips: Mamba-2's factors of the inputs that are added to the outputs, [heads].
        norm: the weight of the norm, [heads * head_width].
        heads, groups: heads of a group share b and c, or key and query.
        head_width, depth: the sizes of a head's state.
        norm_size: numbers that are normed together.
        gates_first: the gate comes before the norm.
        gate_factor, step_factor: multiply gates and steps first.
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


QWEN3_5_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
_SILU = ("silu", "swish")


def mixer_forms(model: nn.Module) -> Iterator[tuple[nn.Module, MixerForm]]:
    """Yield the mixers of `model` that a kernel may compute."""
    for module in model.modules():
        make = _KINDS.get(type(module).__name__)
        if make is not None and getattr(module, "activation", "silu") in _SILU and (form := make(module)) is not None:
            yield module, form


def qwen3_next_orders(module: Any) -> list[Tensor]:
    """Return the order of inputs and gates in Qwen3-Next's first product, and of steps and betas in its second."""
    places = (torch.arange(size)[None, None] for size in (module.conv_dim + module.value_dim, 2 * module.num_v_heads))
    query, key, value, gates, betas, steps = module.fix_query_key_value_ordering(*places)
    return [torch.cat([each.flatten() for each in parts]) for parts in ((query, key, value, gates), (steps, betas))]


def _form(
    module: nn.Module,
    kind: MixerKind,
    inputs: Callable[[Any, Tensor], Tensor | MixerInputs],
    factors: Tensor | None = None,
    **fields: Any,
) -> MixerForm:
    """Return the form of `module` with its convolution; `factors` [D] belong to the convolution's inputs."""
    convolution = next(part for part in module.children() if isinstance(part, nn.Conv1d))
    columns = convolution.weight.squeeze(1).T  # [R + 1, D]
    weight = columns if factors is None else columns.float() * factors.to(columns.device)
    fields |= {"weight": weight, "bias": convolution.bias}
    tensors = {name: _exact(value) for name, value in fields.items() if isinstance(value, Tensor)}
    return MixerForm(kind=kind, inputs=inputs, **{**fields, **tensors})


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _projected(module: Any, hidden_states: Tensor) -> Tensor:
    projected: Tensor = module.in_proj(hidden_states)
    return projected


def _short_convolution(module: Any) -> MixerForm:
    """Return a mixer whose product has factors of its inputs, gates, and inputs."""
    size = module.out_proj.in_features
    return _form(module, MixerKind.SHORT_CONVOLUTION, _projected, betas_at=0, gates_at=size, inputs_at=2 * size)


def _mamba2(module: Any) -> MixerForm | None:
    """Return a mixer whose product has gates, inputs and steps.

    Its norm is of groups, after the gate or before it, or absent. Falcon-H1's product has factors before and after it,
    which gates, steps and the convolution's weights have here; None if it has a bias between them.
    """
    norm, num_gates = module.norm, module.intermediate_size
    least, most = module.time_step_limit
    factors: Tensor = getattr(module, "mup_vector", torch.ones(1)).detach().float().flatten()
    factors = (factors * getattr(module, "ssm_in_multiplier", 1.0)).expand(module.in_proj.out_features)
    if hasattr(module, "ssm_in_multiplier") and module.use_bias:
        return None
    num_norms = getattr(norm, "n_groups", None) or num_gates // getattr(norm, "group_size", num_gates)
    return _form(
        module,
        MixerKind.MAMBA2,
        _projected,
        factors[num_gates : num_gates + module.conv_dim],
        rates=-module.A_log.float().exp(),
        step_biases=module.dt_bias,
        skips=module.D,
        norm=getattr(norm, "weight", None),
        heads=module.num_heads,
        groups=module.n_groups,
        head_width=module.head_dim,
        depth=module.ssm_state_size,
        norm_size=num_gates // num_norms,
        gates_first=not getattr(norm, "norm_before_gate", False),
        inputs_at=num_gates,
        steps_at=num_gates + module.conv_dim,
        epsilon=getattr(norm, "variance_epsilon", 0.0),
        least_step=float(least),
        most_step=float(most),
        gate_factor=float(factors[0]),
        step_factor=float(factors[-1]),
    )


def _gated_delta(module: Any, inputs: Callable[[Any, Tensor], MixerInputs]) -> MixerForm:
    """Return a mixer whose one product would have queries, keys, values, gates, steps and betas."""
    num_inputs, num_gates = module.conv_dim, module.value_dim
    return _form(
        module,
        MixerKind.GATED_DELTA,
        inputs,
        rates=-module.A_log.float().exp(),
        step_biases=module.dt_bias,
        norm=module.norm.weight.repeat(module.num_v_heads),
        heads=module.num_v_heads,
        groups=module.num_k_heads,
        head_width=module.head_v_dim,
        depth=module.head_k_dim,
        norm_size=module.head_v_dim,
        gates_at=num_inputs,
        steps_at=num_inputs + num_gates,
        betas_at=num_inputs + num_gates + module.num_v_heads,
        epsilon=module.norm.variance_epsilon,
        most_step=math.inf,
    )


def _qwen3_5(module: Any) -> MixerForm:
    return _gated_delta(module, _qwen3_5_inputs)


def _qwen3_5_inputs(module: Any, hidden_states: Tensor) -> MixerInputs:
    return MixerInputs(*(getattr(module, name)(hidden_states) for name in QWEN3_5_INPUTS))


def _qwen3_next(module: Any) -> MixerForm:
    orders = [order.to(module.A_log.device) for order in qwen3_next_orders(module)]
    return _gated_delta(module, partial(_qwen3_next_inputs, orders))


def _qwen3_next_inputs(orders: list[Tensor], module: Any, hidden_states: Tensor) -> MixerInputs:
    first = module.in_proj_qkvz(hidden_states).index_select(-1, orders[0])
    last = module.in_proj_ba(hidden_states).index_select(-1, orders[1])
    return MixerInputs(first, first[..., module.conv_dim :], last, last[..., module.num_v_heads :])


_KINDS: dict[str, Callable[[Any], MixerForm | None]] = {
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
}
