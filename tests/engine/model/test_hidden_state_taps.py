"""Features of a pass are the hidden states that transformers reports, in every decoder."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, HeadConfig, HeadKind, ModelConfig
from engine.model.forward_batch import ForwardBatch, HiddenStateTaps
from engine.model.paged_model import PagedModel
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.fixtures.heads.heads_fixtures import write_llama_with_mtp, write_medusa
from tests.engine.model.test_more_families import small_config

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9]
OTHERS = [2, 71, 82, 8]


def features_of(model: PagedModel, spans: list[Span]) -> Tensor:
    """Of the last of two passes: the first computes the beginning of IDS."""
    cache = model.new_cache(2, 16)
    model.forward(ForwardBatch.of([Span(IDS[:4], 0, [0], 0)], cache))
    model.forward(ForwardBatch.of(spans, cache))
    assert model.features is not None
    return model.features


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "deepseek_v3", "opt"])
def test_features_are_the_hidden_states_of_all_rows(family: str, tmp_path: Path) -> None:
    stock = write_family(tmp_path, SERVED[family]())
    expected = []
    with torch.no_grad():
        for ids, start in ((IDS, 4), (OTHERS, 0)):
            states = stock(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
            expected.append(torch.cat([states[place][0, start:] for place in (0, 1, -1)], dim=-1))
    model = PagedModel(copy.deepcopy(stock), taps=HiddenStateTaps((0, 1), is_final=True))
    found = features_of(model, [Span(IDS[4:], 4, [0], 1), Span(OTHERS, 0, [1], 0)])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_tapped_output_of_the_last_layer_lies_before_the_norm(family: str, tmp_path: Path) -> None:
    stock = write_family(tmp_path, SERVED[family]())
    norm = copy.deepcopy(stock.model.norm)
    model = PagedModel(stock, taps=HiddenStateTaps((2,), is_final=True))
    raw, final = features_of(model, [Span(IDS[4:], 4, [0], 1)]).chunk(2, dim=-1)
    assert not torch.allclose(raw, final)
    torch.testing.assert_close(norm(raw), final, atol=1e-4, rtol=1e-4)


def test_taps_change_no_logit_and_a_model_without_them_keeps_no_features(tmp_path: Path) -> None:
    stock = write_family(tmp_path, SERVED["llama"]())
    logits = []
    for taps in (HiddenStateTaps(), HiddenStateTaps((1,)), HiddenStateTaps(is_final=True)):
        model = PagedModel(copy.deepcopy(stock), taps=taps)
        logits.append(model.forward(ForwardBatch.of([Span(IDS, 0, [0], 3)], model.new_cache(1, 16))))
        assert (model.features is None) is (not taps)
    # With taps all rows of the last layer go on, and torch's products may round by the number of rows.
    for tapped in logits[1:]:
        torch.testing.assert_close(tapped, logits[0], atol=1e-6, rtol=1e-5)


def test_a_family_whose_layers_cannot_be_tapped_is_refused(tmp_path: Path) -> None:
    stock = write_family(tmp_path, small_config("ctrl", layer_norm_epsilon=1e-5))
    with pytest.raises(ConfigError, match="its layers cannot be tapped for a head"):
        PagedModel(stock, taps=HiddenStateTaps((1,)))


# ---- a runner's use of taps ---------------------------------------------------------------------------------------

CACHE = CacheConfig(16, num_blocks=4, memory_bytes=None)


def runner(folder: Path, head: HeadConfig) -> ModelRunner:
    return ModelRunner(ModelConfig(str(folder), dtype="float32"), CACHE, head=head)


def test_a_target_without_an_mtp_layer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", seed=0)
    with pytest.raises(ConfigError, match=r"has no num_nextn_predict_layers in its config.json"):
        runner(tmp_path / "plain", HeadConfig(HeadKind.MTP))


def test_an_mtp_layer_that_is_configured_and_missing_is_refused(tmp_path: Path) -> None:
    write_llama_with_mtp(tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight for name, weight in weights.items() if "layers.2." not in name}, file)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*missing"):
        runner(tmp_path / "target", HeadConfig(HeadKind.MTP))


def test_all_mtp_layers_draft_or_as_many_as_are_asked_for(tmp_path: Path) -> None:
    write_llama_with_mtp(tmp_path / "target", num_mtp_layers=2)
    for num_layers, found in ((None, 2), (1, 1), (2, 2)):
        head = HeadConfig(HeadKind.MTP, num_layers=num_layers)
        assert len(runner(tmp_path / "target", head).kv_layout.layers) == 2 + found
    with pytest.raises(ConfigError, match=r"draft.num_layers is 3, but the target's MTP has 2"):
        runner(tmp_path / "target", HeadConfig(HeadKind.MTP, num_layers=3))


def test_a_heads_kv_is_paid_for_from_the_same_budget(tmp_path: Path) -> None:
    write_llama_with_mtp(tmp_path / "target")
    write_medusa(tmp_path / "medusa", tmp_path / "target")
    plain = ModelRunner(ModelConfig(str(tmp_path / "target"), dtype="float32"), CACHE)
    assert runner(tmp_path / "target", HeadConfig(HeadKind.MTP)).bytes_per_block == 1.5 * plain.bytes_per_block
    medusa = runner(tmp_path / "target", HeadConfig(HeadKind.MEDUSA, str(tmp_path / "medusa")))
    assert medusa.bytes_per_block == plain.bytes_per_block


def test_a_head_needs_a_path(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", seed=0)
    with pytest.raises(ConfigError, match=r"needs draft.path"):
        runner(tmp_path / "plain", HeadConfig(HeadKind.MEDUSA))
