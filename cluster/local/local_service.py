"""One pair and the frontends' service in this process, without Ray; its engine is a thread, reached by a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from actors.pair.pair_draft import PairDrafts
from actors.pair.pair_metrics import PairMetrics
from actors.pair.pair_shell import PairShell, Watchdog
from actors.pair.target_client import TargetClient
from actors.process.actor_thread import ActorThread, quick_imports
from actors.process.frames import private_folder
from actors.settings import PairSettings
from actors.shell_messages import TARGET_SOCKET
from cluster.config import DeployConfig
from cluster.placement import NodeResources, plan_pair
from cluster.replica_settings import ingress_config, pair_settings
from cluster.schema import Section
from cluster.schema.replicas import PrefillSection, RouterSection
from cluster.topology import read_topology
from engine.model.checkpoint.weight_files import begin_digests
from protos.errors import ConfigError
from protos.served_model import DraftOrder, DraftReport
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.tokenizer.tokenizer_files import load_tokenizer_files

logger = logging.getLogger(__name__)

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
    if config.speculation.is_ahead:
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
    topology = read_topology()
    node = NodeResources(len(os.sched_getaffinity(0)), len(topology.devices))
    return pair_settings(config, plan_pair(config, [node], topology, is_one_process=True))


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


class LocalPair(PairShell):
    """A `router.backend.Backend` of one pair; `start` before the first request.

    Nothing restarts a target here. Where a pair in a cluster would restart it, the process ends with status 1.
    """

    def __init__(self, settings: PairSettings) -> None:
        assert settings.draft_share is None, "a draft model runs in the target's process"
        super().__init__(settings, PairMetrics())
        self._folder = private_folder()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models, and return when the target responds.

        Raises:
            ServingError: it could not start.
        """
        # Imported here: it loads torch, whose threads depend on the environment at the first import.
        begin_digests(self._settings.engine.model.path)
        with quick_imports():
            from actors.target.target_process import serve_target

        thread = ActorThread("Target", partial(serve_target, self._settings, self._folder, None))
        while not thread.is_settled:  # noqa: ASYNC110  # a thread that waits would outlive a Ctrl-C
            await asyncio.sleep(0.05)
        thread.wait_ready()
        self._client = TargetClient(self._folder / TARGET_SOCKET)
        await self._client.wait_connected()
        if drafts := await self._head_draft("0"):
            self._drafts = PairDrafts(drafts)
        watchdog = Watchdog(self._client, _end_process, self._on_pong)
        self._watching = asyncio.create_task(watchdog.run(), name="watchdog")

    async def kill_drafts(self) -> int:
        """Return 0: no draft has a process of its own."""
        return 0

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        """Carry out an order about the head. Raises as `PairShell.order_draft`."""
        return await self.order_draft(order)

    async def metrics_texts(self) -> Sequence[str]:
        """Return this pair's metrics in Prometheus text format."""
        return [await self.metrics_text()]

    async def close(self) -> None:
        """Disconnect from the target, which then stops computing. A second call does nothing."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
            await self._client.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_process() -> None:
    logger.error("the target is stuck, and nothing can restart it without Ray; the process ends")
    os._exit(1)
