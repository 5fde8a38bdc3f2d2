"""The gRPC interface over a service in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from cluster.local.ports import free_port
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.grpc_api.api import GrpcApi
from router.grpc_api.reading_gate import ReadingGate, ReadingLimits
from router.grpc_api.server import start_grpc_server


@asynccontextmanager
async def grpc_channel(
    service: GenerationService,
    api_keys: ApiKeys | None = None,
    add_more: Callable[[grpc.aio.Server], str] | None = None,
    limits: ReadingLimits = ReadingLimits(),
) -> AsyncIterator[grpc.aio.Channel]:
    """Serve on a free port, and open a channel to it that may send a message of any size."""
    address = f"127.0.0.1:{free_port()}"
    keys = api_keys or ApiKeys()
    gate = ReadingGate(keys, service.metrics.count_request, limits=limits)
    server = await start_grpc_server(GrpcApi(service, keys), gate, address, add_more)
    try:
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            yield channel
    finally:
        await server.stop(None)
