"""Modules that the light processes of a deployment must not load."""

import subprocess
import sys

CHECK = """
import importlib, sys
for module in ("actors.pair.pair", "cluster.app", "cluster.local.one_process", "cluster.cli.__main__"):
    importlib.import_module(module)
    if heavy := {"torch", "transformers"} & sys.modules.keys():
        sys.exit(f"{module} loads {heavy}")
"""


def test_shell_and_builder_do_not_load_torch():
    """Loading torch would cost each of the two processes seconds to start and 300 MB to keep.

    A server without Ray sets the variables of torch's threads first.
    """
    assert subprocess.run([sys.executable, "-c", CHECK], check=False).returncode == 0
