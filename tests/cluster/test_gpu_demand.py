"""GPUs that deploy.yaml demands: shapes follow from it alone, waits are logged, and no pair runs on a processor."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.app import build
from cluster.config import parse_config
from cluster.placement import (
    NodeResources,
    PairPlacement,
    log_missing_nodes,
    plan_pair,
)
from cluster.preflight import check_gpus, check_memory
from cluster.topology import NodeTopology, linked_order, order_devices, pin_devices, read_topology
from protos.errors import ConfigError
from tests.cluster.recorded_nvml import RecordedNvml

NO_NODES: list[NodeResources] = []
MARK = {"pair_node": 1.0}


def config(model: Path, **pair: Any):
    (model / "config.json").write_text('{"model_type": "llama"}')
    args = {"model_id": "m", "target": {"path": str(model)}, "draft": {"path": str(model)}}
    return parse_config({**args, "pair": {"num_replicas": 3, "gpus": {"count": 2, "kind": "H100"}, **pair}})


def plan(
    num_gpus: int = 2, nodes: list[NodeResources] = NO_NODES, num_ranks: int = 1, **sections: Any
) -> PairPlacement:
    args = {
        "model_id": "m",
        "target": {"path": "t", "tensor_parallel_size": num_ranks, "num_threads": 6},
        "draft": {"kind": "model", "path": "d"},
        "pair": {"num_replicas": 3, "gpus": {"count": num_gpus, "kind": "H100"}},
    }
    return plan_pair(parse_config({**args, **sections}), nodes, NodeTopology())


def test_a_pair_asks_for_its_gpus_on_a_cluster_that_has_none_yet(tmp_path: Path):
    placement = plan_pair(config(tmp_path, resources=MARK), NO_NODES, NodeTopology())
    shell = placement.bundles[0]
    assert shell.pop("CPU") > 0
    assert shell == {"GPU": 2, "accelerator_type:H100": 0.001, **MARK}
    assert sum(bundle["CPU"] for bundle in placement.bundles[1:]) <= 8


def test_shares_do_not_depend_on_the_nodes_of_today():
    assert plan() == plan(nodes=[NodeResources(64, 8)]) == plan(nodes=[NodeResources(2)])


def test_a_draft_on_the_one_gpu_of_its_pair_is_in_the_targets_process():
    assert plan(1).draft is None
    assert plan(2).draft is not None


def test_prefill_replicas_demand_a_gpu_of_the_same_kind_for_each_rank():
    placement = plan(3, num_ranks=2, prefill={"num_replicas": 1, "resources": {"prefill_node": 1}})
    assert placement.num_prefill_gpus == 2
    assert placement.prefill_resources == {"accelerator_type:H100": 0.001, "prefill_node": 1}
    assert placement.prefill is not None
    assert placement.prefill.num_cpus == 12


@pytest.mark.parametrize(("count", "num_ranks"), [(3, 1), (1, 2), (4, 2)])
def test_gpus_that_no_process_of_a_pair_would_use_are_refused(count: int, num_ranks: int):
    with pytest.raises(ConfigError, match=rf"pair.gpus.count is {count}, and a pair uses {num_ranks} or"):
        plan(count, num_ranks=num_ranks)


def test_pairs_without_a_node_are_counted_in_the_log(caplog: pytest.LogCaptureFixture):
    placement = plan()
    node = NodeResources(64, 8, {"CPU": 64, "GPU": 2, "accelerator_type:H100": 1})
    with caplog.at_level(logging.WARNING):
        log_missing_nodes(placement, 3, [node, NodeResources(64, 0, {"CPU": 64})])
        assert "2 of 3 pairs wait for nodes" in caplog.text
        assert "GPU 2" in caplog.text
        caplog.clear()
        log_missing_nodes(placement, 1, [node])
        assert not caplog.text


def test_a_pair_that_ray_gives_too_few_gpus_does_not_start_on_a_processor():
    with pytest.raises(ConfigError, match="needs 2 GPUs, and Ray gave it 0"):
        pin_devices((), num_gpus=2)


def test_what_is_meant_for_a_cluster_can_be_checked_on_a_machine_without_gpus(tmp_path: Path):
    check_memory(config(tmp_path, num_replicas=1000), NodeTopology())
    with pytest.raises(ConfigError, match=r"demand 6 GPUs, and this machine has 0; deploy to a cluster"):
        check_gpus(config(tmp_path), NodeTopology())


def test_gpus_of_this_machine_need_cores_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    topology = read_topology(RecordedNvml("nvswitch_8"))
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    check_gpus(config(tmp_path), topology)
    monkeypatch.setattr(os, "cpu_count", lambda: 23)
    with pytest.raises(ConfigError, match=r"6 GPUs with 4 cores each need 24 cores, and this machine has 23"):
        check_gpus(config(tmp_path), topology)
    args = {"model_id": "m", "target": {"path": str(tmp_path), "num_threads": 3}, "draft": {"path": str(tmp_path)}}
    fewer = parse_config({**args, "pair": {"num_replicas": 3, "gpus": {"count": 2, "kind": "H100"}}})
    check_gpus(fewer, topology)
    assert plan_pair(fewer, NO_NODES, NodeTopology()).demand["CPU"] <= 6


def test_resources_that_ray_counts_itself_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="GPU is Ray's own"):
        config(tmp_path, resources={"GPU": 1})


def test_prefill_goes_down_to_no_replica_and_pairs_do_not(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    args = {"model_id": "m", "target": {"path": str(tmp_path)}}
    none = {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}
    assert parse_config({**args, "prefill": none}).prefill.autoscaling.min_replicas == 0
    with pytest.raises(ConfigError, match="min_replicas"):
        parse_config({**args, "pair": none})


def test_a_missing_count_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pair.gpus.count: missing"):
        config(tmp_path, gpus={"kind": "H100"})


def test_gpus_are_given_out_in_an_order_in_which_nvlink_joins_each_pair(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    bridged = read_topology(RecordedNvml("bridged_pairs"))
    crossed = NodeTopology(bridged.devices, frozenset({(0, 2), (1, 3)}))
    assert order_devices(2, crossed)["CUDA_VISIBLE_DEVICES"] == "0,2,1,3"
    assert order_devices(1, crossed) == {}
    assert order_devices(2, read_topology(RecordedNvml("pcie_only"))) == {}
    odd = NodeTopology(bridged.devices, frozenset({(0, 1), (1, 2)}))
    assert linked_order(odd, 2) == "0,1,2,3"
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "3,1"})
    assert order_devices(2, crossed) == {}


def test_the_application_demands_on_a_machine_without_gpus(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_file({"weight": np.zeros(4)}, tmp_path / "model.safetensors")
    args = config(tmp_path).model_dump(mode="json", exclude_unset=True)
    pair = build(args)._bound_deployment.init_args[0]._bound_deployment
    assert pair._replica_config.placement_group_bundles[0]["GPU"] == 2
    assert "wait for nodes" in caplog.text
