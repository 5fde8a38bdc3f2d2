"""The result of verifying one sequence's draft."""

from __future__ import annotations

from typing import NamedTuple

from protos.messages import TokenLogprobs


class VerifyResult(NamedTuple):
    """The result for one sequence: `token_ids` holds the accepted tokens, then the recovered or bonus token.

    `path` has the accepted nodes of a tree, from the top down. It is empty for a chain, whose first `num_accepted`
    drafts are accepted. If `is_finite` is False, the row has no finite logits and the token in `token_ids` must not be
    committed. If `is_exact` is False, a reasoning step was scored (`engine.approximate`): the result does not count as
    acceptance of drafts.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    path: tuple[int, ...] = ()
    is_exact: bool = True
    is_finite: bool = True

    def row_of(self, index: int) -> int:
        """Return the row of token `index`, counted from the task's first row."""
        return self.path[index - 1] + 1 if self.path and index > 0 else index
