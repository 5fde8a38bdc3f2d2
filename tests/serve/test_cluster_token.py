"""Others on our cluster: without its token every port refuses them, with it their packages stay theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from tests.serve.served_pair import SharedCluster

CALLER = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print('inside')"

JOB = """
import sys, ray

ray.init(address=sys.argv[1], runtime_env={"working_dir": sys.argv[2]}, log_to_driver=False)


@ray.remote(num_cpus=0)
def owner():
    import engine

    return engine.OWNER


print("engine of", ray.get(owner.remote(), timeout=100))
"""


def call_without(address: str, **changes: str) -> str:
    """Return the output of a process that joins the cluster with these variables instead of the token's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    variables = {**kept, **changes, "RAY_gcs_rpc_server_connect_timeout_s": "2"}
    caller = subprocess.run(
        [sys.executable, "-c", CALLER, address], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    return caller.stdout


def test_nobody_joins_the_cluster_without_its_token(cluster: SharedCluster) -> None:
    """Two callers try at once, as long as Ray lets them."""
    callers = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64})
    address = ray.get_runtime_context().gcs_address
    with ThreadPoolExecutor(len(callers)) as pool:
        for said in pool.map(lambda changes: call_without(address, **changes), callers):
            assert "inside" not in said


def test_a_users_engine_stays_his_own_beside_ours(cluster: SharedCluster, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("OWNER = 'the user'")
    command = [sys.executable, "-c", JOB, ray.get_runtime_context().gcs_address, str(tmp_path)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert job.stdout.splitlines()[-1:] == ["engine of the user"], job.stderr
