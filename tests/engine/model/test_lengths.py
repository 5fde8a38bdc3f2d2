"""Lengths that a configuration names: windows, scaling lengths, chunks; far beyond each, the logits are the stock's.

Sequences are of several lengths, a longer one first, in chunks, their rows in another order in each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
    RoCBertConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.model.generation_config import max_positions, unread_lengths
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.families import PLAIN, VOCAB_SIZE, write_family

LENGTHS = (120, 61, 40, 9)
CHUNKS = (17, 5, 1, 30)
CACHE = CacheConfig(num_blocks=128, block_size=4)
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA_4 = {**PLAIN, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]}
SLIDING = {"sliding_window": 10, "use_sliding_window": True}

SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "a window in the mask alone": lambda: PhimoeConfig(**PLAIN, sliding_window=10, num_local_experts=2, head_dim=8),
    "windows of the last layers": lambda: Qwen2Config(**PLAIN, **SLIDING, max_window_layers=1),
    "a window in all layers": lambda: Starcoder2Config(**PLAIN, sliding_window=10),
    "a window that a kernel passes": lambda: MistralConfig(**PLAIN, sliding_window=10),
    "layers without positions": lambda: SmolLM3Config(**PLAIN, **SLIDING, no_rope_layers=[1, 0]),
    "scaled by a row's index": lambda: Llama4TextConfig(**LLAMA_4, attention_chunk_size=128, floor_scale=8),
    "the first chunk": lambda: Llama4TextConfig(**LLAMA_4, attention_chunk_size=32),
    "scaled by position": lambda: Ministral3Config(
        **PLAIN, sliding_window=None, head_dim=8, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5}
    ),
    "longrope of one kind of layers": lambda: Gemma3TextConfig(
        **PLAIN,
        head_dim=8,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONG},
    ),
    "yarn": lambda: LlamaConfig(**PLAIN, rope_parameters=YARN),
    "dynamic": lambda: LlamaConfig(
        **{**PLAIN, "max_position_embeddings": 32}, rope_parameters={**YARN, "rope_type": "dynamic"}
    ),
}


def largest_error(folder: Path, config: PreTrainedConfig) -> float:
    """Return the largest distance of a row's logits from the stock model's, relative to their spread."""
    model = write_family(folder, config)
    runner = ModelRunner(ModelConfig(str(folder), dtype="float32", device="cpu"), CACHE)
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, runner.max_model_len) for length in LENGTHS]
    texts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    with torch.inference_mode():
        expected = [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    num_read = [0] * len(texts)
    for step in count():
        order = [(each + step) % len(texts) for each in (2, 0, 3, 1)]
        sizes = {each: min(CHUNKS[(each + step) % 4], lengths[each] - num_read[each]) for each in order}
        sizes = {each: size for each, size in sizes.items() if size}
        if not sizes:
            break
        spans = []
        for each, size in sizes.items():
            start = num_read[each]
            table = list(range(32 * each, 32 * each + 32))
            spans.append(Span(texts[each][start : start + size], start, table, size))
            num_read[each] += size
        for each, part in zip(sizes, runner.forward(spans).split(list(sizes.values())), strict=True):
            found[each].append(part.clone())
    errors = []
    for parts, wanted in zip(found, expected, strict=True):
        spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
        errors.append(float(((torch.cat(parts) - wanted).norm(dim=-1) / spread).max()))
    return max(errors)


@pytest.mark.parametrize("kind", SERVED)
def test_far_behind_every_length_logits_are_the_stock_models(kind: str, tmp_path: Path) -> None:
    assert largest_error(tmp_path, SERVED[kind]()) < 1e-5


_BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**_BERT, vocab_size=VOCAB_SIZE),
        RoCBertConfig(**_BERT, vocab_size=VOCAB_SIZE),
        RobertaConfig(**_BERT, vocab_size=VOCAB_SIZE, is_decoder=True),  # its positions begin after the padding's
    ],
    ids=lambda config: config.model_type,
)
def test_later_tokens_and_those_beside_are_not_seen_in_any_dtype(
    config: PreTrainedConfig, dtype: str, tmp_path: Path
) -> None:
    write_family(tmp_path, config)
    with pytest.raises(ConfigError, match=f"model type '{config.model_type}' cannot be served"):
        ModelRunner(ModelConfig(str(tmp_path), dtype=dtype, device="cpu"), CACHE)


def qwen_card(**sizes: Any) -> PreTrainedConfig:
    """Return Qwen's configuration with YaRN as its card writes it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    return Qwen2Config(**{**PLAIN, **sizes}, rope_scaling=scaling)


@pytest.mark.parametrize(("stated", "expected"), [(32, 128), (40, 128), (128, 128), (160, 160)])
def test_yarn_gives_its_factor_times_the_positions_of_before(stated: int, expected: int) -> None:
    assert max_positions(qwen_card(max_position_embeddings=stated)) == expected


def test_positions_that_yarn_gives_are_computed_as_the_stock_model_does(tmp_path: Path) -> None:
    config = qwen_card(max_position_embeddings=32)
    assert largest_error(tmp_path, config) < 1e-5
    runner = ModelRunner(ModelConfig(str(tmp_path), dtype="float32", device="cpu"), CACHE, max_model_len=128)
    assert runner.max_model_len == 128


def test_lengths_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(**PLAIN, local_attention_length=7, max_sequence_length=64, sliding_window=5)
    assert unread_lengths(config) == {"local_attention_length": 7, "max_sequence_length": 64}
    write_family(tmp_path, config)
    ModelRunner(ModelConfig(str(tmp_path), dtype="float32", device="cpu"), CACHE)
    assert "config.json has local_attention_length 7, max_sequence_length 64" in caplog.text
