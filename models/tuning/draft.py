"""The base of drafts that can be tuned: loaded from a folder, and written in the same format."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from models.tuning.student import Student

_COPIED = (".json", ".jinja", ".txt", ".model")
_OF_WEIGHTS = (".index.json", "training.json", "tuning.json")  # files of weights and reports, which are written new


class TunableDraft(ABC):
    """The present draft, the start of every training."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self._device = device

    @abstractmethod
    def load(self) -> Student:
        """Return the draft in float32, on the device."""

    @abstractmethod
    def rounded(self, student: Student) -> Student:
        """Round the weights to those that `write` would write, and return the draft."""

    @abstractmethod
    def write(self, student: Student, folder: Path, report: dict[str, Any]) -> None:
        """Write the draft with the present one's configuration and `tuning.json`, whole or not at all.

        Args:
            student: its weights are rounded to the present draft's dtypes.
            folder: must not exist; its parent must.
            report: the content of tuning.json.
        """


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
