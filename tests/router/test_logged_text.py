"""Whatever text a client sends, it writes no line of its own into a log, and no long one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.client_text import LogLine, for_log
from protos.errors import EngineError
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.openai.request_head import add_request_id
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.grpc_channel import grpc_channel

EVIL = "\nINJECTED line\r\n\x1b[31mINJECTED\u2028INJECTED" + "x" * 10_000
MAX_LINE = 2000
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "fake",
        "prompt": "a",
        "stop": ["zz"],
        "user": "u",
        "cache_salt": "s",
        "logit_bias": {"5": 1},
        "suffix": "",
        "prediction": {"type": "content", "content": "b"},
        "speculation": {"method": "ngram", "verify": "coupled"},
        "guided_regex": "a",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "bad_words": ["w"],
        "unknown": "x",
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "a", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "tools": [TOOL],
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": "b"},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    },
    "/v1/messages": {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "system": "s",
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["zz"],
        "metadata": {"user_id": "u"},
    },
    "/tokenize": {"prompt": "a"},
    "/admin/drafts/swap": {"path": "p"},
}


def with_evil(value: Any) -> Iterator[Any]:
    """Yield the value with one of its texts, names included, replaced each time."""
    if isinstance(value, str):
        yield EVIL
    elif isinstance(value, list):
        for rank, item in enumerate(value):
            yield from ([*value[:rank], changed, *value[rank + 1 :]] for changed in with_evil(item))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from ({**value, name: changed} for changed in with_evil(item))
            yield {EVIL if each == name else each: kept for each, kept in value.items()}


@pytest.fixture(autouse=True)
def limits_of_bodies(service: GenerationService) -> None:
    object.__setattr__(service.config.limits, "max_body_bytes", 1 << 20)


def check(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [*caplog.text.splitlines(), *"".join(capfd.readouterr()).splitlines()]
    assert not [line for line in lines if line.strip("\x1b[31m").startswith("INJECTED")]
    assert max(map(len, lines), default=0) < MAX_LINE
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("failure", [None, EngineError(EVIL), ValueError(EVIL)])
async def test_a_body_s_texts_write_no_lines(
    service: GenerationService,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    path: str,
    failure: Exception | None,
) -> None:
    caplog.set_level(logging.DEBUG)
    app = partial(add_request_id, build_app(service, ApiKeys(is_open_admin=True)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        bodies = list(with_evil(BODIES[path]))
        assert len(bodies) >= 2
        for body in bodies:
            backend.failures = [] if failure is None else [failure] * 200
            await http.post(path, json=body)
            if failure is not None:
                await http.post(path, json={**body, "stream": True})
    check(caplog, capfd)


async def test_a_head_s_texts_write_no_lines(
    service: GenerationService, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "httpx")  # the client
    app = partial(add_request_id, build_app(service, ApiKeys()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://outrider") as http:
        for name in ("x-request-id", "user-agent", "authorization", "x-api-key", "origin", "traceparent", "accept"):
            await http.get("/v1/models", headers={name: EVIL.replace("\n", "\t").encode("utf-8")})
        for path in ("/v1/models/{}", "/{}", "/v1/completions?{}", "/page/{}"):
            await http.get(httpx.URL("http://outrider").join(path.format(httpx.QueryParams({"a": EVIL}))[:9000]))
    check(caplog, capfd)


def texts_of(message: Message) -> list[str]:
    return [each.name for each in message.DESCRIPTOR.fields if each.type == each.TYPE_STRING]


async def test_a_grpc_message_s_texts_write_no_lines(
    service: GenerationService,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        for name in texts_of(pb2.GenerateRequest()):
            request = pb2.GenerateRequest(prompt="a", max_tokens=2)
            field = getattr(request, name)
            if isinstance(field, str):
                setattr(request, name, EVIL)
            else:
                field.append(EVIL)
            backend.failures = [ValueError(EVIL)] * 100
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(request, metadata=(("x-request-id", "y" * 3000),))
    check(caplog, capfd)


def test_a_line_has_the_beginning_of_a_text_alone() -> None:
    assert for_log("a\nb\tc\x1b\u2028\ud800é", 100) == "a\\nb\\tc\\x1b\\u2028\\ud800é"
    assert for_log("x" * 500, 10) == "xxxxxxxxxx... (500 characters)"
    assert len(for_log("\x00" * 10_000_000)) < 300


def test_the_errors_that_led_to_one_are_a_line_each() -> None:
    try:
        try:
            raise ValueError(EVIL)
        except ValueError as first:
            raise RuntimeError("second\nINJECTED") from first
    except RuntimeError as error:
        line = LogLine("router.x", logging.ERROR, "x.py", 1, "failed", (), (type(error), error, error.__traceback__))
    text = logging.Formatter().format(line)
    assert "ValueError: \\nINJECTED" in text
    assert "RuntimeError: second\\nINJECTED" in text
    assert not [each for each in text.splitlines() if each.startswith("INJECTED")]


OURS = ("router.x", "actors.x", "engine.x", "protos.x", "cluster.x")
THEIRS = ("uvicorn.error", "asyncio", "ray.serve", "grpc._cython.cygrpc", "transformers", "concurrent.futures")


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_no_line_can_hold_another(
    service: GenerationService, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    build_app(service, ApiKeys())
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # Ray's loggers do not propagate
    logger.error("request %s: %d of %r", EVIL, 5, [EVIL])
    try:
        raise EngineError(EVIL)  # as Serve logs a pair's errors
    except EngineError:
        logger.exception("Request failed.")
    logger.removeHandler(caplog.handler)
    assert "EngineError: \\nINJECTED line" in caplog.text
    assert "request \\nINJECTED line\\r\\n\\x1b[31mINJECTED\\u2028INJECTEDxxx" in caplog.text
    check(caplog, capfd)
