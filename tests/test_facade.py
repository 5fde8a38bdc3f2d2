"""`outrider:build`, and its packages next to a user's of the same names, as Ray's `working_dir` has them first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, working_dir: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{working_dir}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["engine", "cluster"])
def test_a_users_package_is_not_hidden_by_ours_and_an_application_that_would_take_it_for_ours_is_refused(
    name: str, tmp_path: Path
):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    assert run(f"import {name}; print({name}.OWNER)", tmp_path).stdout == "user\n"
    refused = run("import outrider.v1", tmp_path)
    assert f"'{name}' is {tmp_path / name}, but Outrider's is {ROOT / name}; rename" in refused.stderr


def test_clients_have_the_stubs_without_ray(tmp_path: Path) -> None:
    code = "import sys; from outrider.v1 import outrider_pb2, outrider_pb2_grpc; print('ray' in sys.modules)"
    assert run(f"{code}; print(outrider_pb2.DESCRIPTOR.package)", tmp_path).stdout == "False\noutrider.v1\n"
