"""Recurrent layers between their two products in one native call: `engine/native/recurrent/mixer.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.library import kernel, kernels_for
from engine.recurrent.mixer import QWEN3_5_INPUTS, KernelMixer, MixerForm, MixerInputs, mixer_forms, qwen3_next_orders
from engine.recurrent.state_pass import PooledLayer

_LANES = 16
_Product = Callable[[Tensor], Tensor]

_TENSORS = ("weight", "bias", "rates", "step_biases", "skips", "norm")
_SIZES = ("heads", "groups", "head_width", "depth", "norm_size", "gates_first")
_PLACES = ("inputs_at", "gates_at", "steps_at", "betas_at")
_FACTORS = ("epsilon", "least_step", "most_step", "gate_factor", "step_factor")


class _Mixer(ctypes.Structure):
    """`struct mixer` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("kind", "num_kept", "width", *_SIZES, *_PLACES, "is_bf16")),
        *((name, ctypes.c_float) for name in _FACTORS),
    ]


class _Rows(ctypes.Structure):
    """`struct mixed_rows` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "gates", "steps", "betas")),
        *((name, ctypes.c_int64) for name in ("input_row", "gate_row", "step_row", "beta_row")),
        *((name, ctypes.c_void_p) for name in ("out", "rows", "matrices", "before", "ends", "after")),
        *((name, ctypes.c_int64) for name in ("num_spans", "num_rows")),
    ]


class NativeMixer(KernelMixer):
    """A mixer by our kernel on a processor."""

    def __init__(self, module: Any, form: MixerForm, dtype: torch.dtype) -> None:
        super().__init__(module, form, dtype)
        tensors = {name: getattr(form, name) for name in _TENSORS}
        pointers = {name: None if each is None else each.data_ptr() for name, each in tensors.items()}
        numbers = {name: getattr(form, name) for name in (*_SIZES, *_PLACES, *_FACTORS)}
        sizes = {"kind": form.kind, "num_kept": form.num_kept, "width": form.num_inputs}
        self._call = _Mixer(**pointers, **numbers, **sizes, is_bf16=dtype is torch.bfloat16)
        self._is_packed = False

    @property
    def fits(self) -> bool:
        """True if the kernel takes such sizes."""
        form = self.form
        is_whole = form.num_inputs % _LANES == form.num_outputs % _LANES == 0
        # MAX_KEPT and MAX_DEPTH of the kernel: earlier rows of a convolution, and the depth of a state.
        return is_whole and form.num_kept <= 7 and form.depth <= 512

    def address(self, dtype: torch.dtype) -> int | None:
        """Return the kernel's structure, valid as long as this; None for other rows or for products of its own."""
        return ctypes.addressof(self._call) if self._is_packed and dtype is self._dtype else None

    def take(self, product: _Product, steps: _Product | None) -> None:
        """Compute all inputs by `product`, at the places of the kernel's structure, or steps and betas by `steps`."""
        if steps is not None:
            self._call.steps_at, self._call.betas_at = 0, self._call.heads
        self._inputs, self._is_packed = partial(self._products, product, steps), True

    def _products(self, product: _Product, steps: _Product | None, module: Any, hidden_states: Tensor) -> MixerInputs:
        first, call = product(hidden_states), self._call
        last = first if steps is None else steps(hidden_states)
        inputs = first[..., call.inputs_at :], first[..., call.gates_at :]
        return MixerInputs(*inputs, last[..., call.steps_at :], last[..., call.betas_at :])

    def mix(self, inputs: MixerInputs, out: Tensor, states: PooledLayer) -> None:
        call, rows = ctypes.byref(self._call), _rows_of(inputs, out, states)
        scratch = torch.empty(kernel("mixer_scratch", "pq", "q")(call, rows.num_rows), dtype=torch.float32)
        kernel("mix", "ppp")(call, ctypes.byref(rows), scratch.data_ptr())


def _rows_of(inputs: MixerInputs, out: Tensor, states: PooledLayer) -> _Rows:
    before, ends, after = states.slots
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
    for module, form in mixer_forms(model):
        mixer = NativeMixer(module, form, dtype)
        if mixer.fits:
            setattr(module, "forward", mixer)  # noqa: B010 -- shadows the class's
            num_native += 1
    return num_native


def native_call(module: nn.Module, dtype: torch.dtype) -> int | None:
    """Return the kernel's structure for a mixer, valid as long as it; None before `take_products` or for other rows."""
    mixer = vars(module).get("forward")
    return mixer.address(dtype) if isinstance(mixer, NativeMixer) else None


def first_products(module: Any) -> tuple[list[nn.Linear], Tensor | None] | None:
    """Return the layers that compute a mixer's inputs, and the order of their outputs in the kernel's structure.

    None for their own order, and for a mixer that the kernel does not compute.
    """
    if not isinstance(vars(module).get("forward"), NativeMixer):
        return None
    if hasattr(module, "in_proj_qkvz"):
        first, last = qwen3_next_orders(module)
        return [module.in_proj_qkvz, module.in_proj_ba], torch.cat((first, len(first) + last))
    names = QWEN3_5_INPUTS if hasattr(module, QWEN3_5_INPUTS[0]) else ("in_proj",)
    return [getattr(module, name) for name in names], None


def take_products(module: nn.Module, product: _Product, steps: _Product | None) -> None:
    """Compute a mixer's inputs by `product`, in the order of `first_products`, or its steps and betas by `steps`."""
    mixer = vars(module)["forward"]
    assert isinstance(mixer, NativeMixer), "`first_products` has found it"
    mixer.take(product, steps)
