"""The result of verifying one sequence's draft."""

from __future__ import annotations

from typing import NamedTuple

from protos.messages import TokenLogprobs


class VerifyResult(NamedTuple):
    """The outcome for one sequence: `token_ids` holds the accepted tokens and then the recovered or bonus token.

    `path` has the accepted nodes of a tree, from the top down. It is empty for a chain: there the first drafts stand.
    Where `is_finite` is False the target has no next token, as its row has no finite logits: the one in `token_ids` is
    not to be committed. Where `is_exact` is False a reasoning step was judged (`engine.approximate`), which says
    nothing of how drafts fare.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    path: tuple[int, ...] = ()
    is_exact: bool = True
    is_finite: bool = True

    def row_of(self, index: int) -> int:
        """Return the row that gave token `index`, counted from the task's first."""
        return self.path[index - 1] + 1 if self.path and index > 0 else index
