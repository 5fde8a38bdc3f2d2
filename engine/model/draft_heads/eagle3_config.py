"""Configuration of an EAGLE-3 checkpoint, in either published layout.

    original      the layer's fields at the top of config.json, `draft_vocab_size`, perhaps `eagle_config`; `midlayer.*`
    speculators   `speculators_model_type`: eagle3, the layer's fields in `transformer_layer_config`; `layers.0.*`

The original comes from arXiv:2503.01840 and SpecForge, the other from vLLM's speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from engine.model.hidden_state_taps import HiddenStateTaps
from protos.errors import ConfigError

_SUPPORTED = {"hidden_act": "silu", "model_type": "llama", "num_hidden_layers": 1, "attention_bias": False}
_SUPPORTED |= {"mlp_bias": False, "use_sliding_window": False}
_EXACT = {"accept_tolerance": 0.0, "verifier_accept_k": 1}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LONG_ROPES = ("dynamic", "longrope")  # they change early positions when a sequence grows


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of the target that a head must fit."""

    vocab_size: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One EAGLE-3 head.

    `taps` are the target's states that enter it, normed together if `norm_before_fc`, separately if `fc_norm`. The
    residual branch begins after the state's norm if `norm_before_residual`. The normed state is fed back if
    `norm_output` (EAGLE-3.1). `layer_prefix` prefixes the layer's tensors.
    """

    layer: Any  # a LlamaConfig
    taps: HiddenStateTaps
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_prefix: str
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], target: TargetShape, path: str) -> Eagle3Config:
        """Read config.json of the head at `path`.

        Raises:
            ConfigError: it is not an EAGLE-3 head, is not supported, or belongs to another target.
        """
        if "speculators_model_type" in config:
            return _speculators(config, target, path)
        if "draft_vocab_size" not in config:
            raise ConfigError(
                f"{path!r} is not an EAGLE-3 head: its config.json has no draft_vocab_size and no "
                "speculators_model_type; give the folder of one, or another draft.kind"
            )
        return _original(config, target, path)


def _original(config: Mapping[str, Any], target: TargetShape, path: str) -> Eagle3Config:
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is False:
        raise ConfigError(
            f"{path!r} reads only the target's last states (use_aux_hidden_state); EAGLE-3 heads read three"
        )
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    # Ids of this layout count outputs of layers (SGLang, SpecForge); a tap counts inputs.
    taps = None if ids is None else tuple(layer + 1 for layer in ids)
    flags = {**config, **eagle}
    return _config(config, config, flags, taps, target, "midlayer.", path)


def _speculators(config: Mapping[str, Any], target: TargetShape, path: str) -> Eagle3Config:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(f"{path!r} is a speculator of type {kind!r}; draft.kind eagle3 needs one of type 'eagle3'")
    _refuse_lossy_methods(config, path)
    layer = config.get("transformer_layer_config")
    if not layer:
        raise ConfigError(f"config.json of {path!r} has no transformer_layer_config; the head's sizes are missing")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    taps = None if ids is None else tuple(ids)  # inputs of layers, as vLLM counts
    return _config(config, layer, config, taps, target, "layers.0.", path)


def _refuse_lossy_methods(config: Mapping[str, Any], path: str) -> None:
    """Refuse a verification method that would change the target's distribution."""
    for method in (config.get("speculators_config") or {}).get("proposal_methods") or ():
        for name, exact in _EXACT.items():
            if method.get(name, exact) not in (exact, None):
                raise ConfigError(
                    f"the head {path!r} asks for lossy acceptance: {name} is {method[name]!r} in one of its "
                    f"proposal_methods, but every draft is verified exactly; set it to {exact!r} in config.json"
                )


def _config(
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    flags: Mapping[str, Any],
    taps: tuple[int, ...] | None,
    target: TargetShape,
    layer_prefix: str,
    path: str,
) -> Eagle3Config:
    for name, supported in _SUPPORTED.items():
        if layer.get(name, supported) not in (supported, None):
            raise ConfigError(f"{path!r} has {name} {layer[name]!r}; EAGLE-3 heads support only {supported!r}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ConfigError(f"{path!r} has a layer with a sliding window, which EAGLE-3 heads do not support")
    layer_config: Any = LlamaConfig(**{name: value for name, value in layer.items() if name != "model_type"})
    if layer_config.rope_parameters["rope_type"] in _LONG_ROPES:
        raise ConfigError(
            f"{path!r} has rope_type {layer_config.rope_parameters['rope_type']!r}, which would make a draft depend on "
            "the other sequences of its batch; choose a head with another"
        )
    _check_sizes(config, layer_config, target, path)
    return Eagle3Config(
        layer=layer_config,
        taps=HiddenStateTaps(_checked_taps(taps, target, path)),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or target.vocab_size,
        layer_prefix=layer_prefix,
        **{name: bool(flags.get(name)) for name in _FLAGS},
    )


def _check_sizes(config: Mapping[str, Any], layer: Any, target: TargetShape, path: str) -> None:
    hidden_size = config.get("target_hidden_size") or layer.hidden_size
    if hidden_size != target.hidden_size:
        raise ConfigError(
            f"the head {path!r} was made for a target of hidden size {hidden_size}, but the target's is "
            f"{target.hidden_size}; choose the head of this target"
        )
    if layer.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head {path!r} was made for a vocabulary of {layer.vocab_size} tokens, but the target's has "
            f"{target.vocab_size}; choose the head of this target"
        )


def _checked_taps(taps: tuple[int, ...] | None, target: TargetShape, path: str) -> tuple[int, ...]:
    """Return the layers whose input is read; by default a low, a middle and a high one, as in the reference."""
    if taps is None:
        taps = (2, target.num_layers // 2, target.num_layers - 3)
        if len(set(taps)) < len(taps) or min(taps) < 0:
            raise ConfigError(
                f"the head {path!r} names no layers of its target, which has {target.num_layers}, too few "
                "for the defaults (2, half, all but 3); set eagle_aux_hidden_state_layer_ids in its config.json"
            )
    wrong = next((layer for layer in taps if not 0 <= layer <= target.num_layers), None)
    if wrong is not None:
        raise ConfigError(
            f"the head {path!r} reads the states after layer {wrong - 1} of its target, which has {target.num_layers} "
            "layers; choose the head of this target"
        )
    return tuple(sorted(set(taps)))  # in the target's layer order, whatever the file's order
