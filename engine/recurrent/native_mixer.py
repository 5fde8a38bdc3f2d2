"""Recurrent layers between their two products in one native call: `engine/native/recurrent/mixer.c`.

transformers' modules compute some forty short operations there. The mixers of a family that `_KINDS` names keep their
module, its parameters and its packed products, and get another forward; without states it is the module's own. So the
agreement check compares both.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.native.library import kernels_for
from engine.recurrent.state_pass import PooledLayer

_LANES = 16
_MAX_KEPT = 7  # rows that a convolution looks back
_MAX_DEPTH = 512
_SILU = ("silu", "swish")


class _Kind(IntEnum):
    """`enum mixer_kind` of the kernel."""

    SHORT_CONVOLUTION = 0
    MAMBA2 = 1
    GATED_DELTA = 2


class _Mixer(ctypes.Structure):
    """`struct mixer` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "rates", "step_biases", "skips", "norm")),
        *((name, ctypes.c_int64) for name in ("kind", "num_kept", "width", "heads", "groups", "head_width", "depth")),
        *((name, ctypes.c_int64) for name in ("norm_size", "gates_first")),
        *((name, ctypes.c_int64) for name in ("inputs_at", "gates_at", "steps_at", "betas_at", "is_bf16")),
        *((name, ctypes.c_float) for name in ("epsilon", "least_step", "most_step")),
    ]


class _Rows(ctypes.Structure):
    """`struct mixed_rows` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "gates", "steps", "betas")),
        *((name, ctypes.c_int64) for name in ("input_row", "gate_row", "step_row", "beta_row")),
        *((name, ctypes.c_void_p) for name in ("out", "rows", "matrices", "before", "ends", "after")),
        *((name, ctypes.c_int64) for name in ("num_spans", "num_rows")),
    ]


class _Inputs(NamedTuple):
    """A mixer's inputs, each [..., T, numbers] with adjacent numbers; its kind may not read all."""

    rows: Tensor
    gates: Tensor
    steps: Tensor
    betas: Tensor


class NativeMixer:
    """The forward of one mixer, from hidden states [1, T, hidden] to as many."""

    def __init__(
        self,
        module: Any,
        kind: _Kind,
        inputs: Callable[[Any, Tensor], Tensor | _Inputs],
        dtype: torch.dtype,
        **fields: Any,
    ) -> None:
        """Compute `module` by the kernel.

        Args:
            module: its `out_proj` follows.
            kind: of the module.
            inputs: returns the inputs of hidden states, or a tensor that has all of them, at the places in `fields`.
            dtype: of rows.
            fields: of the kernel's structure; tensors are converted to float32.
        """
        convolution = next(part for part in module.children() if isinstance(part, nn.Conv1d))
        columns = convolution.weight.squeeze(1).T  # [R + 1, D]
        tensors = {"weight": columns, "bias": convolution.bias}
        tensors |= {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        self._tensors = {name: each.detach().float().contiguous() for name, each in tensors.items() if each is not None}
        pointers = {name: each.data_ptr() for name, each in self._tensors.items()}
        sizes = {"kind": kind, "num_kept": len(columns) - 1, "width": columns.shape[1]}
        self._call = _Mixer(**fields | pointers | sizes, is_bf16=dtype is torch.bfloat16)
        self._width = self._call.heads * self._call.head_width or self._call.width  # of the output
        self._module, self._inputs, self._dtype = module, inputs, dtype

    @property
    def fits(self) -> bool:
        """True if the kernel takes such sizes."""
        call = self._call
        is_whole = call.width % _LANES == self._width % _LANES == 0
        return bool(is_whole and call.num_kept <= _MAX_KEPT and call.depth <= _MAX_DEPTH)

    def address(self, dtype: torch.dtype) -> int | None:
        """Return the kernel's structure, valid as long as this; None unless `in_proj` alone gives rows of `dtype`."""
        return ctypes.addressof(self._call) if self._inputs is _projected and dtype is self._dtype else None

    def __call__(
        self, hidden_states: Tensor, *arguments: Any, state_pass: PooledLayer | None = None, **keywords: Any
    ) -> Tensor:
        module, call = self._module, self._call
        if state_pass is None:
            found: Tensor = type(module).forward(module, hidden_states, *arguments, **keywords)
            return found
        inputs = self._inputs(module, hidden_states)
        if isinstance(inputs, Tensor):
            places = call.inputs_at, call.gates_at, call.steps_at, call.betas_at
            inputs = _Inputs(*(inputs[..., place:] for place in places))
        assert inputs.rows.dtype is state_pass.rows.dtype is self._dtype, "a model's rows and states have one dtype"
        out = inputs.rows.new_empty(*inputs.rows.shape[:-1], self._width)
        mix, num_floats = _kernel()
        rows = _rows_of(inputs, out, state_pass)
        scratch = torch.empty(num_floats(ctypes.byref(call), rows.num_rows), dtype=torch.float32)
        mix(ctypes.byref(call), ctypes.byref(rows), scratch.data_ptr())
        mixed: Tensor = module.out_proj(out)
        return mixed


def _rows_of(inputs: _Inputs, out: Tensor, states: PooledLayer) -> _Rows:
    before, ends, after = states.slots.tensors
    return _Rows(
        *(each.data_ptr() for each in inputs),
        *(each.stride(-2) for each in inputs),
        out.data_ptr(),
        states.rows.data_ptr(),
        None if states.matrices is None else states.matrices.data_ptr(),
        before.data_ptr(),
        ends.data_ptr(),
        after.data_ptr(),
        len(ends),
        len(after),
    )


def use_native_mixers(model: nn.Module, dtype: torch.dtype) -> int:
    """Let the kernel compute the mixers of `model` that it takes, for rows of `dtype`; returns how many."""
    if kernels_for(dtype) is None:
        return 0
    num_native = 0
    for module in model.modules():
        make = _KINDS.get(type(module).__name__)
        if make is None or getattr(module, "activation", "silu") not in _SILU:
            continue
        mixer = make(module, dtype)
        if mixer.fits:
            setattr(module, "forward", mixer)  # noqa: B010 -- shadows the class's
            num_native += 1
    return num_native


def native_call(module: nn.Module, dtype: torch.dtype) -> int | None:
    """Return the kernel's structure for a mixer, valid as long as this; None where it takes more than one product."""
    mixer = vars(module).get("forward")
    return mixer.address(dtype) if isinstance(mixer, NativeMixer) else None


def _projected(module: Any, hidden_states: Tensor) -> Tensor:
    projected: Tensor = module.in_proj(hidden_states)
    return projected


def _short_convolution(module: Any, dtype: torch.dtype) -> NativeMixer:
    """Return a mixer whose product has factors of its inputs, gates, and inputs."""
    size = module.out_proj.in_features
    return NativeMixer(
        module, _Kind.SHORT_CONVOLUTION, _projected, dtype, betas_at=0, gates_at=size, inputs_at=2 * size
    )


def _mamba2(module: Any, dtype: torch.dtype) -> NativeMixer:
    """Return a mixer whose product has gates, inputs and steps.

    Its norm is of groups, after the gate or before it, or absent.
    """
    norm, num_gates = module.norm, module.intermediate_size
    least, most = module.time_step_limit
    num_norms = getattr(norm, "n_groups", None) or num_gates // getattr(norm, "group_size", num_gates)
    return NativeMixer(
        module,
        _Kind.MAMBA2,
        _scaled if hasattr(module, "ssm_in_multiplier") else _projected,
        dtype,
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
        least_step=least,
        most_step=most,
    )


def _scaled(module: Any, hidden_states: Tensor) -> Tensor:
    """Return Falcon-H1's product, which has factors before and after it."""
    projected: Tensor = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
    return projected


def _gated_delta(module: Any, dtype: torch.dtype, inputs: Callable[[Any, Tensor], _Inputs]) -> NativeMixer:
    return NativeMixer(
        module,
        _Kind.GATED_DELTA,
        inputs,
        dtype,
        rates=-module.A_log.float().exp(),
        step_biases=module.dt_bias,
        norm=module.norm.weight.repeat(module.num_v_heads),
        heads=module.num_v_heads,
        groups=module.num_k_heads,
        head_width=module.head_v_dim,
        depth=module.head_k_dim,
        norm_size=module.head_v_dim,
        epsilon=module.norm.variance_epsilon,
        most_step=math.inf,
    )


def _qwen3_5_inputs(module: Any, hidden_states: Tensor) -> _Inputs:
    names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    return _Inputs(*(getattr(module, name)(hidden_states) for name in names))


def _qwen3_next_inputs(module: Any, hidden_states: Tensor) -> _Inputs:
    projected = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    query, key, value, gates, betas, steps = module.fix_query_key_value_ordering(*projected)
    rows = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
    return _Inputs(rows, gates.flatten(2), steps, betas)


_KINDS: dict[str, Callable[[Any, torch.dtype], NativeMixer]] = {
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": partial(_gated_delta, inputs=_qwen3_next_inputs),
    "Qwen3_5GatedDeltaNet": partial(_gated_delta, inputs=_qwen3_5_inputs),
}


@cache
def _kernel() -> tuple[Any, Any]:
    library = kernels_for(torch.float32)
    assert library is not None, "`use_native_mixers` asks for the kernels first"
    mix, num_floats = library.outrider_mix, library.outrider_mixer_scratch
    mix.argtypes, mix.restype = [ctypes.POINTER(_Mixer), ctypes.POINTER(_Rows), ctypes.c_void_p], None
    num_floats.argtypes, num_floats.restype = [ctypes.POINTER(_Mixer), ctypes.c_int64], ctypes.c_int64
    return mix, num_floats
