"""The query to a proposer: a sequence, and the number of drafts wanted after its committed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.sequence.request_tokens import RequestTokens


class DraftQuery(Protocol):
    """A sequence and the limits of the drafts in its next pass. `ScheduledSequence` implements it."""

    @property
    def sequence(self) -> RequestTokens:
        """The sequence; all its tokens are committed."""

    @property
    def max_draft_tokens(self) -> int:
        """Maximum length of a chain and depth of a tree."""

    @property
    def max_tree_nodes(self) -> int:
        """Maximum number of tree nodes; 0 if drafts must be chains."""


@dataclass(frozen=True, slots=True)
class UnscheduledQuery:
    """A `DraftQuery` without the target's scheduler: for a draft process, or for the draft of a draft."""

    sequence: RequestTokens
    max_draft_tokens: int
    max_tree_nodes: int = 0
