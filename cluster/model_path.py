"""The paths of deploy.yaml made absolute, so that every process of the node finds the models."""

from __future__ import annotations

import re
from pathlib import Path

from protos.errors import ConfigError

_PROJECT = Path(__file__).resolve().parent.parent
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


def resolve_model_path(path: str) -> str:
    """Return an absolute folder, or the Hub id as it is.

    A relative folder is looked for where the application is built and then beside the project's packages, so that the
    bundled models are found wherever `serve deploy` builds it.

    Raises:
        ConfigError: there is no such folder, and it is no Hub id.
    """
    for folder in (Path(path).expanduser().absolute(), _PROJECT / path):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ConfigError(f"model folder {str(folder)!r} has no config.json; give the folder of a model")
            return str(folder)
    if _HUB_ID.fullmatch(path):
        return path
    raise ConfigError(
        f"model path {path!r} is neither a folder here ({Path.cwd()}) or in {_PROJECT}, nor a Hub id such as 'org/name'"
    )
