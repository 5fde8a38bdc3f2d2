"""The model as the engine uses it: one flat pass over spans of many sequences, from token ids to logits.

It knows nothing of requests, scheduling or drafts. Prefill chunks, decodes and verification rows are all spans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import CacheConfig, ModelConfig
from engine.flat_pass import FlatPass
from engine.kv_cache import KVCache, block_bytes, pool_size
from engine.model_loader import load_model, model_version
from engine.paged_model import PagedModel
from engine.position_limit import max_positions
from engine.span import Span
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model and its KV pool.

    Attributes:
        vocab_size: columns of the logits, padding rows of the embedding included.
        max_model_len: tokens a sequence may have: the least of model, pool and configured limit.
        num_blocks, block_size, bytes_per_block: the pool, all layers together.
        model_version: names these weights; equal on every machine that holds the same files.
        eos_token_ids: tokens that end a text, from the model's generation config.
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None) -> None:
        """Load, check and pack; takes as long as reading the weights. Raises ConfigError for what cannot be served."""
        if model.num_threads is not None:
            torch.set_num_threads(model.num_threads)
        stock = load_model(model)
        self._model = PagedModel(stock)
        self.vocab_size = self._model.vocab_size
        self.block_size = cache.block_size
        self.bytes_per_block = block_bytes(self._model.layer_shapes, cache.block_size, stock.dtype)
        self.num_blocks = pool_size(cache, self.bytes_per_block)
        self.max_model_len = _length_limit(stock, max_model_len, self.num_blocks * self.block_size)
        self.model_version = model_version(model.path)
        self.eos_token_ids = _eos_token_ids(stock)
        self._cache = self._model.new_cache(self.num_blocks, cache.block_size)

    def forward(self, spans: Seq[Span]) -> Tensor:
        """Compute `spans` in one pass: their KV goes to their slots, the rows they ask for come back as [R, V] float32.

        Rows are in span order. Each layer writes KV before any row reads it, so a span may lean on KV that another span
        of this very pass writes. Block tables must cover every position of their span.
        """
        return self.run(FlatPass.of(spans, self._cache))

    def run(self, flat_pass: FlatPass) -> Tensor:
        """The same for a pass laid out beforehand."""
        return self._model.forward(flat_pass)

    @property
    def cache(self) -> KVCache:
        return self._cache


def _length_limit(model: PreTrainedModel, configured: int | None, num_slots: int) -> int:
    positions = max_positions(model.config)
    if configured is not None:
        if positions is not None and configured > positions:
            raise ConfigError(
                f"scheduler.max_model_len is {configured}, but the model has {positions} positions; lower it"
            )
        if configured > num_slots:
            raise ConfigError(
                f"scheduler.max_model_len is {configured}, but the KV pool holds {num_slots} tokens; "
                "lower it or raise cache.memory_gib (or num_blocks)"
            )
        return configured
    if positions is not None and positions <= num_slots:
        return positions
    logger.info("max_model_len is %d, all the KV pool holds; the model has %s positions", num_slots, positions)
    return num_slots


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    config = model.generation_config
    ids = config.eos_token_id if config is not None else model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
