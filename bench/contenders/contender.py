"""The protocol of a benchmark's contender: it turns prompts into greedy tokens while a clock runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.contenders.event_streams import Event, Streams
from engine.accounting.step_times import StepTimes

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class ChannelTimes:
    """Seconds of a draft process's work, and of its offers' way beyond that; both partly beside the target's work."""

    drafting_s: float
    channel_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: the tokens of each prompt, and the wall seconds of all of them together (prefill included).

    `arrivals` are, for each prompt, the seconds from the start of the run at which tokens came, one for all that came
    together; None where a contender does not stream. `num_timed_tokens` are those that came within `seconds`, where a
    run went on after them.
    """

    outputs: list[list[int]]
    seconds: float
    tokens_per_pass: float | None = None
    step_times: StepTimes | None = None
    channel_times: ChannelTimes | None = None
    arrivals: list[list[float]] | None = None
    num_timed_tokens: int | None = None

    @classmethod
    def of_streams(cls, streams: Streams, token_ids_of: Callable[[Event], list[int]]) -> Run:
        """Return the run of some streams; `token_ids_of` reads the tokens of an event, of which some have none."""
        came = [[(event.seconds, token_ids_of(event)) for event in events] for events in streams.events]
        outputs = [[token for _, token_ids in events for token in token_ids] for events in came]
        arrivals = [[seconds for seconds, token_ids in events if token_ids] for events in came]
        return cls(outputs, streams.seconds, arrivals=arrivals)

    @property
    def tokens_per_second(self) -> float:
        num_tokens = sum(map(len, self.outputs)) if self.num_timed_tokens is None else self.num_timed_tokens
        return num_tokens / self.seconds


class Contender(Protocol):
    """A way to generate, with a name for the table."""

    name: str

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        """Generate exactly `num_tokens` greedy tokens for every prompt, all prompts at once if the contender can."""

    def close(self) -> None:
        """Give back memory and processes."""
