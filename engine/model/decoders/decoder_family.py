"""Descriptions of dense families: `FusedDecoder` computes their layers by them.

What a loaded model shows by itself (norms of queries and keys, windows, multipliers, sizes) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.model.decoders.rotary import Rotary
from engine.model.linear.native_product import Gate

_GATES = {"silu": Gate.SILU, "gelu_pytorch_tanh": Gate.GELU_TANH}
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEFORE_AND_AFTER = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_ONE = ("input_layernorm", None, None, None)
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _always(attention: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """One family.

    Attributes:
        norms: the names of a layer's norms before and after the attention, before and after the MLP, None where
            a layer has no norm.
        adds_one: a norm multiplies by 1 + weight, in float32.
        centers: a norm subtracts the mean.
        rotates_pairs: neighbors in a head are rotated together, not its halves.
        is_parallel: the attention and the MLP read the same rows.
        factors: the keys of the configuration with factors of embeddings, residuals and logits; others are not read.
        has_softcap: `final_logit_softcapping` bounds logits.
        encodes_positions: whether a layer's attention rotates queries and keys.
        runs_anywhere: also on several ranks and on GPUs.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = _BEFORE
    adds_one: bool = False
    centers: bool = False
    rotates_pairs: bool = False
    is_parallel: bool = False
    factors: tuple[str, ...] = ()
    has_softcap: bool = False
    encodes_positions: Callable[[Any], bool] = _always
    runs_anywhere: bool = False

    def norm(self, layer: nn.Module, place: int) -> Tensor | None:
        """Return the weight of a layer's norm at a place of `norms`."""
        name = self.norms[place]
        return None if name is None else self.norm_weight(getattr(layer, name))

    def norm_weight(self, norm: Any) -> Tensor:
        """Return the numbers that a norm multiplies by."""
        weight: Tensor = norm.weight
        return 1.0 + weight.float() if self.adds_one else weight

    def factor(self, config: Any, key: str) -> float:
        """Return a factor of the configuration; 1 where the family has no such key."""
        return float(getattr(config, key)) if key in self.factors else 1.0


_LLAMA = DecoderFamily(runs_anywhere=True)
_PLAIN = DecoderFamily()
_PAIRS = DecoderFamily(rotates_pairs=True)
_GEMMA = DecoderFamily(_AROUND, adds_one=True, has_softcap=True)
_COHERE = DecoderFamily(_ONE, centers=True, rotates_pairs=True, is_parallel=True, factors=("logit_scale",))
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _PLAIN,
    "qwen3_moe": _PLAIN,
    "cwm": _PLAIN,
    "internlm3": _PLAIN,
    "phi3": _PLAIN,
    "seed_oss": _PLAIN,
    "granite": DecoderFamily(factors=("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    "smollm3": DecoderFamily(encodes_positions=lambda attention: bool(attention.use_rope)),
    "gemma": DecoderFamily(adds_one=True),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "ernie4_5": _PAIRS,
    "glm": _PAIRS,
    "glm4": DecoderFamily(_BEFORE_AND_AFTER, rotates_pairs=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, encodes_positions=lambda attention: attention.sliding_window is not None),
    "olmo2": DecoderFamily(_AFTER),
    "olmo3": DecoderFamily(_AFTER),
    "exaone4": DecoderFamily(
        _AFTER, encodes_positions=lambda attention: attention.sliding_window is None or attention.is_sliding
    ),
}

SELF_DRAFTING = tuple(name for name in FAMILIES if name not in ("mixtral", "qwen3_moe"))  # those without experts


def family_of(config: Any) -> DecoderFamily | None:
    """Return the description of a model's family; None if it has none."""
    is_plain = gate_of(config) is not None and not getattr(config, "use_qk_norm", False)  # Cohere's own kind of norm
    return FAMILIES.get(config.model_type) if is_plain else None


def gate_of(config: Any) -> Gate | None:
    """Return the function of a model's gates; None for one that no kernel computes."""
    return _GATES.get(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "")


def rotaries(model: Any) -> dict[str | None, Rotary]:
    """Return a model's rotary functions by the type of layer; one with the key None is for all layers."""
    rotary = model.model.rotary_emb
    if not hasattr(rotary, "layer_types"):
        return {None: rotary}
    return {kind: partial(rotary, layer_type=kind) for kind in rotary.layer_types}


def embedding_scale(model: Any, family: DecoderFamily) -> float:
    """Return the factor of embeddings."""
    own = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    return float(own) if own is not None else family.factor(model.config, "embedding_multiplier")


def norm_epsilon(config: Any) -> float:
    """Return the number added to the variance in the norms."""
    return float(getattr(config, "rms_norm_eps", None) or config.layer_norm_eps)
