"""Makes the recurrent layers of transformers' models read and write states, through the functions that they all call.

transformers' modules of one family differ in projections, gates and norms, but all call a convolution and, in most
families, a scan by the same names. Like attention, they pass the keywords of the forward on to these functions. So a
hook before each such layer names the layer in the keyword `STATE_KEYWORD`, and our functions in the place of theirs
compute with its states. Without the keyword they call transformers' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.base import UnsupportedAttentionError
from engine.recurrent.state_pass import PooledLayer, PooledStates, RecordingLayer, RecordingStates

STATE_KEYWORD = "state_pass"
_CONVOLUTION = "causal_conv1d_fn"
_MAMBA2 = "mamba2_chunk_scan"
_DELTA_RULE = "torch_chunk_gated_delta_rule"
_REPLACED = "outrider_replaces"  # attribute of our functions


LayerStates = PooledLayer | RecordingLayer  # one recurrent layer in one forward batch
StatePass = PooledStates | RecordingStates  # the states of all recurrent layers in one forward batch


def connect(model: PreTrainedModel) -> list[int]:
    """Make the recurrent layers of `model` use the states of a forward's keyword; return their layer numbers.

    A layer is recurrent if it has a causal convolution and its module calls our functions. Others stay as they are.
    """
    mixers = [module for module in model.modules() if is_recurrent(module)]
    if mixers:
        carried = _Carried()
        model.register_forward_pre_hook(carried.take, with_kwargs=True)
        model.base_model.register_forward_pre_hook(carried.give, with_kwargs=True)
    for index, mixer in enumerate(mixers):
        _replace(sys.modules[type(mixer).__module__])
        mixer.register_forward_pre_hook(partial(_name_layer, index), with_kwargs=True)
    return [int(mixer.layer_idx) for mixer in mixers]


def keeps_states(model: PreTrainedModel) -> bool:
    """True if a model has recurrent layers that `connect` finds."""
    return any(map(is_recurrent, model.modules()))


def is_recurrent(module: nn.Module) -> bool:
    """True for a recurrent layer that `connect` finds."""
    if getattr(module, "layer_idx", None) is None or not any(isinstance(part, nn.Conv1d) for part in module.children()):
        return False
    return hasattr(sys.modules[type(module).__module__], _CONVOLUTION)


class _Carried:
    """Carries the keyword from a model to its decoder, since Mamba-2's language model drops keywords."""

    def __init__(self) -> None:
        self._states: StatePass | None = None

    def take(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._states = keywords.get(STATE_KEYWORD)

    def give(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        states, self._states = self._states, None
        return inputs, keywords if states is None else {**keywords, STATE_KEYWORD: states}


def _name_layer(index: int, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Name the layer in the keyword of its forward."""
    states: StatePass | None = keywords.get(STATE_KEYWORD)
    return inputs, keywords if states is None else {**keywords, STATE_KEYWORD: states.at(index)}


def _replace(modeling: Any) -> None:
    for name, make in ((_CONVOLUTION, _convolution), (_MAMBA2, _mamba2), (_DELTA_RULE, _delta_rule)):
        stock = getattr(modeling, name, None)
        if stock is not None and not hasattr(stock, _REPLACED):
            ours = make(stock)
            setattr(ours, _REPLACED, stock)
            setattr(modeling, name, ours)


def _convolution(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        state_pass: LayerStates | None = None,
        **keywords: Any,
    ) -> Tensor:
        if state_pass is None:
            return stock(hidden_states, weight, bias, activation=activation, **keywords)
        out = state_pass.convolve(hidden_states[0].T, weight, bias).to(weight.dtype)
        if activation is not None:
            out = nn.functional.silu(out) if activation in ("silu", "swish") else _refuse_activation(activation)
        return out.to(hidden_states.dtype).T[None]

    return causal_conv1d_fn


def _refuse_activation(name: str) -> Tensor:
    raise UnsupportedAttentionError(f"its convolution has the activation {name!r}, not silu")


def _mamba2(stock: Callable[..., Any]) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        state_pass: LayerStates | None = None,
        **options: Any,
    ) -> Any:
        if state_pass is None:
            return stock(hidden_states, dt, A, B, C, **options)
        bias, skip = options.get("dt_bias"), options.get("D")
        steps = dt[0] if bias is None else dt[0] + bias.to(dt.dtype)
        if options.get("dt_softplus"):
            steps = nn.functional.softplus(steps)
        steps = steps.clamp(*options.get("dt_limit", (0.0, None))).float()
        x = hidden_states[0].float()
        out = state_pass.scan_mamba2(x, steps, (steps * A.float()).exp(), B[0].float(), C[0].float())
        return (out if skip is None else out + x * skip[:, None])[None]

    return mamba2_chunk_scan


def _delta_rule(stock: Callable[..., Any]) -> Callable[..., Any]:
    def torch_chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        state_pass: LayerStates | None = None,
        **keywords: Any,
    ) -> Any:
        if state_pass is None:
            return stock(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **keywords)
        group = value.shape[2] // key.shape[2]
        q, k = (each[0].float().repeat_interleave(group, dim=1) for each in (query, key))
        if use_qk_l2norm_in_kernel:
            q, k = _unit(q), _unit(k)
        q = q * q.shape[-1] ** -0.5
        out = state_pass.scan_delta(q, k, value[0].float(), g[0].float().exp(), beta[0].float())
        return out.to(query.dtype)[None], None

    return torch_chunk_gated_delta_rule


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
