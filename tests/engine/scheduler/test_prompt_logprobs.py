"""A prompt's log-probabilities equal the model's, for any way of computing the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.text_match.text_matcher import NgramProposer
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from tests.engine.fixtures.checkpoints import write_checkpoint

PROMPT = tuple((7 * index) % 60 + 1 for index in range(45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scored") / "target"
    write_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [float(logprobs[index, token_id]) for index, token_id in enumerate(PROMPT[1:])]


def engine(folder: Path, *, num_blocks: int = 64, max_tokens_per_step: int = 2048) -> EngineCore:
    return load_engine(
        EngineConfig(
            ModelConfig(str(folder), "float32"),
            CacheConfig(block_size=4, num_blocks=num_blocks),
            SchedulerConfig(max_tokens_per_step=max_tokens_per_step),
            SpeculationConfig(3),
        ),
        NgramProposer(),
    )


def scoring(
    name: str, *, max_tokens: int = 3, num_prompt_logprobs: int | None = 2, priority: int = 0
) -> GenerateRequest:
    sampling = SamplingParams(seed=len(name), max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs)
    return GenerateRequest(name, PROMPT, sampling)


def run(core: EngineCore) -> list[TokenChunk]:
    chunks = []
    while core.has_work:
        chunks += core.step()
        core.scheduler.check_integrity()
    return chunks


def values(chunk: TokenChunk) -> list[float]:
    assert [scored.token_id for scored in chunk.prompt_logprobs] == list(PROMPT[1:])
    return [scored.logprob for scored in chunk.prompt_logprobs]


@pytest.mark.parametrize("max_tokens_per_step", [7, 2048])
def test_prompt_logprobs_are_the_models_own_in_chunks_and_whole(
    folder: Path, expected: list[float], max_tokens_per_step: int
) -> None:
    core = engine(folder, max_tokens_per_step=max_tokens_per_step)
    core.add(scoring("a"))
    first, *rest = run(core)
    assert values(first) == pytest.approx(expected, abs=1e-4)
    assert all(not chunk.prompt_logprobs for chunk in rest)
    assert all(scored.top[0][1] >= scored.logprob and len(scored.top) == 2 for scored in first.prompt_logprobs)


def test_a_cached_prefix_is_computed_again_and_the_next_request_still_hits_it(
    folder: Path, expected: list[float]
) -> None:
    core = engine(folder)
    core.add(scoring("warm", num_prompt_logprobs=None))
    run(core)
    core.add(scoring("scored"))
    chunk = run(core)[0]
    assert (chunk.num_cached_tokens, values(chunk)) == (0, pytest.approx(expected, abs=1e-4))
    core.add(scoring("again", num_prompt_logprobs=None))
    assert run(core)[0].num_cached_tokens == 44


def test_a_prompt_can_be_scored_without_generating_a_token(folder: Path, expected: list[float]) -> None:
    core = engine(folder)
    core.add(scoring("a", max_tokens=0))
    chunks = run(core)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [((), FinishReason.LENGTH)]
    assert values(chunks[0]) == pytest.approx(expected, abs=1e-4)


def test_a_prompt_of_one_token_has_nothing_to_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(folder)
    monkeypatch.setattr(core.runner, "forward", lambda spans: pytest.fail("nothing is to be computed"))
    core.add(GenerateRequest("a", PROMPT[:1], SamplingParams(max_tokens=0, num_prompt_logprobs=2)))
    [chunk] = run(core)
    assert (chunk.token_ids, chunk.finish_reason, chunk.prompt_logprobs) == ((), FinishReason.LENGTH, ())


def test_preemption_and_neighbours_change_neither_prompt_logprobs_nor_text(folder: Path, expected: list[float]) -> None:
    core = engine(folder, num_blocks=22, max_tokens_per_step=16)
    plain = engine(folder)
    for each in (core, plain):
        for index in range(3):
            each.add(scoring("x" * (index + 1), max_tokens=24, num_prompt_logprobs=None if index == 1 else 0))
    texts = []
    for each in (core, plain):
        chunks = run(each)
        texts.append([t for c in sorted(chunks, key=lambda c: c.request_id) for t in c.token_ids])
        for index in (0, 2):
            first = next(chunk for chunk in chunks if len(chunk.request_id) == index + 1)
            assert values(first) == pytest.approx(expected, abs=1e-4)
    assert core.stats().num_preemptions > 0
    assert texts[0] == texts[1]


def test_a_prompt_that_is_scored_in_parts_changes_no_text_beside_it(
    folder: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first parts sample nothing, while the prompts after it in the same step do."""
    monkeypatch.setattr("engine.scheduler.scheduler._MAX_SCORED_TOKENS", 16)

    def plain(seed: int) -> GenerateRequest:
        return GenerateRequest(f"plain-{seed}", PROMPT[:9], SamplingParams(seed=seed, max_tokens=6))

    def texts(core: EngineCore) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for chunk in run(core):
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        return tokens

    alone: dict[str, list[int]] = {}
    for request in (plain(1), plain(2), scoring("scored")):
        core = engine(folder)
        core.add(request)
        alone |= texts(core)
    core = engine(folder)
    for request in (plain(1), scoring("scored"), plain(2)):
        core.add(request)
    assert texts(core) == alone
