"""Imports point one way: between packages, and between a package's folders, in the order of tests/import_order.txt."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

OURS = {"cluster", "actors", "router", "tuning", "engine", "protos"}
MAY_IMPORT = {
    "protos": set(),
    "engine": {"protos"},
    "router": {"protos"},
    "actors": {"engine", "protos"},
    "tuning": {"engine", "protos"},
    "cluster": {"actors", "router", "tuning", "engine", "protos"},
}
# Where a library may be imported; a library that is not named here may be imported anywhere.
HOMES = {
    "ray": (
        "actors/",
        "cluster/",
        "router/ingress.py",
        "router/backend/serve_backend.py",
        "router/grpc_api/serve_gate.py",
        "router/routing/index.py",
        "router/routing/serve_router.py",
    ),
    "torch": ("engine/", "actors/", "tuning/"),
    "transformers": ("engine/", "actors/", "tuning/", "router/generation/response_template.py"),
    "fastapi": ("router/",),
    "pydantic": (
        "router/",
        "cluster/config.py",
        "cluster/schema/",
        "cluster/deploy_file.py",
        "cluster/serve_options.py",
    ),
    "grpc": ("router/", "protos/outrider_pb2_grpc.py"),
}
PACKAGES = [*sorted(OURS), "bench", "models"]
FILES = sorted(file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
PATHS = {file.as_posix() for file in FILES}
SOURCES = {*FILES, *(file.relative_to(ROOT) for file in (ROOT / "engine" / "native").rglob("*.[ch]"))}
FOLDERS = sorted({folder for file in SOURCES for folder in file.parents if folder.name})
MOST_ENTRIES = {"router": 12, "actors": 12, "bench": 12}  # of other folders 18


def orders() -> dict[str, list[list[str]]]:
    """Return the levels of each folder in tests/import_order.txt, from importing to imported."""
    text = (ROOT / "tests" / "import_order.txt").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\n    ", " ").splitlines() if not line.startswith("#")]
    split = (line.partition(":") for line in lines)
    return {folder: [level.split() for level in levels.split(">")] for folder, _, levels in split}


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def imported_files(file: Path) -> set[Path]:
    """Our own files that a file imports."""
    found = set()
    for name in imports_of(file):
        module, parent = Path(*name.split(".")), Path(*name.split(".")[:-1])
        places = (f"{module}.py", f"{module}/__init__.py", f"{parent}.py", f"{parent}/__init__.py")
        place = next((place for place in places if place in PATHS), None)
        if place is not None:
            found.add(Path(place))
    return found


def entry(file: Path, folder: str) -> str | None:
    """The file or folder directly below `folder` that holds `file`; None outside it, and for its `__init__.py`."""
    if not file.is_relative_to(folder):
        return None
    first = file.relative_to(folder).parts[0].removesuffix(".py")
    return None if first == "__init__" else first


@pytest.mark.parametrize("file", FILES, ids=str)
def test_packages_import_downwards_and_libraries_stay_in_their_homes(file: Path) -> None:
    path = file.as_posix()
    package = path.partition("/")[0]
    if package not in OURS:
        return
    imported = {name.partition(".")[0] for name in imports_of(file)}
    backwards = (imported & OURS) - MAY_IMPORT[package] - {package}
    assert not backwards, f"{path} imports {backwards}"
    strangers = {name for name, homes in HOMES.items() if name in imported and not path.startswith(homes)}
    assert not strangers, f"{path} imports {strangers}"


@pytest.mark.parametrize(("folder", "levels"), orders().items(), ids=orders())
def test_folders_of_a_package_import_in_the_documented_order(folder: str, levels: list[list[str]]) -> None:
    height = {name: -level for level, names in enumerate(levels) for name in names}
    inside = [file for file in FILES if entry(file, folder) is not None]
    entries = {entry(file, folder) for file in inside}
    assert entries == set(height), "tests/import_order.txt names other entries than the folder has"
    for file in inside:
        for other in imported_files(file):
            name, imported = entry(file, folder), entry(other, folder)
            if name is None or imported is None or name == imported:
                continue
            assert height[name] > height[imported], f"{file} imports {other}, which is not below it"


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({file: imported_files(file) for file in FILES}).prepare()  # raises CycleError


def test_every_folder_with_folders_has_its_order_documented() -> None:
    nested = {file.parent.parent.as_posix() for file in FILES if len(file.parts) > 2}
    assert nested - {"cluster"} <= set(orders())


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_is_a_table_of_contents(folder: Path) -> None:
    names = {file.relative_to(folder).parts[0] for file in SOURCES if file.is_relative_to(folder)} - {"__init__.py"}
    assert len(names) <= MOST_ENTRIES.get(folder.as_posix(), 18)
