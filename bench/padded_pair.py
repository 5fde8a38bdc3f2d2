"""The pair that most benchmarks run: a padded fixture as the target, and the demo pair's draft."""

from __future__ import annotations

from pathlib import Path

from engine.model.loader import model_version
from models.fixtures.padded_fixture import build_fixture

DEMO = Path("models/demo")
CACHE = Path(".cache/bench")


def padded_target(num_positions: int | None = None) -> Path:
    """Return the folder of the demo target padded to 0.46 B, built under `CACHE` where it is not there yet.

    With `num_positions` it can hold texts so long, for recordings: the demo was trained on fewer.
    """
    source = DEMO / "target"
    parts = ("padded", model_version(str(source))[:8], num_positions or "")
    folder = CACHE / "-".join(str(part) for part in parts if part)
    if not (folder / "config.json").exists():
        build_fixture(source, folder, num_positions=num_positions)
    return folder
