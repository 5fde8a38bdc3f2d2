"""The MLPs of our decoders, with or without experts next to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.model.decoders.row_operations import RowOperations
from engine.model.linear.native_mixture import NativeMixture
from engine.model.linear.packed_linear import Linear


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(function(gate(x)) * up(x))`, or without gates `down(function(up(x)))`."""

    inner: Linear  # function(gate(x)) * up(x), or up(x)
    down: Linear
    activate: Callable[[Tensor], Tensor] | None = None  # the function without gates, or a norm of `inner`'s results

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        inner = self.inner(x)
        return self.down(inner if self.activate is None else self.activate(inner))


@dataclass(frozen=True, slots=True)
class MlpWithExperts:
    """The sum of an MLP and of experts over the residual stream, each between its own norms.

    `router` is a stock module. `mlp_norms` are before and after the MLP, `expert_norms` before and after the experts,
    and before a native mixture's router.
    """

    rows: RowOperations
    mlp: Mlp
    experts: NativeMixture | Any
    router: Any
    mlp_norms: tuple[Tensor, Tensor]
    expert_norms: tuple[Tensor, ...]

    def __call__(self, residual: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        mlp_before, mlp_after = self.mlp_norms
        before, after, before_router = self.expert_norms
        dense = self._normed(self.mlp(self._normed(residual, mlp_before)), mlp_after)
        taken = self._normed(residual, before)
        if isinstance(self.experts, NativeMixture):
            mixed = self.experts(taken, self._normed(residual, before_router))
        else:
            _, weights, chosen = self.router(residual)
            mixed = self.experts(taken, chosen, weights)
        return dense + self._normed(mixed, after)

    def _normed(self, states: Tensor, norm: Tensor) -> Tensor:
        return self.rows.add_norm(states, None, norm)[1]
