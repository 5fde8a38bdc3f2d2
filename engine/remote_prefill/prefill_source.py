"""The protocol by which scheduler and engine get blocks from elsewhere, and the source that never has any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence.sequence import Sequence
from engine.stats.engine_stats import RemotePrefillStats


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The load that a prompt meets in this engine: tokens before it, and sequences that it would delay."""

    num_queued_tokens: int
    num_decoding: int
    num_decode_tokens: int  # context of the sequences that decode


class PrefillSource(Protocol):
    """Brings KV blocks for sequences that hold slots; a sequence `is_fetching` from `offer` until its fetch is over."""

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        """Fetch the blocks that an admitted sequence lacks, or leave them to be computed.

        Args:
            sequence: holds slots for all its tokens.
            load: of this engine, for the decision.
        """

    def withdraw(self, sequence: Sequence) -> None:
        """End the fetch of a sequence that is about to lose its blocks: nothing is written to them from now on."""

    def receive(self, load: Callable[[], PrefillLoad]) -> bool:
        """Store the blocks that have arrived; sequences move forward, and stop fetching at the end.

        Args:
            load: asked for where a sequence is offered again.

        Returns:
            True where there was news.
        """

    @property
    def stats(self) -> RemotePrefillStats: ...


class NoPrefillSource:
    """Leaves every prompt to this engine."""

    stats = RemotePrefillStats()

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        pass

    def withdraw(self, sequence: Sequence) -> None:
        pass

    def receive(self, load: Callable[[], PrefillLoad]) -> bool:
        return False
