"""Drafts that can be tuned, loaded from a folder and written in the same format: draft models and heads.

Heads (EAGLE-3, DSpark and Medusa) train over the target's hidden states of logged texts. The log has token ids and no
hidden states, so the target computes them, without its output layer: the log has its likeliest tokens. The states of
inner layers are kept in a file, since a training reads each text many times.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import SEEK_END
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import HeadKind, ModelConfig
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.unread_weight import UnreadWeight, replace_unread
from engine.model.draft_heads.checkpoint import BlockFormat, read_config, read_tensors
from engine.model.draft_heads.published import NORMS, HeadFormat, TargetShape
from engine.model.loader import load_model
from engine.proposer.translation import choose_vocabulary
from protos.errors import ConfigError
from tuning.log_windows import Window, owners_of, padded_ids
from tuning.student import BlockStudent, Eagle3Student, LanguageModel, Student, TrainableMedusaHeads

_OF_VOCABULARY = ("d2t", "t2d")
_WEIGHTS = "model.safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model")
_OF_WEIGHTS = (".index.json", "training.json", "tuning.json")  # files of weights and reports, which are written new


def partial_of(folder: Path) -> Path:
    """Return the name of the unfinished folder, and remove what an earlier run left there."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    return partial


def _finish(partial: Path, source: Path, folder: Path, report: dict[str, Any]) -> None:
    """Add the files of the draft at `source`, except its weights, and `tuning.json`; then give the folder its name."""
    for file in source.iterdir():
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(_OF_WEIGHTS):
            shutil.copy2(file, partial / file.name)
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
        _finish(partial, self.path, folder, report)


class Reader:
    """A frozen target that computes hidden states for its heads: any model of transformers.

    Those of inner layers are computed once for each text, and kept in a file without a name in `folder`.
    """

    def __init__(self, target: Any, folder: Path) -> None:
        self._trunk = target.base_model
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the reader is used)
        self._kept: dict[bytes, int] = {}  # where the states of a text begin
        self.embedding: Tensor = target.get_input_embeddings().weight
        self.lm_head: Tensor = target.get_output_embeddings().weight
        self.vocab_size = len(self.lm_head)
        config = target.config.get_text_config()
        self.shape = TargetShape(self.vocab_size, config.hidden_size, config.num_hidden_layers)

    @torch.no_grad()
    def inputs_of(self, texts: Sequence[Tensor], layers: Sequence[int]) -> list[Tensor]:
        """Texts [T] int64 to the inputs of layers, side by side, [T, layers * hidden] float32 of each text."""
        names = [text.numpy().tobytes() for text in texts]
        new = list({name: text for name, text in zip(names, texts, strict=True) if name not in self._kept}.items())
        if new:
            ids = pad_sequence([text for _, text in new], batch_first=True)  # attention is causal
            found = self._trunk(ids.to(self.embedding.device), use_cache=False, output_hidden_states=True).hidden_states
            states = torch.cat([found[layer] for layer in layers], dim=-1).cpu()  # [B, T, layers * hidden]
            for (name, text), each in zip(new, states, strict=True):
                self._kept[name] = self._file.seek(0, SEEK_END)
                self._file.write(each[: len(text)].contiguous().view(torch.uint8).numpy().tobytes())
            self._file.flush()
        width = len(layers) * self.embedding.shape[1]
        return [self._read(self._kept[name], len(text), width) for name, text in zip(names, texts, strict=True)]

    def _read(self, begin: int, num_rows: int, width: int) -> Tensor:
        dtype = self.embedding.dtype
        content = bytearray(os.pread(self._file.fileno(), dtype.itemsize * num_rows * width, begin))
        return torch.frombuffer(content, dtype=dtype).view(num_rows, width).float().to(self.embedding.device)

    @torch.no_grad()
    def last_states(self, ids: Tensor) -> Tensor:
        """Map ids [B, T] to the states after the final norm, [B, T, hidden] float32."""
        states: Tensor = self._trunk(ids, use_cache=False).last_hidden_state
        return states.float()

    @torch.no_grad()
    def embedded(self, ids: Tensor) -> Tensor:
        """Ids [B, T] to their embeddings [B, T, hidden] float32."""
        return F.embedding(ids, self.embedding).float()


class _Heads(Student):
    """The base of all kinds. `layers` are those whose inputs they read, `target_ids` their tokens; None for all."""

    def __init__(
        self,
        model: nn.Module,
        reader: Reader,
        layers: Sequence[int] = (),
        target_ids: Tensor | None = None,
        **limits: int,
    ) -> None:
        super().__init__(model, are_drafts_alike=False, **limits)
        self._reader, self._layers, self._target_ids = reader, layers, target_ids
        self._draft_ids = torch.arange(reader.vocab_size)
        if target_ids is not None:
            self._draft_ids = torch.full_like(self._draft_ids, -1)
            self._draft_ids[target_ids] = torch.arange(len(target_ids))

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        return self._draft_ids[target_ids.long()]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def _states(self, windows: Sequence[Window], num_more: int = 0) -> Tensor:
        """Return the inputs of the layers [B, longest + num_more, layers * hidden], padded with zeros."""
        found = self._reader.inputs_of([window.token_ids for window in windows], self._layers)
        return F.pad(pad_sequence(found, batch_first=True), (0, 0, 0, num_more))

    def _texts(self, windows: Sequence[Window], num_more: int = 0) -> Tensor:
        """Return the windows' tokens [B, longest + num_more], padded."""
        return padded_ids(windows, num_more).to(self._reader.embedding.device)

    @staticmethod
    def _at_begin(states: Tensor, windows: Sequence[Window], draft: int) -> Tensor:
        """Select the states [N, ...] of [B, T, ...] that draft number `draft` predicts from, for each row.

        They are 1 + `draft` places before the row, or at the first place of a text.
        """
        places = torch.cat([(window.rows - 1 - draft).clamp(min=0) for window in windows])
        return states[owners_of(windows).to(states.device), places.to(states.device)]


class Eagle3Heads(_Heads):
    """An EAGLE-3 head, unrolled over the drafts of a round."""

    def __init__(
        self, student: Eagle3Student, reader: Reader, layers: Sequence[int], target_ids: Tensor | None
    ) -> None:
        super().__init__(student, reader, layers, target_ids)
        self._student = student

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield the drafts in order; each continues the head's own states of its predecessor."""
        features = self._states(windows, num_drafts - 1)
        embedded = self._reader.embedded(self._texts(windows, num_drafts - 1))
        for draft, states in enumerate(self._student.steps(features, embedded, num_drafts)):
            yield F.linear(self._at_begin(states, windows, draft), self._student.lm_head.weight)

    def vocabulary(self) -> Sequence[Tensor]:
        return [self._student.lm_head.weight]


class DSparkHeads(_Heads):
    """A DSpark head: the rows of its blocks are the drafts."""

    def __init__(
        self,
        student: BlockStudent,
        reader: Reader,
        layers: Sequence[int],
        target_ids: Tensor | None,
        block: BlockFormat,
    ) -> None:
        super().__init__(student, reader, layers, target_ids, max_drafts=block.num_rows)
        self._student, self._mask_id = student, block.mask_id

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield the drafts in order; each follows the text's own token."""
        ids, device = self._texts(windows), self._reader.embedding.device
        begins = owners_of(windows) * ids.shape[1]
        rows = torch.cat([window.rows for window in windows])
        places = [(begins + (rows - draft).clamp(min=0)).to(device) for draft in range(num_drafts)]
        before = ids.flatten()[(begins + rows).to(device)]
        is_mask = (ids == self._mask_id)[..., None]
        embedded = torch.where(is_mask, self._student.mask_embedding, self._reader.embedded(ids))
        states = self._student.drafts(self._states(windows), embedded, places)
        return (self._student.logits(each, before) for each in states)

    def vocabulary(self) -> Sequence[Tensor]:
        return [self._student.lm_head.weight, *self._student.markov_head.parameters()]


class Medusa(_Heads):
    """Medusa heads that share the target's layer to the vocabulary."""

    def __init__(self, heads: TrainableMedusaHeads, reader: Reader) -> None:
        super().__init__(heads, reader, max_drafts=heads.num_heads)
        self._heads = heads

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield head by head; all read the same state."""
        hidden, lm_head = self._reader.last_states(self._texts(windows)), self._reader.lm_head
        for draft, blocks in enumerate(self._heads.blocks[:num_drafts]):
            states = blocks(self._at_begin(hidden, windows, draft))
            yield F.linear(states.to(lm_head.dtype), lm_head)

    def vocabulary(self) -> Sequence[Tensor]:
        return []


def holds_heads(config: dict[str, Any]) -> bool:
    """True if this config.json is of EAGLE-3 or Medusa heads, in any layout."""
    return _is_medusa(config) or "draft_vocab_size" in config or "speculators_model_type" in config


def _is_medusa(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


class HeadFolder:
    """The folder of heads in a layout that `_unknown` lists. `states` is a folder for the target's states of texts.

    Raises:
        ConfigError: the heads are of another layout, or of another target, or that has quantized weights.
    """

    def __init__(self, path: Path, target: str, device: torch.device, states: Path | None = None) -> None:
        self.path, self._device = path, device
        self._config = read_config(path)
        self._tensors = read_tensors(path)
        self._reader = load_reader(target, device, states or path.parent)
        self._shape = self._reader.shape
        self.load()  # faults of the head are reported before the log is read

    def load(self) -> Student:
        """Return the heads in float32, on the device, and their target."""
        if _is_medusa(self._config):
            return self._medusa()
        return self._dspark() if self._config.get("speculators_model_type") == HeadKind.DSPARK else self._eagle3()

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
        _finish(partial, self.path, folder, report)

    def _eagle3(self) -> Student:
        config = HeadFormat.of(HeadKind.EAGLE3, self._config, self._shape, str(self.path))
        strange = next((name for name in NORMS if getattr(config, name)), None)
        if strange is not None or "speculators_model_type" in self._config:
            raise self._unknown(strange or "speculators_model_type")
        if max(config.taps.layers) >= self._shape.num_layers:
            raise self._unknown("a state after the last layer")
        student = Eagle3Student(config.layer, len(config.taps.layers), config.draft_vocab_size)
        self._fill(student, self._trained_tensors())
        return Eagle3Heads(student, self._reader, config.taps.layers, self._target_ids())

    def _dspark(self) -> Student:
        config = HeadFormat.of(HeadKind.DSPARK, self._config, self._shape, str(self.path))
        block = config.block
        assert block is not None, "a parallel head has blocks"
        plain = BlockFormat(block.mask_id, block.num_rows, is_anchor_drafting=True, markov_rank=block.markov_rank)
        if (
            replace(block, has_markov_confidence=False) != plain
            or any(config.windows)
            or len(set(config.are_causal)) > 1
            or config.rotary_length
        ):
            raise self._unknown("its block, or a window")
        if max(config.taps.layers) >= self._shape.num_layers:
            raise self._unknown("a state after the last layer")
        student = BlockStudent(config)
        self._fill(student, self._trained_tensors())
        return DSparkHeads(student, self._reader, config.taps.layers, self._target_ids(), block)

    def _trained_tensors(self) -> dict[str, Tensor]:
        return {name: each for name, each in self._tensors.items() if name not in _OF_VOCABULARY}

    def _target_ids(self) -> Tensor | None:
        offsets = self._tensors.get("d2t")
        return None if offsets is None else offsets.long() + torch.arange(len(offsets))

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
            "heads in the original layout without further norms, Medusa heads with the target's own matrix to the "
            "vocabulary, as models.training.train_heads writes both, and DSpark heads as --draft dspark makes them"
        )


TunableDraft = DraftFolder | HeadFolder  # the present draft, the start of every training


def load_reader(target: str, device: torch.device, folder: Path) -> Reader:
    """Return the target at a folder or Hub id, with the states of texts in `folder`. Raises ConfigError."""
    try:
        section = getattr(AutoConfig.from_pretrained(target), "quantization_config", None)
        if section is None:
            model = AutoModelForCausalLM.from_pretrained(target, dtype=resolve_dtype("auto", device))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--target {target} cannot be loaded to train heads on its states: {error}") from error
    if section is not None and section.get("quant_method") != "gguf":
        raise ConfigError(f"--target {target} has quantized weights; heads are tuned on the checkpoint it was made of")
    if section is not None:  # a converted GGUF file
        model = load_model(ModelConfig(target, device=str(device)))
        replace_unread(model, UnreadWeight.read)
    return Reader(model.eval().requires_grad_(False).to(device), folder)
