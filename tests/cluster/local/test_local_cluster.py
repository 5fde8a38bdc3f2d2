"""The error of a failed deployment, and the settings of a new one that a running Serve would ignore."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import ServeDeploySchema

from cluster.local.local_cluster import _reason, refuse_changed_address
from protos.errors import ConfigError


def test_our_own_error_is_taken_out_of_serves_stack():
    message = "Pair: it failed:\n  File x\nprotos.errors.ConfigError: two vocabularies\nuse one"
    assert _reason(message) == "ConfigError: two vocabularies\nuse one"


def test_any_other_message_of_serve_is_reported_whole():
    assert _reason("out of\nmemory") == "out of\nmemory"


def test_a_start_that_is_interrupted_leaves_no_folder():
    code = """
import os, ray
from cluster.local.local_cluster import LocalCluster

def interrupted(**options):
    print(os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
    raise KeyboardInterrupt

ray.init, cluster = interrupted, LocalCluster()
try:
    cluster.start()
except KeyboardInterrupt:
    cluster.stop()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("/tmp/outray-"), done.stderr
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("http_options", "host", "0.0.0.0"),
        ("http_options", "port", 8001),
        ("grpc_options", "port", 9001),
        ("grpc_options", "grpc_servicer_functions", ["a.add_b_to_server"]),
        ("grpc_options", "enable_reflection", False),
    ],
)
def test_what_a_running_serve_would_ignore_is_refused_by_name(section: str, key: str, value: Any):
    running: dict[str, dict[str, Any]] = {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "grpc_options": {"port": 9000, "grpc_servicer_functions": ["c.add_d_to_server"], "enable_reflection": True},
    }
    http, grpc = HTTPOptions(**running["http_options"]), gRPCOptions(**running["grpc_options"])
    refuse_changed_address(http, grpc, ServeDeploySchema(applications=[], **running))
    changed = {**running, section: {**running[section], key: value}}
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*, and Serve runs with "):
        refuse_changed_address(http, grpc, ServeDeploySchema(applications=[], **changed))
