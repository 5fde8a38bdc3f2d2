"""`outrider env`: the environment of a Ray cluster that is started by hand."""

from __future__ import annotations

import shlex

from cluster.serve_environment import cluster_variables


def env() -> None:
    """Print the variables to set before `ray start` on every node: `eval "$(outrider env)"`."""
    for name, value in cluster_variables().items():
        print(f"export {name}={shlex.quote(value)}")
