"""The folder of heads: loaded for training, and written in the same format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.draft_heads.checkpoint import read_config, read_tensors
from engine.model.draft_heads.eagle3_config import Eagle3Config, TargetShape
from models.draft_heads.eagle3_student import Eagle3Student
from models.draft_heads.medusa_heads import TrainableMedusaHeads
from models.tuning.draft import TunableDraft, copy_files, partial_of, rename_whole
from models.tuning.heads import Eagle3Heads, Medusa, Reader
from models.tuning.student import Student
from protos.errors import ConfigError

_OF_VOCABULARY = ("d2t", "t2d")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_WEIGHTS = "model.safetensors"


def holds_heads(config: dict[str, Any]) -> bool:
    """True if this config.json is of EAGLE-3 or Medusa heads, in any layout."""
    return _is_medusa(config) or "draft_vocab_size" in config or "speculators_model_type" in config


def _is_medusa(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


class HeadFolder(TunableDraft):
    """The folder of EAGLE-3 heads in the original layout, or of Medusa heads in vLLM's that share the target's matrix.

    Raises:
        ConfigError: the heads are of another layout, or of another target, or that has quantized weights.
    """

    def __init__(self, path: Path, target: str, device: torch.device) -> None:
        super().__init__(path, device)
        self._config = read_config(path)
        self._tensors = read_tensors(path)
        self._reader, self._shape = _reader(target, device)
        self.load()  # faults of the head are reported before the log is read

    def load(self) -> Student:
        """Return the heads in float32, on the device, and their target."""
        return self._medusa() if _is_medusa(self._config) else self._eagle3()

    def rounded(self, student: Student) -> Student:
        """Round the weights to those that `write` would write, and return the heads."""
        with torch.no_grad():
            for name, weight in student.model.named_parameters():
                weight.copy_(weight.to(self._tensors[name].dtype))
        return student

    def write(self, student: Student, folder: Path, report: dict[str, Any]) -> None:
        """Write the heads with their configuration and `tuning.json`, whole or not at all."""
        partial = partial_of(folder)
        partial.mkdir()
        trained = {
            name: weight.detach().cpu().to(self._tensors[name].dtype).contiguous()
            for name, weight in student.model.named_parameters()
        }
        save_file({**self._tensors, **trained}, partial / _WEIGHTS, metadata={"format": "pt"})
        copy_files(self.path, partial)
        rename_whole(partial, folder, report)

    def _eagle3(self) -> Student:
        config = Eagle3Config.of(self._config, self._shape, str(self.path))
        strange = next((flag for flag in _FLAGS if getattr(config, flag)), None)
        if strange is not None or config.layer_prefix != "midlayer.":
            raise self._unknown(strange or "speculators_model_type")
        if max(config.taps.layers) >= self._shape.num_layers:
            raise self._unknown("a state after the last layer")
        student = Eagle3Student(config.layer, len(config.taps.layers), config.draft_vocab_size)
        self._fill(student, {name: each for name, each in self._tensors.items() if name not in _OF_VOCABULARY})
        offsets = self._tensors.get("d2t")
        target_ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        return Eagle3Heads(student, self._reader, config.taps.layers, target_ids)

    def _medusa(self) -> Student:
        try:
            heads = TrainableMedusaHeads(
                self._shape.hidden_size, self._config["num_heads"], int(self._config["num_hidden_layers"])
            )
        except KeyError as error:
            raise self._unknown(f"no {error.args[0]} in config.json") from error
        self._fill(heads, self._tensors)
        return Medusa(heads, self._reader)

    def _fill(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        wanted = {name: weight.shape for name, weight in model.state_dict().items()}
        found = {name: each.shape for name, each in tensors.items()}
        if wanted != found:
            raise self._unknown(f"the tensor {min(wanted.items() ^ found.items())[0]}")
        model.load_state_dict({name: each.float() for name, each in tensors.items()})
        model.to(self._device)

    def _unknown(self, about: str) -> ConfigError:
        return ConfigError(
            f"--draft {self.path} has heads in a layout that is served and not tuned ({about}); tuned are EAGLE-3 "
            "heads in the original layout without further norms, and Medusa heads with the target's own matrix to the "
            "vocabulary, as models.draft_heads writes both"
        )


def _reader(target: str, device: torch.device) -> tuple[Reader, TargetShape]:
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=resolve_dtype("auto", device))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--target {target} cannot be loaded to train heads on its states: {error}") from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f"--target {target} has quantized weights; heads are tuned on the checkpoint it was made of")
    config = model.config.get_text_config()
    reader = Reader(model.eval().requires_grad_(False).to(device))
    return reader, TargetShape(reader.vocab_size, config.hidden_size, config.num_hidden_layers)
