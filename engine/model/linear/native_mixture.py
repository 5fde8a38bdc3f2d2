"""A mixture of experts in one native call: its router, its experts, and perhaps an MLP that all rows pass.

`engine/native/mixture` computes it. Stock routers differ in scores, in biases of products and in those that choose
experts but do not weigh them, in groups and in factors: a family has its `Routing`, and the rest are attributes of a
module.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from engine.model.linear.native_product import Gate, PackedWeight
from engine.model.linear.packed_experts import ExpertsCall, PackedExperts, check_memory
from engine.native.library import kernel

_FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # of weights, in a router
_PRODUCTS = ("", "gate", "proj", "wg")  # of a router: its own weight, or a layer's
_BIASES = ("e_score_correction_bias", "expert_bias")

Products = tuple[Any, Any]  # a first and a last one


class Scores(IntEnum):
    """`enum scores` of the kernel."""

    SOFTMAX = 0
    SIGMOID = 1
    SPARSE = 2  # the sparse mixer of Phi-3.5, which takes two experts


@dataclass(frozen=True, slots=True)
class Routing:
    """The routers of a family: they choose the experts with the greatest `scores` of a product.

    Attributes:
        scores: compared, and the weights of the chosen ones.
        epsilon: added to the sum of a row's weights, which divides them.
        is_normalized: the weights of a row add up to 1, where its router has no attribute for it.
        has_group_sums: groups of experts are compared by their two best scores, not by the best.
    """

    scores: Scores = Scores.SOFTMAX
    epsilon: float = 0.0
    is_normalized: bool = True
    has_group_sums: bool = True


class _Router(ctypes.Structure):
    """`struct router` of engine/native/mixture/routing.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logit_biases", "biases", "factors")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_inputs", "top")),
        *((name, ctypes.c_int64) for name in ("scores", "num_groups", "top_groups")),
        *((name, ctypes.c_int64) for name in ("has_group_sums", "is_normalized")),
        *((name, ctypes.c_float) for name in ("epsilon", "factor", "tolerance")),
    ]


class _Mixture(ctypes.Structure):
    """`struct mixture` of engine/native/mixture/mixture.h."""

    _fields_ = [
        ("experts", ExpertsCall),
        ("router", _Router),
        *((name, PackedWeight) for name in ("latent_in", "latent_out", "shared_inner", "shared_down")),
        ("shared_gate", ctypes.c_void_p),
        ("shared_function", ctypes.c_int64),
        ("shared_factor", ctypes.c_float),
    ]


class NativeMixture:
    """The mixture of a stock module with packed experts.

    Attributes:
        call: the mixture for the kernel, valid as long as this.
        dtype: of rows.
    """

    def __init__(
        self,
        mixture: Any,
        routing: Routing,
        shared: Products | None = None,
        function: Gate = Gate.NONE,
        latent: Products | None = None,
    ) -> None:
        """Share the experts of a stock module that `fits`, and take its router, in bfloat16 where that is exact.

        Args:
            mixture: the stock module.
            routing: of its family.
            shared: both products of the MLP that all rows pass; the kernel `takes` them.
            function: of that MLP without gates.
            latent: the products before and after the experts, if their rows have another size; the kernel `takes` them.
        """
        self._experts, self._products = mixture.experts.forward, (latent, shared)  # kept: `call` points to the weights
        self.dtype = self._experts.dtype
        router = _router_of(mixture)
        product = _product_of(router)
        weight = product.weight.detach()
        rounded = weight.bfloat16()
        self._weight = (rounded if torch.equal(rounded.to(weight.dtype), weight) else weight.float()).contiguous()
        self._logit_biases, self._biases = _floats(getattr(product, "bias", None)), _biases_of(mixture, router)
        # Groups are compared by sums of scores; biases turn logits into scores.
        if self._biases is None and _groups_of(router)[0] > 1 and routing.has_group_sums:
            self._biases = torch.zeros(len(weight))
        self._factors = _floats(getattr(router, "per_expert_scale", None))
        self._gate = _floats(getattr(getattr(mixture, "shared_expert_gate", None), "weight", None))
        share = 0.5 if shared and getattr(mixture, "shared_expert_combination_strategy", None) == "average" else 1.0
        self.call = _Mixture(
            self._experts.call,
            self._router(router, routing, share),
            *(
                PackedWeight() if product is None else product.packed_weight(self.dtype)
                for product in (*(latent or (None, None)), *(shared or (None, None)))
            ),
            _address(self._gate),
            function,
            share,
        )

    def _router(self, router: Any, routing: Routing, share: float) -> _Router:
        scores, is_normalized = _scores_of(router, routing)
        return _Router(
            self._weight.data_ptr(),
            self._weight.dtype is torch.bfloat16,
            *map(_address, (self._logit_biases, self._biases, self._factors)),
            *self._weight.shape,
            2 if scores is Scores.SPARSE else _top_of(router),  # 2, whatever its configuration has
            scores,
            *_groups_of(router),
            routing.has_group_sums,
            is_normalized,
            routing.epsilon,
            share * next((float(factor) for name in _FACTORS if (factor := getattr(router, name, None))), 1.0),
            2 * getattr(router, "router_jitter_noise", 0.0),
        )

    @staticmethod
    def fits(mixture: Any) -> bool:
        """True if the experts of a stock module are packed, and the kernel takes their function and their router."""
        packed = mixture.experts.forward
        has_room = _groups_of(_router_of(mixture))[0] <= 64  # of routing.c
        return isinstance(packed, PackedExperts) and packed.function is not Gate.NONE and has_room

    @staticmethod
    def takes(mixture: Any, product: Any) -> bool:
        """True if the kernel multiplies by a product of the shared MLP."""
        packed_weight = getattr(product, "packed_weight", None)
        return packed_weight is not None and packed_weight(mixture.experts.forward.dtype) is not None

    def __call__(self, rows: Tensor, routed: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; the router reads `routed`, or the same rows.

        Raises:
            MemoryError: the buffers do not fit.
        """
        taken = rows.to(self.dtype).contiguous()
        read = taken if routed is None else routed.to(self.dtype).contiguous()
        out = torch.empty_like(taken)
        pointers = (each.data_ptr() for each in (read, taken, out))
        check_memory(kernel("mixture", "ppppq", "i")(ctypes.byref(self.call), *pointers, len(taken)))
        return out.to(rows.dtype)


def _product_of(router: Any) -> Any:
    """Return the part of a router that has the weight of its logits."""
    parts = (getattr(router, name, None) if name else router for name in _PRODUCTS)
    return next(part for part in parts if getattr(part, "weight", None) is not None)


def _router_of(mixture: Any) -> Any:
    return getattr(mixture, "gate", None) or mixture.router


def _biases_of(mixture: Any, router: Any) -> Tensor | None:
    """Return the biases of the scores that choose experts, [experts] float32; None without any."""
    modules = (mixture, router, getattr(router, "moe_statics", None))
    biases = (getattr(module, name, None) for module in modules for name in _BIASES)
    return _floats(next((each for each in biases if each is not None), None))


def _scores_of(router: Any, routing: Routing) -> tuple[Scores, bool]:
    """Return the scores that a router compares, and whether the weights of a row add up to 1."""
    name = getattr(router, "expert_selection_fn", None)  # Cohere's; its softmax is of the chosen logits
    scores = routing.scores if name is None else Scores[name.upper()]
    return scores, name == "softmax" or getattr(router, "norm_topk_prob", routing.is_normalized)


def _groups_of(router: Any) -> tuple[int, int]:
    """Return the number of a router's groups of experts, and how many of them a row takes experts from."""
    if getattr(router, "topk_method", None) == "greedy":  # DeepSeek-V2's, whatever else its configuration has
        return 1, 1
    return getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1


def _top_of(router: Any) -> int:
    top: int = getattr(router, "top_k", None) or router.config.top_k_experts
    return top


def _floats(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.detach().float().flatten().contiguous()


def _address(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()
