"""The file format of the log: safetensors, so a reader can map the arrays (docs/tune.md).

The arrays concatenate the requests. Request i has the tokens `[ends[i - 1], ends[i])` of `token_ids`, its prompt then
its output, and the positions `[ends[i - 1], ends[i])` of `position_ends`. A position is an index into its request's
tokens, with the `top_k` likeliest tokens there and their log-probabilities, likeliest first, from the target's raw
logits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from protos.errors import ConfigError

FORMAT = "outrider-positions"
VERSION = "1"
SUFFIX = ".positions.safetensors"
PARTIAL = ".positions.partial"  # while it is written
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """The target of a file: the digest of its weights (`engine.model.loader.model_version`) and V."""

    model_version: str
    vocab_size: int

    @property
    def top_k(self) -> int:
        return min(64, self.vocab_size)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request: its tokens, their sampling parameters, and the target's likeliest tokens at N logged positions.

    `traffic_class` is a class name of `engine.accounting.counters`; k is `LoggedModel.top_k`.
    """

    traffic_class: str
    temperature: float
    repetition_penalty: float
    token_ids: Ints
    positions: Ints  # [N] indices into token_ids, ascending
    top_ids: Ints  # [N, k]
    top_logprobs: NDArray[np.float16]  # [N, k]

    @property
    def num_bytes(self) -> int:
        """Bytes in a file."""
        return sum(each.nbytes for each in (self.token_ids, self.positions, self.top_ids, self.top_logprobs))


def write_shard(file: Path, model: LoggedModel, requests: Seq[LoggedRequest]) -> int:
    """Write a file atomically and return its size in bytes.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    # Requests of different lengths are joined, and their ends stored, so that a file has one tensor for each field.
    classes = sorted({request.traffic_class for request in requests})
    content = save(
        {
            "token_ids": np.concatenate([request.token_ids for request in requests]),
            "token_ends": np.cumsum([len(request.token_ids) for request in requests]),
            "classes": np.array([classes.index(request.traffic_class) for request in requests], np.int32),
            "temperatures": np.array([request.temperature for request in requests], np.float32),
            "repetition_penalties": np.array([request.repetition_penalty for request in requests], np.float32),
            "positions": np.concatenate([request.positions for request in requests]),
            "position_ends": np.cumsum([len(request.positions) for request in requests]),
            "top_ids": np.concatenate([request.top_ids for request in requests]),
            "top_logprobs": np.concatenate([request.top_logprobs for request in requests]),
        },
        {
            "format": FORMAT,
            "version": VERSION,
            "model_version": model.model_version,
            "vocab_size": str(model.vocab_size),
            "classes": json.dumps(classes),
        },
    )
    # A reader never sees an unfinished file.
    partial = file.with_name(file.name.removesuffix(SUFFIX) + PARTIAL)
    try:
        partial.touch(mode=0o600)  # it holds what clients wrote
        partial.write_bytes(content)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return len(content)


def read_model(file: Path) -> LoggedModel:
    """Return the target of a file. Raises ConfigError if the file is not part of a log."""
    return _model_of(file, _metadata(file))


def count_shard(file: Path) -> tuple[int, int]:
    """Return a file's number of requests and of positions. Raises ConfigError if the file is not part of a log."""
    _metadata(file)
    try:
        with safe_open(file, "np") as shard:
            requests, positions = (shard.get_slice(name).get_shape()[0] for name in ("position_ends", "positions"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged: {error}; remove it") from error
    return int(requests), int(positions)


def read_shard(file: Path) -> list[LoggedRequest]:
    """Return the requests of a file.

    Raises:
        ConfigError: the file is not part of a log, or is damaged.
    """
    metadata = _metadata(file)
    _model_of(file, metadata)
    try:
        classes = json.loads(metadata["classes"])
        with safe_open(file, "np") as shard:
            array = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118  # no mapping
        tokens, positions = _bounds(array["token_ends"]), _bounds(array["position_ends"])
        return [
            LoggedRequest(
                traffic_class=classes[array["classes"][index]],
                temperature=float(array["temperatures"][index]),
                repetition_penalty=float(array["repetition_penalties"][index]),
                token_ids=array["token_ids"][tokens[index]],
                positions=array["positions"][positions[index]],
                top_ids=array["top_ids"][positions[index]],
                top_logprobs=array["top_logprobs"][positions[index]],
            )
            for index in range(len(tokens))
        ]
    except (KeyError, ValueError, IndexError, SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged: {error}; remove it") from error


def _bounds(ends: NDArray[np.int64]) -> list[slice]:
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def _metadata(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, "np") as shard:
            return dict(shard.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read as part of a log: {error}; remove it") from error


def _model_of(file: Path, metadata: dict[str, str]) -> LoggedModel:
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{file} is not a log of verified positions; give the folder of deploy.yaml's tune.log")
    if metadata.get("version") != VERSION:
        raise ConfigError(
            f"{file} has version {metadata.get('version')!r} of the log's format, but this program reads {VERSION}; "
            "tune with the program that wrote it"
        )
    return LoggedModel(metadata.get("model_version", ""), int(metadata.get("vocab_size", 0)))


def new_file(folder: Path) -> Path:
    """Return an unused path. Names sort by time and include the process id, so they are unique."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{time.time_ns():020d}-{os.getpid()}{SUFFIX}"


def make_room(current: Path, max_bytes: int) -> None:
    """Limit the files in the folder of `current`, of all processes that write there, to `max_bytes` together.

    Partial files of killed processes are removed, and the oldest files until the rest fit, but not `current`.
    """
    folder = current.parent
    for file in folder.glob(f"*{PARTIAL}"):
        if _age_s(file) > 600.0:  # a killed process left it
            file.unlink(missing_ok=True)
    files = [(file, _size(file)) for file in log_files(folder)]
    excess = sum(size for _, size in files) - max_bytes
    for file, size in files:
        if excess <= 0:
            return
        if file != current:
            file.unlink(missing_ok=True)
            excess -= size


def log_files(path: Path) -> list[Path]:
    """Return the files of a log, oldest first."""
    return sorted(path.glob(f"*{SUFFIX}"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # another process has removed it
        return 0


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
