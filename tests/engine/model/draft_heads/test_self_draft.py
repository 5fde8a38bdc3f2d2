"""A target that drafts for itself in int4: the text of plain decoding, and clear refusals of what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from engine.config import CacheConfig, EngineConfig, HeadConfig, HeadKind, ModelConfig, Quantization, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.linear import quantized_linear
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.families import PLAIN, SERVED, WINDOW, write_family
from tests.engine.fixtures.native_kernels import needs_float_kernels
from tests.engine.model.test_more_families import small_config

INT4 = HeadConfig(HeadKind.SELF, quantization=Quantization.INT4)
DEMO = Path(__file__).parents[4] / "models" / "demo" / "target"
PROMPTS = ((1, 5, 9, 14), tuple(range(3, 40)), (7,) * 16)


def engine_of(target: Path, head: HeadConfig, quantization: Quantization = Quantization.NONE) -> EngineCore:
    return load_engine(
        EngineConfig(
            ModelConfig(str(target), "float32", quantization=quantization),
            CacheConfig(num_blocks=64),
            speculation=SpeculationConfig(3, methods=(SpeculationMethod.SELF,)),
            head=head,
        )
    )


def texts(engine: EngineCore, wish: SpeculationParams) -> dict[str, tuple[int, ...]]:
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=32)
        engine.add(GenerateRequest(str(index), prompt, sampling, wish))
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            found[chunk.request_id] = found.get(chunk.request_id, ()) + chunk.token_ids
        engine.scheduler.check_integrity()
    return found


@needs_float_kernels
def test_int4_weights_draft_what_the_target_mostly_says_and_change_no_token() -> None:
    engine = engine_of(DEMO, INT4)
    assert texts(engine, SpeculationParams()) == texts(engine, SpeculationParams(enabled=False))
    drafts = engine.stats().drafts
    assert drafts.num_accepted_tokens > 0.6 * drafts.num_draft_tokens > 20


@needs_float_kernels
def test_a_quantized_target_drafts_with_its_own_first_layers() -> None:
    engine = engine_of(DEMO, replace(INT4, num_layers=2), Quantization.INT4)
    assert texts(engine, SpeculationParams()) == texts(engine, SpeculationParams(enabled=False))
    assert engine.stats().drafts.num_draft_tokens > 0


@needs_float_kernels
def test_gemma_drafts_for_itself(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**PLAIN, "hidden_size": 64, "num_hidden_layers": len(kinds), "head_dim": 32}
    write_family(tmp_path, Gemma3TextConfig(**sizes, sliding_window=WINDOW, layer_types=kinds))
    engine = engine_of(tmp_path, replace(INT4, num_layers=2))
    assert texts(engine, SpeculationParams()) == texts(engine, SpeculationParams(enabled=False))
    assert engine.stats().drafts.num_draft_tokens > 20


@needs_float_kernels
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", "gpt_oss", "mimo_v2_flash", "mixtral", "qwen2_moe"])
def test_other_families_and_mixtures_draft_for_themselves(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, SERVED[family]() if family in SERVED else small_config(family))
    engine = engine_of(tmp_path, HeadConfig(HeadKind.SELF, quantization=Quantization.INT8))
    assert texts(engine, SpeculationParams()) == texts(engine, SpeculationParams(enabled=False))
    drafts = engine.stats().drafts
    assert drafts.num_accepted_tokens > 0.5 * drafts.num_draft_tokens > 10


def test_a_family_that_does_not_show_its_layers_is_told_to_draft_with_all(tmp_path: Path) -> None:
    write_family(tmp_path, small_config("ctrl", layer_norm_epsilon=1e-5))
    with pytest.raises(ConfigError, match=r"draft\.num_layers is 1, but model type 'ctrl' .* remove it, and set"):
        engine_of(tmp_path, replace(INT4, num_layers=1))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (HeadConfig(HeadKind.SELF), "draft.quantization 'none' gives it the target's own weights"),
        (HeadConfig(HeadKind.SELF, num_layers=2), "draft.num_layers is 2, but the target has 2 layers"),
    ],
)
def test_a_draft_that_would_be_the_target_is_refused(head: HeadConfig, reason: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=0)
    with pytest.raises(ConfigError, match=reason):
        engine_of(tmp_path, head)


def test_int4_without_kernels_is_refused_with_fewer_layers_as_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, seed=0)
    monkeypatch.setattr(quantized_linear, "can_quantize", lambda _: False)
    with pytest.raises(ConfigError, match=r"set it to 'none' and draft.num_layers to less than 2"):
        engine_of(tmp_path, INT4)
    assert engine_of(tmp_path, HeadConfig(HeadKind.SELF, num_layers=1)).stats().num_running == 0
