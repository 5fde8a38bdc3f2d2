"""A refusal of weights that do not make up the model that their configuration names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from protos.errors import ConfigError

_IN_LAYER = re.compile(r"(.*\.)(\d+)\.(.*)")  # what stands before the layer's number, the number, and behind it


def refuse_incomplete(path: str, info: dict[str, Any], names: Iterable[str]) -> None:
    """Raise ConfigError for what transformers' loading info has as missing, of another shape, or left out.

    Left out are biases of layers that have none by the configuration, and whole layers behind its last one; other
    tensors that the model has no use for (of towers for images, of heads that draft) are no mistake.

    Args:
        path: of the checkpoint.
        info: transformers' `output_loading_info`.
        names: the model's own tensors.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"the weights of {path!r} are incomplete: {len(missing)} tensors are missing, {missing[0]!r} among them"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(
            f"the weights of {path!r} do not fit its configuration: {name!r} is {list(found)} in the files, and "
            f"{list(wanted)} by the configuration ({len(info['mismatched_keys'])} tensors differ)"
        )
    if dropped := _dropped(set(info["unexpected_keys"]), set(names)):
        raise ConfigError(
            f"the weights of {path!r} do not fit its configuration: {dropped[0]!r} is in the files, and the "
            f"configuration leaves it out ({len(dropped)} tensors); fetch both again from one place"
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
    """Return the ends of the names of each layer's tensors, by what stands before its number and by the number."""
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        if found := _IN_LAYER.fullmatch(name):
            layers[found[1], int(found[2])].add(found[3])
    return layers
