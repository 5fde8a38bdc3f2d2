"""MTP modules with files of their own, in speculators' layout (`speculators_model_type: mtp`, arXiv:2509.18362).

One module of the target's own classes. It is trained to be used again for all later drafts.

    mtp_layers.0.token_layernorm, hidden_layernorm   norms of the token and of the state before them
    mtp_layers.0.input_proj                          both to one state
    mtp_layers.0.self_attn, mlp, ...                 the target's block
    mtp_layers.0.final_layernorm                     the norm of the next state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from engine.config import HeadKind
from engine.model.draft_heads.checkpoint import Weights
from engine.model.draft_heads.mtp import MtpHead
from engine.model.draft_heads.published import check_kind, refuse_lossy_methods
from protos.errors import ConfigError

_MtpModel: Any = MtpModel  # its decorators hide its signatures
_TYPES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # of the library's modules
_NAMES = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj"}
_NAMES |= {"final_layernorm": "post_norm"}
_OWN_NAMES = {own: name for name, own in _NAMES.items()}
# Fields that change the function and no shape, or shapes in a less clear way.
_EQUAL_FIELDS = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_parameters", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
)
_ATTENTION = "full_attention"


def read_mtp(
    config: Mapping[str, Any],
    weights: Weights,
    outline: Callable[[], PreTrainedModel],
    embedding: Tensor,  # [V, S] of the target
    path: str,
) -> MtpHead:
    """Return the head of `config` and `weights`; `outline` makes the target.

    Raises:
        ConfigError: it is of another kind, or for another target, or its file is incomplete.
    """
    check_kind(HeadKind.MTP, config, path)
    refuse_lossy_methods(config, path)
    with torch.device("meta"):
        target = outline()
    text = deepcopy(target.config.get_text_config())
    _check(config, text, path)
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = [_ATTENTION]
    target.config = text
    with torch.device("meta"):
        model = _MtpModel(target, 1)
    model.layers.load_state_dict(_tensors(model, weights, embedding), assign=True)
    model.embed_tokens = nn.Embedding(len(embedding), embedding.shape[1], _weight=embedding)
    model.rotary_emb = type(model.rotary_emb)(model.config).to(embedding.device)
    model.shared_head = nn.Identity()
    return MtpHead(model.eval().requires_grad_(False))


def _check(config: Mapping[str, Any], text: Any, path: str) -> None:
    """Raise ConfigError unless the module is one layer of the target's type and sizes."""
    fields = config.get("transformer_layer_config")
    if not fields:
        raise ConfigError(f"config.json of {path!r} has no transformer_layer_config; its sizes are missing")
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ConfigError(
            f"{path!r} has num_nextn_predict_layers {count!r} in config.json; an MTP head in files of its own has 1"
        )
    kind = fields.get("model_type")
    if kind not in _TYPES or kind != text.model_type:
        raise ConfigError(
            f"the head {path!r} has a layer of model_type {kind!r}, and the target's is {text.model_type!r}; read are "
            f"MTP heads of {', '.join(_TYPES)} for a target of the same type"
        )
    own = type(text)(**{name: value for name, value in fields.items() if name != "model_type"})
    for name in _EQUAL_FIELDS:
        found, needed = getattr(own, name, None), getattr(text, name, None)
        if found != needed:
            raise ConfigError(
                f"the head {path!r} was made for a target with {name} {found!r}, but the target's is {needed!r}; "
                "choose the head of this target"
            )
    types = getattr(own, "layer_types", None) or [_ATTENTION]
    if kind == "qwen3" and types[0] != _ATTENTION:
        raise ConfigError(f"the layer of {path!r} is of type {types[0]!r}; only {_ATTENTION!r} is computed")


def _tensors(model: Any, weights: Weights, like: Tensor) -> dict[str, Tensor]:
    """Return the module's tensors by transformers' names; raises ConfigError if some are missing or left."""
    found = {}
    for name, shape in ((name, tuple(each.shape)) for name, each in model.layers.state_dict().items()):
        inner = name.removeprefix("0.")
        part, _, rest = inner.partition(".")
        published = inner.removeprefix("mtp_block.") if part == "mtp_block" else f"{_OWN_NAMES[part]}.{rest}"
        tensor = weights.take(f"mtp_layers.0.{published}", shape)
        found[name] = tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
    # Copies of the target's, in files of before 0.6.
    for name in ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"):
        weights.take_if_there(name, tuple(like.shape))
    weights.finish()
    return found
