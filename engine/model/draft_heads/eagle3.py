"""EAGLE-3: one decoder layer that reads three of the target's states, and then its own (arXiv:2503.01840).

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

The first draft uses the target's states; later drafts have only the head's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.attention.base import LayerOptions
from engine.config import Quantization
from engine.kv_cache.pool import LayerShape
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import row_operations
from engine.model.draft_heads.checkpoint import Weights, head_folder, read_config, read_tensors
from engine.model.draft_heads.eagle3_config import Eagle3Config, TargetShape
from engine.model.draft_heads.eagle3_weights import Eagle3Reader, Eagle3Weights
from engine.model.forward_batch import ForwardBatch
from engine.model.hidden_state_taps import UNKNOWN
from engine.model.linear.packed_linear import Linear
from engine.model.linear.quantized_linear import linear_factory


class Eagle3Head:
    """One head over its target: a `RecurrentHead` whose states have the head's own width."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: Eagle3Weights,
        first_layer: int,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        """Take over the weights.

        Args:
            config: of the head.
            weights: of the head.
            first_layer: the head's first KV layer in the pool, after the target's layers.
            quantization: of the head's own products.
        """
        layer = config.layer
        make_linear, make_lm_head = (linear_factory(quantization, is_head=is_head) for is_head in (False, True))
        self.taps = config.taps
        self.layer_shapes = [LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim)]
        self.lm_head: Linear = make_lm_head(weights.lm_head, None)  # until the runner replaces it with the target's
        self._own_lm_head = self.lm_head
        self._config = config
        self._first_layer = first_layer
        self._options = LayerOptions(layer.head_dim**-0.5)
        self._embedding, self._target_ids = weights.embedding, weights.target_ids
        self._rotary = RotaryTable(LlamaRotaryEmbedding(layer).to(self._embedding.device), self._embedding)
        self._input_norm, self._tap_norms = weights.input_norm, weights.tap_norms
        self._rows = row_operations(layer.hidden_size, layer.head_dim, self._embedding, layer.rms_norm_eps)
        self._embedding_norm, self._hidden_norm = weights.embedding_norm, weights.hidden_norm
        self._mlp_norm, self._final_norm = weights.mlp_norm, weights.final_norm
        self._fuse, self._qkv = make_linear(weights.fc, None), make_linear(weights.qkv, None)
        self._output = make_linear(weights.output, None)
        self._gate_up, self._down = make_linear(weights.gate_up, None), make_linear(weights.down, None)

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

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """Map states [T, S] and the tokens after them to the next states of the pass's logit rows, [R, S]."""
        embedded = self._embedding.index_select(0, batch.input_ids)  # [T, S]
        normed = self._norm(states, self._hidden_norm)
        residual = normed if self._config.norm_before_residual else states
        attended = self._attend(torch.cat((self._norm(embedded, self._embedding_norm), normed), dim=-1), batch)
        if batch.logit_rows is not None:
            attended, residual = (rows.index_select(0, batch.logit_rows) for rows in (attended, residual))
        hidden, normed = self._rows.add_norm(residual, self._output(attended), self._mlp_norm)  # [R, S]
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        hidden, normed = self._rows.add_norm(hidden, self._down(F.silu(gate).mul_(up)), self._final_norm)
        return normed if self._config.norm_output else hidden

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[R, S] -> [R, V of the target] float32; a token that the head does not know has `UNKNOWN`."""
        if not self._config.norm_output:
            states = self._norm(states, self._final_norm)
        drafted = self._own_lm_head(states).float()  # [R, draft vocabulary]
        if self._target_ids is None:
            return drafted
        logits = drafted.new_full((drafted.shape[0], self._config.vocab_size), UNKNOWN)
        return logits.index_copy_(1, self._target_ids, drafted)

    def _attend(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, 2 * S] -> [T, heads * D]; the rows' keys and values go to the pool."""
        layer = self._config.layer
        num_rotated = layer.num_attention_heads + layer.num_key_value_heads
        qkv = self._qkv(x).view(x.shape[0], -1, layer.head_dim)
        value = qkv[:, num_rotated:].transpose(0, 1)[None]
        rotated = self._rows.rotate(qkv, num_rotated, self._rotary.at(batch))
        query_key = rotated.transpose(0, 1)[None]  # [1, Hq + H, T, D]
        query, key = query_key[:, : layer.num_attention_heads], query_key[:, layer.num_attention_heads :]
        attended = batch.attention.attend(self._first_layer, query, key, value, self._options)
        return attended.reshape(x.shape[0], -1)

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return self._rows.add_norm(states, None, weight)[1]


def load_eagle3(
    path: str, target: PreTrainedModel, device: torch.device, quantization: Quantization = Quantization.NONE
) -> Eagle3Head:
    """Return the head in `path`, for `target`, on `device`, with products in `quantization`.

    Raises:
        ConfigError: the head is missing, incomplete, made for another target, or asks for lossy acceptance.
    """
    folder = head_folder(path)
    embeddings: Any = target.get_input_embeddings()
    embedding: Tensor = embeddings.weight.to(device)
    target_config: Any = target.config.get_text_config()
    shape = TargetShape(target_config.vocab_size, embedding.shape[1], target_config.num_hidden_layers)
    config = Eagle3Config.of(read_config(folder), shape, path)
    weights = Weights(read_tensors(folder), f"the EAGLE-3 head in {path!r}")
    tensors = Eagle3Reader(config, weights, embedding).read()
    return Eagle3Head(config, tensors, target_config.num_hidden_layers, quantization)
