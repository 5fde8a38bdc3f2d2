"""Frames survive any cut of the stream, and no wait on a socket exceeds its limit."""

import random
import socket
import time
from pathlib import Path

import pytest

from actors.draft.draft_link import Commit, DraftMessage, Hello, Offers, Round
from actors.process.frames import FrameConnection, FrameListener, connect
from actors.shell_messages import Refused
from engine.batch.draft import Draft, Offer, SparseDistribution
from protos.errors import OverloadedError
from protos.frames import MAX_FRAME_BYTES, ConnectionLostError, FrameCodec

MESSAGES = [
    Hello(1, "v"),
    Offers((Offer("a", 3, Draft((1, 2), (SparseDistribution((1, 2), (65535, 1)),))),), ("b",)),
    Offers(),
]


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    connections = FrameConnection(left, DraftMessage), FrameConnection(right, Round)
    yield connections
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("seed", range(5))
def test_messages_survive_any_cut_of_the_stream(seed: int):
    codec: FrameCodec = FrameCodec(DraftMessage)
    data = b"".join(codec.encode(message) for message in MESSAGES)
    rng = random.Random(seed)
    received = []
    while data:
        size = rng.randint(1, 40)
        received += codec.feed(data[:size])
        data = data[size:]
    assert received == MESSAGES


def test_a_frame_longer_than_the_limit_ends_the_connection():
    codec: FrameCodec = FrameCodec(DraftMessage)
    with pytest.raises(ConnectionLostError, match="longer than the limit"):
        codec.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_a_frame_that_is_no_message_ends_the_connection():
    codec: FrameCodec = FrameCodec(DraftMessage)
    with pytest.raises(ConnectionLostError, match="does not follow the protocol"):
        codec.feed(b"\x02\0\0\0\x91\x05")


def test_receive_returns_empty_at_its_deadline(pair):
    began_s = time.monotonic()
    assert pair[0].receive(0.05) == []
    assert 0.04 < time.monotonic() - began_s < 10.0


def test_receive_raises_when_the_peer_is_gone(pair):
    pair[1].close()
    with pytest.raises(ConnectionLostError):
        pair[0].receive(1.0)


def test_send_to_a_peer_that_does_not_read_ends_at_its_timeout(pair):
    news = Round(commits=(Commit("a", 0, tuple(range(200_000)), 4),))
    began_s = time.monotonic()
    with pytest.raises(ConnectionLostError, match="did not read"):
        send_many(pair[0], news)
    assert time.monotonic() - began_s < 8.0  # a hundred time-outs would be ten seconds


def send_many(connection: FrameConnection, news: Round) -> None:
    for _ in range(100):
        connection.send(news, 0.1)


def test_a_restarted_listener_takes_its_path_over(folder: Path):
    path = folder / "x.sock"
    first = FrameListener(path)
    first.close()
    assert connect(path, Round) is None
    second = FrameListener(path)
    client = connect(path, Round)
    assert client is not None
    server = second.accept(DraftMessage, 20.0)
    assert server is not None
    server.send(Round(("a",)), 1.0)
    assert client.receive(1.0) == [Round(("a",))]


def test_connect_returns_none_without_a_listener():
    assert connect(Path("/nonexistent/socket"), Round) is None


def test_an_error_crosses_the_socket_as_it_was_raised():
    error = Refused.of("a", OverloadedError("full", param="x", retry_after_s=2.0)).error()
    assert type(error) is OverloadedError
    assert (error.message, error.param, error.retry_after_s) == ("full", "x", 2.0)
