"""The service of vLLM's engine beside ours, where an operator wants it."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from protos.errors import ConfigError
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService


def engine_service(service: GenerationService, api_keys: ApiKeys) -> Callable[[grpc.aio.Server], str]:
    """Return a function that adds the service to a server and returns its name.

    Raises:
        ConfigError: the package with its messages is missing.
    """
    try:
        from smg_grpc_proto import vllm_engine_pb2_grpc

        from router.grpc_api.vllm_engine import SERVICE_NAME, VllmEngineApi
    except ImportError as error:
        raise ConfigError(
            f"ingress.vllm_grpc needs the package smg-grpc-proto: {error}; pip install 'outrider[smg]', or remove it"
        ) from error

    def add(server: grpc.aio.Server) -> str:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineApi(service, api_keys), server)
        return str(SERVICE_NAME)

    return add
