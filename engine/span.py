"""What the model runner computes in one pass: stretches of sequences, with no word of requests or drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, computed in one pass.

    The tokens stand at positions [start, start + len(token_ids)). The KV of positions [0, start) is already in the
    blocks of `block_table`, or is written there by another span of the same pass; this span's KV goes to the slots of
    its own positions, which the table covers too. The last `num_logits` tokens yield a row of logits each.
    """

    token_ids: Seq[int]  # at least one
    start: int
    block_table: Seq[int]  # block of position i: block_table[i // P]; may be longer than needed
    num_logits: int

    @property
    def end(self) -> int:
        """First position after the span: the number of tokens the span's last token attends to."""
        return self.start + len(self.token_ids)
