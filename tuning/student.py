"""Drafts in training: a language model, and Medusa (arXiv:2401.10774), EAGLE-3 (arXiv:2503.01840) and DSpark heads.

Medusa's head k reads the normed last hidden state of position p and predicts token p + 2 + k. All heads share the
target's own linear layer to the vocabulary, so a head is its residual blocks alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.draft_heads.published import HeadFormat
from tuning.log_windows import Window, read_batch


class TrainableMedusaHeads(nn.Module):
    """`num_heads` stacks of residual blocks x + silu(W x + b), initialised as the identity."""

    def __init__(self, hidden_size: int, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_blocks = num_heads, num_blocks
        self.blocks = nn.ModuleList(_Blocks(hidden_size, num_blocks) for _ in range(num_heads))

    def forward(self, hidden: Tensor) -> Iterator[Tensor]:
        """States [..., hidden] of each head in turn, for the target's linear layer."""
        return (blocks(hidden) for blocks in self.blocks)


class _Blocks(nn.Module):
    def __init__(self, hidden_size: int, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_blocks))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class Student(ABC):
    """A draft in float32; D is the number of tokens that it can draft.

    Attributes:
        model: its weights, all trained.
        are_drafts_alike: true if a draft depends only on the text before it, and not on the start of its round.
        max_drafts: the largest number of drafts of a round.
    """

    def __init__(self, model: nn.Module, *, are_drafts_alike: bool, max_drafts: int = 1 << 16) -> None:
        self.model = model
        self.are_drafts_alike = are_drafts_alike
        self.max_drafts = max_drafts

    def num_unlike(self, num_drafts: int) -> int:
        """Return the number of different drafts of a round of `num_drafts`."""
        return 1 if self.are_drafts_alike else min(num_drafts, self.max_drafts)

    @abstractmethod
    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield the logits of the first, the second ... draft of a round, each for the tokens after all windows' rows.

        Row n of draft j, [N, D], belongs to the round that began j tokens before the token after row n.
        """

    @abstractmethod
    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Return the draft's int64 ids of tokens of the target, -1 for those that it cannot draft."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft."""
        return draft_ids

    @abstractmethod
    def vocabulary(self) -> Sequence[Tensor]:
        """Return the weights with a row for each token."""


class LanguageModel(Student):
    """A draft model whose tokens are the target's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, are_drafts_alike=True)
        known: Any = model
        self._vocabulary = [known.get_input_embeddings().weight, known.get_output_embeddings().weight]

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield one draft, the same for all rounds."""
        yield read_batch(self.model, windows)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Return the ids, with padding ids of the target that the draft lacks replaced by the draft's last."""
        return target_ids.long().clamp(max=len(self._vocabulary[1]) - 1)

    def vocabulary(self) -> Sequence[Tensor]:
        """Return the input and output embeddings."""
        return self._vocabulary


# An EAGLE-3 head in training: the layer, unrolled over the drafts of a round (arXiv:2503.01840, section 3).
#
#     step 0    pair p: (target's states of p, t(p+1))   sees pairs 0 .. p            predicts t(p+2)
#     step 1    pair p: (own state 0 of p,     t(p+2))   sees the pairs of step 0,    predicts t(p+3)
#     step j    ...                                      and its own steps 1 .. j
#
# This is drafting at every position of a text at once. Pairs of committed tokens carry the target's states, pairs of
# drafts the head's own.


class Eagle3Student(nn.Module):
    """The head, with the module names of the original checkpoint format; `config` is the target's LlamaConfig."""

    def __init__(self, config: Any, num_taps: int, draft_vocab_size: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.midlayer = _Midlayer(config)
        self.norm = Norm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def begin_as(self, target: LlamaForCausalLM, target_ids: Tensor) -> None:
        """Initialise from the target: pass the highest tap through, and copy norm and vocabulary."""
        nn.init.zeros_(self.fc.weight)
        self.fc.weight[:, -self.fc.out_features :].fill_diagonal_(1.0)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.lm_head.weight[target_ids])
        for projection in (self.midlayer.self_attn["o_proj"], self.midlayer.mlp["down_proj"]):
            for weight in projection.parameters():
                nn.init.zeros_(weight)

    def steps(self, features: Tensor, embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Return the states of each draft of a round, step by step: normed states [B, T - K, hidden], K = `num_steps`.

        `features` [B, T, taps * hidden] and the tokens' embeddings `embedded` [B, T, hidden] are of a text. Row p of
        step j predicts the token at p + 2 + j. Rounds that do not fit in the text are left out.
        """
        num_pairs = features.shape[1] - num_steps
        states = self.fc(features[:, :num_pairs])  # [B, N, hidden]
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            positions = torch.arange(step, step + num_pairs, device=features.device)[None]
            tokens = embedded[:, 1 + step :][:, :num_pairs]
            states = self.midlayer(states, tokens, self._rotary(features, positions), past)
            yield self.norm(states)


class Norm(nn.RMSNorm):
    """Norm in the input's dtype; with float32 weights the fused kernel would not take bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftLayer(nn.Module):
    """A decoder layer of a head, for all rounds of a text at once; `config` is as LlamaConfig."""

    def __init__(self, config: Any, input_size: int) -> None:
        super().__init__()
        width, eps, inner = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        self._head_dim = config.head_dim
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        query_size, key_size = (count * config.head_dim for count in (self._num_heads, self._num_kv_heads))
        self.input_layernorm, self.post_attention_layernorm = (Norm(width, eps) for _ in range(2))
        self.self_attn = _linears(
            q_proj=(input_size, query_size),
            k_proj=(input_size, key_size),
            v_proj=(input_size, key_size),
            o_proj=(query_size, width),
        )
        self.mlp = _linears(gate_proj=(width, inner), up_proj=(width, inner), down_proj=(inner, width))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [..., hidden] of its input and attention."""
        hidden = residual + self.self_attn["o_proj"](attended)
        x = self.post_attention_layernorm(hidden)
        out: Tensor = hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))
        return out

    def projected(self, name: str, x: Tensor) -> Tensor:
        """Return q_proj, k_proj or v_proj of `x` [B, T, S] by heads, [B, heads, T, D]."""
        found: Tensor = self.self_attn[name](x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        return found

    def shared(self, keys: Tensor) -> Tensor:
        """Repeat keys or values [B, kv heads, T, D] for the query heads that share them."""
        return keys.repeat_interleave(self._num_heads // self._num_kv_heads, dim=1)


def _linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class _Midlayer(DraftLayer):
    """The layer whose attention reads embedding and state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, states: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """States and embeddings [B, N, hidden] to the next states; `past` grows by the keys and values of this step."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)  # [B, N, 2 * hidden]
        query, key = apply_rotary_pos_emb(self.projected("q_proj", x), self.projected("k_proj", x), *rotary)
        past.append((self.shared(key), self.shared(self.projected("v_proj", x))))
        # Row p sees the first step's pairs 0 .. p, and its own of every later step.
        return self.finish(states, attend(query, past[0], past[1:], first_unseen=1))


def attend(
    query: Tensor, context: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], *, first_unseen: int
) -> Tensor:
    """[B or 1, H, T, D] -> [B, T, H * D]: row p sees contexts 0 .. p + `first_unseen` - 1, and row p of each `own`."""
    (key, value), scale = context, query.shape[-1] ** -0.5
    num_rows = key.shape[2]
    is_unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=key.device).triu_(first_unseen)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(is_unseen, float("-inf"))  # [B, H, T, T]
    own_scores = [(query * each).sum(-1, keepdim=True).expand(*scores.shape[:-1], 1) * scale for each, _ in own]
    probs = torch.cat([scores, *own_scores], dim=-1).float().softmax(-1).to(query.dtype)
    attended = probs[..., :num_rows] @ value
    for index, (_, each) in enumerate(own):
        attended = attended + probs[..., num_rows + index, None] * each
    return attended.transpose(1, 2).flatten(-2)


# A DSpark head in training (arXiv:2607.05147): the blocks of all rounds of a text at once.
#
#     context p   norm(fc(target's states of p)): keys and values alone
#     block p     row 0: token p, later rows: masks; they see contexts 0 .. p - 1 and their own block
#                 row j predicts token p + 1 + j, with a term of low rank of token p + j
#
# So there is a row j for every place of a text, and its scores are a product with the contexts and a few more, of its
# own block. A mask's projections are the same at every place until they are rotated.

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
