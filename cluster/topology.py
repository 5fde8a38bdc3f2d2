"""The devices of a node that NVLink joins; read from NVML, or from a record of another machine.

Ray counts GPUs and knows nothing of the links between them, so pinning a pair to neighbours needs this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import pynvml

from actors.settings import PairDevices
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `index` is its number on the node, before any CUDA_VISIBLE_DEVICES, which may name it by `uuid` too.

    `instances` are the bytes of the MIG instances of a divided GPU, by their ids for CUDA_VISIBLE_DEVICES; a whole one
    has none.
    """

    index: int
    name: str
    memory_bytes: int
    uuid: str = ""
    instances: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeTopology:
    """The devices of one node and the pairs (lower index first) that NVLink joins, through a bridge or a switch."""

    devices: tuple[Device, ...] = ()
    nvlinks: frozenset[tuple[int, int]] = frozenset()
    cuda_version: tuple[int, int] | None = None  # the latest that the driver runs; None if unknown

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
        """Return a device's group; a device outside this topology is a group of one."""
        return next((group for group in self.groups if index in group), (index,))

    def device_of(self, device_id: str) -> Device | None:
        """Return the GPU that an index, a UUID (or the beginning of one) or an id of a MIG instance names; or None."""
        if device_id.isdigit():
            return next((each for each in self.devices if each.index == int(device_id)), None)
        for each in self.devices:
            if each.uuid.startswith(device_id) or device_id in each.instances:
                return each
        return None

    def memory_of(self, visible: str | None) -> list[int]:
        """Return the bytes of the GPUs, or instances, that CUDA_VISIBLE_DEVICES lists, in its order; None lists all."""
        if visible is None:
            parts = [each.instances.values() or (each.memory_bytes,) for each in self.devices]
            return [size for sizes in parts for size in sizes]
        found = []
        for device_id in filter(None, (each.strip() for each in visible.split(","))):
            device = self.device_of(device_id)
            if device is None:  # CUDA ignores all devices after an unknown id
                break
            found.append(device.instances.get(device_id, device.memory_bytes))
        return found

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
        Device(
            index,
            _text(nvml.nvmlDeviceGetName(handle)),
            nvml.nvmlDeviceGetMemoryInfo(handle).total,
            _text(nvml.nvmlDeviceGetUUID(handle)),
            _instances(nvml, handle),
        )
        for index, handle in enumerate(handles)
    )
    linked = (pair for pair in combinations(range(len(handles)), 2) if _is_linked(nvml, *(handles[i] for i in pair)))
    return NodeTopology(devices, frozenset(linked), _cuda_version(nvml))


def _instances(nvml: Any, handle: Any) -> dict[str, int]:
    """Return the instances of a GPU; empty for a whole one."""
    try:
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return {}
    found = {}
    for index in range(most):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found[_text(nvml.nvmlDeviceGetUUID(part))] = int(nvml.nvmlDeviceGetMemoryInfo(part).total)
        except nvml.NVMLError:
            continue  # there is no instance of this number
    return found


def _cuda_version(nvml: Any) -> tuple[int, int] | None:
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion()  # 12040 for 12.4
    except nvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def _is_linked(nvml: Any, left: Any, right: Any) -> bool:
    """True if peer traffic between two devices goes over NVLink, through a bridge or NVSwitch."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(left, right, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False  # a driver or a virtual machine that does not report it has no NVLink to rely on
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def choose_devices(
    assigned: tuple[str, ...], topology: NodeTopology, num_ranks: int = 1, draft_gpu: str | int = "auto"
) -> PairDevices:
    """Divide a pair's devices (indices, UUIDs or MIG ids) among target and draft.

    Raises:
        ConfigError: the node has NVLink and the devices are in different NVLink groups, or the ranks would get cards
            of different kinds, or instances of divided cards, which cannot reach each other.
    """
    if not assigned:
        return PairDevices()
    cards = [topology.device_of(each) for each in assigned]
    known = [card.index for card in cards if card is not None]
    if topology.nvlinks and known and not set(known) <= set(topology.group_of(known[0])):
        raise ConfigError(
            f"the pair was given GPUs {_and(assigned)}, which no NVLink joins; Ray gives them in the order of "
            f"CUDA_VISIBLE_DEVICES: stop other users of this node's GPUs, and start its Ray with "
            f"CUDA_VISIBLE_DEVICES={linked_order(topology, len(assigned))} (seen: {topology})"
        )
    if num_ranks > 1:
        _check_alike(assigned[:num_ranks], cards[:num_ranks])
    targets = assigned[:num_ranks]
    if isinstance(draft_gpu, int):
        return PairDevices(targets, targets[draft_gpu])
    return PairDevices(targets, assigned[-1])


def linked_order(topology: NodeTopology, num_gpus: int) -> str:
    """Return a CUDA_VISIBLE_DEVICES order whose runs of `num_gpus` devices each share an NVLink group.

    Ray assigns devices in this order. Leftover devices of a group, too few for another pair, come last.
    """
    first: list[int] = []
    rest: list[int] = []
    for group in topology.groups:
        num_whole = len(group) // num_gpus * num_gpus
        first += group[:num_whole]
        rest += group[num_whole:]
    return ",".join(map(str, first + rest))


def order_devices(num_gpus: int | None, topology: NodeTopology | None = None) -> dict[str, str]:
    """Return the variables to start this node's Ray with, so that NVLink joins the `num_gpus` of each pair.

    Return no variables if the operator has set CUDA_VISIBLE_DEVICES, without NVLink, or on a node of divided GPUs.
    """
    if num_gpus is None or num_gpus < 2 or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    topology = topology or read_topology()
    if not topology.nvlinks or any(device.instances for device in topology.devices):
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": linked_order(topology, num_gpus)}


def _check_alike(ids: tuple[str, ...], cards: list[Device | None]) -> None:
    """Raise ConfigError unless a target's ranks have whole cards of one kind: the slowest would delay all."""
    if any(each.startswith("MIG-") for each in ids):
        raise ConfigError(
            f"target.tensor_parallel_size is {len(ids)}, and the pair was given instances of divided GPUs, "
            f"{_and(ids)}, which cannot reach each other; set it to 1, or switch MIG off"
        )
    kinds = {(card.name, card.memory_bytes) for card in cards if card is not None}
    if len(kinds) > 1:
        seen = ", ".join(f"{name} with {memory / (1 << 30):.0f} GiB" for name, memory in sorted(kinds))
        raise ConfigError(
            f"target.tensor_parallel_size is {len(ids)}, and the pair was given GPUs {_and(ids)} of different kinds "
            f"({seen}); start Ray with CUDA_VISIBLE_DEVICES set to GPUs of one kind"
        )


def _and(ids: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(ids[:-1]), ids[-1])))


def pin_devices(
    assigned: tuple[str, ...], num_ranks: int = 1, draft_gpu: str | int = "auto", num_gpus: int = 0
) -> PairDevices:
    """Choose devices as `choose_devices` does, on the node this runs on. Fewer than `num_gpus` are refused."""
    if len(assigned) < num_gpus:
        raise ConfigError(
            f"a pair needs {num_gpus} GPUs, and Ray gave it {len(assigned)}; it does not compute on a processor instead"
        )
    devices = choose_devices(assigned, topology := read_topology(), num_ranks, draft_gpu)
    if assigned:
        logger.info("target on GPUs %s, draft on GPU %s of %s", devices.targets, devices.draft, topology)
    if num_ranks > 1 and assigned and not topology.nvlinks:
        logger.warning("no NVLink joins the target's %d GPUs: every layer waits for slower sums", num_ranks)
    return devices
