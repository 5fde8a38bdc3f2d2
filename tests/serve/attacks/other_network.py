"""A second network, linked to this machine's, as seen from a stranger's machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

# Prints the results of a stranger's calls to each port: the status and first bytes over HTTP, the codes over gRPC.
_PROBE = """
import http.client, json, sys, grpc

CALLS = ("outrider.v1.Generation/GetModel", "vllm.grpc.engine.VllmEngine/GetModelInfo",
         "grpc.health.v1.Health/Check", "grpc.health.v1.Health/List", "grpc.health.v1.Health/Watch",
         "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
         "ray.serve.RayServeAPIService/ListApplications", "ray.serve.RayServeAPIService/Healthz",
         "ray.rpc.NodeInfoGcsService/GetAllNodeInfo", "ray.rpc.CoreWorkerService/PushTask",
         "ray.serve.ASGIService/HandleRequest")

def code(channel, call):
    try:
        next(channel.unary_stream("/" + call)(b"", timeout=5), None)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"

def get(address, path):
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return [answer.status, answer.read(6).decode(errors="replace")]
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

found = {}
for port in sys.argv[2:]:
    address = f"{sys.argv[1]}:{port}"
    with grpc.insecure_channel(address) as channel:
        found[port] = {"http": [get(address, path) for path in ("/v1/models", "/metrics")],
                       "grpc": {call: code(channel, call) for call in CALLS}}
print(json.dumps(found))
"""
_NAME = f"outrider{os.getpid()}"
_HERE, _THERE = "10.231.7.1", "10.231.7.2"
_VETH, _PEER = f"or{os.getpid()}a", f"or{os.getpid()}b"
_SETUP = (
    f"netns add {_NAME}",
    f"link add {_VETH} type veth peer name {_PEER}",
    f"link set {_PEER} netns {_NAME}",
    f"addr add {_HERE}/30 dev {_VETH}",
    f"link set {_VETH} up",
    f"-n {_NAME} addr add {_THERE}/30 dev {_PEER}",
    f"-n {_NAME} link set {_PEER} up",
    f"-n {_NAME} link set lo up",
    f"-n {_NAME} route add default via {_HERE}",
)


@contextmanager
def other_network() -> Iterator[None]:
    """Create the network, for `probe_from_there`.

    Raises:
        OSError: this machine has no `ip`, or does not let us.
    """
    program = shutil.which("ip")
    if program is None:
        raise OSError("there is no program `ip` (iproute2)")
    try:
        for step in _SETUP:
            done = subprocess.run([program, *step.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"`ip {step}`: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run([program, "netns", "del", _NAME], capture_output=True, check=False)  # and the way to it


def probe_from_there(host: str, ports: set[int]) -> dict[str, dict[str, Any]]:
    """Return a stranger's results for each port of `host`: status and first bytes over HTTP, codes of gRPC's calls."""
    command = ["ip", "netns", "exec", _NAME, sys.executable, "-c", _PROBE, host, *map(str, sorted(ports))]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, dict[str, Any]] = json.loads(probe.stdout)
    return found


def listening_ports() -> set[int]:
    """Return the TCP ports of this process and its children that accept more than loopback."""
    connections = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            connections += process.net_connections("tcp")
    listening = (each.laddr for each in connections if each.status == psutil.CONN_LISTEN)
    return {address.port for address in listening if not address.ip.startswith("127.")}
