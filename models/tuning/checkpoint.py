"""A draft read for training, and written as it was read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import DraftVocabulary
from engine.proposer.vocab_mapping.choice import choose_vocabulary
from engine.proposer.vocab_mapping.vocabulary_pair import are_sizes_of_one
from protos.errors import ConfigError

_COPIED = (".json", ".jinja", ".txt", ".model")
_OF_WEIGHTS = (".index.json", "training.json")  # of those that were there


class DraftFolder:
    """The folder of a draft model that shares its target's vocabulary.

    Raises:
        ConfigError: it cannot be trained: there is no such folder, its weights are quantized, or its tokens are others.
    """

    def __init__(self, path: Path, target: str, device: torch.device) -> None:
        self.path = path
        self._device = device
        if not (path / "config.json").is_file():
            raise ConfigError(f"--draft {path} has no config.json; give the folder of a draft model")
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--draft {path} is no model that can be tuned: {error}") from error
        if not any(name.endswith("ForCausalLM") for name in config.architectures or ()):
            raise ConfigError(f"--draft {path} holds {config.architectures}; only draft models are tuned, and no heads")
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"--draft {path} has quantized weights; tune the checkpoint that they were made of")
        choice, num_tokens = (
            choose_vocabulary(target, str(path), DraftVocabulary.AUTO),
            config.get_text_config().vocab_size,
        )
        if choice.vocabulary is not DraftVocabulary.SAME or not are_sizes_of_one(
            num_tokens, choice.target_tokens.vocab_size
        ):
            raise ConfigError(f"--draft {path} has another vocabulary than --target; only one of its tokens is tuned")
        self._dtype: torch.dtype = config.dtype or torch.float32

    def load(self) -> nn.Module:
        """Return the model in float32, on the device."""
        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return model.to(self._device)

    def rounded(self, model: nn.Module) -> nn.Module:
        """Round the weights to those that `write` would write, and return the model."""
        return model.to(self._dtype).float()

    def write(self, model: nn.Module, folder: Path, report: dict[str, Any]) -> None:
        """Write the model beside the draft's configuration and tokenizer, whole or not at all, with `tuning.json`.

        Args:
            model: its weights are rounded to the draft's own dtype.
            folder: must not exist; its parent must.
            report: the content of tuning.json.
        """
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.to(self._dtype).save_pretrained(partial)  # type: ignore[operator]  # of transformers' models
        for file in self.path.iterdir():
            if file.is_file() and file.suffix in _COPIED and not file.name.endswith(_OF_WEIGHTS):
                shutil.copy2(file, partial / file.name)
        (partial / "tuning.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
