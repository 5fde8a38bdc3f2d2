"""deploy/kubernetes/rayservice.yaml against KubeRay's whole custom resource definition, unknown fields refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes" / "rayservice.yaml"


def mistakes(definition: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Return everything in a custom resource that its definition has otherwise, each with its path."""
    version = manifest["apiVersion"].rpartition("/")[2]
    (served,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
    schema = _closed(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {}  # Kubernetes' own, in every resource
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(manifest)]


def _closed(schema: Any) -> Any:
    """Refuse the fields that a structural schema does not name, which Kubernetes would drop."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not keeps_unknown:
        closed["additionalProperties"] = False
    return closed


if __name__ == "__main__":
    found = mistakes(*(yaml.safe_load(Path(path).read_text(encoding="utf-8")) for path in (sys.argv[1], MANIFEST)))
    sys.exit("\n".join(found) if found else None)
