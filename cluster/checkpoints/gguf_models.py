"""Convert the GGUF files of deploy.yaml into model folders, once each, in the user's cache."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.checkpoints.model_files import GGUF, resolve_model_path
from cluster.config import DeployConfig
from engine.config import ModelDtype
from engine.model.checkpoint.gguf_header import read_gguf_header
from engine.model.checkpoint.weight_files import cache_root, file_digest
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 3600.0
_DIGITS = 12  # of a file's digest, in the name of its conversion
_CONVERTER = 3  # increase it when the conversion changes


def convert_gguf_models(config: DeployConfig, report: Callable[[str], None] = logger.info) -> DeployConfig:
    """Return `config` with each GGUF file replaced by its converted folder; call `report` before a conversion.

    Raises:
        ConfigError: a file is missing, cut short, or not one that transformers reads.
    """
    target = config.target.model_copy(update={"path": _folder_of(config.target.path, None, report)})
    draft = config.draft
    if draft.path is not None:
        draft = draft.model_copy(update={"path": _folder_of(draft.path, draft.dtype, report)})
    drafts = {name: _folder_of(path, draft.dtype, report) for name, path in config.drafts.items()}
    return config.model_copy(update={"target": target, "draft": draft, "drafts": drafts})


def _folder_of(path: str, dtype: ModelDtype | None, report: Callable[[str], None]) -> str:
    """Return the folder of a model, made of a GGUF file where `path` is one: in `dtype`, or with its blocks if None.

    A draft has a dtype, since it may be tuned.
    """
    if not path.endswith(GGUF):
        return path
    file = Path(resolve_model_path(path))
    read_gguf_header(file)  # what can be refused at once is
    folder = converted_root() / f"{file.stem}-{file_digest(file)[:_DIGITS]}-{dtype or 'blocks'}-{_CONVERTER}"
    if not folder.is_dir():
        how = "its blocks are kept" if dtype is None else f"its numbers are exact in float32, then rounded to {dtype}"
        report(f"converting {file} into {folder}, once: {how}")
        _convert(file, folder, dtype)
    return str(folder)


def converted_root() -> Path:
    """Return the folder of converted files; it may not exist."""
    return cache_root() / "models"


def _convert(file: Path, folder: Path, dtype: ModelDtype | None) -> None:
    """Convert in a child process, which loads torch and frees its memory at its end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished) / "model"
        command = [sys.executable, "-m", "engine.model.checkpoint.gguf", str(file), str(made), *filter(None, [dtype])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{str(file)!r} was not converted within {_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(done.stdout.strip() or f"{str(file)!r} was not converted ({done.returncode}): {last}")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
