"""Chooses how KV blocks travel: the kind set in deploy.yaml, as far as this process supports it."""

from __future__ import annotations

import logging

import torch

from actors.kv_transfer.nixl_carrier import NixlCarrier
from actors.settings import KVTransportKind
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


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
