"""Safetensors files of a model folder, and the headers of their tensors; no weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from protos.errors import ConfigError

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    match _read_json(index):
        case {"weight_map": dict(names)} if all(map(_is_file_name, names.values())):
            return sorted(folder / name for name in set(names.values()))
    raise ConfigError(
        f"{str(index)!r} is no index of weights: it needs a 'weight_map' from tensors to names of files beside it; "
        "fetch it again"
    )


def _is_file_name(name: object) -> bool:
    """True for the plain name of a file in the folder: no path that leads out of it, and no lone surrogate."""
    return isinstance(name, str) and name.isprintable() and name not in ("", ".", "..") and not {*name} & {*"/\\"}


def refuse_unindexed(folder: Path, config: Mapping[str, object]) -> None:
    """Raise ConfigError for a model whose files transformers does not find; quantized ones are read without it.

    It opens model.safetensors, or what an index names, or the file that `config` has as `transformers_weights`.
    """
    if (folder / _WHOLE).is_file() or config.get("transformers_weights"):
        return
    index = folder / _INDEX
    if not index.is_file():
        names = ", ".join(file.name for file in sorted(folder.glob("*.safetensors")))
        raise ConfigError(
            f"model folder {str(folder)!r} has neither {_WHOLE} nor an index of its parts (*.safetensors in it: "
            f"{names or 'none'}); fetch {_INDEX} and the parts that it names, or give a single file the name {_WHOLE}"
        )
    match _read_json(index):
        case {"metadata": dict()}:
            return
    raise ConfigError(
        f"{str(index)!r} has no mapping 'metadata', without which transformers does not read it; fetch it again, or "
        'add "metadata": {} to it'
    )


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
            raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}; fetch it again") from None
    return headers


def read_config(folder: Path) -> Mapping[str, object]:
    """Return the contents of the folder's config.json.

    Raises:
        ConfigError: there is none, or it is no mapping in JSON.
    """
    return read_mapping(folder / "config.json")


def refuse_untyped(folder: Path, config: Mapping[str, object]) -> None:
    """Raise ConfigError for the `config` of a model that does not say its type, by which transformers builds it."""
    if not isinstance(kind := config.get("model_type"), str):
        raise ConfigError(
            f"{str(folder / 'config.json')!r} has model_type {kind!r}; it must name the model's type, as 'llama': "
            "fetch it again"
        )


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a file of JSON.

    Raises:
        ConfigError: there is no file, or no mapping in it.
    """
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{str(file)!r} holds no mapping in JSON; mend it, or fetch it again")
    return content


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}; mend it, or fetch it again") from None
