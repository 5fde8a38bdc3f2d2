"""Decoding with one loaded target: plain, and with drafts of each discipline from a process on the same device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from actors.draft.channel_proposer import ChannelProposer
from actors.settings import DraftSettings, PairSettings
from bench.contenders.draft_child import CORES, start_draft
from bench.gpu.floor import DeviceSpeed, ModelCost
from bench.gpu.table import EngineLine
from engine.accounting.step_times import StepTimes
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.model.cuda_graphs.buckets import sized
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import NoProposer, Proposer
from engine.remote_prefill.fetch_table import PrefillLoad, PrefillSource
from engine.scheduler.async_scheduling import AsyncScheduling
from engine.scheduler.scheduler import Scheduler
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod

_PREFILL_TOKENS = 2048
_CONNECT_TIMEOUT_S = 240.0
_FORWARD_REPEATS = 10
_MOST_WAITS = 80
_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class DecodeMode:
    """A way to decode; `is_ahead` makes it async, `tree_nodes` lets drafts branch; unless it `overlaps` passes wait."""

    name: str
    num_drafts: int = 0
    is_ahead: bool = False
    tree_nodes: int = 0
    overlaps: bool = True

    @property
    def rows(self) -> int:
        """Rows of a pass for each sequence."""
        return 1 + (self.tree_nodes or self.num_drafts)


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    mode: DecodeMode
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class CellLimits:
    """The limits of a cell: steps before and under the clock, and its most seconds."""

    num_warm_steps: int
    num_steps: int
    seconds: float


class GpuBench:
    """One target on one device, its pool holding the KV of a long text; every prompt is a beginning of it."""

    def __init__(
        self, target: ModelConfig, cache: CacheConfig, modes: Seq[DecodeMode], batches: Seq[int], text: Seq[int]
    ) -> None:
        """Load, record passes for all modes and batches, and read `text`."""
        self._limits = SchedulerConfig(max(batches), max(_PREFILL_TOKENS, 32 * max(batches)))
        self._text = list(text)
        self.runner = _load(target, cache, modes, batches, self._limits)
        num_text_blocks = -(-len(text) // self.runner.block_size)
        # The text's blocks are at the end of the pool, and no engine knows of them.
        self._num_blocks = self.runner.num_blocks - num_text_blocks
        self._text_blocks = list(range(self._num_blocks, self.runner.num_blocks))
        self._read_text()

    def has_room(self, cell: Cell, limits: CellLimits) -> bool:
        """True if the pool holds the cell's sequences to their end."""
        tokens = cell.context + _max_tokens(cell.mode, limits) + cell.mode.rows
        return cell.batch * -(-tokens // self.runner.block_size) + 1 <= self._num_blocks

    def measure(
        self, cell: Cell, proposer: Proposer, limits: CellLimits, cost: ModelCost, speed: DeviceSpeed
    ) -> EngineLine:
        """Decode greedily; every sequence has blocks of its own, so that nothing is read once for two of them."""
        engine = self._engine(cell.mode, proposer)
        sampling = SamplingParams(temperature=0.0, max_tokens=_max_tokens(cell.mode, limits))
        for index in range(cell.batch):
            # Beginnings at different places would need a prefill each; a salt keeps the blocks apart.
            prompt = tuple(self._text[: cell.context])
            engine.add(GenerateRequest(f"{cell.mode.name}-{index}", prompt, sampling, cache_salt=str(index)))
        _wait_for_drafts(engine, proposer, cell)
        _run(engine, proposer, limits.num_warm_steps, time.monotonic() + limits.seconds)
        before, began_s = engine.stats().drafts, time.monotonic()
        steps, num_tokens = _run(engine, proposer, limits.num_steps, began_s + limits.seconds)
        seconds = time.monotonic() - began_s
        drafts = engine.stats().drafts
        engine.close()
        num_passes = drafts.num_drafts - before.num_drafts if cell.mode.num_drafts else 0
        accepted = drafts.num_accepted_tokens - before.num_accepted_tokens
        return EngineLine(
            cell.mode.name,
            cell.batch,
            cell.context,
            tokens_per_s=num_tokens / seconds,
            tokens_per_pass=1 + accepted / num_passes if num_passes else 1.0,
            step_ms=1e3 * statistics.median(step.total_s for step in steps),
            floor_ms=1e3 * cost.floor_s(speed, cell.batch, cell.mode.rows, cell.context),
            device_ms=1e3 * self._forward_s(cell),
            draft_ms=1e3 * statistics.median(step.draft_s for step in steps),
        )

    def _forward_s(self, cell: Cell) -> float:
        """Seconds of the cell's pass when the device never waits for the host."""
        size = self.runner.block_size
        blocks_each = -(-(cell.context + cell.mode.rows) // size)
        spans = []
        for index in range(cell.batch):
            table = list(range(index * blocks_each, (index + 1) * blocks_each))
            spans.append(Span([1] * cell.mode.rows, cell.context, table, cell.mode.rows))
        self.runner.forward(spans)
        _synchronize()
        began_s = time.monotonic()
        for _ in range(_FORWARD_REPEATS):
            self.runner.forward(spans)
        _synchronize()
        return (time.monotonic() - began_s) / _FORWARD_REPEATS

    def _read_text(self) -> None:
        for start in range(0, len(self._text), _PREFILL_TOKENS):
            token_ids = self._text[start : start + _PREFILL_TOKENS]
            self.runner.forward([Span(token_ids, start, self._text_blocks, 1)])

    def _engine(self, mode: DecodeMode, proposer: Proposer) -> EngineCore:
        blocks = BlockManager(self._num_blocks, self.runner.block_size, self.runner.model_version)
        source = CopiedPrefill(self.runner, self._text_blocks)
        scheduler = Scheduler(self._limits, blocks, self.runner.max_model_len, source)
        speculation = SpeculationConfig(mode.num_drafts, tree_nodes=mode.tree_nodes)
        verifier = Verifier()
        overlaps = mode.overlaps and self.runner.can_overlap
        overlap = AsyncScheduling(self.runner, scheduler, verifier) if overlaps else None
        parts = Speculation(proposer, verifier, speculation, overlap=overlap)
        return EngineCore(self.runner, scheduler, parts)


class CopiedPrefill(PrefillSource):
    """Prompts that are all beginnings of one text: its KV is copied to the blocks of each, in no time."""

    def __init__(self, runner: ModelRunner, text_blocks: Seq[int]) -> None:
        self._runner = runner
        self._text_blocks = text_blocks

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        num_blocks = (sequence.num_prompt_tokens - 1) // self._runner.block_size
        if num_blocks:
            self._runner.copy_blocks(self._text_blocks[:num_blocks], sequence.block_table[:num_blocks])
            sequence.num_computed_tokens = num_blocks * self._runner.block_size


@contextmanager
def drafting(
    mode: DecodeMode, target: ModelConfig, draft: ModelConfig, num_blocks: int, most_sequences: int
) -> Iterator[Proposer]:
    """The mode's draft in a process of its own, as a pair has it; ended afterwards."""
    if not mode.num_drafts:
        yield NoProposer()
        return
    speculation = SpeculationConfig(mode.num_drafts, tree_nodes=mode.tree_nodes)
    settings = PairSettings(
        EngineConfig(target, scheduler=SchedulerConfig(most_sequences, _PREFILL_TOKENS), speculation=speculation),
        DraftSettings(SpeculationMethod.MODEL, draft, CacheConfig(num_blocks=num_blocks), mode.is_ahead),
    )
    with ExitStack() as stack:
        yield start_draft(settings, stack, CORES, _CONNECT_TIMEOUT_S)


def source_text(tokenizer_folder: Path, num_tokens: int) -> list[int]:
    """This project's own sources, end to end, as token ids: Python, as the demo pair was trained on."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = "\n".join(file.read_text() for file in sorted(Path(__file__).parents[2].glob("engine/**/*.py")))
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(token_ids) >= num_tokens, f"the sources have {len(token_ids)} tokens"
    return list(token_ids[:num_tokens])


def _load(
    target: ModelConfig, cache: CacheConfig, modes: Seq[DecodeMode], batches: Seq[int], limits: SchedulerConfig
) -> ModelRunner:
    graphs = sized(GraphConfig(target.graphs.kind, tuple(batches)), limits, SpeculationConfig(0))
    rows = tuple(sorted({mode.rows for mode in modes} | {1}))
    graphs = replace(graphs, row_counts=rows, has_trees=any(mode.tree_nodes for mode in modes))
    return ModelRunner(replace(target, graphs=graphs), cache)


def _max_tokens(mode: DecodeMode, limits: CellLimits) -> int:
    return _MOST_WAITS + (limits.num_warm_steps + limits.num_steps) * (mode.num_drafts + 1) + 1


def _wait_for_drafts(engine: EngineCore, proposer: Proposer, cell: Cell) -> None:
    """Step slowly until every sequence has drafts: the draft reads its prompts itself."""
    for _ in range(_MOST_WAITS if cell.mode.num_drafts else 1):
        before = engine.stats().drafts.num_drafts
        _run(engine, proposer, 1, 0.0)
        if engine.stats().drafts.num_drafts - before >= cell.batch:
            return
        time.sleep(_WAIT_S)


def _run(engine: EngineCore, proposer: Proposer, num_steps: int, deadline_s: float) -> tuple[list[StepTimes], int]:
    """Times of the steps, and the tokens they committed."""
    steps: list[StepTimes] = []
    num_tokens = 0
    while engine.has_work and len(steps) < num_steps and (not steps or time.monotonic() < deadline_s):
        if isinstance(proposer, ChannelProposer):
            proposer.flush()  # as the engine's loop does before every step
        num_tokens += sum(len(chunk.token_ids) for chunk in engine.step())
        steps.append(engine.last_times)
    return steps, num_tokens


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
