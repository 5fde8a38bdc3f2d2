"""EAGLE-3: a decoder layer that reads three of the target's states, and then its own (arXiv:2503.01840).

    low, middle and high state of position p        token t(p+1)
                      |                                  |
                     fc                              embedding
                      |                                  |
                   state p ----- norm --- cat --- norm --+
                      |                    |
                      + <-- attention -----+       attends to the pairs of all positions up to p
                      + <-- feed-forward
                      |
                next state, whose logits over the head's own vocabulary are of t(p+2)

The first draft uses the target's states; later drafts have only the head's own. P-EAGLE (arXiv:2602.01469) gives later
drafts one learned state and a mask token instead, so that one pass computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.draft_heads.head import BlockLogits
from engine.model.draft_heads.layers import HeadReader, spread
from engine.model.draft_heads.published import HeadFormat
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.packed_linear import Linear


class Eagle3Head:
    """One head over its target: a `RecurrentHead` whose states have the head's own width."""

    def __init__(self, config: HeadFormat, reader: HeadReader) -> None:
        """Take over the tensors."""
        width = config.layer.hidden_size
        num_taps = len(config.taps.layers)
        size = config.target.hidden_size
        self.taps = config.taps
        self._config = config
        self._layers = reader.layers(has_pairs=True)
        self.layer_shapes, self.place = self._layers.shapes, self._layers.place
        own = reader.lm_head(is_needed=True)
        assert own is not None, "it was asked for"
        self.lm_head: Linear = own  # until the runner replaces it with the target's
        self._own_lm_head = own
        self._embedding, self._target_ids = reader.embedding(), reader.target_ids()
        self._hidden_norm = reader.vector(f"{reader.prefix(0)}hidden_norm", width)
        self._final_norm = self._layers.final_norm
        self._input_norm = reader.vector("input_norm", num_taps * size) if config.norm_before_fc else None
        self._tap_norms: Tensor | None = None  # [taps, F / taps]
        if config.fc_norm:
            self._tap_norms = torch.stack([reader.vector(f"fc_norm.{tap}", size) for tap in range(num_taps)])
        self._fuse = reader.linear("fc", width, num_taps * size)

    @torch.inference_mode()
    def enter(self, features: Tensor) -> Tensor:
        """The tapped states of the target [R, F] as one state each, [R, S]."""
        if self._input_norm is not None:
            features = self._norm(features, self._input_norm)
        if self._tap_norms is not None:
            num_taps, width = self._tap_norms.shape
            normed = F.rms_norm(features.view(-1, num_taps, width), (width,), eps=self._config.layer.rms_norm_eps)
            features = (normed * self._tap_norms).flatten(1)
        return self._fuse(features)

    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        assert batch is not None, "it has KV"
        return self.forward(batch, self.enter(features))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """Map states [T, S] and the tokens after them to the next states of the pass's logit rows, [R, S]."""
        embedded = self._embedding.index_select(0, batch.input_ids)  # [T, S]
        normed = self._norm(states, self._hidden_norm)
        residual = normed if self._config.norm_before_residual else states
        pairs = torch.cat((self._norm(embedded, self._layers.input_norm), normed), dim=-1)
        hidden, normed = self._layers(batch, pairs, residual)
        return normed if self._config.norm_output else hidden

    def step(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        return self.forward(batch, states)

    def no_states(self, num_rows: int) -> Tensor:
        return self._hidden_norm.new_zeros(num_rows, len(self._hidden_norm))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[R, S] -> [R, V of the target] float32; a token that the head does not know has `UNKNOWN`."""
        if not self._config.norm_output:
            states = self._norm(states, self._final_norm)
        return spread(self._own_lm_head(states).float(), self._target_ids, self._config.target.vocab_size)

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return self._layers.rows.add_norm(states, None, weight)[1]


class ParallelEagleHead(Eagle3Head):
    """P-EAGLE: a `BlockHead` of pairs, the newest one of the text and then masks."""

    max_drafts: int | None = None
    num_more_rows = -1

    def __init__(self, config: HeadFormat, reader: HeadReader) -> None:
        super().__init__(config, reader)
        assert config.block is not None, "a parallel head has blocks"
        self._mask_id = config.block.mask_id
        size = len(config.taps.layers) * config.target.hidden_size
        self._mask_state = self.enter(reader.take("mask_hidden", 1, 1, size).view(1, size))  # [1, S]

    def block_ids(self, last_id: int, num_drafts: int) -> list[int]:
        return [self._mask_id] * (num_drafts - 1)

    @torch.inference_mode()
    def block(self, batch: ForwardBatch | None, states: Tensor, num_drafts: Seq[int]) -> BlockLogits:
        """The states [B, S] belong to the newest pairs; each comes before its block's masks."""
        if batch is not None:
            masks = self.forward(batch, self._mask_state.expand(len(batch.input_ids), -1))
            parts = zip(states.split(1), masks.split([num - 1 for num in num_drafts]), strict=True)
            states = torch.cat([rows for pair in parts for rows in pair])
        logits = self.logits(states)
        return lambda rows, _: logits[rows]
