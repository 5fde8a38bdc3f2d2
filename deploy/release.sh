#!/bin/sh
# Dates the version's section of CHANGELOG.md and builds dist/: a wheel and a source archive of the version in
# pyproject.toml. The wheel is installed by itself in an empty folder, and there the bundled demo is found by its name,
# its kernels load, both names of the application are one, and the stubs are those of the service.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PIP="$PYTHON -m pip --disable-pip-version-check --quiet"
$PYTHON deploy/changelog_entry.py
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
from outrider import v1
from engine.native.library import native_instructions

assert outrider.build is cluster.app.build
assert v1.outrider_pb2.DESCRIPTOR.package == "outrider.v1" and v1.outrider_pb2_grpc.GenerationStub
assert engine.__file__.startswith(__import__("os").environ["PYTHONPATH"]), engine.__file__
print("kernels:", native_instructions())
PY
ls -l "$here/dist"
