"""The cores and devices of each process, on recorded machines."""

from typing import Any

import pytest

from actors.settings import PairDevices
from cluster.config import parse_config
from cluster.placement import NodeResources, PairPlacement, plan_pair
from cluster.topology import NodeTopology, choose_devices, pin_devices, read_topology
from protos.errors import ConfigError
from tests.cluster.recorded_nvml import RecordedNvml

NO_GPU = NodeTopology()
DRAFT = {"kind": "model", "path": "d"}
NO_DRAFT = {"kind": "none"}


def recorded(name: str) -> NodeTopology:
    return read_topology(RecordedNvml(name))


def plan(
    nodes: list[NodeResources],
    topology: NodeTopology = NO_GPU,
    *,
    num_pairs: int = 1,
    num_prefills: int = 0,
    draft: dict[str, Any] = DRAFT,
    is_one_process: bool = False,
    mode: str = "sync",
    **target: int,
) -> PairPlacement:
    args = {
        "model_id": "m",
        "target": {"path": "t", **target},
        "draft": draft,
        "speculation": {"mode": mode},
        "pair": {"num_replicas": num_pairs},
        "prefill": {"num_replicas": num_prefills},
    }
    return plan_pair(parse_config(args), nodes, topology, is_one_process=is_one_process)


def total_cpus(placement: PairPlacement) -> float:
    return sum(bundle["CPU"] for bundle in placement.bundles)


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_pairs", [1, 2, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pairs_and_ingress_fit_into_the_cores_of_a_cpu_node(num_cpus: int, num_pairs: int, mode: str):
    placement = plan([NodeResources(num_cpus)], num_pairs=num_pairs, mode=mode)
    assert total_cpus(placement) * num_pairs + 0.2 <= num_cpus + 1e-9
    threads = placement.target.num_threads + placement.draft.num_threads
    num_cores = max(1, num_cpus // num_pairs)
    assert threads == (max(2, num_cores) if mode == "async" else num_cores + 1)


def test_threads_the_user_sets_are_kept():
    placement = plan([NodeResources(8)], num_threads=8, draft={**DRAFT, "num_threads": 2})
    assert (placement.target.num_threads, placement.draft.num_threads) == (8, 2)


def test_without_a_draft_model_the_target_gets_every_core_and_there_is_no_third_bundle():
    placement = plan([NodeResources(8)], draft=NO_DRAFT)
    assert placement.target.num_threads == 8
    assert len(placement.bundles) == 2


def test_pairs_spread_over_nodes():
    assert plan([NodeResources(8), NodeResources(8)], num_pairs=2).target.num_threads == 7


def test_a_pair_gets_two_gpus_where_all_pairs_can():
    node = NodeResources(64, 8)
    assert plan([node], recorded("nvswitch_8"), num_pairs=4).bundles[0]["GPU"] == 2
    assert plan([node], recorded("nvswitch_8"), num_pairs=5).bundles[0]["GPU"] == 1


def test_a_draft_that_shares_the_targets_gpu_shares_its_process_too():
    two, one = NodeResources(64, 2), NodeResources(64, 1)
    assert plan([two], recorded("nvswitch_8")).draft is not None
    assert plan([one], recorded("nvswitch_8")).draft is None
    assert plan([two], recorded("nvswitch_8"), draft={**DRAFT, "gpu": 0}).draft is None
    within = plan([two], recorded("nvswitch_8"), is_one_process=True)
    assert (within.num_gpus, within.draft) == (1, None)
    ranks = plan([two], recorded("nvswitch_8"), tensor_parallel_size=2)
    assert ranks.draft is not None


def test_a_draft_in_the_targets_process_leaves_it_every_core():
    placement = plan([NodeResources(8)], is_one_process=True)
    assert (placement.target.num_threads, placement.draft, len(placement.bundles)) == (8, None, 2)


def test_drafting_ahead_needs_a_gpu_of_its_own():
    with pytest.raises(ConfigError, match=r"1 pairs need 2 GPUs each.*set speculation.mode to 'sync'"):
        plan([NodeResources(64, 1)], recorded("nvswitch_8"), mode="async")


def test_a_plain_target_takes_one_gpu():
    assert plan([NodeResources(64, 8)], recorded("nvswitch_8"), draft=NO_DRAFT).num_gpus == 1


def test_too_few_gpus_are_refused_with_the_topology():
    with pytest.raises(
        ConfigError, match=r"5 pairs need a GPU each and the cluster has 4.*NVLink groups \{0,1\} \{2,3\}"
    ):
        plan([NodeResources(64, 4)], recorded("bridged_pairs"), num_pairs=5)


def test_too_few_cores_are_refused():
    with pytest.raises(ConfigError, match="too little for a target and a draft"):
        plan([NodeResources(1)], num_pairs=20)


def test_a_cluster_without_cpus_is_refused():
    with pytest.raises(ConfigError, match="no node of the cluster offers a CPU"):
        plan([NodeResources(0)])


def test_devices_of_a_bridged_pair_are_taken():
    assert choose_devices(("2", "3"), recorded("bridged_pairs")) == PairDevices(("2",), "3")


def test_devices_of_two_bridges_are_refused_with_the_topology():
    with pytest.raises(ConfigError, match=r"GPUs 1 and 2, which no NVLink joins.*\{0,1\} \{2,3\}"):
        choose_devices(("1", "2"), recorded("bridged_pairs"))


def test_any_two_devices_behind_an_nvswitch_will_do():
    assert choose_devices(("1", "6"), recorded("nvswitch_8")) == PairDevices(("1",), "6")


def test_without_any_nvlink_neighbours_are_not_asked_for():
    assert choose_devices(("0", "3"), recorded("pcie_only")) == PairDevices(("0",), "3")


def test_one_gpu_is_shared_and_none_means_the_cpu():
    assert choose_devices(("5",), recorded("nvswitch_8")) == PairDevices(("5",), "5")
    assert choose_devices((), NO_GPU) == PairDevices((), None)


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_prefills", [1, 2])
def test_prefill_replicas_fit_beside_the_pairs(num_cpus: int, num_prefills: int):
    placement = plan([NodeResources(num_cpus)], num_prefills=num_prefills)
    assert placement.prefill is not None
    assert total_cpus(placement) + num_prefills * placement.prefill.num_cpus + 0.2 <= num_cpus + 1e-9
    assert placement.prefill.num_threads <= max(1, num_cpus // (1 + num_prefills))


def test_without_prefill_replicas_there_is_no_share_for_one():
    assert plan([NodeResources(8)]).prefill is None


def test_a_prefill_replica_takes_a_gpu_of_its_own():
    node = NodeResources(64, 4)
    assert plan([node], recorded("bridged_pairs"), num_pairs=1, num_prefills=2).num_gpus == 2
    assert plan([node], recorded("bridged_pairs"), num_pairs=2, num_prefills=2).num_gpus == 1
    with pytest.raises(ConfigError, match="3 pairs and 2 prefill replicas need a GPU each and the cluster has 4"):
        plan([node], recorded("bridged_pairs"), num_pairs=3, num_prefills=2)


def test_the_ranks_of_a_target_take_a_gpu_each_and_the_draft_one_more_where_it_can():
    node = NodeResources(64, 8)
    assert plan([node], recorded("nvswitch_8"), tensor_parallel_size=4).num_gpus == 5
    assert plan([node], recorded("nvswitch_8"), num_pairs=2, tensor_parallel_size=4).num_gpus == 4
    assert plan([node], recorded("nvswitch_8"), tensor_parallel_size=4, draft={**DRAFT, "gpu": 1}).num_gpus == 4
    assert plan([node], recorded("nvswitch_8"), tensor_parallel_size=4, draft=NO_DRAFT).num_gpus == 4


def test_a_draft_that_must_have_its_own_gpu_is_refused_without_one():
    with pytest.raises(ConfigError, match=r"2 pairs need 5 GPUs each, on one node and the cluster has 8.*draft\.gpu"):
        plan(
            [NodeResources(64, 8)],
            recorded("nvswitch_8"),
            num_pairs=2,
            tensor_parallel_size=4,
            draft={**DRAFT, "gpu": "own"},
        )


def test_more_ranks_than_any_nvlink_group_has_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, and the largest NVLink group has 2"):
        plan([NodeResources(64, 4)], recorded("bridged_pairs"), tensor_parallel_size=4)


def test_prefill_replicas_are_sharded_as_the_targets_are():
    node = NodeResources(64, 8)
    placement = plan([node], recorded("nvswitch_8"), tensor_parallel_size=2, num_prefills=2)
    assert (placement.num_gpus, placement.num_prefill_gpus) == (3, 2)
    with pytest.raises(ConfigError, match="3 pairs and 2 prefill replicas need 2 GPUs each"):
        plan([node], recorded("nvswitch_8"), num_pairs=3, tensor_parallel_size=2, num_prefills=2)


def test_ranks_on_a_cpu_node_share_the_targets_cores():
    placement = plan([NodeResources(16)], tensor_parallel_size=2)
    assert placement.target.num_threads == 6
    assert placement.target.num_cpus > 2 * 5
    assert total_cpus(placement) + 0.2 <= 16


def test_devices_of_ranks_and_draft():
    switch = recorded("nvswitch_8")
    assert choose_devices(("0", "1", "2"), switch, 2) == PairDevices(("0", "1"), "2")
    assert choose_devices(("4", "5"), switch, 2) == PairDevices(("4", "5"), "5")
    assert choose_devices(("4", "5"), switch, 2, draft_gpu=0) == PairDevices(("4", "5"), "4")
    with pytest.raises(ConfigError, match="GPUs 0, 1 and 2, which no NVLink joins"):
        choose_devices(("0", "1", "2"), recorded("bridged_pairs"), 2)


def test_devices_are_known_by_uuid_and_neighbours_are_found_by_it():
    topology = recorded("bridged_pairs")
    assert choose_devices(("GPU-2", "GPU-3"), topology) == PairDevices(("GPU-2",), "GPU-3")
    with pytest.raises(ConfigError, match="GPUs GPU-1 and GPU-2, which no NVLink joins"):
        choose_devices(("GPU-1", "GPU-2"), topology)


def test_an_instance_of_a_divided_gpu_serves_a_pair_and_no_sharded_target():
    topology = recorded("divided")
    assert choose_devices(("MIG-0-0",), topology) == PairDevices(("MIG-0-0",), "MIG-0-0")
    card = topology.device_of("MIG-1-0")
    assert card is not None
    assert card.index == 1
    with pytest.raises(ConfigError, match=r"instances of divided GPUs, MIG-0-0 and MIG-0-1.*set it to 1"):
        choose_devices(("MIG-0-0", "MIG-0-1"), topology, 2)


def test_ranks_on_cards_of_different_kinds_are_refused_with_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.topology.read_topology", lambda: recorded("mixed_cards"))
    assert pin_devices(("0", "2"), num_ranks=2).targets == ("0", "2")
    with pytest.raises(
        ConfigError,
        match=r"GPUs 0 and 1 of different kinds \(NVIDIA A100-SXM4-40GB with 40 GiB, NVIDIA A100-SXM4-80GB with 80 GiB",
    ):
        pin_devices(("0", "1"), num_ranks=2)
