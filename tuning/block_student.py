"""A DSpark head in training (arXiv:2607.05147): the blocks of all rounds of a text at once.

    context p   norm(fc(target's states of p)): keys and values alone
    block p     row 0: token p, later rows: masks; they see contexts 0 .. p - 1 and their own block
                row j predicts token p + 1 + j, with a term of low rank of token p + j

So there is a row j for every place of a text, and its scores are a product with the contexts and a few more, of its
own block. A mask's projections are the same at every place until they are rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.draft_heads.published import HeadFormat
from tuning.student import DraftLayer, Norm, attend

_Keys = tuple[Tensor, Tensor]  # keys and values, [B, heads, T, D]
_Table = tuple[Tensor, Tensor]  # cosines and sines of positions, [1, T, D]


class BlockStudent(nn.Module):
    """The head, with the module names of speculators' layout."""

    def __init__(self, config: HeadFormat) -> None:
        super().__init__()
        block, layer = config.block, config.layer
        assert block is not None, "a parallel head has blocks"
        width = layer.hidden_size
        self._num_rows, self._sees_later_rows = block.num_rows, not config.are_causal[0]
        self.fc = nn.Linear(len(config.taps.layers) * config.target.hidden_size, width, bias=False)
        self.hidden_norm, self.norm = (Norm(width, layer.rms_norm_eps) for _ in range(2))
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        self.layers: Any = nn.ModuleList(_BlockLayer(layer) for _ in range(layer.num_hidden_layers))
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.markov_head = _MarkovHead(config.target.vocab_size, block.markov_rank, config.draft_vocab_size)
        self._rotary = LlamaRotaryEmbedding(layer)

    def drafts(self, features: Tensor, embedded: Tensor, places: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the normed states [N, S] of row 0, 1 ... of some blocks, for each of `places`.

        `features` [B, T, taps * hidden] and the tokens' embeddings `embedded` [B, T, S] are of texts. `places` [N] are
        the last tokens before the drafts, as indices into B * T.
        """
        context, num_places = self.hidden_norm(self.fc(features)), features.shape[1]
        positions = torch.arange(num_places + self._num_rows, device=features.device)[None]
        turns = self._rotary(features, positions)
        tables = [tuple(each[:, row : row + num_places] for each in turns) for row in range(self._num_rows)]
        rows = [embedded, *[self.mask_embedding[None, None]] * (self._num_rows - 1)]
        *layers, last = self.layers
        for layer in layers:
            attended = layer.attended(rows, context, tables, self._sees_later_rows)
            rows = [layer.finish(row, each) for row, each in zip(rows, attended, strict=True)]
        attended = last.attended(rows, context, tables, self._sees_later_rows)
        for row, each, chosen in zip(rows, attended, places, strict=False):
            residual = row.flatten(0, 1)
            yield self.norm(
                last.finish(residual if len(residual) == 1 else residual[chosen], each.flatten(0, 1)[chosen])
            )

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """States [N, S] and the tokens before their drafts [N] to logits [N, draft vocabulary]."""
        found: Tensor = self.lm_head(states) + self.markov_head(before)
        return found


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """Return the term [N, draft vocabulary] of the tokens before drafts [N]."""
        term: Tensor = self.markov_w2(self.markov_w1(before))
        return term


class _BlockLayer(DraftLayer):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size)
        self.self_attn.update({name: Norm(config.head_dim, config.rms_norm_eps) for name in ("q_norm", "k_norm")})

    def attended(
        self, rows: Sequence[Tensor], context: Tensor, tables: Sequence[_Table], sees_later_rows: bool
    ) -> Iterator[Tensor]:
        """Yield each row's attention [B, T, heads * D]; rows are [B, T, S], or [1, 1, S] where they are all alike.

        The row at place p sees contexts 0 .. p - 1, and the rows of its own block.
        """
        found = self._keys(context, tables[0])
        normed = [self.input_layernorm(row) for row in rows]
        own = [self._keys(row, table) for row, table in zip(normed, tables, strict=True)]
        for index, (row, table) in enumerate(zip(normed, tables, strict=True)):
            query = self._rotated("q", row, table)
            yield attend(query, found, own if sees_later_rows else own[: index + 1], first_unseen=0)

    def _keys(self, x: Tensor, table: _Table) -> _Keys:
        return self.shared(self._rotated("k", x, table)), self.shared(self.projected("v_proj", x))

    def _rotated(self, name: str, x: Tensor, table: _Table) -> Tensor:
        normed = self.self_attn[f"{name}_norm"](self.projected(f"{name}_proj", x))
        found: Tensor = apply_rotary_pos_emb(normed, normed, *table)[0]
        return found
