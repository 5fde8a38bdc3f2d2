"""EAGLE-3 heads for tests: checkpoints in both published layouts, and the drafting they stand for, in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.heads_world import HIDDEN_SIZE, lm_head_of, random

DRAFT_VOCAB_SIZE = 60
NUM_HEADS = 4
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
LAYER = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LOSSLESS = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}


def drafted_ids() -> Tensor:
    """The tokens of the head's vocabulary, in an order of its own."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(9))[:DRAFT_VOCAB_SIZE]


def head_tensors(target: Path, num_taps: int, target_hidden_size: int = HIDDEN_SIZE) -> dict[str, Tensor]:
    """A head that repeats, with noise, what the token itself suggests: right about targets whose layers do little.

    Names are those of the original layout.
    """
    eye, nothing = torch.eye(HIDDEN_SIZE), torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    looks = torch.cat((2.0 * eye, nothing), dim=1)  # each pair sees itself above all
    takes = torch.cat((eye, nothing), dim=1)
    wide = HIDDEN_SIZE, 2 * HIDDEN_SIZE
    ids = drafted_ids()
    attention = {
        "q_proj": looks + random(*wide, seed=1, scale=0.02),
        "k_proj": looks + random(*wide, seed=2, scale=0.02),
        "v_proj": takes + random(*wide, seed=3, scale=0.05),
        "o_proj": eye + random(HIDDEN_SIZE, HIDDEN_SIZE, seed=4, scale=0.02),
    }
    mlp = {
        "gate_proj": random(48, HIDDEN_SIZE, seed=5),
        "up_proj": random(48, HIDDEN_SIZE, seed=6),
        "down_proj": random(HIDDEN_SIZE, 48, seed=7, scale=0.02),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return {
        "fc.weight": random(HIDDEN_SIZE, num_taps * target_hidden_size, seed=8, scale=0.02),
        **{f"midlayer.self_attn.{name}.weight": tensor for name, tensor in attention.items()},
        **{f"midlayer.mlp.{name}.weight": tensor for name, tensor in mlp.items()},
        **{f"midlayer.{name}.weight": 1 + random(HIDDEN_SIZE, seed=10 + i, scale=0.05) for i, name in enumerate(norms)},
        "norm.weight": torch.ones(HIDDEN_SIZE) + random(HIDDEN_SIZE, seed=20, scale=0.05),
        "lm_head.weight": lm_head_of(target)[ids].contiguous(),
        "d2t": ids - torch.arange(DRAFT_VOCAB_SIZE),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True),
    }


def write_original(
    folder: Path, tensors: Mapping[str, Tensor], taps: Seq[int] | None, *, is_pickled: bool = False, **config: object
) -> Path:
    """The authors' layout: one flat configuration, `midlayer`, layers counted by their outputs."""
    folder.mkdir(parents=True)
    if is_pickled:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        save_file(dict(tensors), folder / "model.safetensors")
    named: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "draft_vocab_size": DRAFT_VOCAB_SIZE}
    if taps is not None:
        ids = [tap - 1 for tap in taps]
        named["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    (folder / "config.json").write_text(json.dumps(named | config))
    return folder


def write_speculators(folder: Path, tensors: Mapping[str, Tensor], taps: Seq[int] | None, **config: object) -> Path:
    """The layout of the speculators library: `layers.0`, layers counted by their inputs."""
    folder.mkdir(parents=True)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    named: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [LOSSLESS],
            "verifier": {"name_or_path": "any", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYER,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": None if taps is None else list(taps),
    }
    (folder / "config.json").write_text(json.dumps(named | config))
    return folder


class PlainEagle3:
    """EAGLE-3 as the paper draws it, run over the whole text for every draft; it knows the original names alone."""

    def __init__(self, target: Path, tensors: Mapping[str, Tensor], taps: Seq[int], **flags: bool) -> None:
        self._target = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32)
        self._target.eval()
        self._tensors = dict(tensors)
        self._taps = taps
        self._flags = flags

    @classmethod
    def read(cls, target: Path, head: Path, taps: Seq[int]) -> PlainEagle3:
        return cls(target, load_file(head / "model.safetensors"), taps)

    def drafts(self, token_ids: Seq[int], num_drafts: int) -> tuple[int, ...]:
        """The greedy chain behind `token_ids`."""
        ids, states, found = list(token_ids), self.states(token_ids[:-1]), []
        for _ in range(num_drafts):
            logits, last = self.step(states, ids[1:])
            found.append(int(logits.argmax()))
            ids, states = [*ids, found[-1]], torch.cat((states, last[None]))
        return tuple(found)

    @torch.no_grad()
    def states(self, token_ids: Seq[int]) -> Tensor:
        """What enters the head of each position's target states, [T, S]."""
        hidden = self._target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        tapped = [self._raw(hidden, tap) for tap in self._taps]
        if self._flags.get("fc_norm"):
            tapped = [self._norm(state, f"fc_norm.{index}") for index, state in enumerate(tapped)]
        features = torch.cat(tapped, dim=-1)
        if self._flags.get("norm_before_fc"):
            features = self._norm(features, "input_norm")
        return self._linear(features, "fc")

    @torch.no_grad()
    def step(self, states: Tensor, next_ids: Seq[int]) -> tuple[Tensor, Tensor]:
        """States [T, S] and the tokens behind them: the logits [V] and the state [S] of the last pair."""
        table = self._tensors.get("embed_tokens.weight", self._target.get_input_embeddings().weight)
        embedded, normed = table[list(next_ids)], self._norm(states, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), dim=-1)
        hidden = (normed if self._flags.get("norm_before_residual") else states) + self._attention(x)
        y = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = self._linear(y, "midlayer.mlp.gate_proj"), self._linear(y, "midlayer.mlp.up_proj")
        hidden = hidden + self._linear(gate * gate.sigmoid() * up, "midlayer.mlp.down_proj")
        out = self._norm(hidden, "norm")
        logits = torch.full((len(self._target.get_input_embeddings().weight),), float("-inf"))
        for draft_id, score in enumerate(self._linear(out, "lm_head")[-1]):
            logits[draft_id + int(self._tensors["d2t"][draft_id])] = score
        return logits, (out if self._flags.get("norm_output") else hidden)[-1]

    def _raw(self, hidden: Seq[Tensor], tap: int) -> Tensor:
        """transformers norms its last hidden state; a tap is not."""
        if tap < len(hidden) - 1:
            return hidden[tap][0]
        layers = self._target.model.layers
        positions = torch.arange(hidden[-2].shape[1])[None]
        rotary = self._target.model.rotary_emb(hidden[-2], positions)
        mask = torch.full((positions.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        return layers[-1](hidden[-2], attention_mask=mask, position_embeddings=rotary, position_ids=positions)[0]

    def _attention(self, x: Tensor) -> Tensor:
        num_pairs = len(x)
        query, key, value = (
            self._linear(x, f"midlayer.self_attn.{name}_proj").view(num_pairs, NUM_HEADS, HEAD_DIM) for name in "qkv"
        )
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turns = torch.polar(torch.ones(num_pairs, HEAD_DIM // 2), torch.arange(num_pairs)[:, None] * frequencies)
        query, key = (_turned(part, turns) for part in (query, key))
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
        scores += torch.full((num_pairs, num_pairs), float("-inf")).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        return self._linear(attended, "midlayer.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._tensors[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self._tensors[f"{name}.weight"]


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers: x [T, heads, D], turns [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    product = torch.complex(first, second) * turns[:, None]
    return torch.cat((product.real, product.imag), dim=-1)
