"""The gate of messages at Serve's gRPC server, which has no setting for interceptors."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

from grpc.aio._server import Server
from ray.serve._private.grpc_util import gRPCGenericServer

from router.grpc_api.reading_gate import ReadingGate


def gate_serve(gate: ReadingGate) -> None:
    """Have the server for clients that Serve starts in this process, after its replica is made, read through `gate`."""
    make = Server.__init__
    parameters = signature(make)

    @wraps(make)
    def make_gated(server: Any, *args: Any, **kwargs: Any) -> None:
        call = parameters.bind(server, *args, **kwargs)
        if isinstance(server, gRPCGenericServer):
            call.arguments["interceptors"] = (*(call.arguments.get("interceptors") or ()), gate)
        make(*call.args, **call.kwargs)

    Server.__init__ = make_gated
