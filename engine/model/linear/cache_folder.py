"""The folder of packed weights in the user's cache: its entries, its bound, and what leaves it first."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import GIB
from engine.model.checkpoint.weight_files import cache_root
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

BOUND = "OUTRIDER_CACHE_GIB"
LEAST_FREE = GIB  # of the disk, for others
ABOUT = "about.json"  # its time is the time of the last use


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A folder of the cache."""

    folder: Path
    model: str
    quantization: str
    num_bytes: int
    used_s: float  # since the epoch


def packed_root() -> Path:
    """Return the folder of packed weights; it may not exist."""
    return cache_root() / "packed"


def max_bytes() -> int:
    """Return the most bytes of packed weights; 0 keeps none.

    Raises:
        ConfigError: the variable is no number of GiB.
    """
    text = os.environ.get(BOUND, "")
    try:
        gib = float(text) if text else 20.0
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise ConfigError(f"{BOUND} is {text!r}; set it to the most GiB of packed weights on disk, 0 for none")
    return int(gib * GIB)


def packed_entries() -> list[CacheEntry]:
    """Return the entries, the last used first."""
    return sorted(_entries(packed_root()), key=lambda entry: -entry.used_s)


def _entries(root: Path) -> Iterator[CacheEntry]:
    for folder in root.iterdir() if root.is_dir() else ():
        try:
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
            used_s = max((file.stat().st_mtime for file in folder.iterdir()), default=folder.stat().st_mtime)
        except OSError:  # no folder, or another process removes it
            continue
        about = _about(folder / ABOUT)
        yield CacheEntry(folder, str(about.get("model", "?")), str(about.get("quantization", "?")), num_bytes, used_s)


def _about(file: Path) -> dict[str, object]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def remove_entry(entry: CacheEntry) -> None:
    """Remove an entry; processes that have mapped it keep their pages."""
    shutil.rmtree(entry.folder, ignore_errors=True)


def make_room(own: Path, num_bytes: int) -> None:
    """Remove the entries that were not used for longest until `num_bytes` of the entry `own` fit the bound."""
    others = [entry for entry in packed_entries() if entry.folder != own]
    excess = sum(entry.num_bytes for entry in others) + num_bytes - max_bytes()
    while others and excess > 0:
        oldest = others.pop()
        logger.info("removed the packed weights of %s (%s) from the cache", oldest.model, oldest.folder.name)
        remove_entry(oldest)
        excess -= oldest.num_bytes
