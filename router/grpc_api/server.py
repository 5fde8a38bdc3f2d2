"""The gRPC frontend on a server of its own, where no Serve proxy listens."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import outrider_pb2_grpc
from protos.errors import ConfigError
from router.grpc_api.api import SERVICE_NAME, GrpcApi
from router.grpc_api.reading_gate import MAX_MESSAGE_BYTES, ReadingGate

_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
_MAX_CALLS = 4096  # at once; more are refused as RESOURCE_EXHAUSTED
_SERVICES = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)


class _Servicer:
    """The calls under the names that the stubs register."""

    def __init__(self, api: GrpcApi) -> None:
        self.Generate = api.generate
        self.GenerateStream = api.generate_stream
        self.Tokenize = api.tokenize
        self.GetModel = api.get_model
        self.Check = api.check
        self.Watch = api.watch
        self.List = api.list_health


async def start_grpc_server(
    api: GrpcApi, gate: ReadingGate, address: str, add_more: Callable[[grpc.aio.Server], str] | None = None
) -> grpc.aio.Server:
    """Return a server that listens at `host:port` and reads through `gate`.

    `add_more` adds another service to it and returns its name.

    Raises:
        ConfigError: the address cannot be had.
    """
    server = grpc.aio.server(interceptors=[gate], options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    servicer = _Servicer(api)
    outrider_pb2_grpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = _SERVICES if add_more is None else (*_SERVICES, add_more(server))
    reflection.enable_server_reflection(names, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen at {address}: {error}; choose another --grpc-port, or 0") from None
    await server.start()
    return server
