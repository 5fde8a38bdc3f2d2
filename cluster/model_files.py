"""A check that the models' files are all there, made before anything makes room for them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.config import DeployConfig
from cluster.model_path import resolve_model_path
from protos.errors import ConfigError
from protos.messages import SpeculationMethod
from router.tokenizer.tokenizer_files import load_tokenizer_files


def check_models(config: DeployConfig) -> None:
    """Check the target's weights and tokenizer and a draft model's weights.

    A redeploy that cannot work is thus refused while the old pairs still serve. Of weights only the headers are read;
    Hub ids are fetched where they are loaded.

    Raises:
        ConfigError: a file is missing, cut short or not what its name says.
    """
    target = Path(resolve_model_path(config.target.path))
    if target.is_dir():
        _check_weights(target)
        load_tokenizer_files(str(target))
    if config.draft.kind is SpeculationMethod.MODEL and config.draft.path is not None:
        draft = Path(resolve_model_path(config.draft.path))
        if draft.is_dir():
            _check_weights(draft)


def _check_weights(folder: Path) -> None:
    files = _weight_files(folder)
    if not files:
        raise ConfigError(f"model folder {str(folder)!r} has no weights in safetensors; other formats are not read")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names, or all where there is none."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(index)!r} is no index of weights: {error}") from None
    return [folder / name for name in sorted(names)]
