"""What the light processes of a deployment must not load."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["actors.pair", "cluster.app"])
def test_shell_and_builder_do_not_load_torch(module: str):
    """It would cost each of them seconds to start and 300 MB to keep."""
    check = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
