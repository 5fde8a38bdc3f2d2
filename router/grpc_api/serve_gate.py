"""Gates the gRPC servers that Serve starts: Serve has no setting for interceptors.

They run in the ingress replicas, and in Serve's proxies, which answer while no replica does.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

from grpc.aio._server import Server
from ray.serve._private.grpc_util import gRPCGenericServer

from router.grpc_api.reading_gate import ReadingGate


def gate_serve(gate: ReadingGate) -> None:
    """Make all client-facing servers that Serve starts in this process from now on read through `gate`."""
    make = getattr(Server.__init__, "__wrapped__", Server.__init__)
    parameters = signature(make)

    @wraps(make)
    def make_gated(server: Any, *args: Any, **kwargs: Any) -> None:
        call = parameters.bind(server, *args, **kwargs)
        if isinstance(server, gRPCGenericServer):
            call.arguments["interceptors"] = (*(call.arguments.get("interceptors") or ()), gate)
        make(*call.args, **call.kwargs)

    Server.__init__ = make_gated


def gate_proxy() -> list[Any]:
    """Gate the server of a proxy; Serve calls this before it starts one. Adds no middleware.

    The proxy has no keys: the ingress checks them. Serve calls this in an ingress too; there, its own gate stays.
    """
    if not hasattr(Server.__init__, "__wrapped__"):
        gate_serve(ReadingGate(None, lambda frontend, operation, status: None, has_proxy=True))
    return []
