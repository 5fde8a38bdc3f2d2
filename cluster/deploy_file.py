"""deploy.yaml as a whole: Serve's part, checked by Serve's schema, and our application's `args`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import DeployConfig, parse_config
from cluster.serve_options import BUILDERS, refusals, unknown_keys
from protos.errors import ConfigError

_SERVICER = re.compile(r"add_\w+_to_server")  # the name of a function that gRPC generates
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VLLM_SERVICER_FUNCTION = "router.grpc_api.vllm_servicer.add_vllm_engine_to_server"
_SERVES_ERRORS = (ValidationError, TypeError, AttributeError, LookupError, NotImplementedError)  # of its validators
_PATHS = {
    "target": ("path",),
    "draft": ("path",),
    "ingress": ("api_keys_file", "receipt_key_file", "chat_template", "tls_certificate_file", "tls_client_ca_file"),
}
_MADE_PATHS = {"tune": ("log",)}  # of folders that may not be there yet


@dataclass(frozen=True, slots=True)
class DeployFile:
    """Serve's configuration, the addresses it listens on, and the application's checked configuration."""

    deployment: dict[str, Any]  # Serve's declarative configuration, as `serve deploy` sends it
    http_host: str
    http_port: int
    grpc_port: int | None  # None without a gRPC server
    config: DeployConfig

    @property
    def http_url(self) -> str:
        """The address of HTTP."""
        scheme = "http" if self.config.ingress.tls_certificate_file is None else "https"
        return f"{scheme}://{in_url(self.http_host)}:{self.http_port}"


def in_url(host: str) -> str:
    """Return a host for use in a URL: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def read_deploy_file(path: Path) -> DeployFile:
    """Read and check a deploy.yaml.

    Raises:
        ConfigError: there is no such file, it is not YAML, Serve refuses its part, or our `args` are wrong.
    """
    return checked_deployment(_load(path), str(path))


def checked_deployment(deployment: dict[str, Any], source: str) -> DeployFile:
    """Check Serve's declarative configuration, which `source` names in messages.

    Raises:
        ConfigError: Serve refuses its part, or our `args` are wrong.
    """
    if "applications" not in deployment:
        raise ConfigError(
            f"{source} has no list 'applications'; args belong to one of them: `outrider serve MODEL --print` shows it"
        )
    try:
        schema = ServeDeploySchema.model_validate(deployment)
    except _SERVES_ERRORS as error:
        raise ConfigError(f"Ray Serve does not accept {source}:\n{error}") from None
    _report(unknown_keys(deployment), source)
    grpc, config = schema.grpc_options, parse_config(_our_args(schema, source), source)
    _report(refusals(deployment, has_prefill=config.prefill.max_replicas > 0), source)
    grpc_port = grpc.port if grpc.grpc_servicer_functions else None
    if not schema.http_options.host:
        raise ConfigError(f"{source}: http_options.host is empty; use 127.0.0.1, or 0.0.0.0 for all addresses")
    _check_port_numbers(schema.http_options.port, grpc_port, source)
    if config.ingress.open_admin and schema.http_options.host not in LOOPBACK:
        raise ConfigError(
            f"{source}: ingress.open_admin is for loopback, and http_options.host is {schema.http_options.host!r}; "
            "remove it and set ingress.api_keys_file"
        )
    _check_servicers(grpc.grpc_servicer_functions, source)
    return DeployFile(
        deployment=deployment,
        http_host=schema.http_options.host,
        http_port=schema.http_options.port,
        grpc_port=grpc_port,
        config=config,
    )


def _report(mistakes: Iterable[str], source: str) -> None:
    """Raise ConfigError for mistakes, if there are some."""
    if lines := [f"  {mistake}" for mistake in mistakes]:
        raise ConfigError(f"{source} is wrong:\n" + "\n".join(lines))


def _check_port_numbers(http_port: int, grpc_port: int | None, source: str) -> None:
    """Raise ConfigError for a port that no machine has, or one for both servers."""
    for key, port in (("http_options", http_port), ("grpc_options", grpc_port)):
        if port is not None and not 1 <= port <= 65_535:
            raise ConfigError(f"{source}: {key}.port is {port}; it must be 1 to 65535")
    if http_port == grpc_port:
        raise ConfigError(f"{source}: http_options.port and grpc_options.port are both {http_port}; change one of them")


def _check_servicers(servicer_functions: list[str], source: str) -> None:
    """Raise ConfigError for a function that does not exist: Serve would start without that service."""
    for name in servicer_functions:
        module, _, function = name.rpartition(".")
        try:
            is_there = _SERVICER.fullmatch(function) and callable(getattr(import_module(module), function))
        except (ImportError, AttributeError, ValueError):
            is_there = False
        if not is_there:
            is_vllms = name == VLLM_SERVICER_FUNCTION and find_spec("smg_grpc_proto") is None
            reason = (
                "its messages are not installed; pip install 'outrider[smg]', or remove it"
                if is_vllms
                else "there is no such function; the project's deploy.yaml lists the existing ones"
            )
            raise ConfigError(f"{source}: grpc_options.grpc_servicer_functions has {name!r}, and {reason}")


def with_absolute_paths(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with absolute paths for files and folders."""
    changed = deepcopy(deployment)
    for args in (application.get("args", {}) for application in changed["applications"]):
        for name, keys in (_PATHS | _MADE_PATHS).items():
            _make_absolute(args.get(name) or {}, keys, is_made=name in _MADE_PATHS)
        _make_absolute(drafts := args.get("drafts") or {}, drafts)
    return changed


def _make_absolute(section: dict[str, Any], keys: Iterable[str], *, is_made: bool = False) -> None:
    for key in (key for key in keys if section.get(key)):
        path = os.path.expanduser(section[key])
        if is_made or os.path.exists(path):  # else a Hub id, a template's text, or a bundled file
            section[key] = str(Path(path).absolute())


class _OnceLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys: YAML would ignore the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is here twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # of a date 2024-13-45, or `!!int x`
            raise yaml.MarkedYAMLError(problem=f"it has no value: {error}", problem_mark=node.start_mark) from None


def read_yaml(text: str) -> Any:
    """Return the value of a YAML document, whose mappings have no duplicate keys.

    Raises:
        yaml.YAMLError: the text is not such a document.
    """
    try:
        return yaml.load(text, _OnceLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        deployment = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(deployment, dict):
        raise ConfigError(f"{path} holds no mapping; start from the deploy.yaml of the project")
    return deployment


def _our_args(schema: ServeDeploySchema, source: str) -> dict[str, Any]:
    for application in schema.applications:
        if application.import_path in BUILDERS:
            return application.args
    raise ConfigError(f"{source} has no application with import_path {' or '.join(BUILDERS)}")
