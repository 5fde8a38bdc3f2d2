"""How KV blocks come from a prefill replica: what deploy.yaml asks for, against what this process has."""

from __future__ import annotations

import logging

import torch

from actors.kv_transfer.nixl_carrier import NixlCarrier
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_carrier(wish: str) -> NixlCarrier | None:
    """The way of `prefill.kv_transport`: NIXL, or Ray's object store (None). The reason is logged.

    Raises:
        ConfigError: it asks for NIXL, and this process cannot have it.
    """
    has_gpu = torch.cuda.is_available()
    if wish == "object_store" or (wish == "auto" and not has_gpu):
        why = "as configured" if wish == "object_store" else "there is no GPU, and shared memory is the fastest way"
        logger.info("KV blocks go through Ray's object store: %s", why)
        return None
    problem = NixlCarrier.problem()
    if problem is None:
        logger.info("KV blocks are read by NIXL (%s)", "GPU to GPU" if has_gpu else "main memory")
        return NixlCarrier()
    if wish == "nixl":
        raise ConfigError(
            f"prefill.kv_transport is 'nixl', which this process cannot use ({problem}); "
            "pip install 'outrider[direct]' on every node, or set it to 'object_store'"
        )
    logger.info("KV blocks go through Ray's object store, for NIXL cannot be used: %s", problem)
    return None
