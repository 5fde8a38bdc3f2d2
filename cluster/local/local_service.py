"""One pair and the frontends' service in this process: no Ray, no socket. GPU machines without Ray import it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from actors.pair.local_pair import LocalPair
from actors.settings import PairSettings
from cluster.config import DeployConfig
from cluster.placement import NodeResources, plan_pair
from cluster.replica_settings import ingress_config, pair_settings, placement_request
from cluster.schema.frontends import RouterSection
from cluster.schema.models import DraftMode
from cluster.schema.replicas import PrefillSection
from cluster.schema.section import Section
from cluster.topology import read_topology
from protos.errors import ConfigError
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.tokenizer.tokenizer_files import load_tokenizer_files

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
