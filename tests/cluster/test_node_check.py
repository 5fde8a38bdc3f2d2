"""Pairs that serve are kept unless what replaces them has places and memory; processes are known by their titles."""

import pytest

from actors.settings import ProcessShare
from cluster.node_check import check_places, is_replica
from cluster.placement.placement import NodeResources, PairPlacement
from protos.errors import ConfigError

H100 = {"accelerator_type:H100": 1.0}
PAIR = PairPlacement(ProcessShare(8, 7.9), None, num_gpus=2, resources={"accelerator_type:H100": 0.001})


@pytest.mark.parametrize(
    ("nodes", "num_places"),
    [
        ([], 0),
        ([{"CPU": 64, "GPU": 8}], 0),  # of another kind
        ([{"CPU": 64, "GPU": 3, **H100}], 1),
        ([{"CPU": 64, "GPU": 1, **H100}] * 4, 0),  # not on one node
        ([{"CPU": 12, "GPU": 8, **H100}], 1),  # without cores for a second one
    ],
)
def test_pairs_that_serve_are_not_stopped_for_pairs_that_wait_for_nodes(nodes: list[dict[str, float]], num_places: int):
    seen = [NodeResources(int(each["CPU"]), int(each["GPU"]), each) for each in nodes]
    check_places(PAIR, num_places, seen)  # more may wait
    with pytest.raises(
        ConfigError, match=rf"2 pairs that serve.*places for {num_places}.*accelerator_type:H100 0.001, GPU 2"
    ):
        check_places(PAIR, 2, seen)


@pytest.mark.parametrize(
    ("title", "is_one"),
    [
        ("ray::ServeReplica:outrider:Pair", True),
        ("ray::ServeReplica:outrider:Pair.handle_request_streaming", True),
        ("ray::ServeReplica:llm.v2:Prefill", True),  # an application's name may have dots
        ("ray::ServeReplica:llm.v2:Pair.handle_request()", True),
        ("ray::TargetActor.ping", True),
        ("ray::DraftActor", True),
        ("ray::ServeReplica:outrider:Ingress", False),
        ("ray::ServeReplica:Pair:Ingress.handle_request", False),
        ("ray::ServeReplica:other:Pairs", False),
        ("ray::IndexActor", False),
    ],
)
def test_the_memory_of_running_pairs_and_prefill_replicas_is_found(title: str, is_one: bool):
    assert is_replica(title) is is_one
