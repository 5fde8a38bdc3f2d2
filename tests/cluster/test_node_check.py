"""Pairs that serve are kept unless what replaces them has places and memory; processes are known by their titles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import NodeDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.settings import ProcessShare
from cluster import node_check
from cluster.config import parse_config
from cluster.node_check import Finding, check_nodes, check_places, find, is_replica
from cluster.placement import NodeResources, PairPlacement
from cluster.replica_settings import unplaced_settings
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.serve.tiny_models import write_pair

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


def no_room(**_: object) -> Finding:
    return 1, None


def no_model(**_: object) -> Finding:
    return 0, "model path '/models/a' is neither a folder here"


def dead(**_: object) -> Finding:
    raise NodeDiedError("the raylet has died")


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (no_model, "^on node second: model path '/models/a' is neither a folder here"),
        (dead, "^node second could not be checked: the raylet has died; see the log of its raylet"),
        (no_room, "second may get a replica of pair"),
    ],
)
def test_the_node_that_could_not_hold_a_pair_is_named(
    look: Callable[..., Finding], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The node that builds the application has looked at its own files; Ray runs a function at the other."""
    first, second = "1" * 56, "2" * 56

    class Look:
        def options(self, scheduling_strategy: NodeAffinitySchedulingStrategy) -> Look:
            assert (scheduling_strategy.node_id, scheduling_strategy.soft) == (second, False)
            return self

        def remote(self, *_: object, **options: object) -> Callable[[], Finding]:
            return lambda: look(**options)

    monkeypatch.setattr(
        node_check,
        "ray",
        SimpleNamespace(
            remote=lambda **_: lambda _: Look(),
            get=lambda reference, timeout: reference(),
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: first),
            util=SimpleNamespace(list_named_actors=lambda **_: []),
        ),
    )
    monkeypatch.setattr(node_check, "_room", lambda *_, **__: (1 << 50, None))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = parse_config({"model_id": "m", "target": {"path": str(tmp_path)}})
    placement = PairPlacement(ProcessShare(1, 0.5), None, num_gpus=0)
    nodes = [NodeResources(2, 0, {"CPU": 2.0}, name, place) for name, place in ((first, "first"), (second, "second"))]
    with pytest.raises(ConfigError, match=message):
        check_nodes(config, unplaced_settings(config), placement, nodes)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `target` and `draft` of a pair, and `other`, a draft of another vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    write_checkpoint(folder / "other", seed=1, vocab_size=90)
    return folder


@pytest.mark.parametrize(
    ("file", "text", "changes", "reason"),
    [
        (None, "", {}, None),
        (None, "", {"target": {"path": "modls/target"}}, "'modls/target' is not a local folder, and the Hub does not"),
        (None, "", {"draft": {"path": "modls/draft"}}, "'modls/draft' is not a local folder, and the Hub does not"),
        ("model.safetensors", "no header", {}, "is not a whole safetensors file"),
        ("tokenizer.json", "{}", {}, "tokenizer"),
        ("config.json", "{", {}, "config.json"),
        ("config.json", '{"model_type": "none"}', {}, "none"),
        (None, "", {"ingress": {"chat_template": "{% if %}"}}, "is not valid Jinja"),
        (None, "", {"ingress": {"api_keys_file": "no/keys"}}, "there is no such file"),
        (None, "", {"cache": {"num_blocks": 64, "dtype": "fp8"}}, "cache.dtype is 'fp8'"),
        (None, "", {"draft": {"path": "other"}}, "the draft's vocabulary has 90 tokens and the target's 16"),
    ],
)
def test_a_node_finds_what_could_not_start_there(
    pair: Path, tmp_path: Path, file: str | None, text: str, changes: dict[str, dict[str, object]], reason: str | None
):
    shutil.copytree(pair, tmp_path / "own")
    if file is not None:
        (tmp_path / "own/target" / file).write_text(text)
    args: dict[str, dict[str, object]] = {
        "target": {"path": "target", "dtype": "float32"},
        "draft": {"kind": "model", "path": "draft", "dtype": "float32"},
        "cache": {"num_blocks": 64},
    }
    args |= {name: {**args.get(name, {}), **section} for name, section in changes.items()}
    for section in (args["target"], args["draft"]):
        if (own := tmp_path / "own" / str(section["path"])).is_dir():
            section["path"] = str(own)
    config = parse_config({"model_id": "m", **args})
    found = find(config, unplaced_settings(config), is_on_gpu=False)[1]
    assert found is None if reason is None else reason in (found or "")


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
