"""The interface of attention backends: the attention of one forward, and a layer's options.

It knows nothing of the devices; `engine.attention.backend` chooses an implementation for one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch.indexing import Index
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """A layer's attention options other than q, k and v."""

    scaling: float
    window: int | None = None  # tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H * G] logits of keys without a value (gpt-oss)


class AttentionPass(Protocol):
    """The attention of all layers in one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """Write the pass's keys and values to the pool, then compute what each row sees of it.

        Args:
            layer: index of the layer's KV in the pool.
            query: [1, H * G, T, D], after rotary.
            key: [1, H, T, D], after rotary.
            value: [1, H, T, D of the values].
            options: the layer's.

        Returns:
            [1, T, H * G, D of the values].
        """


# Lays out a pass of some spans, whose KV goes to these slots, [T]; valid while the blocks of the spans stay theirs.
PlanAttention = Callable[[Seq[Span], KVCache, Index], AttentionPass]


class UnsupportedAttentionError(Exception):
    """A layer asked for something this attention does not compute; the loader turns it into a refusal by name."""
