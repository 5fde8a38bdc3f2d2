"""Carries KV blocks by Ray Direct Transport over NIXL: blocks stay where they were computed until the pair reads them.

The receiver reads the sender's memory directly, GPU to GPU where both have one. The sender does no work, and main
memory is not used. Ray's transport manager is used without its object references: a read of freed memory does not
fail, it returns garbage. The sender therefore frees on `release`, not by a reference count in a third process.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from actors.settings import KVTransportKind
from protos.errors import ConfigError

_NAME = "NIXL"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """A reference to blocks. `metadata` is Ray's, and is valid until the sender releases the blocks."""

    key: str
    metadata: Any


class NixlCarrier:
    """Sends and releases blocks in a prefill replica, and receives them in a pair.

    All methods block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._kept: dict[str, Tensor] = {}
        self._num_sent = 0
        self._lock = threading.Lock()  # for the manager's table of remote agents, which has no lock

    @property
    def stats(self) -> tuple[int, int]:
        """The number of chunks sent and the bytes not released yet. May be read from any thread."""
        return self._num_sent, sum(blocks.nbytes for blocks in list(self._kept.values()))

    @staticmethod
    def problem() -> str | None:
        """Return the reason why this process cannot use NIXL, or None if it can."""
        try:
            NixlCarrier()._manager.get_nixl_agent()
        except Exception as error:  # an import, a plug-in or a device fails; the caller logs the reason
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def send(self, blocks: Tensor) -> DirectBlocks:
        """Make `blocks` readable for receivers. They must not change until `release`."""
        key = f"kv-{next(self._numbers)}"
        metadata = self._manager.extract_tensor_transport_metadata(key, [blocks])
        self._kept[key] = blocks
        self._num_sent += 1
        return DirectBlocks(key, metadata)

    def release(self, sent: DirectBlocks) -> None:
        """Free blocks that have been read, or will never be."""
        self._manager.garbage_collect(sent.key, sent.metadata, [self._kept.pop(sent.key)])

    def receive(self, sent: DirectBlocks, timeout_s: float) -> Tensor:
        """Return a copy of the blocks, on the same kind of device as the sender's.

        Raises:
            RayDirectTransportError: the sender is gone.
            TimeoutError: the read took longer than `timeout_s`.
        """
        manager = self._manager
        way = manager.get_communicator_metadata(None, None, _NAME)
        with self._lock:
            request = manager.fetch_multiple_tensors(sent.key, sent.metadata, way)
            blocks: Tensor = manager.wait_fetch_complete(request, timeout_s)[0]
        return blocks

    @cached_property
    def _manager(self) -> Any:
        from ray.experimental.rdt.util import get_tensor_transport_manager  # of Ray's alpha: loaded where it is used

        return get_tensor_transport_manager(_NAME)


def choose_carrier(kind: KVTransportKind) -> NixlCarrier | None:
    """Return the carrier for `prefill.kv_transport`, or None for Ray's object store. Logs the reason.

    Raises:
        ConfigError: NIXL is configured, and this process cannot use it.
    """
    has_gpu = torch.cuda.is_available()
    is_configured = kind is KVTransportKind.OBJECT_STORE
    if is_configured or (kind is KVTransportKind.AUTO and not has_gpu):
        why = "as configured" if is_configured else "without a GPU, shared memory is fastest"
        logger.info("KV blocks go through Ray's object store: %s", why)
        return None
    problem = NixlCarrier.problem()
    if problem is None:
        logger.info("KV blocks go through NIXL (%s)", "GPU to GPU" if has_gpu else "main memory")
        return NixlCarrier()
    if kind is KVTransportKind.NIXL:
        raise ConfigError(
            f"prefill.kv_transport is 'nixl', which this process cannot use ({problem}); "
            "pip install 'outrider[direct]' on every node, or set it to 'object_store'"
        )
    logger.info("KV blocks go through Ray's object store, because NIXL cannot be used: %s", problem)
    return None
