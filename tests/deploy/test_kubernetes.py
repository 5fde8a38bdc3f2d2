"""The manifests agree with each other, with our schema of deploy.yaml and with the shapes that placement asks for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from grpc_health.v1 import health_pb2

from cluster.config import DeployConfig
from cluster.deploy_file import checked_deployment
from cluster.local.serve_environment import CONNECTION_DRAIN_S
from cluster.placement import NodeResources, plan_pair
from cluster.topology import NodeTopology
from protos import outrider_pb2
from router.backend import migration
from router.metrics.exposition import NAME, merge_metrics
from tests.repository.generated_tables import sample_metrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


# Fields of KubeRay 1.5.1's custom resources, of its reference of ray.io/v1; pods are held to Kubernetes' schemas by
# schemas/run.sh.
KUBERAY = {
    "RayService": {
        *("excludeHeadPodFromServeSvc", "managedBy", "rayClusterConfig", "rayClusterDeletionDelaySeconds"),
        *("serveConfigV2", "serveService", "upgradeStrategy"),
    },
    "RayCluster": {
        *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
        *("headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs"),
    },
    "HeadGroup": {
        *("enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"),
    },
    "WorkerGroup": {
        *("groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams"),
        *("replicas", "resources", "scaleStrategy", "suspend", "template"),
    },
}
SERVICE = manifest("rayservice.yaml")["spec"]
GROUPS = {group["groupName"]: group for group in SERVICE["rayClusterConfig"]["workerGroupSpecs"]}
PODS = [SERVICE["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]]
PODS += [group["template"]["spec"] for group in GROUPS.values()]


def config() -> DeployConfig:
    return checked_deployment(yaml.safe_load(SERVICE["serveConfigV2"]), "rayservice.yaml").config


def num_gpus(group: str) -> int:
    return int(GROUPS[group]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


def test_every_resource_of_the_kustomization_is_there():
    assert {path.name for path in FOLDER.glob("*.yaml")} == {
        *manifest("kustomization.yaml")["resources"],
        "kustomization.yaml",
        "routes.yaml",  # for overlays
    }


def test_kuberay_knows_every_field_above_the_pods():
    cluster = SERVICE["rayClusterConfig"]
    assert set(SERVICE) <= KUBERAY["RayService"]
    assert set(cluster) <= KUBERAY["RayCluster"]
    assert set(cluster["headGroupSpec"]) <= KUBERAY["HeadGroup"]
    for group in GROUPS.values():
        assert set(group) <= KUBERAY["WorkerGroup"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    parameters = [cluster["headGroupSpec"]["rayStartParams"], *(group["rayStartParams"] for group in GROUPS.values())]
    assert all(isinstance(value, str) for each in parameters for value in each.values())


def resources(group: str) -> dict[str, float]:
    """Resources of a pod of the group that Ray sees, as KubeRay starts it."""
    container = GROUPS[group]["template"]["spec"]["containers"][0]["resources"]
    custom = json.loads(json.loads(GROUPS[group]["rayStartParams"]["resources"]))
    return {"CPU": float(container["requests"]["cpu"]), "GPU": num_gpus(group), **custom}


def test_pairs_and_prefill_replicas_run_in_the_pods_of_their_groups_alone():
    placement = plan_pair(config(), [], NodeTopology())
    prefill = {"CPU": placement.prefill.num_cpus, "GPU": placement.num_prefill_gpus, **placement.prefill_resources}
    for group, demand in (("pair", placement.demand), ("prefill", prefill)):
        for other in GROUPS:
            assert NodeResources(0, 0, resources(other)).num_places(demand) == (1 if other == group else 0)


def test_the_budget_selects_our_pods():
    templates = [SERVICE["rayClusterConfig"]["headGroupSpec"], *GROUPS.values()]
    selected = manifest("disruption-budget.yaml")["spec"]["selector"]["matchLabels"]
    assert all(selected.items() <= each["template"]["metadata"]["labels"].items() for each in templates)
    assert not any(key.startswith("app.kubernetes.io") for key in selected), "KubeRay gives those to every cluster"


def scraped(family: str) -> list[str]:
    """Return the pods whose metrics the monitors scrape for a family; any pod would expose it."""
    monitors = yaml.safe_load_all((FOLDER / "pod-monitor.yaml").read_text(encoding="utf-8"))
    templates = {"head": SERVICE["rayClusterConfig"]["headGroupSpec"], **GROUPS}
    found = []
    for monitor in monitors:
        for name, group in templates.items():
            kind = "head" if name == "head" else "worker"
            labels = {**group["template"]["metadata"]["labels"], "ray.io/node-type": kind}
            ports = {port["name"] for port in group["template"]["spec"]["containers"][0]["ports"]}
            if monitor["spec"]["selector"]["matchLabels"].items() <= labels.items():
                found += [name for each in monitor["spec"]["podMetricsEndpoints"] if gives(each, family, ports)]
    return found


def gives(endpoint: dict[str, Any], family: str, ports: set[str]) -> bool:
    assert endpoint["port"] in ports
    if endpoint["port"] != "serve":
        return False
    rules = endpoint["metricRelabelings"]
    assert all(rule["sourceLabels"] == ["__name__"] for rule in rules)
    return all((re.fullmatch(rule["regex"], family) is not None) == (rule["action"] == "keep") for rule in rules)


def test_every_series_is_scraped_once():
    """Each pod answers for all replicas: scraped of each, sums were as many times too large."""
    texts = sample_metrics()
    text = merge_metrics({"b": texts.ingress}, [texts.pair, texts.prefill], "m")
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert len(families) > 50
    for family in families - {NAME}:
        assert scraped(family) == ["head"], family
    assert sorted(scraped(NAME)) == sorted(["head", *GROUPS]), "each pod's HAProxy counts its own"


def series() -> dict[str, set[str]]:
    """Return each series of two ingresses, two pairs and a prefill replica, by the name of its metric."""
    texts = sample_metrics()
    text = merge_metrics({"a": texts.ingress, "b": texts.ingress}, [texts.pair, texts.pair, texts.prefill])
    text += text.replace('status="200"', 'status="503"')
    found = defaultdict[str, set[str]](set)
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].rstrip("}").partition("{")
            found[name].add(re.sub(r'ingress="\w+",?', "", labels) if name == NAME else labels)  # a HAProxy's own
    return found


def input_series() -> Iterator[dict[str, str]]:
    """Yield every series as it is, and as the monitors give it; each grows by one a second."""
    for name, all_labels in series().items():
        pods = scraped(name)
        for job, places in (("scraped", pods), ("true", pods if name == NAME else ["deployment"])):
            for pod, labels in product(places, all_labels):
                own = ",".join(filter(None, (labels, f'job="{job}",pod="{pod}"')))
                yield {"series": f"{name}{{{own}}}", "values": "0+60x20"}


def of_job(query: str, job: str) -> str:
    """Return a query about one job's series, without the labels that a scrape adds."""
    query = query.replace("$__rate_interval", "5m")
    asked = re.sub(r"(outrider_\w+)(?:\{([^}]*)\})?", rf'\1{{\2,job="{job}"}}', query).replace("{,", "{")
    return f"sum without (job, pod) ({asked})"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_each_query_of_the_dashboard_gives_what_clients_saw_through_the_monitors(tmp_path: Path) -> None:
    dashboard = json.loads((FOLDER.parents[1] / "docs" / "watch" / "dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    num_pods = len(GROUPS) + 1
    expected = {
        "sum(rate(outrider_generation_tokens[5m]))": 2,  # of two ingresses
        "sum(outrider_num_requests_running)": 2 * 10 * 60,  # of two pairs, after ten minutes
        'sum(rate(outrider_requests{status="503"}[5m])) + sum(rate(outrider_proxy_answers{kind="refused"}[5m]))': 2
        + num_pods,
    }
    for query in queries:
        scraped_part, true = of_job(query, "scraped"), of_job(query, "true")
        expected[f"count({scraped_part}) == bool count({true})"] = 1
        is_number = f"({true}) == ({true})"  # a histogram without samples has no quantiles
        expected[f"count((({scraped_part}) != ({true})) and ({is_number})) or vector(0)"] = 0
    tests = [
        {"expr": of_job(query, "scraped") if "count(" not in query else query, "eval_time": "10m"}
        | {"exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in expected.items()
    ]
    file = {"tests": [{"interval": "1m", "input_series": [*input_series()], "promql_expr_test": tests}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(file, width=10_000), encoding="utf-8")
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rays_ports_ask_for_a_token() -> None:
    assert SERVICE["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_the_image_has_the_version_of_ray_that_is_installed():
    assert SERVICE["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_runs_without_root_and_has_what_it_mounts(pod: dict[str, Any]):
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {port["containerPort"] for port in container["ports"]} >= {8000, 9000}


def test_pods_with_streams_leave_later_than_their_longest_drain():
    drained = [PODS[0], GROUPS["pair"]["template"]["spec"]]
    assert all(pod["terminationGracePeriodSeconds"] > CONNECTION_DRAIN_S for pod in drained)
    assert SERVICE["rayClusterDeletionDelaySeconds"] > CONNECTION_DRAIN_S
    assert migration.SILENCE_S < CONNECTION_DRAIN_S


def test_keys_come_from_the_secret():
    secret = manifest("kustomization.yaml")["secretGenerator"][0]
    (volume,) = (volume for volume in PODS[0]["volumes"] if volume["name"] == "api-keys")
    assert volume["secret"]["secretName"] == secret["name"]
    assert str(config().ingress.api_keys_file).endswith("/" + secret["files"][0])


def test_the_routes_lead_to_the_ports_and_services_that_are_served():
    http, grpc = yaml.safe_load_all((FOLDER / "routes.yaml").read_text(encoding="utf-8"))
    deployment = yaml.safe_load(SERVICE["serveConfigV2"])
    service = manifest("rayservice.yaml")["metadata"]["name"] + "-serve-svc"  # KubeRay's name for it
    for route, options in ((http, "http_options"), (grpc, "grpc_options")):
        (rule,) = route["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": service, "port": deployment[options]["port"]}]
    methods = {match["method"]["service"] for match in grpc["spec"]["rules"][0]["matches"]}
    ours = outrider_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    assert methods == {ours, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name}


def test_strangers_reach_no_port_of_ray_but_the_one_of_its_operator():
    spec = manifest("network-policy.yaml")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    pods = [SERVICE["rayClusterConfig"]["headGroupSpec"], *SERVICE["rayClusterConfig"]["workerGroupSpecs"]]
    labels = spec["podSelector"]["matchLabels"].items()
    assert all(labels <= pod["template"]["metadata"]["labels"].items() for pod in pods)
    named = {port["name"] for pod in pods for each in pod["template"]["spec"]["containers"] for port in each["ports"]}
    open_ports = {port["port"] for rule in spec["ingress"] if "from" not in rule for port in rule["ports"]}
    assert open_ports == {"serve", "grpc", "dashboard"} < named
    (own,) = [rule for rule in spec["ingress"] if "ports" not in rule]
    assert own["from"] == [{"podSelector": spec["podSelector"]}]
