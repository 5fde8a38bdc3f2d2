"""A published model in both frontends: chat, JSON schemas and tools over HTTP, chat over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.text_match.suffix import SuffixProposer
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.served_model import ModelCard
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router import conftest as router_fixtures
from tests.router.fixtures.engine_backend import EngineBackend
from tests.router.fixtures.grpc_channel import grpc_channel

pytestmark = pytest.mark.real_model

base_url = router_fixtures.base_url
client = router_fixtures.client

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
# Its own template shows no tools: this one lists them in the form that the tool format reads.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    "Call them as <tool_call>{...}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def core(smollm2_folder: Path) -> EngineCore:
    cache = CacheConfig(num_blocks=256, memory_bytes=None)
    model = ModelConfig(str(smollm2_folder), "float32")
    return load_engine(EngineConfig(model, cache, speculation=SpeculationConfig(4)), SuffixProposer())


@pytest.fixture
def template() -> str | None:
    """A chat template in the place of the model's own; None leaves that."""
    return None


@pytest.fixture
def service(core: EngineCore, tokenizer_files: TokenizerFiles, template: str | None) -> GenerationService:
    if template is not None:
        tokenizer_files = TokenizerFiles(tokenizer_files.tokenizer, ChatTemplate(template, {}))
    runner = core.runner
    card = ModelCard(runner.vocab_size, 2048, runner.eos_token_ids, runner.model_version, runner.block_size)
    backend = EngineBackend(core, card)
    return GenerationService(
        backend, tokenizer_files, IngressConfig(model_id="smollm2", model_path="nowhere"), IngressMetrics()
    )


@pytest.fixture
async def stub(service: GenerationService) -> AsyncIterator[outrider_pb2_grpc.GenerationStub]:
    async with grpc_channel(service) as channel:
        yield outrider_pb2_grpc.GenerationStub(channel)


async def test_a_chat_answers_the_question_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == text


async def test_a_seed_gives_the_same_chat_with_drafts_and_without(client: openai.AsyncOpenAI) -> None:
    texts = set()
    for speculation in ({"enabled": False}, {"num_tokens": 4}):
        answer = await client.chat.completions.create(
            model="smollm2", messages=CAPITAL, seed=5, max_tokens=32, extra_body={"speculation": speculation}
        )
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1


async def test_an_answer_in_a_json_schema_is_valid_and_sensible(client: openai.AsyncOpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Which city is the capital of France? Answer in JSON."}]
    schema = {"name": "city", "schema": CITY, "strict": True}
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=question,
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[arg-type]  # a plain dict
    )
    content = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(content, CITY)
    assert content["country"] == "France"


@pytest.mark.parametrize("template", [TOOL_TEMPLATE])
async def test_a_required_tool_is_called_with_valid_arguments(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "How is the weather in Paris, France?"}],
        tools=[WEATHER],  # type: ignore[list-item]  # a plain dict
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)


async def test_grpc_gives_the_text_of_http(stub: outrider_pb2_grpc.GenerationStub, client: openai.AsyncOpenAI) -> None:
    over_http = await client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=16
    )
    request = pb2.GenerateRequest(model="smollm2", prompt="The capital of France is", temperature=0.0, max_tokens=16)
    over_grpc = await stub.Generate(request)
    assert over_grpc.choices[0].text == over_http.choices[0].text
    assert "Paris" in over_grpc.choices[0].text
