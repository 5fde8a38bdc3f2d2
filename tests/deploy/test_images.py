"""The Dockerfiles: linted, without root, and with the fast path of Serve."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.local.serve_environment import FAST_PATH

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
TORCH = "https://download.pytorch.org/whl"
INSTALL = "    && apt-get install --yes --no-install-recommends"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_is_not_root_and_sets_the_fast_path(name: str):
    text = (ROOT / "deploy" / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    last = text.rpartition("\nFROM ")[2]
    assert "\nUSER 1000\n" in last
    assert all(f"{key}={value}" in last for key, value in FAST_PATH.items())
    script = re.search(r"RAY_SERVE_HAPROXY_BINARY_PATH=\S+/site-packages/(\S+)", last)
    assert (ROOT / script[1]).is_file()
    assert "torch==2.13.0" in text
    assert "\ntorch==2.13.0\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_images_differ_in_their_torch_and_in_the_compiler_that_triton_needs():
    """The other lines are the same: those that `build_offline.sh` has run for one image hold for both."""
    cpu, cuda = (
        [line for line in (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        for name in ("cpu", "cuda")
    )
    changed = [pair for pair in zip(cpu, cuda, strict=True) if pair[0] != pair[1]]
    assert changed == [
        (f"ARG TORCH_INDEX={TORCH}/cpu", f"ARG TORCH_INDEX={TORCH}/cu130"),
        (f"{INSTALL} libgomp1 wget \\", f"{INSTALL} gcc libc6-dev libgomp1 wget \\"),
    ]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no wheel for this machine")
def test_hadolint_has_nothing_to_say() -> None:
    files = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
    done = subprocess.run([HADOLINT, "--no-color", *files], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(files) == 2
