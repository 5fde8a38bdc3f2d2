"""Experts of a mixture with packed weights: all products of a layer are two of our kernels over sorted rows.

transformers keeps the experts of a layer in two parameters of three dimensions. The functions that pack linear layers
make each into one packed weight, with outputs in the order of experts. A row's bits do not depend on other rows.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.accounting.cost_model import DENSE, ExpertReads
from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.unread_weight import read_parameters, read_weight
from engine.model.linear.batch_invariant_linear import batch_invariant_router
from engine.model.linear.native_product import (
    MAX_RELATIVE_ERROR,
    MAX_ROUNDING_ERROR,
    Gate,
    NativeProduct,
    PackedWeight,
    check_product,
)
from engine.model.linear.native_quantized import NativeQuantizedProduct, has_quantized_kernels
from engine.model.linear.packed_linear import Linear, LinearFactory, keeps_numbers, rows_dtype
from engine.model.linear.weight_store import NO_STORE, OUTPUTS, WeightStore
from engine.native.library import kernel

logger = logging.getLogger(__name__)

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)
_TOP_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")  # in a configuration


class ExpertsCall(ctypes.Structure):
    """`struct experts` of engine/native/products/experts.h."""

    _fields_ = [
        *((name, PackedWeight) for name in ("input_weight", "output_weight")),
        *((name, ctypes.c_int64) for name in ("num_experts", "gate", "is_bf16")),
        ("factors", ctypes.c_float * 2),
    ]


class PackedExperts:
    """The forward of a stock module of experts without a `packing_obstacle`; it keeps its own copy of the weights.

    Attributes:
        call: the experts for the kernel, valid as long as this.
        dtype: of the kernel's rows.
        function: the experts compute function(gate) * up, or without gates a function of rows; NONE for one that no
            kernel computes.
    """

    def __init__(
        self, experts: Any, make_linear: LinearFactory, store: WeightStore = NO_STORE, name: str = "experts"
    ) -> None:
        """Pack the weights of `experts` with `make_linear`, or take them from `store`, which has them by `name`."""
        first, last = expert_weights(experts)
        dtype = rows_dtype(make_linear) or first.dtype
        self.dtype = dtype if dtype in _KERNEL_DTYPES else torch.float32
        self.function = _function_of(experts)

        def packed(weight: Tensor, bias: Tensor | None, order: Callable[[Tensor], Tensor] = _as_stored) -> Linear:
            flat = order(_by_outputs(experts, read_weight(weight))).flatten(0, 1)
            return make_linear(flat, None if bias is None else order(bias).flatten())

        biases = _biases(experts)
        order = _ups_after_gates if self.function is Gate.CLAMPED else _as_stored
        self._products = (
            store.product(f"{name}.inputs", lambda: packed(first, biases[0], order)),
            store.product(f"{name}.outputs", lambda: packed(last, biases[1])),
        )
        self.call = ExpertsCall(
            *(_packed_weight(product, self.dtype, len(first)) for product in self._products),
            len(first),
            self.function,
            self.dtype is torch.bfloat16,
            (experts.alpha, experts.limit) if self.function is Gate.CLAMPED else (0.0, 0.0),
        )
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts of each row, [..., hidden].

        Args:
            hidden_states: [..., hidden].
            top_k_index: the experts of each row, [rows, top]; a number that no expert has is skipped.
            top_k_weights: the weights of their results, [rows, top].

        Raises:
            MemoryError: the buffers do not fit.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self.dtype).contiguous()
        ids, weights = top_k_index.long().contiguous(), top_k_weights.float().contiguous()
        out = torch.empty_like(rows)
        step = max(1, 4096 // ids.shape[-1])  # pairs of a row and an expert at a time, so that buffers stay small
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            self._compute(rows[part], ids[part], weights[part], out[part])
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        experts, sizes = ctypes.byref(self.call), ids.shape
        routing = ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        if self.function is not Gate.NONE:
            check_memory(kernel("experts", "pppppqq", "i")(experts, rows.data_ptr(), *routing, *sizes))
            return
        between = rows.new_zeros(ids.numel(), self.call.input_weight.num_outputs)
        check_memory(
            kernel("experts_in", "ppppqq", "i")(experts, rows.data_ptr(), ids.data_ptr(), between.data_ptr(), *sizes)
        )
        between = self._gate(between).contiguous()
        check_memory(kernel("experts_out", "pppppqq", "i")(experts, between.data_ptr(), *routing, *sizes))


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of `model` that hold the experts of a layer as transformers' ExpertsInterface takes them."""
    for name, module in model.named_modules():
        if hasattr(module, "has_post_expert_norm") and isinstance(getattr(module, "down_proj", None), nn.Parameter):
            yield name, module


def expert_weights(experts: Any) -> tuple[Tensor, Tensor]:
    """Return both weights of all experts, [expert, ...]: of the inputs, and of the gate's or function's results."""
    return experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.down_proj


def expert_reads(model: PreTrainedModel) -> ExpertReads:
    """Return how much of a model's experts the rows of a pass read; call it before anything is packed."""
    routed = [weight for _, experts in experts_of(model) for weight in expert_weights(experts)]
    config = model.config.get_text_config()
    top = next((size for key in _TOP_KEYS if (size := getattr(config, key, None))), None)
    if not routed or top is None:
        return DENSE
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_unread = 0 if head is None or head.weight is embedding.weight else embedding.weight.numel()
    num_routed, num_experts = sum(weight.numel() for weight in routed), len(routed[0])
    num_read = num_routed * top / num_experts
    num_dense = sum(parameter.numel() for parameter in model.parameters()) - num_routed - num_unread
    return ExpertReads(num_read / (num_read + num_dense), top / num_experts)


def packing_obstacle(experts: Any, make_linear: LinearFactory) -> str | None:
    """Return why `experts` cannot be packed with `make_linear`; None if they can."""
    weights = expert_weights(experts)
    if experts.has_post_expert_norm:
        return "a norm follows each expert"
    if any(size % OUTPUTS for weight in weights for size in weight.shape[1:]):
        return (
            f"their sizes are {' and '.join(str(tuple(weight.shape)) for weight in weights)}, no multiples of {OUTPUTS}"
        )
    if keeps_numbers(make_linear):
        dtype = rows_dtype(make_linear)
        has_kernel = all(NativeProduct.fits(weight.flatten(0, 1), dtype) for weight in weights)
    else:
        has_kernel = all(weight.device.type == "cpu" for weight in weights) and has_quantized_kernels()
    return None if has_kernel else "this processor has no kernel for such weights"


def packs_all_experts(model: nn.Module, make_linear: LinearFactory) -> bool:
    """True if `model` has experts, and `pack_experts` packs them in every layer."""
    obstacles = [packing_obstacle(experts, make_linear) for _, experts in experts_of(model)]
    return bool(obstacles) and not any(obstacles)


def make_routers_batch_invariant(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the choice of a row's experts independent of other rows, for rows of `dtype`; call before `pack_experts`.

    Routers are the modules next to experts that hold a weight [expert, hidden]; linear layers have their own functions.
    """
    for name, experts in list(experts_of(model)):
        for router in model.get_submodule(name.rpartition(".")[0]).children():
            weight: object = getattr(router, "weight", None)
            if not isinstance(weight, Tensor) or weight.ndim != 2 or type(router) is nn.Linear:
                continue
            if len(weight) == experts.num_experts:
                router.forward = batch_invariant_router(router.forward, weight.shape[1], len(weight), dtype)


def widen_shared_gates(model: nn.Module) -> None:
    """Repeat the gate of shared experts (Qwen's) for each hidden unit of a row.

    torch has another exp for a tensor's last numbers, which do not fill a vector. With one number per row, a row's
    sigmoid would depend on the number of rows.
    """

    def widen(gate: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.expand(inputs[0].shape).contiguous()

    for module in model.modules():
        gate = getattr(module, "shared_expert_gate", None)
        if isinstance(gate, nn.Module):
            gate.register_forward_hook(widen)


def packed_parameters(model: nn.Module, make_linear: LinearFactory) -> set[int]:
    """Return the ids of the parameters that `pack_experts` frees."""
    packed = (experts for _, experts in experts_of(model) if packing_obstacle(experts, make_linear) is None)
    return {id(parameter) for experts in packed for parameter in experts.parameters(recurse=False)}


def pack_experts(model: nn.Module, make_linear: LinearFactory, store: WeightStore = NO_STORE) -> None:
    """Pack the experts of each layer of `model` that can be packed.

    A layer's stored weights are then freed. If `make_linear` rounds weights, a warning names the experts that stay
    unpacked. `store` may keep the products.

    Raises:
        ConfigError: packed experts differ from the stock ones by more than roundings.
    """
    kept: dict[str, list[str]] = {"they are no module of transformers' ExpertsInterface": _unknown_experts(model)}
    for name, experts in list(experts_of(model)):
        if reason := packing_obstacle(experts, make_linear):
            kept.setdefault(reason, []).append(name)
            continue
        if not store.is_checked:
            read_parameters(experts)
        packed = PackedExperts(experts, make_linear, store, name)
        if not store.is_checked:
            _compare(experts, packed, make_linear)
        experts.forward = packed  # shadows the class's
        for parameter, stored in list(experts.named_parameters(recurse=False)):
            drop_pages([stored])
            setattr(experts, parameter, None)
    for reason, names in kept.items():
        if names and not keeps_numbers(make_linear):
            logger.warning("%d layers of experts are not quantized, the first is %s: %s", len(names), names[0], reason)


@torch.inference_mode()
def _compare(experts: Any, packed: PackedExperts, make_linear: LinearFactory) -> None:
    """Compare with the stock module on rows that use every expert."""
    num_experts, own_dtype = len(experts.down_proj), experts.down_proj.dtype
    dtype = rows_dtype(make_linear) or own_dtype
    hidden_size = expert_weights(experts)[0].shape[1 if experts.is_transposed else 2]
    top = min(4, num_experts)
    num_rows = -(-num_experts // top)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    ids = (torch.arange(num_rows * top) % num_experts).view(num_rows, top)
    weights = torch.randn(num_rows, top, generator=generator).to(dtype)
    expected = experts(rows.to(own_dtype), ids, weights.to(own_dtype))
    exact = max(MAX_RELATIVE_ERROR[dtype], MAX_RELATIVE_ERROR[own_dtype])
    most = exact if keeps_numbers(make_linear) else MAX_ROUNDING_ERROR
    check_product(packed(rows, ids, weights), expected, most)


def _unknown_experts(model: nn.Module) -> list[str]:
    """Return the modules named experts that have weights [expert, output, input] and are no `experts_of`."""
    known = {name for name, _ in experts_of(model)}
    named = ((name, module) for name, module in model.named_modules() if name.endswith("experts"))
    return [
        name
        for name, module in named
        if name not in known and any(each.ndim == 3 for each in module.parameters(recurse=False))
    ]


def _by_outputs(experts: Any, weight: Tensor) -> Tensor:
    """Return a weight as [expert, output, input]."""
    return weight.transpose(1, 2) if experts.is_transposed else weight


def _as_stored(outputs: Tensor) -> Tensor:
    return outputs


def _ups_after_gates(outputs: Tensor) -> Tensor:
    """Return [expert, gates and ups in turn, ...] with all gates of an expert first."""
    apart: Tensor = outputs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return apart


def _biases(experts: Any) -> tuple[Tensor | None, Tensor | None]:
    if not experts.has_bias:
        return None, None
    return experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias, experts.down_proj_bias


def _function_of(experts: Any) -> Gate:
    """Return the function of rows, of plain gates before ups, or of gpt-oss' gates; NONE for another."""
    if isinstance(experts, GptOssExperts):
        return Gate.CLAMPED
    function: Any = getattr(experts, "act_fn", None)
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        return Gate.NONE
    if function is F.silu or isinstance(function, nn.SiLU | SiLUActivation):
        return Gate.SILU
    if isinstance(function, ReLUSquaredActivation):
        return Gate.RELU_SQUARED
    return Gate.GELU_TANH if isinstance(function, GELUTanh) else Gate.NONE


def _packed_weight(product: Any, dtype: torch.dtype, num_experts: int) -> PackedWeight:
    assert isinstance(product, NativeProduct | NativeQuantizedProduct), "`packing_obstacle` looks for the kernel"
    weight = product.packed_weight(dtype)
    assert weight is not None, "rows have a dtype of the kernel"
    weight.num_outputs //= num_experts
    return weight


def check_memory(is_short: int) -> None:
    """Raise MemoryError if a kernel has reported too little memory."""
    if is_short:
        raise MemoryError("no memory for the rows of a pass")
