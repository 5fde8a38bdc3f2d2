"""The layers of a decoder in one native call per pass: `engine/native/layers.c`.

A step of a small model is a few hundred short operations. One by one from Python each costs a call, and each call waits
for the interpreter's lock again where other threads of the process want it. The call uses the same kernels as
`NativeProduct`, `NativeAttention` and `NativeRows`, so its bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import LayerOptions
from engine.attention.native import MAX_HEAD_DIM, AttentionCall, NativeAttention
from engine.model.decoders.latent import Latent, LatentCall
from engine.model.decoders.mlp import Mlp, MlpWithExperts
from engine.model.decoders.row_operations import NativeRows
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.native_mixture import NativeMixture
from engine.model.linear.native_product import Gate, PackedWeight
from engine.model.linear.native_quantized import packed_weight_of
from engine.model.linear.packed_linear import Linear
from engine.native.library import Instructions, native_library
from engine.recurrent.native_mixer import native_call
from engine.recurrent.state_pass import PooledStates


@dataclass(frozen=True, slots=True)
class InputStep:
    """The step that adds a layer's own input: `norm(projection(function(gate(x)) * input))`."""

    gate: Linear
    projection: Linear
    norm: Tensor
    function: Gate


_NO_OPTIONS = LayerOptions(0.0)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a rank: attention or a recurrent part, and an MLP; or one of both.

    Where a norm, [hidden] or [2, hidden] with biases, is None, the family has none there.
    """

    input_norm: Tensor | None = None
    # Queries; keys and values, if it `stores_kv`; gates of the attention's output, if it has those.
    qkv: Linear | None = None
    latent: Latent | None = None  # the parts next to the attention, if `qkv` yields latents
    steps: Linear | None = None  # of a recurrent part whose steps and betas `qkv` lacks
    head_norm: Tensor | None = None  # [Hq + H, D] of q and k; [Hq + 2 H, D] with values; [2, ...] with biases
    attended_norm: Tensor | None = None  # of the rows that `output` reads
    output: Linear | None = None
    output_factor: float = 1.0  # of its results
    output_norm: Tensor | None = None  # of the attention's output
    mlp_norm: Tensor | None = None
    mlp: Linear | None = None  # an `Mlp`, or a mixture of experts
    inner_norm: Tensor | None = None  # of the rows that the MLP's last product reads
    down_factor: float = 1.0  # of its results
    mlp_output_norm: Tensor | None = None
    options: LayerOptions = _NO_OPTIONS
    tables: tuple[int, int] | None = None  # of the keys' and queries' rotary angles; None if positions are not encoded
    kv_layer: int = 0  # in the pool; of a recurrent layer the place of its states
    stores_kv: bool = False  # or an earlier layer has stored it
    num_kv_heads: int = 0
    head_dim: int = 0  # of a query and a key, as the attention takes them
    value_dim: int = 0
    value_factor: float = 1.0  # of values
    num_rotated_dims: int = 0  # of a head
    factor: float = 1.0  # of the residual stream after the layer
    activation_factors: tuple[float, float] = (1.0, 1.0)  # xIELU's
    input_step: InputStep | None = None
    mixer: Any = None  # a stock module in place of the attention; `qkv` and `output` are its products
    shares_rows: bool = False  # reads the normed rows of the layer before

    @property
    def mixes_rows(self) -> bool:
        """True if it has attention or a recurrent part."""
        return self.qkv is not None or self.mixer is not None

    @property
    def norms(self) -> list[Tensor]:
        """The norms over the hidden states."""
        norms = (self.input_norm, self.output_norm, self.mlp_norm, self.mlp_output_norm)
        return [norm for norm in norms if norm is not None]


_NORMS = ("input_norm", "output_norm", "mlp_norm", "mlp_output_norm")
_INNER_NORMS = ("head_norm", "attended_norm", "inner_norm")  # within the attention and the MLP
MAX_TABLES = 2  # of rotary angles


class _AddedExperts(ctypes.Structure):
    """`struct added_experts` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mixture", "mlp_output_norm", "input_norm", "output_norm")),
        ("router_norm", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, mlp: MlpWithExperts) -> _AddedExperts:
        """Return the experts next to an MLP, valid as long as this."""
        norms = mlp.mlp_norms[1], *mlp.expert_norms
        return cls(ctypes.addressof(mlp.experts.call), *(norm.data_ptr() for norm in norms))


class _Layer(ctypes.Structure):
    """`struct layer` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_NORMS, "input_step_norm", *_INNER_NORMS, "sinks")),
        *((name, PackedWeight) for name in ("qkv", "output", "inner", "down", "steps")),
        *((name, PackedWeight) for name in ("input_gate", "input_projection")),
        ("mixture", ctypes.c_void_p),
        ("added_experts", _AddedExperts),
        ("latent", LatentCall),
        ("mixer", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("leaves_mlp", "shares_rows")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "head_dim", "value_dim", "kv_layer", "stores_kv")),
        *((name, ctypes.c_int64) for name in ("num_rotated_dims", "window", "table", "query_table")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap", "factor", "value_factor")),
        *((name, ctypes.c_float) for name in ("output_factor", "down_factor")),
        ("activation_factors", ctypes.c_float * 2),
    ]


class DecoderCall(ctypes.Structure):
    """`struct decoder` of the kernel: sizes of all layers. `NativeLayers` fills in those that a layer shows."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("hidden_size", "num_heads", "norms_values", "norms_projections")),
        *((name, ctypes.c_int64) for name in ("norms_rotated", "rotates_pairs", "centers")),
        *((name, ctypes.c_int64) for name in ("has_norm_biases", "is_parallel", "gates_attention", "activation")),
        *((name, ctypes.c_int64) for name in ("input_function", "is_bf16", "has_bf16_norms", "has_wide_stream")),
        *((name, ctypes.c_float) for name in ("epsilon", "residual_scale")),
    ]


class _Rows(ctypes.Structure):
    """`struct rows` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "delta", "normed", "inputs")),
        ("angles", ctypes.c_void_p * MAX_TABLES),
        ("num_rows", ctypes.c_int64),
        ("has_delta", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
        ("num_kept", ctypes.c_int64),
    ]


class _States(ctypes.Structure):
    """`struct states` of the kernel."""

    _fields_ = [
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("rows", "matrices")),
        *((name, ctypes.c_void_p) for name in ("before", "ends", "after")),
        ("num_spans", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, states: PooledStates | None) -> _States:
        """Return the states of a pass, valid as long as these; nothing reads them without mixers."""
        if states is None:
            return cls()
        pointers, slots = ctypes.c_void_p * len(states.pool.rows), states.scan_slots
        rows, matrices = (pointers(*addresses) for addresses in states.pool.addresses)
        return cls(rows, matrices, *(each.data_ptr() for each in slots), len(slots[0]))


class NativeLayers:
    """All layers of a decoder; a pass may run some of them."""

    def __init__(self, layers: Seq[DecoderLayer], calls: Seq[_Layer], decoder: DecoderCall, dtype: torch.dtype) -> None:
        """`of` makes them: `calls` are `layers` for the kernel, which refer to their weights."""
        self._layers, self._decoder, self._dtype = tuple(layers), decoder, dtype
        self._calls = (_Layer * len(calls))(*calls)
        norms, input_step = layers[0].norms, layers[0].input_step
        decoder.layers = ctypes.addressof(self._calls)
        decoder.has_norm_biases = norms[0].ndim == 2
        decoder.input_function = Gate.NONE if input_step is None else input_step.function
        decoder.is_bf16 = dtype is torch.bfloat16
        decoder.has_bf16_norms = any(norm.dtype is torch.bfloat16 for norm in norms)
        self._run = _kernel()

    @classmethod
    def of(cls, layers: Seq[DecoderLayer], decoder: DecoderCall, dtype: torch.dtype) -> NativeLayers | None:
        """Return `layers` over rows of `dtype`, or None where anything of them is no kernel of ours over such rows."""
        like = torch.empty(0, dtype=dtype)
        head_dims = {(0 if layer.latent else layer.head_dim, layer.num_rotated_dims) for layer in layers}
        have_sizes = all(NativeRows.fit(decoder.hidden_size, dims, like) for dims in head_dims)
        is_on_cpu = layers[0].norms[0].device.type == "cpu"
        if not is_on_cpu or not have_sizes or max(layer.head_dim for layer in layers) > MAX_HEAD_DIM:
            return None
        has_biases = layers[0].norms[0].ndim == 2
        if any(layer.head_norm is not None and (layer.head_norm.ndim == 3) != has_biases for layer in layers):
            return None
        calls = [_layer_call(layer, dtype) for layer in layers]
        present = [call for call in calls if call is not None]
        return cls(layers, present, decoder, dtype) if len(present) == len(calls) else None

    @staticmethod
    def take(batch: ForwardBatch) -> bool:
        """True if the attention of `batch` is our kernel's."""
        return isinstance(batch.attention, NativeAttention)

    def parts(self, layers: range) -> Iterator[range]:
        """Cut `layers` after each whose MLP is no kernel of ours: its caller computes it."""
        first = layers.start
        for index in layers:
            if index + 1 == layers.stop or self._leaves_mlp(index):
                yield range(first, index + 1)
                first = index + 1

    def run(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        angles: Seq[Tensor],
        batch: ForwardBatch,
        layers: range,
        kept: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute one of the `parts` in a pass that these `take`; its KV of these layers is in the pool afterwards.

        Args:
            hidden: [T, hidden], contiguous; the residual stream, overwritten in place; float32 if it is wide.
            delta: not yet added to `hidden`, [T, hidden], contiguous; overwritten; None before the first layer.
            angles: [T, 2, R] of the rows, from each rotary table.
            batch: the pass.
            layers: a run of layers.
            kept: the rows to return, [R] int64, ascending; all rows if None.
            inputs: the layers' own inputs, [layers, T, size], contiguous; overwritten. None if layers have none.

        Returns:
            `hidden` after the last layer and the delta not yet added to it, both [R, hidden]. If the last MLP is the
            caller's, the delta has no value, and the third tensor has the rows for it.

        Raises:
            MemoryError: the buffers between the kernels do not fit.
        """
        attention = batch.attention
        assert isinstance(attention, NativeAttention), "`take` says so"
        out = torch.empty_like(hidden, dtype=self._dtype) if delta is None else delta
        num_kept = len(hidden) if kept is None else len(kept)
        normed = torch.empty_like(out) if self._leaves_mlp(layers.stop - 1) else None
        rows = _Rows(
            hidden=hidden.data_ptr(),
            delta=out.data_ptr(),
            normed=None if normed is None else normed.data_ptr(),
            inputs=None if inputs is None else inputs.data_ptr(),
            angles=(ctypes.c_void_p * MAX_TABLES)(*(table.data_ptr() for table in angles)),
            num_rows=len(hidden),
            has_delta=delta is not None,
            kept=None if kept is None else kept.data_ptr(),
            num_kept=num_kept,
        )
        pass_ = ctypes.byref(attention.call), *attention.pool_addresses()
        states = _States.of(batch.states)
        more = ctypes.byref(states), ctypes.byref(rows)
        if self._run(ctypes.byref(self._decoder), *pass_, *more, layers.start, layers.stop):
            raise MemoryError("no memory for the rows of a pass")
        if normed is not None and not self._norms_mlp(self._layers[layers.stop - 1]):
            normed = hidden
        return hidden[:num_kept], out[:num_kept], None if normed is None else normed[:num_kept]

    def _leaves_mlp(self, index: int) -> bool:
        return bool(self._calls[index].leaves_mlp)

    def _norms_mlp(self, layer: DecoderLayer) -> bool:
        return layer.mlp_norm is not None or (self._decoder.is_parallel and layer.input_norm is not None)


def _layer_call(layer: DecoderLayer, dtype: torch.dtype) -> _Layer | None:
    options, mlp = layer.options, layer.mlp
    none, step = [PackedWeight()] * 2, layer.input_step
    mixer = None if layer.mixer is None else native_call(layer.mixer, dtype)
    inputs = packed_weight_of(layer.qkv, dtype, is_padded=layer.mixer is not None)
    weights = [inputs, packed_weight_of(layer.output, dtype)] if layer.mixes_rows else none
    latent = LatentCall() if layer.latent is None else layer.latent.call(dtype)
    steps = PackedWeight() if layer.steps is None else packed_weight_of(layer.steps, dtype)
    if None in (*weights, steps, latent) or (layer.mixer is not None and mixer is None):
        return None
    added = _AddedExperts()
    if isinstance(mlp, MlpWithExperts) and isinstance(mlp.experts, NativeMixture) and mlp.experts.dtype is dtype:
        layer, added, mlp = replace(layer, mlp_norm=mlp.mlp_norms[0]), _AddedExperts.of(mlp), mlp.mlp
    of_mlp = [packed_weight_of(each, dtype) for each in (mlp.inner, mlp.down)] if isinstance(mlp, Mlp) else none
    of_step = none if step is None else [packed_weight_of(each, dtype) for each in (step.gate, step.projection)]
    mixture = ctypes.addressof(mlp.call) if isinstance(mlp, NativeMixture) and mlp.dtype is dtype else None
    has_kernels = isinstance(mlp, Mlp) or mixture is not None
    if not has_kernels or None in (*of_mlp, *of_step):  # the caller computes what follows the attention's sum
        step, mixture, of_mlp, of_step = None, None, none, none
    table, query_table = layer.tables or (-1, -1)
    outer, inner = ([getattr(layer, name) for name in names] for names in (_NORMS, _INNER_NORMS))
    norms = *outer, None if step is None else step.norm, *inner
    return _Layer(
        *(None if each is None else each.data_ptr() for each in (*norms, options.sinks)),
        *weights,
        *of_mlp,
        steps,
        *of_step,
        mixture,
        added,
        latent,
        mixer,
        mlp is not None and mixture is None and of_mlp is none,
        layer.shares_rows,
        layer.num_kv_heads,
        layer.head_dim,
        layer.value_dim,
        layer.kv_layer,
        layer.stores_kv,
        layer.num_rotated_dims,
        options.window or 0,
        table,
        query_table,
        options.scaling,
        options.softcap or 0.0,
        layer.factor,
        layer.value_factor,
        layer.output_factor,
        layer.down_factor,
        layer.activation_factors,
    )


@cache
def _kernel() -> Any:
    library = native_library(Instructions.AVX2)
    assert library is not None, "`NativeLayers.fit` checks that there is one"
    run = library.outrider_run_layers
    pointers = ctypes.POINTER(ctypes.c_void_p)
    run.argtypes = [
        ctypes.POINTER(DecoderCall),
        ctypes.POINTER(AttentionCall),
        pointers,
        pointers,
        ctypes.POINTER(_States),
        ctypes.POINTER(_Rows),
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    run.restype = ctypes.c_int
    return run
