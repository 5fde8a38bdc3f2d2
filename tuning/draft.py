"""Draft models that can be tuned: loaded from a folder, and written in the same format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.proposer.vocab_mapping.translation import choose_vocabulary
from protos.errors import ConfigError
from tuning.student import LanguageModel, Student

_COPIED = (".json", ".jinja", ".txt", ".model")
_OF_WEIGHTS = (".index.json", "training.json", "tuning.json")  # files of weights and reports, which are written new


def partial_of(folder: Path) -> Path:
    """Return the name of the unfinished folder, and remove what an earlier run left there."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    return partial


def copy_files(source: Path, folder: Path) -> None:
    """Copy the files of a draft except its weights."""
    for file in source.iterdir():
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(_OF_WEIGHTS):
            shutil.copy2(file, folder / file.name)


def rename_whole(partial: Path, folder: Path, report: dict[str, Any]) -> None:
    """Add `tuning.json`, and give the folder its name."""
    (partial / "tuning.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.rename(folder)


class DraftFolder:
    """The folder of a draft model that shares its target's vocabulary.

    Raises:
        ConfigError: there is no such folder, its weights are quantized, or its vocabulary is not the target's.
    """

    def __init__(self, path: Path, target: str, device: torch.device) -> None:
        self.path, self._device = path, device
        if not (path / "config.json").is_file():
            raise ConfigError(f"--draft {path} has no config.json; give the folder of a draft model")
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--draft {path} is not a model that can be tuned: {error}") from error
        if not any(name.endswith("ForCausalLM") for name in config.architectures or ()):
            raise ConfigError(f"--draft {path} holds {config.architectures}; tuned are draft models and heads")
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"--draft {path} has quantized weights; tune the checkpoint that they were made of")
        if choose_vocabulary(target, str(path)).pair is not None:
            raise ConfigError(f"--draft {path} has another vocabulary than --target; only one of its tokens is tuned")
        self._dtype: torch.dtype = config.dtype or torch.float32

    def load(self) -> Student:
        """Return the model in float32, on the device."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return LanguageModel(model.to(self._device))

    def rounded(self, student: Student) -> Student:
        """Round the weights to those that `write` would write, and return the draft."""
        student.model.to(self._dtype).float()
        return student

    def write(self, student: Student, folder: Path, report: dict[str, Any]) -> None:
        """Write the model with the draft's configuration and tokenizer and `tuning.json`, whole or not at all.

        Args:
            student: its weights are rounded to the present draft's dtypes.
            folder: must not exist; its parent must.
            report: the content of tuning.json.
        """
        partial, model = partial_of(folder), student.model.to(self._dtype)
        model.save_pretrained(partial)  # type: ignore[operator]  # of transformers' models
        copy_files(self.path, partial)
        rename_whole(partial, folder, report)
