"""A client that goes away stops its generation, over a real socket."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import httpx
import pytest

from protos.errors import EngineError, OverloadedError
from protos.messages import GenerateRequest
from tests.router.fixtures.fake_backend import FakeBackend


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_stops_it(base_url: str, backend: FakeBackend, n: int) -> None:
    backend.step_s = 0.02
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stream": True, "n": n}
    async with httpx.AsyncClient() as http, http.stream("POST", f"{base_url}/completions", json=body) as response:
        async for line in response.aiter_lines():
            assert json.loads(line.removeprefix("data: "))
            break
        assert backend.num_running == n
    await backend.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_stops_it(base_url: str, backend: FakeBackend, stream: bool) -> None:
    backend.step_s = 30.0
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stream": stream}
    async with httpx.AsyncClient(timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{base_url}/completions", json=body)
    await backend.until_idle()
    assert backend.num_closed == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.response_writer.KEEP_ALIVE_S", 0.05)


PATHS = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
    "messages": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_says_that_it_is_alive_before_its_first_token(
    base_url: str, backend: FakeBackend, path: str
) -> None:
    backend.step_s = 0.3
    body = {"model": "fake", "max_tokens": 1, "stream": True, **PATHS[path]}
    body = {("max_output_tokens" if path == "responses" and key == "max_tokens" else key): body[key] for key in body}
    async with httpx.AsyncClient(timeout=0.2) as http, http.stream("POST", f"{base_url}/{path}", json=body) as response:
        text = (await response.aread()).decode()
    assert response.status_code == 200
    assert text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert "data: " in text
    assert ": keep-alive" not in text[text.index("data: ") :]


@pytest.mark.usefixtures("impatient")
async def test_an_error_after_a_sign_of_life_is_the_last_event(base_url: str, backend: FakeBackend) -> None:
    def fail(request: GenerateRequest, token_ids: Sequence[int]) -> int:
        raise EngineError("lost")

    backend.step_s, backend.next_token = 0.3, fail
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{base_url}/completions", json={"model": "fake", "prompt": "a", "stream": True})
    assert answer.status_code == 200
    assert json.loads(answer.text.rpartition("data: ")[2])["error"]["message"] == "lost"


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_counts_by_the_error_that_ends_it(
    base_url: str, backend: FakeBackend, path: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alarms see a server whose streams all begin with 200 and break later."""

    def fail_late(request: GenerateRequest, token_ids: Sequence[int]) -> int:
        if len(token_ids) > len(request.prompt_token_ids) + 2 and not is_whole:
            raise OverloadedError("lost")
        return 98

    monkeypatch.setattr("router.backend.migration.DEADLINE_S", 0.2)
    backend.next_token = fail_late
    body: dict[str, object] = {"model": "fake", "stream": True}
    body |= PATHS[path]
    body["max_output_tokens" if path == "responses" else "max_tokens"] = 8
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{base_url}/{path}", json=body)
        metrics = (await http.get(f"{base_url.removesuffix('/v1')}/metrics")).text
    assert answer.status_code == 200
    assert ("lost" in answer.text) != is_whole
    counted = re.findall(rf'outrider_requests.*operation="/v1/{path}",status="(\d+)"}} 1.0', metrics)
    assert counted == ["200" if is_whole else "503"]


@pytest.mark.usefixtures("impatient")
async def test_leaving_after_a_sign_of_life_stops_it(base_url: str, backend: FakeBackend) -> None:
    backend.step_s = 30.0
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stream": True}
    async with httpx.AsyncClient() as http, http.stream("POST", f"{base_url}/completions", json=body) as response:
        async for line in response.aiter_lines():
            assert line == ": keep-alive"
            break
    await backend.until_idle()
    assert backend.num_closed == 1


async def test_leaving_a_whole_answer_stops_it(base_url: str, backend: FakeBackend) -> None:
    backend.step_s = 0.05
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "n": 2}
    async with httpx.AsyncClient(timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{base_url}/completions", json=body)
    await backend.until_idle()


async def test_a_stop_string_stops_the_engine_too(base_url: str, backend: FakeBackend) -> None:
    backend.step_s = 0.01
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stop": "d"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{base_url}/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "bc"
    assert backend.num_running == 0
