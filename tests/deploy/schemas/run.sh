#!/bin/sh
# Holds deploy/kubernetes against published schemas, fetched into .cache/manifests: Kubernetes' from PyPI, and those of
# the CRDs of the Gateway API and of Prometheus Operator from npm. KubeRay's CRD is in its repository alone; where that
# cannot be reached, KUBERAY_CRD names a copy (`kubectl get crd rayservices.ray.io -o yaml` of a cluster that has it).
set -eu
unset PYTHONPATH
cd "$(dirname "$0")/../../.."
here=$PWD
kuberay=v1.5.1
[ -z "${KUBERAY_CRD:-}" ] || KUBERAY_CRD=$(realpath "$KUBERAY_CRD")
mkdir -p .cache/manifests
cd .cache/manifests
[ -x venv/bin/python ] || python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0 jsonschema==4.26.0 pyyaml
[ -f package.json ] || echo '{"private": true}' > package.json
npm install --silent --no-fund --no-audit @kubernetes-models/gateway-api @kubernetes-models/prometheus-operator
venv/bin/python "$here/tests/deploy/schemas/pods.py" > manifests.json
cp "$here/tests/deploy/schemas/crds.mjs" .
node crds.mjs < manifests.json
crd=${KUBERAY_CRD:-rayservices-$kuberay.yaml}
[ -f "$crd" ] || curl --silent --show-error --fail --location --max-time 60 --output "$crd" \
	"https://raw.githubusercontent.com/ray-project/kuberay/$kuberay/helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml" || {
	echo "RayService: not compared, for KubeRay's CRD could not be fetched; set KUBERAY_CRD to a copy" >&2
	exit 1
}
venv/bin/python "$here/tests/deploy/schemas/kuberay.py" "$crd"
echo "RayService: as KubeRay's CRD has it ($crd)"
