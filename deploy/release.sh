#!/bin/sh
# Builds dist/: a wheel and a source archive of the version in pyproject.toml. Each is installed by itself in an empty
# folder, and there the bundled demo is found by its name, its kernels load, and both names of the application are one.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PIP="$PYTHON -m pip --disable-pip-version-check --quiet"
grep -q "^## \[$($PYTHON -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')\]" CHANGELOG.md ||
    { echo "CHANGELOG.md has no section of this version; write it" >&2; exit 1; }
rm -rf dist build
$PYTHON -c 'from setuptools.build_meta import build_sdist; print(build_sdist("dist"))' >/dev/null
$PIP wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
$PIP install --no-deps --target "$scratch/site" dist/*.whl
here=$PWD
python=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
cd "$scratch"
export PYTHONPATH="$scratch/site"
"$python" -P -m cluster.cli serve demo --print > deploy.yaml
"$python" -P -m cluster.cli check deploy.yaml
"$python" -P - <<'PY'
import cluster.app, engine, outrider
from engine.native.library import native_instructions

assert outrider.build is cluster.app.build
assert engine.__file__.startswith(__import__("os").environ["PYTHONPATH"]), engine.__file__
print("kernels:", native_instructions())
PY
ls -l "$here/dist"
