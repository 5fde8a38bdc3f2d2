"""Pairs without models, for benchmarks of what is in front of them: they report like real ones and answer at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID

from actors.engine_loop.index_reporter import IndexReporter
from actors.shell_messages import Snapshot
from protos.block_keys import PROBE_SALT, block_keys, join_keys, probe_token_ids, root_key
from protos.cache_delta import CacheDelta
from protos.errors import UnavailableError
from protos.messages import FinishReason, GenerateRequest, ModelCard, TokenChunk
from protos.worker_load import WorkerLoad
from protos.worker_report import WorkerReport
from router.config import RouterConfig
from router.routing.index.index_client import IndexClient

BLOCK_SIZE = 16
PROMPT_TOKENS = 2000
NUM_PROMPTS = 64
ROUTER = RouterConfig(block_size=BLOCK_SIZE, index_timeout_s=2.0)  # patient: the choice itself is timed
CARD = ModelCard(
    vocab_size=4096,
    max_model_len=8192,
    eos_token_ids=(0,),
    model_version="none",
    block_size=BLOCK_SIZE,
    probe_key=block_keys(probe_token_ids(BLOCK_SIZE), BLOCK_SIZE, root_key("none", PROBE_SALT))[-1],
)


def prompt(number: int) -> tuple[int, ...]:
    """Return one of the prompts of a benchmark: no two share a block."""
    return tuple((number + position) % CARD.vocab_size for position in range(PROMPT_TOKENS))


def prompt_keys(number: int) -> bytes:
    """Return the joined keys of `prompt(number)`."""
    return join_keys(block_keys(prompt(number), BLOCK_SIZE, root_key(CARD.model_version)))


@dataclass(frozen=True)
class FakeReplica:
    """The part of a replica that Serve's routers ask before a request is sent: its id and its load."""

    name: str
    deployment: DeploymentID
    max_ongoing_requests: int = 1 << 20
    node_id: str = "node"
    availability_zone: str | None = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, self.deployment)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class ReportingFleet:
    """An actor that reports for all workers of a fleet; the prompts' blocks are spread over them evenly."""

    async def run(self, application: str, worker_ids: list[str], reports_per_s: float) -> None:
        """Report for each worker `reports_per_s` times a second, until the actor is killed."""
        index = IndexClient(application, ROUTER)
        num_workers = len(worker_ids)
        sequence = 0
        while True:
            for number, worker_id in enumerate(worker_ids):
                load = WorkerLoad(worker_id, 1, 0.0, 1, 4, 500, 8000, 20_000.0, 1e-7, 40.0)
                own = b"".join(prompt_keys(each) for each in range(number, NUM_PROMPTS, num_workers) if sequence == 0)
                with suppress(UnavailableError):  # a busy machine: the next report comes soon enough
                    await index.report(WorkerReport(load, 0.0, True, sequence, None, (CacheDelta(own),)))
                await asyncio.sleep(1.0 / (reports_per_s * num_workers))
            sequence += 1


def start_fleet(application: str, worker_ids: list[str], reports_per_s: float) -> Any:
    """Return the handle of a running `ReportingFleet`; the caller kills it."""
    fleet: Any = ray.remote(ReportingFleet).options(num_cpus=0).remote()
    fleet.run.remote(application, worker_ids, reports_per_s)
    return fleet


class FakePair:
    """The deployment `Pair` with one token for every request. With an index it reports an empty cache."""

    num_requests = 0

    async def __init__(self, has_index: bool) -> None:  # type: ignore[misc]  # Serve awaits it
        if not has_index:
            return
        replica = serve.get_replica_context()
        self._reporter = IndexReporter(replica.replica_id.unique_id, IndexClient(replica.app_name, ROUTER))
        self._reporter.on_ready()
        self._reporting = asyncio.create_task(self._reporter.run(self))

    def ask_snapshot(self) -> None:
        self._reporter.on_snapshot(Snapshot(b""))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[TokenChunk], None]:
        yield [TokenChunk(request.request_id, (5,), finish_reason=FinishReason.LENGTH)]

    async def describe(self) -> ModelCard:
        return CARD

    async def metrics_text(self) -> str:
        return ""
