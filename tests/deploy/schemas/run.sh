#!/bin/sh
# Holds deploy/kubernetes against published schemas, fetched into .cache/manifests: Kubernetes' from PyPI, and those of
# the CRDs of the Gateway API and of Prometheus Operator from npm. KubeRay's are in no registry of packages;
# tests/deploy/test_kubernetes.py has the names of its fields.
set -eu
unset PYTHONPATH
cd "$(dirname "$0")/../../.."
here=$PWD
mkdir -p .cache/manifests
cd .cache/manifests
[ -x venv/bin/python ] || python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
[ -f package.json ] || echo '{"private": true}' > package.json
npm install --silent --no-fund --no-audit @kubernetes-models/gateway-api @kubernetes-models/prometheus-operator
venv/bin/python "$here/tests/deploy/schemas/pods.py" > manifests.json
cp "$here/tests/deploy/schemas/crds.mjs" .
node crds.mjs < manifests.json
