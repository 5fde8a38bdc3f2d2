"""The description of a family. `FusedDecoder` reads it to compute layers.

What a loaded model shows by itself (norms of queries and keys, windows, multipliers, sizes) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoders.rotary import Rotary
from engine.model.linear.native_mixture import Routing
from engine.model.linear.native_product import Gate
from engine.recurrent.stock_functions import is_recurrent

_GATES = {"silu": Gate.SILU, "gelu_pytorch_tanh": Gate.GELU_TANH, "relu2": Gate.RELU_SQUARED}
_FUNCTIONS = _GATES | {  # of MLPs without gates
    "gelu_new": Gate.GELU_TANH,
    "gelu": Gate.GELU,
    "relu": Gate.RELU,
    "xielu": Gate.XIELU,
}
# Keys of configurations.
_ACTIVATIONS = ("hidden_activation", "mlp_hidden_act", "hidden_act", "activation_function")
# A layer's attributes: the norms before and after the attention, before and after the MLP.
_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)


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
        norms_rotated: queries and keys are normed after their rotation.
        attention: a layer's attention.
        inputs: the attention's products of queries, keys and values, where these are apart.
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
        scales_embeddings: tokens' embeddings are multiplied by the root of their size.
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
    norms_rotated: bool = False
    attention: str = "self_attn"
    inputs: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
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
    scales_embeddings: bool = False
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
