"""The target's own multi-token-prediction modules (DeepSeek-V3, arXiv:2412.19437, section 2.2).

transformers skips them when it loads the model. Each module is one layer; module k is counted from 0.

    state(0) p = block(W [enorm(embed(t(p+1)))   ; hnorm(feature p)])       logits of t(p+2) = lm_head(norm(state(0) p))
    state(k) p = block(W [enorm(embed(t(p+1+k))) ; hnorm(state(k-1) p)])    logits of t(p+2+k)

transformers knows the published names (`model.layers.{L}.enorm`, `.hnorm`, `.eh_proj`, `.shared_head.norm`; `mtp.fc`,
`mtp.pre_fc_norm_*` and others) and makes the blocks of the target's own classes; `engine.model.checkpoint.mimo` knows
MiMo's.

A module that was trained further has files of its own, in speculators' layout (`speculators_model_type: mtp`,
arXiv:2509.18362). It is one module of the target's own classes, trained to be used again for all later drafts.

    mtp_layers.0.token_layernorm, hidden_layernorm   norms of the token and of the state before them
    mtp_layers.0.input_proj                          both to one state
    mtp_layers.0.self_attn, mlp, ...                 the target's block
    mtp_layers.0.final_layernorm                     the norm of the next state
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from engine.attention.base import AttentionPass
from engine.attention.torch_attention import ATTENTION_NAME, attending
from engine.config import MTP_KEYS, HeadKind
from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import RecordingPass
from engine.model.checkpoint.weight_files import tensor_headers
from engine.model.draft_heads.checkpoint import Weights
from engine.model.draft_heads.published import check_kind, refuse_lossy_methods
from engine.model.forward_batch import ForwardBatch, HiddenStateTaps
from engine.model.linear.packed_linear import Linear, linear_of, pack_linears
from engine.model.loader import fetched_folder
from engine.model.resident_memory import leave_checkpoint
from engine.recurrent.stock_functions import keeps_states
from protos.errors import ConfigError

_ATTENTION = "full_attention"


class MtpHead:
    """Implements `RecurrentHead`; S and F are the target's hidden size, features are states after the final norm.

    Attributes:
        num_modules: each has one layer of the pool.
    """

    def __init__(self, model: Any) -> None:
        """Take over transformers' `MtpModel`."""
        self.taps = HiddenStateTaps(is_final=True)
        self.lm_head: Linear = model.shared_head  # until the runner replaces it with the target's packed head
        model.shared_head = torch.nn.Identity()
        self._model = model
        self.num_modules = len(model.layers)
        self._finish = model.shared_post_norm if model.use_shared_post_norm else torch.nn.Identity()
        self._scale = float(getattr(model.config, "logits_mup_width_multiplier", None) or 1.0)
        model.config._attn_implementation = ATTENTION_NAME
        self.layer_shapes = [self._record_shape(module) for module in range(self.num_modules)]
        pack_linears(model.layers)

    def place(self, first_layer: int) -> None:
        for module, layer in enumerate(self._model.layers):
            layer.mtp_block.self_attn.layer_idx = first_layer + module

    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        assert batch is not None, "it has KV"
        return self.forward(batch, features)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: Tensor, module: int = 0) -> Tensor:
        """See `RecurrentHead`; the tokens of a module are `module + 1` after the states."""
        if module:  # no row that is not finite gets into slots that a later text may read before it writes them
            states = states.nan_to_num(0.0, 0.0, 0.0)
        found = self._step(batch.input_ids, batch.position_ids, states, batch.attention, module)
        return found if batch.logit_rows is None else found.index_select(0, batch.logit_rows)

    def step(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        return self.forward(batch, states, self.num_modules - 1)

    def no_states(self, num_rows: int) -> Tensor:
        embedding: Tensor = self._model.embed_tokens.weight
        return embedding.new_zeros(num_rows, embedding.shape[1])

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states / self._scale if self._scale != 1.0 else states).float()

    def _step(self, token_ids: Tensor, positions: Tensor, states: Tensor, by: AttentionPass, module: int) -> Tensor:
        embedded = self._model.embed_tokens(token_ids)[None]  # [1, T, hidden]
        has_per_layer_rope = getattr(self._model, "has_per_layer_rope", False)  # transformers 5.17 has none
        rope = {"layer_type": self._model.config.layer_types[module]} if has_per_layer_rope else {}
        rotary = self._model.rotary_emb(embedded, position_ids=positions[None], **rope)
        with attending(by):
            found = self._model.layers[module](
                embedded,
                states[None],
                position_embeddings=rotary,
                attention_mask=None,
                position_ids=positions[None],
                past_key_values=None,
            )
        return cast(Tensor, self._finish(found)[0])

    @torch.inference_mode()
    def _record_shape(self, module: int) -> LayerShape:
        recording = RecordingPass()
        token_ids = torch.zeros(2, dtype=torch.long, device=self._model.embed_tokens.weight.device)
        weight = self._model.layers[module].eh_proj.weight
        states = torch.zeros(2, weight.shape[0], dtype=weight.dtype, device=weight.device)
        self._step(token_ids, torch.arange(2, device=weight.device), states, recording, module)
        if len(recording.records) != 1:
            raise ConfigError(
                f"the MTP layer of model type {self._model.config.model_type!r} calls the attention function "
                f"{len(recording.records)} times, but a paged pool supports 1; serve the model without it"
            )
        return recording.records[0].shape


def load_mtp(target: PreTrainedModel, device: torch.device, max_modules: int | None = None) -> MtpHead:
    """Return the MTP of the target's own weights, on `device`; its first `max_modules` modules, or all.

    Raises:
        ConfigError: the target has no MTP, or fewer modules, or transformers cannot load it.
    """
    config = target.config.get_text_config()
    num_layers = next((count for name in MTP_KEYS if (count := getattr(config, name, None))), 0)
    num_layers = num_layers or _num_stored(config.name_or_path or target.config.name_or_path)
    if not num_layers:
        raise ConfigError(
            f"draft.kind is 'mtp', but the target (model type {config.model_type!r}) has no "
            "num_nextn_predict_layers in its config.json and no tensors mtp.layers.*; choose another draft.kind"
        )
    if max_modules is not None and max_modules > num_layers:
        raise ConfigError(f"draft.num_layers is {max_modules}, but the target's MTP has {num_layers}; draft with fewer")
    config.num_mtp_layers = num_layers
    if keeps_states(target) and getattr(config, "mtp_layer_types", None) is None:
        config.mtp_layer_types = [_ATTENTION] * num_layers  # as Qwen publishes it
    target._keys_to_ignore_on_load_unexpected = _published_names(target, num_layers)  # where MtpModel looks for them
    try:
        mtp_class: Any = getattr(target, "mtp_class", MtpModel)
        model = mtp_class.from_pretrained(target, device_map={"": target.device})
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"draft.kind is 'mtp', but the MTP layer of {target.config.name_or_path!r} cannot be loaded: {error}"
        ) from error
    del model.layers[max_modules or num_layers :]
    if device != target.device:
        for name in ("embed_tokens", "rotary_emb", "shared_head"):  # the target's own, which stay in place
            setattr(model, name, deepcopy(getattr(model, name)))
    model = model.to(device, target.dtype).eval().requires_grad_(False)
    if device.type == "cpu":
        leave_checkpoint(model, linear_of)
    return MtpHead(model)


def _num_stored(path: str) -> int:
    """Return the number of MTP layers among a checkpoint's tensors; Qwen3-Next's configuration does not name it."""
    names = tensor_headers(fetched_folder(path))
    return len({found[1] for name in names if (found := re.match(r"(?:model\.)?mtp\.layers\.(\d+)\.", name))})


def _published_names(target: PreTrainedModel, num_layers: int) -> list[str]:
    """Return patterns of the layers' possible weight names: transformers lists only those for known models."""
    first = target.config.get_text_config().num_hidden_layers
    by_number = [rf"^(model\.)?layers\.{number}\." for number in range(first, first + num_layers)]
    known = [pattern for pattern in target._keys_to_ignore_on_load_unexpected or () if "mtp" in pattern]
    return [*by_number, r"^(model\.)?mtp\.", *known]


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
    _check_published(config, text, path)
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = [_ATTENTION]
    target.config = text
    with torch.device("meta"):
        model = _MtpModel(target, 1)
    model.layers.load_state_dict(_published_tensors(model, weights, embedding), assign=True)
    model.embed_tokens = nn.Embedding(len(embedding), embedding.shape[1], _weight=embedding)
    model.rotary_emb = type(model.rotary_emb)(model.config).to(embedding.device)
    model.shared_head = nn.Identity()
    return MtpHead(model.eval().requires_grad_(False))


def _check_published(config: Mapping[str, Any], text: Any, path: str) -> None:
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


def _published_tensors(model: Any, weights: Weights, like: Tensor) -> dict[str, Tensor]:
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
