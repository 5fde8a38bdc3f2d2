"""An ingress replica is light: it never loads torch or transformers."""

from __future__ import annotations

import subprocess
import sys


def test_the_faces_load_neither_torch_nor_transformers() -> None:
    code = (
        "import router.ingress, sys; sys.exit(bool({'torch', 'transformers', 'engine', 'actors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
