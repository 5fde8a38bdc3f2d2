"""Publishes the changes of a pair's prefix cache in vLLM's format, over ZeroMQ, for other projects' routers.

The format is vLLM 0.33's (`vllm/distributed/kv_events.py`). A PUB socket sends [topic, sequence number, batch], and a
ROUTER socket at a port `REPLAY_OFFSET` above resends missed batches. The topic is empty. Blocks under a `cache_salt`
are left out, since such routers know only tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from engine.kv_cache.block_pool import BlockContent
from protos.block_keys import BlockKey, CacheDelta, split_keys
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

REPLAY_OFFSET = 100  # between the two ports
_MAX_BATCHES = 10_000  # that can be sent again
_MEDIUM = "GPU"  # vLLM's word for the pool that attention reads, on processors too
_END = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, Any]


class KVEventPublisher:
    """Publishes from its own thread. `stored` and `record` belong to the engine's thread and never wait."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_MAX_BATCHES)
        self._next_sequence = 0
        self._rank = 0
        self._is_open = True
        self._context: zmq.Context[Any] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replayer = self._context.socket(zmq.ROUTER)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> tuple[str, str]:
        """Listen, and return both addresses.

        Raises:
            ConfigError: all of the ports are in use.
        """
        num_ports = 64  # more than a node has pairs; each takes the next free port
        for rank in range(num_ports):
            endpoint, replay = _at(self._endpoint, rank), _at(self._endpoint, rank + REPLAY_OFFSET)
            try:
                self._publisher.bind(endpoint)
            except zmq.ZMQError as error:
                reason = str(error)
                continue
            try:
                self._replayer.bind(replay)
            except zmq.ZMQError as error:
                reason = str(error)
                self._publisher.unbind(self._publisher.get_string(zmq.LAST_ENDPOINT))
                continue
            self._rank = rank
            self._thread.start()
            logger.info("KV events at %s, replay at %s", endpoint, replay)
            return endpoint, replay
        raise ConfigError(
            f"pair.kv_events: cannot listen at {self._endpoint} and {REPLAY_OFFSET} ports above it, or at the next "
            f"{num_ports - 1} ports: {reason}; choose another port"
        )

    def stored(self, contents: Sequence[BlockContent], root: BlockKey) -> None:
        """Queue events for blocks that can be reused from now on. `root` is the parent of a first block."""
        events: list[Event] = []
        last: BlockKey | None = None
        for content in contents:
            if last is None or content.parent != last:
                parent = None if content.parent == root else _hash(content.parent)
                events.append(_stored_event(parent, len(content.token_ids)))
            events[-1]["block_hashes"].append(_hash(content.key))
            events[-1]["token_ids"] += content.token_ids
            last = content.key
        self._events.put(events)

    def record(self, delta: CacheDelta) -> None:
        """Queue events for removed blocks; `stored` reports new ones."""
        if delta.is_cleared:
            self._events.put([{"type": "AllBlocksCleared"}])
        if delta.removed:
            hashes = [_hash(key) for key in split_keys(delta.removed)]
            self._events.put([{"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}])

    def close(self) -> None:
        """Stop publishing; a second call does nothing."""
        self._is_open = False
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while self._is_open:
            if events := self._take():
                self._publish(events)
            while self._replayer.poll(0):
                self._replay(self._replayer)

    def _take(self) -> list[Event]:
        """Return all queued events; an empty list if none arrive for a while."""
        try:
            events = self._events.get(timeout=0.05)  # then the socket is polled for missed batches
            while not self._events.empty():
                events = [*events, *self._events.get()]
        except queue.Empty:
            return []
        return events

    def _publish(self, events: list[Event]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        self._sent.append((self._next_sequence, payload))
        sequence = self._next_sequence.to_bytes(8, "big")
        self._publisher.send_multipart((b"", sequence, payload))
        self._next_sequence += 1

    def _replay(self, socket: zmq.Socket[Any]) -> None:
        """Resend batches to one client that missed some. A client that does not read is not waited for."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request for KV events has %d frames; expected 3", len(frames))
            return
        client, _, first = frames
        for sequence, payload in self._sent:
            if sequence >= int.from_bytes(first, "big"):
                socket.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", _END, b""))


def _stored_event(parent: int | None, block_size: int) -> Event:
    return {
        "type": "BlockStored",
        "block_hashes": [],
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }


def _hash(key: BlockKey) -> int:
    """Return the last 64 bits of a key: Dynamo's router keeps no more."""
    return int.from_bytes(key[-8:], "big")


def _at(endpoint: str, offset: int) -> str:
    """Return the address with its port raised by `offset`."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + offset}"
