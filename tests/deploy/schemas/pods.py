"""Pods and the disruption budget against Kubernetes' own schemas, unknown fields refused; the rest as JSON for Node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

VERSION = "1.34.0"  # of Kubernetes
FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
OTHERS = ("routes.yaml", "pod-monitor.yaml")


def check(name: str, manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    sys.stderr.write(f"{name}: as Kubernetes {VERSION} has it\n")


def main() -> None:
    service = yaml.safe_load((FOLDER / "rayservice.yaml").read_text(encoding="utf-8"))
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"], **{each["groupName"]: each for each in cluster["workerGroupSpecs"]}}
    for name, group in groups.items():
        check(f"pod of {name}", {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]})
    check("disruption budget", yaml.safe_load((FOLDER / "disruption-budget.yaml").read_text(encoding="utf-8")))
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in OTHERS]
    json.dump([each for text in texts for each in yaml.safe_load_all(text)], sys.stdout)


main()
