"""A way from workers to the router on which messages are late, and some never arrive."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from bench.simulator.clock import Clock

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class ChannelQuality:
    """The delay of every message, and the probability of its loss."""

    delay_s: float = 0.0
    loss: float = 0.0


class Channel(Generic[Message]):
    """Delivers each message to `receive` after the delay, in order, or drops it.

    The drops are the same in every run.
    """

    def __init__(self, clock: Clock, quality: ChannelQuality, receive: Callable[[Message], None], seed: int) -> None:
        self._clock = clock
        self._quality = quality
        self._receive = receive
        self._dice = random.Random(seed)

    def send(self, message: Message) -> None:
        """Hand a message over at the present moment."""
        if self._quality.loss and self._dice.random() < self._quality.loss:
            return
        if self._quality.delay_s == 0:
            self._receive(message)
        else:
            self._clock.at(self._clock.now_s + self._quality.delay_s, partial(self._receive, message))
