"""Imports point one way: cluster knows all, actors know engine, router and engine know protos, protos know nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

OURS = {"cluster", "actors", "router", "engine", "protos"}
MAY_IMPORT = {
    "protos": set(),
    "engine": {"protos"},
    "router": {"protos"},
    "actors": {"engine", "protos"},
    "cluster": {"actors", "router", "engine", "protos"},
}
# Where a library may be imported; a library that is not named here may be imported anywhere.
HOMES = {
    "ray": (
        "actors/",
        "cluster/",
        *(
            f"router/{name}.py"
            for name in ("ingress", "serve_backend", "serve_router", "index_actor", "index_client", "application_watch")
        ),
    ),
    "torch": ("engine/", "actors/"),
    "transformers": ("engine/", "actors/"),
    "fastapi": ("router/",),
    "pydantic": ("router/", "cluster/config.py", "cluster/sections/", "cluster/deploy_file.py"),
    "grpc": ("router/", "protos/outrider_pb2_grpc.py"),
}
FILES = sorted(file for package in OURS for file in (ROOT / package).rglob("*.py"))


def imports_of(file: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file: Path) -> None:
    path = file.relative_to(ROOT).as_posix()
    package = path.partition("/")[0]
    imported = imports_of(file)
    backwards = (imported & OURS) - MAY_IMPORT[package] - {package}
    assert not backwards, f"{path} imports {backwards}"
    strangers = {name for name, homes in HOMES.items() if name in imported and not path.startswith(homes)}
    assert not strangers, f"{path} imports {strangers}"
