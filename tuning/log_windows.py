"""The log as windows of tokens with the target's distributions in them: those that train, and those that measure."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.position_log.shard import LoggedModel, LoggedRequest, count_shard, log_files, read_model, read_shard
from protos.errors import ConfigError

LogEnd = Mapping[str, tuple[int, int]]  # requests and positions of each file, by its name


def log_end(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the present content of the log, without files that are damaged or were deleted meanwhile."""
    found = {}
    for file in log_files(folder) if folder.is_dir() else []:
        try:
            found[file.name] = count_shard(file)
        except ConfigError:
            continue
    return found


def wait_for_positions(
    folder: Path, end: LogEnd, num_positions: int, timeout_s: float, report: Callable[[str], None]
) -> None:
    """Wait until the log has `num_positions` after `end`, or the time is over."""
    report(f"waiting for {num_positions} new positions, {timeout_s / 60:.0f} minutes at most")
    until_s, num_found = time.monotonic() + timeout_s, 0
    while num_found < num_positions and time.monotonic() < until_s:
        time.sleep(1.0)
        now = log_end(folder)
        num_found = sum(number - end.get(name, (0, 0))[1] for name, (_, number) in now.items())
    report(f"{num_found} positions are new")


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a request, and rows of a model that reads `token_ids` [T], to compare with the target.

    At `rows` [N] the target chose `chosen_ids` [N], and its likeliest tokens were `top_ids` [N, k] int32 with
    `top_logprobs` [N, k] float16.
    """

    token_ids: Tensor
    rows: Tensor
    chosen_ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Log:
    """The latest requests of a log that train, and others that measure; a request is always on the same side."""

    def __init__(self) -> None:
        self.training: list[LoggedRequest] = []
        self.held_out: list[LoggedRequest] = []
        self.num_positions = 0
        self._room = [1 << 20, 8192]  # positions, on each side

    @property
    def is_full(self) -> bool:
        """True if both sides are full."""
        return max(self._room) <= 0

    def add(self, request: LoggedRequest) -> None:
        """Add an older request to its side, unless that is full."""
        is_measuring = zlib.crc32(request.token_ids.tobytes()) % 10 == 0  # one request of ten measures
        num_positions = len(request.positions)
        if self._room[is_measuring] > 0 and num_positions:
            (self.held_out if is_measuring else self.training).append(request)
            self._room[is_measuring] -= num_positions
            self.num_positions += num_positions


def read_log(folder: Path, target: LoggedModel, report: Callable[[str], None], end: LogEnd | None = None) -> Log:
    """Return the latest requests that `target` answered, after `end`; report the parts of the folder that are left out.

    Raises:
        ConfigError: the folder has no log of this target, or too little of it.
    """
    files = log_files(folder) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            f"{folder} holds no log; give the folder of deploy.yaml's tune.log, after some traffic (files are written "
            "every five seconds)"
        )
    log, num_strange = Log(), 0
    # The latest files first, until both sides are full; a broken file costs its own requests only.
    for file in reversed(files):
        try:
            if read_model(file) != target:
                num_strange += 1
            elif log.is_full:
                break
            else:
                for request in reversed(read_shard(file)[(end or {}).get(file.name, (0, 0))[0] :]):
                    log.add(request)
        except ConfigError as error:
            report(f"left out: {error}")
    # Refuse a log that cannot train anything.
    if num_strange == len(files):
        raise ConfigError(
            f"all {len(files)} files of {folder} are of a target with other weights; pass theirs as --target"
        )
    if num_strange:
        report(f"{num_strange} of {len(files)} files are left out: they are of a target with other weights")
    least = 500  # positions
    if log.num_positions < least or not log.held_out or not log.training:
        raise ConfigError(
            f"{folder} has {log.num_positions} positions in all, which is too "
            f"little to train on and measure; wait for at least {least} of some dozens of requests, or "
            "send store: true with the requests"
        )
    return log


def windows_of(request: LoggedRequest, num_tokens: int = 2048) -> Iterator[Window]:
    """Yield windows of at most `num_tokens` that hold each position of a request once, with half a window before it.

    Without the text before it, a draft would learn to continue a prompt from its middle, which never occurs.
    """
    rows = request.positions.astype(np.int64) - 1  # row i predicts token i + 1
    for begin in range(0, len(request.token_ids), num_tokens // 2):
        first = begin + (num_tokens // 2 if begin else 0)
        chosen = (rows >= first) & (rows < begin + num_tokens)
        if not chosen.any():
            continue
        places = rows[chosen]
        yield Window(
            token_ids=_tensor(request.token_ids[begin : places[-1] + 1]),
            rows=_tensor(places - begin),
            chosen_ids=_tensor(request.token_ids[places + 1]),
            top_ids=torch.from_numpy(request.top_ids[chosen]),
            top_logprobs=torch.from_numpy(request.top_logprobs[chosen]),
        )


def padded_ids(windows: Sequence[Window], num_more: int = 0) -> Tensor:
    """Return the windows' tokens [B, longest + num_more], padded with zeros, which causal attention never reads."""
    return F.pad(pad_sequence([window.token_ids for window in windows], batch_first=True), (0, num_more))


def owners_of(windows: Sequence[Window]) -> Tensor:
    """Return the index of the window that each row of all windows belongs to, [N]."""
    return torch.cat([torch.full_like(window.rows, index) for index, window in enumerate(windows)])


def read_batch(model: torch.nn.Module, windows: Sequence[Window]) -> Tensor:
    """Return the model's logits [N, V] at the rows of all windows, one window after another."""
    device = next(model.parameters()).device
    wanted = torch.cat([window.rows for window in windows]).unique()  # rising
    found = model(padded_ids(windows).to(device), use_cache=False, logits_to_keep=wanted.to(device)).logits  # [B, W, V]
    owners = owners_of(windows)
    rows = torch.searchsorted(wanted, torch.cat([window.rows for window in windows]))
    logits: Tensor = found[owners.to(device), rows.to(device)]
    return logits


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
