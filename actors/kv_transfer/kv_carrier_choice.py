"""The choice of the way of KV blocks: the kind that deploy.yaml sets, as far as this process has it."""

from __future__ import annotations

import logging

import torch

from actors.kv_transfer.nixl_carrier import NixlCarrier
from actors.settings import KVTransportKind
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_carrier(kind: KVTransportKind) -> NixlCarrier | None:
    """Return the carrier for `prefill.kv_transport`, None for Ray's object store; the reason is logged.

    Raises:
        ConfigError: it asks for NIXL, and this process cannot have it.
    """
    has_gpu = torch.cuda.is_available()
    is_configured = kind is KVTransportKind.OBJECT_STORE
    if is_configured or (kind is KVTransportKind.AUTO and not has_gpu):
        why = "as configured" if is_configured else "there is no GPU, and shared memory is the fastest way"
        logger.info("KV blocks go through Ray's object store: %s", why)
        return None
    problem = NixlCarrier.problem()
    if problem is None:
        logger.info("KV blocks are read by NIXL (%s)", "GPU to GPU" if has_gpu else "main memory")
        return NixlCarrier()
    if kind is KVTransportKind.NIXL:
        raise ConfigError(
            f"prefill.kv_transport is 'nixl', which this process cannot use ({problem}); "
            "pip install 'outrider[direct]' on every node, or set it to 'object_store'"
        )
    logger.info("KV blocks go through Ray's object store, for NIXL cannot be used: %s", problem)
    return None
