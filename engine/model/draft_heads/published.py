"""Configurations of published heads, in speculators' layout and in their authors' layouts.

    speculators   `speculators_model_type`, the layers' fields in `transformer_layer_config`; tensors `layers.{i}.*`
    EAGLE-3       the layers' fields at the top of config.json, `draft_vocab_size`, perhaps `eagle_config`; `midlayer.*`
    P-EAGLE       the same with `ptd_token_id` or `pard_token`
    DFlash        the layers' fields at the top, `dflash_config`; tensors `layers.{i}.*`

EAGLE-3's comes from arXiv:2503.01840 and SpecForge, DFlash's from arXiv:2602.06036, DSpark's from
arXiv:2607.05147. DFlash 2 (z-lab's `dflash/model.py`) and XPress (arXiv:2608.02438) are read as a DFlash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN

from engine.config import HeadKind
from engine.model.draft_heads.checkpoint import MASK_IDS, BlockFormat, check_size, read_block
from engine.model.forward_batch import HiddenStateTaps
from protos.errors import ConfigError

_LAYERS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_EXACT = {"accept_tolerance": 0.0, "verifier_accept_k": 1}
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ROPES = ("default", "linear", "yarn", "llama3")
_LONG_ROPES = ("dynamic", "longrope")  # their scaling follows the length
_UNREAD: dict[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
}
_UNREAD |= {"is_neox_style": True, "use_aux_hidden_state": True, "has_own_lm_head": False, "attention_mode": "gqa"}
_LAYER_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
_SLIDING = "sliding_attention"
_ON_DFLASH = ("dflash2", "xpress")  # speculators' types of a DFlash with more in it
_UNREAD_NAMES = ("DSpine", "Domino", "LiLiCorr", "XPressDFlash2")  # architectures with layers that are not computed


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of the target that a head must fit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_positions: int = 0  # 0 without a limit


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """One head of layers over the target's states.

    `taps` are the target's states that enter it. Each layer has a window or None, and is causal within a block or not.
    `rotary_length` is the number of positions of a scaling that follows the length, else None.

    In an EAGLE-3, the target's states are normed together if `norm_before_fc`, separately if `fc_norm`. The residual
    branch begins after the state's norm if `norm_before_residual`. The normed state is fed back if `norm_output`
    (EAGLE-3.1).
    """

    layer: Any  # a LlamaConfig or Qwen3Config
    taps: HiddenStateTaps
    target: TargetShape
    draft_vocab_size: int
    windows: tuple[int | None, ...]
    are_causal: tuple[bool, ...]
    has_head_norms: bool
    rotary_length: int | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block: BlockFormat | None = None

    @classmethod
    def of(cls, kind: HeadKind, config: Mapping[str, Any], target: TargetShape, path: str) -> HeadFormat:
        """Read config.json of the head at `path`.

        Raises:
            ConfigError: it is a head of another kind, is not supported, or belongs to another target.
        """
        check_kind(kind, config, path)
        return _Reader(kind, config, target, path).read()


def check_kind(kind: HeadKind, config: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError if the head at `path` is of another kind, or not known."""
    found = _kind_of(config, path)
    if found is not kind:
        raise ConfigError(
            f"{path!r} is a head of kind {str(found)!r}, and draft.kind is {str(kind)!r}; set it to {str(found)!r}"
        )


def refuse_lossy_methods(config: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError if a proposal method in speculators' layout would change the target's distribution."""
    for method in (config.get("speculators_config") or {}).get("proposal_methods") or ():
        for name, exact in _EXACT.items():
            if method.get(name, exact) not in (exact, None):
                raise ConfigError(
                    f"the head {path!r} asks for lossy acceptance: {name} is {method[name]!r} in one of its "
                    f"proposal_methods, but every draft is verified exactly; set it to {exact!r} in config.json"
                )


def _kind_of(config: Mapping[str, Any], path: str) -> HeadKind:
    known = (HeadKind.EAGLE3, HeadKind.PEAGLE, HeadKind.DFLASH, HeadKind.DSPARK, HeadKind.MTP)
    kind, names = config.get("speculators_model_type"), " ".join(config.get("architectures") or ())
    if kind in tuple(known):
        return HeadKind(kind)
    if kind in _ON_DFLASH:
        return HeadKind.DFLASH
    if kind is not None:
        read = ", ".join(repr(str(each)) for each in (*known, *_ON_DFLASH))
        raise ConfigError(f"{path!r} is a speculator of type {kind!r}, which is not read; read are {read}")
    if any(name in names for name in _UNREAD_NAMES):
        raise ConfigError(f"{path!r} is a head of architecture {names}, whose further layers are not read")
    if "DSpark" in names:
        return HeadKind.DSPARK
    if "dflash_config" in config or "DFlash" in names:
        return HeadKind.DFLASH
    if "draft_vocab_size" not in config:
        raise ConfigError(
            f"{path!r} is not an EAGLE-3, DFlash or DSpark head: its config.json has no draft_vocab_size, no "
            "dflash_config and no speculators_model_type; give the folder of one, or another draft.kind"
        )
    return HeadKind.PEAGLE if any(name in config for name in MASK_IDS) else HeadKind.EAGLE3


class _Reader:
    """Reads one config.json."""

    def __init__(self, kind: HeadKind, config: Mapping[str, Any], target: TargetShape, path: str) -> None:
        self._kind, self._target, self._path = kind, target, path
        self._is_speculators = "speculators_model_type" in config
        names = " ".join(config.get("architectures") or ())
        self._is_dflash2 = config.get("speculators_model_type") == "dflash2" or "DFlash2" in names
        self._is_xpress = config.get("speculators_model_type") == "xpress" or "XPress" in names
        # The authors' layouts have a section for each method; its fields may also be at the top.
        sections = ("eagle_config", "dflash_config")
        self._config = {**config, **{k: v for each in sections for k, v in (config.get(each) or {}).items()}}

    def read(self) -> HeadFormat:
        self._refuse_unread()
        layer = self._layer()
        self._check_sizes(layer)
        count, most = layer.num_hidden_layers, self._target.vocab_size
        num_drafted = check_size("draft_vocab_size", self._config.get("draft_vocab_size") or most, self._path, most)
        is_block = self._kind in (HeadKind.DFLASH, HeadKind.DSPARK)
        block = None if self._kind is HeadKind.EAGLE3 else self._block(layer.hidden_size)
        are_causal = tuple(not is_block or self._is_causal(layer, index) for index in range(count))
        more = 0 if block is None else block.num_rows  # a row that sees its whole block has its window before it
        windows = [self._window(layer, index) for index in range(count)]
        return HeadFormat(
            layer=layer,
            taps=HiddenStateTaps(self._taps(is_required=is_block)),
            target=self._target,
            draft_vocab_size=num_drafted,
            windows=tuple(
                window if window is None or is_causal else window + more
                for window, is_causal in zip(windows, are_causal, strict=True)
            ),
            are_causal=are_causal,
            has_head_norms=is_block or layer.model_type == "qwen3",
            rotary_length=self._rotary_length(layer),
            block=block,
            **{name: bool(self._config.get(name)) for name in NORMS},
        )

    def _refuse_unread(self) -> None:
        """Refuse what would change the target's distribution, and options of a forward that is not computed."""
        refuse_lossy_methods(self._config, self._path)
        for name, value in _UNREAD.items():
            if self._config.get(name, value) not in (value, None):
                raise ConfigError(
                    f"{self._path!r} has {name} {self._config[name]!r} in config.json, and only {value!r} is computed"
                )

    def _layer(self) -> Any:
        fields = self._config.get("transformer_layer_config") if self._is_speculators else self._config
        if not fields:
            raise ConfigError(f"config.json of {self._path!r} has no transformer_layer_config; its sizes are missing")
        model_type = fields.get("model_type") or "llama"
        if model_type not in _LAYERS:
            raise ConfigError(
                f"{self._path!r} has layers of model_type {model_type!r}; heads have layers of {' or '.join(_LAYERS)}"
            )
        try:
            layer = _LAYERS[model_type](**{name: value for name, value in fields.items() if name != "model_type"})
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise ConfigError(f"the layers in config.json of {self._path!r} cannot be read: {error}") from error
        for name in _LAYER_SIZES:
            check_size(name, getattr(layer, name), self._path)
        if layer.hidden_act not in ACT2FN:
            raise ConfigError(f"{self._path!r} has hidden_act {layer.hidden_act!r}, which transformers does not know")
        return layer

    def _rotary_length(self, layer: Any) -> int | None:
        rope = layer.rope_parameters or {}
        kind, theta = rope.get("rope_type"), rope.get("rope_theta")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            raise ConfigError(f"{self._path!r} has rope_theta {theta!r} in config.json; it must be a number above 0")
        if kind not in (*_ROPES, *_LONG_ROPES) or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"{self._path!r} has rope_parameters {rope!r}; computed are {', '.join((*_ROPES, *_LONG_ROPES))} "
                "over whole heads, the same in all layers"
            )
        return max(layer.max_position_embeddings, self._target.num_positions) if kind in _LONG_ROPES else None

    def _window(self, layer: Any, index: int) -> int | None:
        types = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
        is_sliding = types[index] == _SLIDING or (bool(self._config.get("use_swa")) and _SLIDING not in types)
        if not is_sliding:
            return None
        window = self._config.get("swa_window_size") or getattr(layer, "sliding_window", None)
        if not window:
            raise ConfigError(f"{self._path!r} has a layer with a sliding window, and no size in sliding_window")
        return int(window)

    def _is_causal(self, layer: Any, index: int) -> bool:
        """True if a row of a block sees no later rows, as in the head's training."""
        types = getattr(layer, "layer_types", None)
        is_sliding = types is not None and types[index] == _SLIDING
        if self._is_speculators:
            return is_sliding and not self._config.get("sliding_window_non_causal", self._is_dflash2)
        asked = [self._config.get(name) for name in ("is_causal", "causal")]
        return next((bool(each) for each in asked if each is not None), is_sliding)

    def _block(self, hidden_size: int) -> BlockFormat:
        return read_block(
            self._kind,
            self._config,
            self._target.vocab_size,
            hidden_size,
            self._path,
            is_speculators=self._is_speculators,
            is_dflash2=self._is_dflash2,
            is_xpress=self._is_xpress,
        )

    def _check_sizes(self, layer: Any) -> None:
        hidden_size = self._config.get("target_hidden_size") or layer.hidden_size
        if hidden_size != self._target.hidden_size:
            raise ConfigError(
                f"the head {self._path!r} was made for a target of hidden size {hidden_size}, but the target's is "
                f"{self._target.hidden_size}; choose the head of this target"
            )
        if layer.vocab_size != self._target.vocab_size:
            raise ConfigError(
                f"the head {self._path!r} was made for a vocabulary of {layer.vocab_size} tokens, but the target's has "
                f"{self._target.vocab_size}; choose the head of this target"
            )
        num_layers = self._config.get("num_target_layers") or self._target.num_layers
        if num_layers != self._target.num_layers:
            raise ConfigError(
                f"the head {self._path!r} was made for a target of {num_layers} layers, but the target has "
                f"{self._target.num_layers}; choose the head of this target"
            )

    def _taps(self, *, is_required: bool) -> tuple[int, ...]:
        """Return the layers whose input is read; EAGLE-3's default is a low, a middle and a high one."""
        inputs = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids") if self._is_speculators else ()
        outputs = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids") if not inputs else ()
        taps = next((tuple(ids) for name in inputs if (ids := self._config.get(name))), None)
        # The authors' layouts count outputs of layers; a tap counts inputs.
        after = next((tuple(ids) for name in outputs if (ids := self._config.get(name))), None)
        if after is not None:
            taps = tuple(layer + 1 for layer in after)
        num_layers = self._target.num_layers
        if taps is None and is_required:
            raise ConfigError(
                f"the head {self._path!r} names no layers of its target; config.json needs "
                f"{'aux_hidden_state_layer_ids' if self._is_speculators else 'target_layer_ids'}"
            )
        if taps is None:
            taps = (2, num_layers // 2, num_layers - 3)
            if len(set(taps)) < len(taps) or min(taps) < 0:
                raise ConfigError(
                    f"the head {self._path!r} names no layers of its target, which has {num_layers}, too few "
                    "for the defaults (2, half, all but 3); set eagle_aux_hidden_state_layer_ids in its config.json"
                )
        wrong = next((layer for layer in taps if not 0 <= layer <= num_layers), None)
        if wrong is not None:
            raise ConfigError(
                f"the head {self._path!r} reads the states after layer {wrong - 1} of its target, which has "
                f"{num_layers} layers; choose the head of this target"
            )
        return tuple(sorted(set(taps)))  # in the target's layer order, whatever the file's order
