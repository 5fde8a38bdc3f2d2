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
_QWEN3_5_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
_Product = Callable[[Tensor], Tensor]
_PLAIN = {"gate_factor": 1.0, "step_factor": 1.0}


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
        *((name, ctypes.c_float) for name in ("epsilon", "least_step", "most_step", "gate_factor", "step_factor")),
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
        factors: Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Compute `module` by the kernel.

        Args:
            module: its `out_proj` follows.
            kind: of the module.
            inputs: returns the inputs of hidden states, or a tensor that has all of them, at the places in `fields`.
            dtype: of rows.
            factors: of the convolution's inputs, [D].
            fields: of the kernel's structure; tensors are converted to float32.
        """
        convolution = next(part for part in module.children() if isinstance(part, nn.Conv1d))
        columns = convolution.weight.squeeze(1).T  # [R + 1, D]
        weight = columns if factors is None else columns.float() * factors
        tensors = {"weight": weight, "bias": convolution.bias}
        tensors |= {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        self._tensors = {name: each.detach().float().contiguous() for name, each in tensors.items() if each is not None}
        pointers = {name: each.data_ptr() for name, each in self._tensors.items()}
        sizes = {"kind": kind, "num_kept": len(columns) - 1, "width": columns.shape[1]}
        self._call = _Mixer(**{**_PLAIN, **fields} | pointers | sizes, is_bf16=dtype is torch.bfloat16)
        self._width = self._call.heads * self._call.head_width or self._call.width  # of the output
        self._module, self._inputs, self._dtype = module, inputs, dtype
        self._is_packed = False

    @property
    def fits(self) -> bool:
        """True if the kernel takes such sizes."""
        call = self._call
        is_whole = call.width % _LANES == self._width % _LANES == 0
        return bool(is_whole and call.num_kept <= _MAX_KEPT and call.depth <= _MAX_DEPTH)

    def address(self, dtype: torch.dtype) -> int | None:
        """Return the kernel's structure, valid as long as this; None for other rows or for products of its own."""
        return ctypes.addressof(self._call) if self._is_packed and dtype is self._dtype else None

    def take(self, product: _Product, steps: _Product | None) -> None:
        """Have one product give all inputs, at the places of the kernel's structure; or `steps` the steps and betas."""
        if steps is not None:
            self._call.steps_at, self._call.betas_at = 0, self._call.heads
        self._inputs, self._is_packed = partial(self._products, product, steps), True

    def _products(self, product: _Product, steps: _Product | None, module: Any, hidden_states: Tensor) -> _Inputs:
        first, call = product(hidden_states), self._call
        last = first if steps is None else steps(hidden_states)
        inputs = first[..., call.inputs_at :], first[..., call.gates_at :]
        return _Inputs(*inputs, last[..., call.steps_at :], last[..., call.betas_at :])

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
        if mixer is not None and mixer.fits:
            setattr(module, "forward", mixer)  # noqa: B010 -- shadows the class's
            num_native += 1
    return num_native


def native_call(module: nn.Module, dtype: torch.dtype) -> int | None:
    """Return the kernel's structure for a mixer, valid as long as this; None unless `take_products` has its inputs."""
    mixer = vars(module).get("forward")
    return mixer.address(dtype) if isinstance(mixer, NativeMixer) else None


def first_products(module: Any) -> tuple[list[nn.Linear], Tensor | None] | None:
    """Return the layers that give a mixer's inputs, and the order of their outputs in the kernel's structure.

    None for their own order, and for a mixer that the kernel does not compute.
    """
    if not isinstance(vars(module).get("forward"), NativeMixer):
        return None
    if hasattr(module, "in_proj_qkvz"):
        layers = [module.in_proj_qkvz, module.in_proj_ba]
        places = torch.arange(sum(each.out_features for each in layers))[None, None]
        parts = places.split([each.out_features for each in layers], dim=-1)
        return layers, torch.cat([each.flatten() for each in _in_order(module, *parts)])
    names = _QWEN3_5_INPUTS if hasattr(module, _QWEN3_5_INPUTS[0]) else ("in_proj",)
    return [getattr(module, name) for name in names], None


def take_products(module: nn.Module, product: _Product, steps: _Product | None) -> None:
    """Have products give a mixer's inputs in the order of `first_products`: one, or another for steps and betas."""
    mixer = vars(module)["forward"]
    assert isinstance(mixer, NativeMixer), "`first_products` says so"
    mixer.take(product, steps)


def _projected(module: Any, hidden_states: Tensor) -> Tensor:
    projected: Tensor = module.in_proj(hidden_states)
    return projected


def _short_convolution(module: Any, dtype: torch.dtype) -> NativeMixer:
    """Return a mixer whose product has factors of its inputs, gates, and inputs."""
    size = module.out_proj.in_features
    return NativeMixer(
        module, _Kind.SHORT_CONVOLUTION, _projected, dtype, betas_at=0, gates_at=size, inputs_at=2 * size
    )


def _mamba2(module: Any, dtype: torch.dtype) -> NativeMixer | None:
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
    return NativeMixer(
        module,
        _Kind.MAMBA2,
        _projected,
        dtype,
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
        least_step=least,
        most_step=most,
        gate_factor=float(factors[0]),
        step_factor=float(factors[-1]),
    )


def _gated_delta(module: Any, dtype: torch.dtype, inputs: Callable[[Any, Tensor], _Inputs]) -> NativeMixer:
    """Return a mixer whose one product would have queries, keys, values, gates, steps and betas."""
    num_inputs, num_gates = module.conv_dim, module.value_dim
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
        gates_at=num_inputs,
        steps_at=num_inputs + num_gates,
        betas_at=num_inputs + num_gates + module.num_v_heads,
        epsilon=module.norm.variance_epsilon,
        most_step=math.inf,
    )


def _qwen3_5_inputs(module: Any, hidden_states: Tensor) -> _Inputs:
    return _Inputs(*(getattr(module, name)(hidden_states) for name in _QWEN3_5_INPUTS))


def _qwen3_next_inputs(module: Any, hidden_states: Tensor) -> _Inputs:
    return _in_order(module, module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))


def _in_order(module: Any, *projected: Tensor) -> _Inputs:
    query, key, value, gates, betas, steps = module.fix_query_key_value_ordering(*projected)
    rows = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
    return _Inputs(rows, gates.flatten(2), steps, betas)


_KINDS: dict[str, Callable[[Any, torch.dtype], NativeMixer | None]] = {
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
