"""Refuses weights that do not match the model that their configuration describes, or that are not finite."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor, nn

from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.weight_files import FLOATS, tensor_headers
from protos.errors import ConfigError


def refuse_not_finite(folder: Path) -> None:
    """Raise ConfigError if a weight in `folder` is NaN or infinite; reads one tensor at a time.

    Raises:
        ConfigError: a value is not finite, or a file is missing, cut short or not safetensors.
    """
    headers = tensor_headers(folder)
    if not headers:
        raise ConfigError(f"model folder {str(folder)!r} has no weights in safetensors; fetch or convert them")
    floats = [(header.file, name) for name, header in sorted(headers.items()) if header.dtype in FLOATS]
    for file, entries in groupby(sorted(floats), key=lambda entry: entry[0]):
        with safe_open(file, framework="pt") as tensors:
            for _, name in entries:
                refuse_not_finite_tensor(tensors.get_tensor(name), name, str(file))


def refuse_not_finite_model(path: str, model: nn.Module) -> None:
    """Raise ConfigError if a weight of `model`, loaded from `path`, is NaN or infinite.

    Those that are not read yet (`engine.model.checkpoint.unread_weight`) are checked when they are.
    """
    drop_pages(_finite_weights(path, model))


def _finite_weights(path: str, model: nn.Module) -> Iterator[nn.Parameter]:
    for name, weight in model.named_parameters():
        if type(weight) is nn.Parameter and weight.nbytes and weight.is_floating_point():
            refuse_not_finite_tensor(weight, name, path)
            yield weight


def refuse_not_finite_tensor(tensor: Tensor, name: str, source: str) -> None:
    """Raise ConfigError if a number of `name` in `source` is NaN or infinite."""
    low, high = torch.aminmax(tensor)  # NaN where a value is NaN; allocates no boolean tensor of the same size
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        num_wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        raise ConfigError(
            f"{num_wrong} of {tensor.numel()} values of {name!r} in {source!r} are NaN or infinite: the checkpoint is "
            "damaged, or its training diverged; fetch or export it again"
        )


_IN_LAYER = re.compile(r"(.*\.)(\d+)\.(.*)")  # text before the layer's number, the number, the rest


def refuse_incomplete(path: str, info: dict[str, Any], names: Iterable[str]) -> None:
    """Raise ConfigError if tensors are missing, have another shape, or would be dropped.

    Dropped tensors are biases of layers that the configuration builds without bias, and whole layers after its last
    one. Other unused tensors (image towers, draft heads) are allowed.

    Args:
        path: the checkpoint, for messages.
        info: transformers' `output_loading_info`.
        names: names of the model's own tensors.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"the weights of {path!r} are incomplete: {len(missing)} tensors are missing, {missing[0]!r} among them"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(
            f"the weights of {path!r} do not fit its configuration: {name!r} is {list(found)} in the files but "
            f"{list(wanted)} by the configuration ({len(info['mismatched_keys'])} tensors differ)"
        )
    if dropped := _dropped(set(info["unexpected_keys"]), set(names)):
        raise ConfigError(
            f"the weights of {path!r} do not fit its configuration: {dropped[0]!r} is in the files, but the "
            f"configuration has no such tensor ({len(dropped)} tensors); fetch both again from one source"
        )


def _dropped(unexpected: set[str], names: set[str]) -> list[str]:
    layers = _layers(unexpected)
    usual = {prefix: contents for (prefix, number), contents in _layers(names).items() if number == 0}
    whole = {layer for layer, contents in layers.items() if contents == usual.get(layer[0])}
    dropped = []
    for name in sorted(unexpected):
        in_layer = _IN_LAYER.fullmatch(name)
        is_bias = name.endswith(".bias") and name.removesuffix("bias") + "weight" in names
        if is_bias or (in_layer and (in_layer[1], int(in_layer[2])) in whole):
            dropped.append(name)
    return dropped


def _layers(names: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """Group tensors by layer: (name before the layer's number, number) to the rest of each name."""
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        if found := _IN_LAYER.fullmatch(name):
            layers[found[1], int(found[2])].add(found[3])
    return layers


# What transformers raises for a checkpoint that it does not understand.
READING_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, ImportError),
    AssertionError,
    StrictDataclassError,
)
