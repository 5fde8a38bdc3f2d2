"""The installation for development: by uv with the indexes of pip, by pip where uv fails."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "install.sh"
HASHES = [SCRIPT.with_name(name) for name in ("hashes.txt", "hashes_extras.txt")]
PYTHON = """#!/bin/sh
echo "python $*" >> log
case "$*" in *"config list") printf '%s\\n' "$PIP_SETTINGS" ;; esac
"""
UV = """#!/bin/sh
echo "uv $* | index $UV_DEFAULT_INDEX | more $UV_INDEX | links $UV_FIND_LINKS" >> log
[ "$UV_STATUS" = 0 ] || echo "$UV_SAYS"
exit "$UV_STATUS"
"""
SETTINGS = r"""global.index-url='https://one/simple'
global.extra-index-url='https://two\nhttps://three'
:env:.find-links='/a /b'"""


def installed(
    folder: Path, *extras: str, settings: str = SETTINGS, uv_status: int = 0, uv_says: str = "no network"
) -> list[str]:
    """Run the script with a Python and a uv that only take notes, and return these."""
    (folder / "deploy").mkdir()
    shutil.copy(SCRIPT, folder / "deploy")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, program in (("python", PYTHON), ("uv", UV)):
        file = folder / ".venv" / "bin" / name
        file.write_text(program)
        file.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PIP_SETTINGS": settings, "UV_STATUS": str(uv_status), "UV_SAYS": uv_says}
    subprocess.run([folder / "deploy" / "install.sh", *extras], env=environment, check=True)
    return (folder / "log").read_text().splitlines()


def test_uv_installs_from_the_indexes_of_pip(tmp_path: Path) -> None:
    notes = installed(tmp_path, "dev")
    dependencies, package = [line for line in notes if line.startswith("uv")]
    hashes = "--constraint deploy/hashes.txt --constraint deploy/hashes_extras.txt"
    wanted = f"--constraint constraints.txt {hashes} --extra dev --requirements pyproject.toml"
    assert wanted in dependencies
    assert dependencies.endswith("| index https://one/simple | more https://two https://three | links /a,/b")
    assert "--no-deps --editable . |" in package
    assert not any("--editable" in line for line in notes if line.startswith("python"))


@pytest.mark.parametrize(
    ("settings", "uv_status"), [(SETTINGS, 1), ("global.no-index='true'", 0)], ids=["uv fails", "no index"]
)
def test_pip_installs_where_uv_cannot(tmp_path: Path, settings: str, uv_status: int) -> None:
    notes = installed(tmp_path, "dev", settings=settings, uv_status=uv_status)
    (package,) = [line for line in notes if "--editable" in line]
    assert package.endswith("install --no-compile --constraint constraints.txt --editable .[dev]")
    assert "compileall" in notes[-1]


def test_extras_are_not_needed(tmp_path: Path) -> None:
    assert not any("--extra " in line for line in installed(tmp_path))


def test_pip_does_not_take_the_file_that_uv_has_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        installed(tmp_path, "dev", uv_status=1, uv_says="error: Hash mismatch for `numpy==2.4.6`")
    assert not any("--editable" in line for line in (tmp_path / "log").read_text().splitlines())


def test_every_pinned_version_has_the_hashes_of_its_files() -> None:
    root = SCRIPT.parents[1]
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", (root / "constraints.txt").read_text(), flags=re.MULTILINE)
    hashed = re.findall(
        r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}",
        "".join(map(Path.read_text, HASHES)),
        flags=re.MULTILINE,
    )
    assert {(name.lower().replace("_", "-"), version) for name, version in pinned if name not in ("torch", "uv")} == {
        *hashed
    }
