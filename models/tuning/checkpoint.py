"""The folder of a draft model: loaded for training, and written in the same format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import DraftVocabulary
from engine.proposer.vocab_mapping.choice import choose_vocabulary
from models.tuning.draft import TunableDraft, copy_files, partial_of, rename_whole
from models.tuning.student import LanguageModel, Student
from protos.errors import ConfigError


class DraftFolder(TunableDraft):
    """The folder of a draft model that shares its target's vocabulary.

    Raises:
        ConfigError: there is no such folder, its weights are quantized, or its vocabulary is not the target's.
    """

    def __init__(self, path: Path, target: str, device: torch.device) -> None:
        super().__init__(path, device)
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
        if choose_vocabulary(target, str(path), DraftVocabulary.AUTO).vocabulary is not DraftVocabulary.SAME:
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
        """Write the model with the draft's configuration and tokenizer and `tuning.json`, whole or not at all."""
        partial, model = partial_of(folder), student.model.to(self._dtype)
        model.save_pretrained(partial)  # type: ignore[operator]  # of transformers' models
        copy_files(self.path, partial)
        rename_whole(partial, folder, report)
