"""The documentation builds as a site without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    command += ["--config-file", str(ROOT / "deploy" / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {f"{path.name}.md" for path in tmp_path.iterdir() if (path / "index.html").is_file()} == PAGES - {"index.md"}
    page = (tmp_path / "operate" / "index.html").read_text(encoding="utf-8")
    assert page.count("<tr>") == _num_rows(ROOT / "docs" / "operate.md")


def _num_rows(page: Path) -> int:
    lines = page.read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("|") and not line.startswith("|---") for line in lines)
