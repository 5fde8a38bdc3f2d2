"""The question to a proposer: drafts behind the committed tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.sequence.request_tokens import RequestTokens


class DraftQuery(Protocol):
    """A sequence and the room that its next pass has for drafts; a `ScheduledSequence` is one."""

    @property
    def sequence(self) -> RequestTokens:
        """The sequence, all of whose tokens are committed."""

    @property
    def max_draft_tokens(self) -> int:
        """Longest chain, and depth of the deepest tree."""

    @property
    def max_tree_nodes(self) -> int:
        """Nodes of the largest tree; 0 where drafts must be chains."""


@dataclass(frozen=True, slots=True)
class UnscheduledQuery:
    """A `DraftQuery` outside the target's scheduler: the query to a draft process, or to a draft of a draft."""

    sequence: RequestTokens
    max_draft_tokens: int
    max_tree_nodes: int = 0
