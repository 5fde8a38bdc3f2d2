"""The chat endpoint as the real OpenAI client sees it, with strict validation of every response."""

from __future__ import annotations

import openai
import pytest

from tests.router.fixtures.fake_backend import FakeBackend, say

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]


def ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


async def test_the_template_makes_the_prompt(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*ids("hello"))
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=5)
    assert bytes(i - 1 for i in backend.requests[0].prompt_token_ids) == b"[system]be brief[user]abc[assistant]"
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", "hello", "length")


async def test_developer_is_system_and_text_parts_are_joined(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert bytes(i - 1 for i in backend.requests[0].prompt_token_ids) == b"[system]x[user]ab[assistant]"


async def test_a_chat_may_fill_the_context(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.usage.total_tokens == backend.card.max_model_len


async def test_a_stream_names_the_role_first(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*ids("hello"))
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    first, *chunks, last = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["he", "ll", "o", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert last.metrics["speculative_decoding"]["num_spec_steps"] == 3


async def test_every_chunk_may_tell_the_usage_so_far(client: openai.AsyncOpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage.completion_tokens for chunk in chunks] == [2, 2, 4, 4, 4]  # role, two pieces, the end


async def test_logprobs_hold_the_bytes_of_every_token(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*ids("é!"))
    answer = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "é!"
    assert [token.token for token in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [token.bytes for token in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2].top_logprobs[0].token == "!"


async def test_logprobs_without_alternatives(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, stream=True
    )
    tokens = [
        token async for chunk in stream if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]
    assert len(tokens) == 3
    assert all(token.top_logprobs == [] for token in tokens)


async def test_no_chunk_holds_half_a_character(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token, backend.tokens_per_step = say(*ids("aé€😀b")), 1
    stream = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=11, stream=True)
    pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]


async def test_n_choices_each_start_with_the_role(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, n=3, stream=True)
    firsts: dict[int, str | None] = {}
    async for chunk in stream:
        firsts.setdefault(chunk.choices[0].index, chunk.choices[0].delta.role)
    assert firsts == {0: "assistant", 1: "assistant", 2: "assistant"}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_parameters_that_are_not_served_are_refused_by_name(
    client: openai.AsyncOpenAI, parameters: dict, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=MESSAGES, **parameters)
    assert caught.value.param == param
    assert param in caught.value.message


async def test_neutral_values_of_unserved_parameters_are_accepted(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=1,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        modalities=["text"],
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_options={"mode": "implicit"},
        parallel_tool_calls=True,
        reasoning_effort="low",
    )


async def test_an_image_is_refused(client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
