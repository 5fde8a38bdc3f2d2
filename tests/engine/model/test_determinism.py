"""A deterministic model gives a token's logits the same bits in every pass; engines give the same text in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxM2Config

from engine.attention.base import LayerOptions
from engine.attention.torch_attention import TorchAttention
from engine.batch.indexing import Index
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_pool import compaction
from engine.kv_cache.pool import KVCache
from engine.model.runner import model_runner
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.text_match.text_matcher import NgramProposer
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams
from tests.engine.fixtures.families import PLAIN, SERVED, VOCAB_SIZE, write_family
from tests.engine.fixtures.native_kernels import needs_float_kernels

DEMO = Path("models/demo")
BLOCK_SIZE = 4
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi", "gpt2", "opt", "gemma4_text", "gpt_neox")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "minimax_m2")
OWN = {"minimax_m2": MiniMaxM2Config(**PLAIN, head_dim=8, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2)}
LENGTH = 60
TEXT = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TABLE = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
OTHER_TABLE = list(range(20, 30))


def load(
    folder: Path,
    dtype: str = "bfloat16",
    *,
    deterministic: bool = True,
    attention: str = "auto",
    graphs: GraphConfig = GraphConfig(),
    quantization: str = "none",
) -> ModelRunner:
    model = ModelConfig(
        str(folder),
        dtype,
        "cpu",
        Quantization(quantization),
        deterministic=deterministic,
        attention=attention,
        graphs=graphs,
    )
    return ModelRunner(model, CacheConfig(num_blocks=32, block_size=BLOCK_SIZE))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in (*FAMILIES, "gemma2", *EXPERTS):
        write_family(root / name, OWN[name] if name in OWN else SERVED[name]())
    return {folder.name: folder for folder in root.iterdir()}


def span(start: int, end: int, tokens: Seq[int] = TEXT, table: Seq[int] = TABLE) -> Span:
    return Span(tokens[start:end], start, table, end - start)


def in_pieces(runner: ModelRunner, ends: Seq[int], *, beside: bool) -> Tensor:
    """Logits of `TEXT` cut at `ends`; `beside`: in a batch with another sequence, before and after it in turn."""
    rows = []
    for index, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        spans = [span(start, end)]
        if beside:
            length = 3 + 7 * index % 30
            spans.insert(index % 2, span(0, length, OTHER, OTHER_TABLE))
        first = 0 if spans[0].block_table is TABLE else len(spans[0].token_ids)
        rows.append(runner.forward(spans)[first : first + end - start])
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), *((family, "bfloat16") for family in FAMILIES)])
def test_logits_have_the_same_bits_however_the_text_is_cut(folders: dict[str, Path], family: str, dtype: str) -> None:
    runner = load(folders[family], dtype)
    expected = runner.forward([span(0, LENGTH)])
    for ends in ((LENGTH,), (30, 35, 36, 41, LENGTH), (17, *range(18, LENGTH + 1)), (1, 3, 59, LENGTH)):
        for beside in (False, True):
            assert torch.equal(in_pieces(runner, ends, beside=beside), expected)


@needs_float_kernels
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_of_experts_have_the_same_bits_however_the_text_is_cut(
    folders: dict[str, Path], family: str, quantization: str
) -> None:
    runner = load(folders[family], "float32", quantization=quantization)
    expected = runner.forward([span(0, LENGTH)])
    for ends in ((30, 35, 36, 41, LENGTH), (17, *range(18, LENGTH + 1))):
        for beside in (False, True):
            assert torch.equal(in_pieces(runner, ends, beside=beside), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond a span divide by nothing; they are not stored
@pytest.mark.usefixtures("dots_without_places")
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_logits_by_the_kernel_for_gpus_have_the_same_bits_however_the_text_is_cut(
    folders: dict[str, Path], family: str
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    runner = load(folders[family], attention="triton", graphs=GraphConfig(GraphKind.EAGER, batches=(2,)))
    expected = runner.forward([span(0, LENGTH)])
    for ends in ((30, 35, 36, 41, LENGTH), (56, 57, 58, LENGTH)):
        assert torch.equal(in_pieces(runner, ends, beside=True), expected)


def test_the_kernel_for_gpus_refuses_trees(folders: dict[str, Path]) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    with pytest.raises(ConfigError, match=r"target\.deterministic is true and speculation\.tree is set"):
        load(folders["llama"], attention="triton", graphs=GraphConfig(has_trees=True))


def test_logits_of_a_model_that_is_not_deterministic_depend_on_the_cut(folders: dict[str, Path]) -> None:
    runner = load(folders["llama"], deterministic=False, attention="torch")
    assert not torch.equal(in_pieces(runner, range(1, LENGTH + 1), beside=False), runner.forward([span(0, LENGTH)]))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_of_long_contexts_have_the_same_bits_across_units_of_keys(tmp_path: Path, family: str) -> None:
    config = SERVED[family]()
    config.max_position_embeddings = 2048
    if family == "mistral":
        config.sliding_window = 700
    write_family(tmp_path, config)
    model = ModelConfig(str(tmp_path), "bfloat16", "cpu", deterministic=True)
    runner = ModelRunner(model, CacheConfig(num_blocks=80, block_size=24))
    text = torch.randint(3, VOCAB_SIZE, (1300,), generator=torch.Generator().manual_seed(4)).tolist()
    table = list(range(79, 19, -1))
    expected = runner.forward([span(0, 1300, text, table)])
    for start, end in ((0, 500), (500, 509), (509, 514), (514, 1020), (1020, 1027), (1027, 1028), (1028, 1300)):
        assert torch.equal(runner.forward([span(start, end, text, table)]), expected[start:end])


def test_a_node_of_a_tree_has_the_bits_that_its_path_has_as_a_chain(folders: dict[str, Path]) -> None:
    runner = load(folders["llama"])
    runner.forward([span(0, 20)])
    tree = Span([TEXT[20], 7, TEXT[21], 9, TEXT[22]], 20, TABLE, 5, (-1, 0, 0, 1, 2))
    as_tree = runner.forward([tree])[[0, 2, 4]]
    move = compaction(TABLE, 20, (0, 2, 4))
    assert move is not None
    runner.move([move])
    after_tree = runner.forward([span(23, 30)])
    expected = runner.forward([span(0, 30)])
    assert torch.equal(as_tree, expected[20:23])
    assert torch.equal(after_tree, expected[23:])


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma2", "softcap"), ("gpt_oss", "expert"), ("mixtral", "expert"), ("deepseek_v3", "expert")],
)
def test_a_family_that_cannot_be_made_deterministic_is_refused(
    folders: dict[str, Path], family: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"target.deterministic is true.*{reason}.*set it to false"):
        load(folders[family], "float32", attention="torch")


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_our_own_kernel_makes_models_with_softcaps_deterministic(folders: dict[str, Path], dtype: str) -> None:
    runner = load(folders["gemma2"], dtype)
    expected = runner.forward([span(0, LENGTH)])
    for ends in ((30, 35, 36, 41, LENGTH), (17, *range(18, LENGTH + 1))):
        assert torch.equal(in_pieces(runner, ends, beside=True), expected)


class _CompanionableAttention:
    """A row's result changes if the batch has a second span."""

    def __init__(self, spans: Seq[Span], cache: KVCache, slots: Index) -> None:
        self._pass = TorchAttention(spans, cache, slots)
        self._factor = 1.0 + len(spans) / 128

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        return self._factor * self._pass.attend(layer, query, key, value, options)


def test_a_model_that_fails_the_determinism_check_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_, **__: _CompanionableAttention)
    with pytest.raises(ConfigError, match="gives the same tokens other logits than"):
        load(folders["llama"])


def test_deterministic_and_other_engines_do_not_exchange_blocks(folders: dict[str, Path]) -> None:
    alike, plain = load(folders["llama"]), load(folders["llama"], deterministic=False)
    difference = plain.kv_layout.difference(alike.kv_layout)
    assert difference is not None
    assert f"deterministic on {torch.get_num_threads()} threads" in difference


def demo_core(
    proposer: Proposer | None, *, max_sequences: int = 8, chunk: int = 2048, tree: bool = False
) -> EngineCore:
    model = ModelConfig(str(DEMO / "target"), "bfloat16", "cpu", deterministic=True)
    scheduler = SchedulerConfig(max_num_sequences=max_sequences, max_tokens_per_step=chunk)
    speculation = SpeculationConfig(4, tree_nodes=8 if tree else 0)
    return load_engine(EngineConfig(model, CacheConfig(num_blocks=256), scheduler, speculation), proposer)


def model_proposer() -> ModelProposer:
    draft = ModelConfig(str(DEMO / "draft"), "bfloat16", "cpu")
    return ModelProposer.from_config(draft, CacheConfig(num_blocks=256), SchedulerConfig())


def texts(core: EngineCore) -> dict[str, list[int]]:
    """Six requests at three temperatures; they share a prefix, so that later ones hit the cache of earlier ones."""
    prefix = tuple(range(300, 340))
    for index in range(6):
        prompt = (*prefix, *range(100 * index + 1, 100 * index + 20 + index))
        sampling = SamplingParams(seed=index, temperature=(0.0, 0.7, 1.0)[index % 3], max_tokens=12)
        core.add(GenerateRequest(str(index), prompt, sampling))
    text: dict[str, list[int]] = {str(index): [] for index in range(6)}
    while core.has_work:
        for chunk in core.step():
            text[chunk.request_id] += chunk.token_ids
    return text


def test_in_bfloat16_speculation_changes_no_token() -> None:
    expected = texts(demo_core(None))
    assert texts(demo_core(None, max_sequences=2, chunk=16)) == expected
    assert texts(demo_core(NgramProposer())) == expected
    core = demo_core(model_proposer())
    assert texts(core) == expected
    assert core.stats().drafts.num_accepted_tokens > 20
    assert texts(demo_core(model_proposer(), tree=True)) == expected
