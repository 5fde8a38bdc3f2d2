"""Verifiers turn the target's rows and a draft into committed tokens, distributed exactly as the target alone.

Vocabulary: *accepted* tokens are drafts that stand; the *recovered* token replaces the first draft that does not; the
*bonus* token follows when all drafts stand. One pass commits the accepted tokens and one recovered or bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.draft import Draft
from engine.sequence.sequence import Sequence
from protos.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """One sequence's rows of the step's logits, from `first_row`: after the committed tokens, then after each draft.

    The rows may end before the first draft outside the vocabulary, which no model can compute, or before the first that
    the sequence's grammar forbids. A draft that was drawn from a distribution must stay in the task nevertheless:
    rejection and block verification treat it as rejected, not as never made.
    """

    sequence: Sequence
    draft: Draft
    first_row: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The outcome for one sequence: `token_ids` holds the accepted tokens and then the recovered or bonus token.

    `path` has the accepted nodes of a tree, from the top down. It is empty for a chain: there the first drafts stand.
    Where `is_exact` is False a reasoning step was judged (`engine.approximate`), which says nothing of how drafts fare.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    path: tuple[int, ...] = ()
    is_exact: bool = True
