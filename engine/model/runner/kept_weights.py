"""The packed weights of a model on this machine, as earlier starts kept them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
import transformers

from engine.config import ModelConfig, Quantization
from engine.model.linear.packed_file import packed_weights
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.loader import display_name, fetched_folder, load_config, model_version
from engine.native.library import native_digest, native_instructions

_CODE = Path(__file__).parents[2]  # it lays weights out, computes with them and compares
_INDEX = "model.safetensors.index.json"


@contextmanager
def kept_weights(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, kept_as: str, *, repeats_checks: bool = False
) -> Iterator[WeightStore]:
    """Yield the store of a model's packed weights for rows of `dtype`; only processors have one.

    Args:
        model: the checkpoint and its quantization.
        dtype: of rows.
        device: of the weights.
        kept_as: names other differences between packed weights of one checkpoint.
        repeats_checks: as in `packed_weights`.

    Raises:
        ConfigError: there is no such model.
    """
    folder = fetched_folder(model.path)
    load_config(model.path)
    facts = _facts(folder, model, dtype, kept_as) if device.type == "cpu" else None
    if facts is None:
        yield NO_STORE
        return
    with packed_weights(facts, display_name(model.path), repeats_checks=repeats_checks) as store:
        yield store


def _facts(folder: Path, model: ModelConfig, dtype: torch.dtype, kept_as: str) -> dict[str, str] | None:
    """Return everything that packed weights depend on; None where a file cannot be read, which loading will report."""
    index = folder / _INDEX
    try:
        checkpoint = model_version(model.path)
        tensors = blake2b(index.read_bytes(), digest_size=16).hexdigest() if index.is_file() else ""
    except OSError:
        return None
    instructions = native_instructions()
    return {
        "checkpoint": checkpoint,
        "index": tensors,
        "quantization": Quantization(model.quantization).value,
        "dtype": str(dtype),
        "deterministic": str(model.deterministic),
        "kept as": kept_as,
        "kernels": native_digest(),
        "instructions": "none" if instructions is None else instructions.name,
        "code": _code_digest(),
        "libraries": f"torch {torch.__version__} transformers {transformers.__version__}",
    }


@cache
def _code_digest() -> str:
    digest = blake2b(digest_size=16)
    for file in sorted(_CODE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
