"""`outrider env`: the environment of a manually started Ray cluster."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

from typer import Option

from cluster.local.own_files import PRIVATE, private_root
from cluster.local.serve_environment import cluster_variables
from cluster.placement.devices import order_devices


def env(
    gpus_per_pair: Annotated[
        int | None, Option(min=1, help="order this node's GPUs so that NVLink connects each pair's GPUs")
    ] = None,
) -> None:
    """Print the variables to set before `ray start` on every node: `eval "$(outrider env)"`."""
    private = {"RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or private_root()}
    for name, value in {**cluster_variables(), **private, **order_devices(gpus_per_pair)}.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"umask {PRIVATE:03o}")
