"""The pair's end of a stream from a prefill replica, which is scripted: the stream is ended after the last read."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.kv_transport import DirectBlocks, NixlCarrier, PrefillReply, PrefillTransport
from engine.accounting.engine_stats import FetchFailure
from engine.remote_prefill.kv_transfer import (
    ChunkHeader,
    FetchAccepted,
    FetchEnd,
    FetchNews,
    FetchOrder,
    KVChunk,
    KVLayout,
    RemoteLoad,
)

LOAD = RemoteLoad("replica", 0, 100.0)
BLOCKS = np.arange(12, dtype=np.uint8).reshape(2, 6)
TIMEOUT_S = 20.0


class ScriptedPrefill:
    """A handle whose streams yield these replies; an exception among them is raised."""

    def __init__(self, *replies: PrefillReply | Exception) -> None:
        self._replies = replies
        self.num_ended = 0

    def options(self, **options: object) -> ScriptedPrefill:
        return self

    def remote(self, *args: object, **options: object) -> ScriptedStream:
        return ScriptedStream(self, self._answer())

    async def _answer(self) -> AsyncIterator[PrefillReply]:
        for reply in self._replies:
            if isinstance(reply, Exception):
                raise reply
            yield reply


class ScriptedStream:
    def __init__(self, prefill: ScriptedPrefill, replies: AsyncIterator[PrefillReply]) -> None:
        self._prefill = prefill
        self._replies = replies

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> PrefillReply:
        return await anext(self._replies)

    def cancel(self) -> None:
        self._prefill.num_ended += 1


class SlowCarrier:
    """Reads when it may."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.num_readers = 0

    def receive(self, sent: DirectBlocks, timeout_s: float) -> Tensor:
        self.num_readers += 1
        assert self.may_read.wait(TIMEOUT_S)
        self.num_readers -= 1
        return torch.from_numpy(BLOCKS)


def opened(prefill: ScriptedPrefill, carrier: SlowCarrier | None = None) -> PrefillTransport:
    transport = PrefillTransport(cast(Any, prefill), cast(NixlCarrier | None, carrier))
    transport.open(KVLayout("float32", 16, (), "v"), torch.device("cpu"), on_news=lambda: None)
    transport.start(FetchOrder(7, "a", (1,) * 32, 0, "", TIMEOUT_S))
    return transport


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def news_of(transport: PrefillTransport) -> list[FetchNews]:
    heard: list[FetchNews] = []
    until(lambda: bool(heard.extend(transport.poll(4)) or (heard and isinstance(heard[-1], FetchEnd))))
    return heard


def test_a_stream_becomes_news_and_is_ended() -> None:
    prefill = ScriptedPrefill(FetchAccepted(7, LOAD), ChunkHeader(7, 0, LOAD), BLOCKS, FetchEnd(7))
    accepted, chunk, end = news_of(opened(prefill))
    assert accepted == FetchAccepted(7, LOAD)
    assert isinstance(chunk, KVChunk)
    assert np.array_equal(chunk.blocks.numpy(), BLOCKS)
    assert end == FetchEnd(7)
    until(lambda: prefill.num_ended == 1)


def test_a_broken_stream_ends_the_fetch_as_lost() -> None:
    end = news_of(opened(ScriptedPrefill(FetchAccepted(7, LOAD), RuntimeError("the node is gone"))))[-1]
    assert end == FetchEnd(7, FetchFailure.LOST, "RuntimeError: the node is gone")


@pytest.mark.parametrize("is_given_up", [False, True])
def test_the_stream_is_not_ended_while_its_blocks_are_read(is_given_up: bool) -> None:
    prefill = ScriptedPrefill(FetchAccepted(7, LOAD), ChunkHeader(7, 0, LOAD), DirectBlocks("k", None), FetchEnd(7))
    carrier = SlowCarrier()
    transport = opened(prefill, carrier)
    until(lambda: carrier.num_readers == 1)
    if is_given_up:
        transport.cancel(7)
    time.sleep(0.05)
    assert prefill.num_ended == 0, "the replica would free blocks during the read"
    carrier.may_read.set()
    until(lambda: prefill.num_ended == 1)
    assert carrier.num_readers == 0
    if not is_given_up:
        assert [type(each) for each in news_of(transport)] == [FetchAccepted, KVChunk, FetchEnd]
