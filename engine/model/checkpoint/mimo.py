"""MiMo (arXiv:2505.07608), which transformers does not know: a Qwen2 with MTP layers under names of their own.

    model.mtp_layers.K.token_layernorm, hidden_layernorm    norms of the token and of the state before it
    model.mtp_layers.K.input_proj                           both to one state; the state before comes first
    model.mtp_layers.K.self_attn, mlp, ...                  a layer of Qwen2
    model.mtp_layers.K.final_layernorm                      the norm of the next state

The published code is `modeling_mimo.py` of XiaomiMiMo/MiMo-7B-RL, and vLLM's `mimo_mtp.py`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.modeling_layers import MtpModel

_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}
_MTP_LAYERS = r"^model\.mtp_layers\."


class MiMoConfig(Qwen2Config):
    """The configuration that the checkpoint's own code would read."""

    model_type = "mimo"
    num_nextn_predict_layers: int = 0
    mtp_hidden_states_first: bool = True

    @property
    def mtp_layer_types(self) -> list[str]:
        return ["full_attention"] * self.num_nextn_predict_layers


class MiMoMtp(MtpModel):
    """The MTP layers, read by their published names."""

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[WeightTransform]:
        """Return the renamings to transformers' names."""
        own = [WeightRenaming(rf"\.{name}\.", f".{target}.") for name, target in _NAMES.items()]
        is_block = rf"^layers\.(\d+)\.(?!(?:{'|'.join(_NAMES.values())})\.)"
        block = WeightRenaming(is_block, r"layers.\1.mtp_block.")
        return [WeightRenaming(_MTP_LAYERS, "layers."), *own, block]


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its MTP layers, as `draft.kind: mtp` or plain decoding reads it."""

    config_class = MiMoConfig
    mtp_class = MiMoMtp

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config)
        self._keys_to_ignore_on_load_unexpected = {_MTP_LAYERS}


def register_mimo() -> None:
    """Let transformers find the classes by the checkpoint's model type; a second call changes nothing."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
