"""The recurrent layers of transformers' modules as `MixerForm`s, by the name of their class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.recurrent.mixer import MixerForm, MixerInputs, MixerKind

QWEN3_5_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
_SILU = ("silu", "swish")


def mixer_forms(model: nn.Module) -> Iterator[tuple[nn.Module, MixerForm]]:
    """Yield the mixers of `model` that a kernel may compute."""
    for module in model.modules():
        make = _KINDS.get(type(module).__name__)
        if make is not None and getattr(module, "activation", "silu") in _SILU and (form := make(module)) is not None:
            yield module, form


def qwen3_next_orders(module: Any) -> list[Tensor]:
    """Return the places of inputs and gates in Qwen3-Next's first product, and of steps and betas in its second."""
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
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
}
