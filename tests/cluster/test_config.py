"""deploy.yaml is checked whole at start; its errors name the place, the mistake and the remedy."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.__main__ import main
from cluster.config import parse_config
from cluster.replica_settings import draft_cache_config, draft_part, target_cache_config
from cluster.schema import REMOVED
from engine.config import (
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    ScorerKind,
    StepConfig,
)
from protos.errors import ConfigError
from protos.messages import SpeculationMethod
from tests.repository.generated_tables import key_names

MINIMAL: dict[str, Any] = {"model_id": "demo", "target": {"path": "models/demo/target"}}


def error_of(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | changes)
    return str(caught.value)


def test_two_keys_are_enough():
    config = parse_config(MINIMAL)
    assert (config.draft.kind, config.speculation.verify, config.pair.max_replicas) == ("none", "coupled", 1)


def test_every_key_of_the_public_contract_is_known():
    config = parse_config(
        {
            "model_id": "demo",
            "target": {"path": "t", "dtype": "bfloat16", "tensor_parallel_size": 1, "num_threads": 2},
            "draft": {"kind": "model", "path": "d", "dtype": "float32", "num_threads": 1},
            "speculation": {"num_tokens": 5, "mode": "sync", "verify": "block", "adaptive": False},
            "cache": {"block_size": 32, "memory_gib": 2},
            "scheduler": {"max_num_sequences": 8, "max_tokens_per_step": 512, "max_model_len": 4096},
            "pair": {"autoscaling": {"min_replicas": 1, "max_replicas": 3}},
            "prefill": {"num_replicas": 0, "kv_transport": "object_store"},
            "router": {"policy": "round_robin", "index_timeout_ms": 20},
            "ingress": {"num_replicas": 2, "api_keys_file": "keys", "limits": {"max_body_bytes": 65536}},
            "tune": {"log": "positions", "auto": False},
        }
    )
    assert config.pair.max_replicas == 3


def test_unknown_key_is_named_with_the_nearest_one():
    message = error_of(speculation={"num_token": 4})
    assert "args.speculation.num_token: unknown key; did you mean 'num_tokens'?" in message


def test_a_removed_key_is_refused_by_check_with_what_holds_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert not REMOVED.keys() & key_names()
    args: dict[str, Any] = {"model_id": "demo", "target": {"path": "t"}, "drafts": {"d": "d"}}
    for path in REMOVED:
        *sections, key = path.split(".")
        place = args
        for section in sections:
            place = place.setdefault(section, {"max_replicas": 1} if section == "autoscaling" else {})
        place[key] = 1
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"import_path": "cluster.app:build", "args": args}]}))
    assert main(["check", str(file)]) == 1
    lines = capsys.readouterr().err
    for path, instead in REMOVED.items():
        assert f"args.{path}: removed in 0.3.0: {instead}; delete the line" in lines


def test_unknown_top_level_key_is_named():
    assert "args.drafter: unknown key; did you mean 'draft'?" in error_of(drafter={})


def test_unknown_key_inside_an_optional_section_is_named():
    message = error_of(pair={"autoscaling": {"max_replica": 2, "max_replicas": 2}})
    assert "args.pair.autoscaling.max_replica: unknown key; did you mean 'max_replicas'?" in message


def test_key_unlike_any_other_gets_the_list():
    assert "valid keys here are block_size, memory_gib, num_blocks" in error_of(cache={"zzz": 1})


def test_all_mistakes_are_reported_at_once():
    message = error_of(target={}, cache={"block_size": 0}, scheduler={"max_num_sequences": "many"})
    assert "args.target.path: missing" in message
    assert "args.cache.block_size: " in message
    assert "and it is 0" in message
    assert "args.scheduler.max_num_sequences: " in message
    assert "'many'" in message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("cache", "gpu_memory_utilization", 1.5),
        ("cache", "num_blocks", 1),
        ("scheduler", "max_num_sequences", 0),
        ("scheduler", "max_tokens_per_step", 0),
        ("scheduler", "max_stall_passes", 0.0),
        ("scheduler", "max_model_len", 1),
    ],
)
def test_a_number_out_of_range_is_refused(section: str, key: str, value: float) -> None:
    message = error_of(**{section: {key: value}})
    assert f"args.{section}.{key}: input should be " in message
    assert f"and it is {value}" in message


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"draft": {"kind": "hydra"}}, "args.draft.kind"),
        ({"speculation": {"mode": "eager"}}, "args.speculation.mode"),
        ({"speculation": {"verify": "typical"}}, "args.speculation.verify"),
        ({"router": {"policy": "nearest"}}, "args.router.policy"),
        ({"prefill": {"kv_transport": "nccl"}}, "args.prefill.kv_transport"),
    ],
)
def test_what_this_version_does_not_do_is_refused_and_not_ignored(changes: dict[str, Any], where: str):
    message = error_of(**changes)
    assert f"{where}: " in message
    assert "is not available" in message


def test_the_draft_may_join_a_rank_of_the_target_and_no_other():
    sharded = {"path": "t", "tensor_parallel_size": 2}
    config = parse_config({**MINIMAL, "target": sharded, "draft": {"kind": "model", "path": "d", "gpu": 1}})
    assert (config.target.tensor_parallel_size, config.draft.gpu) == (2, 1)
    message = error_of(target=sharded, draft={"kind": "model", "path": "d", "gpu": 2})
    assert "draft.gpu is 2, and the target's ranks are 0 to 1" in message


def test_a_sharded_target_refuses_drafting_for_itself_determinism_and_quantisation_in_the_engines_words():
    sharded = {"path": "t", "tensor_parallel_size": 2}
    assert parse_config({**MINIMAL, "target": sharded, "draft": {"kind": "mtp"}}).draft.kind == "mtp"
    assert "draft.kind is 'self' and target.tensor_parallel_size is 2; the target's weights draft on" in error_of(
        target=sharded, draft={"kind": "self"}
    )
    assert "target.deterministic is true and target.tensor_parallel_size is 2" in error_of(
        target={**sharded, "deterministic": True}
    )
    refused = error_of(target={**sharded, "quantization": "int8"})
    with pytest.raises(ConfigError) as caught:
        ModelConfig("t", tensor_parallel_size=2, quantization="int8")
    assert f"args.target: {caught.value}" in refused
    with pytest.raises(ConfigError, match="draft on one device"):
        EngineConfig(ModelConfig("t", tensor_parallel_size=2), head=HeadConfig(HeadKind.SELF))


def test_async_drafting_needs_a_draft_model_in_a_process_of_its_own():
    draft, head = {"kind": "model", "path": "d"}, {"kind": "eagle3", "path": "d"}
    for drafts in ({"draft": draft}, {"draft": head, "drafts": {"prose": "p"}}):
        config = parse_config({**MINIMAL, **drafts, "speculation": {"mode": "async"}})
        assert config.to_engine().speculation.can_draft_ahead
    assert "set draft.gpu to 'own'" in error_of(speculation={"mode": "async"}, draft={**draft, "gpu": 0})


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ({"kind": "suffix"}, "drafts come from the committed text, in no time worth hiding"),
        ({"kind": "eagle3", "path": "d"}, "a head would draft from the hidden states that this pass computes"),
        ({"kind": "mtp"}, "a head would draft from the hidden states that this pass computes"),
        ({"kind": "self"}, "the target's own weights would draft, which are verifying"),
        ({"kind": "python", "code": "a:B"}, "your class drafts after each verdict"),
        ({"kind": "none"}, "there are no drafts"),
    ],
    ids=str,
)
def test_a_draft_that_cannot_be_made_ahead_is_told_why(draft: dict[str, Any], reason: str):
    message = error_of(speculation={"mode": "async"}, draft=draft)
    assert reason in message
    assert "set draft.kind to 'model', name a model in drafts, or set the mode to 'sync'" in message


def test_a_target_that_drafts_for_itself_does_so_in_int4_unless_it_is_told_otherwise():
    found = [
        parse_config({**MINIMAL, "draft": {"kind": "self", **more}}).to_engine().head
        for more in ({}, {"num_layers": 4}, {"quantization": "int8"}, {"num_layers": 4, "quantization": "int4"})
    ]
    assert [(head.quantization, head.num_layers) for head in found if head] == [
        ("int4", None),
        ("none", 4),
        ("int8", None),
        ("int4", 4),
    ]
    config = parse_config({**MINIMAL, "draft": {"kind": "self"}})
    assert config.offered_methods == ("self", "hybrid", "suffix", "ngram", "none")
    assert "remove dtype" in error_of(draft={"kind": "self", "dtype": "float32"})
    assert "loads no model of its own; remove path" in error_of(draft={"kind": "self", "path": "d"})
    assert "num_layers is for the kinds 'self'" in error_of(draft={"kind": "model", "path": "d", "num_layers": 2})


def test_heads_with_layers_of_their_own_may_have_fewer_bits():
    for kind in ("eagle3", "peagle", "dflash", "dspark"):
        draft = {"kind": kind, "path": "d", "quantization": "int4"}
        assert parse_config({**MINIMAL, "draft": draft}).to_engine().head == HeadConfig(HeadKind(kind), "d", "int4")
    assert "remove quantization" in error_of(draft={"kind": "medusa", "path": "d", "quantization": "int4"})
    assert "remove quantization" in error_of(draft={"kind": "mtp", "quantization": "int4"})
    assert "remove dtype" in error_of(draft={"kind": "eagle3", "path": "d", "dtype": "float32"})


def test_model_draft_needs_a_path_and_ngram_takes_none():
    assert "needs path" in error_of(draft={"kind": "model"})
    assert "loads no model" in error_of(draft={"kind": "ngram", "path": "d"})


def test_a_head_has_the_files_that_its_kind_needs_and_computes_as_its_target():
    assert "needs path" in error_of(draft={"kind": "medusa"})
    assert parse_config(MINIMAL | {"draft": {"kind": "mtp", "path": "d"}}).draft.path == "d"
    assert "remove dtype" in error_of(draft={"kind": "mtp", "dtype": "float32"})
    offered = parse_config(MINIMAL | {"draft": {"kind": "mtp"}, "speculation": {"tree": {}}}).offered_methods
    assert offered == ("mtp", "hybrid", "suffix", "ngram", "none")


@pytest.mark.parametrize("kind", sorted(set(SpeculationMethod) - {SpeculationMethod.HYBRID, SpeculationMethod.AUTO}))
def test_every_method_but_hybrid_and_auto_is_a_draft_kind(kind: SpeculationMethod):
    has_files = kind.can_branch and kind not in (SpeculationMethod.MTP, SpeculationMethod.SELF)
    path: dict[str, object] = {"path": "d"} if has_files else {}
    if kind is SpeculationMethod.PYTHON:
        path = {"code": "mine:Drafter"}
    assert parse_config({**MINIMAL, "draft": {"kind": str(kind), **path}}).draft.kind is kind
    assert "is not available" in error_of(draft={"kind": "hybrid"})


def test_only_the_kind_for_it_names_code():
    code = {"kind": "python", "code": "mine.drafters:Echo"}
    assert parse_config({**MINIMAL, "draft": code}).offered_methods[0] == "python"
    assert "needs code, a class as 'module:Class'" in error_of(draft={"kind": "python"})
    assert "should match pattern" in error_of(draft={**code, "code": "os.system('x')"})
    assert "code is for kind 'python'" in error_of(draft={"kind": "ngram", "code": "mine:Echo"})
    assert "needs a draft model or head" in error_of(draft=code, speculation={"tree": {}})


def test_a_deployment_offers_its_draft_first_and_what_needs_only_the_text():
    model = {"kind": "model", "path": "d"}
    offered = parse_config(MINIMAL | {"draft": model}).offered_methods
    assert offered == ("model", "hybrid", "suffix", "ngram", "none")
    assert parse_config(MINIMAL | {"draft": {"kind": "ngram"}}).offered_methods == ("ngram", "suffix", "none")
    assert parse_config(MINIMAL).offered_methods == ("none", "suffix", "ngram")


def test_the_default_method_can_be_chosen():
    config = MINIMAL | {"draft": {"kind": "model", "path": "d"}}
    chosen = parse_config(config | {"speculation": {"method": "suffix"}})
    assert chosen.offered_methods == ("suffix", "model", "hybrid", "ngram", "none")


def test_the_method_may_be_left_to_what_is_measured_and_the_pass_bounded_where_lengths_adapt():
    config = MINIMAL | {"draft": {"kind": "model", "path": "d"}}
    chosen = parse_config(config | {"speculation": {"method": "auto"}})
    assert chosen.offered_methods == ("auto", "model", "hybrid", "suffix", "ngram", "none")
    assert chosen.to_engine().speculation.choices == ("model", "hybrid", "suffix", "ngram")
    assert parse_config(config | {"speculation": {"target_itl_ms": 40}}).to_engine().speculation.target_itl_s == 0.04
    assert "set adaptive to true" in error_of(speculation={"method": "auto", "adaptive": False})
    assert "target_itl_ms 40 bounds" in error_of(
        draft=config["draft"], speculation={"target_itl_ms": 40, "adaptive": False}
    )
    parse_config(config | {"speculation": {"target_itl_ms": 40, "method": "auto", "mode": "async"}})


def test_a_method_that_cannot_be_had_is_refused():
    assert "'model' is not available with draft.kind 'ngram'; use one of ngram, suffix, none" in error_of(
        draft={"kind": "ngram"}, speculation={"method": "model"}
    )


def test_the_default_number_of_drafts_keeps_to_the_limit_of_requests():
    assert "speculation.num_tokens is 20; it must be between 0 and speculation.max_num_tokens, 16" in error_of(
        speculation={"num_tokens": 20}
    )
    assert (
        parse_config(MINIMAL | {"speculation": {"num_tokens": 20, "max_num_tokens": 20}}).speculation.num_tokens == 20
    )


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"args.cache.memory_gib: input should be a finite number, and it is inf"):
        parse_config({"model_id": "m", "target": {"path": "t"}, "cache": {"memory_gib": float("inf")}})


@pytest.mark.parametrize(
    ("speculation", "is_adaptive"),
    [
        ({}, True),
        ({"num_tokens": 8}, True),
        ({"adaptive": False}, False),
        ({"mode": "async"}, True),
        ({"mode": "async", "adaptive": False}, False),
        ({"tree": {}}, True),
        ({"mode": "async", "tree": {}}, True),
        ({"mode": "async", "tree": {}, "adaptive": True}, True),
    ],
)
def test_shapes_are_adaptive_unless_the_file_refuses(speculation: dict[str, Any], is_adaptive: bool):
    draft = {"kind": "model", "path": "d"}
    config = parse_config({**MINIMAL, "draft": draft, "speculation": speculation})
    assert config.to_engine().speculation.adaptive is is_adaptive


def test_two_sizes_of_one_cache_are_refused():
    assert "keep one of them" in error_of(cache={"memory_gib": 1.0, "num_blocks": 10})


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_target_s_pool_may_be_quantised_and_the_draft_s_is_not(dtype: str):
    config = parse_config(MINIMAL | {"cache": {"dtype": dtype}})
    assert config.cache.to_engine().dtype == dtype
    assert draft_cache_config(config.cache).dtype == "auto"
    assert "args.cache.dtype: 'fp4' is not available; this version offers auto, int8, fp8" in error_of(
        cache={"dtype": "fp4"}
    )


def test_prefill_has_a_number_or_a_scale_and_none_by_default():
    assert parse_config(MINIMAL).prefill.max_replicas == 0
    assert parse_config({**MINIMAL, "prefill": {"num_replicas": 3}}).prefill.max_replicas == 3
    assert "contradict" in error_of(prefill={"num_replicas": 1, "autoscaling": {"max_replicas": 2}})


def test_a_tree_has_eight_nodes_unless_the_file_gives_a_number() -> None:
    draft = {"kind": "model", "path": "d"}
    default = parse_config({**MINIMAL, "draft": draft, "speculation": {"tree": {}}}).speculation.tree
    assert default is not None
    assert default.num_nodes == 8
    small = parse_config({**MINIMAL, "draft": draft, "speculation": {"tree": {"num_nodes": 3}}}).speculation.tree
    assert small is not None
    assert small.num_nodes == 3


@pytest.mark.parametrize(
    ("speculation", "reason"),
    [
        (
            {"tree": {"num_nodes": 65}},
            "speculation.tree.num_nodes: input should be less than or equal to 64, and it is 65",
        ),
        ({"tree": {"width": 2}}, "args.speculation.tree.width: unknown key"),
        ({"verify": "block", "tree": {}}, "verify 'block' is for chains, and there is a tree"),
        ({"tree": {}}, "set draft.kind to 'model' or 'medusa' or "),
    ],
)
def test_a_tree_that_cannot_be_grown_is_refused(speculation: dict[str, Any], reason: str) -> None:
    assert reason in error_of(speculation=speculation)


def test_reasoning_steps_are_off_unless_the_operator_asks_for_them():
    draft = {"kind": "model", "path": "d"}
    assert parse_config(MINIMAL | {"draft": draft}).speculation.steps is None
    config = parse_config(MINIMAL | {"draft": draft, "speculation": {"steps": {"judge": "likelihood"}}})
    assert config.speculation.steps is not None
    assert config.speculation.steps.to_engine() == StepConfig(judge=ScorerKind.LIKELIHOOD)


@pytest.mark.parametrize(
    ("steps", "others", "words"),
    [
        ({"judge": "draft"}, {}, "'draft' is not available; this version offers rating, likelihood"),
        ({"exact": False}, {}, "unknown key"),
        (
            {},
            {"draft": {"kind": "ngram"}},
            "needs a draft model, which can write a step alone, and draft.kind is 'ngram'",
        ),
        (
            {},
            {"scheduler": {"max_tokens_per_step": 64}},
            "has steps of 64 tokens, and scheduler.max_tok",
        ),
    ],
)
def test_steps_that_cannot_be_are_refused(steps: dict[str, Any], others: dict[str, Any], words: str):
    changes = {"draft": {"kind": "model", "path": "d"}, "speculation": {"steps": steps}, **others}
    assert words in error_of(**changes)


def test_steps_may_be_written_beside_drafts_ahead():
    speculation = {"mode": "async", "steps": {}}
    config = parse_config({**MINIMAL, "draft": {"kind": "model", "path": "d"}, "speculation": speculation})
    assert config.to_engine().speculation.steps is not None
    assert config.to_engine().speculation.can_draft_ahead


def test_a_pool_on_a_gpu_takes_a_share_unless_its_size_is_set():
    share = parse_config(MINIMAL | {"cache": {"gpu_memory_utilization": 0.8}}).cache
    assert share.to_engine().gpu_memory_utilization == 0.8
    assert parse_config(MINIMAL).cache.to_engine().gpu_memory_utilization == 0.9
    assert parse_config(MINIMAL | {"cache": {"memory_gib": 2}}).cache.to_engine().gpu_memory_utilization is None
    assert "its size is set; keep one of them" in error_of(cache={"gpu_memory_utilization": 0.8, "memory_gib": 2})
    assert "less than or equal to 1" in error_of(cache={"gpu_memory_utilization": 1.2})


def test_target_and_draft_on_one_gpu_divide_its_share():
    cache = parse_config(MINIMAL).cache
    part = draft_part(16 << 30, 2 << 30)
    target, draft = target_cache_config(cache, part), draft_cache_config(cache, part)
    assert target.gpu_memory_utilization is not None
    assert draft.gpu_memory_utilization is not None
    assert target.gpu_memory_utilization + draft.gpu_memory_utilization == pytest.approx(0.9)
    assert draft.gpu_memory_utilization == pytest.approx(0.1)
    assert target.counts_own_use
    assert draft.counts_own_use


@pytest.mark.parametrize(("value", "word"), [(False, "off"), (True, "on")])
def test_on_and_off_without_quotes_are_the_words(value: bool, word: str):
    config = parse_config(MINIMAL | {"target": {**MINIMAL["target"], "cuda_graphs": value}})
    assert config.target.cuda_graphs == word


def test_a_log_is_off_unless_it_has_a_folder(tmp_path: Path):
    assert parse_config(MINIMAL).to_engine().log is None
    log = parse_config(MINIMAL | {"tune": {"log": str(tmp_path)}}).to_engine().log
    assert log == str(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file; give a folder" in error_of(tune={"log": str(file)})


def test_alarms_are_answered_where_there_is_a_log_and_a_draft_model():
    log = {"log": "positions", "auto": True}
    draft = {"kind": "model", "path": "a/b"}
    assert parse_config(MINIMAL | {"tune": log, "draft": draft}).tune.auto
    assert parse_config(MINIMAL | {"tune": log, "draft": draft | {"kind": "medusa"}}).tune.auto
    assert "auto needs a log, and no log is set" in error_of(tune={"auto": True})
    assert "draft.kind is 'suffix'" in error_of(tune=log, draft={"kind": "suffix"})
