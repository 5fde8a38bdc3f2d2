"""A proposal as the target may use it: no longer than planned, and computed only as far as its ids exist."""

from __future__ import annotations

from dataclasses import dataclass

from engine.draft import NO_DRAFT, Draft
from engine.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """A draft, and how many of its leading tokens are in the vocabulary.

    Where an id is not, the draft ends with it: the model must not see it, but a verifier that tests ratios must know
    that something was proposed there; leaving it out would depend on the drawn token and bias the output.
    """

    draft: Draft
    num_valid: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the model computes."""
        return self.draft.token_ids[: self.num_valid]

    @property
    def is_cut(self) -> bool:
        return self.num_valid < len(self.draft.token_ids)


NOTHING = CheckedDraft(NO_DRAFT, 0)


def check_draft(draft: Draft, max_tokens: int, vocabulary: Vocabulary) -> CheckedDraft:
    """Cut a draft to `max_tokens`, and behind its first id that the target does not have."""
    token_ids = draft.token_ids[:max_tokens]
    num_valid = vocabulary.num_known(token_ids)
    num_kept = min(num_valid + 1, len(token_ids))
    return CheckedDraft(Draft(token_ids[:num_kept], draft.laws[:num_kept]), num_valid)
