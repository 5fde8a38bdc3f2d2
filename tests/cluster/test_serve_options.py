"""Every option of Serve's schemas, as this version of Ray has them, is honoured or refused by name, on both ways."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from enum import Enum
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from cluster.cli.deployment import deployment_of
from cluster.deploy_file import checked_deployment
from cluster.local.local_service import WITHOUT_EFFECT, check_one_process
from cluster.local.one_process import refuse_serves_options
from cluster.serve_options import HONOURED, INGRESS_ALONE, REFUSED, WITHOUT_RAY, model_of
from protos.errors import ConfigError
from router.ingress import GRPC_SERVICER_FUNCTIONS

VALUES: dict[str, Any] = {  # where a value of the type alone would not be a valid one
    "proxy_location": "HeadOnly",
    "http_options.host": "127.0.0.1",
    "grpc_options.grpc_servicer_functions": list(GRPC_SERVICER_FUNCTIONS),
    "target_capacity": 50.0,
    "controller_options.runtime_env": {"env_vars": {"A": "b"}},
    "applications.name": "mine",
    "applications.route_prefix": "/llm",
    "applications.import_path": "outrider:build",
    "applications.args": {"model_id": "m", "target": {"path": "models/demo/target"}},
    "applications.runtime_env": {"env_vars": {"A": "b"}},
    "applications.autoscaling_policy": {"policy_function": "a:b"},
    "applications.deployments.name": "Ingress",
    "applications.deployments.num_replicas": 2,
    "applications.deployments.placement_group_bundles": [{"CPU": 1}],
    "applications.deployments.deployment_actors": [{"name": "a", "actor_class": "b:c"}],
    "applications.deployments.ray_actor_options.label_selector": {"region": "x"},
    "applications.deployments.ray_actor_options.fallback_strategy": [{"label_selector": {"region": "x"}}],
    "applications.deployments.rolling_update_percentage": 0.5,
    "applications.deployments.placement_group_bundle_label_selector": [{"region": "x"}],
    "applications.deployments.gang_scheduling_config.gang_size": 2,
    "applications.deployments.backpressure_config.status_code": 429,
    "additional_log_standard_attrs": ["name"],
    "encoding": "JSON",
    "log_level": "DEBUG",
    "sampling_ratio": 0.5,
}
GANG = "applications.deployments.gang_scheduling_config"
BESIDE: dict[str, dict[str, Any]] = {
    "applications.deployments.placement_group_bundle_label_selector": {"placement_group_bundles": [{"CPU": 1}]},
    f"{GANG}.gang_placement_strategy": {"gang_size": 2},
    f"{GANG}.runtime_failure_policy": {"gang_size": 2},
    "http_options.ssl_certfile": {"ssl_keyfile": "key"},
    "http_options.ssl_keyfile": {"ssl_certfile": "file"},
}
OF_SERVE = ("applications.host", "applications.port", f"{GANG}.runtime_failure_policy")  # it refuses them itself


def leaves(schema: type[BaseModel] = ServeDeploySchema, path: str = "") -> Iterator[str]:
    """Yield the path of every option that has no options in it."""
    for name, field in schema.model_fields.items():
        inner, here = model_of(field), f"{path}{field.alias or name}"
        is_list = "List" in str(field.annotation) and name not in ("applications", "deployments")
        if inner is not None and inner.model_fields and not is_list:
            yield from leaves(inner, f"{here}.")
        else:
            yield here


def field_at(path: str) -> Any:
    schema: Any = ServeDeploySchema
    *sections, last = path.split(".")
    for key in sections:
        schema = model_of(schema.model_fields[key])
    return schema.model_fields[last]


def types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from types_in(each)


def some_value(path: str) -> Any:
    """A valid value other than the default."""
    last = path.rpartition(".")[2]
    if path in VALUES or last in VALUES:
        return VALUES.get(path, VALUES.get(last))
    field = field_at(path)
    kinds = list(types_in(field.annotation))
    default = field.get_default(call_default_factory=True)
    if bool in kinds:
        return not default
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return next(each.value for each in kind if each is not default)
    number = 7777 if last == "port" else 1.5 if float in kinds else 3
    if int in kinds or float in kinds or "int" in str(field.annotation):
        return number
    return {"a": 1} if "Dict" in str(field.annotation) or dict in kinds else ["a"] if "List" in str(kinds) else "a"


def deployment_with(path: str, value: Any, name: str = "Pair") -> dict[str, Any]:
    """The demo with one more option, in the deployment `name` if it is a deployment's."""
    deployment = deepcopy(deployment_of("demo", settings=("ingress.open_admin=false",)))
    section: Any = deployment
    *sections, last = path.split(".")
    for key in sections:
        if key == "applications":
            section = section[key][0]
        elif key == "deployments":
            section = section.setdefault(key, [{"name": name}])[0]
        else:
            section = section.setdefault(key, {})
    section[last] = value
    section.update(BESIDE.get(path, {}))
    if path == "http_options.host":
        deployment["http_options"]["host"] = value
    return deployment


def is_in(path: str, paths: Any) -> bool:
    return any(f"{path}.".startswith(f"{each}.") for each in paths)


ALL = list(leaves())


def test_serves_options_are_those_that_are_known_here():
    """A new version of Ray with an option that is in neither list fails here."""
    assert len(ALL) > 60
    assert [path for path in ALL if not is_in(path, {*HONOURED, *INGRESS_ALONE, *REFUSED})] == []
    sections = {".".join(path.split(".")[:depth]) for path in ALL for depth in range(1, 6)}
    assert not {*HONOURED, *INGRESS_ALONE, *REFUSED, *WITHOUT_RAY} - sections


@pytest.mark.parametrize("path", ALL)
def test_an_option_is_honoured_or_refused_by_name(path: str):
    deployment = deployment_with(path, some_value(path))
    if is_in(path, HONOURED):
        checked_deployment(deployment, "deploy.yaml")
        return
    with pytest.raises(ConfigError) as refused:
        checked_deployment(deployment, "deploy.yaml")
    if path in OF_SERVE:
        assert "Ray Serve does not accept" in str(refused.value)
        return
    key = path.split("deployments.")[-1].removeprefix("applications.")
    assert key.split(".")[0] in str(refused.value)
    assert "which nothing here honours; " in str(refused.value)


@pytest.mark.parametrize("path", ALL)
def test_without_ray_an_option_is_honoured_or_refused_by_name(path: str):
    value = some_value(path)
    deployment = deployment_with(path, value)
    file = checked_deployment(deployment_of("demo"), "demo")
    file = type(file)(deployment, file.http_host, file.http_port, file.grpc_port, file.config)
    if path in WITHOUT_RAY:
        refuse_serves_options(file)
        return
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        refuse_serves_options(file)


def test_an_ingress_may_be_kept_on_its_nodes():
    for path in INGRESS_ALONE:
        checked_deployment(deployment_with(path, some_value(path), name="Ingress"), "deploy.yaml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "applications.deployments.autoscaling_config",
            {"downscale_delay": 3},
            r"downscale_delay: unknown key",
        ),
        ("applications.deployments.name", "Pairs", "did you mean 'Pair'"),
        ("applications.deployments.name", "Prefill", "there is no such deployment"),
        ("proxy_location", "Disabled", "no other server listens"),
        ("applications.deployments", [{"name": "Pair"}, {"name": "Pair"}], "'Pair' is there twice"),
        ("applications.logging_config", {"log_levl": "INFO"}, "log_levl"),
        ("applications.deployments.autoscaling_config", {}, "autoscaling_config is {}"),
        (
            "applications.deployments.autoscaling_config",
            {"min_replicas": 1},
            "autoscaling_config is {'min_replicas': 1}",
        ),
        ("applications.deployments.ray_actor_options", {}, "ray_actor_options is {}"),  # without its GPUs
        ("applications.deployments.num_replicas", None, "num_replicas is None"),
        ("applications.deployments.health_check_period_s", 1e-9, "use 0.1 or more"),
        ("applications.deployments.health_check_timeout_s", 0.01, "use 1 or more"),
        ("applications.route_prefix", "llm", "route_prefix is 'llm'"),
        ("applications.route_prefix", "/llm/", "route_prefix is '/llm/'"),
        ("applications.route_prefix", "/a b", "route_prefix is '/a b'"),
        ("applications.route_prefix", "/{x}", "route_prefix is"),
        ("applications.route_prefix", "", "route_prefix is ''"),
        ("applications.route_prefix", None, "nothing would be served by HTTP"),
        ("applications.name", "a b#c", "use 1 to 100 letters"),
        ("applications.runtime_env", {"env_var": {}}, "runtime_env.env_var: unknown key; did you mean 'env_vars'"),
        ("applications.runtime_env", {"env_vars": {"A": 1}}, "runtime_env is not one that Ray accepts"),
        ("http_options.host", "", "http_options.host is empty"),
        ("grpc_options.grpc_servicer_functions", ["os.getcwd"], "has 'os.getcwd', and there is no such function"),
    ],
)
def test_a_mistake_is_named(path: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        checked_deployment(deployment_with(path, value), "deploy.yaml")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ray_actor_options", {"resources": {"x": -1}}),
        ("ray_actor_options", {"resources": {"CPU": 1}}),
        ("max_replicas_per_node", 0),
        ("max_replicas_per_node", 101),
    ],
)
def test_an_ingress_that_ray_would_not_start_is_refused(option: str, value: Any):
    with pytest.raises(ConfigError, match=f"deployment 'Ingress': Ray does not accept {option}: "):
        checked_deployment(deployment_with(f"applications.deployments.{option}", value, name="Ingress"), "deploy.yaml")


def test_a_second_application_of_ours_is_refused_and_anothers_is_not():
    deployment = deployment_of("demo")
    second = deepcopy(deployment["applications"][0]) | {"name": "second", "route_prefix": "/second"}
    deployment["applications"].append({"name": "other", "route_prefix": "/other", "import_path": "theirs:app"})
    checked_deployment(deployment, "deploy.yaml")
    deployment["applications"].append(second)
    with pytest.raises(ConfigError, match="'outrider' and 'second' are both of Outrider"):
        checked_deployment(deployment, "deploy.yaml")


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
def test_a_key_of_ours_that_needs_ray_is_refused_without(path: str):
    values = {
        "pair.autoscaling": "{max_replicas: 1}",
        "pair.resources": "{a: 1}",
        "pair.kv_events": "{}",
        "router.policy": "load",
        "prefill.autoscaling": "{min_replicas: 0, max_replicas: 1}",
        "prefill.resources": "{a: 1}",
        "prefill.kv_transport": "object_store",
    }
    if path == "pair.kv_events":
        pytest.importorskip("zmq", reason="pyzmq is not installed")
    settings = (f"{path}={values.get(path, 3)}", *(["pair.num_replicas=null"] if path == "pair.autoscaling" else []))
    file = checked_deployment(deployment_of("demo", settings=settings), "demo")
    with pytest.raises(ConfigError, match=f"{path.rpartition('.')[0] or path}.* is|prefill asks for"):
        check_one_process(file.config)
