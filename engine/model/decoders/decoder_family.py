"""Descriptions of dense families: `FusedDecoder` computes their layers by them.

What a loaded model shows by itself (norms of queries and keys, windows, multipliers, sizes) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.rotary import Rotary
from engine.model.linear.native_product import Gate

_GATES = {"silu": Gate.SILU, "gelu_pytorch_tanh": Gate.GELU_TANH}
_FUNCTIONS = _GATES | {  # of MLPs without gates
    "gelu_new": Gate.GELU_TANH,
    "gelu": Gate.GELU,
    "relu": Gate.RELU,
    "relu2": Gate.RELU_SQUARED,
}
_NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")  # in a configuration
_EPSILON = 1e-5  # of OLMo, whose configuration has none
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEFORE_AND_AFTER = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_ONE = ("input_layernorm", None, None, None)
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier")
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _one(config: Any) -> float:
    return 1.0


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
        is_parallel: the attention and the MLP read the same rows, each after its own norm if it has one.
        output: the attention's last product.
        mlp: the products of an MLP, gate, up and down; or two without gates.
        final_norm: the norm before the head.
        factors: the keys of the configuration with factors of embeddings and residuals; others are not read.
        logit_factor: a configuration's factor of logits.
        has_softcap: `final_logit_softcapping` bounds logits.
        encodes_positions: whether a layer's attention rotates queries and keys.
        has_softmax_router: the softmax of one product chooses experts, as Mixtral's, so a kernel computes a mixture.
        has_half_tables: the rotary module gives each angle once, for both halves of a head.
        other_kinds: keys of the configuration; where one is set, layers have parts that no kernel computes.
        runs_anywhere: also on several ranks and on GPUs.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = _BEFORE
    adds_one: bool = False
    centers: bool = False
    rotates_pairs: bool = False
    is_parallel: bool = False
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    final_norm: str = "norm"
    factors: tuple[str, ...] = ()
    logit_factor: Callable[[Any], float] = _one
    has_softcap: bool = False
    encodes_positions: Callable[[Any], bool] = _always
    has_softmax_router: bool = False
    has_half_tables: bool = False
    other_kinds: tuple[str, ...] = ()
    runs_anywhere: bool = False

    @property
    def is_gated(self) -> bool:
        """True if MLPs have gates."""
        return len(self.mlp) > len(("up", "down"))

    def function(self, config: Any) -> Gate:
        """Return the function in a model's MLPs; NONE for one that no kernel computes."""
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        return (_GATES if self.is_gated else _FUNCTIONS).get(name or "", Gate.NONE)

    def norm(self, layer: nn.Module, place: int) -> Tensor | None:
        """Return the weight of a layer's norm at a place of `norms`."""
        name = self.norms[place]
        norm = nn.Identity() if name is None else getattr(layer, name)
        return None if isinstance(norm, nn.Identity) else self.norm_weight(norm)

    def norm_weight(self, norm: Any) -> Tensor:
        """Return the numbers that a norm multiplies by, [hidden]; [2, hidden] with those that it adds."""
        weight: Tensor | None = getattr(norm, "weight", None)
        if weight is None:
            return torch.ones(norm.normalized_shape)
        weight, bias = 1.0 + weight.float() if self.adds_one else weight, getattr(norm, "bias", None)
        return weight if bias is None else torch.stack((weight, bias.to(weight.dtype)))

    def factor(self, config: Any, key: str) -> float:
        """Return a factor of the configuration; 1 where the family has no such key."""
        return float(getattr(config, key)) if key in self.factors else 1.0


_LLAMA = DecoderFamily(runs_anywhere=True)
_PLAIN = DecoderFamily()
_PAIRS = DecoderFamily(rotates_pairs=True)
_GEMMA = DecoderFamily(_AROUND, adds_one=True, has_softcap=True)
_LAYER_NORMS = DecoderFamily(centers=True)
_COHERE = DecoderFamily(
    _ONE,
    centers=True,
    rotates_pairs=True,
    is_parallel=True,
    logit_factor=lambda config: config.logit_scale,
    other_kinds=("use_qk_norm",),
)
_GRANITE = DecoderFamily(factors=_MULTIPLIERS, logit_factor=lambda config: 1 / config.logits_scaling)
_EXAONE = DecoderFamily(
    _AFTER, encodes_positions=lambda attention: attention.sliding_window is None or attention.is_sliding
)
_MIXTRAL = DecoderFamily(has_softmax_router=True)
_DENSE = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mimo": _LLAMA,
    "cwm": _PLAIN,
    "internlm3": _PLAIN,
    "phi3": _PLAIN,
    "seed_oss": _PLAIN,
    "helium": _PAIRS,
    "iquestcoder": _PLAIN,
    "olmo": replace(_LAYER_NORMS, other_kinds=("clip_qkv",)),
    "arcee": DecoderFamily(mlp=("up_proj", "down_proj")),
    "jais2": replace(_LAYER_NORMS, mlp=("up_proj", "down_proj")),
    "starcoder2": replace(_LAYER_NORMS, mlp=("c_fc", "c_proj")),
    "phi": replace(
        _LAYER_NORMS,
        norms=_ONE,
        is_parallel=True,
        output="dense",
        mlp=("fc1", "fc2"),
        final_norm="final_layernorm",
        other_kinds=("qk_layernorm",),
    ),
    "vaultgemma": DecoderFamily(
        ("input_layernorm", None, "pre_feedforward_layernorm", None), adds_one=True, has_softcap=True
    ),
    "hyperclovax": DecoderFamily(
        ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        factors=_MULTIPLIERS,
        logit_factor=lambda config: config.logits_scaling,
    ),
    "granite": _GRANITE,
    "smollm3": DecoderFamily(encodes_positions=lambda attention: bool(attention.use_rope)),
    "gemma": DecoderFamily(adds_one=True),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": DecoderFamily(
        _AROUND,
        has_softcap=True,
        other_kinds=("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block"),
    ),
    "ernie4_5": _PAIRS,
    "glm": _PAIRS,
    "glm4": DecoderFamily(_BEFORE_AND_AFTER, rotates_pairs=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, encodes_positions=lambda attention: attention.sliding_window is not None),
    "olmo2": DecoderFamily(_AFTER),
    "olmo3": DecoderFamily(_AFTER),
    "exaone4": _EXAONE,
}
_MIXTURES = {
    "mixtral": _MIXTRAL,
    "qwen3_moe": _MIXTRAL,
    "olmoe": replace(_MIXTRAL, other_kinds=("clip_qkv",)),
    "dots1": _PLAIN,
    "glm4_moe": _PLAIN,
    "hy_v3": _PLAIN,
    "minimax_m2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "aria_text": _PLAIN,
    "solar_open": _PLAIN,
    "ernie4_5_moe": _PAIRS,
    "exaone_moe": replace(_EXAONE, norms=_BEFORE),
    "flex_olmo": DecoderFamily(_AFTER),
    "phimoe": _LAYER_NORMS,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "cohere2_moe": replace(
        _COHERE,
        encodes_positions=lambda attention: attention.sliding_window is not None or attention.force_rope,
        other_kinds=("rms_norm_eps",),
    ),
    "gpt_oss": DecoderFamily(has_half_tables=True),
}
FAMILIES = _DENSE | _MIXTURES
SELF_DRAFTING = tuple(_DENSE)


def family_of(config: Any) -> DecoderFamily | None:
    """Return the description of a model's family; None if it has none."""
    family = FAMILIES.get(config.model_type)
    if family is None or not family.function(config) or any(getattr(config, key, None) for key in family.other_kinds):
        return None
    return family


def rotaries(model: Any) -> dict[str | None, Rotary]:
    """Return a model's rotary functions by the type of layer; one with the key None is for all layers."""
    rotary = model.model.rotary_emb
    if FAMILIES[model.config.model_type].has_half_tables:
        return {None: partial(_doubled, rotary)}
    if not hasattr(rotary, "layer_types"):
        return {None: rotary}
    return {kind: partial(rotary, layer_type=kind) for kind in rotary.layer_types}


def _doubled(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(like, positions)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def embedding_scale(model: Any, family: DecoderFamily) -> float:
    """Return the factor of embeddings."""
    own = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    return float(own) if own is not None else family.factor(model.config, "embedding_multiplier")


def norm_epsilon(config: Any) -> float:
    """Return the number added to the variance in the norms."""
    return next((float(value) for key in _NORM_EPSILONS if (value := getattr(config, key, None))), _EPSILON)
