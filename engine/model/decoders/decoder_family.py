"""Descriptions of families: `FusedDecoder` computes their layers by them.

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
from engine.model.linear.native_mixture import Routing, Scores
from engine.model.linear.native_product import Gate
from engine.recurrent.stock_functions import is_recurrent

_GATES = {"silu": Gate.SILU, "gelu_pytorch_tanh": Gate.GELU_TANH}
_FUNCTIONS = _GATES | {  # of MLPs without gates
    "gelu_new": Gate.GELU_TANH,
    "gelu": Gate.GELU,
    "relu": Gate.RELU,
    "relu2": Gate.RELU_SQUARED,
    "xielu": Gate.XIELU,
}
# Keys of configurations.
_NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
_ACTIVATIONS = ("hidden_activation", "mlp_hidden_act", "hidden_act", "activation_function")
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEFORE_AND_AFTER = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_ONE = ("input_layernorm", None, None, None)
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier")
_OUTER = ("gemma3", "gemma4")  # models of several media whose text part runs alone on texts
_THETAS = "layer_rope_theta"  # in a configuration: of each layer's angles; 0 for none
_QUERIES = "queries"  # kind of the angles of queries that have their own
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors in each layer of a model."""

    scores: float = 1.0  # of the products of queries and keys
    attention: float = 1.0  # of the attention's output
    mixer: float = 1.0  # of the mixer's output
    mlp: float = 1.0  # of the rows that an MLP reads
    down: float = 1.0  # of the MLP's output


def _no_multipliers(config: Any) -> Multipliers:
    return Multipliers()


def _falcon_h1_multipliers(config: Any) -> Multipliers:
    """Factors of inputs become factors of outputs, so that the products are plain.

    The gate's is of the MLP's rows, so `up` has it too, and its inverse is in `down`.
    """
    gate, down = config.mlp_multipliers
    attention = config.attention_in_multiplier
    return Multipliers(
        scores=attention * attention * config.key_multiplier,
        attention=attention * config.attention_out_multiplier,
        mixer=config.ssm_out_multiplier,
        mlp=gate,
        down=down / gate,
    )


def _has_theta(attention: Any) -> bool:
    return bool(getattr(attention.config, _THETAS)[attention.layer_idx])


def _one(config: Any) -> float:
    return 1.0


def _always(attention: Any) -> bool:
    return True


def _never(attention: Any) -> bool:
    return False


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
        mlp_module: a layer's attribute of the MLP, or "" if the layer itself has its products. A layer may lack any
            of attention, mixer and MLP.
        mixers: a layer's attributes of a recurrent part in place of the attention, or next to it.
        rotary: the attribute of the rotary angles, or of several, each of its own theta; None without any.
        activation: the function in MLPs, where the configuration does not name it.
        final_norm: the norm before the head.
        factors: the keys of the configuration with factors of embeddings and residuals; others are not read.
        logit_factor: a configuration's factor of logits.
        has_softcap: `final_logit_softcapping` bounds logits.
        encodes_positions: whether a layer's attention rotates queries and keys.
        scales_queries: by their positions, as Llama 4.
        routing: how experts are chosen; None where no kernel chooses so.
        angles: computes a rotary module's cosines and sines as Llama's are; None for a module that does.
        other_kinds: keys of the configuration; where one is set, layers have parts that no kernel computes.
        layers: the attribute of the layers.
        positions: the attribute of embeddings of positions, which are added to tokens' embeddings; None without any.
        takes: false for the configuration of a model with other parts than these.
        wide_stream: a key of the configuration; where it is set, the residual stream is float32.
        multipliers: the factors of a model's parts.
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
    rotary: str | None = "rotary_emb"
    activation: str = ""
    final_norm: str = "norm"
    factors: tuple[str, ...] = ()
    logit_factor: Callable[[Any], float] = _one
    has_softcap: bool = False
    encodes_positions: Callable[[Any], bool] = _always
    scales_queries: bool = False
    routing: Routing | None = None
    angles: Callable[[Rotary, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    other_kinds: tuple[str, ...] = ()
    layers: str = "layers"
    positions: str | None = None
    takes: Callable[[Any], bool] = _always
    wide_stream: str = ""
    multipliers: Callable[[Any], Multipliers] = _no_multipliers
    runs_anywhere: bool = False

    @property
    def is_gated(self) -> bool:
        """True if MLPs have gates."""
        return len(self.mlp) > len(("up", "down"))

    def function(self, config: Any) -> Gate:
        """Return the function in a model's MLPs; NONE for one that no kernel computes."""
        name = next((name for key in _ACTIVATIONS if (name := getattr(config, key, None))), self.activation)
        return (_GATES if self.is_gated else _FUNCTIONS).get(name, Gate.NONE)

    def attention_of(self, layer: nn.Module) -> nn.Module | None:
        """Return a layer's attention; None for a layer without."""
        part = getattr(layer, self.attention, None)
        return part if hasattr(part, self.output) else None

    def mixer_of(self, layer: nn.Module) -> nn.Module | None:
        """Return a layer's recurrent part; None for a layer without."""
        parts = (getattr(layer, name, None) for name in self.mixers)
        return next((part for part in parts if part is not None and is_recurrent(part)), None)

    def mlp_of(self, layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """Return a layer's MLP or mixture, and an MLP that is added to it where that is no part of the mixture."""
        mixture = getattr(layer, "block_sparse_moe", None)
        if mixture is not None:
            return mixture, getattr(layer, "shared_mlp", None)
        part = getattr(layer, self.mlp_module, None) if self.mlp_module else layer
        return part if hasattr(part, self.mlp[-1]) or hasattr(part, "experts") else None, None

    def has_wide_stream(self, config: Any) -> bool:
        """True if the residual stream is float32, whatever rows are."""
        return bool(self.wide_stream) and bool(getattr(config, self.wide_stream))

    def norm(self, layer: nn.Module, place: int, size: int) -> Tensor | None:
        """Return the weight of a layer's norm over `size` numbers at a place of `norms`; None where it has none."""
        name = self.norms[place]
        norm: Any = None if name is None else layer
        for part in () if name is None else name.split("."):
            norm = getattr(norm, part, None)
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


def _opt_takes(config: Any) -> bool:
    """False for OPT-350m, whose norms follow the sums and whose embeddings have another size, and like models."""
    is_usual = config.do_layer_norm_before and not config._remove_final_layer_norm
    return is_usual and config.word_embed_proj_dim == config.hidden_size


def _opt_multipliers(config: Any) -> Multipliers:
    return Multipliers(scores=(config.hidden_size // config.num_attention_heads) ** -0.5)


def _doubled(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles that a module gives once for both halves of a head."""
    cos, sin = rotary(like, positions)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _polar(rotary: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Angles that a module gives as complex numbers, once for both halves of a head."""
    turns = rotary(like, positions)
    return torch.cat((turns.real, turns.real), dim=-1), torch.cat((turns.imag, turns.imag), dim=-1)


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
_GRANITE_SHARED = replace(_GRANITE, mlp=("input_linear", "input_linear", "output_linear"), routing=Routing())
_EXAONE = DecoderFamily(
    _AFTER, encodes_positions=lambda attention: attention.sliding_window is None or attention.is_sliding
)
_NEOX = replace(_LAYER_NORMS, output="dense", mlp=("dense_h_to_4h", "dense_4h_to_h"))
_SIGMOIDS = Routing(Scores.SIGMOID, epsilon=1e-20)
_MIXTRAL = DecoderFamily(routing=Routing())
_DEEPSEEK = DecoderFamily(routing=_SIGMOIDS)
_LEARNED = replace(  # positions
    _LAYER_NORMS,
    norms=("self_attn_layer_norm", None, "final_layer_norm", None),
    output="out_proj",
    mlp=("fc1", "fc2"),
    mlp_module="",
    rotary=None,
    positions="embed_positions",
    encodes_positions=_never,
)
_GPT2 = replace(
    _LEARNED,
    norms=("ln_1", None, "ln_2", None),
    layers="h",
    attention="attn",
    output="c_proj",
    mlp=("c_fc", "c_proj"),
    mlp_module="mlp",
    final_norm="ln_f",
    positions="wpe",
    other_kinds=("add_cross_attention",),
)
_LFM2 = DecoderFamily(
    ("operator_norm", None, "ffn_norm", None),
    output="out_proj",
    mlp=("w1", "w3", "w2"),
    mlp_module="feed_forward",
    mixers=("conv",),
    activation="silu",
    final_norm="embedding_norm",
)
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
    "granite_swa": replace(_GRANITE, rotary="rotary_embs", encodes_positions=_has_theta),
    "smollm3": DecoderFamily(encodes_positions=lambda attention: bool(attention.use_rope)),
    "gemma": DecoderFamily(adds_one=True),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": DecoderFamily(_AROUND, has_softcap=True, routing=Routing()),
    "ernie4_5": _PAIRS,
    "glm": _PAIRS,
    "glm4": DecoderFamily(_BEFORE_AND_AFTER, rotates_pairs=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, encodes_positions=lambda attention: attention.sliding_window is not None),
    "olmo2": DecoderFamily(_AFTER),
    "olmo3": DecoderFamily(_AFTER),
    "exaone4": _EXAONE,
    "minicpm3": DecoderFamily(logit_factor=lambda config: 1 / config.logits_scaling),
    "youtu": _PLAIN,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "biogpt": replace(_LEARNED, final_norm="layer_norm"),
    "opt": replace(_LEARNED, final_norm="final_layer_norm", takes=_opt_takes, multipliers=_opt_multipliers),
}
_MIXTURES = {
    "mixtral": _MIXTRAL,
    "qwen3_moe": _MIXTRAL,
    "olmoe": replace(_MIXTRAL, other_kinds=("clip_qkv",)),
    "dots1": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "hy_v3": _DEEPSEEK,
    "mimo_v2_flash": _DEEPSEEK,
    "deepseek_v2": DecoderFamily(
        rotates_pairs=True, angles=_polar, routing=Routing(is_normalized=False, has_group_sums=False)
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "axk1": replace(_DEEPSEEK, norms=("input_layernorm", None, "post_attention_layernorm", "mlp.post_mlp_layernorm")),
    "minimax_m2": _DEEPSEEK,
    "qwen2_moe": _MIXTRAL,
    "aria_text": _MIXTRAL,
    "solar_open": _DEEPSEEK,
    "ernie4_5_moe": replace(_PAIRS, routing=Routing()),
    "exaone_moe": replace(_EXAONE, norms=_BEFORE, routing=_SIGMOIDS),
    "flex_olmo": replace(_MIXTRAL, norms=_AFTER),
    "phimoe": replace(_LAYER_NORMS, routing=Routing(Scores.SPARSE)),
    "granitemoe": replace(_GRANITE, routing=Routing()),
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoe_swa": replace(_GRANITE_SHARED, rotary="rotary_embs", encodes_positions=_has_theta),
    "cohere2_moe": replace(
        _COHERE,
        encodes_positions=lambda attention: attention.sliding_window is not None or attention.force_rope,
        other_kinds=("rms_norm_eps",),
        routing=Routing(),
    ),
    "gpt_oss": DecoderFamily(angles=_doubled, routing=Routing()),
    "afmoe": DecoderFamily(
        ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        encodes_positions=lambda attention: attention.is_local_attention,
        routing=_SIGMOIDS,
    ),
}
_HYBRIDS = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="pos_emb", routing=Routing(Scores.SIGMOID, epsilon=1e-6)),
    "bamba": DecoderFamily(
        ("input_layernorm", None, "pre_ff_layernorm", None),
        mlp_module="feed_forward",
        mixers=("mamba",),
        final_norm="final_layernorm",
    ),
    "qwen3_next": DecoderFamily(adds_one=True, mixers=("linear_attn",), routing=Routing()),
    "qwen3_5_text": DecoderFamily(adds_one=True, mixers=("linear_attn",)),
    "qwen3_5_moe_text": DecoderFamily(adds_one=True, mixers=("linear_attn",), routing=Routing()),
    "mamba2": DecoderFamily(
        ("norm", None, None, None),
        mixers=("mixer",),
        rotary=None,
        final_norm="norm_f",
        wide_stream="residual_in_fp32",
    ),
    "nemotron_h": DecoderFamily(
        ("norm", None, "norm", None),
        attention="mixer",
        mlp=("up_proj", "down_proj"),
        mlp_module="mixer",
        mixers=("mixer",),
        rotary=None,
        final_norm="norm_f",
        encodes_positions=_never,
        routing=_SIGMOIDS,
    ),
    "falcon_h1": DecoderFamily(
        ("input_layernorm", None, "pre_ff_layernorm", None),
        mlp_module="feed_forward",
        mixers=("mamba",),
        final_norm="final_layernorm",
        factors=("embedding_multiplier",),
        logit_factor=lambda config: config.lm_head_multiplier,
        other_kinds=("attention_bias", "mlp_bias", "mamba_proj_bias"),
        multipliers=_falcon_h1_multipliers,
    ),
    "granitemoehybrid": replace(
        _GRANITE_SHARED,
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
    is_other = any(getattr(text, key, None) for key in family.other_kinds) or not family.takes(text)
    if is_other or not family.function(text):
        return None
    return family


def layers_of(model: Any) -> Any:
    """Return a model's layers."""
    family = FAMILIES.get(model.config.get_text_config().model_type)
    return getattr(model.get_decoder(), "layers" if family is None else family.layers)


def position_table(model: Any, family: DecoderFamily) -> Tensor | None:
    """Return the embeddings of positions from 0 on, [positions, hidden]; None without any."""
    module: Any = None if family.positions is None else getattr(model.get_decoder(), family.positions)
    return None if module is None else module.weight[getattr(module, "offset", 0) :]


def rotary_of(model: Any, family: DecoderFamily) -> Any:
    """Return a model's rotary module; None without one."""
    return None if family.rotary is None else getattr(model.get_decoder(), family.rotary)


def rotaries(model: Any) -> dict[object, Rotary]:
    """Return a model's rotary functions by the type of layer or theta; one with the key None is for all layers."""
    config = model.config.get_text_config()
    family = FAMILIES[config.model_type]
    if (rotary := rotary_of(model, family)) is None:
        return {}
    if hasattr(rotary, "layer_types"):
        return {kind: partial(rotary, layer_type=kind) for kind in rotary.layer_types}
    if isinstance(rotary, nn.ModuleList):
        embeddings: list[Any] = list(rotary)
        return {each.config.rope_parameters["rope_theta"]: each for each in embeddings}
    found: dict[object, Rotary] = {None: rotary if family.angles is None else partial(family.angles, rotary)}
    if family.scales_queries:
        found[_QUERIES] = partial(_scaled, rotary, config.rope_parameters)
    return found


def tables_of(attention: Any, index: int, family: DecoderFamily, kinds: Seq[object]) -> tuple[int, int] | None:
    """Return the places in `kinds` of the rotary angles of a layer's keys and queries; None without any.

    `attention` belongs to layer `index`, and `kinds` are the keys of `rotaries`.
    """
    if not family.encodes_positions(attention):
        return None
    config = attention.config
    own = 0 if None in kinds else kinds.index((getattr(config, _THETAS, None) or config.layer_types)[index])
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
    embeddings = model.get_input_embeddings()
    own = getattr(embeddings, "scalar_embed_scale", getattr(embeddings, "embed_scale", None))
    if own is None and getattr(config, "mup_enabled", False):
        own = config.hidden_size**0.5
    return float(own) if own is not None else family.factor(config, "embedding_multiplier")


def residual_scale(model: Any, family: DecoderFamily) -> float:
    """Return the factor of layers' outputs in the residual stream."""
    own = getattr(layers_of(model)[0], "residual_scale", None)
    return family.factor(model.config.get_text_config(), "residual_multiplier") if own is None else float(own)


def num_heads_of(config: Any) -> int:
    """Return the number of a model's queries; 0 without attention."""
    return int(getattr(config, "num_attention_heads", 0))


def norm_epsilon(config: Any, norm: Any) -> float:
    """Return the number added to the variance in the norms, as `norm`; OLMo's configuration has none."""
    if isinstance(norm, nn.LayerNorm):
        return norm.eps
    return next((float(value) for key in _NORM_EPSILONS if (value := getattr(config, key, None))), 1e-5)
