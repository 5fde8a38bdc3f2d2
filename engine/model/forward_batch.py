"""The tensors of one forward batch: spans of many sequences end to end, each row with its position and slot.

Hidden states of its rows go to a head; without a head nothing is computed for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.attention.base import AttentionPass, PlanAttention
from engine.attention.torch_attention import TorchAttention
from engine.batch.indexing import Index, index_of, index_tensor, slots_of
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache
from engine.recurrent.state_pass import PooledStates


@dataclass(frozen=True, slots=True)
class HiddenStateTaps:
    """Hidden states of every row of a pass, concatenated: features [T, F].

    `layers` are decoder layers whose input is tapped: n is the output of layer n - 1, and the number of layers is the
    output of the last. `is_final` appends the input of the language model's head: the states after the final norm.
    """

    layers: tuple[int, ...] = ()
    is_final: bool = False

    def __bool__(self) -> bool:
        return self.is_final or bool(self.layers)


NO_TAPS = HiddenStateTaps()
# The logit of a token outside the head's vocabulary: no chance, but finite, in case a grammar allows no other.
UNKNOWN = -1e4


def joined(parts: Seq[Tensor]) -> Tensor | None:
    """Concatenate the tapped states of one pass, [T, F]; None without any."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return torch.cat(tuple(parts), dim=-1)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one forward; valid for one forward, while its spans keep their blocks."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    num_positions: int  # at least one more than the largest position
    logit_rows: Tensor | None  # [R] int64; None for all rows, in order
    attention: AttentionPass
    states: PooledStates | None = None  # of models with recurrent layers
    block_attention: AttentionPass | None = None  # each row sees its whole span
    memory: tuple[KVCache, Index] | None = None  # the pool, and the slots of the rows

    @classmethod
    def of(
        cls,
        spans: Seq[Span],
        cache: KVCache,
        plan_attention: PlanAttention = TorchAttention,
        *,
        has_blocks: bool = False,
    ) -> ForwardBatch:
        """Lay out `spans` (at least one) in order; with `has_blocks` also the attention of rows to their whole span."""
        slots = list(chain.from_iterable(slots_of(span, cache.block_size) for span in spans))
        index = index_of(slots, cache.device)
        # A row that computes at the span's last place reads all of the span; its own KV goes to its own slot.
        ends = [Span((0,), span.end - 1, span.block_table, 1) for span in spans for _ in span.token_ids]
        return cls(
            input_ids=index_tensor(chain.from_iterable(span.token_ids for span in spans), cache.device),
            position_ids=index_tensor(chain.from_iterable(span.positions for span in spans), cache.device),
            num_positions=max(span.num_positions for span in spans),
            logit_rows=logit_rows(spans, len(slots), cache.device),
            attention=plan_attention(spans, cache, index),
            states=None if cache.states is None else PooledStates(spans, cache.states),
            block_attention=plan_attention(ends, cache, index) if has_blocks else None,
            memory=(cache, index),
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values [T, H, D] of the rows in a layer of the pool."""
        assert self.memory is not None, "only a batch of spans has a pool"
        cache, slots = self.memory
        cache.write(layer, slots, key, value)


def plan_steps(spans: Seq[Span], cache: KVCache, plan_attention: PlanAttention = TorchAttention) -> list[ForwardBatch]:
    """Return one pass per token of `spans`, all of one length: pass i computes the i-th token of each.

    The passes share `input_ids`, which the caller fills in place before each of them. A pass of a model with recurrent
    layers starts from the states of the last pass, so spans have a slot after each token.
    """
    input_ids = index_tensor((0 for _ in spans), cache.device)
    starts = index_tensor((span.start for span in spans), cache.device)
    num_positions = max(span.end for span in spans)
    passes = []
    for step, slots in enumerate(zip(*(slots_of(span, cache.block_size) for span in spans), strict=True)):
        tokens = [span.at_step(step) for span in spans]
        attention = plan_attention(tokens, cache, index_of(slots, cache.device))
        states = None if cache.states is None else PooledStates(tokens, cache.states)
        passes.append(ForwardBatch(input_ids, starts + step, num_positions, None, attention, states))
    return passes


def logit_rows(spans: Seq[Span], num_rows: int, device: torch.device) -> Tensor | None:
    """Return the rows of a pass of `num_rows` that need logits, [R] int64; None if all do."""
    if sum([span.num_logits for span in spans]) == num_rows:
        return None
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.token_ids)
        rows.extend(range(end - span.num_logits, end))
    return index_tensor(rows, device)
