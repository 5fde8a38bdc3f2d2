"""The sequences that wait for each fetch, followers included. It sends no orders and stores no blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.accounting.engine_stats import RemotePrefillStats
from engine.kv_cache.block_manager import BlockManager
from engine.remote_prefill.kv_transfer import KVFetch
from engine.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """This engine's load for a new prompt: tokens queued before it, and sequences that it would delay."""

    num_queued_tokens: int
    num_decoding: int
    num_decode_tokens: int  # total context of the decoding sequences


class PrefillSource:
    """Fetches KV blocks for sequences with slots; a sequence `is_fetching` from `offer` until its fetch ends.

    This one fetches nothing and leaves every prompt to this engine.
    """

    @property
    def stats(self) -> RemotePrefillStats:
        return RemotePrefillStats()

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
        return False


class FetchTable:
    """Running fetches, their followers, and orphans.

    A follower is a sequence that lacks the same blocks as the fetch's own sequence. An orphan is a follower whose fetch
    has nothing more for it.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._fetches: dict[int, KVFetch] = {}
        self._orphans: list[Sequence] = []

    @property
    def num_sequences(self) -> int:
        """Number of waiting sequences: own sequences of fetches, followers and orphans."""
        return sum(1 + len(fetch.followers) for fetch in self._fetches.values()) + len(self._orphans)

    def add(self, fetch: KVFetch) -> None:
        """Add a fetch that was ordered."""
        self._fetches[fetch.fetch_id] = fetch

    def get(self, fetch_id: int) -> KVFetch | None:
        """Return the fetch with this id, or None if it has ended."""
        return self._fetches.get(fetch_id)

    def drop(self, fetch: KVFetch) -> None:
        """Remove an ended fetch; its followers become orphans."""
        del self._fetches[fetch.fetch_id]
        self._orphans += fetch.followers

    def late(self, now_s: float) -> list[KVFetch]:
        """Return the fetches whose deadline has passed."""
        return [fetch for fetch in self._fetches.values() if fetch.deadline_s <= now_s]

    def follow(self, sequence: Sequence) -> bool:
        """Make a sequence a follower of the fetch of its first missing block; False without such a fetch."""
        for fetch in self._fetches.values():
            if self._is_coming(fetch, sequence):
                fetch.followers.append(sequence)
                return True
        return False

    def advance_followers(self, fetch: KVFetch) -> None:
        """Give the followers the blocks that have arrived; followers that need no later block become orphans."""
        for follower in fetch.followers:
            self._blocks.catch_up(follower)
        self._orphans += [each for each in fetch.followers if not self._is_coming(fetch, each)]
        fetch.followers = [each for each in fetch.followers if self._is_coming(fetch, each)]

    def leave(self, sequence: Sequence) -> KVFetch | None:
        """End a sequence's wait. Returns its own fetch, which stays in the table, or None if it was a follower."""
        for waiting in (self._orphans, *(fetch.followers for fetch in self._fetches.values())):
            if sequence in waiting:
                waiting.remove(sequence)
                return None
        (fetch,) = (each for each in self._fetches.values() if each.sequence is sequence)
        return fetch

    def take_orphans(self) -> list[Sequence]:
        """Remove and return all orphans."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def _is_coming(self, fetch: KVFetch, sequence: Sequence) -> bool:
        """True if `fetch` will deliver the first block that `sequence` lacks."""
        index = sequence.num_computed_tokens // self._blocks.block_size
        is_ahead = fetch.next_block <= index < fetch.end_block
        is_wanted = num_fetchable_blocks(sequence, self._blocks.block_size) > 0
        return is_ahead and is_wanted and self._blocks.is_equal_block(fetch.sequence, sequence, index)


def num_fetchable_blocks(sequence: Sequence, block_size: int) -> int:
    """Count the whole blocks that a sequence lacks, without its last token's, whose logits are needed."""
    return (len(sequence.token_ids) - 1 - sequence.num_computed_tokens) // block_size
