"""A deployment in this process, without Ray: one pair, its draft in the target's process, and both frontends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from actors.process import configure_logging, is_json_wanted
from actors.settings import PairSettings
from cluster.checkpoints import convert_gguf_models
from cluster.config import DeployConfig
from cluster.deploy_file import VLLM_SERVICER_FUNCTION, DeployFile, in_url
from cluster.local.http_server import DRAIN_S, HttpServer, Places, metrics_for_operators, share_of_files
from cluster.local.local_service import local_settings, running_service
from cluster.local.serve_environment import tls_variables
from cluster.proxy.haproxy_config import ProxySettings
from cluster.serve_options import refusals_without_ray
from protos.errors import ConfigError
from router.api_keys import ApiKeys
from router.client_limits import MAX_GRPC_CONNECTIONS
from router.generation.generation_service import GenerationService
from router.grpc_api.api import GrpcApi, connection_limits, start_grpc_server
from router.grpc_api.reading_gate import ReadingGate
from router.ingress import GRPC_SERVICER_FUNCTIONS
from router.openai.api import build_app
from router.openai.request_head import add_request_id

logger = logging.getLogger(__name__)


def serve_in_process(file: DeployFile, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish; call `on_ready` once both frontends listen.

    Raises:
        ServingError: the deployment asks for more than one process, or could not start.
    """
    if is_json_wanted():
        configure_logging()
    refuse_serves_options(file)
    config = convert_gguf_models(file.config)
    settings = local_settings(config)
    os.environ.update(settings.target_share.thread_variables)  # before torch is loaded
    asyncio.run(_serve(file, config, settings, on_ready))


def refuse_serves_options(file: DeployFile) -> None:
    """Raise ConfigError for an option of Serve: a server in one process has no Serve."""
    obstacles = list(refusals_without_ray(file.deployment))
    functions = _servicer_functions(file)
    if functions and not set(functions) >= set(GRPC_SERVICER_FUNCTIONS):
        obstacles.append(f"grpc_options.grpc_servicer_functions lacks {' or '.join(GRPC_SERVICER_FUNCTIONS)}")
    if strange := set(functions) - {*GRPC_SERVICER_FUNCTIONS, VLLM_SERVICER_FUNCTION}:
        obstacles.append(f"grpc_options.grpc_servicer_functions has {', '.join(sorted(strange))}")
    if obstacles:
        raise ConfigError(f"without Ray there is no Ray Serve: {'; '.join(obstacles)}; remove it, or --no-ray")


def _servicer_functions(file: DeployFile) -> list[str]:
    return (file.deployment.get("grpc_options") or {}).get("grpc_servicer_functions") or []


async def _serve(file: DeployFile, config: DeployConfig, settings: PairSettings, on_ready: Callable[[], None]) -> None:
    async with running_service(config, settings) as service:
        api_keys = ApiKeys(service.config.api_keys_file, is_open_admin=service.config.open_admin)
        async with _grpc(service, api_keys, file):
            await _serve_http(partial(add_request_id, build_app(service, api_keys, file.http_host)), file, on_ready)


@asynccontextmanager
async def _grpc(service: GenerationService, api_keys: ApiKeys, file: DeployFile) -> AsyncIterator[None]:
    if file.grpc_port is None:
        yield
        return
    add_more = None
    if VLLM_SERVICER_FUNCTION in _servicer_functions(file):
        from router.grpc_api.vllm_engine import VllmEngineApi  # its messages are in a package of their own

        add_more = VllmEngineApi(service, api_keys).add_to
    address, gate = f"{in_url(file.http_host)}:{file.grpc_port}", ReadingGate(api_keys, service.metrics.count_request)
    limits, tls = connection_limits(share_of_files(MAX_GRPC_CONNECTIONS)), _tls_files(file.config)
    server = await start_grpc_server(GrpcApi(service, api_keys), gate, address, add_more, limits=limits, tls=tls)
    try:
        yield
    finally:
        await server.stop(DRAIN_S)


async def _serve_http(app: Any, file: DeployFile, on_ready: Callable[[], None]) -> None:
    settings = ProxySettings.of(os.environ)
    places = Places(settings.known_addresses, settings.max_connections_per_address)
    if settings.operator_addresses:
        app = partial(metrics_for_operators, app, places=places)
    server = HttpServer(app, file.http_host, file.http_port, places, _tls_files(file.config))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event
        await asyncio.sleep(0.01)
    if server.started:
        on_ready()
    await serving


def _tls_files(config: DeployConfig) -> tuple[str | None, str | None]:
    """Return the paths of the certificate (with its key) and the clients' authority; None for a file not set."""
    variables = tls_variables(config.ingress)
    return variables.get("OUTRIDER_TLS_CERTIFICATE"), variables.get("OUTRIDER_TLS_CLIENT_CA")
