"""KV events, read as vLLM's own subscriber example reads them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from actors.target import kv_event_publisher
from actors.target.kv_event_publisher import REPLAY_OFFSET
from actors.target.target_process import publish_kv_events
from cluster.local.serve_environment import free_ports
from engine.kv_cache.block_manager import BlockManager
from engine.sequence.sequence import TokenBlocks


class PublishedBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class MapBatch(PublishedBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint() -> str:
    """An address; its port and the port of its replays are free."""
    while True:
        [port] = free_ports(1)
        with socket.socket() as replays:
            try:
                replays.bind(("127.0.0.1", port + REPLAY_OFFSET))
            except (OSError, OverflowError):
                continue
        return f"tcp://127.0.0.1:{port}"


def fill(blocks: BlockManager, token_ids: list[int], salt: str = "") -> TokenBlocks:
    tokens = TokenBlocks(list(token_ids), salt)
    assert blocks.reserve(tokens, len(token_ids))
    tokens.num_computed_tokens = len(token_ids)
    blocks.publish(tokens, len(token_ids))
    return tokens


def subscribe(context: zmq.Context, endpoint: str) -> zmq.Socket:
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
    subscriber.connect(endpoint)
    return subscriber


def missed(context: zmq.Context, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """All batches from `first` on. vLLM's example asks through REQ, which reads one answer; DEALER reads all."""
    host, _, port = endpoint.rpartition(":")
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"{host}:{int(port) + REPLAY_OFFSET}")
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    batches = []
    while dealer.poll(5000):
        _, sequence, payload = dealer.recv_multipart()
        if int.from_bytes(sequence, "big", signed=True) == -1:
            return batches
        batches.append((int.from_bytes(sequence, "big"), payload))
    pytest.fail("the end did not come")


def all_events(context: zmq.Context, endpoint: str, count: int) -> list[Any]:
    """The events so far, once there are `count`."""
    for _ in range(100):
        batches = [msgspec.msgpack.decode(payload, type=MapBatch) for _, payload in missed(context, endpoint, 0)]
        events = [event for batch in batches for event in batch.events]
        if len(events) >= count:
            return events
    pytest.fail(f"{len(events)} events have come")


def test_blocks_come_as_a_chain_and_go(context: zmq.Context, endpoint: str) -> None:
    blocks = BlockManager(num_blocks=5, block_size=4, model_version="m")
    publisher = publish_kv_events(endpoint, blocks)
    first = fill(blocks, list(range(8)))
    second = fill(blocks, [*range(8), 8, 9, 10, 11])
    stored, longer = all_events(context, endpoint, 2)
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, list(range(8)), 4)
    assert len(stored.block_hashes) == 2
    assert (longer.parent_block_hash, longer.token_ids) == (stored.block_hashes[1], [8, 9, 10, 11])
    blocks.release(first)
    blocks.release(second)
    fill(blocks, list(range(100, 120)))
    events = all_events(context, endpoint, 4)
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert {key for event in removed for key in event.block_hashes} == {*stored.block_hashes, *longer.block_hashes}
    publisher.close()
    publisher.close()


def test_a_subscriber_reads_numbered_batches_and_asks_for_those_it_missed(
    context: zmq.Context, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "_MAX_BATCHES", 2)
    blocks = BlockManager(num_blocks=64, block_size=4, model_version="m")
    publisher = publish_kv_events(endpoint, blocks)
    subscriber = subscribe(context, endpoint)
    sequence = -1
    for start in range(0, 4000, 4):  # until the subscription has reached the publisher
        blocks.release(fill(blocks, list(range(start, start + 4))))
        if subscriber.poll(10):
            topic, number, payload = subscriber.recv_multipart()
            sequence = int.from_bytes(number, "big")
            batch = msgspec.msgpack.decode(payload, type=MapBatch)
            break
    assert topic == b""
    assert batch.ts > 0
    assert batch.data_parallel_rank == 0
    assert isinstance(batch.events[0], BlockStored | BlockRemoved)
    last = missed(context, endpoint, sequence)
    assert last[0] == (sequence, payload) or len(last) == 2  # no more than two are kept
    publisher.close()


def test_salted_blocks_are_not_published(context: zmq.Context, endpoint: str) -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, model_version="m")
    publisher = publish_kv_events(endpoint, blocks)
    fill(blocks, [1, 2, 3, 4], salt="tenant")
    fill(blocks, [5, 6, 7, 8])
    [stored] = all_events(context, endpoint, 1)
    assert (stored.token_ids, stored.medium) == ([5, 6, 7, 8], "GPU")
    publisher.close()


def test_a_second_pair_of_a_node_takes_the_next_ports(context: zmq.Context, endpoint: str) -> None:
    managers = [BlockManager(num_blocks=8, block_size=4, model_version="m") for _ in range(2)]
    publishers = [publish_kv_events(endpoint, blocks) for blocks in managers]
    assert publishers[0]._rank == 0
    assert publishers[1]._rank > 0
    for publisher in publishers:
        publisher.close()
