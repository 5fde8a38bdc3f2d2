"""The GPUs of a pair: the target's and the draft's among those that Ray gave it."""

from __future__ import annotations

import logging
import os

from actors.settings import PairDevices
from cluster.placement.topology import Device, NodeTopology, read_topology
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


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
