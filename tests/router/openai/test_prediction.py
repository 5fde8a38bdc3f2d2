"""OpenAI's predicted outputs: the engine's requests, the reported counts, and refusals."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from protos.messages import VerifyMode
from router.generation.generation_service import GenerationService
from tests.router.fixtures.fake_backend import CARD, FakeBackend, say

TEXT = "abcdefghijklmnop"
TOKENS = tuple(byte + 1 for byte in TEXT.encode())


def content(text: object = TEXT) -> dict[str, object]:
    return {"type": "content", "content": text}


@pytest.mark.parametrize(
    "prediction", [content(), content([{"type": "text", "text": TEXT[:5]}, {"type": "text", "text": TEXT[5:]}])]
)
async def test_a_chats_prediction_reaches_the_engine_in_tokens(
    client: openai.AsyncOpenAI, backend: FakeBackend, prediction: Any
) -> None:
    backend.next_token = say(*TOKENS)
    answer = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_completion_tokens=8, prediction=prediction
    )
    [request] = backend.requests
    assert request.prediction_token_ids == TOKENS
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, len(TOKENS) - 8)


async def test_tokens_behind_a_divergence_count_again(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*TOKENS[:4], 200, 201, *TOKENS[6:])
    answer = await client.completions.create(
        model="fake", prompt="x", max_tokens=len(TOKENS), extra_body={"prediction": content()}
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (len(TOKENS) - 2, 2)


async def test_every_choice_has_the_whole_prediction_to_repeat(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.next_token = say(*TOKENS)
    answer = await client.completions.create(
        model="fake", prompt="x", n=3, max_tokens=4, extra_body={"prediction": content(), "logprobs": 1}
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, 3 * len(TOKENS) - 12)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"prompt": ["x", "y"]}, "one prompt"),
        ({"speculation": {"enabled": False}}, "this request drafts nothing"),
        ({"speculation": {"num_tokens": 0}}, "this request drafts nothing"),
        ({"speculation": {"method": "none"}}, "this request drafts nothing"),
        ({"seed": 1, "speculation": {"verify": "rejection"}}, "leave the seed out"),
        ({"prediction": {"type": "text", "content": "x"}}, "'content'"),
        ({"prediction": {"type": "content"}}, "content"),
    ],
)
async def test_a_prediction_that_cannot_be_used_is_refused(
    client: openai.AsyncOpenAI, parameters: dict[str, Any], words: str
) -> None:
    body = {"prediction": content(), "prompt": "x", **parameters}
    prompt = body.pop("prompt")
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.completions.create(model="fake", prompt=prompt, extra_body=body)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prediction")


@pytest.mark.parametrize(
    "parameters",
    [
        {"seed": 1},
        {"seed": 1, "temperature": 0, "speculation": {"verify": "block"}},
        {"speculation": {"verify": "rejection"}},
        {"presence_penalty": 1.0, "logprobs": 2, "n": 2},
    ],
)
async def test_a_prediction_goes_with_all_that_stays_exact(
    client: openai.AsyncOpenAI, backend: FakeBackend, parameters: dict[str, Any]
) -> None:
    await client.completions.create(model="fake", prompt="x", extra_body={"prediction": content(), **parameters})
    assert all(request.prediction_token_ids == TOKENS for request in backend.requests)


async def test_a_deployment_that_drafts_nothing_says_so(
    client: openai.AsyncOpenAI, backend: FakeBackend, service: GenerationService
) -> None:
    backend.card = type(CARD)(300, 128, (0,), "v1", 16, verify=VerifyMode.COUPLED)
    with pytest.raises(openai.BadRequestError, match="this deployment drafts nothing"):
        await client.completions.create(model="fake", prompt="x", extra_body={"prediction": content()})
