"""deploy.yaml as a whole: Serve's part, checked by Serve's schema, and our application's `args`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import DeployConfig, parse_config
from protos.errors import ConfigError

_BUILDER = "cluster.app:build"


@dataclass(frozen=True, slots=True)
class DeployFile:
    """What is deployed, where it listens, and the application's checked configuration."""

    deployment: dict[str, Any]  # Serve's declarative configuration, as `serve deploy` sends it
    http_host: str
    http_port: int
    grpc_port: int | None  # None: no gRPC server
    config: DeployConfig


def read_deploy_file(path: Path) -> DeployFile:
    """Read and check a deploy.yaml.

    Raises:
        ConfigError: there is no such file, it is not YAML, Serve refuses its part, or our `args` are wrong.
    """
    deployment = _load(path)
    try:
        schema = ServeDeploySchema.model_validate(deployment)
    except ValidationError as error:
        raise ConfigError(f"Ray Serve does not accept {path}:\n{error}") from None
    grpc = schema.grpc_options
    return DeployFile(
        deployment=deployment,
        http_host=schema.http_options.host,
        http_port=schema.http_options.port,
        grpc_port=grpc.port if grpc.grpc_servicer_functions else None,
        config=parse_config(_our_args(schema, path)),
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        deployment = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(deployment, dict):
        raise ConfigError(f"{path} holds no mapping; start from the deploy.yaml of the project")
    return deployment


def _our_args(schema: ServeDeploySchema, path: Path) -> dict[str, Any]:
    for application in schema.applications:
        if application.import_path == _BUILDER:
            return application.args
    raise ConfigError(f"{path} has no application with import_path {_BUILDER}")
