"""The pair that most benchmarks run: the padded fixture of the demo target, and the demo draft."""

from __future__ import annotations

from pathlib import Path

from engine.model.loader import model_version
from models.fixtures.padded_fixture import DEFAULT_LAYERS, DEFAULT_MLP, build_fixture

DEMO = Path("models/demo")
CACHE = Path(".cache/bench")


def padded_target(num_positions: int | None = None) -> Path:
    """Return the folder of the padded fixture, built under `CACHE` where it is not there yet.

    With `num_positions` it can hold texts so long, for recordings: it was trained on fewer.
    """
    folder = CACHE / f"padded-{model_version(str(DEMO / 'target'))[:8]}{f'-{num_positions}' if num_positions else ''}"
    if not (folder / "config.json").exists():
        build_fixture(DEMO / "target", folder, DEFAULT_LAYERS, DEFAULT_MLP, num_positions)
    return folder
