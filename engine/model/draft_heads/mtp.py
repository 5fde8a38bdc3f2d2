"""The target's own multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2).

transformers skips it when it loads the model.

    state p = block(W [enorm(embed(t(p+1))) ; hnorm(feature p)])        logits of t(p+2) = lm_head(norm(state p))

transformers knows the published names (`model.layers.{L}.enorm`, `.hnorm`, `.eh_proj`, `.shared_head.norm`; `mtp.fc`,
`mtp.pre_fc_norm_*` and others) and makes the block of the target's own classes. A model with several such layers drafts
with the first alone, again and again, as those with one do.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from engine.attention.torch_attention import ATTENTION_NAME, PASS_KEYWORD
from engine.kv_cache.pool import LayerShape
from engine.model.attention_probe import RecordingPass
from engine.model.forward_batch import ForwardBatch
from engine.model.hidden_state_taps import HiddenStateTaps
from engine.model.linear.packed_linear import Linear, linear_of, pack_linears
from engine.model.resident_memory import leave_checkpoint
from protos.errors import ConfigError

_MtpModel: Any = MtpModel  # its decorators hide its signatures
_COUNT_NAMES = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


class MtpHead:
    """Implements `RecurrentHead`; S and F are the target's hidden size, features are states after the final norm."""

    def __init__(self, model: Any, first_layer: int) -> None:
        """Takes over transformers' `MtpModel`, its attention now in layer `first_layer` of the pool."""
        del model.layers[1:]
        if model.device.type == "cpu":
            leave_checkpoint(model, linear_of)
        self.taps = HiddenStateTaps(is_final=True)
        self.lm_head: Linear = model.shared_head  # until the runner replaces it with the target's packed head
        model.shared_head = torch.nn.Identity()
        self._model = model
        self._layer = model.layers[0]
        self._finish = model.shared_post_norm if model.use_shared_post_norm else torch.nn.Identity()
        self._scale = float(getattr(model.config, "logits_mup_width_multiplier", None) or 1.0)
        model.config._attn_implementation = ATTENTION_NAME
        self._layer.mtp_block.self_attn.layer_idx = first_layer
        self.layer_shapes = self._record_shapes(first_layer)
        pack_linears(self._layer)

    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        assert batch is not None, "it has KV"
        return self.forward(batch, features)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        found = self._step(batch.input_ids, batch.position_ids, states, batch.attention)
        return found if batch.logit_rows is None else found.index_select(0, batch.logit_rows)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states / self._scale if self._scale != 1.0 else states).float()

    def _step(self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: object) -> Tensor:
        embedded = self._model.embed_tokens(token_ids)[None]  # [1, T, hidden]
        has_per_layer_rope = getattr(self._model, "has_per_layer_rope", False)  # transformers 5.17 has none
        rope = {"layer_type": self._model.config.layer_types[0]} if has_per_layer_rope else {}
        rotary = self._model.rotary_emb(embedded, position_ids=positions[None], **rope)
        found = self._layer(
            embedded,
            states[None],
            position_embeddings=rotary,
            attention_mask=None,
            position_ids=positions[None],
            past_key_values=None,
            **{PASS_KEYWORD: attention},
        )
        return cast(Tensor, self._finish(found)[0])

    @torch.inference_mode()
    def _record_shapes(self, first_layer: int) -> list[LayerShape]:
        recording = RecordingPass()
        token_ids = torch.zeros(2, dtype=torch.long, device=self._model.embed_tokens.weight.device)
        weight = self._layer.eh_proj.weight
        states = torch.zeros(2, weight.shape[0], dtype=weight.dtype, device=weight.device)
        self._step(token_ids, torch.arange(2, device=weight.device), states, recording)
        if [record.layer for record in recording.records] != [first_layer]:
            raise ConfigError(
                f"the MTP layer of model type {self._model.config.model_type!r} calls the attention function "
                f"{len(recording.records)} times, but a paged pool supports 1; serve the model without it"
            )
        return [record.shape for record in recording.records]


def load_mtp(target: PreTrainedModel, device: torch.device) -> MtpHead:
    """Return the MTP layer of the target's own weights, on `device`.

    Raises:
        ConfigError: the target has no MTP layer, or transformers cannot load it.
    """
    config = target.config.get_text_config()
    num_layers = next((count for name in _COUNT_NAMES if (count := getattr(config, name, None))), 0)
    if not num_layers:
        raise ConfigError(
            f"draft.kind is 'mtp', but the target (model type {config.model_type!r}) has no "
            "num_nextn_predict_layers in its config.json; choose another draft.kind"
        )
    config.num_mtp_layers = num_layers
    target._keys_to_ignore_on_load_unexpected = _published_names(target, num_layers)  # where MtpModel looks for them
    try:
        model = _MtpModel.from_pretrained(target, device_map={"": target.device})
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"draft.kind is 'mtp', but the MTP layer of {target.config.name_or_path!r} cannot be loaded: {error}"
        ) from error
    if device != target.device:
        for name in ("embed_tokens", "rotary_emb", "shared_head"):  # the target's own, which stay in place
            setattr(model, name, deepcopy(getattr(model, name)))
    return MtpHead(model.to(device, target.dtype).eval().requires_grad_(False), config.num_hidden_layers)


def _published_names(target: PreTrainedModel, num_layers: int) -> list[str]:
    """Return patterns of the layers' possible weight names: transformers lists only those for known models."""
    first = target.config.get_text_config().num_hidden_layers
    by_number = [rf"^(model\.)?layers\.{number}\." for number in range(first, first + num_layers)]
    known = [pattern for pattern in target._keys_to_ignore_on_load_unexpected or () if "mtp" in pattern]
    return [*by_number, r"^(model\.)?mtp\.", *known]
