"""A backend that is a real engine in this process: a tiny random model over a byte-level tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.text_match.ngram import NgramProposer
from protos.messages import GenerateRequest, ModelCard, TokenChunk
from protos.served_draft import DraftOrder, DraftReport
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer
from tests.engine.fixtures.checkpoints import write_checkpoint

CARD = ModelCard(
    vocab_size=BYTE_VOCAB_SIZE, max_model_len=512, eos_token_ids=(END_ID,), model_version="v1", block_size=16
)


def write_model(folder: Path) -> None:
    """A checkpoint with its tokenizer; the model speaks at random, so all order is the grammar's."""
    write_checkpoint(folder, seed=0, vocab_size=BYTE_VOCAB_SIZE, steepness=0.1)
    write_tokenizer(folder)


def ngram_engine(folder: Path) -> EngineCore:
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"),
        CacheConfig(num_blocks=512, memory_bytes=None),
        SchedulerConfig(),
        SpeculationConfig(4),
    )
    return load_engine(config, NgramProposer(min_size=1))


class EngineBackend:
    """Steps the engine whenever a stream waits; `requests` are those it was sent."""

    def __init__(self, core: EngineCore, card: ModelCard = CARD) -> None:
        self._core = core
        self._card = card
        self._chunks: dict[str, list[TokenChunk]] = {}
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        self.requests.append(request)
        self._core.add(request)
        mine = self._chunks[request.request_id] = []
        try:
            while True:
                while not mine:
                    for chunk in self._core.step():
                        self._chunks[chunk.request_id].append(chunk)
                    await asyncio.sleep(0)
                batch, mine[:] = tuple(mine), []
                yield batch
                if batch[-1].finish_reason is not None:
                    return
        finally:
            self._core.abort(request.request_id)

    async def describe(self) -> ModelCard:
        return self._card

    async def kill_drafts(self) -> int:
        return 0

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        return ()

    async def metrics_texts(self) -> Sequence[str]:
        return ()
