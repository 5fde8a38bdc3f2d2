"""The GPUs of a pair: the target's and the draft's among those that Ray gave it."""

from __future__ import annotations

import logging

from actors.settings import PairDevices
from cluster.topology import NodeTopology, read_topology
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_devices(
    assigned: tuple[int, ...], topology: NodeTopology, num_ranks: int = 1, draft_gpu: str | int = "auto"
) -> PairDevices:
    """Divide the devices Ray gave a pair; they must be neighbours if the node has any.

    Raises:
        ConfigError: the node has NVLink, and these devices lie in different groups.
    """
    if not assigned:
        return PairDevices()
    strangers = [index for index in assigned if index not in topology.group_of(assigned[0])]
    if topology.nvlinks and strangers:
        raise ConfigError(
            f"the pair was given GPUs {_and(assigned)}, which no NVLink joins; free a whole group, "
            f"or start Ray with CUDA_VISIBLE_DEVICES set to complete groups (seen: {topology})"
        )
    targets = assigned[:num_ranks]
    if isinstance(draft_gpu, int):
        return PairDevices(targets, targets[draft_gpu])
    return PairDevices(targets, assigned[-1])


def _and(indices: tuple[int, ...]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, indices[:-1])), str(indices[-1]))))


def pin_devices(assigned: tuple[int, ...], num_ranks: int = 1, draft_gpu: str | int = "auto") -> PairDevices:
    """Choose devices as `choose_devices` does, on the node this runs on."""
    devices = choose_devices(assigned, topology := read_topology(), num_ranks, draft_gpu)
    if assigned:
        logger.info("target on GPUs %s, draft on GPU %s of %s", devices.targets, devices.draft, topology)
    if num_ranks > 1 and assigned and not topology.nvlinks:
        logger.warning("no NVLink joins the target's %d GPUs: every layer waits for slower sums", num_ranks)
    return devices
