"""The KV pool of a GPU is the rest of its share; a GPU without room for one block is refused by its numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.span import Span
from engine.config import CacheConfig, GraphConfig, GraphKind, ModelConfig
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.gpu_memory import CardMemory, MemoryMeter
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_pair

GIB = 1 << 30


class Card:
    """A GPU of 80 GiB whose figures are set."""

    def __init__(self, used_gib: float) -> None:
        self.used_gib = used_gib

    def read(self) -> CardMemory:
        return CardMemory(int((80 - self.used_gib) * GIB), 80 * GIB)


def pool_gib(
    cache: CacheConfig, used_gib: tuple[float, float, float], logits_gib: float = 0.0, head_gib: int = 0
) -> float:
    """The pool after these gibibytes were used before the weights, with them, and after the passes."""
    card = Card(used_gib[0])
    meter = MemoryMeter(cache, card.read)
    card.used_gib = used_gib[1]
    meter.loaded()
    card.used_gib = used_gib[2]
    return meter.pool_bytes(GIB, GIB // 8, int(logits_gib * GIB), head_gib * GIB) / GIB


def test_the_pool_is_what_all_else_leaves_of_the_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # 72 of 80; 2 of others, 16 of weights, 5 of passes (1 of them the trial's pool), twice 0.5 of scores
    assert pool_gib(CacheConfig(gpu_memory_utilization=0.9), (2, 18, 23), 0.5) == pytest.approx(72 - 2 - 16 - 4 - 1)
    assert "weights 16.00, passes and recordings 4.00, sampling 1.00, second head 0.00, KV pool 49.00" in caplog.text
    assert "left free 8.00" in caplog.text


def test_the_head_of_an_exchange_has_its_place() -> None:
    cache = CacheConfig(gpu_memory_utilization=0.9)
    assert pool_gib(cache, (2, 18, 23), head_gib=3) == pytest.approx(pool_gib(cache, (2, 18, 23)) - 3)


def test_roles_on_one_gpu_count_what_is_their_own_and_fit_beside_each_other() -> None:
    draft = CacheConfig(gpu_memory_utilization=0.1, counts_own_use=True)
    target = CacheConfig(gpu_memory_utilization=0.8, counts_own_use=True)
    draft_pool = pool_gib(draft, (1, 3, 5))
    assert draft_pool == pytest.approx(8 - 2 - 1)
    target_pool = pool_gib(target, (9, 25, 28))
    assert target_pool == pytest.approx(64 - 16 - 2)
    assert pool_gib(draft, (65, 67, 69)) == pytest.approx(draft_pool), "the same at a restart"


def test_no_more_is_taken_than_is_free() -> None:
    own = CacheConfig(gpu_memory_utilization=0.9, counts_own_use=True)
    assert pool_gib(own, (60, 70, 72)) == pytest.approx(80 - 72 + 1)


def test_a_gpu_without_room_for_a_block_is_refused_with_all_figures() -> None:
    with pytest.raises(ConfigError, match=r"one block.*0\.1250 GiB: 80\.00 GiB.*weights 70\.00.*KV pool -2"):
        pool_gib(CacheConfig(gpu_memory_utilization=0.9), (1, 71, 75))


@pytest.mark.parametrize(
    ("place", "purpose", "remedy"),
    [
        ("transformers.PreTrainedModel.to", r"the weights of '.*', 0\.0 GiB", "raise target.tensor_parallel_size"),
        (
            "engine.model.runner.served_weights.leave_checkpoint",
            "the weights of '.*', packed or sharded",
            "raise target",
        ),
        (
            "engine.model.runner.model_pool.ShardedKVLayout",
            "the KV pool",
            "lower cache.memory_gib or cache.num_blocks",
        ),
    ],
)
def test_memory_that_ends_while_a_model_is_loaded_is_told_with_the_figures(
    place: str, purpose: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the GPU are known only now: weights that fit by the plan find less memory."""

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80")

    model = ModelConfig(str(write_pair(tmp_path, noise=0.05).target), "float32", "cpu")
    monkeypatch.setattr(place, fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 80 << 30))
    figures = r"\(tried to allocate 2\.00 gib\): 0\.50 of 80\.00 GiB are free"
    with pytest.raises(ConfigError, match=f"no memory for {purpose} {figures}; {remedy}"):
        ModelRunner(model, CacheConfig(4, num_blocks=64))


def test_a_runner_makes_its_pool_of_what_was_left_and_computes_as_ever(tmp_path: Path) -> None:
    """The trial's passes and recordings leave no trace; a device with fixed figures replaces a GPU."""
    path = str(write_pair(tmp_path, noise=0.05).target)
    graphs = GraphConfig(GraphKind.EAGER, batches=(1, 2), row_counts=(1, 3), max_rows=32)
    recorded: list[tuple[int, int | None]] = []

    def recorder(*args: Any, trial_pool_tokens: int | None) -> CudaGraphRunner:
        recorded.append((args[4], trial_pool_tokens))  # the longest text, and the pool it is tried for
        return CudaGraphRunner(*args, trial_pool_tokens=trial_pool_tokens)

    model = ModelConfig(path, "float32", "cpu", graphs=graphs)
    plain = ModelRunner(model, CacheConfig(4, num_blocks=64))
    with pytest.MonkeyPatch.context() as patch:
        cache = CacheConfig(4, gpu_memory_utilization=0.5)
        left = MemoryMeter(cache, lambda: CardMemory(1 << 21, 1 << 21))  # an empty GPU of 2 MiB
        patch.setattr("engine.model.runner.model_runner.memory_meter", lambda cache, device: left)
        patch.setattr("engine.model.runner.model_runner.CudaGraphRunner", recorder)
        measured = ModelRunner(model, cache)
    scores = 2 * 6 * measured.vocab_size * 4  # of the widest recording's 6 rows
    trial = 2 * measured.bytes_per_block  # a block and one for padding, which the figures do not have as used
    assert measured.num_blocks == ((1 << 20) + trial - scores) // measured.bytes_per_block - 1
    (longest, trial_tokens), real = recorded
    assert real == (longest, None)
    assert trial_tokens == (1 << 20) // measured.bytes_per_block * 4 >= measured.num_blocks * 4
    spans = [Span([1, 2, 3], 0, [0], 3)]
    assert torch.equal(measured.forward(spans), plain.forward(spans))
