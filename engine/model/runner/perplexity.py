"""Perplexity of a served model on a text: the cost of quantized weights."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.loader import tokenizer_file
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError

WINDOW = 512  # tokens per pass


def perplexity(runner: ModelRunner, token_ids: Seq[int], window: int = WINDOW) -> float:
    """Return exp of the mean loss per token, each predicted from the tokens before it in its window.

    Args:
        runner: a model whose pool holds a window.
        token_ids: the text, two tokens at least.
        window: tokens per pass; the last may be shorter.
    """
    num_blocks = -(-window // runner.block_size)
    loss, num_predicted = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        ids = list(token_ids[start : start + window])
        if len(ids) < 2:
            break
        logits = runner.forward([Span(ids, 0, list(range(num_blocks)), len(ids))])
        following = index_tensor(ids[1:], logits.device)
        loss -= float(logits[:-1].log_softmax(dim=-1).gather(1, following[:, None]).sum())
        num_predicted += len(ids) - 1
    return math.exp(loss / num_predicted)


@dataclass(frozen=True, slots=True)
class Quality:
    """A model's perplexity on a text, as served and, if quantized, unquantized."""

    perplexity: float
    full_perplexity: float | None
    num_tokens: int


def measure_quality(model: ModelConfig, texts: Seq[str]) -> Quality:
    """Measure `model` on the texts, each read from its beginning.

    Raises:
        ConfigError: the model has no tokenizer.json, or the texts have fewer than two tokens.
    """
    file = tokenizer_file(model.path)
    if file is None:
        raise ConfigError(f"{model.path!r} has no tokenizer.json, which tokenizing a text needs; fetch it")
    tokenizer = Tokenizer.from_file(str(file))
    token_ids = [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False).ids]
    if len(token_ids) < 2:
        raise ConfigError(f"the texts have {len(token_ids)} tokens; give at least 2")
    served = _perplexity(model, token_ids)
    is_full = model.quantization is Quantization.NONE
    full = None if is_full else _perplexity(replace(model, quantization=Quantization.NONE), token_ids)
    return Quality(served, full, len(token_ids))


def _perplexity(model: ModelConfig, token_ids: Seq[int]) -> float:
    runner = ModelRunner(model, CacheConfig(num_blocks=-(-WINDOW // CacheConfig().block_size)))
    return perplexity(runner, token_ids)
