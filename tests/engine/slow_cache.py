"""The block manager's rules told slowly: prefixes for keys, counts for tables, scans for indices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Prefix = tuple[str, tuple[int, ...]]  # salt and all tokens up to the end of a full block


@dataclass(eq=False)
class SlowSequence:
    salt: str
    token_ids: list[int]
    num_computed: int = 0
    num_blocks: int = 0
    named: list[Prefix] = field(default_factory=list)  # its leading blocks, as the cache knows them


@dataclass
class SlowCache:
    """Which prefixes are cached, and when each was last let go of."""

    num_blocks: int
    block_size: int
    cached: dict[Prefix, int] = field(default_factory=dict)  # prefix -> time of the last release
    sequences: list[SlowSequence] = field(default_factory=list)
    time: int = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._num_private() - len(self.held())

    def held(self) -> set[Prefix]:
        return {prefix for sequence in self.sequences for prefix in sequence.named}

    def match(self, sequence: SlowSequence) -> list[Prefix]:
        """The cached blocks that the sequence can start from; its last token is never among them."""
        prefixes = self._prefixes(sequence, len(sequence.token_ids) - 1)
        num_hits = next((i for i, prefix in enumerate(prefixes) if prefix not in self.cached), len(prefixes))
        return prefixes[:num_hits]

    def admit(self, sequence: SlowSequence, num_spare: int) -> bool:
        matched = self.match(sequence)
        num_needed = self._blocks_for(len(sequence.token_ids)) - len(set(matched) & self.held())
        if num_needed + num_spare > self.num_free:
            return False
        sequence.named = matched
        sequence.num_blocks = len(matched)
        sequence.num_computed = len(matched) * self.block_size
        self.sequences.append(sequence)
        return self.reserve(sequence, len(sequence.token_ids))

    def reserve(self, sequence: SlowSequence, num_tokens: int) -> bool:
        num_missing = max(0, self._blocks_for(num_tokens) - sequence.num_blocks)
        if num_missing > self.num_free:
            return False
        sequence.num_blocks += num_missing
        while self._num_private() + len(self.cached) > self.num_blocks:
            del self.cached[min(set(self.cached) - self.held(), key=self.cached.__getitem__)]
        return True

    def publish(self, sequence: SlowSequence, num_tokens: int) -> None:
        for prefix in self._prefixes(sequence, num_tokens)[len(sequence.named) :]:
            if prefix in self.cached and len(prefix[1]) > sequence.num_computed:
                return
            self.cached.setdefault(prefix, -1)
            sequence.named.append(prefix)

    def trim(self, sequence: SlowSequence, num_tokens: int) -> None:
        sequence.num_blocks = min(sequence.num_blocks, self._blocks_for(num_tokens))

    def release(self, sequence: SlowSequence) -> None:
        self.sequences.remove(sequence)
        for prefix in reversed(sequence.named):
            if prefix not in self.held():
                self.time += 1
                self.cached[prefix] = self.time
        sequence.named, sequence.num_blocks, sequence.num_computed = [], 0, 0

    def _prefixes(self, sequence: SlowSequence, num_tokens: int) -> list[Prefix]:
        ends: Iterable[int] = range(self.block_size, num_tokens + 1, self.block_size)
        return [(sequence.salt, tuple(sequence.token_ids[:end])) for end in ends]

    def _num_private(self) -> int:
        return sum(sequence.num_blocks - len(sequence.named) for sequence in self.sequences)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
