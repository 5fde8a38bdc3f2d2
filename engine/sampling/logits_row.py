"""The subject of a row of logits: the request whose token it samples, and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.sampling.grammar import TokenMask
from protos.messages import SamplingParams


class LogitsRow(NamedTuple):
    """One row of `[R, V]` logits; a tuple, since a step makes hundreds of them and those are made the fastest.

    Its prefix is `token_ids` and then `draft_ids`; apart, so that the K + 1 rows of a verification share one list of
    committed tokens. Both are only read, and only until the call that takes the row returns. `mask` has the tokens that
    a grammar allows after this prefix; None allows all.
    """

    sampling: SamplingParams
    token_ids: Seq[int]
    num_prompt_tokens: int
    sample_index: int = 0
    draft_ids: Seq[int] = ()
    mask: TokenMask | None = None

    @property
    def position(self) -> int:
        """Absolute position of the token that this row samples."""
        return len(self.token_ids) + len(self.draft_ids)

    @property
    def pass_position(self) -> int:
        """Absolute position of the first token that this row's pass can commit; no two passes share one."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return self.position - self.num_prompt_tokens
