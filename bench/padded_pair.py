"""The pair that most benchmarks run: a padded fixture as the target, and the demo pair's draft."""

from __future__ import annotations

from pathlib import Path

from engine.model.loader import model_version
from models.fixtures.padded_fixture import build_fixture

DEMO = Path("models/demo")
CACHE = Path(".cache/bench")


def padded_target() -> Path:
    """Return the folder of the demo target padded to 0.46 B, built under `CACHE` where it is not there yet."""
    source = DEMO / "target"
    folder = CACHE / f"padded-{model_version(str(source))[:8]}"
    if not (folder / "config.json").exists():
        build_fixture(source, folder)
    return folder
