"""The protocol of KV block sources for scheduler and engine, and a source without any blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.accounting.engine_stats import RemotePrefillStats
from engine.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """This engine's load for a new prompt: tokens queued before it, and sequences that it would delay."""

    num_queued_tokens: int
    num_decoding: int
    num_decode_tokens: int  # total context of the decoding sequences


class PrefillSource(Protocol):
    """Fetches KV blocks for sequences with slots; a sequence `is_fetching` from `offer` until its fetch ends."""

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        """Fetch the blocks that an admitted sequence lacks, or leave them to local prefill.

        Args:
            sequence: has slots for all its tokens.
            load: this engine's load, for the decision.
        """

    def withdraw(self, sequence: Sequence) -> None:
        """End a sequence's fetch before it loses its blocks; nothing is written to them afterwards."""

    def receive(self, load: Callable[[], PrefillLoad]) -> bool:
        """Store the blocks that have arrived and advance their sequences; ended fetches clear `is_fetching`.

        Args:
            load: called if a sequence is offered again.

        Returns:
            True if any message arrived.
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
