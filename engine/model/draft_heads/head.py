"""The interface of heads: states of the target in, distributions of the next tokens out, in one pass or in several."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from engine.kv_cache.pool import LayerShape
from engine.model.forward_batch import ForwardBatch, HiddenStateTaps
from engine.model.linear.packed_linear import Linear

# Logits [n, V of the target] float32 of some rows of a block, given the tokens before each: the text's last two (or its
# only one), and the drafts of the block.
BlockLogits = Callable[[Seq[int], Seq[Seq[int]]], Tensor]


class DraftHead(Protocol):
    """A head over the target's hidden states. S is a state's width, F a feature's.

    A head's keys and values of position p are in slot p of the sequence, in layers after the target's. When the
    target's block tables share, evict, move or fetch blocks, the head's KV goes along.

    Attributes:
        taps: the features it reads.
        layer_shapes: the KV of each of its layers.
        lm_head: the target's, set by the runner before the first pass; heads with their own ignore it.
    """

    taps: HiddenStateTaps
    layer_shapes: list[LayerShape]
    lm_head: Linear

    def place(self, first_layer: int) -> None:
        """Keep its KV from layer `first_layer` of the pool on, after the target's; called before the first pass."""

    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        """Take the target's features [T, F] of verified rows, and write their KV.

        The ids of the batch are the tokens after these rows. A head without KV gets no batch, and only each text's
        last row. Return a state for each of the batch's logit rows, [R, S].
        """


class RecurrentHead(DraftHead, Protocol):
    """A head that maps a state and the token after it to the next state (arXiv:2401.15077, arXiv:2412.19437).

    position       p           p + 1        p + 2
    target       feature p   feature p+1
    token        t(p)        t(p+1)       t(p+2)
    pair p:     (feature p, t(p+1))  ->  state p, whose logits are of t(p+2)
    """

    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """Map states [T, S] and the tokens after them, `batch.input_ids`, to the next states of its logit rows [R, S].

        Their KV is in the pass's slots afterwards.
        """

    def step(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """`forward` after a draft that `step` or the last module has made."""

    def no_states(self, num_rows: int) -> Tensor:
        """Return new states of zeros, [R, S]."""

    def logits(self, states: Tensor) -> Tensor:
        """[R, S] -> [R, V of the target] float32; tokens unknown to the head get `UNKNOWN`."""


class BlockHead(DraftHead, Protocol):
    """A head that gives the distributions of all drafts in one pass over a block of rows.

    The block's rows begin at the position of the last committed token, in slots that are reserved for verification.

    Attributes:
        max_drafts: the most drafts of a block; None without a limit.
        num_more_rows: rows of a block minus its drafts.
    """

    max_drafts: int | None
    num_more_rows: int

    def block_ids(self, last_id: int, num_drafts: int) -> list[int]:
        """Return the input ids of a block after the committed token `last_id`; empty if it needs no pass."""

    def block(self, batch: ForwardBatch | None, states: Tensor, num_drafts: Seq[int]) -> BlockLogits:
        """Compute a block for each of the states [B, S]; the rows of the logits are the drafts, block after block.

        `batch` has the blocks' rows that need logits; None if no block has rows.
        """


def no_lm_head(hidden: Tensor) -> Tensor:
    """Stand for the target's `lm_head` until the runner sets it."""
    raise AssertionError("the runner gives the head the target's lm_head")
