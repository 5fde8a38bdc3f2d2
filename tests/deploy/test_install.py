"""The installation for development: by uv with the indexes of pip, by pip where uv fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "install.sh"
PYTHON = """#!/bin/sh
echo "python $*" >> log
case "$*" in *"config list") printf '%s\\n' "$PIP_SETTINGS" ;; esac
"""
UV = """#!/bin/sh
echo "uv $* | index $UV_DEFAULT_INDEX | more $UV_INDEX | links $UV_FIND_LINKS" >> log
exit "$UV_STATUS"
"""
SETTINGS = r"""global.index-url='https://one/simple'
global.extra-index-url='https://two\nhttps://three'
:env:.find-links='/a /b'"""


def installed(folder: Path, *extras: str, settings: str = SETTINGS, uv_status: int = 0) -> list[str]:
    """Run the script with a Python and a uv that only take notes, and return these."""
    (folder / "deploy").mkdir()
    shutil.copy(SCRIPT, folder / "deploy")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, program in (("python", PYTHON), ("uv", UV)):
        file = folder / ".venv" / "bin" / name
        file.write_text(program)
        file.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PIP_SETTINGS": settings, "UV_STATUS": str(uv_status)}
    subprocess.run([folder / "deploy" / "install.sh", *extras], env=environment, check=True)
    return (folder / "log").read_text().splitlines()


def test_uv_installs_from_the_indexes_of_pip(tmp_path: Path) -> None:
    notes = installed(tmp_path, "dev")
    dependencies, package = [line for line in notes if line.startswith("uv")]
    assert "--constraint constraints.txt --extra dev --requirements pyproject.toml" in dependencies
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
