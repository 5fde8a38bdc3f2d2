"""Safetensors files of a model folder, and the headers of their tensors; no weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of a file: safetensors' name of its dtype ("BF16", "I32", "F8_E4M3"), and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names, or all where there is none.

    Raises:
        ConfigError: the index is none.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(index)!r} is no index of weights: {error}") from None
    return [folder / name for name in sorted(names)]


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors by name.

    Raises:
        ConfigError: a file is missing, cut short or no safetensors file.
    """
    headers = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    part = tensors.get_slice(name)
                    headers[name] = TensorHeader(file, str(part.get_dtype()), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}") from None
    return headers


def read_config(folder: Path) -> Mapping[str, object]:
    """Return the contents of the folder's config.json.

    Raises:
        ConfigError: there is none, or it is no mapping in JSON.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} holds no mapping")
    return config
