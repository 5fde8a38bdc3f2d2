"""MiMo, which transformers does not know: its texts, and drafts of all its MTP layers as published."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, HeadConfig, HeadKind, ModelConfig
from engine.model.runner.outline import check_outline
from protos.errors import ConfigError
from tests.engine.fixtures.heads.mtp_heads import PlainMtp, write_mimo
from tests.engine.model.draft_heads.test_head_exactness import (
    SETUPS,
    HeadModels,
    HeadSetup,
    build,
    generate,
    model_runner,
    record,
    requests,
)


@pytest.mark.parametrize(
    ("num_layers", "name"),
    [(1, "batch"), (2, "batch"), (2, "chunked, then prefix hits"), (2, "preempted"), (2, "trees")],
)
def test_all_layers_draft_as_published_and_change_no_token(num_layers: int, name: str, tmp_path: Path) -> None:
    write_mimo(tmp_path / "target", num_layers)
    world, setup = HeadModels(tmp_path), SETUPS[name]
    plain = generate(build(world, None, HeadSetup(num_drafts=0)), requests(setup))
    engine = build(world, HeadKind.MTP, setup)
    assert len(model_runner(engine).kv_layout.layers) == 2 + num_layers
    drafted = record(engine)
    for _ in range(setup.num_repeats):
        assert generate(engine, requests(setup)) == plain
    assert engine.stats().drafts.num_accepted_tokens > 10
    oracle = PlainMtp.of_mimo(tmp_path / "target", num_layers)
    assert drafted
    for each in drafted[:: 1 + len(drafted) // 12]:
        num_checked = 1 if each.draft.parents else len(each.draft.token_ids)
        assert each.draft.token_ids[:num_checked] == oracle.drafts(each.token_ids, num_checked)


def outline(folder: Path, **head: int) -> None:
    check_outline(ModelConfig(str(folder)), CacheConfig(), 64, HeadConfig(HeadKind.MTP, **head))


def test_the_check_reads_it_without_weights_and_names_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write_mimo(folder, 2)
    outline(folder)
    with pytest.raises(ConfigError, match=r"draft\.num_layers is 3, but the target's MTP has 2"):
        outline(folder, num_layers=3)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.mtp_layers.1.input_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the MTP layer of .* cannot be loaded: .* missing .*layers\.1\.eh_proj"):
        outline(folder)
