"""Times the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from operator import add, attrgetter, sub
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, or of `num_steps` steps together, by part. Everything but `forward_s` is overhead."""

    receive_s: float = 0.0  # storing fetched KV blocks
    schedule_s: float = 0.0
    draft_s: float = 0.0  # the calls of the proposer: the commit of the step before, and propose
    forward_s: float = 0.0
    sample_s: float = 0.0  # on a GPU, includes waiting for the pass and, if passes overlap, issuing the next one
    commit_s: float = 0.0  # until the next step begins: tokens are sent in it
    num_steps: int = 0

    @property
    def total_s(self) -> float:
        return self.receive_s + self.schedule_s + self.draft_s + self.forward_s + self.sample_s + self.commit_s

    @property
    def target_s(self) -> float:
        """Everything but the wait for drafts."""
        return self.total_s - self.draft_s

    @property
    def parts(self) -> tuple[Any, ...]:
        """The fields in their order."""
        return _PARTS(self)

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*map(add, self.parts, other.parts))

    def __sub__(self, other: StepTimes) -> StepTimes:
        """Return the steps since `other`, an earlier total."""
        return StepTimes(*map(sub, self.parts, other.parts))


_PARTS: Callable[[StepTimes], tuple[Any, ...]] = attrgetter(*(part.name for part in fields(StepTimes)))


class StepTimer:
    """Splits the time of steps among their parts."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """Begin a step after a pause: the time since the last lap counts for no part."""
        self._last_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`, a field of `StepTimes`."""
        now_s = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def take(self) -> StepTimes:
        """Return the parts since the last call, as one step."""
        parts, self._parts = self._parts, {}
        return StepTimes(**parts, num_steps=1)


class Timed(Protocol):
    """An object whose methods are parts of a step."""

    _timer: StepTimer


T = TypeVar("T", bound=Timed)
P = ParamSpec("P")
R = TypeVar("R")


def timed(
    part: str,
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Decorate a method that is part `part` of a step: the time since the last part ended counts for it."""

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @wraps(method)
        def run(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            result = method(self, *args, **kwargs)
            self._timer.lap(part)
            return result

        return run

    return decorate
