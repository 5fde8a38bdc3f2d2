"""Heads that draft token by token, like a one-layer language model that starts from the target's states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.kv_cache.pool import LayerShape
from engine.model.forward_batch import ForwardBatch
from engine.model.hidden_state_taps import HiddenStateTaps
from engine.model.linear.packed_linear import Linear


class RecurrentHead(Protocol):
    """A head that maps a state and the token after it to the next state (arXiv:2401.15077, arXiv:2412.19437).

            position       p           p + 1        p + 2
            target       feature p   feature p+1
            token        t(p)        t(p+1)       t(p+2)
            pair p:     (feature p, t(p+1))  ->  state p, whose logits are of t(p+2)

    Pair p has its keys and values in slot p of the sequence, in layers after the target's. When the target's block
    tables share, evict, move or fetch blocks, the head's KV goes along. S is a state's width, F a feature's.

    Attributes:
        taps: the features it reads.
        layer_shapes: the KV of each of its layers; the first is layer `first_layer` of the pool.
        lm_head: the target's, set by the runner before the first pass; heads with their own ignore it.
    """

    taps: HiddenStateTaps
    layer_shapes: list[LayerShape]
    lm_head: Linear

    def enter(self, features: Tensor) -> Tensor:
        """The target's features [R, F] as states [R, S]."""

    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """Map states [T, S] and the tokens after them, `batch.input_ids`, to the next states of its logit rows [R, S].

        Their KV is in the pass's slots afterwards.
        """

    def logits(self, states: Tensor) -> Tensor:
        """[R, S] -> [R, V of the target] float32; tokens unknown to the head get `UNKNOWN`."""
