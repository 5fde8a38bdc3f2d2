"""vLLM's engine service for Ray Serve: `grpc_options.grpc_servicer_functions` names the function."""

from __future__ import annotations

from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2


def add_vllm_engine_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the service with serialized requests: Serve pickles requests, but cannot pickle these messages."""
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    handlers = {}
    for method in service.methods:
        streamed = method.server_streaming
        handler = grpc.unary_stream_rpc_method_handler if streamed else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = handler(getattr(servicer, method.name))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)
