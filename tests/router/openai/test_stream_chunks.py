"""A streamed chunk has one part, for any number of tokens per step, so clients that look at one part suffice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter
from tokenizers import AddedToken

from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core, chat_template
from tests.router.fixtures.fake_backend import CARD, FakeBackend, say
from tests.router.openai.answer_formats import test_harmony as harmony
from tests.router.openai.answer_formats import test_response_template as described

TEMPLATE = (
    "{{ tools }}{% for message in messages %}{{ message['content'] }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think><tool_call>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "get.weather")]
SAID = (
    "<think>I wonder.</think>So:\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "get.weather"}</tool_call>\n done'
)
CALLS = [("f", '{"a": "é"}'), ("get.weather", "{}")]
HI = [{"role": "user", "content": "hi"}]
ANYTHING = {"role", "content", "reasoning", "tool_calls"}


def tokenizer() -> Tokenizer:
    core = byte_tokenizer_core()
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=True)])
    return Tokenizer(core)


TOKENIZER = tokenizer()
IDS = [*TOKENIZER.encode(SAID, add_special_tokens=False), 0]
STEPS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
WHOLE = [len(IDS)]
NEXT = "<|start|>assistant"
BETWEEN_CALLS = [SAID.index('"f"') - 10, 60]  # the second step has calls with text around them


@dataclass
class SteppedBackend(FakeBackend):
    """Commits so many tokens at each step, in turn."""

    steps: Sequence[int] = (1,)
    card: ModelCard = CARD

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        rank = 0
        self.tokens_per_step = self.steps[0]
        async for chunk in super()._run(request):
            rank += 1
            self.tokens_per_step = self.steps[rank % len(self.steps)]
            yield replace(chunk, sources=tuple(f"{rank}:{place}" for place in range(len(chunk.token_ids))))


@dataclass(frozen=True)
class Form:
    """How a model writes thoughts and calls."""

    tokenizer: Tokenizer
    template: str
    end_ids: tuple[int, ...]
    first: tuple[str, ...]  # what may begin an answer alone
    parts: tuple[str, ...]
    last: str
    tool_format: str = "auto"
    response_template: dict[str, Any] | None = None
    is_forced: bool = False  # requests ask for a call

    def ids(self, parts: Sequence[str]) -> list[int]:
        return self.tokenizer.encode("".join(parts) + self.last, add_special_tokens=False)


MARKED = Form(
    TOKENIZER,
    TEMPLATE,
    (0,),
    ("", "<think>I wonder.</think>", "<think>é\n</think>\n"),
    (
        "So:\n",
        " ",
        "done é",
        '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n',
        '<tool_call>{"arguments": {}, "name": "get.weather"}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    ),
    "<|end|>",
)
CHANNELS = Form(
    harmony.TOKENIZER,
    harmony.TEMPLATE,
    harmony.ENDS[:1],  # calls may be followed by others here
    ("",),
    (
        harmony.THOUGHT,
        harmony.PREAMBLE,
        harmony.CALL + NEXT,
        harmony.CALL_OF_THE_TEMPLATE + NEXT,
        harmony.CALL.replace("functions.f", "functions.get.weather") + NEXT,
    ),
    harmony.ANSWER,
)
FORCED = replace(MARKED, parts=MARKED.parts[3:5], is_forced=True)
PROMPTED = replace(MARKED, template=TEMPLATE.removeprefix("{{ tools }}"), tool_format="prompted")
DESCRIBED = Form(
    TOKENIZER,
    described.CHAT_TEMPLATE,
    (0,),
    ("",),
    ("(thinks: Hm.)", "(thinks:é)", "So é. ", "done", '@f{"x": 1};', '@f{"x": 2};', "@f{broken};"),
    "<|end|>",
    response_template=described.RESPONSE_TEMPLATE,
)
FORCE = {"/v1/chat/completions": "required", "/v1/responses": "required", "/v1/messages": {"type": "any"}}


def ask(
    steps: Sequence[int], path: str, ids: Sequence[int] = IDS, form: Form = MARKED, **fields: Any
) -> httpx.Response:
    """Return the answer of a model that generates `ids`, committing them in these steps."""

    async def post() -> httpx.Response:
        backend = SteppedBackend(say(*ids), steps=steps, card=ModelCard(300, 4096, form.end_ids, "v1", 16, 4))
        files = TokenizerFiles(form.tokenizer, chat_template(form.template), response_template=form.response_template)
        config = IngressConfig(model_id="fake", model_path="nowhere", tool_format=form.tool_format)
        service = GenerationService(backend, files, config, IngressMetrics())
        transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
            choice = {"tool_choice": FORCE[path]} if form.is_forced else {}
            return await http.post(path, json={"max_tokens": 400, **choice, **fields})

    answer = asyncio.run(post())
    assert answer.status_code == 200, answer.text
    return answer


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(steps: Sequence[int], **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return ask(steps, "/v1/chat/completions", **body)


def chat_chunks(steps: Sequence[int], **fields: Any) -> list[dict[str, Any]]:
    return chunks_of(chat(steps, stream=True, stream_options={"include_usage": True}, **fields))


def check_chunk(chunk: dict[str, Any]) -> None:
    """Assert that a chunk has at most one part."""
    assert len(chunk["choices"]) <= 1
    for choice in chunk["choices"]:
        delta = choice["delta"]
        is_role = delta == {"role": "assistant", "content": ""}
        said = [name for name in delta if delta[name]]
        assert is_role or len(said) + (choice["finish_reason"] is not None) <= 1, chunk
        assert set(delta) <= ANYTHING
        if choice["finish_reason"] is not None:
            assert delta == {}
            assert not choice.get("token_ids")
            assert not choice["logprobs"]
        for call in delta.get("tool_calls", []):
            assert len(delta["tool_calls"]) == 1
            if "id" in call:
                assert call["type"] == "function"
                assert call["function"]["name"]
                assert call["function"]["arguments"] == ""
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
    assert not (chunk.get("usage") and chunk["choices"])


def llamaindex_calls(chunks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the calls as LlamaIndex adds them up: by the first entry of each chunk, onto the last call."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            entries = choice["delta"].get("tool_calls")
            if not entries:
                continue
            if not calls or calls[-1]["index"] != entries[0]["index"]:
                calls.append(deepcopy(entries[0]))
                continue
            function, more = calls[-1]["function"], entries[0]["function"]
            function["arguments"] = (function.get("arguments") or "") + (more.get("arguments") or "")
            function["name"] = (function.get("name") or "") + (more.get("name") or "")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def read_either(chunks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Read as a client does that takes text, or else a thought, or else a call, and stops at a finish reason."""
    text = thought = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice["finish_reason"]:
                return text, thought, [(name, arguments) for name, arguments in calls.values()], choice["finish_reason"]
            if delta.get("content"):
                text += delta["content"]
            elif delta.get("reasoning"):
                thought += delta["reasoning"]
            elif delta.get("tool_calls"):
                [call] = delta["tool_calls"]
                entry = calls.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"]["arguments"]
    raise AssertionError("the stream has no finish reason")


@settings(max_examples=15, deadline=None)
@given(STEPS)
@example(WHOLE)
@example(BETWEEN_CALLS)
@example([1])
def test_a_chunk_of_a_chat_says_one_thing_however_many_tokens_a_step_commits(steps: list[int]) -> None:
    chunks = chat_chunks(steps)
    for chunk in chunks:
        check_chunk(chunk)
    assert read_either(chunks) == ("So:\n done", "I wonder.", CALLS, "tool_calls")
    assert llamaindex_calls(chunks) == CALLS
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    message = state.get_final_completion().choices[0].message
    assert (message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls]) == (
        "So:\n done",
        CALLS,
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(IDS)


@settings(max_examples=10, deadline=None)
@given(STEPS, st.booleans())
@example(WHOLE, True)
@example(BETWEEN_CALLS, False)
def test_tokens_and_logprobs_of_the_chunks_are_those_of_the_whole_answer(steps: list[int], is_shown: bool) -> None:
    wanted = {"logprobs": True, "return_token_ids": True, "return_token_sources": True, "include_reasoning": is_shown}
    [whole] = chat(steps, **wanted).json()["choices"]
    choices = [choice for chunk in chat_chunks(steps, **wanted) for choice in chunk["choices"]]
    assert [each for choice in choices for each in choice.get("token_ids", [])] == whole["token_ids"] == IDS
    logprobs = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [each for choice in choices for each in choice.get("token_sources", [])] == whole["token_sources"]
    thought = [choice for choice in choices if choice["delta"].get("reasoning")]
    num_thought = len(TOKENIZER.encode("<think>I wonder.</think>", add_special_tokens=False))
    assert sum(len(choice["token_ids"]) for choice in thought) <= num_thought


@settings(max_examples=10, deadline=None)
@given(STEPS, st.booleans())
@example([30], True)
@example([1], False)
def test_the_last_chunk_of_a_completion_is_its_finish_reason_alone(steps: list[int], has_end: bool) -> None:
    text = "one, two é"
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), *([0] if has_end else [])]
    body = {"prompt": "ab", "max_tokens": len(ids), "logprobs": 1, "return_token_ids": True, "echo": True}
    chunks = chunks_of(ask(steps, "/v1/completions", ids, stream=True, **body))
    [whole] = ask(steps, "/v1/completions", ids, **body).json()["choices"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    *said, last = choices
    assert (last["text"], last["finish_reason"]) == ("", "stop" if has_end else "length")
    assert not last["token_ids"]
    assert last["logprobs"] is None
    assert all(choice["finish_reason"] is None for choice in said)
    assert "".join(choice["text"] for choice in said) == whole["text"] == "ab" + text
    assert [each for choice in said for each in choice["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for choice in said for each in choice["logprobs"][name]] == whole["logprobs"][name]


@settings(max_examples=10, deadline=None)
@given(STEPS)
@example(WHOLE)
@example(BETWEEN_CALLS)
def test_the_events_of_messages_and_responses_do_not_depend_on_the_steps(steps: list[int]) -> None:
    tools = [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in TOOLS]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "stream": True}
    events = chunks_of(ask(steps, "/v1/messages", **body))
    for event in events:
        EVENT.validate_python(event)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    said = dict.fromkeys(range(len(blocks)), "")
    for event in events:
        if event["type"] == "content_block_delta":
            said[event["index"]] += next(
                (event["delta"][name] for name in ("thinking", "text", "partial_json") if name in event["delta"]), ""
            )
    assert list(said.values()) == ["I wonder.", "So:", '{"a": "é"}', "{}", "\n done"]
    functions = [{"type": "function", **each["function"], "parameters": {"type": "object"}} for each in TOOLS]
    responses = ask(steps, "/v1/responses", input="hi", tools=functions, stream=True)
    items = [event["item"]["type"] for event in chunks_of(responses) if event["type"] == "response.output_item.added"]
    assert items == ["reasoning", "message", "function_call", "function_call", "message"]


@st.composite
def answers(draw: st.DrawFn) -> tuple[Form, list[str]]:
    form = draw(st.sampled_from([MARKED, CHANNELS, FORCED, PROMPTED, DESCRIBED]))
    return form, [draw(st.sampled_from(form.first)), *draw(st.lists(st.sampled_from(form.parts), max_size=6))]


@settings(max_examples=6, deadline=None)
@given(answers(), STEPS, st.integers(1, 2))
@example((MARKED, ["<think>I wonder.</think>", "So:\n", MARKED.parts[3], "done é"]), [1000], 2)
@example((CHANNELS, [harmony.THOUGHT, harmony.PREAMBLE, harmony.CALL + NEXT]), [3], 2)
@example((FORCED, ["<think>I wonder.</think>", *FORCED.parts]), [50], 1)
@example((PROMPTED, ["", "So:\n", MARKED.parts[3]]), [1000], 1)
@example((DESCRIBED, ["", *DESCRIBED.parts]), [1000], 1)
def test_chunks_of_every_form_and_choice_say_one_thing_and_add_up_to_the_whole_answer(
    answer: tuple[Form, list[str]], steps: list[int], num_choices: int
) -> None:
    form, parts = answer
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 2000, "n": num_choices}
    body |= {"return_token_sources": True, "return_token_ids": True}
    streamed, whole = (
        ask(steps, "/v1/chat/completions", form.ids(parts), form, stream=is_streamed, **body)
        for is_streamed in (True, False)
    )
    chunks = chunks_of(streamed)
    for chunk in chunks:
        check_chunk(chunk)
    for choice in whole.json()["choices"]:
        message = choice["message"]
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        said = message["content"] or "", message.get("reasoning") or "", calls, choice["finish_reason"]
        assert read_either(own) == said
        assert llamaindex_calls(own) == calls
        assert len(choice["token_sources"]) == len(set(choice["token_sources"])) == len(choice["token_ids"])


TEXT_AFTER_A_CALL = (MARKED, ["", "So:\n", MARKED.parts[3], "done é", MARKED.parts[4]])
THOUGHT_AFTER_A_CALL = (DESCRIBED, ["", "So é. ", '@f{"x": 1};', "(thinks: Hm.)", '@f{"x": 2};'])
THOUGHT_AFTER_TEXT = (CHANNELS, [harmony.PREAMBLE, harmony.THOUGHT, harmony.CALL + NEXT, harmony.THOUGHT])


@settings(max_examples=5, deadline=None)
@given(answers(), STEPS)
@example(TEXT_AFTER_A_CALL, [1])
@example(TEXT_AFTER_A_CALL, [1000])
@example(THOUGHT_AFTER_TEXT, [1])
@example(THOUGHT_AFTER_TEXT, [1000])
@example(THOUGHT_AFTER_A_CALL, [1000])
@example((FORCED, ["", *FORCED.parts]), [1000])
def test_a_turn_has_the_same_parts_in_the_same_order_streamed_or_not_and_in_any_steps(
    answer: tuple[Form, list[str]], steps: list[int]
) -> None:
    """Both APIs give the sum of their events: the parts in the order of the text."""
    form, parts = answer
    ids, limit = form.ids(parts), {"max_tokens": 2000}
    tools = [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in TOOLS]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **limit}
    streamed, whole = (
        ask(steps, "/v1/messages", ids, form, stream=is_streamed, **body) for is_streamed in (True, False)
    )
    blocks = [without_ids(block) for block in blocks_of(chunks_of(streamed))]
    assert blocks == [without_ids(block) for block in whole.json()["content"]]
    assert blocks == [without_ids(each) for each in ask([1], "/v1/messages", ids, form, **body).json()["content"]]
    functions = [{"type": "function", **each["function"], "parameters": {"type": "object"}} for each in TOOLS]
    body = {"input": "hi", "tools": functions, **limit}
    streamed, whole = (
        ask(steps, "/v1/responses", ids, form, stream=is_streamed, **body) for is_streamed in (True, False)
    )
    events = chunks_of(streamed)
    items = [without_ids(event["item"]) for event in events if event["type"] == "response.output_item.done"]
    assert items == [without_ids(item) for item in events[-1]["response"]["output"]]
    assert items == [without_ids(item) for item in whole.json()["output"]]
    assert [said_by(item) for item in items] == [said_by(block) for block in blocks]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the events as Anthropic's client does."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], **({"input": ""} if "input" in event["content_block"] else {})})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {"input_json_delta": "input"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            blocks[event["index"]][name] += delta.get("partial_json", delta.get(name, ""))
    return [{**block, "input": json.loads(block["input"] or "{}")} if "input" in block else block for block in blocks]


def without_ids(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in ("id", "call_id")}


def said_by(part: dict[str, Any]) -> tuple[str, Any]:
    """Return the kind of an item or a block, and its content."""
    match part:
        case {"type": "function_call", "arguments": arguments}:
            return part["name"], json.loads(arguments or "{}")
        case {"type": "tool_use"}:
            return part["name"], part["input"]
        case {"content": [{"text": text}]}:
            return "text" if part["type"] == "message" else "thinking", text
    return part["type"], part[part["type"]]


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/completions", {"prompt": "hi"}, lambda event: event["choices"][0]["text"]),
        ("/v1/chat/completions", {"messages": HI}, lambda event: event["choices"][0]["delta"].get("content", "")),
        ("/v1/responses", {"input": "hi"}, lambda event: event["delta"] if "text.delta" in event["type"] else ""),
        ("/v1/messages", {"messages": HI}, lambda event: event.get("delta", {}).get("text", "")),
    ],
)
def test_an_event_is_one_line_for_readers_that_split_at_any_line_break_of_unicode(
    path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str]
) -> None:
    text = "a\u2028b\u0085c\u2029d"
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), 0]
    lines = list(ask([3], path, ids, stream=True, **body).iter_lines())  # as LiteLLM reads
    assert "".join(text_of(json.loads(line[6:])) for line in lines if line.startswith("data: {")) == text
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)


def test_a_thought_has_one_name() -> None:
    chunks = chat_chunks([7])
    assert any("reasoning" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
    assert not any("reasoning_content" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
