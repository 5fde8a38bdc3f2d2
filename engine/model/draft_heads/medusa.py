"""Medusa heads (arXiv:2401.10774): head k drafts token p + 2 + k from the target's last hidden state of position p.

A head is a few residual blocks x + silu(W x + b) and a linear layer to the vocabulary, its own or the target's. Two
formats are read: FasterDecoding/Medusa's (`{head}.{layer}.linear.weight`, `{head}.{layers}.weight`) and
vLLM's (`blocks.{head}.layers.{layer}.weight`, `lm_heads.{head}.weight`, a `token_map` if the vocabulary is cut).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kv_cache.pool import LayerShape
from engine.model.draft_heads.checkpoint import Weights, check_size, head_folder, read_config, read_tensors
from engine.model.draft_heads.head import BlockLogits, no_lm_head
from engine.model.draft_heads.published import TargetShape
from engine.model.forward_batch import UNKNOWN, ForwardBatch, HiddenStateTaps
from engine.model.linear.packed_linear import Linear, linear_of
from protos.errors import ConfigError

_FILES = ("medusa_lm_head.pt",)
_PREFIXES = ("medusa_head.", "medusa_heads.")  # in checkpoints that also hold other tensors


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of a format's tensors; `{h}` is the head, `{l}` the layer, `{n}` the number of layers."""

    weight: str
    bias: str
    lm_head: str
    num_heads: str  # keys of config.json
    num_layers: str


_ORIGINAL = _Names(
    "{h}.{l}.linear.weight", "{h}.{l}.linear.bias", "{h}.{n}.weight", "medusa_num_heads", "medusa_num_layers"
)
_VLLM = _Names(
    "blocks.{h}.layers.{l}.weight",
    "blocks.{h}.layers.{l}.bias",
    "lm_heads.{h}.weight",
    "num_heads",
    "num_hidden_layers",
)


# One head's blocks and its function to the vocabulary; None for the target's.
_Head = tuple[tuple[Linear, ...], Linear | None]


class MedusaHeads:
    """Implements `BlockHead`: a set of heads without KV, and so without rows of a pass."""

    num_more_rows = 0

    def __init__(self, heads: list[_Head], vocab_size: int, token_map: Tensor | None) -> None:
        """`token_map [cut V] int64` has the target's ids of a cut vocabulary."""
        self.taps = HiddenStateTaps(is_final=True)
        self.layer_shapes: list[LayerShape] = []
        self.max_drafts: int | None = len(heads)
        self.lm_head: Linear = no_lm_head
        self._heads = heads
        self._vocab_size = vocab_size
        self._token_map = token_map

    def place(self, first_layer: int) -> None:
        """Do nothing: it has no KV."""

    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        return features

    def block_ids(self, last_id: int, num_drafts: int) -> list[int]:
        return []

    @torch.inference_mode()
    def block(self, batch: ForwardBatch | None, states: Tensor, num_drafts: Seq[int]) -> BlockLogits:
        logits = self.logits(states, max(num_drafts))  # [B, K, V]
        logits = torch.cat([of_state[:num] for of_state, num in zip(logits, num_drafts, strict=True)])
        return lambda rows, _: logits[rows]

    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """States [B, hidden] to the logits of the first `num_heads` heads, [B, K, V] float32."""
        parts = [_state(blocks, hidden) for blocks, _ in self._heads[:num_heads]]  # K x [B, hidden]
        if all(lm_head is None for _, lm_head in self._heads):
            return self.lm_head(torch.stack(parts, dim=1)).float()
        own = [(lm_head or self.lm_head)(part) for (_, lm_head), part in zip(self._heads, parts, strict=False)]
        return self._spread(torch.stack(own, dim=1).float())

    def _spread(self, logits: Tensor) -> Tensor:
        """Spread over the target's vocabulary; tokens outside the cut vocabulary are `UNKNOWN`."""
        if self._token_map is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self._vocab_size), UNKNOWN)
        return spread.index_copy_(-1, self._token_map, logits)


def _state(blocks: tuple[Linear, ...], hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = hidden + F.silu(block(hidden))
    return hidden


def load_medusa(path: str, target: TargetShape, like: Tensor) -> MedusaHeads:
    """Return the heads in `path`, for `target`, in the dtype and on the device of `like`.

    Raises:
        ConfigError: they are missing, incomplete, of another size than the target, or ask for lossy acceptance.
    """
    folder = head_folder(path)
    config = read_config(folder)
    if not config.keys() & {_ORIGINAL.num_heads, _VLLM.num_heads}:
        raise ConfigError(
            f"{path!r} is not a Medusa head: its config.json has no {_ORIGINAL.num_heads} and no {_VLLM.num_heads}; "
            "give the folder of one, or another draft.kind"
        )
    tensors = {_bare(name): tensor for name, tensor in read_tensors(folder, _FILES).items()}
    names = _VLLM if any(name.startswith("blocks.") for name in tensors) else _ORIGINAL
    num_layers, num_heads = _count(config, names.num_layers, folder), _num_heads(tensors, config, names, folder)
    weights = Weights(tensors, f"the Medusa head in {path!r}")
    return _HeadsReader(weights, names, num_layers, config, target, like, path).read(num_heads)


class _HeadsReader:
    """Takes the heads out of a checkpoint, one after the other."""

    def __init__(
        self,
        weights: Weights,
        names: _Names,
        num_layers: int,
        config: Mapping[str, Any],
        target: TargetShape,
        like: Tensor,
        path: str,
    ) -> None:
        self._weights, self._names, self._num_layers = weights, names, num_layers
        self._has_one_lm_head = bool(config.get("original_lm_head"))
        self._vocab_size, self._hidden_size = target.vocab_size, target.hidden_size
        most = self._vocab_size
        self._cut_size = check_size("truncated_vocab_size", config.get("truncated_vocab_size") or most, path, most)
        self._to_target: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(like)
        self._device = like.device

    def read(self, num_heads: int) -> MedusaHeads:
        token_map = self._token_map()
        shared = self._shared_lm_head(token_map)
        heads = [self._head(index, shared, token_map) for index in range(num_heads)]
        self._weights.finish()
        return MedusaHeads(heads, self._vocab_size, token_map)

    def _head(self, index: int, shared: Linear | None, token_map: Tensor | None) -> _Head:
        blocks = tuple(self._block(index, layer) for layer in range(self._num_layers))
        if self._has_one_lm_head:
            return blocks, shared
        return blocks, self._lm_head(self._name(self._names.lm_head, index), token_map)

    def _block(self, head: int, layer: int) -> Linear:
        size = self._hidden_size
        weight = self._weights.take(self._name(self._names.weight, head, layer), (size, size))
        bias = self._weights.take_if_there(self._name(self._names.bias, head, layer), (size,))
        return linear_of(self._to_target(weight), None if bias is None else self._to_target(bias))

    def _lm_head(self, name: str, token_map: Tensor | None) -> Linear:
        """Linear layer of a head; if a cut vocabulary is stored whole, the map selects its rows."""
        num_rows = self._vocab_size if token_map is None else self._cut_size
        if token_map is not None and self._weights.num_rows(name) == self._vocab_size:
            whole = self._weights.take(name, (self._vocab_size, self._hidden_size))
            return linear_of(self._to_target(whole[token_map.to(whole.device)]), None)
        return linear_of(self._to_target(self._weights.take(name, (num_rows, self._hidden_size))), None)

    def _shared_lm_head(self, token_map: Tensor | None) -> Linear | None:
        """Return the linear layer shared by all heads if configured; None for the target's."""
        if not self._has_one_lm_head:
            return None
        stored = [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in self._weights]
        if stored:
            return self._lm_head(stored[0], token_map)
        if token_map is not None:
            raise ConfigError("a Medusa head with a token_map and original_lm_head needs lm_head.weight in its file")
        return None

    def _token_map(self) -> Tensor | None:
        if self._cut_size == self._vocab_size:
            return None
        token_map = self._weights.take("token_map", (self._cut_size,)).long()
        if int(token_map.min()) < 0 or int(token_map.max()) >= self._vocab_size:
            raise ConfigError(
                f"the Medusa head's token_map has ids from {int(token_map.min())} to {int(token_map.max())}, but the "
                f"target has {self._vocab_size} tokens; use the head that was trained for it"
            )
        return token_map.to(self._device)

    def _name(self, template: str, head: int, layer: int = 0) -> str:
        return template.format(h=head, l=layer, n=self._num_layers)


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _count(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"the Medusa head in {str(folder)!r} has {key} = {value!r} in config.json; it must be 1 or more"
        )
    return value


def _num_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: _Names, folder: Path) -> int:
    """Return the number of heads in the file. Published configurations may name fewer, never more."""
    pattern = re.compile(re.escape(names.weight).replace(r"\{h\}", r"(\d+)").replace(r"\{l\}", r"\d+"))
    found = {int(match[1]) for name in tensors if (match := pattern.fullmatch(name))}
    num_named = _count(config, names.num_heads, folder)
    num_heads = max(found, default=-1) + 1
    if num_heads < num_named:
        raise ConfigError(
            f"the Medusa head in {str(folder)!r} has {num_heads} heads in its file and {names.num_heads} = {num_named} "
            "in config.json; the file is incomplete"
        )
    return num_heads
