"""The two tables next to this file: devices, and public models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from protos.errors import ConfigError

_FOLDER = Path(__file__).parent


def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table `name` ("hardware" or "shapes")."""
    table: dict[str, dict[str, Any]] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return table


def entry_of(name: str, key: str, hint: str) -> dict[str, Any]:
    """Return an entry of a table by its key; `hint` names an alternative.

    Raises:
        ConfigError: there is no such entry.
    """
    table = read_table(name)
    if key.lower() not in table:
        raise ConfigError(f"{key!r} is not in the table of {name}: {', '.join(sorted(table))}; {hint}")
    return table[key.lower()]
