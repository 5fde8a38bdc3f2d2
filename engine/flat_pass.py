"""The tensors of one flat pass: spans of many sequences laid end to end, each row at its own position and slot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.attention import PagedAttentionPass
from engine.attention_plan import plan_reads
from engine.kv_cache import KVCache
from engine.span import Span


@dataclass(frozen=True, slots=True)
class FlatPass:
    """What one forward takes; valid for one forward, and only while the blocks of its spans stay theirs."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    num_positions: int  # one more than the largest position
    logit_rows: Tensor | None  # [R] int64; None: every row, in order
    attention: PagedAttentionPass

    @classmethod
    def of(cls, spans: Seq[Span], cache: KVCache) -> FlatPass:
        """Lay out `spans` (at least one) in order."""
        device = cache.device
        token_ids = np.fromiter(chain.from_iterable(span.token_ids for span in spans), dtype=np.int64)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        reads = partial(
            plan_reads, spans, cache.block_size, min_view_tokens=cache.min_view_tokens, dtype=cache.dtype, device=device
        )
        return cls(
            input_ids=torch.from_numpy(token_ids).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            num_positions=max(span.end for span in spans),
            logit_rows=_logit_rows(spans, len(token_ids), device),
            attention=PagedAttentionPass(cache, _slots(spans, cache.block_size, device), reads),
        )


def _slots(spans: Seq[Span], block_size: int, device: torch.device) -> slice | Tensor:
    """The slot of every row [T], as a slice where they follow each other."""
    parts = []
    for span in spans:
        positions = np.arange(span.start, span.end)
        first_block = span.start // block_size
        table = np.asarray(span.block_table[first_block : (span.end - 1) // block_size + 1])
        parts.append(table[positions // block_size - first_block] * block_size + positions % block_size)
    slots = np.concatenate(parts)
    first, num_rows = int(slots[0]), len(slots)
    if int(slots[-1]) == first + num_rows - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, first + num_rows)
    return torch.from_numpy(slots).to(device)


def _logit_rows(spans: Seq[Span], num_rows: int, device: torch.device) -> Tensor | None:
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.token_ids)
        rows.extend(range(end - span.num_logits, end))
    return None if len(rows) == num_rows else torch.tensor(rows, dtype=torch.long, device=device)
