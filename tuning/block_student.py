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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.draft_heads.published import HeadFormat
from tuning.student import Norm

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


class _BlockLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._head_dim = config.head_dim
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        query_size, key_size = (count * config.head_dim for count in (self._num_heads, self._num_kv_heads))
        self.input_layernorm, self.post_attention_layernorm = (Norm(width, eps) for _ in range(2))
        sizes = {"q_proj": (width, query_size), "k_proj": (width, key_size), "v_proj": (width, key_size)}
        products = {
            name: nn.Linear(*size, bias=False) for name, size in {**sizes, "o_proj": (query_size, width)}.items()
        }
        norms = {name: Norm(config.head_dim, eps) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict({**products, **norms})
        inner = config.intermediate_size
        sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def attended(
        self, rows: Sequence[Tensor], context: Tensor, tables: Sequence[_Table], sees_later_rows: bool
    ) -> Iterator[Tensor]:
        """Yield each row's attention [B, T, heads * D]; rows are [B, T, S], or [1, 1, S] where they are all alike."""
        found = self._keys(context, tables[0])
        normed = [self.input_layernorm(row) for row in rows]
        own = [self._keys(row, table) for row, table in zip(normed, tables, strict=True)]
        for index, (row, table) in enumerate(zip(normed, tables, strict=True)):
            query = self.self_attn["q_norm"](self._heads(self.self_attn["q_proj"](row), self._num_heads))
            query, _ = apply_rotary_pos_emb(query, query, *table)
            yield _attend(query, found, own if sees_later_rows else own[: index + 1]).transpose(1, 2).flatten(-2)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [..., S] of its input and attention."""
        hidden = residual + self.self_attn["o_proj"](attended)
        x = self.post_attention_layernorm(hidden)
        out: Tensor = hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))
        return out

    def _keys(self, x: Tensor, table: _Table) -> _Keys:
        key, value = (self._heads(self.self_attn[name](x), self._num_kv_heads) for name in ("k_proj", "v_proj"))
        key = self.self_attn["k_norm"](key)
        key, _ = apply_rotary_pos_emb(key, key, *table)
        shared = self._num_heads // self._num_kv_heads
        return key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        result: Tensor = x.unflatten(-1, (num_heads, self._head_dim)).transpose(1, 2)
        return result


def _attend(query: Tensor, context: _Keys, own: Sequence[_Keys]) -> Tensor:
    """[B or 1, H, T, D] -> [B, H, T, D]: the row at place p sees contexts 0 .. p - 1, and row p of each of `own`."""
    (key, value), scale = context, query.shape[-1] ** -0.5
    num_rows = key.shape[2]
    is_later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=key.device).triu_()
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(is_later, float("-inf"))  # [B, H, T, T]
    own_scores = [(query * each).sum(-1, keepdim=True).expand(*scores.shape[:-1], 1) * scale for each, _ in own]
    probs = torch.cat([scores, *own_scores], dim=-1).float().softmax(-1).to(query.dtype)
    attended = probs[..., :num_rows] @ value
    for index, (_, each) in enumerate(own):
        attended = attended + probs[..., num_rows + index, None] * each
    return attended
