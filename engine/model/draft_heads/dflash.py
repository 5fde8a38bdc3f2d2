"""DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147): a block of masks, in one pass over the target's states.

    position             0 ... n - 2                      n - 1    n   ...  n + K - 1
    keys and values      of fc(tapped states), per layer  of the block's own rows
    the block                                             token    mask ... mask        -> logits of n ... n + K - 1

Rows of a block see all its rows, except in causal layers. With DSpark the logits of a draft get a term of low rank that
depends on the draft before it, and the block's first row drafts too. With DFlash 2 the likeliest tokens of a draft get
scores that depend on the draft before it, and a row is mixed with the rows of its block before it. With XPress the term
depends on all drafts before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.model.draft_heads.block_terms import BlockStates, block_term
from engine.model.draft_heads.checkpoint import MASK_EMBEDDING
from engine.model.draft_heads.head import BlockLogits
from engine.model.draft_heads.layers import HeadReader, spread
from engine.model.draft_heads.published import HeadFormat
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.packed_linear import Linear
from protos.errors import ConfigError


class DFlashHead:
    """Implements `BlockHead`; its states are empty, since the text's states are in its KV."""

    def __init__(self, config: HeadFormat, reader: HeadReader) -> None:
        """Take over the tensors."""
        assert config.block is not None, "a parallel head has blocks"
        width = config.layer.hidden_size
        self._config, self._block = config, config.block
        self.taps = config.taps
        self.num_more_rows = 0 if config.block.is_anchor_drafting else 1
        self.max_drafts: int | None = config.block.num_rows - self.num_more_rows
        self._layers = reader.layers(has_pairs=False)
        self.layer_shapes, self.place = self._layers.shapes, self._layers.place
        self._fuse = reader.linear("fc", width, len(config.taps.layers) * config.target.hidden_size)
        self._hidden_norm = reader.vector("hidden_norm", width)
        self._embedding, self._target_ids = reader.embedding(), reader.target_ids()
        self._mask_embedding = reader.take_if_there(MASK_EMBEDDING, width)
        self._own_lm_head = reader.lm_head(is_needed=False)
        self.lm_head: Linear = self._own_lm_head or _no_lm_head
        self._term = block_term(config, reader, self._target_ids)
        if config.block.refinement is not None and self._target_ids is not None:
            raise ConfigError(
                "a DFlash 2 head with token ids of its own (d2t) cannot be computed; use a whole vocabulary"
            )
        _take_confidence(config, reader)

    @torch.inference_mode()
    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        assert batch is not None, "it has KV"
        context = self._layers.rows.add_norm(self._fuse(features), None, self._hidden_norm)[1]
        self._layers.write_context(batch, context)
        num_rows = len(features) if batch.logit_rows is None else len(batch.logit_rows)
        return features.new_empty(num_rows, 0)

    def block_ids(self, last_id: int, num_drafts: int) -> list[int]:
        return [last_id, *[self._block.mask_id] * (num_drafts + self.num_more_rows - 1)]

    @torch.inference_mode()
    def block(self, batch: ForwardBatch | None, states: Tensor, num_drafts: Seq[int]) -> BlockLogits:
        assert batch is not None, "every block has rows"
        embedded = self._embedding.index_select(0, batch.input_ids)
        if self._mask_embedding is not None:
            is_mask = batch.input_ids == self._block.mask_id
            embedded = torch.where(is_mask[:, None], self._mask_embedding, embedded)
        embedded = embedded * self._block.embedding_scale
        normed = self._layers.rows.add_norm(embedded, None, self._layers.input_norm)[1]
        places = None
        if self._block.refinement is not None:
            sizes = [num + self.num_more_rows for num in num_drafts]
            places = torch.cat([torch.arange(size, device=normed.device) for size in sizes])
        # A refiner reads the states of all rows, and nothing else does.
        read = batch if self._block.refiner is None else replace(batch, logit_rows=None)
        _, all_hidden = self._layers(read, normed, embedded, places)
        hidden = all_hidden  # [R, S], of the drafts
        if read is not batch and batch.logit_rows is not None:
            hidden = all_hidden.index_select(0, batch.logit_rows)
        logits = (self._own_lm_head or self.lm_head)(hidden).float() * self._block.logit_scale
        if self._block.logit_softcap is not None:
            logits = torch.tanh(logits / self._block.logit_softcap) * self._block.logit_softcap
        if self._term is not None:
            return self._term.over(BlockStates(logits, hidden, all_hidden, num_drafts))
        logits = spread(logits, self._target_ids, self._config.target.vocab_size)
        return lambda rows, _: logits[rows]


def _take_confidence(config: HeadFormat, reader: HeadReader) -> None:
    """Drop the head that predicts acceptance: the engine measures it (`engine.accounting.acceptance`)."""
    block = config.block
    if block is not None and block.has_confidence:
        size = config.layer.hidden_size + (block.markov_rank if block.has_markov_confidence else 0)
        reader.take("confidence_head.proj.weight", 1, size)
        reader.take_if_there("confidence_head.proj.bias", 1)


def _no_lm_head(hidden: Tensor) -> Tensor:
    raise AssertionError("the runner gives the head the target's lm_head")
