"""A target that many engines take turns on."""

from __future__ import annotations

from collections.abc import Callable

from bench.speculation.suite.recorded_engine import RecordedEngine
from bench.speculation.suite.recorded_verifier import RecordedVerifier
from engine.config import CacheConfig, HeadConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.dispatch.no_proposer import NoProposer
from engine.proposer.hidden_state.factory import head_proposer
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler


class SharedTarget:
    """Weights, pool and prefix cache are shared by all its engines, so that prompts are read once.

    An engine is made for each run: then nothing is remembered of the texts of the run before but their KV.
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, head: HeadConfig | None = None) -> None:
        self._runner = ModelRunner(model, cache, head=head)
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size, self._runner.model_version)

    def engine(self, speculation: SpeculationConfig, make_proposer: Callable[[], Proposer | None]) -> RecordedEngine:
        """Return an engine; the target's head drafts where there is one, else what is made here."""
        scheduler = Scheduler(SchedulerConfig(), self._blocks, self._runner.max_model_len, tree=speculation.tree)
        verifier = RecordedVerifier(Sampler())
        head = head_proposer(self._runner, speculation.tree)
        proposer = head or make_proposer() or NoProposer()
        core = EngineCore(self._runner, scheduler, Speculation(proposer, verifier, speculation, head))
        return RecordedEngine(core, verifier, proposer, speculation)
