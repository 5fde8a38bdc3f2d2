"""A refusal of weights that do not make up the model that their configuration names."""

from __future__ import annotations

from typing import Any

from protos.errors import ConfigError


def refuse_incomplete(path: str, info: dict[str, Any]) -> None:
    """Raise ConfigError for what transformers' loading info has as missing or of another shape."""
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ConfigError(
            f"the weights of {path!r} are incomplete: {len(names)} tensors are missing, {names[0]!r} among them"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(
            f"the weights of {path!r} do not fit its config.json: {name!r} is {list(found)} in the files, and "
            f"{list(wanted)} by the configuration ({len(info['mismatched_keys'])} tensors differ)"
        )
