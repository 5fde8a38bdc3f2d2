"""Inputs of single layers: numbers of each token that a layer adds after its MLP (Gemma 4 E2B and E4B)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.row_operations import RowOperations
from engine.model.linear.packed_linear import Linear


class LayerInputs:
    """The inputs of all layers: from a token's row in a table of its own, and from its embedding."""

    def __init__(
        self, decoder: Any, weight: Tensor, projection: Linear, rows: RowOperations, dtype: torch.dtype
    ) -> None:
        """Take over the table of a stock `decoder`.

        Args:
            decoder: has inputs for its layers.
            weight: of the norm over one layer's input, [size].
            projection: from embeddings to the inputs of all layers.
            rows: norms them.
            dtype: of the inputs.
        """
        table: nn.Embedding = decoder.embed_tokens_per_layer
        self._table, self._projection, self._rows, self._dtype = table.weight, projection, rows, dtype
        self._norm = weight.expand(len(decoder.layers), -1).contiguous()
        self._table_scale = torch.tensor(table.scalar_embed_scale, dtype=dtype)  # rounded first, as in transformers
        self._projection_scale = float(decoder.per_layer_model_projection_scale)
        self._scale = float(decoder.per_layer_input_scale)

    def of(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the inputs of each layer, [layers, T, size], contiguous.

        Args:
            token_ids: [T].
            embedded: their embeddings, [T, hidden].
        """
        own = self._table.index_select(0, token_ids).to(self._dtype) * self._table_scale
        projected = (self._projection(embedded) * self._projection_scale).view(len(token_ids), *self._norm.shape)
        normed = self._rows.norm_heads(projected, len(self._norm), self._norm)
        return ((normed + own.view_as(normed)) * self._scale).transpose(0, 1).contiguous()
