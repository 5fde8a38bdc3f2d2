"""The decoder layers of heads, and their tensors, checked one by one against configuration and target."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.attention.base import LayerOptions
from engine.config import Quantization
from engine.kv_cache.pool import LayerShape
from engine.model.decoders.rotary import RotaryTable
from engine.model.decoders.row_operations import RowOperations, row_operations
from engine.model.draft_heads.checkpoint import Weights
from engine.model.draft_heads.published import HeadFormat
from engine.model.forward_batch import UNKNOWN, ForwardBatch
from engine.model.linear.packed_linear import Linear
from engine.model.linear.quantized_linear import linear_factory
from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """Causal convolutions within a block, before and after a sublayer (DFlash 2). G groups of a row share a kernel."""

    base: Tensor  # [2, taps, S]
    kernels: Linear  # [T, S] -> [T, 2 * taps * G], each row's own part of both kernels

    def before(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, and the rows' part of the kernel after it; `places` [T] are within blocks."""
        own = self.kernels(x).view(len(x), 2, self.base.shape[1], -1)
        return self._convolve(x, own[:, 0], self.base[0], places), own[:, 1]

    def after(self, x: Tensor, own: Tensor, places: Tensor) -> Tensor:
        """Return the sublayer's output, convolved."""
        return self._convolve(x, own, self.base[1], places)

    @staticmethod
    def _convolve(x: Tensor, own: Tensor, base: Tensor, places: Tensor) -> Tensor:
        groups = x.view(len(x), own.shape[-1], -1)
        out = torch.zeros_like(groups)
        for tap, kernel in enumerate(base):
            kernels = kernel.view(1, *groups.shape[1:]) + own[:, tap, :, None]
            # A row of another block may be NaN, which no product hides.
            out += groups.roll(tap, 0).masked_fill((places < tap)[:, None, None], 0.0) * kernels
        return out.view_as(x)


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One layer: attention over the head's own KV, and a feed-forward network. S is the head's width, X its input's."""

    input_norm: Tensor  # [S]
    qkv: Linear  # [T, X] -> [T, (Hq + 2 H) * D]
    context: Linear | None  # [T, X] -> [T, 2 H * D], keys and values alone
    head_norm: Tensor | None  # [Hq + H, D] of q and k (Qwen3)
    output: Linear
    mlp_norm: Tensor  # [S]
    mlp: Linear
    options: LayerOptions
    is_causal: bool  # rows of a block see no later rows
    convolutions: tuple[BlockConvolution, BlockConvolution] | None  # of attention and network


class HeadLayers:
    """The layers of one head."""

    def __init__(self, config: HeadFormat, layers: Seq[HeadLayer], final_norm: Tensor) -> None:
        layer = config.layer
        self.shapes = [LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim)] * len(layers)
        self.rows: RowOperations = row_operations(
            layer.hidden_size, (layer.head_dim, layer.head_dim), final_norm, layer.rms_norm_eps
        )
        self.input_norm, self.final_norm = layers[0].input_norm, final_norm
        self._layers, self._first_layer = layers, 0
        self._next_norms = [*(each.input_norm for each in layers[1:]), final_norm]
        self._num_heads, self._num_kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        self._head_dim = layer.head_dim
        rotary = LlamaRotaryEmbedding(layer).to(final_norm.device)
        # A scaling that follows the length follows the longest: a draft must not depend on other texts of its batch.
        self._rotary = RotaryTable(rotary, final_norm, config.rotary_length, is_whole=config.rotary_length is not None)

    def __call__(
        self, batch: ForwardBatch, x: Tensor, hidden: Tensor, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the layers; `x` [T, X] is the first one's normed input, `hidden` [T, S] its residual.

        Convolutions need the rows' `places` [T] in their blocks. Return the last hidden states of the pass's logit
        rows, and their final norm, [R, S].
        """
        table = self._rotary.at(batch)
        if places is not None:
            for index in range(len(self._layers)):
                hidden, x = self._convolved(index, x, hidden, batch, table, places)
            rows = batch.logit_rows
            return (hidden, x) if rows is None else (hidden.index_select(0, rows), x.index_select(0, rows))
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, x, batch, table)
            if index == len(self._layers) - 1 and batch.logit_rows is not None:
                attended, hidden = (rows.index_select(0, batch.logit_rows) for rows in (attended, hidden))
            hidden, normed = self.rows.add_norm(hidden, layer.output(attended), layer.mlp_norm)
            hidden, x = self.rows.add_norm(hidden, layer.mlp(normed), self._next_norms[index])
        return hidden, x

    def place(self, first_layer: int) -> None:
        """Keep their KV from layer `first_layer` of the pool on."""
        self._first_layer = first_layer

    def write_context(self, batch: ForwardBatch, context: Tensor) -> None:
        """Write each layer's keys and values of `context` [T, X] into the pass's slots."""
        table = self._rotary.at(batch)
        for index, layer in enumerate(self._layers):
            assert layer.context is not None, "a head without context has no such product"
            heads = layer.context(context).view(len(context), -1, self._head_dim)
            value = heads[:, self._num_kv_heads :]
            if layer.head_norm is not None:
                heads = self.rows.norm_heads(heads, self._num_kv_heads, layer.head_norm[self._num_heads :])
            key = self.rows.rotate(heads, self._num_kv_heads, table)
            batch.write(self._first_layer + index, key, value)

    def _convolved(
        self, index: int, x: Tensor, hidden: Tensor, batch: ForwardBatch, table: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = self._layers[index]
        assert layer.convolutions is not None, "only then there are places"
        attention, network = layer.convolutions
        x, own = attention.before(x, places)
        attended = layer.output(self._attend(index, x, batch, table))
        hidden, normed = self.rows.add_norm(hidden, attention.after(attended, own, places), layer.mlp_norm)
        normed, own = network.before(normed, places)
        return self.rows.add_norm(hidden, network.after(layer.mlp(normed), own, places), self._next_norms[index])

    def _attend(self, index: int, x: Tensor, batch: ForwardBatch, table: Tensor) -> Tensor:
        """[T, X] -> [T, heads * D]; the rows' keys and values go to the pool."""
        layer = self._layers[index]
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, self._head_dim)
        value = qkv[:, num_rotated:].transpose(0, 1)[None]
        heads = qkv if layer.head_norm is None else self.rows.norm_heads(qkv, num_rotated, layer.head_norm)
        rotated = self.rows.rotate(heads, num_rotated, table)
        query_key = rotated.transpose(0, 1)[None]  # [1, Hq + H, T, D]
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        attention = batch.attention if layer.is_causal or batch.block_attention is None else batch.block_attention
        return attention.attend(self._first_layer + index, query, key, value, layer.options).reshape(x.shape[0], -1)


class HeadReader:
    """Takes a head out of a checkpoint, in the dtype and on the device of the target's embedding."""

    def __init__(
        self, config: HeadFormat, weights: Weights, target_embedding: Tensor, quantization: Quantization
    ) -> None:
        self._config, self._weights = config, weights
        self._has_midlayer = any(name.startswith("midlayer.") for name in weights.unused)
        self._target_embedding = target_embedding
        self._make_linear = linear_factory(quantization)
        self._make_lm_head = linear_factory(quantization, is_head=True)

    def finish(self) -> None:
        """Raise ConfigError if tensors are left; some that only training or old files need are dropped."""
        size = self._config.layer.head_dim // 2
        dropped = {
            # It follows from the configuration.
            f"{self.prefix(0)}self_attn.rotary_emb.inv_freq": (size,),
            "verifier_norm.weight": (self._config.target.hidden_size,),
            "verifier_lm_head.weight": (self._config.draft_vocab_size, self._config.target.hidden_size),
        }
        for name, shape in dropped.items():
            self._weights.take_if_there(name, shape)
        self._weights.finish()

    def prefix(self, index: int) -> str:
        """Return the prefix of a layer's tensors."""
        return "midlayer." if index == 0 and self._has_midlayer else f"layers.{index}."

    def layers(self, *, has_pairs: bool) -> HeadLayers:
        """Return all layers; with `has_pairs` the first one reads an embedding next to a state, else all read context.

        Raises ConfigError if a tensor is missing or has another shape.
        """
        config = self._config
        found = [
            self._layer(index, 2 if has_pairs and index == 0 else 1, has_context=not has_pairs)
            for index in range(config.layer.num_hidden_layers)
        ]
        return HeadLayers(config, found, self.vector("norm", config.layer.hidden_size))

    def linear(self, name: str, *shape: int) -> Linear:
        """Return the product with a weight."""
        return self._make_linear(self.take(f"{name}.weight", *shape), None)

    def vector(self, name: str, size: int) -> Tensor:
        """Return the weight of a norm."""
        return self.take(f"{name}.weight", size)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor."""
        return self._weights.take(name, shape).to(self._target_embedding)

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """Return a tensor; None if there is no such tensor."""
        return self.take(name, *shape) if name in self._weights else None

    def first_of(self, *names: str) -> str:
        """Return the first of a tensor's possible names that exists, or else the first."""
        return next((name for name in names if name in self._weights), names[0])

    def embedding(self) -> Tensor:
        """Return the head's own table, or else the target's."""
        name, width = "embed_tokens.weight", self._config.layer.hidden_size
        if name in self._weights:
            return self.take(name, self._config.target.vocab_size, width)
        if self._target_embedding.shape[1] != width:
            raise ConfigError(
                f"{self._weights.source} has no {name} and cannot share the target's: its width is {width}, the "
                f"target's {self._target_embedding.shape[1]}; use the head that was trained for it"
            )
        return self._target_embedding

    def lm_head(self, *, is_needed: bool) -> Linear | None:
        """Return the head's own function to its vocabulary; None if it uses the target's."""
        config, name = self._config, "lm_head.weight"
        if not is_needed and name not in self._weights and config.draft_vocab_size == config.target.vocab_size:
            return None
        return self._make_lm_head(self.take(name, config.draft_vocab_size, config.layer.hidden_size), None)

    def target_ids(self) -> Tensor | None:
        """Return target ids: `d2t` is added to a head's id, `t2d` marks the target's ids that the head knows.

        None if the ids are equal.
        """
        num_drafted, num_tokens = self._config.draft_vocab_size, self._config.target.vocab_size
        known = self._weights.take_if_there("t2d", (num_tokens,))
        if "d2t" not in self._weights and num_drafted == num_tokens:
            return None
        target_ids = torch.arange(num_drafted) + self._weights.take("d2t", (num_drafted,)).long()
        if (
            len(set(target_ids.tolist())) < num_drafted
            or not 0 <= int(target_ids.min()) <= int(target_ids.max()) < num_tokens
        ):
            raise ConfigError(
                f"{self._weights.source} is damaged: 'd2t', which is added to the head's ids, does not map them to "
                f"{num_drafted} of the target's {num_tokens} ids"
            )
        if known is not None and not torch.equal(known.bool().nonzero()[:, 0], target_ids.sort().values):
            raise ConfigError(f"{self._weights.source} is damaged: 'd2t' and 't2d' name different tokens")
        return target_ids.to(self._target_embedding.device)

    def _layer(self, index: int, num_inputs: int, *, has_context: bool) -> HeadLayer:
        layer, prefix = self._config.layer, self.prefix(index)
        width, inner, dim = layer.hidden_size, layer.intermediate_size, layer.head_dim
        query_size, key_size = layer.num_attention_heads * dim, layer.num_key_value_heads * dim
        sizes = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        in_attention, in_mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        parts = [
            self._weight_and_bias(f"{in_attention}{name}", size, num_inputs * width) for name, size in sizes.items()
        ]
        up = [self._weight_and_bias(f"{in_mlp}{name}", inner, width) for name in ("gate_proj", "up_proj")]
        return HeadLayer(
            input_norm=self.vector(f"{prefix}input_layernorm", width),
            qkv=self._joined(parts),
            context=self._joined(parts[1:]) if has_context else None,
            head_norm=self._head_norm(in_attention) if self._config.has_head_norms else None,
            output=self._make_linear(*self._weight_and_bias(f"{in_attention}o_proj", width, query_size)),
            mlp_norm=self.vector(f"{prefix}post_attention_layernorm", width),
            mlp=gated_mlp(
                self._joined(up),
                self._make_linear(*self._weight_and_bias(f"{in_mlp}down_proj", width, inner)),
                layer.hidden_act,
            ),
            options=LayerOptions(dim**-0.5, self._config.windows[index]),
            is_causal=self._config.are_causal[index],
            convolutions=self._convolutions(prefix),
        )

    def _convolutions(self, prefix: str) -> tuple[BlockConvolution, BlockConvolution] | None:
        block, width = self._config.block, self._config.layer.hidden_size
        if block is None or not block.conv_kernel_size:
            return None
        taps = block.conv_kernel_size
        num_kernels = 2 * taps * (width // block.conv_group_size)
        attention, network = (
            BlockConvolution(
                self.take(f"{prefix}{name}.base_kernel", 2, taps, width),
                self.linear(f"{prefix}{name}.kernel_projection", num_kernels, width),
            )
            for name in ("attention_conv", "mlp_conv")
        )
        return attention, network

    def _head_norm(self, prefix: str) -> Tensor:
        layer = self._config.layer
        counts = {"q_norm": layer.num_attention_heads, "k_norm": layer.num_key_value_heads}
        norms = [self.vector(f"{prefix}{name}", layer.head_dim).expand(count, -1) for name, count in counts.items()]
        return torch.cat(norms)

    def _weight_and_bias(self, name: str, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor | None]:
        weight = self.take(f"{name}.weight", num_outputs, num_inputs)
        return weight, self.take_if_there(f"{name}.bias", num_outputs)

    def _joined(self, parts: Seq[tuple[Tensor, Tensor | None]]) -> Linear:
        weights = [weight for weight, _ in parts]
        if all(bias is None for _, bias in parts):
            return self._make_linear(torch.cat(weights), None)
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
        return self._make_linear(torch.cat(weights), torch.cat(biases))


def gated_mlp(gate_up: Linear, down: Linear, activation: str) -> Linear:
    """Return `down(act(gate(x)) * up(x))`."""
    act: Callable[[Tensor], Tensor] = F.silu if activation == "silu" else ACT2FN[activation]

    def mlp(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(act(gate).mul_(up))

    return mlp


def spread(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Spread logits [R, draft vocabulary] over the target's [R, V]; other tokens get `UNKNOWN`."""
    if target_ids is None:
        return logits
    return logits.new_full((len(logits), vocab_size), UNKNOWN).index_copy_(1, target_ids, logits)
