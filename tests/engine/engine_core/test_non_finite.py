"""A model overflows on one token: its request ends with an error, and no other request is affected."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    KVDtype,
    ModelConfig,
    ModelDtype,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.native.library import Instructions, native_library
from engine.proposer.draft_model.loader import load_drafter
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SpeculationMethod,
    SpeculationParams,
    TokenChunk,
    VerifyMode,
)
from tests.engine.fixtures.checkpoints import write_checkpoint, write_overflowing
from tests.engine.fixtures.drafted_texts import run, texts
from tests.engine.fixtures.fakes import ScriptedProposer

POISON, VOCAB_SIZE = 77, 128
FACTORS = {"float16": 3e4, "float32": 1e38, "bfloat16": 1e38}
CLEAN, POISONED = (5, 9, 14, 20, 31), (5, 9, POISON, 20, 31)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Four layers of a Llama each, whose values overflow the dtype after `POISON`."""

    @cache
    def write(dtype: str, factor: float | None = None) -> Path:
        folder = tmp_path_factory.mktemp(dtype)
        write_overflowing(folder, dtype, FACTORS[dtype] if factor is None else factor, POISON, VOCAB_SIZE)
        return folder

    return write


def new_core(
    folder: Path,
    dtype: str,
    attention: str = "auto",
    proposer: ScriptedProposer | None = None,
    *,
    kv: KVDtype = KVDtype.AUTO,
    quantization: Quantization = Quantization.NONE,
    tree_nodes: int = 0,
    max_tokens_per_step: int = 2048,
) -> EngineCore:
    model = ModelConfig(str(folder), dtype=dtype, device="cpu", attention=attention, quantization=quantization)
    cache_config = CacheConfig(num_blocks=24, dtype=kv)
    methods = (SpeculationMethod.MODEL, SpeculationMethod.NONE)
    speculation = SpeculationConfig(5, adaptive=False, methods=methods, tree_nodes=tree_nodes)
    scheduler = SchedulerConfig(max_tokens_per_step=max_tokens_per_step)
    return load_engine(EngineConfig(model, cache_config, scheduler, speculation), proposer)


def request(
    name: str, prompt: Iterable[int] = CLEAN, *, speculation: SpeculationParams | None = None, **sampling: object
) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(name, tuple(prompt), params, speculation or SpeculationParams())


def is_faulty(chunks: Seq[TokenChunk]) -> bool:
    (chunk,) = chunks
    return chunk.finish_reason is FinishReason.NON_FINITE and not chunk.token_ids and "finite" in (chunk.error or "")


class PoisonousTrees(ScriptedProposer):
    """Proposes the tokens of `draft_of`, with the poison as a sibling of each and after the last."""

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        drafts = []
        for scheduled in batch:
            token_ids, parents, parent = list[int](), list[int](), -1
            for token_id in self._draft_of(scheduled.sequence, 2):
                token_ids += [POISON, token_id]
                parents += [parent, parent]
                parent = len(token_ids) - 1
            drafts.append(Draft((*token_ids, POISON), (), (*parents, parent)))
        return drafts


BACKENDS = [
    pytest.param("float16", "torch", KVDtype.AUTO, id="float16-torch"),
    pytest.param("float16", "torch", KVDtype.INT8, id="float16-torch-int8"),
    pytest.param("float32", "torch", KVDtype.AUTO, id="float32-torch"),
    pytest.param("bfloat16", "torch", KVDtype.AUTO, id="bfloat16-torch"),
]
if native_library(Instructions.AVX2) is not None:
    BACKENDS += [
        pytest.param("float32", "native", KVDtype.AUTO, id="float32-native"),
        pytest.param("float32", "native", KVDtype.INT8, id="float32-native-int8"),
    ]
if native_library(Instructions.AVX512) is not None:
    BACKENDS += [
        pytest.param("bfloat16", "native", KVDtype.AUTO, id="bfloat16-native"),
        pytest.param("bfloat16", "native", KVDtype.INT8, id="bfloat16-native-int8"),
    ]
ALL_BACKENDS = pytest.mark.parametrize(("dtype", "attention", "kv"), BACKENDS)


@ALL_BACKENDS
def test_a_faulty_request_ends_alone(
    folders: Callable[..., Path], dtype: str, attention: str, kv: KVDtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Other sequences in its batch, and later users of its blocks, get the same text."""
    folder = folders(dtype)
    others = [request(str(index), (*CLEAN, index)) for index in range(1, 5)]
    expected = texts(run(new_core(folder, dtype, attention, kv=kv), others))
    core = new_core(folder, dtype, attention, kv=kv)
    with caplog.at_level(logging.WARNING):
        chunks = run(core, [request("poisoned", POISONED * 20), *others])
    assert is_faulty(chunks.pop("poisoned"))
    assert texts(chunks) == expected
    assert texts(run(core, others)) == expected
    assert core.stats().num_non_finite_requests == 1
    assert core.blocks.num_free_blocks == core.blocks.num_blocks
    (said,) = [text for record in caplog.records if "finite" in (text := record.getMessage())]
    assert said.startswith("request poisoned: ")
    assert ("set target.dtype to bfloat16 or float32" in said) is (dtype == "float16")


@ALL_BACKENDS
@pytest.mark.parametrize("verify", VerifyMode)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rejected_draft_that_overflows_changes_no_token(
    folders: Callable[..., Path], dtype: str, attention: str, kv: KVDtype, verify: VerifyMode, temperature: float
) -> None:
    folder = folders(dtype)
    params = SpeculationParams(verify=verify)
    asked = [request(str(seed), (*CLEAN, seed), seed=seed, temperature=temperature) for seed in range(1, 4)]
    plain = texts(run(new_core(folder, dtype, attention, kv=kv), asked))

    def draft_of(sequence: Sequence, max_tokens: int) -> list[int]:
        told = plain[sequence.request_id][sequence.num_output_tokens :][:1]
        return [*told, POISON, POISON, 3, POISON][:max_tokens]

    core = new_core(folder, dtype, attention, ScriptedProposer(draft_of), kv=kv)
    drafted = [
        request(
            each.request_id, each.prompt_token_ids, seed=each.sampling.seed, temperature=temperature, speculation=params
        )
        for each in asked
    ]
    chunks = run(core, drafted)
    assert core.stats().drafts.num_draft_tokens > 0
    assert core.stats().num_non_finite_requests == 0
    if verify is VerifyMode.COUPLED or temperature == 0.0:
        assert texts(chunks) == plain


@ALL_BACKENDS
def test_branches_that_overflow_change_no_token(
    folders: Callable[..., Path], dtype: str, attention: str, kv: KVDtype
) -> None:
    folder = folders(dtype)
    asked = [request(str(seed), (*CLEAN, seed), seed=seed, temperature=1.0) for seed in range(1, 4)]
    plain = texts(run(new_core(folder, dtype, attention, kv=kv), asked))
    proposer = PoisonousTrees(lambda sequence, count: plain[sequence.request_id][sequence.num_output_tokens :][:count])
    core = new_core(folder, dtype, attention, proposer, kv=kv, tree_nodes=5)
    assert texts(run(core, asked)) == plain
    assert core.stats().drafts.num_accepted_tokens > 20


@pytest.mark.parametrize("verify", VerifyMode)
def test_a_sequence_whose_own_token_overflows_keeps_what_came_before(
    folders: Callable[..., Path], verify: VerifyMode
) -> None:
    """The poison is accepted as a draft here: tokens up to it are committed, and the end is the same without drafts."""
    folder = folders("float32")
    endings = []
    for draft in (list[int](), [POISON], [POISON, POISON, 3]):
        core = new_core(folder, "float32", "torch", ScriptedProposer(partial(_head, draft)))
        asked = request("a", speculation=SpeculationParams(verify=verify), logit_bias=((POISON, 1000.0),))
        chunks = run(core, [asked])["a"]
        endings.append(([token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish_reason))
    assert endings == [([POISON], FinishReason.NON_FINITE)] * 3


def _head(draft: list[int], sequence: Sequence, count: int) -> list[int]:
    return draft[:count]


@pytest.mark.parametrize("max_tokens_per_step", [2048, 20])
def test_blocks_of_a_faulty_request_are_not_found_again(folders: Callable[..., Path], max_tokens_per_step: int) -> None:
    """Of a prompt that is read in several steps, blocks are published before its last row is found faulty."""
    core = new_core(folders("float16"), "float16", max_tokens_per_step=max_tokens_per_step)
    run(core, [request("clean", CLEAN * 8)])
    clean = core.blocks.cached_keys
    assert clean
    chunks = run(core, [request(name, (*CLEAN * 8, *POISONED * 20)) for name in "abc"])
    assert all(is_faulty(each) for each in chunks.values())
    assert core.blocks.cached_keys == clean
    core.blocks.check_integrity([])
    assert core.blocks.num_free_blocks == core.blocks.num_blocks


def test_logprobs_of_a_prompt_that_overflows_are_an_error(folders: Callable[..., Path]) -> None:
    chunks = run(
        new_core(folders("float16"), "float16"), [request("a", POISONED * 20, num_prompt_logprobs=1, num_logprobs=1)]
    )
    assert is_faulty(chunks["a"])


@pytest.mark.skipif(
    native_library(Instructions.AVX2) is None, reason="no native kernels here: not compiled, or no AVX2"
)
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_quantized_products_keep_what_is_not_finite(quantization: Quantization, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=0)
    core = new_core(tmp_path, "float32", quantization=quantization)
    with torch.no_grad():
        core.runner._model.decoder._embedding[33] = math.nan  # type: ignore[attr-defined]
    chunks = run(core, [request("bad", (5, 33, 20)), request("good", (5, 9, 20), stop_token_ids=())])
    assert is_faulty(chunks["bad"])
    assert texts(chunks)["good"]


def test_a_bias_of_infinity_in_masks_is_no_fault(folders: Callable[..., Path]) -> None:
    """A row that sampling parameters leave with one token, or scores without a bound, has finite logits."""
    core = new_core(folders("float16"), "float16")
    chunks = run(core, [request("a", logit_bias=((3, 1e38), (4, -1e38)), max_tokens=4)])
    assert texts(chunks)["a"] == [3] * 4


@pytest.mark.parametrize("verify", VerifyMode)
@pytest.mark.parametrize("tree_nodes", [0, 5], ids=["chain", "tree"])
def test_a_draft_model_that_overflows_drafts_nothing_and_is_counted(
    folders: Callable[..., Path], tree_nodes: int, verify: VerifyMode
) -> None:
    target, draft = folders("float32", 0.4), folders("float32")
    config = ModelConfig(str(draft), dtype=ModelDtype.FLOAT32, device="cpu")
    proposer, _ = load_drafter(config, CacheConfig(num_blocks=24), SchedulerConfig(), str(target))
    asked = [
        request(name, prompt, temperature=1.0, seed=3, speculation=SpeculationParams(verify=verify))
        for name, prompt in (("sound", CLEAN), ("poisoned", POISONED))
    ]
    plain = texts(run(new_core(target, "float32"), asked))
    core = new_core(target, "float32", "auto", proposer, tree_nodes=tree_nodes)
    chunks = run(core, asked)
    if verify is VerifyMode.COUPLED:
        assert texts(chunks) == plain
    assert {name: len(of) for name, of in texts(chunks).items()} == {"sound": 24, "poisoned": 24}
    drafts = core.stats().drafts
    assert drafts.num_draft_tokens > 0
    assert drafts.num_invalid_tokens > 10
