"""The gRPC frontend on its own server, for deployments without Serve's proxy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import outrider_pb2_grpc
from protos.errors import ConfigError
from router.client_limits import KEEP_ALIVE_S, REQUEST_TIMEOUT_S
from router.grpc_api.api import SERVICE_NAME, GrpcApi
from router.grpc_api.reading_gate import MAX_MESSAGE_BYTES, ReadingGate

_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
MAX_STREAMS = 100  # per connection
_SERVICES = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)


def connection_limits(max_connections: int) -> list[tuple[str, int]]:
    """Return the options of a server without a proxy in front; it allows as many streams as HAProxy does."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", REQUEST_TIMEOUT_S * 1000),
        ("grpc.max_connection_idle_ms", KEEP_ALIVE_S * 1000),
    ]


async def start_grpc_server(
    api: GrpcApi,
    gate: ReadingGate,
    address: str,
    add_more: Callable[[grpc.aio.Server], str] | None = None,
    *,
    limits: Sequence[tuple[str, int]] = (),
    tls: tuple[str | None, str | None] = (None, None),
) -> grpc.aio.Server:
    """Return a server that listens on `host:port` and reads through `gate`.

    `add_more` adds another service to it and returns its name. `tls` names the files with the certificate and its key,
    and the authority that signs clients' certificates.

    Raises:
        ConfigError: the address is not available.
    """
    # More are refused as RESOURCE_EXHAUSTED.
    server = grpc.aio.server(interceptors=[gate], options=[*_OPTIONS, *limits], maximum_concurrent_rpcs=4096)
    outrider_pb2_grpc.add_GenerationServicer_to_server(api, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(api, server)
    names = _SERVICES if add_more is None else (*_SERVICES, add_more(server))
    reflection.enable_server_reflection(names, server)
    try:
        _listen(server, address, *tls)
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen at {address}: {error}; choose another --grpc-port, or 0") from None
    await server.start()
    return server


def _listen(server: grpc.aio.Server, address: str, certificate: str | None, client_ca: str | None) -> None:
    if certificate is None:
        server.add_insecure_port(address)
        return
    pem = Path(certificate).read_bytes()
    authority = None if client_ca is None else Path(client_ca).read_bytes()
    credentials = grpc.ssl_server_credentials(
        [(pem, pem)], root_certificates=authority, require_client_auth=authority is not None
    )
    server.add_secure_port(address, credentials)
