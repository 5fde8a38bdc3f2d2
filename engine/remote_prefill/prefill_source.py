"""What the scheduler and the engine need of whoever can bring blocks from elsewhere, and the one that never does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.sequence.sequence import Sequence
from engine.stats.engine_stats import RemotePrefillStats


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prompt that is read here would wait for, and what would wait for it."""

    num_queued_tokens: int
    num_decoding: int
    num_decode_tokens: int  # context of the sequences that decode


class PrefillSource(Protocol):
    """Brings KV blocks for sequences that hold slots; a sequence is `is_fetching` from `offer` until it is done."""

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        """A sequence was admitted, with slots for all its tokens: fetch what it lacks, or leave it to be computed."""

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence that is fetching is about to lose its blocks: nothing is written to them from now on."""

    def receive(self, load: PrefillLoad) -> bool:
        """Store what has arrived; sequences move forward, and stop fetching at the end. True where there was news."""

    @property
    def stats(self) -> RemotePrefillStats: ...


class NoPrefillSource:
    """Every prompt is read here."""

    stats = RemotePrefillStats()

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        pass

    def withdraw(self, sequence: Sequence) -> None:
        pass

    def receive(self, load: PrefillLoad) -> bool:
        return False
