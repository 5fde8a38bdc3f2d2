"""Several draft models in deploy.yaml: accepted ones, refusals by name, and their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import DeployConfig, parse_config
from cluster.local.local_service import local_settings
from cluster.placement import NodeResources, plan_pair
from cluster.replica_settings import pair_settings
from cluster.topology import NodeTopology
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint

MODEL = {"kind": "model", "path": "own"}


def config_of(**args: Any) -> DeployConfig:
    return parse_config({"model_id": "m", "target": {"path": "t"}, "draft": MODEL, **args})


def refusal(**args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(**args)
    return str(caught.value)


def test_each_name_is_a_method_that_requests_may_choose() -> None:
    drafts = {"prose": "p", "code": "c"}
    config = config_of(drafts=drafts)
    assert config.offered_methods == ("model", "prose", "code", "hybrid", "suffix", "ngram", "none")
    assert config.to_engine().speculation.methods == config.offered_methods
    first = config_of(drafts=drafts, speculation={"method": "code"})
    assert first.offered_methods[0] == "code"


def test_a_head_may_have_models_beside_it() -> None:
    config = config_of(draft={"kind": "mtp"}, drafts={"prose": "p"})
    assert config.offered_methods == ("mtp", "prose", "hybrid", "suffix", "ngram", "none")
    assert config.draft_models == {"prose": "p"}


def test_what_is_wrong_with_drafts_is_named() -> None:
    prose = {"prose": "p"}
    assert "args.drafts: a list of name and path is now a mapping; write drafts: {code: " in refusal(
        drafts=[{"name": "prose", "path": "p"}]
    )
    assert "args.drafts: the name 'suffix' names another source of drafts" in refusal(drafts={"suffix": "p"})
    assert "the name 'prediction' names another" in refusal(drafts={"prediction": "p"})
    assert "args.drafts: the name 'a-b' is not one of up to 32 letters" in refusal(drafts={"a-b": "p"})
    assert "the name 3 is not one of" in refusal(drafts={3: "p"})
    assert "args.drafts.prose: input should be a valid string, and it is None" in refusal(drafts={"prose": None})
    assert "draft.kind is 'none'; move the first of them to draft" in refusal(draft={"kind": "none"}, drafts=prose)
    assert "speculation.method 'prosa' is not available with draft.kind 'model'; use one of model, prose, hybrid, " in (
        refusal(drafts=prose, speculation={"method": "prosa"})
    )
    assert "'Big Draft' is no method" in refusal(speculation={"method": "Big Draft"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("t", "own", "p"):
        write_checkpoint(root / name, seed=0)
    return root


def served_config(folder: Path, **args: Any) -> DeployConfig:
    return config_of(
        target={"path": str(folder / "t")},
        draft={"kind": "model", "path": str(folder / "own"), "quantization": "int8"},
        drafts={"prose": str(folder / "p")},
        **args,
    )


def test_each_draft_has_a_process_and_threads_of_its_own(folder: Path) -> None:
    config = served_config(folder, speculation={"mode": "async"})
    placement = plan_pair(config, [NodeResources(8)], NodeTopology())
    assert (placement.target.num_threads, placement.draft and placement.draft.num_threads) == (4, 2)
    assert len(placement.bundles) == 4
    settings = pair_settings(config, placement)
    assert list(settings.of_drafts) == ["model", "prose"]
    prose = settings.of_drafts["prose"].draft
    assert prose.model is not None
    assert (prose.model.path, prose.model.quantization, prose.is_ahead) == (str(folder / "p"), "int8", True)
    assert settings.of_drafts["prose"].more_drafts == ()


def test_without_ray_all_drafts_are_in_the_targets_process(folder: Path) -> None:
    settings = local_settings(served_config(folder))
    assert settings.draft_share is None
    assert list(settings.of_drafts) == ["model", "prose"]


@pytest.mark.parametrize(("num_gpus", "parts"), [(2, [0.45, 0.45]), (1, None)])
def test_drafts_divide_the_gpu_that_they_share_by_their_weights(
    folder: Path, num_gpus: int, parts: list[float] | None
) -> None:
    config = served_config(folder, cache={"gpu_memory_utilization": 0.9})
    placement = plan_pair(config, [NodeResources(8, num_gpus)], NodeTopology())
    assert placement.num_gpus == num_gpus
    settings = pair_settings(config, placement)
    shares = [each.draft.cache.gpu_memory_utilization for each in settings.of_drafts.values() if each.draft.cache]
    if parts is not None:
        assert shares == pytest.approx(parts)
        return
    target = settings.engine.cache.gpu_memory_utilization
    assert target is not None
    assert sum(share or 0.0 for share in shares) + target == pytest.approx(0.9)
