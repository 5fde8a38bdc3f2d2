"""The Serve deployment that clients reach: both frontends over the pairs' handle."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from protos import outrider_pb2 as pb2
from protos.linux import wait_for_cores
from router.api_keys import ApiKeys
from router.backend.serve_backend import INGRESS, ApplicationWatch, ServeBackend
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.grpc_api.api import GrpcApi
from router.grpc_api.reading_gate import ReadingGate
from router.grpc_api.serve_gate import gate_serve
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.routing.request_routing import RequestRouting
from router.tokenizer.tokenizer_files import load_tokenizer_files

# Set where HAProxy lets the operator's machines alone to /metrics (`cluster.proxy.haproxy_config`), and where there is
# one.
_OPERATORS, _PROXY = "OUTRIDER_OPERATOR_ADDRESSES", "RAY_SERVE_ENABLE_HA_PROXY"
GRPC_SERVICER_FUNCTIONS = (
    "protos.outrider_pb2_grpc.add_GenerationServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)


@serve.deployment(name=INGRESS)
@serve.ingress()
class Ingress:
    """One ingress replica. Serve calls the ASGI app for HTTP, and for gRPC the method named like the call.

    `prefill` is here for its metrics alone: the pairs call it.
    """

    def __init__(
        self, pair: DeploymentHandle[Any], config: IngressConfig, prefill: DeploymentHandle[Any] | None = None
    ) -> None:
        wait_for_cores()
        self._api_keys = ApiKeys(config.api_keys_file, is_open_admin=config.open_admin)
        metrics = IngressMetrics()
        application = ApplicationWatch()
        backend = ServeBackend(pair, RequestRouting(metrics.router), application.is_deleted, prefill)
        self._service = GenerationService(
            backend, load_tokenizer_files(config.model_path, config.chat_template), config, metrics
        )
        self._service.peers = application.frontend_texts
        calls = GrpcApi(self._service, self._api_keys, application.stay).calls()
        self._generate = calls.pop("Generate")
        gate_serve(ReadingGate(self._api_keys, metrics.count_request, has_proxy=True))
        if find_spec("smg_grpc_proto"):  # vLLM's messages; Serve offers the service if deploy.yaml lists it
            from router.grpc_api.vllm_engine import VllmEngineApi

            calls |= VllmEngineApi(self._service, self._api_keys).calls()
            self._vllm_generate = calls.pop("Generate")
        vars(self).update(calls)

    async def metrics_text(self) -> tuple[str, str]:
        """Return the name of this replica and its own metrics; called by the replica that answers `/metrics`."""
        return serve.get_replica_context().replica_id.unique_id, self._service.metrics.text()

    def __serve_build_asgi_app__(self) -> FastAPI:
        is_private = bool(os.environ.get(_OPERATORS)) and os.environ.get(_PROXY) == "1"
        return build_app(self._service, self._api_keys, _http_host(), is_metrics_private=is_private)

    async def Generate(self, request: pb2.GenerateRequest | bytes, grpc_context: RayServegRPCContext) -> Any:
        """Return the answer; for vLLM's call of the same name, whose request is serialized, return its stream."""
        if isinstance(request, bytes):
            return await self._vllm_generate(request, grpc_context)
        return await self._generate(request, grpc_context)


def _http_host() -> str | None:
    """Return the address that Serve listens at for clients; None outside of a cluster."""
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    return None if client is None else client.http_config.host
