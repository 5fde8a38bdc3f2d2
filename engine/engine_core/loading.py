"""Loads an engine from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.accounting.rates import RateMeter
from engine.approximate.steps import StepSpeculation
from engine.config import EngineConfig
from engine.engine_core.core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.state_pool import StateSlots, check_target, num_states
from engine.model.cuda_graphs.buckets import sized
from engine.model.loader import model_version, tokenizer_file
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import load_runner
from engine.position_log.position_log import PositionLog
from engine.position_log.shard import LoggedModel
from engine.proposer import NoProposer, Proposer
from engine.proposer.method_dispatcher import proposer_of
from engine.proposer.own_proposers import LiveHead, self_proposer
from engine.remote_prefill.kv_transfer import KVTransport
from engine.remote_prefill.remote_prefill import RemotePrefill
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.scheduler.async_scheduling import AsyncScheduling
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.messages import SpeculationMethod

logger = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    proposer: Proposer | None = None,
    transport: KVTransport | None = None,
    step_writer: Proposer | None = None,
    models: Mapping[str, Proposer] | None = None,
) -> EngineCore:
    """Load the model and assemble an engine around it.

    Args:
        config: the model, its head, the pool and the limits.
        proposer: drafts, unless the configuration has a head. With neither, every pass is plain decoding.
        transport: fetches KV from prefill engines; None if this engine prefills every prompt.
        step_writer: writes reasoning steps if the configuration allows them; None uses the proposer.
        models: draft models that serve together with a head, by method name.

    Raises:
        ConfigError: the model, its head, the pool or the limits are not usable.
    """
    # Load the runner, whose pool decides how many blocks and states there are.
    model = replace(config.model, graphs=sized(config.model.graphs, config.scheduler, config.speculation))
    cache = replace(config.cache, num_states=num_states(config))
    runner = load_runner(model, cache, config.scheduler.max_model_len, config.head)
    states = StateSlots(runner.num_states, config.scheduler.max_num_sequences) if runner.num_states else None
    if states is not None:
        check_target(config)
        logger.info("recurrent layers: %d states, for %d sequences at a time", states.num_slots, states.max_sequences)
    blocks = BlockManager(runner.num_blocks, runner.block_size, runner.model_version, states)
    # Assemble the scheduler, with prefill replicas as a source of blocks if there are any.
    rates = RateMeter()
    min_tokens = config.min_remote_prefill_tokens
    source = None if transport is None else RemotePrefill(transport, runner, blocks, rates, min_tokens)
    scheduler = Scheduler(config.scheduler, blocks, runner.max_model_len, source, rates=rates)
    position_log = None
    if config.log is not None:
        logged = LoggedModel(model_version(config.model.path), runner.vocab_size)
        position_log = PositionLog(config.log, logged)
    return EngineCore(
        runner,
        scheduler,
        _load_speculation(config, runner, scheduler, proposer, step_writer, models or {}),
        grammars=GrammarCompiler(tokenizer_file(config.model.path), runner.vocab_size, runner.eos_token_ids),
        position_log=position_log,
        model_name=f"{Path(config.model.path).name} in {runner.kv_layout.dtype.removeprefix('torch.')}",
        experts=runner.experts,
    )


def _load_speculation(
    config: EngineConfig,
    runner: ModelRunner,
    scheduler: Scheduler,
    proposer: Proposer | None,
    step_writer: Proposer | None,
    models: Mapping[str, Proposer],
) -> Speculation:
    """Return the parts that draft and verify. The configuration's head drafts if it has one, otherwise `proposer`."""
    speculation, verifier, steps = config.speculation, Verifier(), None
    head = None if runner.head is None else LiveHead(runner)
    own = head or self_proposer(runner)
    if own is not None and config.head is not None:
        assert proposer is None, "one of the two drafts"
        proposer = proposer_of(speculation.methods, own, SpeculationMethod(config.head.kind), models)
    elif proposer is not None and speculation.steps is not None and speculation.can_draft:
        steps = StepSpeculation(
            speculation.steps,
            tokenizer_file(config.model.path),
            runner.vocab_size,
            proposer=proposer,
            writer=step_writer or proposer,
            verifier=verifier,
        )
    can_overlap = runner.can_overlap and head is None and steps is None
    overlap = AsyncScheduling(runner, scheduler, verifier) if can_overlap else None
    if proposer is None:
        return Speculation(NoProposer(), verifier, speculation.without_drafts(), overlap=overlap)
    return Speculation(steps or proposer, steps or verifier, speculation, head, steps, overlap)
