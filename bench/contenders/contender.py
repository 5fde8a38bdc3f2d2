"""The protocol of a benchmark's contender: it turns prompts into greedy tokens while a clock runs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from bench.contenders.event_streams import Event, Streams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class ContenderRun:
    """One timed run: the tokens of each prompt, and the wall seconds of all prompts together, prefill included.

    `arrivals` has for each prompt the seconds from the start of the run to each arrival of tokens, one entry for tokens
    that arrived together. It is None for a contender that does not stream.
    """

    outputs: list[list[int]]
    seconds: float
    tokens_per_pass: float | None = None
    arrivals: list[list[float]] | None = None

    @classmethod
    def of_streams(cls, streams: Streams, token_ids_of: Callable[[Event], list[int]]) -> ContenderRun:
        """Return the run of some streams; `token_ids_of` returns the tokens of an event, which may be empty."""
        received = [[(event.seconds, token_ids_of(event)) for event in events] for events in streams.events]
        outputs = [[token for _, token_ids in events for token in token_ids] for events in received]
        arrivals = [[seconds for seconds, token_ids in events if token_ids] for events in received]
        return cls(outputs, streams.seconds, arrivals=arrivals)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


class Contender(Protocol):
    """A way to generate, with a name for the table."""

    name: str

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        """Generate exactly `num_tokens` greedy tokens for every prompt, all prompts at once if the contender can."""

    def close(self) -> None:
        """Release memory and processes."""


def equal_share(outputs: Seq[Seq[int]], others: Seq[Seq[int]]) -> float:
    """Return the share of positions with the same token in both."""
    same = [a == b for ours, theirs in zip(outputs, others, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(same) / len(same)
