"""The tensors of an EAGLE-3 head, checked one by one against its configuration and its target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.draft_heads.checkpoint import Weights
from engine.model.draft_heads.eagle3_config import Eagle3Config
from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """S is the width of the head, F of all tapped states together, I of the feed-forward."""

    fc: Tensor  # [S, F]
    qkv: Tensor  # [(heads + 2 * kv heads) * D, 2 * S]
    output: Tensor  # [S, heads * D]
    gate_up: Tensor  # [2 * I, S]
    down: Tensor  # [S, I]
    embedding_norm: Tensor  # [S]
    hidden_norm: Tensor  # [S]
    mlp_norm: Tensor  # [S]
    final_norm: Tensor  # [S]
    lm_head: Tensor  # [draft vocabulary, S]
    embedding: Tensor  # [V of the target, S]
    target_ids: Tensor | None  # [draft vocabulary] the target's id of each head id; None if equal
    input_norm: Tensor | None  # [F]
    tap_norms: Tensor | None  # [taps, F / taps]


class Eagle3Reader:
    """Takes an EAGLE-3 head out of a checkpoint, in the dtype and on the device of the target's embedding."""

    def __init__(self, config: Eagle3Config, weights: Weights, target_embedding: Tensor) -> None:
        self._config = config
        self._weights = weights
        self._target_embedding = target_embedding

    def read(self) -> Eagle3Weights:
        """Return all tensors; raises ConfigError if one is missing, has another shape, or is unknown."""
        config, layer, width = self._config, self._config.layer, self._config.layer.hidden_size
        query_size, key_size = (
            count * layer.head_dim for count in (layer.num_attention_heads, layer.num_key_value_heads)
        )
        # The layer's input is the embedding next to the state, hence 2 * width.
        num_features = len(config.taps.layers) * config.target_hidden_size
        projections = (("q_proj", query_size), ("k_proj", key_size), ("v_proj", key_size))
        qkv = [self._in_layer(f"self_attn.{name}", size, 2 * width) for name, size in projections]
        gate_up = [self._in_layer(f"mlp.{name}", layer.intermediate_size, width) for name in ("gate_proj", "up_proj")]
        weights = Eagle3Weights(
            fc=self._take("fc.weight", width, num_features),
            qkv=torch.cat(qkv),
            output=self._in_layer("self_attn.o_proj", width, query_size),
            gate_up=torch.cat(gate_up),
            down=self._in_layer("mlp.down_proj", width, layer.intermediate_size),
            embedding_norm=self._in_layer("input_layernorm", width),
            hidden_norm=self._in_layer("hidden_norm", width),
            mlp_norm=self._in_layer("post_attention_layernorm", width),
            final_norm=self._take("norm.weight", width),
            lm_head=self._take("lm_head.weight", config.draft_vocab_size, width),
            embedding=self._embedding(),
            target_ids=self._target_ids(),
            input_norm=self._take("input_norm.weight", num_features) if config.norm_before_fc else None,
            tap_norms=self._tap_norms() if config.fc_norm else None,
        )
        self._weights.take_if_there(
            f"{config.layer_prefix}self_attn.rotary_emb.inv_freq", (layer.head_dim // 2,)
        )  # in old files; it follows from the configuration
        self._weights.finish()
        return weights

    def _embedding(self) -> Tensor:
        """Return the head's own table, or else the target's."""
        name, width = "embed_tokens.weight", self._config.layer.hidden_size
        if name in self._weights:
            return self._take(name, self._config.vocab_size, width)
        if self._target_embedding.shape[1] != width:
            raise ConfigError(
                f"{self._weights.source} has no {name} and cannot share the target's: its width is {width}, the "
                f"target's {self._target_embedding.shape[1]}; use the head that was trained for it"
            )
        return self._target_embedding

    def _target_ids(self) -> Tensor | None:
        """Return target ids: `d2t` is added to a head's id, `t2d` marks the target's ids that the head knows."""
        num_drafted, num_tokens = self._config.draft_vocab_size, self._config.vocab_size
        known = self._weights.take_if_there("t2d", (num_tokens,))
        if "d2t" not in self._weights and num_drafted == num_tokens:
            return None
        target_ids = torch.arange(num_drafted) + self._weights.take("d2t", (num_drafted,)).long()
        if (
            len(set(target_ids.tolist())) < num_drafted
            or not 0 <= int(target_ids.min()) <= int(target_ids.max()) < num_tokens
        ):
            raise ConfigError(
                f"{self._weights.source} is damaged: 'd2t', which is added to the head's ids, does not map them to "
                f"{num_drafted} of the target's {num_tokens} ids"
            )
        if known is not None and not torch.equal(known.bool().nonzero()[:, 0], target_ids.sort().values):
            raise ConfigError(f"{self._weights.source} is damaged: 'd2t' and 't2d' name different tokens")
        return target_ids.to(self._target_embedding.device)

    def _tap_norms(self) -> Tensor:
        size = self._config.target_hidden_size
        return torch.stack([self._take(f"fc_norm.{tap}.weight", size) for tap in range(len(self._config.taps.layers))])

    def _in_layer(self, name: str, *shape: int) -> Tensor:
        return self._take(f"{self._config.layer_prefix}{name}.weight", *shape)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._target_embedding)
