"""The pair in the form that each peer reads, converted once per pair of weights and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.peers.install import LlamaCpp
from bench.peers.system import Pair, Precision
from engine.model.loader import model_version

GGUF_SCRIPT = Path(__file__).parent / "gguf_export.py"


def openvino_pair(programs: Path, pair: Pair, cache: Path, precision: Precision) -> Pair:
    """OpenVINO's IR with the weights in int8 or int4, or as they are; another precision is chosen when it is loaded."""
    weights = ["--weight-format", str(precision)] if precision.is_quantized else []
    weights += ["--group-size", "64", "--ratio", "1.0"] if precision is Precision.INT4 else []

    def export(model: Path, out: Path) -> None:
        task = ("--task", "text-generation-with-past")
        program = programs / "optimum-cli"
        _call(out.with_suffix(".log"), [program, "export", "openvino", "--model", model, *task, *weights, out])

    return _converted(pair, cache, f"openvino-{precision}" if weights else "openvino", export)


def gguf_pair(llama: LlamaCpp, pair: Pair, cache: Path, kind: str = "bf16") -> Pair:
    """GGUF with matrices in bfloat16 or in blocks of `kind` (q8_0), by llama.cpp's own converter."""

    def export(model: Path, out: Path) -> None:
        _call(out.with_suffix(".log"), [sys.executable, GGUF_SCRIPT, llama.source, model, out, kind])

    return _converted(pair, cache, "gguf" if kind == "bf16" else f"gguf-{kind}", export)


def _converted(pair: Pair, cache: Path, kind: str, export: Callable[[Path, Path], None]) -> Pair:
    draft = None if pair.draft is None else _convert_once(pair.draft, cache, kind, export)
    return Pair(_convert_once(pair.target, cache, kind, export), draft)


def _convert_once(model: Path, cache: Path, kind: str, export: Callable[[Path, Path], None]) -> Path:
    """Convert into a folder named after the weights; a conversion that broke off has another name and is done again."""
    out = cache / "models" / f"{model.name}-{model_version(str(model))[:8]}-{kind}"
    if not out.exists():
        print(f"converting {model} to {out}", flush=True)
        unfinished = out.with_name(f"unfinished-{out.name}")
        _remove(unfinished)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        export(model, unfinished)
        unfinished.rename(out)
    return out


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _call(log: Path, command: list[str | Path]) -> None:
    """Run away from PYTHONPATH and the repository, whose packages are not the peer's. Raises SystemExit if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    absolute = [str(part.absolute()) if isinstance(part, Path) else part for part in command]
    with log.open("wb") as output:
        if subprocess.run(absolute, stdout=output, stderr=output, env=environment, cwd=log.parent).returncode:
            raise SystemExit(f"{' '.join(absolute)} failed; see {log}")
