"""A deployment in this process, without Ray: one pair, its draft in the target's process, and both frontends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from actors.pair.local_pair import LocalPair
from actors.process.process_logging import configure_logging, is_json_wanted
from actors.settings import PairSettings
from cluster.checkpoints import convert_gguf_models
from cluster.config import DeployConfig
from cluster.deploy_file import VLLM_SERVICER_FUNCTION, DeployFile, in_url
from cluster.local.http_server import DRAIN_S, HttpServer, Places, metrics_for_operators, share_of_files
from cluster.local.serve_environment import tls_variables
from cluster.placement import NodeResources, plan_pair
from cluster.proxy.haproxy_config import ProxySettings
from cluster.replica_settings import ingress_config, pair_settings, placement_request
from cluster.schema.frontends import RouterSection
from cluster.schema.models import DraftMode
from cluster.schema.replicas import PrefillSection
from cluster.schema.section import Section
from cluster.serve_options import refusals_without_ray
from cluster.topology import read_topology
from protos.errors import ConfigError
from router.api_keys import ApiKeys
from router.client_limits import MAX_GRPC_CONNECTIONS
from router.generation.generation_service import GenerationService
from router.grpc_api.api import GrpcApi
from router.grpc_api.reading_gate import ReadingGate
from router.grpc_api.server import connection_limits, start_grpc_server
from router.ingress import GRPC_SERVICER_FUNCTIONS
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.openai.request_head import add_request_id
from router.tokenizer.tokenizer_files import load_tokenizer_files

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


# Keys for several replicas, the router, the index and other nodes have no meaning in one process.
WITHOUT_EFFECT = (
    *("pair.autoscaling", "pair.resources", "pair.kv_events", "draft.num_threads", "ingress.num_replicas"),
    *(f"router.{key}" for key in RouterSection.model_fields),
    *(f"prefill.{key}" for key in PrefillSection.model_fields),
)


def check_one_process(config: DeployConfig) -> None:
    """Raise ConfigError if the deployment asks for more than one process."""
    if obstacles := list(_obstacles(config)):
        raise ConfigError(f"without Ray there is one process: {'; '.join(obstacles)}; remove it, or --no-ray")


def _obstacles(config: DeployConfig) -> Iterator[str]:
    if config.pair.max_replicas > 1:
        yield f"pair asks for {config.pair.max_replicas} replicas"
    if config.prefill.max_replicas > 0:
        yield f"prefill asks for {config.prefill.max_replicas} replicas"
    yield from _without_effect(config)
    if config.target.tensor_parallel_size > 1:
        yield f"target.tensor_parallel_size is {config.target.tensor_parallel_size}"
    if config.draft.gpu == "own":
        yield "draft.gpu is 'own'"
    if config.tune.auto:
        yield "tune.auto is true"
    if config.speculation.mode is DraftMode.ASYNC:
        yield "speculation.mode is 'async'"


def _without_effect(config: DeployConfig) -> Iterator[str]:
    """Name the keys without a meaning in one process that differ from their default."""
    for path in WITHOUT_EFFECT:
        *sections, key = path.split(".")
        section: Section = config
        for name in sections:
            section = getattr(section, name)
        value, default = getattr(section, key), type(section).model_fields[key].get_default(call_default_factory=True)
        if value != default and not (path == "prefill.num_replicas" and value == 0):
            yield f"{path} is {value!r:.80}"


def local_settings(config: DeployConfig) -> PairSettings:
    """Return the settings of the one pair on this machine, in one process.

    Raises:
        ConfigError: the deployment asks for more than one process.
    """
    check_one_process(config)
    request = replace(placement_request(config), is_one_process=True)
    topology = read_topology()
    node = NodeResources(len(os.sched_getaffinity(0)), len(topology.devices))
    return pair_settings(config, plan_pair(request, [node], topology))


@asynccontextmanager
async def running_service(config: DeployConfig, settings: PairSettings) -> AsyncIterator[GenerationService]:
    """Yield the frontends' service over one pair in this process.

    Raises:
        ServingError: the pair could not start.
    """
    ingress = ingress_config(config)
    tokenizer = load_tokenizer_files(ingress.model_path, ingress.chat_template)  # the pair reads the same one
    pair = LocalPair(settings)
    try:
        await pair.start()
        yield GenerationService(pair, tokenizer, ingress, IngressMetrics())
    finally:
        await pair.close()
