"""The families of `FusedDecoder`, and the parts of a loaded model by its family."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.decoder_family import DecoderFamily, Multipliers
from engine.model.decoders.latent import latents_pay
from engine.model.decoders.rotary import Rotary
from engine.model.linear.native_mixture import Routing, Scores

# Keys of configurations.
_NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier")
_THETAS = "layer_rope_theta"  # of each layer's angles; 0 for none
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEFORE_AND_AFTER = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_ONE = ("input_layernorm", None, None, None)
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_CTRL_EPSILON = 1e-6  # of all norms except the final one, whatever the configuration has
_QUERIES = "queries"  # kind of the angles of queries that have their own


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


def _never(attention: Any) -> bool:
    return False


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
    **dict.fromkeys(("ernie4_5", "glm", "helium"), _PAIRS),
    **dict.fromkeys(
        (
            "bitnet",
            "cwm",
            "internlm3",
            "iquestcoder",
            "ministral",
            "phi3",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
            "qwen3_vl_text",
            "seed_oss",
            "youtu",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("llama", "mimo", "mistral", "qwen2", "qwen3"), _LLAMA),
    "hunyuan_v1_dense": DecoderFamily(norms_rotated=True),
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
    "glm4": DecoderFamily(_BEFORE_AND_AFTER, rotates_pairs=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, encodes_positions=lambda attention: attention.sliding_window is not None),
    "olmo2": DecoderFamily(_AFTER),
    "olmo3": DecoderFamily(_AFTER),
    "exaone4": _EXAONE,
    "minicpm3": DecoderFamily(logit_factor=lambda config: 1 / config.logits_scaling),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "biogpt": replace(_LEARNED, final_norm="layer_norm"),
    "ctrl": replace(
        _LEARNED,
        norms=("layernorm1", None, "layernorm2", None),
        layers="h",
        attention="multi_head_attention",
        inputs=("Wq", "Wk", "Wv"),
        output="dense",
        mlp=("0", "2"),
        mlp_module="ffn",
        activation="relu",
        final_norm="layernorm",
        positions="pos_encoding",
        scales_embeddings=True,
        takes=lambda config: config.layer_norm_epsilon == _CTRL_EPSILON,
    ),
    "opt": replace(_LEARNED, final_norm="final_layer_norm", takes=_opt_takes, multipliers=_opt_multipliers),
}
_MIXTURES = {
    **dict.fromkeys(
        ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "hy_v3", "mimo_v2_flash", "minimax_m2", "solar_open"),
        _DEEPSEEK,
    ),
    **dict.fromkeys(("aria_text", "mellum", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"), _MIXTRAL),
    "hunyuan_v1_moe": DecoderFamily(norms_rotated=True, routing=Routing()),
    "flint": DecoderFamily(
        encodes_positions=lambda attention: attention.sliding_window is not None, routing=Routing(Scores.SIGMOID)
    ),
    "olmoe": replace(_MIXTRAL, other_kinds=("clip_qkv",)),
    "deepseek_v2": DecoderFamily(
        rotates_pairs=True, angles=_polar, routing=Routing(is_normalized=False, has_group_sums=False)
    ),
    "axk1": replace(_DEEPSEEK, norms=("input_layernorm", None, "post_attention_layernorm", "mlp.post_mlp_layernorm")),
    "ernie4_5_moe": replace(_PAIRS, routing=Routing()),
    "exaone_moe": replace(_EXAONE, norms=_PLAIN.norms, routing=_SIGMOIDS),
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
    "lfm3": replace(_LFM2, norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"), output="o_proj"),
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
    """Return the description of a model's family, or of the text part's of several media; None if it has none."""
    text = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None:
        return None
    is_other = any(getattr(text, key, None) for key in family.other_kinds) or not family.takes(text)
    is_other |= hasattr(text, "kv_lora_rank") and not latents_pay(text)
    is_other |= text is not config and family.logit_factor(text) != 1.0  # the model around it has none
    if is_other or not family.function(text):
        return None
    return family


def layers_of(model: Any) -> Any:
    """Return a model's layers."""
    family = FAMILIES.get(model.config.get_text_config().model_type)
    return getattr(model.get_decoder(), "layers" if family is None else family.layers)


def position_table(model: Any, family: DecoderFamily) -> Tensor | None:
    """Return the embeddings of positions from 0 on, [positions, hidden]; None without any."""
    part: Any = None if family.positions is None else getattr(model.get_decoder(), family.positions)
    return part if part is None or isinstance(part, Tensor) else part.weight[getattr(part, "offset", 0) :]


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
    if own is None and (family.scales_embeddings or getattr(config, "mup_enabled", False)):
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
