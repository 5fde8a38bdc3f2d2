"""Faults inside every Python process of the application: a wrong clock, a late step, messages lost, late and repeated.

A `sitecustomize` imports this module before everything else, so it imports only the standard library. All processes
map one file, which holds the present fault.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "OUTRIDER_INTERFERENCE"  # the path of the file
_LAYOUT = struct.Struct("dqdd")
_LIKELIHOOD = 0.15  # the chance of each: a message is lost, held until the next one, or repeated
_CHANNEL = {"Round", "Offers"}  # between target and draft
_ENGINE_THREAD = "TargetActor"


class Orders(NamedTuple):
    """The content of the file. Times are of the monotonic clock, which all processes share."""

    clock_shift_s: float = 0.0
    stalled_pid: int = 0
    stalled_until_s: float = 0.0
    noisy_until_s: float = 0.0

    def write(self, path: Path) -> None:
        """Let them hold from now on."""
        if not path.exists():
            path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            file.write(_LAYOUT.pack(*self))


def install(path: str) -> None:
    """Apply the faults of the file to this process."""
    with Path(path).open("rb") as file:
        content = mmap.mmap(file.fileno(), _LAYOUT.size, prot=mmap.PROT_READ)
    wall, wall_ns, monotonic = time.time, time.time_ns, time.monotonic

    def orders() -> Orders:
        return Orders(*_LAYOUT.unpack(content))

    def is_noisy() -> bool:
        return monotonic() < orders().noisy_until_s

    def now_s() -> float:
        _disturb(is_noisy)
        now = orders()
        if now.stalled_pid == os.getpid() and threading.current_thread().name == _ENGINE_THREAD:
            time.sleep(max(0.0, now.stalled_until_s - monotonic()))
        return monotonic()

    time.time = lambda: wall() + orders().clock_shift_s
    time.time_ns = lambda: wall_ns() + int(orders().clock_shift_s * 1e9)
    time.monotonic = now_s


def _disturb(is_noisy: Callable[[], bool]) -> None:
    """Stand between the messages and their readers, once these are imported."""
    codec = getattr(sys.modules.get("actors.process.frames"), "FrameCodec", None)
    if codec is not None and not hasattr(codec, "undisturbed"):
        codec.undisturbed = codec.feed
        codec.feed = _noisy_feed(codec.feed, is_noisy)
    index = getattr(sys.modules.get("router.routing.index"), "IndexState", None)
    if index is not None and not hasattr(index, "undisturbed"):
        index.undisturbed = index.report
        index.report = _noisy_report(index.report, is_noisy)


def _noisy_feed(feed: Callable[..., list[Any]], is_noisy: Callable[[], bool]) -> Callable[..., list[Any]]:
    held: list[Any] = []  # a process has one such channel

    @functools.wraps(feed)
    def noisy(self: Any, data: bytes) -> list[Any]:
        messages = feed(self, data)
        if not any(type(message).__name__ in _CHANNEL for message in messages):
            return messages
        late, held[:] = held[:], []
        if is_noisy():
            messages = [each for message in messages for each in _copies(message, held)]
        return [*messages, *late]

    return noisy


def _noisy_report(report: Callable[..., bool], is_noisy: Callable[[], bool]) -> Callable[..., bool]:
    held: list[Any] = []

    @functools.wraps(report)
    def noisy(self: Any, message: Any, now_s: float) -> bool:
        late, held[:] = held[:], []
        messages = _copies(message, held) if is_noisy() else [message]
        answers = [report(self, each, now_s) for each in (*messages, *late)]
        return any(answers)

    return noisy


def _copies(message: Any, held: list[Any]) -> list[Any]:
    """Return a message as often as it is to come now; a late one is put to those that are held."""
    match int(random.random() / _LIKELIHOOD):
        case 0:
            return []
        case 1:
            held.append(message)
            return []
        case 2:
            return [message, message]
        case _:
            return [message]


if VARIABLE in os.environ:
    install(os.environ[VARIABLE])
