"""The application as `build` hands it to Serve, without a cluster (what `serve build` does)."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import serve
from safetensors.numpy import save_file

from actors.settings import PairSettings, PrefillSettings
from cluster.app import build
from cluster.local.serve_environment import set_variables
from engine.config import HeadConfig, HeadKind
from protos.errors import ConfigError
from protos.messages import SpeculationMethod
from router.backend import migration
from router.config import IngressConfig
from tests.router.conftest import byte_tokenizer_core


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": np.zeros(4)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def deployments(args: dict[str, Any]) -> tuple[serve.Deployment, serve.Deployment]:
    """Ingress and Pair of the application."""
    ingress = build(args)._bound_deployment
    return ingress, ingress.init_args[0]._bound_deployment


def settings_of(pair: serve.Deployment) -> PairSettings:
    return pair.init_args[0]


def test_the_application_is_an_ingress_in_front_of_a_pair(model: str):
    ingress, pair = deployments({"model_id": "m", "target": {"path": model}})
    assert (ingress.name, pair.name) == ("Ingress", "Pair")
    config: IngressConfig = ingress.init_args[1]
    assert (config.model_id, config.model_path) == ("m", model)
    assert settings_of(pair).draft.kind is SpeculationMethod.NONE


def test_connections_outlast_the_pairs_that_served_them(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    set_variables()
    ingress, pair = deployments({"model_id": "m", "target": {"path": model}})
    drains_s = [each._deployment_config.graceful_shutdown_timeout_s for each in (pair, ingress)]
    assert drains_s[0] + migration.DEADLINE_S < drains_s[1]
    assert drains_s[1] < float(os.environ["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])


@pytest.mark.parametrize(
    ("format_name", "template", "think"),
    [
        ("auto", "{{ messages }}<seed:think>", ("<seed:think>", "</seed:think>")),
        ("auto", "{{ messages }}", None),
        ("seed", "{{ messages }}", ("<seed:think>", "</seed:think>")),
        ("none", "{{ messages }}<seed:think>", None),
    ],
)
def test_steps_are_drafted_between_the_marks_of_the_models_reasoning(
    model: str, format_name: str, template: str, think: tuple[str, str] | None
):
    core = byte_tokenizer_core()
    core.add_tokens(["<seed:think>", "</seed:think>"])
    core.save(f"{model}/tokenizer.json")
    _, pair = deployments(
        {
            "model_id": "m",
            "target": {"path": model},
            "draft": {"kind": "model", "path": model},
            "speculation": {"steps": {}},
            "ingress": {"chat_template": template, "reasoning_format": format_name},
        }
    )
    steps = settings_of(pair).engine.speculation.steps
    assert steps is not None
    assert steps.think == think


def test_a_pair_is_packed_on_one_node_with_a_bundle_for_each_process(model: str):
    _, pair = deployments({"model_id": "m", "target": {"path": model}, "draft": {"kind": "model", "path": model}})
    config = pair._replica_config
    assert config.placement_group_strategy == "STRICT_PACK"
    assert len(config.placement_group_bundles) == 3
    assert config.ray_actor_options["num_cpus"] <= config.placement_group_bundles[0]["CPU"]
    assert settings_of(pair).draft_share is not None


def test_the_trainer_that_answers_alarms_knows_the_log_and_the_target(model: str, tmp_path: Path):
    args = {"model_id": "m", "target": {"path": model}, "draft": {"kind": "model", "path": model}}
    assert settings_of(deployments(args)[1]).auto_tune is None
    tune = {"log": str(tmp_path / "log"), "auto": True}
    auto_tune = settings_of(deployments({**args, "tune": tune})[1]).auto_tune
    assert auto_tune is not None
    assert auto_tune.folder == f"{tmp_path}/log.drafts"
    assert auto_tune.command[3:7] == ("--log", f"{tmp_path}/log", "--target", model)
    assert auto_tune.command[7:] == ("--minutes", "10", "--fresh", "20000")


def test_calls_that_must_get_through_have_room_above_the_limit_of_requests(model: str):
    args = {"scheduler": {"max_num_sequences": 8}, "pair": {"max_queued_requests": 5}}
    _, pair = deployments({"model_id": "m", "target": {"path": model}, **args})
    assert settings_of(pair).max_requests == 13
    assert pair._deployment_config.max_ongoing_requests > 13


@pytest.mark.parametrize(("kind", "is_in_prefill"), [("mtp", True), ("medusa", False), ("dflash", True)])
def test_a_head_is_part_of_the_engine_and_of_prefill_replicas_if_it_keeps_kv(
    kind: str, is_in_prefill: bool, model: str
):
    draft = {"kind": kind} | ({} if kind == "mtp" else {"path": model})
    _, pair = deployments({"model_id": "m", "target": {"path": model}, "draft": draft, "prefill": {"num_replicas": 1}})
    settings = settings_of(pair)
    assert settings.engine.head == HeadConfig(HeadKind(kind), draft.get("path"))
    assert (settings.draft.kind, settings.draft.model, settings.draft_share) == (kind, None, None)
    prefill: PrefillSettings = pair.init_args[-1]._bound_deployment.init_args[0]
    assert prefill.engine.head == (settings.engine.head if is_in_prefill else None)


def test_a_sharded_target_and_what_is_recorded_reach_the_engine_and_the_devices(model: str):
    target = {"path": model, "tensor_parallel_size": 2, "cuda_graphs": "off"}
    args = {"model_id": "m", "target": target, "draft": {"kind": "model", "path": model, "gpu": 1}}
    _, pair = deployments({**args, "prefill": {"num_replicas": 1}})
    settings = settings_of(pair)
    assert settings.engine.model.tensor_parallel_size == 2
    assert settings.engine.model.graphs.kind == "off"
    assert settings.draft.model is not None
    assert (settings.draft.model.tensor_parallel_size, settings.draft.model.graphs.kind) == (1, "off")
    assert pair.init_args[1].keywords == {"num_ranks": 2, "draft_gpu": 1, "num_gpus": 0}
    prefill: PrefillSettings = pair.init_args[-1]._bound_deployment.init_args[0]
    assert prefill.engine.model.tensor_parallel_size == 2
    assert prefill.engine.model.graphs.kind == "off"  # it decodes nothing


def test_autoscaling_is_handed_to_serve(model: str):
    scaling = {"min_replicas": 1, "max_replicas": 2}
    _, pair = deployments({"model_id": "m", "target": {"path": model}, "pair": {"autoscaling": scaling}})
    assert pair._deployment_config.autoscaling_config is not None
    assert pair._deployment_config.autoscaling_config.max_replicas == 2


def test_a_missing_model_is_refused_at_build(model: str):
    with pytest.raises(ConfigError, match="neither a folder here"):
        build({"model_id": "m", "target": {"path": model + "/not/there"}})


@pytest.mark.parametrize(
    ("section", "policy"), [({}, "prefix"), ({"policy": "load"}, "load"), ({"policy": "random"}, "random")]
)
def test_pairs_are_routed_by_the_policy_of_the_file(model: str, section: dict[str, Any], policy: str):
    args = {"model_id": "m", "target": {"path": model}, "router": section, "cache": {"block_size": 32}}
    _, pair = deployments(args)
    router = pair._deployment_config.request_router_config
    assert router.request_router_class == "router.routing.serve_router:PrefixAwareRouter"
    assert router.request_router_kwargs["policy"] == policy
    assert router.request_router_kwargs["block_size"] == 32


def test_serves_own_policy_leaves_serves_own_router(model: str):
    args = {"model_id": "m", "target": {"path": model}, "router": {"policy": "power_of_two"}}
    _, pair = deployments(args)
    router = pair._deployment_config.request_router_config
    assert router.request_router_class.endswith(":PowerOfTwoChoicesRequestRouter")


def test_without_prefill_replicas_there_is_no_such_deployment(model: str):
    _, pair = deployments({"model_id": "m", "target": {"path": model}, "prefill": {"num_replicas": 0}})
    assert pair.init_args[-1] is None


def test_prefill_replicas_give_way_to_pairs(model: str):
    _, pair = deployments({"model_id": "m", "target": {"path": model}, "prefill": {"num_replicas": 1}})
    prefill: PrefillSettings = pair.init_args[-1]._bound_deployment.init_args[0]
    assert prefill.niceness == 10


def test_prefill_replicas_are_a_deployment_of_their_own(model: str):
    args = {"model_id": "m", "target": {"path": model}, "prefill": {"autoscaling": {"max_replicas": 2}}}
    _, pair = deployments(args)
    prefill = pair.init_args[-1]._bound_deployment
    assert prefill.name == "Prefill"
    assert prefill._deployment_config.autoscaling_config.max_replicas == 2
