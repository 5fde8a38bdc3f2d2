"""The weights of a Llama-shaped layer, packed, as functions of rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.base import LayerOptions
from engine.model.linear.packed_linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    gated: Linear  # silu(gate(x)) * up(x)
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down(self.gated(x))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a rank."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    head_norm: Tensor | None  # [Hq + H, D] of q and k (Qwen3)
    output: Linear
    mlp_norm: Tensor  # [hidden]
    mlp: Linear  # a `GatedMlp`, or a mixture of experts
    options: LayerOptions
