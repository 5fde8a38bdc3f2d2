"""Blocks that stay where they were computed until the pair has read them: Ray Direct Transport over NIXL.

The receiver reads the sender's memory, GPU to GPU where both are there, without the sender's help and without main
memory between. Ray's transport manager is used without its object references: a read of freed memory does not fail, it
brings rubbish, so who may free when is said here and not left to a reference count in a third process.
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
    """`send` and `release` in a prefill replica, `receive` in a pair; all of them wait, and may be called from any
    thread.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._kept: dict[str, Tensor] = {}
        self._num_sent = 0
        self._lock = threading.Lock()  # the manager's table of remote agents has none

    @property
    def stats(self) -> DirectStats:
        """What was sent, and what of it lies here still; may be read from any thread."""
        return DirectStats(self._num_sent, sum(blocks.nbytes for blocks in list(self._kept.values())))

    @staticmethod
    def problem() -> str | None:
        """What keeps this process from using NIXL; None where nothing does."""
        try:
            NixlCarrier()._manager.get_nixl_agent()
        except Exception as error:  # an import, a plug-in or a device: whatever it is, the user must read it
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
        """Nobody reads them any more."""
        self._manager.garbage_collect(sent.key, sent.metadata, [self._kept.pop(sent.key)])

    def receive(self, sent: DirectBlocks, timeout_s: float) -> Tensor:
        """A copy of the blocks, on the kind of device they lie on.

        Raises:
            RayDirectTransportError: the sender is gone.
            TimeoutError: it took longer.
        """
        manager = self._manager
        way = manager.get_communicator_metadata(None, None, _NAME)
        with self._lock:
            request = manager.fetch_multiple_tensors(sent.key, sent.metadata, way)
            (blocks,) = manager.wait_fetch_complete(request, timeout_s)
        return blocks

    @cached_property
    def _manager(self) -> Any:
        from ray.experimental.rdt.util import get_tensor_transport_manager  # of Ray's alpha: loaded where it is used

        return get_tensor_transport_manager(_NAME)
