"""Loads the parts of an engine from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.accounting.rates import RateMeter
from engine.config import EngineConfig
from engine.engine_core.speculation import Speculation, load_speculation
from engine.kv_cache.block_manager import BlockManager, CacheDeltaSink
from engine.model.cuda_graphs.buckets import sized
from engine.model.loader import model_version, tokenizer_file
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import load_runner
from engine.position_log.position_log import PositionLog
from engine.position_log.shard import LoggedModel
from engine.proposer import Proposer
from engine.remote_prefill.kv_transfer import KVTransport
from engine.remote_prefill.prefill_source import PrefillSource
from engine.remote_prefill.remote_prefill import RemotePrefill
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The arguments of `EngineCore`, described there, and its position log."""

    runner: ModelRunner
    scheduler: Scheduler
    blocks: BlockManager
    speculation: Speculation
    source: PrefillSource | None
    rates: RateMeter
    grammars: GrammarCompiler
    position_log: PositionLog | None


def load_parts(
    config: EngineConfig,
    proposer: Proposer | None,
    event_sink: CacheDeltaSink | None,
    transport: KVTransport | None,
    step_writer: Proposer | None,
    models: Mapping[str, Proposer],
) -> EngineParts:
    """Load the model, then build the other parts to fit it. `EngineCore.from_config` describes the parameters."""
    model = replace(config.model, graphs=sized(config.model.graphs, config.scheduler, config.speculation))
    runner = load_runner(model, config.cache, config.scheduler.max_model_len, config.head)
    blocks = BlockManager(
        runner.num_blocks, runner.block_size, runner.model_version, event_sink, config.cache.enable_prefix_caching
    )
    rates = RateMeter()
    source = None
    if transport is not None:
        source = RemotePrefill(transport, runner, blocks, rates, config.min_remote_prefill_tokens)
    tree = config.speculation.tree
    scheduler = Scheduler(config.scheduler, blocks, runner.max_model_len, source, tree, rates=rates)
    speculation = load_speculation(config, runner, scheduler, proposer, step_writer, models)
    grammars = GrammarCompiler(tokenizer_file(config.model.path), runner.vocab_size, runner.eos_token_ids)
    position_log = None
    if config.log is not None:
        logged = LoggedModel(model_version(config.model.path), runner.vocab_size)
        position_log = PositionLog(config.log, logged)
    return EngineParts(runner, scheduler, blocks, speculation, source, rates, grammars, position_log)
