"""MTP heads in files of their own: the published function, exact in every batching, or refused by name."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import HeadConfig, HeadKind
from engine.model.runner.tensor_parallel_runner import TensorParallelRunner
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.heads.heads_fixtures import refused
from tests.engine.fixtures.heads.mtp_heads import PlainMtp, write_mtp, write_qwen3
from tests.engine.fixtures.in_process_transport import InProcessTransport
from tests.engine.fixtures.pairs.forked_ranks import fork_ranks
from tests.engine.model.draft_heads.test_head_exactness import (
    SETUPS,
    TREE,
    HeadModels,
    HeadSetup,
    build,
    changed,
    generate,
    model_runner,
    record,
    requests,
)
from tests.engine.recurrent.test_hybrid_heads import write_target

HYBRIDS = ("qwen3_next", "qwen3_5_text")
Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HeadModels:
    root = tmp_path_factory.mktemp("qwen3")
    write_qwen3(root / "target")
    write_mtp(root / "head", root / "target")
    return HeadModels(root)


def head_of(world: HeadModels) -> HeadConfig:
    return HeadConfig(HeadKind.MTP, str(world.root / "head"))


def plain_texts(world: HeadModels) -> Texts:
    texts: Texts = {}
    engine = build(world, None, HeadSetup(num_drafts=0))
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
    return texts


@pytest.fixture(scope="module")
def reference(world: HeadModels) -> Texts:
    return plain_texts(world)


def check_drafts(world: HeadModels, drafted: list[Any]) -> None:
    oracle = PlainMtp.of_head(world.target, world.root / "head")
    assert drafted
    for each in drafted[:: 1 + len(drafted) // 12]:
        num_checked = 1 if each.draft.parents else len(each.draft.token_ids)
        assert each.draft.token_ids[:num_checked] == oracle.drafts(each.token_ids, num_checked)


@pytest.mark.parametrize("name", ["batch", "chunked, then prefix hits", "preempted", "trees"])
def test_a_head_of_its_own_files_changes_no_token(name: str, world: HeadModels, reference: Texts) -> None:
    setup = SETUPS[name]
    engine = build(world, head_of(world), setup)
    drafted = record(engine)
    for _ in range(setup.num_repeats):
        assert generate(engine, requests(setup)) == reference
    stats = engine.stats()
    assert setup.adaptive or stats.drafts.num_accepted_tokens > 5
    assert (stats.num_preemptions > 0) is (setup.num_blocks < 20)
    check_drafts(world, drafted)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_head_of_a_hybrid_computes_the_published_function(family: str, tmp_path: Path) -> None:
    write_target(tmp_path / "target", family, has_mtp=True)
    write_mtp(tmp_path / "head", tmp_path / "target")
    world = HeadModels(tmp_path)
    setup = HeadSetup(max_tokens_per_step=13, num_repeats=2)
    engine = build(world, head_of(world), setup)
    drafted = record(engine)
    for _ in range(setup.num_repeats):
        assert generate(engine, requests(setup)) == plain_texts(world)
    assert engine.stats().num_prefix_hit_tokens > 0
    assert engine.stats().drafts.num_accepted_tokens > 5
    check_drafts(world, drafted)


def test_its_drafts_follow_a_prompt_that_was_read_elsewhere_and_a_target_on_two_ranks(
    world: HeadModels, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = build(world, head_of(world), HeadSetup(num_drafts=0, max_tokens_per_step=16))
    engine = build(world, head_of(world), HeadSetup(), InProcessTransport(remote))
    texts: Texts = {}
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
    assert texts == reference
    assert engine.stats().remote.num_tokens > 50
    assert engine.stats().drafts.num_accepted_tokens > 5
    fork_ranks(monkeypatch)
    sharded = build(world, head_of(world), HeadSetup(tree_nodes=TREE, num_drafts=4, num_blocks=16, num_ranks=2))
    try:
        drafted = record(sharded)
        assert generate(sharded, requests(HeadSetup())) == reference
        assert sharded.stats().num_preemptions > 0
        check_drafts(world, drafted)
    finally:
        assert isinstance(sharded.runner, TensorParallelRunner)
        sharded.runner.close()


def test_it_is_exchanged_while_it_drafts(world: HeadModels, reference: Texts, tmp_path: Path) -> None:
    engine = build(world, head_of(world), HeadSetup(tree_nodes=TREE))
    runner, steps = model_runner(engine), count(1)
    heads = [runner.head, runner.load_head(str(changed(head_of(world), tmp_path / "other", -0.7).path))]

    def exchange() -> None:
        if next(steps) % 3 == 0:
            heads.reverse()
            assert heads[0] is not None
            engine.exchange_head(heads[0])

    assert generate(engine, requests(HeadSetup()), exchange) == reference


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculators_model_type": "eagle3"}, "kind 'eagle3', and draft.kind is 'mtp'; set it to 'eagle3'"),
        ({"speculators_model_type": "mtp9"}, "type 'mtp9', which is not read; read are 'eagle3', 'peagle', 'dflash'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 in config.json; an MTP head in files of its own"),
        ({"transformer_layer_config": None}, "has no transformer_layer_config"),
        ({"hidden_size": 64}, "a target with hidden_size 64, but the target's is 32"),
        ({"vocab_size": 99}, "a target with vocab_size 99, but the target's is 64"),
        ({"rope_theta": 5e5}, "a target with rope_parameters {'rope_theta': 500000.0"),
        ({"model_type": "llama"}, "a layer of model_type 'llama', and the target's is 'qwen3'; read are MTP heads of"),
        (
            {"speculators_config": {"proposal_methods": [{"accept_tolerance": 0.2}]}},
            "asks for lossy acceptance: accept_tolerance is 0.2",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], said: str, world: HeadModels, tmp_path: Path
) -> None:
    top = ("speculators", "num_nextn", "transformer")
    own = {name: value for name, value in config.items() if name.startswith(top)}
    folder = write_mtp(tmp_path / "head", world.target, **own)
    if len(own) < len(config):
        file = folder / "config.json"
        written = json.loads(file.read_text())
        layer = written["transformer_layer_config"]
        if "rope_theta" in config:
            layer.pop("rope_parameters", None)
        written["transformer_layer_config"] = layer | config
        file.write_text(json.dumps(written))
    assert said in refused(world.target, folder, HeadKind.MTP)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mtp_layers.0.input_proj.weight", "is incomplete: tensor 'mtp_layers.0.input_proj.weight' of shape [32, 64]"),
        ("mtp_layers.0.self_attn.q_norm.weight", "'mtp_layers.0.self_attn.q_norm.weight' of shape [8] is missing"),
        (None, "has 1 unknown tensors, 'masked_embedding.centroids.weight' among them"),
    ],
)
def test_a_file_with_missing_or_unknown_tensors_is_refused_by_name(
    name: str | None, said: str, world: HeadModels, tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path / "head", world.target)
    tensors = load_file(folder / "model.safetensors")
    if name is None:
        tensors["masked_embedding.centroids.weight"] = torch.zeros(4, 32)
    else:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    assert said in refused(world.target, folder, HeadKind.MTP)


def test_a_head_for_another_family_and_another_kind_are_refused_by_name(world: HeadModels, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama", seed=0)
    assert "model_type 'qwen3', and the target's is 'llama'" in refused(
        tmp_path / "llama", world.root / "head", HeadKind.MTP
    )
    said = refused(world.target, world.root / "head", HeadKind.DFLASH)
    assert "is a head of kind 'mtp', and draft.kind is 'dflash'; set it to 'mtp'" in said
