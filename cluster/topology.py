"""The devices of a node that NVLink joins; read from NVML, or from a record of another machine.

Ray counts GPUs and knows nothing of the links between them, so pinning a pair to neighbours needs this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `index` is its number on the node, before any CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class NodeTopology:
    """The devices of one node and the pairs (lower index first) that NVLink joins, through a bridge or a switch."""

    devices: tuple[Device, ...] = ()
    nvlinks: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that reach each other over NVLink, as sorted indices; one without NVLink is a group of its own."""
        group_of = {device.index: {device.index} for device in self.devices}
        for left, right in sorted(self.nvlinks):
            joined = group_of[left] | group_of[right]
            for index in joined:
                group_of[index] = joined
        return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))

    def group_of(self, index: int) -> tuple[int, ...]:
        """Return the group a device belongs to; a device this topology does not know stands alone."""
        return next((group for group in self.groups if index in group), (index,))

    def __str__(self) -> str:
        if not self.devices:
            return "no GPU"
        names = ", ".join(sorted({device.name for device in self.devices}))
        groups = " ".join("{" + ",".join(map(str, group)) + "}" for group in self.groups)
        return f"{len(self.devices)} GPUs ({names}), NVLink groups {groups}"


def read_topology(nvml: Any = pynvml) -> NodeTopology:
    """This node's topology; a machine without an NVIDIA driver has no devices."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return NodeTopology()
    try:
        return _read(nvml)
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> NodeTopology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = tuple(
        Device(index, _text(nvml.nvmlDeviceGetName(handle)), nvml.nvmlDeviceGetMemoryInfo(handle).total)
        for index, handle in enumerate(handles)
    )
    linked = (pair for pair in combinations(range(len(handles)), 2) if _is_linked(nvml, *(handles[i] for i in pair)))
    return NodeTopology(devices, frozenset(linked))


def _is_linked(nvml: Any, left: Any, right: Any) -> bool:
    """True if peer traffic between two devices goes over NVLink, through a bridge or NVSwitch."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(left, right, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False  # a driver or a virtual machine that does not report it has no NVLink to rely on
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
