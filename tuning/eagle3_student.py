"""An EAGLE-3 head in training: the layer, unrolled over the drafts of a round (arXiv:2503.01840, section 3).

    step 0    pair p: (target's states of p, t(p+1))   sees pairs 0 .. p            predicts t(p+2)
    step 1    pair p: (own state 0 of p,     t(p+2))   sees the pairs of step 0,    predicts t(p+3)
    step j    ...                                      and its own steps 1 .. j

This is drafting at every position of a text at once. Pairs of committed tokens carry the target's states, pairs of
drafts the head's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target's logits and hidden states for a text [B, T]."""

    features: Tensor  # [B, T, taps * hidden] inputs of the tapped layers
    logits: Tensor  # [B, T, V]


@torch.no_grad()
def view_of(target: LlamaForCausalLM, ids: Tensor, taps: tuple[int, ...]) -> TargetView:
    """Run the target over ids [B, T]."""
    found = target(ids, use_cache=False, output_hidden_states=True)
    return TargetView(torch.cat([found.hidden_states[tap] for tap in taps], dim=-1), found.logits)


class Eagle3Student(nn.Module):
    """The head, with the module names of the original checkpoint format; `config` is the target's LlamaConfig."""

    def __init__(self, config: Any, num_taps: int, draft_vocab_size: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.midlayer = _Midlayer(config)
        self.norm = _Norm(width, eps)
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


class _Norm(nn.RMSNorm):
    """Norm in the input's dtype; with float32 weights the fused kernel would not take bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _Midlayer(nn.Module):
    """One decoder layer whose attention reads embedding and state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        query_size, key_size = (count * config.head_dim for count in (self._num_heads, self._num_kv_heads))
        self.hidden_norm = _Norm(width, eps)
        self.input_layernorm = _Norm(width, eps)
        self.post_attention_layernorm = _Norm(width, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * width, query_size, bias=False),
                "k_proj": nn.Linear(2 * width, key_size, bias=False),
                "v_proj": nn.Linear(2 * width, key_size, bias=False),
                "o_proj": nn.Linear(query_size, width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(width, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, width, bias=False),
            }
        )

    def forward(
        self,
        states: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        past: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """States and embeddings [B, N, hidden] to the next states; `past` grows by the keys and values of this step."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)  # [B, N, 2 * hidden]
        query = self._heads(self.self_attn["q_proj"](x), self._num_heads)
        key = self._heads(self.self_attn["k_proj"](x), self._num_kv_heads)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        group_size = self._num_heads // self._num_kv_heads
        value = self._heads(self.self_attn["v_proj"](x), self._num_kv_heads)
        past.append((key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)))
        attended = _attend(query, past).transpose(1, 2).flatten(2)
        hidden = states + self.self_attn["o_proj"](attended)
        x = self.post_attention_layernorm(hidden)
        out: Tensor = hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))
        return out

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[B, N, heads * D] -> [B, heads, N, D]."""
        result: Tensor = x.unflatten(-1, (num_heads, self._head_dim)).transpose(1, 2)
        return result


def _attend(query: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, H, N, D]: row p sees the first step's pairs 0 .. p, and its own of every later step."""
    num_rows, scale = query.shape[2], query.shape[3] ** -0.5
    (first_key, first_value), *own = past
    is_later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu_(1)
    scores = (query @ first_key.transpose(-1, -2) * scale).masked_fill(is_later, float("-inf"))
    own_scores = [(query * key).sum(-1, keepdim=True) * scale for key, _ in own]  # [B, H, N, 1] each
    probs = torch.cat([scores, *own_scores], dim=-1).float().softmax(-1).to(query.dtype)
    attended = probs[..., :num_rows] @ first_value
    for index, (_, value) in enumerate(own):
        attended = attended + probs[..., num_rows + index, None] * value
    return attended
