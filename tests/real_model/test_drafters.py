"""A published model in float32 gives the tokens of transformers' `generate` with every drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.method_dispatcher import proposer_of
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams

pytestmark = pytest.mark.real_model

QUESTIONS = (
    "Name three primary colors, then repeat them in reverse order.",
    "Write a Python function that returns the sum of a list of numbers.",
    "Complete the pattern: one, two, three, one, two, three, one,",
)
NUM_TOKENS = 40
METHODS = tuple(SpeculationMethod(name) for name in ("model", "hybrid", "suffix", "ngram", "none"))


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt and its greedy continuation by `generate`."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path) -> list[Expected]:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        prompt = tuple(inputs["input_ids"][0].tolist())
        answers.append(Expected(prompt, tuple(output[0].tolist()[len(prompt) :])))
    return answers


@pytest.fixture(scope="module")
def core(smollm2_folder: Path) -> EngineCore:
    """The model with a draft of its own weights in bfloat16, and every method that needs no head."""
    folder = str(smollm2_folder)
    draft = ModelProposer.from_config(
        ModelConfig(folder, "bfloat16"), CacheConfig(num_blocks=128, memory_bytes=None), SchedulerConfig()
    )
    speculation = SpeculationConfig(4, methods=METHODS)
    config = EngineConfig(
        ModelConfig(folder, "float32"), CacheConfig(num_blocks=128, memory_bytes=None), speculation=speculation
    )
    return load_engine(config, proposer_of(METHODS, draft))


def generate(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    texts: dict[str, tuple[int, ...]] = {}
    for request in requests:
        core.add(request)
        texts[request.request_id] = ()
    while core.has_work:
        for chunk in core.step():
            texts[chunk.request_id] += chunk.token_ids
    return texts


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_generate(core: EngineCore, expected: list[Expected], method: SpeculationMethod) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=(core.runner.eos_token_ids))
    requests = [
        GenerateRequest(str(index), answer.prompt, greedy, SpeculationParams(method=method))
        for index, answer in enumerate(expected)
    ]
    texts = generate(core, requests)
    assert [texts[str(index)] for index in range(len(expected))] == [answer.token_ids for answer in expected]


def test_a_prediction_is_accepted_where_it_is_right_and_changes_nothing(
    core: EngineCore, expected: list[Expected]
) -> None:
    answer = expected[1]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=(core.runner.eos_token_ids))
    before = core.stats().drafts.num_accepted_tokens
    request = GenerateRequest("edit", answer.prompt, greedy, prediction_token_ids=answer.token_ids)
    assert generate(core, [request])["edit"] == answer.token_ids
    assert core.stats().drafts.num_accepted_tokens - before > NUM_TOKENS // 2


def test_seeded_text_is_the_same_with_every_drafter(core: EngineCore, expected: list[Expected]) -> None:
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24)
    requests = [
        GenerateRequest(method, expected[0].prompt, sampled, SpeculationParams(method=method)) for method in METHODS
    ]
    texts = generate(core, requests)
    assert len(set(texts.values())) == 1
    other = GenerateRequest("other", expected[0].prompt, SamplingParams(temperature=0.8, seed=12, max_tokens=24))
    assert generate(core, [other])["other"] not in texts.values()
