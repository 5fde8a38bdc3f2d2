"""deploy.yaml is checked whole at start, and its errors say where, what and what instead."""

from typing import Any

import pytest

from actors.settings import DraftKind
from cluster.config import parse_config
from protos.errors import ConfigError

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
            "pair": {"autoscaling": {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 4}},
            "prefill": {"num_replicas": 0},
            "router": {"policy": "load"},
            "ingress": {"num_replicas": 2, "api_keys_file": "keys", "limits": {"max_body_bytes": 65536}},
        }
    )
    assert config.pair.max_replicas == 3


def test_unknown_key_is_named_with_the_nearest_one():
    message = error_of(speculation={"num_token": 4})
    assert "args.speculation.num_token: unknown key; did you mean 'num_tokens'?" in message


def test_unknown_top_level_key_is_named():
    assert "args.drafts: unknown key; did you mean 'draft'?" in error_of(drafts={})


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
    ("changes", "where"),
    [
        ({"draft": {"kind": "eagle3"}}, "args.draft.kind"),
        ({"speculation": {"mode": "async"}}, "args.speculation.mode"),
        ({"speculation": {"verify": "typical"}}, "args.speculation.verify"),
        ({"speculation": {"adaptive": True}}, "args.speculation.adaptive"),
        ({"speculation": {"tree": {"width": 2}}}, "args.speculation.tree"),
        ({"target": {"path": "t", "tensor_parallel_size": 2}}, "args.target.tensor_parallel_size"),
        ({"prefill": {"num_replicas": 1}}, "args.prefill.num_replicas"),
        ({"router": {"policy": "prefix"}}, "args.router.policy"),
    ],
)
def test_what_this_version_does_not_do_is_refused_and_not_ignored(changes: dict[str, Any], where: str):
    message = error_of(**changes)
    assert f"{where}: " in message
    assert "is not available" in message


def test_model_draft_needs_a_path_and_ngram_takes_none():
    assert "needs path" in error_of(draft={"kind": "model"})
    assert "loads no model" in error_of(draft={"kind": "ngram", "path": "d"})


def test_every_draft_kind_of_the_schema_is_one_the_pair_knows():
    for kind in DraftKind:
        path = {"path": "d"} if kind is DraftKind.MODEL else {}
        assert parse_config({**MINIMAL, "draft": {"kind": str(kind), **path}}).draft.kind == kind


def test_the_default_number_of_drafts_keeps_to_the_limit_of_requests():
    assert "num_tokens is 20, more than max_num_tokens, 16" in error_of(speculation={"num_tokens": 20})
    assert (
        parse_config(MINIMAL | {"speculation": {"num_tokens": 20, "max_num_tokens": 20}}).speculation.num_tokens == 20
    )


def test_two_sizes_of_one_cache_are_refused():
    assert "keep one of them" in error_of(cache={"memory_gib": 1.0, "num_blocks": 10})
