"""The paths of deploy.yaml made absolute, so that every process of the node finds the models."""

from __future__ import annotations

import re
from pathlib import Path

from protos.errors import ConfigError

_PROJECT = Path(__file__).resolve().parents[2]
GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


def resolve_model_path(path: str) -> str:
    """Return an absolute folder or GGUF file, or the Hub id unchanged.

    A relative path is resolved in the current folder, then in the project's, so that the bundled models are found
    wherever `serve deploy` builds the application.

    Raises:
        ConfigError: the path is no existing folder or file and no Hub id, or cannot be read.
    """
    try:
        return _resolve(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name`, and this machine has no such user
        raise ConfigError(
            f"model path {path!r} cannot be looked up: {error}; give a path that exists, and let this user read it"
        ) from error


def _resolve(path: str) -> str:
    for folder in (Path(path).expanduser().absolute(), _PROJECT / path):
        if folder.is_file() and folder.suffix == GGUF:
            return str(folder)
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                file = next(iter(sorted(folder.glob("*.gguf"))), None)
                remedy = f"give the file itself, {str(file)!r}" if file else "give the folder of a model"
                raise ConfigError(f"model folder {str(folder)!r} has no config.json; {remedy}")
            return str(folder)
    if path.endswith(GGUF):
        raise ConfigError(f"GGUF file {path!r} is neither here ({Path.cwd()}) nor in {_PROJECT}")
    if _HUB_ID.fullmatch(path):
        return path
    raise ConfigError(
        f"model path {path!r} is neither a folder here ({Path.cwd()}) or in {_PROJECT}, nor a Hub id such as 'org/name'"
    )
