"""The Dockerfiles: linted, without root, and with the variables that Serve needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster.local.serve_environment import cluster_variables

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
TORCH = "https://download.pytorch.org/whl"
INSTALL = "    && apt-get install --yes --no-install-recommends"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def image(name: str) -> str:
    return (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")


def variables(name: str) -> dict[str, str]:
    """Return the image's variables, with the paths of this environment and of this folder."""
    lines = re.search(r"\nENV (.*?[^\\])\n", image(name), re.DOTALL)[1]
    packages = "/opt/outrider/lib/python3.11/site-packages"
    for theirs, ours in {
        f"{packages}/cluster": str(ROOT / "cluster"),
        packages: sysconfig.get_path("purelib"),
        "/opt/outrider/bin": str(Path(sys.executable).parent),
    }.items():
        lines = lines.replace(theirs, ours)
    return dict(each.split("=", 1) for each in lines.replace("\\\n", " ").split())


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_is_not_root_and_sets_the_variables_of_a_cluster(name: str):
    """But for the token's mode, which KubeRay and `outrider serve` set with a token, and the path of a checkout."""
    assert "\nUSER 1000\n" in image(name).rpartition("\nFROM ")[2]
    others = {"RAY_AUTH_MODE", "PYTHONPATH", "OUTRIDER_PYTHON"}
    wanted = {key: value for key, value in cluster_variables().items() if key not in others}
    assert wanted.items() <= variables(name).items()
    assert Path(variables(name)["OUTRIDER_PYTHON"]).is_file()
    assert "torch==2.13.0" in image(name)
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


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_installs_nothing_without_a_hash_but_torch_and_the_package(name: str) -> None:
    commands = re.findall(r"bin/pip install --no-cache-dir ((?:.|\\\n)*?)(?: \\)?$", image(name), flags=re.MULTILINE)
    assert commands == [
        "--no-deps --require-hashes --requirement hashes.txt",
        '--index-url "$TORCH_INDEX" torch==2.13.0',
        "--no-deps --no-build-isolation .",
    ]


def test_all_that_the_package_needs_has_a_hash() -> None:
    """Without --no-deps pip would ask for a hash of torch; so the list has to be complete, and torch's own with it."""
    hashed = set(re.findall(r"^([\w.-]+)==", (ROOT / "deploy/hashes.txt").read_text(), flags=re.MULTILINE))
    missing, todo = set(), [("outrider", "")]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                needed = {(canonicalize_name(each.name), wanted) for wanted in ("", *each.extras)} - seen
                seen |= needed
                todo += needed
                missing |= {found for found, _ in needed} - hashed
    assert missing == {"torch"}
    assert "setuptools" in hashed


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no wheel for this machine")
def test_hadolint_has_nothing_to_say() -> None:
    files = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
    done = subprocess.run([HADOLINT, "--no-color", *files], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(files) == 2
