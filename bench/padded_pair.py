"""The pairs that most benchmarks run: a padded fixture as the target, and the model that was padded, or its draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.model.loader import model_version
from models.fixtures.padded_fixture import DEFAULT_LAYERS, DEFAULT_MLP, build_fixture
from models.published import smollm2

DEMO = Path("models/demo")
SMOLLM2 = smollm2.FOLDER
CACHE = Path(".cache/bench")


@dataclass(frozen=True, slots=True)
class PaddedPair:
    """A fixture to be built: the padded model, its size, and the draft that benchmarks take for it."""

    source: Path
    num_layers: int
    mlp_size: int
    draft: Path


PAIRS = {
    "demo": PaddedPair(DEMO / "target", DEFAULT_LAYERS, DEFAULT_MLP, DEMO / "draft"),  # 0.46 B, 4,096 tokens
    "smollm2-0.5b": PaddedPair(SMOLLM2, 30, 8_704, SMOLLM2),  # 49,152 tokens
    "smollm2-1b": PaddedPair(SMOLLM2, 30, 18_432, SMOLLM2),
}


def padded_target(num_positions: int | None = None, name: str = "demo") -> Path:
    """Return the folder of the fixture `name` of `PAIRS`, built under `CACHE` where it is not there yet.

    With `num_positions` it can hold texts so long, for recordings: the demo was trained on fewer. SmolLM2 is fetched on
    the first call.
    """
    pair = PAIRS[name]
    if pair.source == SMOLLM2:
        smollm2.fetch()
    parts = ("padded", *([name] if name != "demo" else ()), model_version(str(pair.source))[:8], num_positions or "")
    folder = CACHE / "-".join(str(part) for part in parts if part)
    if not (folder / "config.json").exists():
        build_fixture(pair.source, folder, pair.num_layers, pair.mlp_size, num_positions)
    return folder
