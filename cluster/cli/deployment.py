"""Make the deploy.yaml of `outrider serve MODEL` from a model and a few options."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Option

from cluster.checkpoints import resolve_model_path
from cluster.deploy_file import LOOPBACK, read_yaml
from protos.errors import ConfigError
from router.ingress import GRPC_SERVICER_FUNCTIONS

_DEMO = {
    "model_id": "outrider-demo",
    "target": {"path": "models/demo/target", "dtype": "float32"},
    "draft": {"kind": "model", "path": "models/demo/draft", "dtype": "float32"},
    "speculation": {"num_tokens": 3, "mode": "sync", "verify": "coupled"},
    "cache": {"block_size": 16, "memory_gib": 1},
    "scheduler": {"max_num_sequences": 64, "max_tokens_per_step": 2048},
    "pair": {"num_replicas": 1},
    "router": {"policy": "prefix"},
    "ingress": {"num_replicas": 1},
}
_SMOLLM2 = {
    "model_id": "smollm2-135m-instruct",
    "target": {"path": ".cache/models/smollm2-135m-instruct", "dtype": "auto"},
    "draft": {"kind": "suffix"},
    "cache": {"memory_gib": 1},
}
BUNDLED: dict[str, dict[str, Any]] = {"demo": _DEMO, "smollm2": _SMOLLM2}
_OWN_WAYS = ("self", "suffix", "ngram", "mtp", "none")  # drafts without a model of their own: names, not paths


SetOptions = Annotated[  # of a command
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="any key of deploy.yaml's args, e.g. cache.memory_gib=8; repeatable"),
]


def deployment_of(
    model: str,
    *,
    model_id: str | None = None,
    draft: str | None = None,
    draft_kind: str = "model",
    quantization: str | None = None,
    num_gpus: int | None = None,
    num_pairs: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int = 9000,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return Serve's declarative configuration for a model: a folder, a GGUF file, a Hub id or a bundled name.

    None leaves a key to the deployment's default; port 0 disables gRPC. `settings` are KEY=VALUE.

    Raises:
        ConfigError: there is no such model, a setting is not KEY=VALUE, or the kind of a draft has no checkpoint.
    """
    # Options of the command line, then any key by --set, which wins.
    args = _args(model)
    if model_id is not None:
        args["model_id"] = model_id
    if draft_kind != "model" and (draft is None or draft in _OWN_WAYS):
        raise ConfigError(
            f"--draft-kind {draft_kind} is the kind of a checkpoint, and --draft is {draft or 'not given'}; give "
            "--draft a path, or remove --draft-kind"
        )
    if draft is not None:
        args["draft"] = _draft(draft, draft_kind)
    for section, key, value in (
        ("target", "quantization", quantization),
        ("target", "tensor_parallel_size", num_gpus),
        ("pair", "num_replicas", num_pairs),
        ("pair", "gpus", None if num_gpus is None else {"count": num_gpus}),
    ):
        if value is not None:
            args.setdefault(section, {})[key] = value
    for setting in settings:
        _set(args, setting)
    # Without keys, a server on loopback lets this machine administrate drafts.
    ingress = args.setdefault("ingress", {})
    if host in LOOPBACK and "api_keys_file" not in ingress:
        ingress.setdefault("open_admin", True)
    application = {"name": "outrider", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        **_grpc_options(grpc_port),
        "applications": [application],
    }


def to_yaml(deployment: dict[str, Any]) -> str:
    """Return the text of the deploy.yaml."""
    return yaml.safe_dump(deployment, sort_keys=False, width=120)


def _grpc_options(port: int) -> dict[str, Any]:
    if not port:
        return {}
    functions = list(GRPC_SERVICER_FUNCTIONS)
    return {"grpc_options": {"port": port, "grpc_servicer_functions": functions, "enable_reflection": True}}


def _args(model: str) -> dict[str, Any]:
    if model in BUNDLED:
        return deepcopy(BUNDLED[model])
    path = located(model)
    model_id = Path(path).stem if path.endswith(".gguf") else Path(path).name if Path(path).is_dir() else path
    return {"model_id": model_id, "target": {"path": path}, "draft": {"kind": "suffix"}, "cache": {"memory_gib": 4}}


def located(model: str) -> str:
    """Return a model's absolute path, or its Hub id unchanged.

    Raises:
        ConfigError: it is neither, or looks like a mistyped bundled name.
    """
    is_there = os.path.exists(os.path.expanduser(model))
    if not is_there and (close := difflib.get_close_matches(model, BUNDLED, n=1)):
        raise ConfigError(f"there is no model {model!r}; did you mean {close[0]!r}? (bundled: {', '.join(BUNDLED)})")
    if not is_there and "/" not in model:
        raise ConfigError(
            f"there is no model {model!r}: no file or folder here ({Path.cwd()}), no bundled name "
            f"({', '.join(BUNDLED)}) and no Hub id, which has the form 'org/name'"
        )
    return resolve_model_path(model)


def _draft(draft: str, kind: str) -> dict[str, Any]:
    if draft in _OWN_WAYS:
        return {"kind": draft}
    return {"kind": kind, "path": located(draft)}


def _set(args: dict[str, Any], setting: str) -> None:
    """Set a key by its path: `scheduler.max_num_sequences=8`."""
    path, equals, value = setting.partition("=")
    *sections, key = path.split(".")
    if not equals or not all((*sections, key)):
        raise ConfigError(f"--set {setting!r} is not KEY=VALUE; write e.g. --set cache.memory_gib=8")
    for section in sections:
        args = args.setdefault(section, {})
        if not isinstance(args, dict):
            raise ConfigError(f"--set {setting!r}: {section!r} is a value without keys; set it as a whole")
    try:
        args[key] = read_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting!r}: its value is not YAML: {error}") from None
