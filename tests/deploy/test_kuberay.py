"""The comparison of a RayService with a definition; `make manifests` downloads KubeRay's own definition."""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.schemas.kuberay import MANIFEST, mistakes


def definition() -> dict[str, Any]:
    """A definition with some of KubeRay's fields; it takes anything for a pod."""
    pods = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"spec": {"type": "object"}}}
    parameters = {"type": "object", "additionalProperties": {"type": "string"}}
    group = {"rayStartParams": parameters, "template": pods}
    counts = {name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")}
    worker = {"type": "object", "required": ["groupName"]}
    worker["properties"] = {**group, **counts, "groupName": {"type": "string"}}
    cluster = {
        "rayVersion": {"type": "string"},
        "authOptions": {"type": "object", "properties": {"mode": {"type": "string"}}},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": {"type": "object", "properties": group},
        "workerGroupSpecs": {"type": "array", "items": worker},
    }
    spec = {
        "serveConfigV2": {"type": "string"},
        "rayClusterDeletionDelaySeconds": {"type": "integer", "format": "int32", "minimum": 0},
        "rayClusterConfig": {"type": "object", "required": ["headGroupSpec"], "properties": cluster},
    }
    names = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    schema = {"type": "object", "properties": {**names, "spec": {"type": "object", "properties": spec}}}
    old = {"name": "v1alpha1", "schema": {"openAPIV3Schema": {"type": "object", "properties": {}}}}
    return {"spec": {"versions": [old, {"name": "v1", "schema": {"openAPIV3Schema": schema}}]}}


def test_unknown_fields_wrong_types_and_missing_names_are_found_with_their_paths() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert mistakes(definition(), manifest) == []
    manifest["spec"]["rayClusterDeletionDelaySeconds"] = "660"
    cluster = manifest["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] = 1
    cluster["workerGroupSpecs"][0]["minReplica"] = 1
    del cluster["workerGroupSpecs"][1]["groupName"]
    cluster_path = "$.spec.rayClusterConfig"
    assert sorted(mistakes(definition(), manifest)) == [
        f"{cluster_path}.headGroupSpec.rayStartParams['num-cpus']: 1 is not of type 'string'",
        f"{cluster_path}.workerGroupSpecs[0]: Additional properties are not allowed ('minReplica' was unexpected)",
        f"{cluster_path}.workerGroupSpecs[1]: 'groupName' is a required property",
        "$.spec.rayClusterDeletionDelaySeconds: '660' is not of type 'integer'",
    ]
