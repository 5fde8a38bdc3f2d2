"""Blocks that stay where they were computed until the pair has read them: Ray Direct Transport over NIXL.

The receiver reads the sender's memory, GPU to GPU where both are there, without the sender's help and without main
memory between. Ray's transport manager is used without its object references: a read of freed memory does not fail, it
returns garbage, so the sender frees on `release`, not by a reference count in a third process.
"""

from __future__ import annotations

import threading
from functools import cached_property
from itertools import count
from typing import Any

from torch import Tensor

from actors.kv_transfer.direct_blocks import DirectBlocks, DirectStats

_NAME = "NIXL"


class NixlCarrier:
    """Sends and releases blocks in a prefill replica, receives them in a pair.

    All methods block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._kept: dict[str, Tensor] = {}
        self._num_sent = 0
        self._lock = threading.Lock()  # the manager's table of remote agents has none

    @property
    def stats(self) -> DirectStats:
        """Counts of chunks sent and of bytes not released yet; may be read from any thread."""
        return DirectStats(self._num_sent, sum(blocks.nbytes for blocks in list(self._kept.values())))

    @staticmethod
    def problem() -> str | None:
        """Describe what keeps this process from using NIXL; None where nothing does."""
        try:
            NixlCarrier()._manager.get_nixl_agent()
        except Exception as error:  # an import, a plug-in or a device: the user reads the reason
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def send(self, blocks: Tensor) -> DirectBlocks:
        """Let `blocks` be read from now on. They must not change until `release`."""
        key = f"kv-{next(self._numbers)}"
        metadata = self._manager.extract_tensor_transport_metadata(key, [blocks])
        self._kept[key] = blocks
        self._num_sent += 1
        return DirectBlocks(key, metadata)

    def release(self, sent: DirectBlocks) -> None:
        """Free blocks that have been read, or will not be."""
        self._manager.garbage_collect(sent.key, sent.metadata, [self._kept.pop(sent.key)])

    def receive(self, sent: DirectBlocks, timeout_s: float) -> Tensor:
        """Copy the blocks, to the kind of device they are on.

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
