"""Descriptions of dense families: `FusedDecoder` computes their layers by them.

What a loaded model shows by itself (norms of queries and keys, windows, multipliers, sizes) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
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
    "xielu": Gate.XIELU,
}
_NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")  # in a configuration
_EPSILON = 1e-5  # of OLMo, whose configuration has none
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEFORE_AND_AFTER = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_ONE = ("input_layernorm", None, None, None)
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier")
_OUTER = ("gemma3", "gemma4")  # models of several media whose text part runs alone on texts
_QUERIES = "queries"  # kind of the angles of queries that have their own
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
        is_parallel: the attention and the MLP read the same rows, each after its own norm if it has one, unless the
            configuration's `use_parallel_residual` is false.
        norms_embeddings: the final norm norms embeddings too.
        attention: a layer's attention.
        output: the attention's last product.
        mlp: the products of an MLP, gate, up and down; or two without gates. One with gate and up is named twice.
        mlp_module: a layer's attribute of the MLP.
        mixers: a layer's attributes of a recurrent layer in place of the attention.
        activation: the function in MLPs, where the configuration does not name it.
        final_norm: the norm before the head.
        factors: the keys of the configuration with factors of embeddings and residuals; others are not read.
        logit_factor: a configuration's factor of logits.
        has_softcap: `final_logit_softcapping` bounds logits.
        encodes_positions: whether a layer's attention rotates queries and keys.
        scales_queries: by their positions, as Llama 4.
        has_softmax_router: the softmax of one product chooses experts, as Mixtral's, so a kernel computes a mixture.
        angles: computes a rotary module's cosines and sines as Llama's are; None for a module that does.
        other_kinds: keys of the configuration; where one is set, layers have parts that no kernel computes.
        runs_anywhere: also on several ranks and on GPUs.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = _BEFORE
    adds_one: bool = False
    centers: bool = False
    rotates_pairs: bool = False
    is_parallel: bool = False
    norms_embeddings: bool = False
    attention: str = "self_attn"
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    mlp_module: str = "mlp"
    mixers: tuple[str, ...] = ()
    activation: str = ""
    final_norm: str = "norm"
    factors: tuple[str, ...] = ()
    logit_factor: Callable[[Any], float] = _one
    has_softcap: bool = False
    encodes_positions: Callable[[Any], bool] = _always
    scales_queries: bool = False
    has_softmax_router: bool = False
    angles: Callable[[Rotary, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    other_kinds: tuple[str, ...] = ()
    runs_anywhere: bool = False

    @property
    def is_gated(self) -> bool:
        """True if MLPs have gates."""
        return len(self.mlp) > len(("up", "down"))

    def function(self, config: Any) -> Gate:
        """Return the function in a model's MLPs; NONE for one that no kernel computes."""
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or self.activation
        return (_GATES if self.is_gated else _FUNCTIONS).get(name, Gate.NONE)

    def mixer(self, layer: nn.Module) -> nn.Module | None:
        """Return a layer's recurrent part in place of the attention; None for a layer with attention."""
        return next((part for name in self.mixers if (part := getattr(layer, name, None)) is not None), None)

    def norm(self, layer: nn.Module, place: int, size: int) -> Tensor | None:
        """Return the weight of a layer's norm over `size` numbers at a place of `norms`."""
        name = self.norms[place]
        norm = None if name is None else getattr(layer, name)
        return None if norm is None or isinstance(norm, nn.Identity) else self.norm_weight(norm, size)

    def norm_weight(self, norm: Any, size: int) -> Tensor:
        """Return the numbers that a norm multiplies by, [size]; [2, size] with those that it adds."""
        weight: Tensor | None = getattr(norm, "weight", None)
        if weight is None:
            return torch.ones(size)
        weight, bias = 1.0 + weight.float() if self.adds_one else weight, getattr(norm, "bias", None)
        return weight if bias is None else torch.stack((weight, bias.to(weight.dtype)))

    def runs_parallel(self, config: Any) -> bool:
        """True if a model's attention and MLP read the same rows."""
        return self.is_parallel and getattr(config, "use_parallel_residual", True)

    def factor(self, config: Any, key: str) -> float:
        """Return a factor of the configuration; 1 where the family has no such key."""
        return float(getattr(config, key)) if key in self.factors else 1.0


def _doubled(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles that a module gives once for both halves of a head."""
    cos, sin = rotary(like, positions)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _backwards(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of heads that turn the other way."""
    cos, sin = rotary(like, positions)
    return cos, -sin


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
)
_GRANITE = DecoderFamily(factors=_MULTIPLIERS, logit_factor=lambda config: 1 / config.logits_scaling)
_EXAONE = DecoderFamily(
    _AFTER, encodes_positions=lambda attention: attention.sliding_window is None or attention.is_sliding
)
_NEOX = replace(_LAYER_NORMS, output="dense", mlp=("dense_h_to_4h", "dense_4h_to_h"))
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
    ),
    "gpt_neox": replace(_NEOX, is_parallel=True, attention="attention", final_norm="final_layer_norm"),
    "persimmon": replace(_NEOX, final_norm="final_layernorm"),
    "stablelm": replace(_LAYER_NORMS, is_parallel=True, other_kinds=("qk_layernorm",)),
    "nemotron": replace(_LAYER_NORMS, adds_one=True, mlp=("up_proj", "down_proj")),
    "apertus": DecoderFamily(
        ("attention_layernorm", None, "feedforward_layernorm", None), mlp=("up_proj", "down_proj")
    ),
    "nanochat": DecoderFamily(norms_embeddings=True, mlp=("fc1", "fc2"), has_softcap=True, angles=_backwards),
    "ministral3": DecoderFamily(scales_queries=True),
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
    "gemma4_text": DecoderFamily(_AROUND, has_softcap=True),
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
    "gpt_oss": DecoderFamily(angles=_doubled),
    "afmoe": DecoderFamily(
        ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        encodes_positions=lambda attention: attention.is_local_attention,
    ),
}
_HYBRIDS = {
    "lfm2": DecoderFamily(
        ("operator_norm", None, "ffn_norm", None),
        output="out_proj",
        mlp=("w1", "w3", "w2"),
        mlp_module="feed_forward",
        mixers=("conv",),
        activation="silu",
        final_norm="embedding_norm",
    ),
    "bamba": DecoderFamily(
        ("input_layernorm", None, "pre_ff_layernorm", None),
        mlp_module="feed_forward",
        mixers=("mamba",),
        final_norm="final_layernorm",
    ),
    "granitemoehybrid": replace(
        _GRANITE,
        mlp=("input_linear", "input_linear", "output_linear"),
        mlp_module="shared_mlp",
        mixers=("mamba",),
        encodes_positions=lambda attention: attention.config.position_embedding_type == "rope",
    ),
}
FAMILIES = _DENSE | _MIXTURES | _HYBRIDS


def family_of(config: Any) -> DecoderFamily | None:
    """Return the description of a model's family; None if it has none."""
    text = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None or (text is not config and config.model_type not in _OUTER):
        return None
    if not family.function(text) or any(getattr(text, key, None) for key in family.other_kinds):
        return None
    return family


def rotaries(model: Any) -> dict[str | None, Rotary]:
    """Return a model's rotary functions by the type of layer; one with the key None is for all layers."""
    config, rotary = model.config.get_text_config(), model.get_decoder().rotary_emb
    family = FAMILIES[config.model_type]
    if rotary is None:
        return {}
    if hasattr(rotary, "layer_types"):
        return {kind: partial(rotary, layer_type=kind) for kind in rotary.layer_types}
    found: dict[str | None, Rotary] = {None: rotary if family.angles is None else partial(family.angles, rotary)}
    if family.scales_queries:
        found[_QUERIES] = partial(_scaled, rotary, config.rope_parameters)
    return found


def tables_of(attention: Any, index: int, family: DecoderFamily, kinds: Seq[str | None]) -> tuple[int, int] | None:
    """Return the places in `kinds` of the rotary angles of a layer's keys and queries; None without any.

    `attention` belongs to layer `index`, and `kinds` are the keys of `rotaries`.
    """
    if not family.encodes_positions(attention):
        return None
    own = kinds.index(None if None in kinds else attention.config.layer_types[index])
    return own, kinds.index(_QUERIES) if _QUERIES in kinds else own


def _scaled(rotary: Rotary, rope: Mapping[str, Any], like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of queries that grow with their positions."""
    num_lengths = torch.floor(positions / rope["original_max_position_embeddings"])
    factors = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + num_lengths)
    cos, sin = rotary(like, positions)
    return cos * factors[..., None], sin * factors[..., None]


def embedding_scale(model: Any, family: DecoderFamily) -> float:
    """Return the factor of embeddings."""
    config = model.config.get_text_config()
    own = getattr(model.get_input_embeddings(), "scalar_embed_scale", None)
    if own is None and getattr(config, "mup_enabled", False):
        own = config.hidden_size**0.5
    return float(own) if own is not None else family.factor(config, "embedding_multiplier")


def norm_epsilon(config: Any) -> float:
    """Return the number added to the variance in the norms."""
    return next((float(value) for key in _NORM_EPSILONS if (value := getattr(config, key, None))), _EPSILON)
