"""A pair's chunks leave by the feed where the ingress listens on this node; a feed that is lost fails its streams."""

from __future__ import annotations

import asyncio
import secrets
import socket

import pytest

from actors.pair import token_feed
from actors.pair.token_feed import TokenFeeds, TokenStream
from protos.errors import UnavailableError
from protos.messages import FinishReason, TokenChunk
from router.backend.token_feed import TokenListener


async def test_chunks_of_all_streams_leave_in_one_frame_and_streams_end() -> None:
    listener, feeds = TokenListener(), TokenFeeds()
    feed = await feeds.open(await listener.address())
    assert feed is not None
    assert await feeds.open(await listener.address()) is feed
    inboxes = {name: listener.open(name) for name in ("a", "b")}
    streams = {name: TokenStream() for name in inboxes}
    for number, (name, stream) in enumerate(streams.items()):
        feed.attach(stream)
        stream.push(TokenChunk(name, (number,)))
    feeds.flush()
    assert [(await inboxes[name].next())[0].token_ids for name in "ab"] == [(0,), (1,)]
    assert await streams["a"].next(0.01) == []
    assert not streams["a"].is_finished
    streams["a"].push(TokenChunk("a", (2,), (), FinishReason.LENGTH))
    assert await streams["a"].next() == []
    assert streams["a"].is_finished
    feeds.flush()
    assert (await inboxes["a"].next())[0].token_ids == (2,)


async def test_without_a_listener_there_is_no_feed() -> None:
    feeds = TokenFeeds()
    assert await feeds.open("") is None
    assert await feeds.open(f"outrider-{secrets.token_hex(16)}") is None


def listen() -> tuple[socket.socket, str]:
    address = f"outrider-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen()
    return listener, address


async def test_streams_of_a_lost_feed_fail_and_the_next_request_gets_a_new_one() -> None:
    listener, address = listen()
    feeds, stream, other = TokenFeeds(), TokenStream(), TokenStream()
    feed = await feeds.open(address)
    assert feed is not None
    feed.attach(stream)
    feed.attach(other)
    feed.detach(other)
    listener.accept()[0].close()
    with pytest.raises(UnavailableError):
        await stream.next(5.0)
    assert await other.next(0.01) == []
    assert not feed.is_open
    late = TokenStream()
    feed.attach(late)
    late.push(TokenChunk("late", (1,)))
    assert await late.next() == [TokenChunk("late", (1,))]
    assert await feeds.open(address) is not feed
    listener.close()


async def test_an_ingress_that_does_not_read_loses_its_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_feed, "_MAX_BACKLOG_BYTES", 1 << 16)
    listener, address = listen()
    feeds, stream = TokenFeeds(), TokenStream()
    feed = await feeds.open(address)
    assert feed is not None
    feed.attach(stream)
    peer, _ = listener.accept()
    for _ in range(100):
        stream.push(TokenChunk("r", tuple(range(5000))))
        feeds.flush()
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await stream.next(5.0)
    peer.close()
    listener.close()
