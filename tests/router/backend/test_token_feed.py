"""Tokens of pairs on the same node arrive by the feed, in order, and only from processes of our user."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from protos.errors import UnavailableError
from protos.frames import FrameCodec
from protos.messages import FinishReason, TokenChunk
from router.backend import token_feed
from router.backend.token_feed import Inbox, TokenListener

LAST = TokenChunk("r", (3,), (), FinishReason.LENGTH)


async def connect(feed: TokenListener) -> asyncio.StreamWriter:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0{await feed.address()}")
    return (await asyncio.open_unix_connection(sock=peer))[1]


async def test_a_frame_is_sorted_into_the_inboxes() -> None:
    feed = TokenListener()
    first, second = feed.open("first"), feed.open("second")
    writer = await connect(feed)
    chunks = [
        TokenChunk("second", (1,)),
        TokenChunk("gone", (2,)),
        TokenChunk("first", (3,)),
        TokenChunk("first", (4,)),
    ]
    writer.write(FrameCodec(None).encode(chunks))
    assert [chunk.token_ids for chunk in await first.next()] == [(3,), (4,)]
    assert await second.next() == [TokenChunk("second", (1,))]
    writer.close()


async def test_a_closed_inbox_takes_no_more() -> None:
    feed = TokenListener()
    inbox, other = feed.open("r"), feed.open("other")
    feed.close("r")
    writer = await connect(feed)
    writer.write(FrameCodec(None).encode([TokenChunk("r", (1,)), TokenChunk("other", (2,))]))
    await other.next()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await inbox.next()
    writer.close()


async def test_bytes_that_are_no_frame_end_the_connection_and_not_the_feed() -> None:
    feed = TokenListener()
    inbox = feed.open("r")
    broken, sound = await connect(feed), await connect(feed)
    broken.write(b"\x05\0\0\0wrong")
    sound.write(FrameCodec(None).encode([LAST]))
    assert await inbox.next() == [LAST]
    await asyncio.wait_for(broken.wait_closed(), 5.0) if broken.is_closing() else broken.close()
    sound.close()


async def test_an_inbox_gives_what_is_there_before_the_error() -> None:
    inbox = Inbox()
    inbox.put([TokenChunk("r", (1,))])
    inbox.fail(UnavailableError("lost"))
    assert await inbox.next() == [TokenChunk("r", (1,))]
    with pytest.raises(UnavailableError):
        await inbox.next()


async def test_tokens_may_come_behind_the_end_of_serves_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    inbox.end()
    asyncio.get_running_loop().call_later(0.05, inbox.put, [LAST])
    assert await inbox.next() == [LAST]
    monkeypatch.setattr(token_feed, "_LATE_TOKENS_TIMEOUT_S", 0.05)
    with pytest.raises(StopAsyncIteration):
        await inbox.next()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_a_stranger_is_not_heard() -> None:
    feed = TokenListener()
    inbox = feed.open("r")
    script = """
import os, socket, sys
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect("\\0" + sys.argv[1])
peer.sendall(bytes.fromhex(sys.argv[2]))
assert peer.recv(1) == b""
"""
    command = [sys.executable, "-c", script, await feed.address(), FrameCodec(None).encode([LAST]).hex()]
    stranger = await asyncio.to_thread(subprocess.run, command, timeout=30, check=False, stderr=subprocess.PIPE)
    assert stranger.returncode == 0 or b"reset" in stranger.stderr.lower() or b"broken pipe" in stranger.stderr.lower()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await inbox.next()
